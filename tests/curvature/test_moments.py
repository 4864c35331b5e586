"""Groupings and forms of the factors against sums written out block by block; images against their patches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import oracles
from xkfac.curvature.moments import GROUPINGS, KFAC, Draw, Moments, batch_gradient, unit_gradients
from xkfac.curvature.patches import Patches
from xkfac.errors import UnitError
from xkfac.model.units import Unit, find_units

GROUPS, SIZE, POSITIONS, COLUMNS, ROWS = 2, 4, 3, 3, 2


def data(batches=3, size=SIZE, positions=POSITIONS):
    x = [torch.randn(GROUPS, size, positions, COLUMNS).double() + 2 for _ in range(batches)]
    g = [torch.randn(GROUPS, size, positions, ROWS).double() for _ in range(batches)]
    return x, g


def made(levels, form, shape=(1, ROWS, COLUMNS), **options):
    """Return moments of a unit whose inputs are its images."""
    return Moments(Patches(Unit("unit", "linear", shape)), levels, form, **options)


def collect(x, g, levels, form, **options):
    moments = made(levels, form, (len(x[0]), ROWS, COLUMNS), **options)
    for a, b in zip(x, g, strict=True):
        moments.inputs.add(a.permute(1, 0, 3, 2).flatten(1, 2))
        moments.add_gradients(b)
    return moments.terms(sum(a.shape[1] for a in x))


def outer_mean(vectors):
    """Return the mean of v v^T over a list of vectors [groups, F]."""
    return sum(torch.einsum("gi,gj->gij", v, v) for v in vectors) / len(vectors)


def outer_sum(vectors):
    return outer_mean(vectors) * len(vectors)


def test_mean_form_of_the_paper_s_grouping():
    """H = S (x) H' + M (x) H'' with S the covariance and M = sum_s mu_s mu_s^T (fact 13)."""
    x, g = data()
    everything = torch.cat(x, 1)
    mu = everything.mean(1)
    elements = [(everything[:, n, s] - mu[:, s]) for n in range(3 * SIZE) for s in range(POSITIONS)]
    covariance = outer_mean(elements) * POSITIONS
    h_prime = sum(outer_sum([b[:, n, s] for n in range(SIZE) for s in range(POSITIONS)]) for b in g)
    h_second = sum(outer_sum([b[:, :, s].sum(1) for s in range(POSITIONS)]) for b in g)
    fine, coarse = collect(x, g, GROUPINGS["paper"], "mean")
    torch.testing.assert_close(fine.left, covariance)
    torch.testing.assert_close(fine.right, h_prime / (3 * SIZE * POSITIONS))
    torch.testing.assert_close(coarse.dense_left, outer_sum([mu[:, s] for s in range(POSITIONS)]))
    torch.testing.assert_close(coarse.right, h_second / (3 * SIZE * POSITIONS))


def test_pooled_grouping_takes_locations_as_examples():
    x, g = data()
    everything = torch.cat(x, 1)
    mu = everything.mean((1, 2))
    fine, coarse = collect(x, g, GROUPINGS["pooled"], "mean")
    deviations = [everything[:, n, s] - mu for n in range(3 * SIZE) for s in range(POSITIONS)]
    torch.testing.assert_close(fine.left / POSITIONS, outer_mean(deviations))
    torch.testing.assert_close(coarse.dense_left / POSITIONS, outer_mean([mu]))
    per_example = outer_sum([b.sum((1, 2)) for b in g]) / (3 * SIZE)
    torch.testing.assert_close(coarse.right * POSITIONS, per_example)


