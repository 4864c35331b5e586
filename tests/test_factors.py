"""Groupings and forms of the factors against sums written out block by block, and the unrolling of convolutions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import oracles
from xkfac.errors import UnitError
from xkfac.factors import GROUPINGS, KFAC, Gram, Moments, batch_gradient, unit_gradients, unit_inputs, unroll
from xkfac.units import Convolution, find_units

GROUPS, SIZE, POSITIONS, COLUMNS, ROWS = 2, 4, 3, 3, 2


def data(batches=3, size=SIZE, positions=POSITIONS):
    x = [torch.randn(GROUPS, size, positions, COLUMNS).double() + 2 for _ in range(batches)]
    g = [torch.randn(GROUPS, size, positions, ROWS).double() for _ in range(batches)]
    return x, g


def collect(x, g, levels, form):
    moments = Moments("unit", levels, form)
    for a, b in zip(x, g, strict=True):
        moments.add_inputs(a)
        moments.add_gradients(b)
    return moments.terms(ROWS, sum(a.shape[1] for a in x))


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


def test_mean_by_location_needs_the_same_locations():
    x, _ = data(batches=1)
    wide, _ = data(batches=1, positions=5)
    moments = Moments("conv1", GROUPINGS["paper"], "mean")
    moments.add_inputs(x[0])
    with pytest.raises(UnitError, match=r"unit 'conv1' has 5 positions in one batch and 3 in another.*pooled"):
        moments.add_inputs(wide[0])


@settings(max_examples=40, deadline=None)
@given(
    rank=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    size=st.integers(5, 6),
)
def test_unrolled_input_times_weight_is_the_convolution(rank, kernel, stride, padding, dilation, groups, size):
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
    conv = layer(4, 2, kernel, stride, padding, dilation, groups, bias=False).double()
    x = torch.randn(2, 4, *[size] * rank).double()
    geometry = Convolution((kernel,) * rank, (stride,) * rank, ((padding, padding),) * rank, (dilation,) * rank)
    patches = unroll(x, geometry, groups)
    weight = conv.weight.reshape(groups, 2 // groups, -1)
    expected = conv(x)
    ours = (patches @ weight.mT.unsqueeze(1)).permute(1, 0, 3, 2).reshape(expected.shape)
    torch.testing.assert_close(ours, expected)


def test_unroll_equals_the_loop_over_entries():
    conv = nn.Conv2d(4, 2, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    x = torch.randn(2, 4, 6, 5)
    geometry = Convolution((3, 2), (2, 1), ((1, 1), (2, 2)), (1, 2))
    assert torch.equal(unroll(x, geometry, 2), oracles.patches(conv, x))


def test_channels_last_inputs_are_unrolled_alike():
    geometry = Convolution((3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1))
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(unroll(x.to(memory_format=torch.channels_last), geometry, 1), unroll(x, geometry, 1))


def test_unit_formats():
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Tanh(), nn.BatchNorm2d(4), nn.Flatten(2), nn.Linear(4, 3))
    units = {unit.name: unit for unit in find_units(net, torch.randn(2, 2, 2, 2)).units}
    h = torch.randn(2, 4, 2, 2)
    assert torch.equal(unit_inputs(units["2"], h, h.dtype), oracles.unit_inputs(net[2], h, True))
    assert torch.equal(unit_gradients(units["2"], h, h.dtype), oracles.unit_outputs(net[2], h))
    assert torch.equal(unit_gradients(units["0"], h, h.dtype), oracles.unit_outputs(net[0], h))
    flat = torch.randn(2, 4, 4)
    assert torch.equal(unit_inputs(units["4"], flat, h.dtype), oracles.unit_inputs(net[4], flat, True))


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_gram_adds_many_and_few_vectors_alike_and_is_exactly_symmetric(sizes, seed):
    torch.manual_seed(seed)
    gram, expected = Gram(), 0
    for size in sizes:
        blocks = torch.randn(2, size, 1, 3).double()
        gram.add(blocks, 1 / size)
        expected = expected + torch.einsum("gnsi,gnsj->gij", blocks, blocks) / size
    mean = gram.mean(4)
    torch.testing.assert_close(mean, expected / 4)
    assert torch.equal(mean, mean.mT)


def test_a_gram_of_nothing_is_none():
    assert Gram().mean(1) is None
