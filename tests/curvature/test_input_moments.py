"""Moments from one point for all batches, against sums over all inputs written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import oracles
from xkfac.curvature import input_moments
from xkfac.curvature.input_moments import Deviations, Rows
from xkfac.curvature.moments import GROUPINGS, KFAC
from xkfac.curvature.patches import Patches
from xkfac.model.units import find_units


@pytest.mark.parametrize("from_origin", [False, True])
@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_rows_that_wait_are_the_sums_over_all_rows(from_origin, sizes, seed):
    """Batches that fill the room, exceed it, or end in between."""
    torch.manual_seed(seed)
    batches = [torch.randn(size, 3).double() + 5 for size in sizes]
    origin = torch.randn(1, 3).double() if from_origin else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(input_moments, "ROOM", 7)
        rows = Rows(batches[0].unsqueeze(2))
    for batch in batches:
        rows.add(batch.unsqueeze(2), None if origin is None else origin.unsqueeze(2))
    every = torch.cat(batches) - (0 if origin is None else origin)
    total = torch.empty(1, 3, 3).double()
    rows.into(total, 0.5)
    torch.testing.assert_close(total[0], every.T @ every / 2)
    torch.testing.assert_close(rows.sums(), every.sum(0, keepdim=True))
    assert torch.equal(total, total.mT)
    drift = rows.settle(len(every))
    rows.into(total, 1.0)
    torch.testing.assert_close(drift, every.mean(0, keepdim=True))
    torch.testing.assert_close(total[0], every.T.cov(correction=0) * len(every) if len(every) > 1 else 0 * total[0])
    assert rows.sums().abs().max() == 0


NETS = {
    "linear": (nn.Linear(5, 2), (5,)),
    "without a bias": (nn.Linear(5, 2, bias=False), (5,)),
    "positions": (nn.Linear(5, 2), (3, 5)),
    "convolution": (nn.Conv2d(16, 2, 3, padding=1), (16, 5, 4)),
    "grouped": (nn.Conv2d(32, 4, 3, stride=2, groups=2, bias=False), (32, 6, 5)),
}


@pytest.mark.parametrize("layer", NETS)
def test_settled_deviations_are_the_covariance_by_location(layer):
    """S = sum (x - mu)(x - mu)^T and mu, wherever the first batch's mean was."""
    module, shape = NETS[layer]
    net = nn.Sequential(module).double()
    images = [torch.randn(size, *shape).double() + shift for size, shift in ((2, 40), (5, 1), (3, 2))]
    (unit,) = find_units(net, images[0]).units
    patches = Patches(unit)
    taken = Deviations(patches, GROUPINGS["paper"])
    for image in images:
        taken.add(patches.image([image], image.dtype))
    x = torch.cat([patches.unrolled(patches.image([image], image.dtype)) for image in images], 1)
    first = x[:, :2].mean(1, keepdim=True)
    (of,) = taken._of.values()
    torch.testing.assert_close(patches.unrolled(of.origin), first)
    torch.testing.assert_close(taken.means(10).root, x.mean(1))
    torch.testing.assert_close(taken.sum(), torch.einsum("gnsi,gnsj->gij", x - first, x - first))
    for _ in range(2):  # the second time there is nowhere to move
        taken.settle(10)
        mean = x.mean(1, keepdim=True)
        torch.testing.assert_close(taken.means(10).root, mean[:, 0])
        torch.testing.assert_close(taken.sum(0.1), torch.einsum("gnsi,gnsj->gij", x - mean, x - mean) / 10)
        assert torch.equal(taken.sum(), taken.sum().mT)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("order", [(1, 4, 1, 2), (3, 1)])
