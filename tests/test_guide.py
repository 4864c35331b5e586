"""What the guide says of losses holds: beside each loss of torch, the likelihood that gives the penalty its scale."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import xkfac
from xkfac.model.likelihood import get_likelihood

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
ROWS = re.findall(r"^\| `([^`]*F\.[^`]*)` \| `likelihood=([^`]*)` \|", GUIDE.read_text(), re.MULTILINE)
N, K = 3, 4
LOGITS = {"vector": (N, K), "dense": (N, K, 2, 2), "single": (N,)}


def labels_for(loss, output):
    """Return some labels that a loss takes beside an output."""
    if "cross_entropy(" in loss.replace("binary_cross_entropy", "") or "nll_loss" in loss:
        return torch.randint(K, (N, *output.shape[2:]))
    if "binary" in loss:
        return torch.randint(2, output.shape).to(output.dtype)
    return torch.randn_like(output)


def fisher(likelihood, output):
    """Return the Fisher [N, numbers, numbers] of each example's output as the curvature takes it."""
    roots = torch.stack([root.reshape(N, -1) for root in likelihood.root(output)])
    return torch.einsum("kni,knj->nij", roots, roots) / likelihood.predictions(output)


def hessian(loss, output, y):
    """Return the Hessian [N, numbers, numbers] of N times a loss in the output of each example."""
    names = {"F": F, "y": y, "K": output[0].numel()}
    full = torch.autograd.functional.hessian(lambda out: N * eval(loss, {**names, "out": out}), output)
    full = full.reshape(N, output[0].numel(), N, -1)
    assert all(full[a, :, b].abs().max() < 1e-12 for a in range(N) for b in range(N) if a != b)
    return torch.stack([full[n, :, n] for n in range(N)])


def test_the_guide_has_the_usual_losses():
    losses = " ".join(loss for loss, _ in ROWS)
    for name in ("cross_entropy(out, y)", "nll_loss", "binary_cross_entropy_with_logits(out, y)", "mse_loss(out, y)"):
        assert name in losses
    assert losses.count("reduction='sum'") >= 3


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize(("loss", "likelihood"), ROWS)
def test_the_likelihood_beside_a_loss_has_its_curvature(loss, likelihood, kind):
    categorical = "categorical" in likelihood
    if categorical and kind == "single":
        pytest.skip("classes need a dimension")
    torch.manual_seed(0)
    output = torch.randn(LOGITS[kind], dtype=torch.float64)
    y = labels_for(loss, output)
    made = eval(likelihood, {"xkfac": xkfac, "K": output[0].numel()})
    made = get_likelihood(made)
    wanted = hessian(loss, output, y)
    if "nll_loss" in loss:
        # Log-probabilities: in these the loss is linear, so the logits that they are made of are compared.
        wanted = hessian(loss.replace("out", "out.log_softmax(1)"), output, y)
        output = output.log_softmax(1)
    torch.testing.assert_close(fisher(made, output), wanted, rtol=1e-9, atol=1e-12)


def test_a_mean_over_labels_divides_the_curvature_by_their_number(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, K))
    data = [torch.randn(6, 5) for _ in range(2)]
    sums = xkfac.consolidate(net, data, "xkfac", likelihood="bernoulli", draws=3)
    means = xkfac.consolidate(net, data, "xkfac", likelihood=xkfac.Bernoulli(mean=True), draws=3)
    v = {name: torch.randn_like(anchor) for name, anchor in sums.anchor.items()}
    torch.testing.assert_close(means.curvature.quadratic(v), sums.curvature.quadratic(v) / K)
    for memory, mean in ((sums, False), (means, True)):
        memory.save(tmp_path / "m")
        assert xkfac.Memory.load(tmp_path / "m").likelihood.mean is mean
