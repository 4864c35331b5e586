"""Products of matrices: by whichever library, in every layout, what float64 says, and differentiable where asked."""

import itertools

import pytest
import torch
from torch import Tensor

from xkfac.curvature import products
from xkfac.curvature.gram import add_gram, mirror_
from xkfac.curvature.moments import _sum

ROWS, INNER, COLUMNS = 96, 640, 160


def layouts(rows: int, columns: int, groups: int) -> dict[str, Tensor]:
    """Return random matrices [groups, rows, columns] that lie in memory in different ways."""
    wide, tall = torch.randn(groups, rows + 5, columns + 3), torch.randn(groups, columns + 3, rows + 5)
    return {
        "rows": torch.randn(groups, rows, columns),
        "columns": torch.randn(groups, columns, rows).mT,
        "rows with gaps": wide[:, 2 : rows + 2, 1 : columns + 1],
        "columns with gaps": tall[:, 1 : columns + 1, 2 : rows + 2].mT,
        "every second": torch.randn(groups, rows, 2 * columns)[:, :, ::2],
        "one for all": torch.randn(1, rows, columns).expand(groups, -1, -1),
    }


def close(found: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether a float32 product is within the rounding of its sums, against which terms do not cancel."""
    bound = first.double().abs() @ second.double().abs()
    return bool(((found - first.double() @ second.double()).abs() <= 3e-6 * bound).all())


@pytest.fixture(params=["as it is", "without"])
def _onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without":
        monkeypatch.setattr(products, "_onednn", lambda: None)


@pytest.mark.usefixtures("_onednn")
@pytest.mark.parametrize("groups", [1, 3])
def test_a_product_is_that_of_float64_in_every_layout(groups: int) -> None:
    pairs = itertools.product(layouts(ROWS, INNER, groups).items(), layouts(INNER, COLUMNS, groups).items())
    for (one, first), (other, second) in pairs:
        assert ROWS * INNER * COLUMNS >= products._LARGE
        assert close(products.product(first, second), first, second), (one, other)
        total = torch.randn(groups, ROWS, 2 * COLUMNS)[:, :, ::2]
        before = total.double()
        products.add_product_(total, first, second, -0.5)
        assert close((before - total) * 2, first, second), (one, other)


def test_a_gram_matrix_of_many_stripes_has_the_same_numbers_by_rows_and_by_columns() -> None:
    vectors = torch.randn(2, 300, 500)
    for own in (vectors, vectors.mT.contiguous().mT):
        total = torch.zeros(2, 300, 300)
        add_gram(total, own, 0.25)
        assert close(4 * mirror_(total), own, own.mT)


def test_gradients_flow_through_a_large_product() -> None:
    first, second = torch.randn(1, ROWS, INNER, requires_grad=True), torch.randn(1, INNER, COLUMNS)
    products.product(first, second).sum().backward()
    assert first.grad is not None
    assert torch.allclose(first.grad, second.sum(2).expand(1, ROWS, INNER), atol=1e-3)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_without_a_large_product_or_float32_nothing_is_handed_over() -> None:
    large = torch.randn(1, 256, 256)
    assert (products._by_onednn(large, large) is None) == (products._onednn() is None)
    for tensor in (large.double(), large[:, :8, :8], large.bfloat16()):
        assert products._by_onednn(tensor, tensor) is None
    with torch.backends.mkldnn.flags(enabled=False):
        assert products._by_onednn(large, large) is None


def test_a_sum_over_axes_lies_in_memory_as_its_terms_do() -> None:
    image = torch.randn(4, 3, 5, 7, dtype=torch.float64)
    for order in itertools.permutations(range(4)):
        blocks = image.permute(order)
        for axes in [(1,), (2,), (1, 2)]:
            total = _sum(blocks, axes)
            assert torch.allclose(total, blocks.sum(axes, keepdim=True), rtol=1e-12)
            kept = [axis for axis in range(4) if axis not in axes]
            assert sorted(kept, key=total.stride) == sorted(kept, key=blocks.stride)
