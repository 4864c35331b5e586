"""Batch renormalization against Ioffe's definition, and conversion from and to batch normalization."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import xkfac

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
RENORMS = {1: xkfac.BatchRenorm1d, 2: xkfac.BatchRenorm2d, 3: xkfac.BatchRenorm3d}
SHAPES = [(5, 3), (4, 3, 6), (3, 3, 4, 2), (2, 3, 2, 3, 2)]


def renorm(shape, batches=0, **options):
    """Return a float64 layer with statistics, gamma and beta that are no defaults, after so many batches."""
    layer = RENORMS[max(len(shape) - 2, 1)](shape[1], dtype=torch.float64, **options)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.3, 3.0)
    layer.num_batches_tracked.fill_(batches)
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer


def ioffe(x, layer, r_limit, d_limit):
    """Return y as Algorithm 1 of the paper has it, r and d being constants."""
    axes = [0, *range(2, x.dim())]
    as_channels = lambda v: v.reshape(1, -1, *[1] * (x.dim() - 2))  # noqa: E731
    mean_b = x.mean(axes)
    sigma_b = ((x - as_channels(mean_b)).square().mean(axes) + layer.eps).sqrt()
    mu, sigma = layer.running_mean.clone(), (layer.running_var + layer.eps).sqrt()
    r = (sigma_b / sigma).clamp(1 / r_limit, r_limit).detach()
    d = ((mean_b - mu) / sigma).clamp(-d_limit, d_limit).detach()
    y = (x - as_channels(mean_b)) / as_channels(sigma_b) * as_channels(r) + as_channels(d)
    if layer.affine:
        y = as_channels(layer.weight) * y + as_channels(layer.bias)
    return y


@pytest.mark.parametrize("shape", SHAPES, ids=len)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("batches", "limits"), [(0, (1.0, 0.0)), (10, (1.4, 1.0)), (1000, (3.0, 5.0))])
def test_forward_and_gradient_are_those_of_the_definition(shape, affine, batches, limits):
    layer = renorm(shape, batches, affine=affine, warmup=0, r_steps=50, d_steps=50)
    x = (torch.randn(shape, dtype=torch.float64) * 2 + 1).requires_grad_()
    expected = ioffe(x, layer, *limits)
    cotangent = torch.randn_like(expected)
    inputs = [x, *layer.parameters()]
    expected_gradients = torch.autograd.grad(expected, inputs, cotangent)
    output = layer(x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    for gradient, truth in zip(torch.autograd.grad(output, inputs, cotangent), expected_gradients, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-10)


def test_both_limits_clip_both_ways():
    layer = renorm((4, 4), 30, warmup=0, r_steps=40, d_steps=60)
    layer.running_mean.copy_(torch.tensor([-50.0, 50.0, 0.0, 0.0]))
    layer.running_var.copy_(torch.tensor([1e-4, 1e4, 1.0, 1.0]))
    x = torch.randn(64, 4, dtype=torch.float64)
    var, mean = torch.var_mean(x, 0, correction=0)
    r, d = layer.correction(mean, var)
    torch.testing.assert_close(r[:2], torch.tensor([2.5, 1 / 2.5], dtype=torch.float64))
    torch.testing.assert_close(d[:2], torch.tensor([2.5, -0.5], dtype=torch.float64), rtol=0.05, atol=0)
    expected = ioffe(x, layer, 2.5, 2.5)
    torch.testing.assert_close(layer(x), expected)
    assert not r.requires_grad
    assert not d.requires_grad


def test_without_limits_the_forward_pass_is_that_of_evaluation():
    layer = renorm((6, 3, 4), 1, warmup=0, r_steps=0, d_steps=0, r_max=1e9, d_max=1e9)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    evaluated = copy.deepcopy(layer).eval()(x)
    torch.testing.assert_close(layer(x), evaluated)


SCHEDULE = [(0, 1.0, 0.0), (100, 1.0, 0.0), (150, 1.25, 2.5), (200, 1.5, 5.0), (300, 2.0, 5.0), (500, 3.0, 5.0)]


@pytest.mark.parametrize(("batches", "r_limit", "d_limit"), [*SCHEDULE, (9999, 3.0, 5.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_limits_are_relaxed_linearly_by_the_number_of_batches(batches, r_limit, d_limit, dtype):
    layer = xkfac.BatchRenorm1d(2, warmup=100, r_steps=500, d_steps=200).to(dtype)
    layer.num_batches_tracked.fill_(batches)
    assert [limit.item() for limit in layer.limits()] == [r_limit, d_limit]


PAPER = {5_000: (1, 0), 15_000: (1 + 2 * 10 / 35, 2.5), 25_000: (1 + 2 * 20 / 35, 5), 40_000: (3, 5)}


@pytest.mark.parametrize(("batches", "limits"), PAPER.items())
def test_the_default_schedule_is_that_of_the_paper(batches, limits):
    layer = xkfac.BatchRenorm2d(2)
    layer.num_batches_tracked.fill_(batches)
    assert [limit.item() for limit in layer.limits()] == pytest.approx(limits)


def test_training_moves_along_the_schedule_and_evaluation_does_not():
    layer = xkfac.BatchRenorm1d(2)
    for _ in range(3):
        layer(torch.randn(4, 2))
    layer.eval()(torch.randn(4, 2))
    assert layer.num_batches_tracked.item() == 3


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    momentum=st.sampled_from([0.1, 1.0, 0.0, None]),
    affine=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_during_warmup_it_is_batch_normalization_and_statistics_move_alike(shape, momentum, affine, dtype):
    rank = max(len(shape) - 2, 1)
    norm = NORMS[rank](shape[1], momentum=momentum, affine=affine, dtype=dtype)
    layer = RENORMS[rank](shape[1], momentum=momentum, affine=affine, dtype=dtype)
    for _ in range(3):
        x = torch.randn(shape, dtype=dtype) * 3 + 1
        torch.testing.assert_close(layer(x), norm(x))
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(layer.state_dict()[name], value)
    x = torch.randn(shape, dtype=dtype)
    assert torch.equal(copy.deepcopy(layer).eval()(x), xkfac.to_batchnorm(layer.eval())(x))


@pytest.mark.parametrize("momentum", [0.2, None])
def test_statistics_move_as_those_of_batch_normalization_at_any_limits(momentum):
    layer = renorm((5, 3), 700, warmup=0, r_steps=0, d_steps=0, momentum=momentum)
    norm = xkfac.to_batchnorm(copy.deepcopy(layer))
    for _ in range(2):
        x = torch.randn(5, 3, dtype=torch.float64)
        layer(x), norm(x)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(layer, name), getattr(norm, name), rtol=1e-12, atol=1e-12)


def test_a_state_dict_carries_the_place_in_the_schedule():
    options = {"warmup": 1, "r_steps": 9, "d_steps": 5}
    layer = renorm((4, 3), 3, **options)
    layer(torch.randn(4, 3, dtype=torch.float64))
    other = xkfac.BatchRenorm1d(3, dtype=torch.float64, **options)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 3, dtype=torch.float64)
    assert other.limits() == layer.limits()
    assert torch.equal(other(x), layer(x))
    nn.BatchNorm1d(3).load_state_dict(layer.state_dict())


def network():
    shared = nn.BatchNorm2d(4, momentum=None, eps=1e-3)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        shared,
        nn.Sequential(nn.Conv2d(4, 4, 1), shared, nn.BatchNorm2d(4, affine=False)),
        nn.Flatten(),
        nn.BatchNorm1d(64).eval(),
    )
    net(torch.randn(8, 2, 6, 6))
    return net


def test_conversion_keeps_the_function_the_parameters_and_what_is_shared():
    net = network()
    parameters = dict(net.named_parameters())
    buffers = dict(net.named_buffers())
    x = torch.randn(3, 2, 6, 6)
    before = copy.deepcopy(net).eval()(x)
    assert xkfac.to_renorm(net, warmup=7, r_max=2.0) is net
    assert [type(m).__name__ for m in (net[1], net[2][2], net[4])] == [
        "BatchRenorm2d",
        "BatchRenorm2d",
        "BatchRenorm1d",
    ]
    assert net[1] is net[2][1]
    assert (net[1].warmup, net[1].r_max, net[1].momentum, net[1].eps) == (7, 2.0, None, 1e-3)
    assert net[1].num_batches_tracked.item() == 2
    assert [m.training for m in (net, net[1], net[4])] == [True, True, False]
    back = copy.deepcopy(net)
    for model in (net, xkfac.to_batchnorm(back)):
        assert torch.equal(copy.deepcopy(model).eval()(x), before)
    assert [type(m).__name__ for m in (back[1], back[2][2], back[4])] == ["BatchNorm2d", "BatchNorm2d", "BatchNorm1d"]
    assert back[1] is back[2][1]
    xkfac.to_batchnorm(net)
    assert all(dict(net.named_parameters())[name] is value for name, value in parameters.items())
    assert all(dict(net.named_buffers())[name] is value for name, value in buffers.items())


def test_a_bare_layer_is_converted():
    for rank, cls in NORMS.items():
        layer = xkfac.to_renorm(cls(3))
        assert type(layer) is RENORMS[rank]
        assert type(xkfac.to_batchnorm(layer)) is cls


def test_conversion_keeps_hooks_and_their_handles():
    net, calls = nn.Sequential(nn.BatchNorm1d(3)), []
    handle = net[0].register_forward_hook(lambda *_: calls.append(1))
    xkfac.to_renorm(net)(torch.randn(4, 3))
    handle.remove()
    net(torch.randn(4, 3))
    assert calls == [1]


def test_a_layer_without_beta_is_converted():
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    norm.bias = None
    layer = xkfac.to_renorm(copy.deepcopy(norm))
    x = torch.randn(4, 3, dtype=torch.float64)
    assert layer.bias is None
    torch.testing.assert_close(layer(x), norm(x))


class Own(nn.BatchNorm2d):
    pass


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Own(4), "'2.1' is a Own, which has no counterpart"),
        (nn.SyncBatchNorm(4), "'2.1' is a SyncBatchNorm, which has no counterpart"),
        (nn.LazyBatchNorm2d(), "'2.1' is a LazyBatchNorm2d, which has no counterpart"),
        (nn.BatchNorm2d(4, track_running_stats=False), "'2.1' has no running statistics; build it with"),
    ],
)
def test_what_cannot_be_converted_is_an_error_and_the_model_stays_as_it_was(bad, message):
    net = network()
    net[2][1] = bad
    modules = list(net.modules())
    with pytest.raises(xkfac.UnitError, match=message):
        xkfac.to_renorm(net)
    assert all(new is old for new, old in zip(net.modules(), modules, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r_max": 0.9}, "needs finite r_max >= 1 and d_max >= 0, not 0.9 and 5.0"),
        ({"d_max": -1.0}, "needs finite r_max >= 1 and d_max >= 0, not 3.0 and -1.0"),
        ({"d_max": float("inf")}, "needs finite r_max"),
        ({"r_max": float("nan")}, "needs finite r_max"),
        ({"warmup": -1}, "needs 0 <= warmup <= r_steps and d_steps, not -1, 40000, 25000"),
        ({"warmup": 30_000}, "needs 0 <= warmup <= r_steps and d_steps, not 30000, 40000, 25000"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_an_error(options, message):
    with pytest.raises(xkfac.UnitError, match=message):
        xkfac.BatchRenorm1d(3, **options)


@pytest.mark.parametrize(
    ("rank", "takes", "shape"), [(1, "2 or 3", (2, 3, 4, 4)), (2, "4", (2, 3)), (3, "5", (2, 3, 4))]
)
def test_an_input_of_another_rank_is_an_error(rank, takes, shape):
    with pytest.raises(xkfac.UnitError, match=rf"{rank}d takes an input of {takes} dimensions, not {len(shape)}"):
        RENORMS[rank](3)(torch.randn(shape))


@pytest.mark.parametrize("shape", [(1, 3), (0, 3), (1, 3, 1)])
def test_a_batch_of_a_single_value_is_an_error_and_changes_nothing(shape):
    layer = xkfac.BatchRenorm1d(3)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(
        xkfac.UnitError, match=r"BatchRenorm1d needs more than one value per channel in training.*shape \["
    ):
        layer(torch.randn(shape))
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert layer.eval()(torch.randn(shape)).shape == shape


def test_bfloat16_inputs_under_autocast_have_float32_statistics():
    net = nn.Sequential(nn.Linear(4, 3), xkfac.BatchRenorm1d(3, warmup=0, r_steps=0, d_steps=0))
    net[1].num_batches_tracked.fill_(5)
    reference = copy.deepcopy(net)
    x = torch.randn(256, 4) + 1
    with torch.autocast("cpu", torch.bfloat16):
        hidden = net[0](x)
        output = net[1](hidden)
    assert output.dtype == hidden.dtype == torch.bfloat16
    exact = reference[1](hidden.detach().float())
    torch.testing.assert_close(output.float(), exact, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(net[1].running_mean, reference[1].running_mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(net[1].running_var, reference[1].running_var, rtol=1e-6, atol=1e-7)
    output.float().square().sum().backward()
    exact.square().sum().backward()
    torch.testing.assert_close(net[1].weight.grad, reference[1].weight.grad, rtol=2e-2, atol=2e-2 * len(x))


def test_the_representation_shows_the_schedule():
    text = repr(xkfac.BatchRenorm2d(3, r_max=2.0, warmup=10))
    assert text == "BatchRenorm2d(3, eps=1e-05, momentum=0.1, affine=True, r_max=2.0, d_max=5.0, warmup=10)"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_keeps_the_r_and_d_of_its_forward_pass(backend):
    """A compiler that computed them anew in the backward pass would read statistics that have moved since."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), xkfac.BatchRenorm1d(4), nn.Tanh(), nn.Linear(4, 2)).train()
    net[1].num_batches_tracked.fill_(100_000)
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2)
    x, gradients = torch.randn(6, 3), []
    for compiled in (False, True):
        model = copy.deepcopy(net)
        run = torch.compile(model, backend=backend) if compiled else model
        run(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for eager, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)
