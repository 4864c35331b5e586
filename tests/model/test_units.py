"""Units are found by running a network, not by the names of its modules."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

import xkfac
from tests.helpers.unit_checks import (
    N,
    Net,
    assert_partition,
    assert_replays,
    find,
    pair,
    randomise_norms,
    summary,
    weight,
)
from xkfac.model.units import Unit

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {
    "bn": {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
    "brn": {1: xkfac.BatchRenorm1d, 2: xkfac.BatchRenorm2d, 3: xkfac.BatchRenorm3d},
}


@st.composite
def convolutions(draw):
    """Draw (network of one convolution and maybe a BN, its input)."""
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 4]))
    each = lambda low, high: st.tuples(*[st.integers(low, high)] * rank)  # noqa: E731
    kernel, dilation, stride = draw(each(1, 3)), draw(each(1, 2)), draw(each(1, 2))
    padding = draw(st.one_of(st.sampled_from(["same", "valid"]), each(0, 2)))
    mode = draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"]))
    conv = CONVS[rank](
        4, 4, kernel, 1 if padding == "same" else stride, padding, dilation, groups, draw(st.booleans()), mode
    )
    norm = draw(st.sampled_from([None, "bn", "brn"]))
    net = nn.Sequential(conv, *([NORMS[norm][rank](4)] if norm else [])).double()
    return net, torch.randn(2, 4, *draw(each(5, 7)), dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(convolutions())
def test_a_convolution_of_any_geometry_is_one_unit_whose_merged_weight_replays_it(case):
    net, x = case
    coverage = xkfac.find_units(randomise_norms(net), x)
    (unit,) = coverage.units
    conv = net[0]
    assert (unit.name, unit.kind, unit.weight) == ("0", "conv", "0.weight")
    assert unit.bias == ("0.bias" if conv.bias is not None else None)
    assert unit.norm == ("1" if len(net) == 2 else None)
    assert unit.shape == (conv.groups, 4 // conv.groups, conv.weight[0].numel() + unit.homogeneous)
    assert_replays(net, x, coverage.units)


def test_even_kernels_are_padded_asymmetrically():
    (unit,) = find(nn.Conv2d(1, 1, (2, 4), padding="same", dilation=(1, 3)), N, 1, 9, 9).units
    assert unit.convolution.padding == ((0, 1), (4, 5))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", [None, nn.BatchNorm1d, xkfac.BatchRenorm1d])
@pytest.mark.parametrize("affine", [True, False])
def test_a_linear_layer_is_one_unit_with_the_norm_behind_it(bias, norm, affine):
    net = nn.Sequential(nn.Linear(4, 3, bias), *([norm(3, affine=affine)] if norm else [])).double()
    x = torch.randn(N, 4, dtype=torch.float64)
    (unit,) = xkfac.find_units(randomise_norms(net), x).units
    assert unit.norm == ("1" if norm else None)
    assert unit.shape == (1, 3, 4 + (bias or norm is not None))
    assert_replays(net, x, [unit])


@pytest.mark.parametrize("shape", [(N, 4), (N, 4, 6), (N, 4, 3, 3), (N, 4, 2, 3, 2)])
@pytest.mark.parametrize("kind", ["bn", "brn"])
def test_a_norm_on_its_own_is_a_unit_of_single_weights(shape, kind):
    norm = NORMS[kind][max(len(shape) - 2, 1)](4)
    net = randomise_norms(nn.Sequential(nn.ReLU(), norm)).double()
    x = torch.randn(*shape, dtype=torch.float64)
    coverage = xkfac.find_units(net, x)
    assert coverage.units == (Unit("1", "norm", (4, 1, 2), norm="1"),)
    assert_replays(net, x, coverage.units)


def test_a_bare_module_is_a_network():
    assert find(nn.BatchNorm1d(4)).units == (Unit("weight", "norm", (4, 1, 2), norm=""),)
    assert find(nn.Linear(4, 2)).units == (Unit("weight", "linear", (1, 2, 5), "weight", "bias"),)


NOT_MERGED = {
    "a residual sum": lambda m, x: m.bn(h := m.fc(x)) + h,
    "the model's output": lambda m, x: (m.bn(h := m.fc(x)), h)[1],
    "a method": lambda m, x: m.bn(h := m.fc(x)) * h.mean(),
    "two norms": lambda m, x: m.bn(h := m.fc(x)) + m.bn2(h),
    "an in-place operation": lambda m, x: m.bn(m.fc(x).relu_()),
    "an in-place operation whose result is dropped": lambda m, x: (F.relu_(h := m.fc(x)), m.bn(h))[1],
    "an assignment": lambda m, x: (h := m.fc(x), h.__setitem__(0, 1.0), m.bn(h))[2],
    "an output argument": lambda m, x: (h := m.fc(x), torch.add(x, x, out=h), m.bn(h))[2],
    "an iteration": lambda m, x: (h := m.fc(x), m.bn(h) + torch.stack(list(h)))[1],
    "a dropout": lambda m, x: m.bn(F.dropout(m.fc(x), 0.5, m.training)),
    "a view": lambda m, x: m.bn(m.fc(x)[:, torch.tensor([3, 2, 1, 0])]),
    "a cast": lambda m, x: m.bn(m.fc(x).double().float()),
    "a functional norm": lambda m, x: m.bn(x) + F.batch_norm(m.fc(x), m.bn2.running_mean, m.bn2.running_var),
}


@pytest.mark.parametrize("run", NOT_MERGED.values(), ids=NOT_MERGED.keys())
def test_a_layer_whose_output_goes_elsewhere_too_is_not_merged(run):
    net = Net(run, fc=nn.Linear(4, 4), bn=nn.BatchNorm1d(4), bn2=nn.BatchNorm1d(4, affine=False))
    assert summary(find(net)) == {"fc": ("linear", None), "bn": ("norm", "bn")}


MERGED = {
    "directly": lambda m, x: m.bn(m.fc(x)),
    "after a look at its shape": lambda m, x: m.bn(h) if (h := m.fc(x)).shape[0] and h.dim() == h.size(1) - 2 else h,
    "through calls that return the same tensor": lambda m, x: m.bn(m.fc(x).contiguous().float().to(x.dtype)),
    "by keyword": lambda m, x: m.bn(input=m.fc(x)),
    "through an identity": lambda m, x: m.bn(nn.Identity()(m.fc(x))),
    "with an in-place operation behind the norm": lambda m, x: m.bn(m.fc(x)).relu_().add_(x),
}


@pytest.mark.parametrize("run", MERGED.values(), ids=MERGED.keys())
def test_a_layer_whose_only_reader_is_a_norm_is_merged(run):
    assert summary(find(Net(run, fc=nn.Linear(4, 4), bn=nn.BatchNorm1d(4)))) == {"fc": ("linear", "bn")}


def test_a_linear_layer_over_tokens_is_not_merged_with_a_norm_over_tokens():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    assert summary(find(net, N, 6, 4)) == {"0": ("linear", None), "1": ("norm", "1")}


def test_a_layer_called_twice_is_one_unit_and_is_not_merged():
    net = Net(lambda m, x: m.bn(m.fc(m.fc(x).relu())), fc=nn.Linear(4, 4), bn=nn.BatchNorm1d(4)).double()
    x = torch.randn(N, 4, dtype=torch.float64)
    coverage = xkfac.find_units(net, x)
    assert [(u.name, u.norm, u.calls) for u in coverage.units] == [("fc", None, 2), ("bn", "bn", 1)]
    assert_replays(net, x, coverage.units)


def test_layers_that_share_a_weight_in_the_same_way_are_one_unit():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    (unit,) = find(net).units
    assert (unit.name, unit.calls) == ("0", 2)


class Conditional(nn.BatchNorm1d):
    """A norm whose gamma and beta come from a layer of its own."""

    def __init__(self, features):
        super().__init__(features, affine=False)
        self.gamma = nn.Linear(features, features)

    def forward(self, x):
        gamma = self.gamma(x).mean(0)
        return F.batch_norm(x, self.running_mean, self.running_var, gamma, -gamma, False, 0.1, self.eps)


def test_a_layer_is_not_merged_with_a_norm_whose_affine_map_is_computed():
    net = nn.Sequential(nn.Linear(4, 4), Conditional(4))
    assert summary(find(net)) == {"0": ("linear", None), "1.gamma": ("linear", None)}


def test_a_norm_without_beta_is_merged():
    net = randomise_norms(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).double()
    net[1].bias = None
    x = torch.randn(N, 4, dtype=torch.float64)
    coverage = xkfac.find_units(net, x)
    assert coverage.units == (Unit("0", "linear", (1, 4, 5), "0.weight", "0.bias", "1"),)
    assert_partition(net, coverage)
    assert_replays(net, x, coverage.units)


class Shifted(nn.BatchNorm1d):
    """A norm whose gamma is counted from one."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight + 1, self.bias, False, 0.1, self.eps)


