"""Averages of factors: one product with the trace of the exact sum, however a scale is split."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import xkfac
from tests.helpers.memories import VARIANTS, ConvNet, consolidated, learn, make
from xkfac.curvature.blocks import Corrected, KhatriRao, Kronecker, Term, eigenbasis, symmetrised
from xkfac.curvature.estimate import Estimate

weights = st.floats(0.01, 5.0)
scales = st.floats(-5.0, 5.0).map(lambda power: 10.0**power)
quick = settings(max_examples=30, deadline=None)


def close(a, b, rtol=1e-9):
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * max(float(a.abs().max()), float(b.abs().max())) + 1e-300)


class Draw:
    """Random factors of one shape and kind."""

    def __init__(self, seed, groups=2, columns=6, rows=3, terms=2, positions=0, homogeneous=True):
        self.generator = torch.Generator().manual_seed(seed)
        self.groups, self.columns, self.rows, self.terms = groups, columns, rows, terms
        self.positions, self.homogeneous = positions, homogeneous

    def randn(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def psd(self, size, rank=None):
        root = self.randn(self.groups, rank or size, size)
        return symmetrised(root.mT @ root)

    def covariance(self):
        """Return that of inputs, whose homogeneous coordinate does not vary."""
        matrix = self.psd(self.columns)
        if self.homogeneous:
            matrix[:, -1] = matrix[:, :, -1] = 0
        return matrix

    def means(self):
        root = self.randn(self.groups, self.positions, self.columns)
        if self.homogeneous:
            root[..., -1] = 1
        return root

    def kronecker(self):
        if not self.positions:
            return Kronecker(tuple(Term(self.psd(self.columns), self.psd(self.rows, 2)) for _ in range(self.terms)))
        finer = [Term(self.covariance(), self.psd(self.rows)) for _ in range(self.terms - 1)]
        return Kronecker((*finer, Term(self.means(), self.psd(self.rows, 2), low_rank=True)))


draws = st.builds(
    Draw,
    seed=st.integers(0, 2**31),
    groups=st.integers(1, 3),
    columns=st.integers(2, 6),
    rows=st.integers(1, 4),
    terms=st.integers(2, 3),
    positions=st.integers(0, 2),
    homogeneous=st.booleans(),
)


def rescaled(block, factors):
    """Return a block with scales moved from its gradient to its input factors."""
    pairs = zip(block.terms, factors, strict=True)
    return Kronecker(tuple(Term(t.left * (c**0.5 if t.low_rank else c), t.right / c, t.low_rank) for t, c in pairs))


def trace(block):
    return block.dense().diagonal(dim1=-2, dim2=-1).sum(-1)


def even(term):
    """Return the factors of a term, its size evenly in both, and that size, per group."""
    a, h = (m.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] for m in (term.dense_left, term.right))
    return term.dense_left * (h / a).sqrt(), term.right * (a / h).sqrt(), (a * h).sqrt()


@given(draw=draws, factors=st.lists(scales, min_size=6, max_size=6), own=weights, others=weights)
@quick
def test_averages_do_not_depend_on_how_a_scale_is_split(draw, factors, own, others):
    a, b = draw.kronecker(), draw.kronecker()
    expected = a.average(b, own, others, homogeneous=draw.homogeneous).dense()
    a, b = rescaled(a, factors[: draw.terms]), rescaled(b, factors[3 : 3 + draw.terms])
    close(a.average(b, own, others, homogeneous=draw.homogeneous).dense(), expected)


@given(draw=draws, factor=scales, own=weights, others=weights)
@quick
def test_averages_of_equal_blocks_are_that_block_times_the_sum_of_weights(draw, factor, own, others):
    block = draw.kronecker()
    same = rescaled(block, [factor] * draw.terms)
    close(block.average(same, own, others, homogeneous=draw.homogeneous).dense(), (own + others) * block.dense())


@given(draw=draws, own=weights, others=weights)
@quick
def test_averages_are_those_of_factors_of_equal_size_with_the_trace_of_the_sum(draw, own, others):
    """Of every pair of terms; where means are kept by roots, the trace of the block."""
    a, b = draw.kronecker(), draw.kronecker()
    averaged, exact = a.average(b, own, others, homogeneous=draw.homogeneous), a.scale(own).join(b.scale(others))
    close(trace(averaged), trace(exact))
    assert [t.left.shape for t in averaged.terms] == [t.left.shape for t in a.terms]
    if draw.positions == 0:
        for ours, first, second in zip(averaged.terms, a.terms, b.terms, strict=True):
            (left, right, size), (other_left, other_right, other_size) = even(first), even(second)
            pair = Kronecker((Term(own * left + others * other_left, own * right + others * other_right),))
            scale = (own * size**2 + others * other_size**2) / (own * size + others * other_size) ** 2
            close(Kronecker((ours,)).dense(), scale * pair.dense())


@given(draw=draws, factors=st.lists(scales, min_size=6, max_size=6), own=weights, others=weights)
@quick
def test_averages_are_positive_semi_definite_term_by_term(draw, factors, own, others):
    a, b = rescaled(draw.kronecker(), factors[: draw.terms]), rescaled(draw.kronecker(), factors[3 : 3 + draw.terms])
    for term in a.average(b, own, others, homogeneous=draw.homogeneous).terms:
        for factor in (term.dense_left, term.right):
            values = torch.linalg.eigvalsh(factor)
            assert float(values.min()) >= -1e-12 * float(values.max())
            assert torch.equal(factor, factor.mT)


@given(draw=draws, factors=st.lists(scales, min_size=15, max_size=15))
@quick
def test_averages_of_many_tasks_stay_what_averages_of_two_are(draw, factors):
    """Whatever scales the tasks have: the mean trace, roots of the same size, and a scatter without a bias."""
    blocks = [draw.kronecker() for _ in range(5)]
    total, split = blocks[0], rescaled(blocks[0], factors[: draw.terms])
    for task in range(1, 5):
        shares = task / (task + 1), 1 / (task + 1)
        total = total.average(blocks[task], *shares, homogeneous=draw.homogeneous)
        other = rescaled(blocks[task], factors[3 * task : 3 * task + draw.terms])
        split = split.average(other, *shares, homogeneous=draw.homogeneous)
    close(trace(total), torch.stack([trace(block) for block in blocks]).mean(0))
    close(split.dense(), total.dense(), 1e-8)
    assert [term.low_rank for term in total.terms] == [term.low_rank for term in blocks[0].terms]
    if draw.positions and draw.homogeneous:
        for term in total.terms[:-1]:
            assert not term.left[:, -1].any()
            assert not term.left[:, :, -1].any()


@given(draw=draws)
@quick
def test_a_bias_without_curvature_stays_without(draw):
    """In front of a BN H'' is zero, and only the finer terms are left, which have no homogeneous coordinate."""
    draw.positions, draw.homogeneous = max(draw.positions, 1), True
    a, b = (
        Kronecker((*block.terms[:-1], Term(block.terms[-1].left, torch.zeros_like(block.terms[-1].right), True)))
        for block in (draw.kronecker(), draw.kronecker())
    )
    averaged = a.average(b, 0.6, 0.4, homogeneous=True)
    assert not averaged.diagonal()[:, :, -1].any()
    assert bool(averaged.diagonal()[:, :, :-1].all())


def test_means_of_two_tasks_give_their_common_mean_and_the_scatter_between_them():
    """By hand: inputs with means 1 and 3, H' = I and H'' = 3 I in both tasks, weights 3/4 and 1/4."""

    def block(mean, covariance):
        left = torch.tensor([[[covariance, 0.0], [0.0, 0.0]]]).double()
        root = torch.tensor([[[mean, 1.0]]]).double()
        return Kronecker((Term(left, torch.eye(2)[None].double()), Term(root, 3 * torch.eye(2)[None].double(), True)))

    fine, coarse = block(1.0, 2.0).average(block(3.0, 6.0), 0.75, 0.25, homogeneous=True).terms
    # Shares of the covariances, 3/4 sqrt(2) and 1/4 sqrt(8), are 3/5 and 2/5; those of the means, 3/4 sqrt(2) and
    # 1/4 sqrt(10), are divided by 2 and 10, the traces of M.
    p, q = 0.75 * 2**0.5, 0.25 * 10**0.5
    v, w = p / 2, q / 10
    mean = (v + 3 * w) / (v + w)
    torch.testing.assert_close(coarse.left[0, 0] / coarse.left[0, 0, 1], torch.tensor([mean, 1.0]).double())
    scatter = v * w / (v + w) * 4 / (p + q)
    means = 0.75 * 2 + 0.25 * 10  # times 6, the trace of H'': of which this share is scatter, and the rest is kept
    torch.testing.assert_close(fine.left[0, 0, 0] * fine.right[0], (3.0 + 3 * means * scatter) * torch.eye(2).double())
    kept = coarse.left.square().sum() * coarse.right[0]
    torch.testing.assert_close(kept, 3 * means * (1 - scatter) * torch.eye(2).double())


