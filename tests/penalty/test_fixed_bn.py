"""A fixed BN is torch's own in evaluation mode, in values and derivatives, and keeps no activation."""

import copy

import pytest
import torch
from torch import nn

from xkfac.penalty.fixed_bn import FixedBn

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def norm_for(shape, device="cpu", dtype=torch.float64, affine=True):
    """Return a BN with statistics, gamma and beta of its own; gamma and beta do not learn."""
    norm = NORMS[len(shape)](shape[1], eps=1e-3, affine=affine).to(device, dtype)
    for tensor in (norm.running_mean, norm.running_var, *norm.parameters()):
        nn.init.uniform_(tensor, 0.5, 2)
    return norm.requires_grad_(False)


def fixed(norm):
    """Return a network of the BN alone, fixed, in training mode, and a twin in evaluation mode."""
    net, twin = nn.Sequential(norm).train(), copy.deepcopy(norm).eval()
    return net, twin, FixedBn(net)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((5, 3), torch.contiguous_format),
        ((4, 3, 2), torch.contiguous_format),
        ((2, 3, 2, 5), torch.contiguous_format),
        ((2, 3, 2, 5), torch.channels_last),
        ((2, 3, 2, 2, 2), torch.channels_last_3d),
    ],
)
def test_values_and_derivatives_are_those_of_bn_in_evaluation_mode(shape, layout, affine, device):
    net, twin, _ = fixed(norm_for(shape, device, affine=affine))
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    h = torch.randn(shape, dtype=torch.float64, device=device).to(memory_format=layout).requires_grad_()
    output, wanted = net(h), twin(h)
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    assert output.stride() == wanted.stride()
    cotangent = torch.randn_like(wanted)
    (found,) = torch.autograd.grad(output, h, cotangent)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, h, cotangent)[0], rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(net, (h,))
    assert torch.autograd.gradgradcheck(net, (h,))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_half_precision_are_mapped_in_single(dtype, layout, device):
    shape = (4, 3, 5, 5)
    net, twin, _ = fixed(norm_for(shape, device, torch.float32))
    h = torch.randn(shape, dtype=dtype, device=device).to(memory_format=layout).requires_grad_()
    output, wanted = net(h), twin.double()(h.double())
    cotangent = torch.randn_like(output)
    (found,) = torch.autograd.grad(output, h, cotangent)
    (reference,) = torch.autograd.grad(wanted, h, cotangent.double())
    assert output.dtype == found.dtype == dtype
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), wanted, rtol=4 * rounding, atol=4 * rounding)
    torch.testing.assert_close(found.double(), reference.double(), rtol=4 * rounding, atol=4 * rounding)


def test_no_activation_is_kept_for_the_backward_pass():
    net, _, _ = fixed(norm_for((64, 3, 8, 8)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()), lambda _: None):
        net(torch.randn(64, 3, 8, 8, dtype=torch.float64, requires_grad=True))
    assert max(kept) == 3


@pytest.mark.parametrize("device", DEVICES)
def test_a_bn_follows_what_is_written_into_it_and_runs_twice_or_alone(device):
    net, twin, _ = fixed(norm_for((4, 3, 2), device))
    h = torch.randn(4, 3, 2, dtype=torch.float64, device=device)
    net(h)
    for one in (net[0], twin):
        one.running_var.mul_(4)
        one.weight.data.add_(1)
    torch.testing.assert_close(net[0](h), twin(h))  # not by way of the model
    both = nn.Sequential(net[0], net[0])
    hold = FixedBn(both)
    torch.testing.assert_close(both(h), twin(twin(h)))
    hold.remove()


@pytest.mark.parametrize("device", DEVICES)
def test_gamma_and_beta_that_are_held_get_gradients_of_zero_where_they_ask_for_any(device):
    norm = norm_for((64, 3, 8, 8), device)
    net, twin = nn.Sequential(norm).train(), copy.deepcopy(norm).eval()
    FixedBn(net, held=True)
    net.requires_grad_()
    h = torch.randn(64, 3, 8, 8, dtype=torch.float64, device=device, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
        output = net(h)
    assert max(kept) == 3
    output.pow(2).sum().backward()
    assert torch.equal(net[0].weight.grad, torch.zeros_like(twin.weight))
    assert torch.equal(net[0].bias.grad, torch.zeros_like(twin.bias))
    torch.testing.assert_close(h.grad, torch.autograd.grad(twin(h).pow(2).sum(), h)[0])


def test_gamma_that_learns_gets_its_gradient():
    net, twin, _ = fixed(norm_for((4, 3, 2)))
    h = torch.randn(4, 3, 2, dtype=torch.float64)
    net[0].weight.requires_grad_()
    twin.weight.requires_grad_()
    net(h).pow(2).sum().backward()
    twin(h).pow(2).sum().backward()
    assert torch.equal(net[0].weight.grad, twin.weight.grad)


def test_its_own_flags_count_again_once_it_is_removed_in_a_curvature_pass_and_in_evaluation_mode():
    net, twin, hold = fixed(norm_for((4, 3)))
    h = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(net.eval()(h), twin(h))
    net.train()[0].track_running_stats = False  # as in a curvature pass
    of_the_batch = net(h)
    torch.testing.assert_close(of_the_batch.mean(0), net[0].bias)
    net[0].track_running_stats = True
    torch.testing.assert_close(net(h), twin(h))
    hold.remove()
    torch.testing.assert_close(net(h), of_the_batch)
    assert net[0].num_batches_tracked == 1
    assert not net._forward_pre_hooks
    assert "forward" not in vars(net[0])


def test_a_bn_of_another_class_runs_its_own_forward_pass():
    class Doubled(nn.BatchNorm1d):
        def forward(self, input):
            return 2 * super().forward(input)

    net = nn.Sequential(Doubled(3)).train()
    hold = FixedBn(net)
    h = torch.randn(4, 3)
    torch.testing.assert_close(net(h), 2 * h, rtol=1e-4, atol=1e-4)
    assert net[0].training
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        net(h[0])
    assert net[0].training, "an error must not leave it in evaluation mode"
    hold.remove()
    assert not net[0]._forward_hooks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_replays_of_a_graph_follow_what_is_written_into_a_bn():
    net, twin, _ = fixed(norm_for((4, 3, 2, 2), "cuda", torch.float32))
    h = torch.randn(4, 3, 2, 2, device="cuda")
    net(h)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = net(h)
    for one in (net[0], twin):
        one.running_var.mul_(4)
    graph.replay()
    torch.testing.assert_close(output, twin(h))