def tied_norms():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    net[3].weight = net[1].weight
    return net


def positive_norm():
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    parametrize.register_parametrization(net[1], "weight", nn.Softplus())
    return net


def folded(bn):
    return Net(lambda m, x: m.bn(x.flatten(0, 1)).view_as(x), bn=bn)


BAD_NORMS = {
    "twice": (
        lambda: Net(lambda m, x: m.bn(m.bn(x)), bn=nn.BatchNorm1d(4)),
        "'bn' is called 2 times in one forward pass.*or exclude 'bn'",
    ),
    "twice behind layers": (
        lambda: Net(
            lambda m, x: m.bn(m.a(x)) + m.bn(m.b(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4), bn=nn.BatchNorm1d(4)
        ),
        "'bn' is called 2 times in one forward pass",
    ),
    "no statistics": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        "'1' has no running statistics.*track_running_stats=True, or exclude '1'",
    ),
    "no statistics, no parameters": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False, track_running_stats=False)),
        "'1' has no running statistics.*or exclude '1'",
    ),
    "transformed": (lambda: nn.Sequential(nn.Linear(4, 4), Shifted(4)), "'1' transforms its gamma.*or exclude '1'"),
    "parametrised": (positive_norm, "'1' transforms its gamma, beta or statistics"),
    "tied": (tied_norms, "'1' transforms its gamma, beta or statistics, or shares them"),
    "not over the batch": (lambda: folded(nn.BatchNorm1d(4)), "'bn' normalises 15 rows for a batch of 5 examples"),
}


