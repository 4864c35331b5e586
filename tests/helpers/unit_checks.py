"""Networks for tests of units, what must hold for all coverages, and the replay of a network unit by unit."""

import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from xkfac.curvature.moments import unit_gradients
from xkfac.curvature.patches import Patches
from xkfac.model.merged_weight import bind
from xkfac.model.passes import norms_of
from xkfac.model.units import Trace, parameters_of, read_call

N = 5


class Net(nn.Module):
    """The given modules as attributes, and a forward that is given the net itself."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.run(self, x)


def weight(*shape):
    return nn.Parameter(torch.randn(*shape))


def find(model, *shape, **options):
    """Return the coverage of a model that takes an input of this shape."""
    coverage = xkfac.find_units(model, torch.randn(*(shape or (N, 4))), **options)
    assert_partition(model, coverage)
    return coverage


def assert_partition(model, coverage):
    """Every parameter has one row, in order; every unit has exactly the parameters whose rows name it.

    The statistics of unmerged BN follow, two a BN.
    """
    parameters = dict(model.named_parameters())
    rows, statistics = coverage.rows[: len(parameters)], coverage.rows[len(parameters) :]
    assert [row.parameter for row in rows] == list(parameters)
    unmerged = [unit.norm for unit in coverage.units if unit.kind == "unmerged"]
    names = [f"{norm}.{name}" for norm in unmerged for name in ("running_mean", "running_var")]
    assert [row.parameter for row in statistics] == names
    units = {unit.name: unit for unit in coverage.units}
    assert len(units) == len(coverage.units)
    for row in rows:
        assert row.size == parameters[row.parameter].numel()
        if row.kind == "excluded":
            assert row.unit == "-"
        else:
            assert row.kind == units[row.unit].kind
            assert row.parameter in parameters_of(model, units[row.unit])
    assert sum(len(parameters_of(model, unit)) for unit in units.values()) == sum(r.unit != "-" for r in rows)


def summary(coverage):
    """Return {unit: (kind, norm)}."""
    return {unit.name: (unit.kind, unit.norm) for unit in coverage.units}


def pair():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


class Recorder(Trace):
    """Copies the input of each unit's layer (or lone BN) and the output of its BN (or lone layer), call by call."""

    def __init__(self, model, units):
        super().__init__(model)
        self.layers = {id(model.get_parameter(u.weight)): u for u in units if u.kind in ("linear", "conv")}
        self.norms = {u.norm: u for u in units if u.norm is not None}
        self.inputs = {u.name: [] for u in units}
        self.outputs = {u.name: [] for u in units}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        call = read_call(func, args, kwargs)
        layer = self.layers.get(id(call.weight)) if call is not None else None
        norm = self.norms.get(self.norm) if func is F.batch_norm and self.norm is not None else None
        if layer is not None:
            self.inputs[layer.name].append(call.input.clone())
        if norm is not None and norm.kind == "norm":
            self.inputs[norm.name].append(args[0].clone())
        result = func(*args, **kwargs)
        unit = norm or (layer if layer is not None and layer.norm is None else None)
        if unit is not None:
            self.outputs[unit.name].append(result.clone())
        return result


def randomise_norms(model):
    """Give every BN statistics, gamma and beta that no default would hide."""
    for norm in norms_of(model).values():
        norm.running_mean.normal_(std=0.3)
        norm.running_var.uniform_(0.5, 2.0)
        if norm.weight is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
            torch.nn.init.normal_(norm.bias, std=0.3)
    return model


@torch.no_grad()
def assert_replays(model, x, units, rtol=1e-9):
    """Check that W~ applied to a unit's unrolled homogeneous input is what the network computes, in evaluation mode."""
    model.eval()
    recorder = Recorder(model, [u for u in units if u.kind != "free"])
    with recorder.running():
        model(x)
    bound = bind(model, units)
    for unit in units:
        if unit.kind == "free":
            continue
        assert len(recorder.inputs[unit.name]) == len(recorder.outputs[unit.name]) == unit.calls, unit.name
        weight = bound[unit.name].merged_weight()
        assert weight.shape == unit.shape
        for input, output in zip(recorder.inputs[unit.name], recorder.outputs[unit.name], strict=True):
            patches = Patches(unit)
            replayed = patches.unrolled(patches.image([input], input.dtype)) @ weight.mT[:, None]
            truth = unit_gradients(unit, output, output.dtype)
            assert replayed.shape == truth.shape, unit.name
            assert (replayed - truth).abs().max() <= rtol * truth.abs().max(), unit.name
