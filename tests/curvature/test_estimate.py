"""The estimator against brute force: factors, the exact Fisher, unbiasedness, and what the curvature must equal."""

import itertools
import math

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import xkfac
from tests import oracles
from xkfac.curvature.blocks import Corrected, Diagonal
from xkfac.model import likelihood

CLASSES = 3


def head(features):
    return nn.Linear(features, CLASSES)


def linear_net(bias=True):
    return nn.Sequential(
        nn.Linear(4, 5, bias=bias),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Linear(5, 3, bias=bias),
        nn.BatchNorm1d(3),
        nn.Tanh(),
        head(3),
    )


def conv_net(**options):
    conv = nn.Conv2d(2, 4, **{"kernel_size": 3, **options})
    return nn.Sequential(conv, nn.BatchNorm2d(4), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), head(16))


def preactivation_net():
    return nn.Sequential(
        nn.Conv2d(2, 3, 1, bias=False),
        nn.Tanh(),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2),
        nn.BatchNorm2d(2),
        nn.Flatten(),
        head(2 * 9),
    )


def conv1d_net():
    return nn.Sequential(
        nn.Conv1d(2, 3, 3, padding="same", bias=False), nn.BatchNorm1d(3), nn.Tanh(), nn.Flatten(), head(15)
    )


def conv3d_net():
    return nn.Sequential(
        nn.Conv3d(1, 2, 2, stride=(1, 2, 1)), nn.BatchNorm3d(2), nn.Tanh(), nn.Flatten(), head(2 * 2 * 1 * 2)
    )


# name: network, shape of an example, (layer, output) of the units to look at, homogeneous or not
CASES = {
    "linear": (linear_net, (4,), [(0, 1), (3, 4), (6, 6)], True),
    "linear without bias": (lambda: linear_net(False), (4,), [(0, 1), (3, 4)], True),
    "conv": (conv_net, (2, 5, 5), [(0, 1), (5, 5)], True),
    "conv stride": (lambda: conv_net(stride=2, padding=1, bias=False), (2, 5, 5), [(0, 1)], True),
    "conv of NumPy's numbers": (
        lambda: conv_net(stride=numpy.int64(2), padding=(numpy.int64(1), 0), groups=numpy.int64(1)),
        (2, 5, 5),
        [(0, 1)],
        True,
    ),
    "conv dilation": (lambda: conv_net(dilation=2, padding=2), (2, 5, 5), [(0, 1)], True),
    "conv groups": (lambda: conv_net(groups=2, padding=(1, 0)), (2, 5, 5), [(0, 1)], True),
    "conv reflect": (lambda: conv_net(padding=1, padding_mode="reflect"), (2, 4, 4), [(0, 1)], True),
    "conv same": (lambda: conv_net(kernel_size=2, padding="same"), (2, 4, 4), [(0, 1)], True),
    "conv1d": (conv1d_net, (2, 5), [(0, 1)], True),
    "conv3d": (conv3d_net, (1, 3, 3, 3), [(0, 1)], True),
    "lone BN": (preactivation_net, (2, 4, 4), [(2, 2), (4, 5)], True),
    "layer alone": (preactivation_net, (2, 4, 4), [(0, 0)], False),
}


def case(name, sizes=(3, 3)):
    build, shape, units, homogeneous = CASES[name]
    net = build().double()
    return net, [torch.randn(size, *shape).double() for size in sizes], units, homogeneous


def exact(net, batches, **options):
    """Return the curvature with the expectation over labels exact, in the paper's form where there is a choice."""
    if options.get("kind", "xkfac") == "xkfac":
        options = {"form": "paper", **options}
    return xkfac.estimate(net, batches, labels="exact", **options).curvature


@pytest.mark.parametrize("name", CASES)
def test_exact_factors_equal_brute_force(name):
    net, batches, units, homogeneous = case(name)
    paper, kfac = exact(net, batches), exact(net, batches, kind="kfac")
    for layer, output in units:
        a, a_prime, h_prime, h_second = oracles.factors(net, batches, layer, output, homogeneous)
        fine, coarse = paper.blocks[str(layer)].terms
        (only,) = kfac.blocks[str(layer)].terms
        size = batches[0].shape[0]
        for ours, theirs in (
            (only.left, a),
            (only.right, h_prime),
            (fine.left, a - a_prime),
            (fine.right, (size * h_prime - h_second) / (size - 1)),
            (coarse.left, a_prime),
            (coarse.right, h_second),
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)
        closed = oracles.xkfac(a, a_prime, h_prime, h_second, size)
        torch.testing.assert_close(paper.blocks[str(layer)].dense(), closed, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["xkfac", "kfac", "diagonal", "corrected"])