def test_hierarchical_grouping_splits_the_input_in_three():
    """Within an example, between example means, and the global mean (fact 16)."""
    x, g = data()
    everything = torch.cat(x, 1)
    of_example, mu = everything.mean(2), everything.mean((1, 2))
    within, between, top = collect(x, g, GROUPINGS["hierarchical"], "mean")
    inside = [everything[:, n, s] - of_example[:, n] for n in range(3 * SIZE) for s in range(POSITIONS)]
    torch.testing.assert_close(within.left / POSITIONS, outer_mean(inside))
    examples = [of_example[:, n] - mu for n in range(3 * SIZE)]
    torch.testing.assert_close(between.left / POSITIONS, outer_mean(examples))
    torch.testing.assert_close(top.dense_left / POSITIONS, outer_mean([mu]))
    elements = outer_sum([b[:, n, s] for b in g for n in range(SIZE) for s in range(POSITIONS)])
    torch.testing.assert_close(within.right * POSITIONS, elements / (3 * SIZE))
    sums = outer_sum([b[:, n].sum(1) for b in g for n in range(SIZE)])
    torch.testing.assert_close(between.right * POSITIONS, sums / (3 * SIZE))


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_levels_add_up_to_the_batch_gradient(grouping):
    """The identity behind every grouping: sum g x^T = sum over levels of block sums times deviations of block means."""
    x, g = data(batches=1)
    total, means, sums = 0, [], []
    for level in GROUPINGS[grouping]:
        means.append(x[0].mean(level, keepdim=True) if level else x[0])
        sums.append(g[0].sum(level, keepdim=True) if level else g[0])
    for k, (mean, block) in enumerate(zip(means, sums, strict=True)):
        deviation = mean - means[k + 1] if k + 1 < len(means) else mean
        total = total + torch.einsum("gnsr,gnsd->grd", block, deviation)
    torch.testing.assert_close(total, batch_gradient(x[0], g[0]))
    torch.testing.assert_close(total, torch.einsum("gnsr,gnsd->grd", g[0], x[0]))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    positions=st.integers(1, 3),
    grouping=st.sampled_from(sorted(GROUPINGS)),
    form=st.sampled_from(["paper", "mean"]),
    seed=st.integers(0, 10**6),
)
def test_factors_are_positive_semi_definite_and_add_up_to_kfac_s_inputs(sizes, positions, grouping, form, seed):
    torch.manual_seed(seed)
    x = [torch.randn(1, size, positions, COLUMNS) * 10 + 100 for size in sizes]
    g = [torch.randn(1, size, positions, ROWS) for size in sizes]
    terms = collect(x, g, GROUPINGS[grouping], form)
    (kfac,) = collect(x, g, KFAC, "paper")
    for term in terms:
        for factor in (term.dense_left, term.right):
            values = torch.linalg.eigvalsh(factor.double())
            assert values.min() >= -1e-5 * values.abs().max()
    torch.testing.assert_close(sum(term.dense_left for term in terms), kfac.left, rtol=1e-4, atol=1e-1)


def test_batches_of_one_and_two_examples():
    x, g = data(batches=1, size=1)
    fine, coarse = collect(x, g, GROUPINGS["paper"], "paper")
    (kfac,) = collect(x, g, KFAC, "paper")
    assert fine.left.abs().max() == 0
    torch.testing.assert_close(coarse.left, kfac.left)
    torch.testing.assert_close(coarse.right, kfac.right)
    x, g = data(batches=1, size=2)
    fine, coarse = collect(x, g, GROUPINGS["paper"], "paper")
    (kfac,) = collect(x, g, KFAC, "paper")
    torch.testing.assert_close(fine.right, 2 * kfac.right - coarse.right)


def test_short_batches_count_by_their_examples():
    x, g = data(batches=1, size=5)
    halves = collect([x[0][:, :3], x[0][:, 3:]], [g[0][:, :3], g[0][:, 3:]], KFAC, "paper")
    whole = collect(x, g, KFAC, "paper")
    torch.testing.assert_close(halves[0].left, whole[0].left)
    torch.testing.assert_close(halves[0].right, whole[0].right)


def test_mean_form_is_exact_far_from_the_origin():
    """The covariance is not the difference of two large numbers: a mean of 10^4 leaves it right in float32."""
    x = [torch.randn(1, 64, 1, 3) + 1e4 for _ in range(4)]
    g = [torch.randn(1, 64, 1, 2) for _ in range(4)]
    fine, _ = collect(x, g, GROUPINGS["paper"], "mean")
    truth = torch.cat(x, 1)[0, :, 0].double().T.cov(correction=0)
    torch.testing.assert_close(fine.left[0].double(), truth, rtol=2e-2, atol=2e-2)


def inputs(unit, *calls):
    """Return x [groups, N, S, D] of the calls of a unit."""
    patches = Patches(unit)
    return patches.unrolled(patches.image(calls, calls[0].dtype))


def test_unit_formats():
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.BatchNorm2d(4), nn.Flatten(2), nn.Linear(4, 3))
    units = {unit.name: unit for unit in find_units(net, torch.randn(2, 2, 2, 2)).units}
    h = torch.randn(2, 4, 2, 2)
    assert torch.equal(inputs(units["2"], h), oracles.unit_inputs(net[2], h, True))
    assert torch.equal(unit_gradients(units["2"], h, h.dtype), oracles.unit_outputs(net[2], h))
    assert torch.equal(unit_gradients(units["0"], h, h.dtype), oracles.unit_outputs(net[0], h))
    flat = torch.randn(2, 4, 4)
    assert torch.equal(inputs(units["4"], flat), oracles.unit_inputs(net[4], flat, True))


