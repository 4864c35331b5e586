"""Units of one shape on top of each other, and the products of their curvature at once."""

import pytest
import torch
from torch import nn

from tests.setups import data, randomise
from tests.test_penalty import CURVATURES
from xkfac import estimate
from xkfac.merging import bind
from xkfac.stacking import Group, Products, Stack, group
from xkfac.units import find_units


class Alike(nn.Module):
    """Units of one shape: with BN, without a bias, without BN, grouped, BN alone; one of them frozen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(6, 6, bias=place != 1) for place in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6, eps=10.0**-place) for place in range(1, 4))
        self.lone = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))
        self.plain = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.grouped = nn.ModuleList(nn.Conv1d(6, 6, 1, groups=2) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(3))
        self.linear[2].weight.requires_grad_(False)
        self.lone[0].bias.requires_grad_(False)

    def forward(self, x):
        for linear, norm in zip(self.linear, self.norms, strict=True):
            x = torch.tanh(norm(linear(x)))
        for one in (*self.lone, *self.plain):
            x = torch.tanh(one(x))
        for one in self.grouped:
            x = torch.tanh(one(x[:, :, None])[:, :, 0])
        return x[:, :3]


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