@pytest.mark.parametrize("name", ["linear", "conv", "lone BN"])
def test_all_random_signs_together_are_the_exact_expectation(name, kind, monkeypatch):
    """Every pattern of signs once: inter-example terms and all, since those of different examples cancel."""
    net, (batch,), _, _ = case(name, sizes=(2,))
    classes = net(batch).shape[1]
    # Twice each, one after the other, because every second draw takes the other half of the positions for H'.
    patterns = [p for p in itertools.product((-1.0, 1.0), repeat=2 * classes) for _ in range(2)]
    rows = iter(patterns * (2 if kind == "corrected" else 1))
    monkeypatch.setattr(likelihood, "random_signs", lambda like, generator: like.new_tensor(next(rows)).view_as(like))
    form = {"form": "paper"} if kind == "xkfac" else {}
    found = xkfac.estimate(net, [batch], kind, labels="signs", draws=len(patterns), **form).curvature
    for unit, block in exact(net, [batch], kind=kind).blocks.items():
        torch.testing.assert_close(found.blocks[unit].dense(), block.dense(), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_diagonal_is_the_exact_fisher_s(name):
    net, batches, units, homogeneous = case(name)
    curvature = exact(net, batches, kind="diagonal")
    for layer, output in units:
        fisher = oracles.fisher(net, batches, layer, output, homogeneous)
        block = curvature.blocks[str(layer)]
        assert isinstance(block, Diagonal)
        torch.testing.assert_close(
            block.dense().diagonal(dim1=1, dim2=2), fisher.diagonal(dim1=1, dim2=2), atol=1e-10, rtol=1e-10
        )


@pytest.mark.parametrize("name", ["linear", "conv groups", "lone BN"])
def test_corrected_has_the_exact_variances_in_the_eigenbasis_of_partial_traces(name):
    net, batches, units, homogeneous = case(name)
    curvature = exact(net, batches, kind="corrected")
    for layer, output in units:
        fisher = oracles.fisher(net, batches, layer, output, homogeneous)
        block = curvature.blocks[str(layer)]
        assert isinstance(block, Corrected)
        rows, columns = block.right.shape[1], block.left.shape[1]
        blocks = fisher.reshape(-1, columns, rows, columns, rows)
        left, right = (torch.einsum(sums, blocks) for sums in ("giaja->gij", "giaib->gab"))
        of_left, of_right = (values.sum(1)[:, None, None] for values in (block.left_values, block.right_values))
        torch.testing.assert_close(of_right * block.left @ torch.diag_embed(block.left_values) @ block.left.mT, left)
        torch.testing.assert_close(of_left * block.right @ torch.diag_embed(block.right_values) @ block.right.mT, right)
        eigenvectors = oracles.dense(block.left, block.right)
        variances = torch.diagonal(eigenvectors.mT @ fisher @ eigenvectors, dim1=1, dim2=2)
        torch.testing.assert_close(block.scales.mT.flatten(1), variances, atol=1e-10, rtol=1e-10)
    for block in xkfac.estimate(net, batches, "corrected", draws=3).curvature.blocks.values():
        traces = block.left_values.sum(1), block.right_values.sum(1)
        torch.testing.assert_close(traces[0], traces[1])
        torch.testing.assert_close(traces[0] * traces[1], block.scales.sum((1, 2)))


def test_fisher_of_a_single_position_head_needs_no_approximation_in_h():
    """Fact 5: behind the last BN no example touches another's loss, so H = H' = H''."""
    net, batches, _, _ = case("linear")
    _, _, h_prime, h_second = oracles.factors(net, batches, 6, 6)
    torch.testing.assert_close(h_prime, h_second)
    _, _, h_prime, h_second = oracles.factors(net, batches, 3, 4)
    torch.testing.assert_close(h_prime, h_second)
    _, _, h_prime, h_second = oracles.factors(net, batches, 0, 1)
    assert (h_prime - h_second).norm() > 0.1 * h_prime.norm()


def test_free_parameters_get_the_exact_diagonal():
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.PReLU(), head(4)).double()
    batches = [torch.randn(3, 4).double(), torch.randn(2, 4).double()]
    curvature = exact(net, batches)
    expected = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for x in batches:
        log_p = net(x).log_softmax(1)
        for n in range(len(x)):
            for label in range(CLASSES):
                gradients = torch.autograd.grad(-log_p[n, label], list(net.parameters()), retain_graph=True)
                for name, gradient in zip(expected, gradients, strict=True):
                    expected[name] += log_p[n, label].exp().detach() * gradient.square() / 5
    for name in ("1.weight", "1.bias", "3.weight"):
        torch.testing.assert_close(curvature.blocks[name].values.flatten(), expected[name].flatten())


def test_an_embedding_with_sparse_gradients_has_the_curvature_of_a_dense_one():
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.EmbeddingBag(7, 4, sparse=sparse), head(4)), torch.randint(7, (5, 3))
        found.append(exact(net, [x]).blocks["0.weight"].values)
    torch.testing.assert_close(found[1], found[0])
    assert found[0].any()