def test_kfac_of_a_layer_with_one_position_in_some_batches_and_several_in_others(bias, order):
    net = nn.Sequential(nn.Linear(5, 2, bias=bias)).double()
    inputs = [torch.randn(3, positions, 5).double() + 1 for positions in order]
    (unit,) = find_units(net, inputs[0]).units
    patches = Patches(unit)
    taken, images = Deviations(patches, KFAC), [patches.image([input], input.dtype) for input in inputs]
    for image in images:
        taken.add(image)
    expected = oracles.input_factors([patches.unrolled(image) for image in images], KFAC, "paper")
    torch.testing.assert_close(taken.factors(3 * len(order)), expected)


def test_a_mean_by_location_is_kept_of_the_image_alone():
    """Between batches there is nothing of the size of the unrolled means [S, D], nor of the factor where lags do."""
    net = nn.Sequential(nn.Conv2d(16, 2, 3, padding=1))
    image = torch.randn(4, 16, 20, 20)
    (unit,) = find_units(net, image).units
    taken = Deviations(Patches(unit), GROUPINGS["paper"])
    for _ in range(2):
        taken.add(image)
    (of,) = taken._of.values()
    held = [value for value in vars(of).values() if isinstance(value, torch.Tensor)]
    assert [tuple(tensor.shape) for tensor in held] == [(1, 16, 20, 20), (), (1, 16, 20, 20)]


@pytest.fixture
def rounding_images(monkeypatch):
    """Have this CPU round images for their products, as a GPU may."""
    monkeypatch.setattr(input_moments, "rounds", lambda image: image.dtype == torch.float32)
    monkeypatch.setattr(input_moments, "rounded", lambda image: image.bfloat16())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("shift", "from_zero"), [(0.0, True), (3.0, True), (300.0, False)])
def test_rounded_images_are_taken_from_their_mean_where_it_is_far(shift, from_zero, layout, rounding_images):
    """The covariance is that of the images to the digits of bfloat16, and as good as positive semi-definite."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 2, 3, padding=1))
    images = [(torch.randn(40, 16, 6, 6) + shift).to(memory_format=layout) for _ in range(3)]
    (unit,) = find_units(net, images[0]).units
    patches = Patches(unit)
    taken = Deviations(patches, GROUPINGS["paper"])
    for image in images:
        taken.add(image)
    assert taken._of[torch.Size([6, 6])].from_zero == from_zero
    assert taken._gram._of[torch.Size([6, 6])].like.dtype == torch.bfloat16
    taken.settle(120)
    x = patches.unrolled(torch.cat(images).double())[0]
    mean = x.mean(0, keepdim=True)
    wanted = torch.einsum("nsd,nse->de", x - mean, x - mean)
    found = taken.sum()[0].double()
    assert (found - wanted).norm() < 3e-3 * wanted.norm()
    torch.testing.assert_close(taken.means(120).root[0].double(), mean[0], rtol=3e-3, atol=3e-3)
    values = torch.linalg.eigvalsh(found)
    assert values.min() > -1e-5 * values.max()


@pytest.mark.parametrize("shift", [0.0, 300.0])
@pytest.mark.parametrize("grouping", ["pooled", "hierarchical"])
def test_rounded_images_within_and_between_examples(grouping, shift, rounding_images):
    """Means over positions are of the images as they were rounded, so that what they leave is positive."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(16, 2, 3, padding=1, bias=False))
    images = [torch.randn(40, 16, 4, 4) + 3 * torch.randn(40, 16, 1, 1) + shift for _ in range(3)]
    (unit,) = find_units(net, images[0]).units
    patches, levels = Patches(unit), GROUPINGS[grouping]
    taken = Deviations(patches, levels)
    for image in images:
        taken.add(image)
    root = taken.means(120).root
    exact = oracles.input_factors([patches.unrolled(image.double()) for image in images], levels, "mean")
    for found, wanted in zip([*taken.factors(120), root.mT @ root], exact, strict=True):
        assert (found.double() - wanted).norm() < 6e-3 * wanted.norm()
        values = torch.linalg.eigvalsh(found.double())
        assert values.min() > -1e-5 * values.max()
