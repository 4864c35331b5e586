"""A tap reads the statistics of a BN, and a gradient in them joins that of the BN."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.setups import Alike, mlp, randomise, started, target
from xkfac.model.merged_weight import bind
from xkfac.model.units import find_units
from xkfac.penalty.bn_taps import Tap


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


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def normalised(shape, device, *, affine=True, gamma=None, layout=torch.contiguous_format):
    """Return a BN, a tap of it, and an input."""
    norms = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    convolution = nn.Conv2d if len(shape) == 4 else nn.Conv3d if len(shape) == 5 else nn.Conv1d
    net = nn.Sequential(convolution(3, 3, 1), norms[len(shape)](3, affine=affine)).double()
    example = torch.randn(2, 3, *(shape[2:] or (4,)), dtype=torch.float64)
    (bound,) = bind(net, find_units(net, example).units).values()
    norm = net[1].to(device)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    if gamma is not None:
        norm.weight.data.fill_(gamma)
    tap = Tap(bound, "bn")
    h = torch.randn(shape, dtype=torch.float64, device=device).to(memory_format=layout).requires_grad_()

    return norm, tap, h


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 2), (2, 3, 2, 3), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_a_normalised_batch_is_that_of_bn_with_all_its_gradients(shape, affine, device):
    norm, tap, h = normalised(shape, device, affine=affine)
    twin = copy.deepcopy(norm)
    output, reading = tap.normalise(norm, h)
    wanted = twin(h)
    torch.testing.assert_close(output, wanted)
    for (name, one), other in zip(norm.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    axes = [axis for axis in range(len(shape)) if axis != 1]
    torch.testing.assert_close(reading.mean, h.mean(axes))
    torch.testing.assert_close(reading.var, h.var(axes, correction=0))
    assert torch.autograd.gradcheck(lambda h: _values(tap.normalise(norm, h)), (h,))
    assert torch.autograd.gradgradcheck(lambda h: _values(tap.normalise(norm, h)), (h,))
    weights = torch.randn_like(output), torch.randn(3, dtype=h.dtype, device=device)
    mine = torch.autograd.grad((output * weights[0]).sum(), [h, *norm.parameters()])
    for one, other in zip(mine, torch.autograd.grad((wanted * weights[0]).sum(), [h, *twin.parameters()]), strict=True):
        torch.testing.assert_close(one, other)


def _values(normalised):
    output, reading = normalised
    return output, reading.mean, reading.var


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("gamma", [None, 0.0])
@pytest.mark.parametrize("alone", [True, False])
def test_handles_take_the_gradient_in_the_statistics(device, layout, gamma, alone):
    """As the gradient in mean and variance, or as changes of the sums that BN's backward pass divides up."""
    norm, tap, h = normalised((4, 3, 2, 5), device, gamma=gamma, layout=layout)
    output, reading = tap.normalise(norm, h)
    changes = torch.randn(2, 3, dtype=h.dtype, device=device)
    gradient = torch.randn_like(output)
    wanted = changes
    if reading.sums:
        scale = (norm.weight * reading.inverse).detach()
        wanted = torch.stack([-scale * changes[0], -0.5 * scale * reading.inverse.detach().square() * changes[1]])
    loss = (reading.mean * wanted[0] + reading.var * wanted[1]).sum() + (0 if alone else (output * gradient).sum())
    (reference,) = torch.autograd.grad(loss, h, retain_graph=True)
    given = [*zip(reading.placeholders, changes, strict=True), *([] if alone else [(output, gradient)])]
    (found,) = torch.autograd.grad([a for a, _ in given], h, [b for _, b in given])
    torch.testing.assert_close(found, reference, rtol=1e-9, atol=1e-12)
    assert reference.abs().max() > 1e-3 or gamma == 0


def test_a_copy_of_a_watched_network_has_a_forward_pass_of_its_own():
    model, learner = started()
    other = copy.deepcopy(model)
    other[1].weight.data.zero_()
    other[1].bias.data.zero_()
    x, _ = target()[0]
    assert torch.equal(other[:2](x), torch.zeros(len(x), 5))
    assert bool((other[1].num_batches_tracked != model[1].num_batches_tracked).item())
    learner.close()
    assert "forward" not in vars(model[1])


def test_where_a_tap_does_not_know_the_forward_pass_a_hook_reads_it():
    class Scaled(nn.BatchNorm1d):
        def forward(self, input):
            return 2 * super().forward(input)

    results = []
    for bn in (Scaled, nn.BatchNorm1d):
        torch.manual_seed(0)
        model, learner = started(mlp(bn), damping=0.1)
        assert ("forward" in vars(model[1])) == (bn is nn.BatchNorm1d)
        x, _ = target()[0]
        output = model[:2](x)
        results.append((output, learner.penalty()))
    torch.testing.assert_close(results[0][0], 2 * results[1][0])
    assert results[0][1] > 0