@pytest.mark.parametrize("kind", ["xkfac", "kfac", "diagonal"])
def test_sampled_estimate_is_unbiased_with_error_falling_as_one_over_the_root_of_the_draws(kind):
    net, batches, _, _ = case("linear", sizes=(6,))
    truth = exact(net, batches, kind=kind)

    def flat(curvature):
        return torch.cat([t.flatten() for _, t in curvature.tensors()])

    def error(draws, seed):
        form = {"form": "paper"} if kind == "xkfac" else {}
        sampled = xkfac.estimate(net, batches, kind=kind, draws=draws, seed=seed, **form).curvature
        return ((flat(sampled) - flat(truth)).norm() / flat(truth).norm()).item()

    few = sum(error(16, seed) for seed in range(8)) / 8
    many = sum(error(1024, seed) for seed in range(8)) / 8
    assert many < 0.25 * few
    assert few / many == pytest.approx(math.sqrt(1024 / 16), rel=0.35)


def test_one_backward_pass_of_the_sum_has_the_right_expectation_where_a_pass_a_class_has_not():
    """Moving all labels together, one class after the other, counts cross terms that are no part of the Fisher."""
    net, batches, _, _ = case("linear", sizes=(6,))
    truth = oracles.factors(net, batches, 0, 1)[2]
    sampled = xkfac.estimate(net, batches, kind="kfac", draws=4096).curvature.blocks["0"].terms[0].right
    _, outputs = oracles.run(net, batches[0])
    p = outputs[-1].detach().softmax(1)
    together = 0
    for label in range(CLASSES):
        loss = (p[:, label].sqrt() * -outputs[-1].log_softmax(1)[:, label]).sum()
        (g,) = torch.autograd.grad(loss, outputs[1], retain_graph=True)
        together = together + g.T @ g / 6
    assert (sampled - truth).norm() < 0.1 * truth.norm()
    assert (together - truth).norm() > 0.3 * truth.norm()


def bn_free():
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4), nn.Tanh(), head(4)).double()


def dense_blocks(curvature):
    return {name: block.dense() for name, block in curvature.blocks.items()}


def test_xkfac_equals_kfac_without_bn():
    net, batches = bn_free(), [torch.randn(4, 2, 4, 4).double()]
    ours, theirs = dense_blocks(exact(net, batches)), dense_blocks(exact(net, batches, kind="kfac"))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-12, rtol=1e-10)


def test_xkfac_equals_kfac_in_evaluation_mode():
    net, batches, _, _ = case("linear")
    options = {"statistics": "population"}
    ours, theirs = (
        dense_blocks(exact(net, batches, **options)),
        dense_blocks(exact(net, batches, kind="kfac", **options)),
    )
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-12, rtol=1e-10)
    assert (dense_blocks(exact(net, batches))["0"] - theirs["0"]).norm() > 0.05 * theirs["0"].norm()


@pytest.mark.parametrize("kind", ["xkfac", "kfac", "diagonal", "corrected"])
def test_estimate_does_not_depend_on_the_batch_size_without_bn(kind):
    net, x = bn_free(), torch.randn(12, 2, 4, 4).double()
    whole = dense_blocks(exact(net, [x], kind=kind))
    for size in (1, 5, 6):
        parts = dense_blocks(exact(net, list(x.split(size)), kind=kind))
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name], atol=1e-11, rtol=1e-9)


def test_bias_in_front_of_a_bn_has_no_curvature_linear():
    net, batches, _, _ = case("linear")
    ours = exact(net, batches, merge=False).blocks["0"].diagonal()[..., -1]
    kfac = exact(net, batches, merge=False, kind="kfac").blocks["0"].diagonal()[..., -1]
    assert ours.abs().max() < 1e-12
    assert kfac.min() > 1e-3


@pytest.mark.parametrize("form", ["paper", "mean"])
def test_bias_in_front_of_a_bn_has_no_curvature_convolution(form):
    net, batches, _, _ = case("conv")

    def bias_curvature(grouping):
        curvature = exact(net, batches, merge=False, form=form, grouping=grouping)
        return curvature.blocks["0"].diagonal()[..., -1].abs().max()

    assert bias_curvature("pooled") < 1e-12
    assert bias_curvature("paper") > 1e-4


