"""Curvature that is exactly zero protects nothing: a single class is refused, and units are named."""

import warnings

import pytest
import torch
from torch import nn

import xkfac
from tests.helpers.setups import data, mlp


def dead(units=("dead",)):
    """Return a network some of whose layers have outputs that a ReLU holds at zero."""
    net = nn.Sequential()
    net.add_module("first", nn.Linear(6, 4))
    for name in units:
        layer = nn.Linear(4, 4)
        nn.init.constant_(layer.bias, -1e3)
        net.add_module(f"side_{name}", Beside(layer))
    net.add_module("head", nn.Linear(4, 3))
    return net


class Beside(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + torch.relu(self.layer(x))


@pytest.mark.parametrize("shape", [[8, 1], [8, 1, 2]])
def test_one_column_is_no_categorical_output(shape):
    net = nn.Sequential(nn.Linear(6, shape[1] * (shape[2] if len(shape) > 2 else 1)), nn.Unflatten(1, shape[1:]))
    with pytest.raises(xkfac.XkfacError) as refused:
        xkfac.consolidate(net, data(), "xkfac")
    assert str(refused.value) == (
        f"the output {shape} has one column, and of a single class there is nothing to learn; use "
        "likelihood='bernoulli' if it is the logit of a yes, 'gaussian' if it is a number"
    )
    for likelihood in ("bernoulli", "gaussian"):
        memory = xkfac.consolidate(net, data(), "xkfac", likelihood=likelihood)
        assert memory.curvature.blocks["0"].diagonal().sum() > 0


@pytest.mark.parametrize("method", ["xkfac", "kfac", "corrected", "diagonal", "ewc"])
def test_a_unit_of_zero_curvature_is_named_and_marked(method):
    net = dead()
    with pytest.warns(xkfac.XkfacWarning) as caught:
        memory = xkfac.consolidate(net, data(), method)
    (told,) = [str(one.message) for one in caught if one.category is xkfac.XkfacWarning]
    names = "'side_dead.layer'" if method != "ewc" else "'side_dead.layer.weight', 'side_dead.layer.bias'"
    assert told == (
        f"the curvature is exactly zero, so that nothing is protected, in {names}; see that the output of the network "
        "depends on this and is not saturated, or exclude it"
    )
    marked = [line.split()[0] for line in memory.summary().splitlines() if line.endswith("curvature is zero")]
    assert marked == ["side_dead.layer.weight", "side_dead.layer.bias"]


def test_a_unit_of_zero_curvature_is_named_where_units_are_joined():
    with pytest.warns(xkfac.XkfacWarning, match="nothing is protected, in 'side_dead.layer'; see"):
        memory = xkfac.consolidate(dead(), data(), "xkfac", cross_layer=True)
    assert memory.summary().count("curvature is zero") == 2


def test_of_many_units_some_are_named():
    with pytest.warns(xkfac.XkfacWarning, match="'side_h.layer' and 2 more; see"):
        xkfac.consolidate(dead("abcdefghij"), data(), "xkfac")


def test_a_parameter_that_is_not_used_is_marked_beside_its_note():
    net = mlp()
    net.idle = nn.Parameter(torch.ones(2))

    with pytest.warns(xkfac.XkfacWarning, match="in 'idle'; see"):
        memory = xkfac.consolidate(net, data(), "xkfac")
    assert "not seen in the forward pass, curvature is zero" in memory.summary()


def test_a_mark_goes_when_a_later_task_has_curvature_there():
    net = dead()
    with pytest.warns(xkfac.XkfacWarning):
        memory = xkfac.consolidate(net, data(), "xkfac")
    with torch.no_grad():
        net.side_dead.layer.bias.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error", xkfac.XkfacWarning)
        memory = memory.extend(net, xkfac.estimate(net, data()), weights=(0.5, 0.5))
    assert "curvature is zero" not in memory.summary()


def test_a_bias_in_front_of_a_norm_is_no_unit_of_zero_curvature():
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", xkfac.XkfacWarning)
        memory = xkfac.consolidate(net, data(), "xkfac")
    assert "curvature is zero" not in memory.summary()