def of_images(net, images, levels, form):
    """Return the input factors of a net's first unit from its images, and from their patches written out."""
    (unit, *_) = find_units(net, images[0]).units
    patches = Patches(unit)
    moments = Moments(patches, levels, form)
    for image in images:
        moments.inputs.add(patches.image([image], image.dtype))
    ours = [term.dense_left for term in moments.terms(sum(len(image) for image in images))]
    return ours, oracles.input_factors([inputs(unit, image.double()) for image in images], levels, form)


LAYERS = {
    "same": lambda: nn.Conv2d(16, 3, 3, padding=1),
    "even kernel, padded to the same size": lambda: nn.Conv2d(16, 2, (4, 2), padding="same", bias=False),
    "circular": lambda: nn.Conv2d(16, 2, 3, padding=1, padding_mode="circular"),
    "reflected": lambda: nn.Conv2d(16, 2, 3, padding=1, padding_mode="reflect"),
    "strided": lambda: nn.Conv2d(16, 2, 3, stride=2, padding=1),
    "one tap": lambda: nn.Conv2d(16, 2, 1, stride=2),
    "dilated": lambda: nn.Conv2d(16, 2, 3, dilation=2),
    "grouped": lambda: nn.Conv2d(32, 4, 3, padding=2, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "line": lambda: nn.Conv1d(16, 2, 5, padding=1),
    "volume": lambda: nn.Conv3d(16, 2, 3, padding=1),
    "linear": lambda: nn.Linear(5, 2),
    "positions": lambda: nn.Linear(5, 2),
    "norm": lambda: nn.BatchNorm2d(3),
}


@pytest.mark.parametrize("form", ["paper", "mean"])
@pytest.mark.parametrize("levels", [KFAC, *GROUPINGS.values()])
@pytest.mark.parametrize("layer", LAYERS)
def test_images_have_the_factors_of_their_patches(layer, levels, form):
    net = nn.Sequential(LAYERS[layer]()).double().eval()
    shape = {"linear": (5,), "positions": (4, 5), "norm": (3, 4, 3), "line": (16, 7), "volume": (16, 3, 4, 2)}.get(
        layer
    )
    shape = shape or (net[0].in_channels, 6, 5)
    images = [torch.randn(size, *shape).double() + 3 for size in (4, 1, 3)]
    ours, theirs = of_images(net, images, levels, form)
    assert len(ours) == len(theirs) == (1 if levels == KFAC else len(levels))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        assert torch.equal(one, one.mT)


@pytest.mark.parametrize("grouping", ["pooled", "hierarchical"])
def test_images_of_several_sizes_share_one_mean(grouping):
    images = [torch.randn(3, 16, *size).double() for size in ((5, 4), (2, 3), (5, 4), (1, 1))]
    net = nn.Sequential(nn.Conv2d(16, 2, 3, padding=1)).double()
    ours, theirs = of_images(net, images, GROUPINGS[grouping], "mean")
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_images_of_another_size_have_no_mean_by_location():
    net = nn.Sequential(nn.Conv2d(16, 2, 3, padding=1)).double()
    images = [torch.randn(3, 16, *size).double() for size in ((5, 4), (2, 3))]
    with pytest.raises(UnitError, match=r"unit '0' has 6 positions in one batch and 20 in another.*pooled"):
        of_images(net, images, GROUPINGS["paper"], "mean")


def test_deviations_of_images_are_exact_far_from_the_origin():
    """Where the example means carry all but a little of the variance, float32 still has the little."""
    torch.manual_seed(1)
    images = [torch.randn(8, 16, 6, 6) * 0.1 + torch.randn(8, 16, 1, 1) + 100 for _ in range(2)]
    net = nn.Sequential(nn.Conv2d(16, 2, 3))
    for levels in GROUPINGS.values():
        (ours, *_), (theirs, *_) = of_images(net, images, levels, "mean")
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=3e-4 * float(theirs.abs().max()))