def test_cross_layer_blocks_are_the_khatri_rao_product_of_the_definitions():
    net, batches, _, _ = case("linear", sizes=(4, 4))
    curvature = exact(net, batches, cross_layer=True)
    size, places = 4, [(0, 1), (3, 4), (6, 6)]
    a, a_prime, h_prime, h_second = 0, 0, 0, 0
    for x in batches:
        inputs, _ = oracles.run(net, x)
        stacked = torch.cat([oracles.unit_inputs(net[layer], inputs[layer], True)[0, :, 0] for layer, _ in places], 1)
        p = oracles.example_gradients(net, x, *places[0])[0]
        g = torch.cat([oracles.example_gradients(net, x, *place)[1][:, :, 0, :, 0] for place in places], 3)
        a, a_prime = a + stacked.T @ stacked / 8, a_prime + torch.outer(stacked.mean(0), stacked.mean(0)) / 2
        h_prime = h_prime + torch.einsum("nc,ncmr,ncmq->rq", p, g, g) / 8
        h_second = h_second + torch.einsum("nc,ncmr,ncpq->rq", p, g, g) / 8
    expected = []
    columns, rows = (5, 6, 4), (5, 3, 3)
    starts_c, starts_r = (0, 5, 11), (0, 5, 8)
    for i in range(3):
        line = []
        for j in range(3):
            left = [m[starts_c[i] :, starts_c[j] :][: columns[i], : columns[j]] for m in (a, a_prime)]
            right = [m[starts_r[i] :, starts_r[j] :][: rows[i], : rows[j]] for m in (h_prime, h_second)]
            line.append(oracles.xkfac(left[0][None], left[1][None], right[0][None], right[1][None], size)[0])
        expected.append(torch.cat(line, 1))
    expected = torch.cat(expected)
    torch.testing.assert_close(curvature.joint.dense(), expected, atol=1e-10, rtol=1e-10)
    assert torch.linalg.eigvalsh(expected).min() > -1e-10
    moves = [torch.randn(1, r, c).double() for r, c in zip(rows, columns, strict=True)]
    flat = torch.cat([move[0].T.flatten() for move in moves])
    products = torch.cat([move[0].T.flatten() for move in curvature.joint.product(moves)])
    torch.testing.assert_close(products, expected @ flat)


@pytest.mark.parametrize("calls", [2, 3])
def test_a_layer_called_several_times_has_its_calls_as_positions(calls):
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.Linear(3, 3), head(3)

        def forward(self, x):
            for _ in range(calls - 1):
                x = torch.tanh(self.layer(x))
            return self.head(self.layer(x))

    net, x = Repeated().double(), torch.randn(5, 3).double()
    diagonal = exact(net, [x], kind="diagonal").blocks["layer"].values
    log_p = net(x).log_softmax(1)
    expected = 0
    for n in range(5):
        for label in range(CLASSES):
            w, b = torch.autograd.grad(-log_p[n, label], [net.layer.weight, net.layer.bias], retain_graph=True)
            expected = expected + log_p[n, label].exp().detach() * torch.cat([w, b[:, None]], 1).square() / 5
    torch.testing.assert_close(diagonal[0], expected)
    (term,) = exact(net, [x], kind="kfac").blocks["layer"].terms
    expected = 0
    for _ in range(calls):
        one = torch.cat([x, torch.ones(5, 1).double()], 1).detach()
        expected, x = expected + one.T @ one / 5, torch.tanh(net.layer(x))
    torch.testing.assert_close(term.left[0], expected)


def test_a_call_that_no_gradient_reaches_has_zeros_of_its_own_number_of_positions():
    class OneOfTwo(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 3, 3), head(3)

        def forward(self, x):
            used, unused = self.conv(x[:, :, :4, :4]), self.conv(x)
            return self.head(used.tanh().mean((2, 3))) + 0 * unused.detach().sum()

    net, x = OneOfTwo().double(), torch.randn(3, 2, 6, 6).double()
    alone = nn.Sequential(net.conv, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.head)
    small = x[:, :, :4, :4]
    diagonal = exact(net, [x], kind="diagonal").blocks["conv"].values
    torch.testing.assert_close(diagonal, exact(alone, [small], kind="diagonal").blocks["0"].values)
    # 16 positions more without a gradient, of which H' is the mean beside the 4 that have one.
    (term,), (wanted,) = (
        exact(one, [inputs], kind="kfac").blocks[name].terms
        for one, inputs, name in ((net, x, "conv"), (alone, small, "0"))
    )
    torch.testing.assert_close(term.right, wanted.right * 4 / 20)


@pytest.mark.parametrize("kind", ["xkfac", "kfac", "diagonal"])
def test_nothing_behind_the_first_unit_is_differentiated(kind):
    """The gradient at its output is all that is needed: neither its BN nor any weight has a backward pass."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    net, x = conv_net(), torch.randn(6, 2, 5, 5)
    net.insert(3, nn.Conv2d(4, 4, 1))
    net.insert(4, nn.BatchNorm2d(4))
    with Watch():
        xkfac.estimate(net, [x, x], kind, draws=1)
    assert seen.count(torch.ops.aten.native_batch_norm_backward) == 2  # the second BN's, in two batches
    assert seen.count(torch.ops.aten._softmax) == 2
