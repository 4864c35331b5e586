"""The posterior for Laplace: blocks of parameters by brute force, and the variance of outputs with them."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import xkfac
from tests.helpers.setups import Everything, data, mlp, randomise
from tests.integrations.test_curvlinops import IMAGES, dense_curvature

pytest.importorskip("laplace", reason="needs the extra 'laplace'")

from xkfac.integrations.laplace import XKFACLaplace, kron_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "laplace.md"
POPULATION = {"method": "kfac", "statistics": "population", "interpretation": "eval"}


def wide(batches):
    return [(x.double(), y) for x, y in batches]


def own_blocks(dense, model):
    """Return a dense matrix with the blocks between different parameters set to zero."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    mask = torch.block_diag(*(torch.ones(size, size) for size in sizes)).to(dense)
    return dense * mask


@pytest.mark.parametrize("method", ["kfac", "diagonal", "ewc"])
def test_blocks_of_parameters_are_those_of_the_dense_curvature(method):
    model = randomise(Everything()).double()
    memory = xkfac.consolidate(model, wide(data(2, 6, **IMAGES)), method, draws=1, accumulation_dtype=torch.float64)
    dense = own_blocks(dense_curvature(model, memory), model)
    found = kron_of(model, memory).to_matrix()
    torch.testing.assert_close(found, dense, rtol=1e-6, atol=1e-8 * dense.abs().max().item())


def test_several_terms_become_one_product_with_their_partial_traces():
    model = mlp().double()
    memory = xkfac.consolidate(model, wide(data()), "xkfac", draws=1, accumulation_dtype=torch.float64)
    dense = own_blocks(dense_curvature(model, memory), model)
    found = kron_of(model, memory).to_matrix()
    weight = model[0].weight
    blocks = [one[: weight.numel(), : weight.numel()].reshape(*weight.shape, *weight.shape) for one in (found, dense)]
    for formula in ("ijil->jl", "ijkj->ik"):
        torch.testing.assert_close(*(torch.einsum(formula, block) for block in blocks), rtol=1e-6, atol=1e-9)
    gamma = slice(weight.numel(), weight.numel() + 5)
    torch.testing.assert_close(found[gamma, gamma], dense[gamma, gamma], rtol=1e-6, atol=1e-9)


def brute_force_variance(model, x, precision):
    """Return J Sigma J^T [N, outputs, outputs] with one backward pass per output, BN in evaluation mode."""
    model.eval()
    rows = []
    for one in x:
        output = model(one[None])[0]
        gradients = [torch.autograd.grad(value, list(model.parameters()), retain_graph=True) for value in output]
        rows.append(torch.stack([torch.cat([g.flatten() for g in gradient]) for gradient in gradients]))
    return torch.stack([rows_of @ torch.linalg.inv(precision) @ rows_of.mT for rows_of in rows])


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_variance_of_outputs_is_that_of_brute_force(likelihood):
    model = randomise(Everything()).double()
    batches = wide(data(2, 6, **IMAGES))
    options = {"draws": 1, "accumulation_dtype": torch.float64, **POPULATION}
    if likelihood == "regression":
        batches = [(x, torch.randn(len(x), 3).double()) for x, _ in batches]
        options["likelihood"] = xkfac.Gaussian(variance=1.5)
    memory = xkfac.consolidate(model, batches, **options)
    posterior = XKFACLaplace(model, likelihood, memory, prior_precision=0.7)
    posterior.fit(batches)
    scale = 12 * (1.5 if likelihood == "regression" else 1.0)
    curvature = own_blocks(dense_curvature(model, memory), model)
    precision = scale * curvature + 0.7 * torch.eye(len(curvature)).to(curvature)
    x = batches[0][0][:2]
    jacobians, _ = posterior.backend.jacobians(x)
    expected = brute_force_variance(model, x, precision)
    torch.testing.assert_close(posterior.functional_variance(jacobians), expected, rtol=1e-6, atol=1e-9)
    assert posterior.log_marginal_likelihood().isfinite()


def test_what_cannot_be_a_posterior_is_refused():
    model = mlp()
    with pytest.raises(xkfac.XkfacError, match="corrected factors"):
        kron_of(model, xkfac.consolidate(model, data(), "corrected", draws=1))
    memory = xkfac.consolidate(model, data(), likelihood="bernoulli", draws=1)
    with pytest.raises(xkfac.XkfacError, match="does not go with categorical"):
        XKFACLaplace(model, "classification", memory).fit(data())


def test_the_lines_of_the_page_run():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    x, y = (torch.cat(part) for part in zip(*data(), strict=True))
    scope = {"model": model, "train_loader": DataLoader(TensorDataset(x, y), 8), "x": x[:4]}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, scope)
    torch.testing.assert_close(scope["probabilities"].sum(1), torch.ones(4))
