"""Units of one shape on top of each other, and the products of their curvature at once."""

import pytest
import torch

from tests.helpers.penalties import CURVATURES
from tests.helpers.setups import Alike, data, randomise
from xkfac import estimate
from xkfac.curvature.blocks import Kronecker, Term
from xkfac.model.merged_weight import bind
from xkfac.model.units import find_units
from xkfac.penalty.layout import Group, Products, Rounded, Stack, group, in_bfloat16


def test_units_of_one_shape_are_one_group():
    net = Alike()
    units = find_units(net, torch.randn(4, 6)).units
    groups = group(list(bind(net, units).values()))
    sizes = sorted((each.role, len(each.members)) for each in groups)
    assert sizes == [("merged", 2), ("merged", 3), ("plain", 2), ("plain", 2), ("whole", 1)]
    flat = torch.zeros(max(each.end for each in groups))
    for each in groups:
        assert each.start % 16 == 0
        for one in each.members:
            one.whole(flat).add_(1)
    assert flat.max() == 1
    assert flat.sum() == sum(one.rows * one.columns for each in groups for one in each.members)


@pytest.mark.parametrize("row", [1, 8])
@pytest.mark.parametrize("curvature", CURVATURES)
def test_products_of_stacked_blocks_are_those_of_each(curvature, row):
    net = randomise(Alike()).double()
    for parameter in net.parameters():
        parameter.requires_grad_()
    made = estimate(net, [(x.double(), y) for x, y in data()], **CURVATURES[curvature])
    groups = group(list(bind(net, made.coverage.units).values()), row)
    products = Products(made.curvature, groups)
    stacked = [place for _, place in products._parts if isinstance(place, Group)]
    assert len(stacked) >= (2 if curvature == "cross-layer" else 4)
    if curvature in ("paper", "mean"):
        assert any(isinstance(block, Stack) for block, _ in products._parts)
    members = [one for each in groups for one in each.members]
    moved = torch.zeros(max(each.end for each in groups), dtype=torch.float64)
    for one in members:
        one.whole(moved).normal_()
        assert one.width % row == 0
    out = torch.ones_like(moved)
    products.add(moved, out)
    rest = torch.ones_like(moved)
    for one in members:
        one.whole(rest).copy_(one.whole(out))
    assert torch.equal(out, rest)  # what lies between rows stays as it is
    wanted = made.curvature.product({one.name: one.whole(moved).clone() for one in members})
    for one in members:
        torch.testing.assert_close(one.whole(out), 1 + wanted[one.name], rtol=1e-10, atol=1e-11, msg=one.name)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("low_rank", [True, False])
def test_rounded_products_of_small_integers_are_exact(groups, low_rank):
    """They and their sums have few digits, so that bfloat16 rounds none of them."""

    def integers(*shape):
        return torch.randint(-2, 3, shape).float()

    lefts = integers(groups, 8, 8), integers(groups, 2, 8) if low_rank else integers(groups, 8, 8)
    block = Kronecker(
        (Term(lefts[0], integers(groups, 3, 3)), Term(lefts[1], integers(groups, 3, 3), low_rank=low_rank))
    )
    v = torch.zeros(groups, 3, 8)
    v[:, 1, ::4] = 1.0
    found = integers(groups, 3, 8)
    wanted = found + block.product(v)
    coarse = in_bfloat16(block)
    assert isinstance(coarse, Rounded)
    assert all(tensor.dtype == torch.bfloat16 for tensor in (*sum(coarse.lefts, ()), coarse.right))
    coarse.add_product(v.bfloat16(), found)
    assert torch.equal(found, wanted)
    assert not torch.equal(wanted, torch.zeros_like(wanted))


def test_products_are_rounded_where_torch_may_round_and_on_a_gpu_alone():
    net = randomise(Alike())
    made = estimate(net, data(), form="paper")
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        products = Products(made.curvature, group(list(bind(net, made.coverage.units).values())))
    finally:
        torch.set_float32_matmul_precision(before)
    assert not any(isinstance(block, Rounded) for block, _ in products._parts)


def test_a_rounded_factor_keeps_its_smallest_eigenvalues():
    """Of a factor with one eigenvalue a million times the others, rounded once, many would be negative."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(48, 48, dtype=torch.float64))[0]
    values = torch.full((48,), 1e-4, dtype=torch.float64)
    values[-1] = 1e2
    left = (basis * values @ basis.T).float()[None]
    assert torch.linalg.eigvalsh(left.bfloat16().double()).min() < -1e-3
    block = in_bfloat16(Kronecker((Term(left, torch.eye(4)[None]),)))
    high, low = (part.double() for part in block.lefts[0])
    assert torch.linalg.eigvalsh(high + low).min() > -2e-5
    weak = basis[:, :4].T.float()[None].contiguous()
    out = torch.zeros(1, 4, 48)
    block.add_product(weak.bfloat16(), out)
    assert out.abs().max() < 0.2  # what is left is the rounding of the displacement itself