@pytest.mark.parametrize(("make", "message"), BAD_NORMS.values(), ids=BAD_NORMS.keys())
def test_a_norm_without_a_merged_weight_of_its_own_is_an_error_that_names_it_and_excluding_it_helps(make, message):
    net = make()
    x = torch.randn(N, 3, 4) if "rows" in message else torch.randn(N, 4)
    with pytest.raises(xkfac.UnitError, match=message):
        xkfac.find_units(net, x)
    path = message.split("'")[1]
    coverage = xkfac.find_units(net, x, exclude=path)
    assert all(unit.norm != path for unit in coverage.units)
    assert_partition(net, coverage)


@pytest.mark.parametrize("lazy", [nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d(affine=False)])
def test_lazy_modules_must_have_run(lazy):
    net = nn.Sequential(nn.Linear(4, 4), lazy)
    with pytest.raises(xkfac.UnitError, match=r"'1\.\w+' is not initialised yet; run the lazy model once"):
        xkfac.find_units(net, torch.randn(N, 4))
    with pytest.raises(xkfac.UnitError, match="is not initialised yet"):
        xkfac.estimate(net, [torch.randn(N, 4)])
    net(torch.randn(N, 4))
    find(net)


def test_a_functional_linear_map_of_a_parameter_is_a_unit():
    run = lambda m, x: m.bn(F.linear(x, bias=m.b, weight=m.w))  # noqa: E731
    net = Net(run, w=weight(3, 4), b=weight(3), bn=nn.BatchNorm1d(3))
    assert find(net).units == (Unit("w", "linear", (1, 3, 5), "w", "b", "bn"),)


def test_a_forward_function_says_how_the_network_runs():
    net = Net(None, fc=nn.Linear(4, 3), bn=nn.BatchNorm1d(3))
    batch = {"a": torch.randn(N, 4), "b": torch.zeros(N, 3)}
    coverage = xkfac.find_units(net, batch, forward=lambda m, b: m.bn(m.fc(b["a"])) + b["b"])
    assert summary(coverage) == {"fc": ("linear", "bn")}


def test_units_are_found_under_inference_mode_and_autocast():
    net = pair()
    for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            assert summary(find(net)) == {"0": ("linear", "1"), "3": ("linear", None)}
