"""Every parameter of a network is covered once: by a unit, as a free parameter, or excluded by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import xkfac
from tests.helpers.unit_checks import N, Net, find, pair, summary, weight
from xkfac.model.units import Unit, parameters_of


class Standardised(nn.Conv1d):
    def forward(self, x):
        return F.conv1d(x, self.weight - self.weight.mean((1, 2), keepdim=True), self.bias)


class TiedLanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x.abs().long() % 7))


def attention():
    return Net(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2, batch_first=True))


def shared_bias():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].bias = net[0].bias
    return net


FREE = {
    "layer norm": (lambda: nn.LayerNorm(4), (N, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (N, 4)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (N, 4, 6)),
    "prelu": (lambda: nn.PReLU(), (N, 4)),
    "embedding": (lambda: Net(lambda m, x: m.table(x.abs().long()), table=nn.Embedding(9, 4)), (N, 4)),
    "attention": (attention, (N, 3, 4)),
    "lstm": (lambda: Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(4, 3, batch_first=True)), (N, 3, 4)),
    "a parameter": (lambda: Net(lambda m, x: x * m.scale, scale=weight(4)), (N, 4)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), (N, 4)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), (N, 4)),
    "weight standardisation": (lambda: Standardised(4, 4, 3), (N, 4, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 3, 2), (N, 4, 3, 3)),
    "tied embedding": (TiedLanguageModel, (N, 6)),
    "shared bias": (shared_bias, (N, 4)),
    "weight vector": (lambda: Net(lambda m, x: F.linear(x, m.w)[:, None], w=weight(4)), (N, 4)),
    "broadcast bias": (
        lambda: Net(lambda m, x: F.linear(x, m.w, m.b), w=weight(3, 4), b=weight(1)),
        (N, 4),
    ),
    "two geometries": (
        lambda: Net(lambda m, x: F.conv1d(x, m.w) + F.conv1d(x, m.w, padding=1, dilation=2), w=weight(4, 4, 3)),
        (N, 4, 6),
    ),
    "first dimension not the batch": (lambda: Net(lambda m, x: m.fc(x.transpose(0, 1)), fc=nn.Linear(4, 3)), (N, 3, 4)),
    "batch folded away": (lambda: Net(lambda m, x: m.fc(x.flatten(0, 1)), fc=nn.Linear(4, 3)), (N, 3, 4)),
    "unbatched convolution": (lambda: Net(lambda m, x: m.conv(x.t()), conv=nn.Conv1d(4, N, 3)), (N, 4)),
}  # fmt: skip


@pytest.mark.parametrize(("make", "shape"), FREE.values(), ids=FREE.keys())
def test_parameters_outside_linear_maps_are_free(make, shape):
    net = make()
    coverage = find(net, *shape)
    expected = [Unit(n, "free", (1, 1, p.numel()), weight=n) for n, p in net.named_parameters()]
    assert list(coverage.units) == expected
    assert all(row.note == "" for row in coverage.rows)


EXCLUDE = {
    "a module": ("3", {"0": ("linear", "1")}),
    "the layer of a pair": ("0", {"1": ("norm", "1"), "3": ("linear", None)}),
    "the norm of a pair": (["1"], {"0": ("linear", None), "3": ("linear", None)}),
    "gamma alone": ("1.weight", {"0": ("linear", None), "1.bias": ("free", None), "3": ("linear", None)}),
    "a bias alone": (("3.bias",), {"0": ("linear", "1"), "3.weight": ("free", None)}),
    "a pattern": (["*.weight"], {"0.bias": ("free", None), "1.bias": ("free", None), "3.bias": ("free", None)}),
    "a range": ("[13]", {"0": ("linear", None)}),
    "everything": ("*", {}),
}


@pytest.mark.parametrize(("exclude", "expected"), EXCLUDE.values(), ids=EXCLUDE.keys())
def test_exclude(exclude, expected):
    coverage = find(pair(), exclude=exclude)
    assert summary(coverage) == expected
    assert {r.parameter for r in coverage.rows if r.kind == "excluded"} == {r.parameter for r in coverage.rows} - {
        name for unit in coverage.units for name in parameters_of(pair(), unit)
    }


def test_a_tied_parameter_is_excluded_by_either_name():
    for name in ("embed", "head", "head.weight"):
        assert find(TiedLanguageModel(), N, 6, exclude=name).units == ()


def test_a_name_that_excludes_nothing_is_an_error_with_a_suggestion():
    net = Net(lambda m, x: m.classifier(x), classifier=nn.Linear(4, 2))
    with pytest.raises(
        xkfac.UnitError, match=r"'clasifier' matches no parameter of the model \(did you mean 'classifier'"
    ):
        xkfac.find_units(net, torch.randn(N, 4), exclude="clasifier")
    with pytest.raises(xkfac.UnitError, match=r"^exclude: 'zzz' matches no parameter of the model$"):
        xkfac.find_units(net, torch.randn(N, 4), exclude="zzz")


def test_without_merging_a_layer_and_its_norm_are_two_units_and_without_units_all_is_free():
    net = pair()
    split = {"0": ("linear", None), "1": ("unmerged", "1"), "3": ("linear", None)}
    coverage = find(net, merge=False)
    assert summary(coverage) == split
    assert coverage.units[1] == Unit("1", "unmerged", (coverage.units[0].shape[1], 1, 4), norm="1")
    assert summary(find(net, per_parameter=True)) == {name: ("free", None) for name, _ in net.named_parameters()}


def test_the_table_shows_every_parameter():
    net = Net(lambda m, x: m.bn(m.fc(x)), fc=nn.Linear(4, 3), bn=nn.BatchNorm1d(3), spare=nn.Linear(50, 100))
    lines = str(find(net, exclude="spare.bias")).splitlines()
    assert [line.split(maxsplit=4) for line in lines[:-1]] == [
        ["parameter", "unit", "kind", "size", "note"],
        ["fc.weight", "fc", "linear", "12", "merged with bn"],
        ["fc.bias", "fc", "linear", "3", "merged with bn"],
        ["bn.weight", "fc", "linear", "3", "merged with fc"],
        ["bn.bias", "fc", "linear", "3", "merged with fc"],
        ["spare.weight", "spare.weight", "free", "5,000", "not seen in the forward pass"],
        ["spare.bias", "-", "excluded", "100", "not seen in the forward pass"],
    ]
    assert lines[-1] == "2 units, 6 parameters, 5,121 numbers"
