"""The benchmark that splits the gap to joint training: its Fisher, its factors and its penalties, by brute force."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import xkfac
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.recipes.recipe import Line

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def _on_the_path():
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


@pytest.fixture
def fisher():
    return importlib.import_module("gap_fisher")


@pytest.fixture
def gap():
    return importlib.import_module("gap_sequence")


def setting(gap, fisher, norm="none"):
    """Return a small perceptron in float64 with its flat vector, and 12 examples."""
    net = perceptron(6, 4, Line(widths=(5, 4), norm=norm), 0).double()
    with torch.no_grad():
        for place, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place)))
    x = torch.rand(12, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    shape = fisher.Shape((6, 5, 4, 4))
    return net, x, shape, gap.folded(net)


def brute(net, x, shape):
    """Return the exact Fisher [P, P] in the flat order, from per-example gradients of log p(c | x)."""
    linears = [module for module in net if isinstance(module, torch.nn.Linear)]
    total = torch.zeros(shape.count, shape.count, dtype=torch.float64)
    for one in x:
        for label in range(4):
            log_p = net(one[None])[0].log_softmax(0)[label]
            pairs = [torch.autograd.grad(log_p, [m.weight, m.bias], retain_graph=True) for m in linears]
            flat = torch.cat([torch.cat([w, b[:, None]], 1).flatten() for w, b in pairs])
            total += log_p.detach().exp() * torch.outer(flat, flat)
    return total / len(x)


@pytest.mark.parametrize("blocks", [False, True])
def test_dense_fisher_is_that_of_per_example_gradients(gap, fisher, blocks, monkeypatch):
    monkeypatch.setattr(fisher, "PANEL", 7)
    monkeypatch.setattr(fisher, "CHUNK", 5)
    net, x, shape, flat = setting(gap, fisher)
    dense = fisher.Dense(shape, flat, blocks=blocks)
    dense.extend(fisher.TaskFisher(shape, flat, x.__getitem__, 12))
    dense.extend(fisher.TaskFisher(shape, flat, (0.5 * x).__getitem__, 12))
    expected = brute(net, x, shape) + brute(net, 0.5 * x, shape)
    if blocks:
        expected = torch.block_diag(*[expected[part, part] for part in shape.slices])
    torch.testing.assert_close(torch.block_diag(*dense.matrices), expected)
    v = torch.randn(shape.count, 2, dtype=torch.float64)
    torch.testing.assert_close(dense.product(v[:, 0]), expected @ v[:, 0])
    torch.testing.assert_close(dense.products(v), expected @ v)


def test_stiff_directions_are_eigenvectors(gap, fisher):
    """A gradient is divided by 1 + scale * s along them, and left alone beside them."""
    net, x, shape, flat = setting(gap, fisher)
    dense = fisher.Dense(shape, flat)
    dense.extend(fisher.TaskFisher(shape, flat, x.__getitem__, 12))
    stiff = fisher.Stiff(torch.randn(6, shape.count, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    for _ in range(100):
        stiff.update(dense)
    values, vectors = torch.linalg.eigh(brute(net, x, shape))
    torch.testing.assert_close(stiff.values, values[-6:])
    v = torch.randn(shape.count, dtype=torch.float64)
    torch.testing.assert_close(stiff.product(v), vectors[:, -6:] @ (values[-6:] * (vectors[:, -6:].T @ v)))
    parts = vectors.T @ v
    parts[-6:] /= 1 + 0.7 * values[-6:]
    torch.testing.assert_close(stiff.damped(v, torch.tensor(0.7)), vectors @ parts)


def test_drawn_rows_have_the_trace_and_on_average_the_fisher(gap, fisher):
    net, x, shape, flat = setting(gap, fisher)
    task = fisher.TaskFisher(shape, flat, x.__getitem__, 12)
    exact = brute(net, x, shape)
    rows = torch.cat(list(task.rows(30)))
    assert rows.shape == (30, shape.count)
    torch.testing.assert_close(rows.square().sum(), exact.trace())
    assert (rows.T @ rows - exact).norm() < 0.35 * exact.norm()
    assert torch.cat(list(task.rows(48))).shape[0] == 48  # all of them
    torch.testing.assert_close(torch.cat(list(task.rows())).square().sum(), exact.trace())


def test_noise_on_outputs_is_noise_on_the_weights_of_each_example(gap, fisher):
    """The mean and the variance of the first layer's units, over draws of noise on its weights."""
    _, x, shape, flat = setting(gap, fisher)
    first = shape.layers(flat)[0]
    torch.manual_seed(0)
    weights = first[:, :-1] + 0.3 * first[:, :-1].square().mean().sqrt() * torch.randn(20000, 5, 6).double()
    expected = (weights @ x[0] + first[:, -1]).relu()
    inputs, _ = fisher.forward(shape.layers(flat), x[:1].expand(20000, 6), 0.3)
    torch.testing.assert_close(inputs[1].mean(0), expected.mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(inputs[1].std(0), expected.std(0), atol=0.02, rtol=0)


def test_factors_are_those_of_the_library(gap, fisher):
    net, x, shape, flat = setting(gap, fisher)
    batches = [(x, torch.zeros(12, dtype=torch.long))]
    others = [(0.5 * x, torch.zeros(12, dtype=torch.long))]
    for cross in (False, True):
        ours = fisher.KroneckerSum(shape, cross=cross)
        kept = fisher.KroneckerSum(shape, keep=True, cross=cross)
        options = {"labels": "exact", "cross_layer": cross}
        theirs = [xkfac.consolidate(net, each, "kfac", **options).curvature for each in (batches, others)]
        for task in (x, 0.5 * x):
            for each in (ours, kept):
                each.extend(fisher.TaskFisher(shape, flat, task.__getitem__, 12))
        v = torch.randn(shape.count, dtype=torch.float64)
        names = theirs[0].joint_units if cross else list(theirs[0].blocks)
        displacement = {name: layer[None] for name, layer in zip(names, shape.layers(v), strict=True)}
        for each, keep_all in ((ours, False), (kept, True)):
            curvature = theirs[0].extend(theirs[1], 1.0, 1.0, homogeneous=names, keep_all=keep_all)
            product = curvature.product(displacement)
            expected = torch.cat([product[name].flatten() for name in names])
            torch.testing.assert_close(each.product(v), expected)
            torch.testing.assert_close(each.products(torch.stack([v, -2 * v], 1))[:, 1], -2 * expected)


def test_folded_network_answers_as_the_one_with_bn(gap, fisher):
    net, x, shape, _ = setting(gap, fisher, norm="bn")
    for _ in range(5):
        net(x)
    net.eval()
    _, logits = fisher.forward(shape.layers(gap.folded(net)), x)
    torch.testing.assert_close(logits, net(x))


def test_loss_gradient_is_that_of_autograd(gap, fisher):
    net, x, shape, flat = setting(gap, fisher)
    y = torch.arange(12) % 4
    torch.nn.functional.cross_entropy(net(x), y).backward()
    out = torch.zeros_like(flat)
    fisher.loss_gradient(shape.layers(flat), x, y, shape.layers(out))
    expected = [torch.cat([m.weight.grad, m.bias.grad[:, None]], 1).flatten() for m in net if hasattr(m, "bias")]
    torch.testing.assert_close(out, torch.cat(expected))


def test_stable_limit(fisher):
    assert fisher.stable_limit(1, 0.9) == pytest.approx(3.8, rel=1e-3)
    assert fisher.stable_limit(1, 0.0) == pytest.approx(2.0, rel=1e-3)
    assert fisher.stable_limit(4, 0.9) == pytest.approx(0.241, abs=2e-3)


@pytest.mark.parametrize("row", ["kron-average", "block", "full", "full-own"])
def test_pull_is_the_gradient_of_the_quadratics(gap, fisher, row):
    """Finite differences of the sum over tasks, every task around its own weights, or all around the latest."""
    x = torch.rand(20, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    part = gap.Part(x, torch.arange(20) % 10)
    job = gap.Job(row, 0, 1.0, 1, 4, 3, 0, 1, 4, 0.1, False, 0, 1, 6, 1e-4, 0.0)
    sequence = gap.Sequence(job, {"train": part, "validation": part, "test": part})
    for name in ("flat", "anchor", "linear", "grad", "past", "buffer"):
        setattr(sequence, name, getattr(sequence, name).double())
    sequence.penalty = sequence._penalty()
    sequence.stiff = fisher.Stiff(sequence.stiff.basis.double())
    shape, kept = sequence.shape, []
    generator = torch.Generator().manual_seed(4)
    for task in range(3):
        sequence.flat += 0.1 * torch.randn(shape.count, generator=generator, dtype=torch.float64)
        before = torch.cat([m.flatten() for m in getattr(sequence.penalty, "matrices", [])] or [torch.zeros(0)])
        sequence.extend(task)
        if row != "kron-average":
            kept.append(
                (
                    sequence.flat.clone(),
                    [
                        m - old
                        for m, old in zip(
                            sequence.penalty.matrices, _split(before, sequence.penalty.matrices), strict=True
                        )
                    ],
                )
            )

    def value(flat):
        damping = 1e-4 * 3 * (flat - sequence.anchor).square().sum() / 2
        if row == "kron-average":
            moved = flat - sequence.anchor
            return damping + moved @ sequence.penalty.product(moved) / 2
        total = damping
        for own, matrices in kept:
            moved = flat - (own if row == "full-own" else sequence.anchor)
            total = total + moved @ torch.block_diag(*matrices) @ moved / 2
        return total

    sequence.flat = sequence.flat + 0.1
    expected = []
    for direction in torch.eye(shape.count, dtype=torch.float64):
        step = 1e-3 * direction
        expected.append((value(sequence.flat + step) - value(sequence.flat - step)) / 2e-3)
    torch.testing.assert_close(sequence.pull(first=True), torch.stack(expected))


def _split(flat, like):
    parts = flat.split([m.numel() for m in like]) if flat.numel() else [torch.zeros(m.numel()) for m in like]
    return [part.view_as(m) for part, m in zip(parts, like, strict=True)]
