"""The curvature as a linear operator on parameters: J^T H J, dense and in float64."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import xkfac
from tests.helpers.setups import Everything, data, mlp, randomise
from xkfac.model.merged_weight import bind

pytest.importorskip("curvlinops", reason="needs the extra 'curvlinops'")

from xkfac.integrations.curvlinops import CurvatureLinearOperator

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "curvlinops.md"
IMAGES = {"shape": (2, 7, 7), "scale": 2.0, "shift": 3.0}
METHODS = ["fixed-bn", "xkfac", "kfac", "corrected", "diagonal", "ewc"]


def dense_jacobian(model, memory, name):
    """Return d W~ / d parameters of a unit, column by column of differences, W~ with its rows running fastest."""
    columns = []
    unit = bind(model, memory.units)[name]
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for place in range(len(flat)):
                kept, sides = flat[place].item(), []
                for step in (1e-6, -1e-6):
                    flat[place] = kept + step
                    sides.append(unit.merged_weight().mT.reshape(-1).clone())
                flat[place] = kept
                columns.append((sides[0] - sides[1]) / 2e-6)
    return torch.stack(columns, 1)


def dense_curvature(model, memory):
    """Return sum_units J^T H J by finite differences and dense blocks."""
    total = 0
    for unit in memory.units:
        jacobian = dense_jacobian(model, memory, unit.name)
        block = torch.block_diag(*memory.curvature.block(unit.name).dense())
        total = total + jacobian.mT @ block @ jacobian
    return total


@pytest.mark.parametrize("method", METHODS)
def test_products_are_those_of_the_dense_curvature(method):
    model = randomise(Everything()).double()
    batches = [(x.double(), y) for x, y in data(2, 6, **IMAGES)]
    memory = xkfac.consolidate(model, batches, method, draws=1, accumulation_dtype=torch.float64)
    operator = CurvatureLinearOperator(model, memory)
    dense = dense_curvature(model, memory)
    v = torch.randn(len(dense), 3, dtype=torch.float64)
    torch.testing.assert_close(operator @ v, dense @ v, rtol=1e-6, atol=1e-8 * dense.abs().max().item())
    assert operator.shape == dense.shape


def test_units_joined_across_layers_are_coupled():
    model = mlp().double()
    batches = [(x.double(), y) for x, y in data()]
    memory = xkfac.consolidate(model, batches, "xkfac", cross_layer=True, draws=1, accumulation_dtype=torch.float64)
    jacobian = torch.cat([dense_jacobian(model, memory, name) for name in memory.curvature.joint_units])
    dense = jacobian.mT @ memory.curvature.joint.dense() @ jacobian
    v = torch.randn(len(dense), dtype=torch.float64)
    torch.testing.assert_close(CurvatureLinearOperator(model, memory) @ v, dense @ v, rtol=1e-6, atol=1e-9)


def test_left_out_and_frozen_parameters():
    model = mlp()
    memory = xkfac.consolidate(model, data(), draws=1, exclude=["6"])
    model[0].weight.requires_grad_(False)
    operator = CurvatureLinearOperator(model, memory)
    shapes = [p.shape for p in model.parameters() if p.requires_grad]
    found = operator @ [torch.ones(shape) for shape in shapes]
    assert [one.shape for one in found] == shapes
    assert not found[-1].any()
    assert all(one.any() for one in found[:2])


def test_the_lines_of_the_page_run():
    scope = {"model": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)), "loader": data()}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, scope)
    dense = dense_curvature(scope["model"].double(), scope["memory"].to(dtype=torch.float64))
    assert scope["largest"][0] == pytest.approx(torch.linalg.eigvalsh(dense)[-1].item(), rel=1e-3)