@pytest.mark.parametrize("positions", [0, 1])
@pytest.mark.parametrize("homogeneous", [True, False])
def test_a_task_without_gradients_or_inputs_counts_nothing(positions, homogeneous):
    draw = Draw(3, positions=positions, homogeneous=homogeneous)
    a, b = draw.kronecker(), draw.kronecker()
    nothing = [
        Kronecker(tuple(Term(t.left, torch.zeros_like(t.right), t.low_rank) for t in b.terms)),
        Kronecker(tuple(Term(torch.zeros_like(t.left), t.right, t.low_rank) for t in b.terms)),
        b.scale(0.0),
    ]
    for zero in nothing:
        close(a.average(zero, 0.7, 0.3, homogeneous=homogeneous).dense(), 0.7 * a.dense())
        close(zero.average(a, 0.3, 0.7, homogeneous=homogeneous).dense(), 0.7 * a.dense())
        for other in nothing:
            both = zero.average(other, 0.5, 0.5, homogeneous=homogeneous)
            assert not both.dense().any()
            close(both.average(a, 0.5, 0.5, homogeneous=homogeneous).dense(), 0.5 * a.dense())
    assert not a.average(b, 0.0, 0.0, homogeneous=homogeneous).dense().any()


def test_averages_in_float32_bear_factors_of_very_different_size():
    """Guards a fault that products of traces would have: they leave the range of float32 long before the factors do."""
    a = Kronecker((Term(torch.full((1, 1, 1), 1e15), torch.full((1, 1, 1), 1e-18)),))
    b = Kronecker((Term(torch.full((1, 1, 1), 1e-18), torch.full((1, 1, 1), 1e15)),))
    torch.testing.assert_close(a.average(b, 0.5, 0.5).dense(), torch.full((1, 1, 1), 1e-3))
    tiny = Kronecker((Term(torch.full((1, 1, 1), 1e-25), torch.full((1, 1, 1), 1e-10)),))
    torch.testing.assert_close(tiny.average(tiny, 0.5, 0.5).dense(), tiny.dense(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("positions", [0, 1])
def test_averages_are_in_the_wider_dtype_of_the_two(positions):
    draw = Draw(4, positions=positions)
    a, b = draw.kronecker(), draw.kronecker()
    narrow = Kronecker(tuple(Term(t.left.float(), t.right.float(), t.low_rank) for t in a.terms))
    for one, other in ((narrow, b), (b, narrow)):
        averaged = one.average(other, 0.5, 0.5, homogeneous=True)
        assert {tensor.dtype for term in averaged.terms for tensor in (term.left, term.right)} == {torch.float64}
        close(trace(averaged), (trace(a) + trace(b)) / 2, 1e-6)


def joint(draw, columns, rows, positions):
    """Return a Khatri-Rao product over units with so many columns and rows, a homogeneous coordinate in each."""
    ends = torch.tensor(columns).cumsum(0) - 1
    covariance = draw.psd(sum(columns))
    covariance[:, ends] = covariance[:, :, ends] = 0
    means = draw.randn(1, max(positions, 1), sum(columns))
    means[:, :, ends] = 1
    last = (
        Term(means, draw.psd(sum(rows)), low_rank=True)
        if positions
        else Term(draw.psd(sum(columns)), draw.psd(sum(rows)))
    )
    return KhatriRao((Term(covariance, draw.psd(sum(rows))), last), rows, columns)


def moved(block, factors):
    """Return a Khatri-Rao product with a scale per unit moved from H to A."""
    c = torch.tensor(factors, dtype=torch.float64).repeat_interleave(torch.tensor(block.columns))
    d = torch.tensor(factors, dtype=torch.float64).repeat_interleave(torch.tensor(block.rows))
    terms = [
        Term(t.left * c if t.low_rank else c[:, None] * t.left * c, t.right / d[:, None] / d, t.low_rank)
        for t in block.terms
    ]
    return KhatriRao(tuple(terms), block.rows, block.columns)


units = st.lists(st.tuples(st.integers(2, 4), st.integers(1, 3)), min_size=1, max_size=3)


@given(
    seed=st.integers(0, 2**31),
    sizes=units,
    positions=st.integers(0, 2),
    factors=st.lists(st.floats(0.01, 100), min_size=6, max_size=6),
    own=weights,
    others=weights,
)
@quick
def test_averages_across_layers(seed, sizes, positions, factors, own, others):
    """No split of a scale per unit matters, a unit's own block is the average of own blocks, and all is PSD."""
    columns, rows = tuple(c for c, _ in sizes), tuple(r for _, r in sizes)
    draw, ones = Draw(seed, groups=1), [True] * len(sizes)
    a, b = (joint(draw, columns, rows, positions) for _ in range(2))
    averaged = a.average(b, own, others, homogeneous=ones)
    first, second = moved(a, factors[: len(sizes)]), moved(b, factors[3 : 3 + len(sizes)])
    close(first.average(second, own, others, homogeneous=ones).dense(), averaged.dense())
    close(a.average(first, own, others, homogeneous=ones).dense(), (own + others) * a.dense())
    for place in range(len(sizes)):
        alone = a.own_block(place).average(b.own_block(place), own, others, homogeneous=True)
        close(averaged.own_block(place).dense(), alone.dense())
    for term in averaged.terms:
        for factor in (term.dense_left, term.right):
            assert float(torch.linalg.eigvalsh(factor).min()) >= -1e-12 * float(factor.abs().max()) * sum(columns)
    close(trace(averaged), own * trace(a) + others * trace(b))


def test_blocks_between_layers_are_averaged_with_their_units_weights():
    """By the definition: A = sum_t C_t A_t C_t with A_t of unit trace per unit, times sqrt(s_l s_l')."""
    columns, rows, own, others = (3, 2), (2, 2), 0.7, 0.3
    draw = Draw(5, groups=1)
    a, b = (joint(draw, columns, rows, 0) for _ in range(2))
    averaged = a.average(b, own, others)
    for ours, first, second in zip(averaged.terms, a.terms, b.terms, strict=True):
        at = [(slice(0, 3), slice(0, 2)), (slice(3, 5), slice(2, 4))]
        traces = [[(t.left[0, c, c].trace(), t.right[0, r, r].trace()) for c, r in at] for t in (first, second)]
        weighted = list(zip((own, others), traces, strict=True))
        shares = [[w * (a * h).sqrt() for a, h in each] for w, each in weighted]
        totals = [one + other for one, other in zip(*shares, strict=True)]
        sizes = [sum(w * each[l][0] * each[l][1] for w, each in weighted) for l in range(2)]
        for (l, (c, r)), (k, (d, s)) in itertools.product(enumerate(at), enumerate(at)):
            left = right = 0
            for t, term in enumerate((first, second)):
                p = (shares[t][l] / totals[l] * shares[t][k] / totals[k]).sqrt()
                left = left + p * term.left[0, c, d] / (traces[t][l][0] * traces[t][k][0]).sqrt()
                right = right + p * term.right[0, r, s] / (traces[t][l][1] * traces[t][k][1]).sqrt()
            found = torch.kron(ours.left[0, c, d].contiguous(), ours.right[0, r, s].contiguous())
            close(found, (sizes[l] * sizes[k]).sqrt() * torch.kron(left, right))


@given(seed=st.integers(0, 2**31), factor=scales, own=weights, others=weights)
@quick
def test_the_eigenbasis_of_corrected_blocks_does_not_depend_on_how_a_scale_is_split(seed, factor, own, others):
    draw = Draw(seed)
    a, b = (eigenbasis(draw.psd(6), draw.psd(3)) for _ in range(2))
    a, b = (Corrected(c.left, c.right, c.left_values, c.right_values, c.scales.square()) for c in (a, b))
    split = Corrected(b.left, b.right, factor * b.left_values, b.right_values / factor, b.scales)
    averaged = a.average(b, own, others)
    close(a.average(split, own, others).dense(), averaged.dense(), 1e-6)
    close(trace(averaged), own * trace(a) + others * trace(b))
    close(a.average(a, own, others).dense(), (own + others) * a.dense())


FACTORED = ["xkfac", "kfac", "paper", "pooled", "hierarchical", "mean-hierarchical", "unmerged", "fixed-bn"]


def trace_ratios(net, memory, data, **options):
    """Return by unit the trace of a finished memory over that of the exact sum."""
    _, averaged, _ = learn(net, memory, data, **options)
    _, exact, _ = learn(net, memory, data, keep="all", **options)
    found = {name: block.diagonal().sum() for name, block in averaged.curvature.blocks.items()}
    return {name: float(total / exact.curvature.blocks[name].diagonal().sum()) for name, total in found.items()}


@pytest.mark.parametrize("size", [4, 12])
@pytest.mark.parametrize("variant", FACTORED)
def test_a_target_of_another_resolution_adds_its_curvature(variant, size):
    net, first, _ = make("conv", dtype=torch.float64)
    memory = consolidated(net, first, variant, draws=1)
    target = [(torch.randn(8, 2, size, size, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(3)]
    ratios = trace_ratios(net, memory, target)
    assert len(ratios) >= 5
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=1e-9)


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_a_layer_with_one_position_in_one_task_has_no_curvature_within_its_examples(sizes):
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, 4), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    first, second = (
        [(torch.randn(8, 2, size, size, dtype=torch.float64), torch.randint(0, 3, (8,)))] for size in sizes
    )
    memory = xkfac.consolidate(net.double(), first)
    _, averaged, moved = learn(net, memory, second, seed=1)
    new = xkfac.estimate(moved, second, memory.method.settings, seed=1).curvature
    terms, *both = (one.blocks["0"].terms for one in (averaged.curvature, memory.curvature, new))
    assert [len(one) for one in both] == ([1, 2] if sizes == (4, 8) else [2, 1])
    (within,) = (one[:1] for one in both if len(one) == 2)
    close(Kronecker(terms[:1]).dense(), Kronecker(within).dense() / 2)
    for one in ("0", "4"):
        close(trace(averaged.curvature.blocks[one]), (trace(memory.curvature.blocks[one]) + trace(new.blocks[one])) / 2)


@pytest.mark.parametrize("variant", [*FACTORED, "diagonal"])
def test_a_target_of_larger_inputs_adds_its_curvature(variant):
    net, first, second = make("mlp", dtype=torch.float64)
    memory = consolidated(net, first, variant, draws=1)
    ratios = trace_ratios(net, memory, [(10 * x, y) for x, y in second])
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=1e-9)


@pytest.mark.parametrize("variant", sorted(set(VARIANTS) - {"fine-tuning"}))
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_importances_act_once(kind, variant):
    """Importances of (1, 1) give the sum of two equal memories, twice each of them."""
    net, data, _ = make(kind, dtype=torch.float64)
    memory = consolidated(net, data, variant, draws=1)
    same = Estimate(memory.curvature, memory.coverage, memory.examples)
    twice = memory.extend(net, same, weights=(1.0, 1.0))
    for name, block in twice.curvature.blocks.items():
        close(block.dense(), 2 * memory.curvature.blocks[name].dense())
    if memory.curvature.joint is not None:
        close(twice.curvature.joint.dense(), 2 * memory.curvature.joint.dense())


def test_importances_of_a_learner_act_once():
    net, first, second = make("mlp", dtype=torch.float64)
    memory = consolidated(net, first, "xkfac")
    learner = xkfac.Learner(net, memory, importance=(1, 1))
    learner.begin(second)
    x, y = second[0]
    learner.objective(F.cross_entropy(net(x), y))
    finished = learner.finish(second)
    new = consolidated(net, second, "xkfac")
    for name, block in finished.curvature.blocks.items():
        expected = trace(memory.curvature.blocks[name]) + trace(new.curvature.blocks[name])
        close(trace(block), expected)


def test_a_bias_in_front_of_a_bn_has_no_curvature_after_many_tasks():
    net, *tasks = make("mlp", dtype=torch.float64)
    memory = xkfac.consolidate(net, tasks[0], "unmerged")
    for number in range(1, 4):
        new = xkfac.estimate(net, [(x * number, y) for x, y in tasks[1]], merge=False)
        memory = memory.extend(net, new, weights=(number / (number + 1), 1 / (number + 1)))
    for name in ("0", "3"):
        diagonal = memory.curvature.blocks[name].diagonal()
        assert float(diagonal[..., -1].max()) < 1e-20 * float(diagonal[..., :-1].max())


def test_units_without_a_bias_average_their_means_too():
    """Nothing says how the means of a unit without a homogeneous coordinate are scaled; the trace is exact."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    data = [[(torch.rand(8, 12).double() * size, torch.randint(0, 3, (8,))) for _ in range(3)] for size in (1, 20)]
    memory = xkfac.consolidate(net, data[0], "xkfac")
    assert memory.curvature.blocks["0"].terms[-1].low_rank
    ratios = trace_ratios(net, memory, data[1])
    assert ratios == pytest.approx({"0": 1.0, "2": 1.0}, rel=1e-9)


def test_a_target_of_another_number_of_positions_has_dense_means():
    """Two roots of different size have no common root; their products are averaged as matrices."""
    net = ConvNet().double()
    batches = [[(torch.randn(8, 2, s, s).double(), torch.randint(0, 3, (8,))) for _ in range(2)] for s in (3, 4)]
    memory = xkfac.consolidate(net, batches[0], "xkfac", grouping="pooled")
    assert memory.curvature.blocks["first"].terms[-1].low_rank
    ratios = trace_ratios(net, memory, batches[1])
    assert ratios == pytest.approx(dict.fromkeys(ratios, 1.0), rel=1e-9)