@pytest.mark.parametrize("levels", [KFAC, *GROUPINGS.values()])
def test_gradients_of_one_position_that_are_held_count_as_if_each_pass_were_taken(levels, monkeypatch):
    """Passes that fill the room, exceed it, end in between, or count another weight."""
    torch.manual_seed(0)
    monkeypatch.setattr("xkfac.curvature.moments.HELD", 7)
    sizes = [(3, 1.0), (5, 1.0), (9, 1.0), (2, 0.5)]
    passes = [(torch.randn(1, size, 1, 3).double(), weight) for size, weight in sizes]
    moments = made(levels, "mean")
    for g, weight in passes:
        moments.add_gradients(g, Draw(weight))
    for level, found in zip(levels, moments._gradient_factors(), strict=True):
        sums = [(g.sum(level, keepdim=True) if level else g, weight) for g, weight in passes]
        expected = sum(weight * torch.einsum("gnsi,gnsj->gij", g, g) for g, weight in sums)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("positions", "draws"), [(1, 8), (4, 8), (5, 13), (9, 2), (3, 32)])
@pytest.mark.parametrize("form", ["paper", "mean"])
@pytest.mark.parametrize("levels", [KFAC, *GROUPINGS.values()])
def test_draws_share_the_positions_of_the_finest_level(levels, form, positions, draws):
    """Where all draws are alike, their shares make up the whole; the coarser levels have all of every draw."""
    torch.manual_seed(0)
    g = [torch.randn(2, 6, positions, 3).double() for _ in range(draws)]
    same, one, each, every = (made(levels, form) for _ in range(4))
    for place in range(draws):
        same.add_gradients(g[0], Draw(1 / draws, place, draws))
        each.add_gradients(g[place], Draw(1 / draws, place, draws))
        every.add_gradients(g[place], Draw(1 / draws))
    one.add_gradients(g[0])
    for found, wanted in zip(same._gradient_factors(), one._gradient_factors(), strict=True):
        torch.testing.assert_close(found, wanted)
    for found, wanted in list(zip(each._gradient_factors(), every._gradient_factors(), strict=True))[1:]:
        torch.testing.assert_close(found, wanted)


def test_of_many_draws_each_takes_half_of_the_positions():
    g = torch.arange(5.0).view(1, 1, 5, 1)
    whole = [Draw(1 / 3, place, 3).share_of(g) for place in range(3)]
    assert [(part.flatten().tolist(), counted) for part, counted in whole] == [([0, 1, 2, 3, 4], 1)] * 3
    taken = [Draw(1 / 5, place, 5).share_of(g) for place in range(3)]
    assert [part.flatten().tolist() for part, _ in taken] == [[0, 1], [2, 3, 4], [0, 1]]
    assert [counted for _, counted in taken] == [5 / 3, 5 / 2, 5 / 3]
    assert Draw(1 / 32, 6, 32).share_of(g)[0].flatten().tolist() == [0, 1]
    assert Draw(1 / 32, 6, 32).share_of(g[:, :, :1])[0].flatten().tolist() == [0]


@pytest.mark.parametrize("form", ["mean", "paper"])
@pytest.mark.parametrize("positions", [1, 3])
def test_without_coupling_examples_and_batches_have_one_gradient_factor(form, positions):
    """Written out: deviations within an example with g_ns, means of an example with sum_s g_ns, from all examples."""
    x, g = data(positions=positions)
    terms = collect(x, g, GROUPINGS["hierarchical"], form, coupled=False)
    everything, gradients = torch.cat(x, 1), torch.cat(g, 1)
    means = everything.mean(2)
    torch.testing.assert_close(terms[-1].left, outer_mean(means.unbind(1)) * positions)
    if form == "mean":
        torch.testing.assert_close(terms[-1].right, outer_mean(gradients.sum(2).unbind(1)) / positions)
    if positions == 1:
        assert len(terms) == 1
        return
    inside = everything - means[:, :, None]
    torch.testing.assert_close(terms[0].left, outer_mean(inside.flatten(1, 2).unbind(1)) * positions)


def test_without_coupling_the_terms_that_are_left_are_the_three_of_exact_labels():
    """One example per backward pass, as with exact labels: sums over a batch are those over an example."""
    x, g = data(batches=6, size=1)
    three = collect(x, g, GROUPINGS["hierarchical"], "mean")
    two = collect(x, g, GROUPINGS["hierarchical"], "mean", coupled=False)
    assert (len(three), len(two)) == (3, 2)

    def dense(terms):
        return sum(torch.einsum("gij,gkl->gikjl", term.dense_left, term.right) for term in terms)

    torch.testing.assert_close(dense(two), dense(three))
