"""The merged weight W~ against eq. mergebn and eq. mergebrn, written with loops in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from tests.helpers.setups import randomise
from xkfac.errors import MismatchError
from xkfac.model.merged_weight import INTERPRETATIONS, Reading, anchor_of, bind
from xkfac.model.renorm import BatchRenorm1d, BatchRenorm2d
from xkfac.model.units import find_units

CASES = {
    "linear": lambda: (nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), (7, 4)),
    "linear, bias": lambda: (nn.Linear(4, 5), nn.BatchNorm1d(5, eps=0.1), (7, 4)),
    "linear, affine=False": lambda: (nn.Linear(4, 5), nn.BatchNorm1d(5, affine=False), (7, 4)),
    "conv": lambda: (nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), (5, 3, 6, 5)),
    "conv, bias": lambda: (nn.Conv1d(3, 4, 2, dilation=2), nn.BatchNorm1d(4), (5, 3, 6)),
    "grouped": lambda: (nn.Conv2d(4, 6, 2, groups=2, bias=False), nn.BatchNorm2d(6), (5, 4, 4, 4)),
    "depthwise, bias": lambda: (nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4), (5, 4, 4, 4)),
    "conv 3d": lambda: (nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), (4, 2, 3, 3, 3)),
    "lone": lambda: (None, nn.BatchNorm2d(3), (5, 3, 4, 4)),
    "linear alone": lambda: (nn.Linear(4, 5, bias=False), None, (7, 4)),
    "linear alone, bias": lambda: (nn.Linear(4, 5), None, (7, 4)),
    "grouped alone, bias": lambda: (nn.Conv2d(4, 6, 2, groups=2), None, (5, 4, 4, 4)),
}
WITH_NORM = [name for name, make in CASES.items() if make()[1] is not None]


def build(case):
    """Return (net, layer, norm, x, bound unit), all in float64."""
    layer, norm, shape = CASES[case]()
    net = nn.Sequential(*(module for module in (layer, norm) if module is not None)).double()
    randomise(net)
    x = (torch.randn(shape, dtype=torch.float64) * 2 + 0.5).requires_grad_()
    (bound,) = bind(net, find_units(net, x).units).values()
    return net, layer, norm, x, bound


def statistics(z):
    """Return mean and variance of every channel of z, one channel after the other."""
    means, variances = [], []
    for i in range(z.shape[1]):
        values = z[:, i].flatten()
        mean = values.sum() / len(values)
        means.append(mean)
        variances.append(((values - mean) ** 2).sum() / len(values))
    return torch.stack(means), torch.stack(variances)


def by_loops(layer, norm, mean, var, r, d):
    """Return W~ row by row: eq. mergebrn (eq. mergebn where r = 1 and d = 0), a bias c in front being shifted by it."""
    rows = []
    for i in range(norm.num_features):
        gamma = 1.0 if norm.weight is None else norm.weight[i]
        beta = 0.0 if norm.bias is None else norm.bias[i]
        sigma = torch.sqrt(var[i] + norm.eps)
        entries = []
        for w in [torch.tensor(1.0)] if layer is None else layer.weight[i].flatten():
            entries.append(gamma * w / sigma * r[i])
        bias = beta + gamma * d[i] - gamma * mean[i] / sigma * r[i]
        if layer is not None and layer.bias is not None:
            bias = bias + gamma * layer.bias[i] / sigma * r[i]
        rows.append(torch.stack([*entries, bias]))
    return torch.stack(rows)


def expected(interpretation, layer, norm, x):
    """Return W~ under an interpretation, from the definitions."""
    mean, var = statistics(x if layer is None else layer(x))
    r, d = torch.ones_like(norm.running_mean), torch.zeros_like(norm.running_mean)
    if interpretation == "eval":
        mean, var = norm.running_mean.clone(), norm.running_var.clone()
    if interpretation == "const":
        mean, var = mean.detach(), var.detach()
    if interpretation == "brn":
        sigma = torch.sqrt(norm.running_var + norm.eps)
        r = (torch.sqrt(var + norm.eps) / sigma).detach()
        d = ((mean - norm.running_mean) / sigma).detach()
    return by_loops(layer, norm, mean, var, r, d)


def merged(interpretation, layer, x, bound):
    if interpretation == "eval":
        return bound.merged_weight()
    return bound.merged_weight(bound.read(x if layer is None else layer(x), interpretation))


def applied(weight, layer, x):
    """Apply W~ [groups, rows, columns] to the input extended by a homogeneous coordinate."""
    w, b = weight[..., :-1], weight[..., -1].flatten()
    if layer is None:
        return F.conv2d(x, w.reshape(-1, 1, 1, 1), b, groups=x.shape[1])
    if isinstance(layer, nn.Linear):
        return F.linear(x, w.reshape(layer.weight.shape), b)
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.dim()]
    return convolve(x, w.reshape(layer.weight.shape), b, layer.stride, layer.padding, layer.dilation, layer.groups)


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("case", WITH_NORM)
def test_value_and_gradients_are_those_of_the_equations(case, interpretation):
    _, layer, norm, x, bound = build(case)
    want = expected(interpretation, layer, norm, x)
    got = merged(interpretation, layer, x, bound)
    assert got.shape == bound.unit.shape
    torch.testing.assert_close(got.reshape(want.shape), want, rtol=1e-12, atol=1e-12)
    leaves = [x, *(p for module in (layer, norm) if module is not None for p in module.parameters())]
    probe = torch.randn_like(want)
    wanted = torch.autograd.grad((want * probe).sum(), leaves, allow_unused=True)
    found = torch.autograd.grad((got.reshape(want.shape) * probe).sum(), leaves, allow_unused=True)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    through_statistics = interpretation in ("bn", "brn")
    assert (found[0] is not None) == through_statistics
    if through_statistics:
        assert found[0].abs().max() > 1e-3


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("case", WITH_NORM)
def test_w_applied_to_the_homogeneous_input_is_the_output_of_layer_and_bn(case, interpretation):
    net, layer, _, x, bound = build(case)
    weight = merged(interpretation, layer, x, bound)
    output = net.train(interpretation in ("bn", "const"))(x)
    torch.testing.assert_close(applied(weight, layer, x), output, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [name for name in CASES if name not in WITH_NORM])
def test_a_layer_alone_is_its_weight_and_bias(case):
    _, layer, _, _, bound = build(case)
    weight = bound.merged_weight()
    rows = weight.reshape(layer.weight.shape[0], -1)
    assert torch.equal(rows[:, : layer.weight[0].numel()], layer.weight.flatten(1))
    assert weight.shape[0] == getattr(layer, "groups", 1)
    assert bound.unit.homogeneous == (layer.bias is not None)
    if layer.bias is not None:
        assert torch.equal(rows[:, -1], layer.bias)


def test_a_free_parameter_is_itself():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(2, 3))

        def forward(self, x):
            return x * self.scale

    net = Scaled()
    (bound,) = bind(net, find_units(net, torch.randn(4, 2, 3)).units).values()
    assert bound.unit.kind == "free"
    assert torch.equal(bound.merged_weight(), net.scale.reshape(1, 1, 6))


def test_brn_gradient_is_the_formula_with_r_and_d_constant():
    _, layer, norm, x, bound = build("linear")
    read = bound.read(layer(x), "brn")
    assert not read.r.requires_grad
    assert not read.d.requires_grad
    mean, var = read.mean.detach().requires_grad_(), read.var.detach().requires_grad_()
    weight = bound.merged_weight(Reading(mean, var, read.r, read.d))[0]
    probe = torch.randn_like(weight)
    grads = torch.autograd.grad((weight * probe).sum(), [mean, var, layer.weight, norm.weight, norm.bias])
    w, b = probe[:, :-1], probe[:, -1]
    population = torch.sqrt(norm.running_var + norm.eps)
    scale = norm.weight / population
    inner = (w * layer.weight).sum(1) - b * mean
    wanted = [
        -b * scale,
        -scale / (2 * (var + norm.eps)) * inner,
        w * scale[:, None],
        inner / population + b * (mean - norm.running_mean) / population,
        b,
    ]
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["linear, bias", "conv"])
def test_a_renormalized_net_clips_as_its_forward_pass_does(case):
    layer, norm, shape = CASES[case]()
    norm = {nn.BatchNorm1d: BatchRenorm1d, nn.BatchNorm2d: BatchRenorm2d}[type(norm)](
        norm.num_features, r_max=2.0, d_max=1.0, warmup=0, r_steps=10, d_steps=10
    )
    net = randomise(nn.Sequential(layer, norm).double())
    norm.num_batches_tracked.fill_(5)
    x = torch.randn(shape, dtype=torch.float64)
    norm.running_mean[0], norm.running_var[0] = layer(x)[:, 0].mean() + 0.01, layer(x)[:, 0].var()
    norm.running_mean[1], norm.running_var[1] = layer(x)[:, 1].mean() - 40, layer(x)[:, 1].var() / 40
    (bound,) = bind(net, find_units(net, x).units).values()
    read = bound.read(layer(x), "brn")
    assert (read.r[1], read.d[1]) == (1.5, 0.5)
    assert read.r[0] < 1.5
    assert read.d[0] > -0.5
    torch.testing.assert_close(applied(bound.merged_weight(read), layer, x), net.train()(x), rtol=1e-10, atol=1e-10)


def test_a_bn_net_never_clips():
    _, layer, norm, x, bound = build("conv")
    norm.running_mean += 100
    norm.running_var *= 1e-4
    read = bound.read(layer(x), "brn")
    assert read.r.min() > 10
    assert read.d.max() < -100
    torch.testing.assert_close(bound.merged_weight(read), bound.merged_weight(), rtol=1e-10, atol=1e-10)


def test_brn_keeps_the_value_of_the_population_in_a_half_precision_net():
    net = randomise(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))).bfloat16()
    x = torch.randn(16, 4, dtype=torch.bfloat16)
    (bound,) = bind(net, find_units(net, x).units).values()
    weight = bound.merged_weight(bound.read(net[0](x), "brn"))
    assert weight.dtype == torch.float32
    torch.testing.assert_close(weight, bound.merged_weight(), rtol=1e-5, atol=1e-5)


def test_bn_without_beta():
    net = nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5)).double()
    randomise(net)
    net[1].register_parameter("bias", None)
    x = torch.randn(7, 4, dtype=torch.float64)
    (bound,) = bind(net, find_units(net, x).units).values()
    torch.testing.assert_close(applied(bound.merged_weight(), net[0], x), net.eval()(x))


def test_a_population_reading_outlives_the_next_forward_pass():
    net, _, norm, x, bound = build("linear, bias")
    weight = bound.merged_weight()
    population = torch.sqrt(norm.running_var + norm.eps)
    net.train()(x)
    weight[..., :-1].sum().backward()
    torch.testing.assert_close(norm.weight.grad, (net[0].weight.sum(1) / population).detach())


def test_an_anchor_is_a_copy():
    net, layer, _, x, _ = build("linear alone")
    anchor = anchor_of(net, find_units(net, x).units)
    before = anchor["0"].clone()
    with torch.no_grad():
        layer.weight.add_(1)
    assert torch.equal(anchor["0"], before)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), "1x5x5, the model's 1x6x5"),
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.Identity()), "lacks BN '1'"),
        (lambda: nn.Sequential(nn.Identity(), nn.BatchNorm1d(5)), "lacks '0.weight'"),
        (lambda: nn.Sequential(nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5)), "lacks '0.bias'"),
        (lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(6)), "number of BN channels is 5, the model's 6"),
    ],
)
def test_another_network_is_refused_by_the_name_of_its_unit(other, words):
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
    units = find_units(net, torch.randn(3, 4)).units
    with pytest.raises(MismatchError, match=f"unit '0'.*{words}"):
        bind(other(), units)


def test_interpretations_agree_where_batch_and_population_do():
    net, layer, norm, x, bound = build("grouped")
    norm.running_mean[:], norm.running_var[:] = statistics(layer(x).detach())
    weights = [merged(interpretation, layer, x, bound) for interpretation in INTERPRETATIONS]
    for weight in weights[1:]:
        torch.testing.assert_close(weight, weights[0], rtol=1e-12, atol=1e-12)
    assert xkfac.find_units(net, x).units[0].shape == weights[0].shape == (2, 3, 9)
