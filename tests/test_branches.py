"""A tap passes the input of a BN on as it is, and its statistics with their gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.setups import randomise, started, target
from tests.test_stacking import Alike
from xkfac.branches import Tap
from xkfac.merging import bind
from xkfac.units import find_units


def tapped(shape, interpretation="bn"):
    net = nn.Sequential(nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)).double()
    (bound,) = bind(net, find_units(net, torch.randn(2, 3, 4, dtype=torch.float64)).units).values()
    tap = Tap(bound, interpretation)

    def function(h):
        passed, reading = tap(h)
        return passed, reading.mean, reading.var

    return function, torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (2, 3, 2, 3)])
def test_a_tap_passes_its_input_on_and_its_gradients_are_those_of_differences(shape):
    function, h = tapped(shape)
    passed, mean, var = function(h)
    axes = [axis for axis in range(len(shape)) if axis != 1]
    assert torch.equal(passed, h)
    torch.testing.assert_close(mean, h.mean(axes))
    torch.testing.assert_close(var, h.var(axes, correction=0))
    assert torch.autograd.gradcheck(function, (h,))
    assert torch.autograd.gradgradcheck(function, (h,))
    for place in range(3):
        assert torch.autograd.gradcheck(lambda h, place=place: function(h)[place], (h,))


def test_a_tap_changes_no_bit_of_the_gradient_of_a_loss():
    results = []
    for watched in (True, False):
        torch.manual_seed(0)
        model, learner = started(randomise(Alike()))
        if not watched:
            learner.close()
        x, y = target()[0]
        F.cross_entropy(model(x), y).backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert results[0]
    assert all(torch.equal(gradient, results[1][name]) for name, gradient in results[0].items())
