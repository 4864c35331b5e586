"""Find the units of any network by running it once.

A unit is the part of a network that is penalised as one matrix W~: a linear or convolutional layer together with the
BN that consumes its output, such a layer alone, a BN alone, or, for every parameter outside these, the free parameter
itself. Where nothing is merged, the layer is a unit and its BN another, whose gamma, beta, mu and sigma are penalised
one by one. A forward pass is watched at the level of torch functions, so what counts is what a network does, not how
its modules are named: a weight that is standardised, tied or otherwise transformed before use is a free parameter.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac.errors import UnitError
from xkfac.model.batches import Forward, default_forward, size_of, tensors, to_device
from xkfac.model.passes import device_of, norms_of, untouched, unwrap
from xkfac.model.patterns import as_patterns as as_patterns
from xkfac.model.patterns import excluded_names, patterns_for
from xkfac.model.tracing import Call, Convolution, Trace, read_call

Kind = Literal["linear", "conv", "norm", "unmerged", "free"]

UNSEEN = "not seen in the forward pass"
"""The note on a parameter that the discovery pass did not use."""

_SAME_TENSOR = (Tensor.contiguous, Tensor.to, Tensor.float, Tensor.double, Tensor.type_as)
_BATCH_NORM = inspect.signature(F.batch_norm)


@dataclass(frozen=True)
class Unit:
    """A unit: which parameters and BN it is made of, and the shape [groups, rows, columns] of its merged weight W~.

    `columns` counts the homogeneous coordinate, present where the unit has a bias of its own or through its BN. A
    layer that a forward pass calls several times has these `calls` as further positions. A BN alone is of the kind
    `norm`, the affine map [C, 1, 2] that it applies, or `unmerged`, its gamma, beta, mu and sigma [C, 1, 4].
    """

    name: str
    kind: Kind
    shape: tuple[int, int, int]
    weight: str | None = None
    bias: str | None = None
    norm: str | None = None
    convolution: Convolution | None = None
    calls: int = 1

    @property
    def homogeneous(self) -> bool:
        """Whether the input of the unit's linear map is extended by a 1."""
        return self.kind != "free" and (self.norm is not None or self.bias is not None)


@dataclass(frozen=True)
class Row:
    """How one parameter, or a statistic that is penalised as one, is treated: the line of it in a summary."""

    parameter: str
    unit: str
    kind: str
    size: int
    note: str = ""


@dataclass(frozen=True)
class Coverage:
    """The units of a network, and a row for every one of its parameters, then of the statistics of unmerged BN.

    input_rows: the first dimension of the input of every weight that a linear map has used, by the weight's name.
    """

    units: tuple[Unit, ...]
    rows: tuple[Row, ...]
    input_rows: dict[str, int] = field(default_factory=dict, compare=False, repr=False)

    def noted(self, units: Iterable[str], note: str) -> Self:
        """Return the coverage with a note added to the rows of some units."""
        chosen = set(units)
        rows = (replace(r, note=f"{r.note}, {note}" if r.note else note) if r.unit in chosen else r for r in self.rows)
        return replace(self, rows=tuple(rows))

    def __str__(self) -> str:
        """Return the table of all parameters."""
        head = ("parameter", "unit", "kind", "size", "note")
        lines = [head, *((r.parameter, r.unit, r.kind, f"{r.size:,}", r.note) for r in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        total = sum(row.size for row in self.rows)
        return "\n".join([*text, f"{len(self.units)} units, {len(self.rows)} parameters, {total:,} numbers"])


@dataclass
class _Layer:
    """What a discovery pass saw of one weight that linear maps use."""

    calls: list[Call] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


class _Discovery(Trace):
    """Records linear maps, BN calls, and who uses the parameters and the outputs of linear maps.

    The user of a parameter is the weight whose linear map it is part of, or the BN that it is gamma or beta of; the
    user of an output is the BN that normalises it; for any other use it is None.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.norms: dict[str, Any] = dict(norms_of(model))
        self.layers: dict[str, _Layer] = defaultdict(_Layer)
        self.norm_inputs: dict[str, list[Tensor | None]] = defaultdict(list)
        self.users: dict[str, set[str | None]] = defaultdict(set)
        self.output_users: dict[int, set[str | None]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = [*tensors(args), *tensors(kwargs)]
        versions = [_version(tensor) for tensor in arguments]
        result = func(*args, **kwargs)
        if func in _SAME_TENSOR and any(result is tensor for tensor in arguments):
            return result
        # Reading a shape is no use; x[0] = 1 is one, though it returns nothing.
        if next(tensors(result), None) is None and versions == [_version(tensor) for tensor in arguments]:
            return result
        call = read_call(func, args, kwargs)
        if call is not None:
            user = self.names.get(id(call.weight))
            self._use(arguments, user, (call.weight, call.bias))
            if user is not None:
                self.layers[user].calls.append(call)
                self.layers[user].outputs.append(result)
                self.output_users[id(result)] = set()
        elif func is F.batch_norm and self.norm is not None:
            input = self._norm_input(*args, **kwargs)
            self.norm_inputs[self.norm].append(input)
            norm = self.norms[self.norm]
            self._use(arguments, None if input is None else self.norm, (norm.weight, norm.bias), input)
        else:
            self._use(arguments, None, ())
        return result

    def _norm_input(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the input of the running BN, or None where it does not use its own gamma, beta and statistics."""
        norm, call = self.norms[self.norm or ""], _BATCH_NORM.bind(*args, **kwargs)
        call.apply_defaults()
        own = all(call.arguments[name] is getattr(norm, name) for name in ("weight", "bias", "running_mean"))
        return call.arguments["input"] if own and call.arguments["eps"] == norm.eps else None

    def _use(
        self, arguments: list[Tensor], user: str | None, own: Sequence[Tensor | None], normed: Tensor | None = None
    ) -> None:
        for tensor in arguments:
            if id(tensor) in self.output_users:
                self.output_users[id(tensor)].add(user if tensor is normed else None)
            if id(tensor) in self.names:
                self.users[self.names[id(tensor)]].add(user if any(tensor is part for part in own) else None)

    def affine_names(self, path: str) -> list[str]:
        """Return the names of a BN's gamma and beta."""
        norm = self.norms[path]
        pairs = ((name, getattr(norm, name)) for name in ("weight", "bias"))
        return [self.names.get(id(tensor), _join(path, name)) for name, tensor in pairs if tensor is not None]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def find_units(
    model: nn.Module,
    batch: Any,
    *,
    merge: bool = True,
    per_parameter: bool = False,
    exclude: Iterable[str] = (),
    forward: Forward | None = None,
) -> Coverage:
    """Run `model` once on `batch` and return its units.

    With `merge=False` nothing is merged: a layer and the BN behind it are two units, and that of a BN holds its gamma,
    beta, mu and sigma one by one. With `per_parameter` every parameter is a free one (plain EWC). `exclude` names
    parameters, modules (all their parameters) or patterns such as "head*" that are left out. `forward(model, batch)`
    says how the model takes a batch.

    Raises UnitError for BN layers that have no merged weight of their own: without running statistics,
    called more than once, with a gamma or beta that is transformed or shared, or with a first
    dimension that is not the batch.
    """
    model = unwrap(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise UnitError(f"'{name}' is not initialised yet; run the lazy model once before looking for its units")
    excluded = excluded_names(model, exclude)
    trace = _Discovery(model)
    batch = to_device(batch, device_of(model))
    with untouched(model), torch.no_grad(), trace.running():
        model.eval()
        output = (forward or default_forward)(model, batch)
    trace._use(list(tensors(output)), None, ())
    units = [] if per_parameter else list(_layers_and_norms(trace, size_of(batch), merge, excluded))
    taken = {name for unit in units for name in parameters_of(model, unit)}
    for name, parameter in model.named_parameters():
        if name not in taken and name not in excluded:
            units.append(Unit(name, "free", (1, 1, parameter.numel()), weight=name))
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    # A BN without gamma and beta has no place among the parameters; where it is a unit by itself, it comes last.
    units.sort(key=lambda unit: min((order[name] for name in parameters_of(model, unit)), default=len(order)))
    input_rows = {weight: layer.calls[0].input.shape[0] for weight, layer in trace.layers.items()}
    return Coverage(tuple(units), tuple(_rows(model, units, excluded, set(trace.users))), input_rows)


def parameters_of(model: nn.Module, unit: Unit) -> tuple[str, ...]:
    """Return the names of the parameters that a unit is made of."""
    names = [name for name in (unit.weight, unit.bias) if name is not None]
    if unit.norm is not None:
        norm = model.get_submodule(unit.norm)
        names += [_join(unit.norm, name) for name in ("weight", "bias") if getattr(norm, name) is not None]
    return tuple(names)


def _layers_and_norms(trace: _Discovery, size: int, merge: bool, excluded: set[str]) -> Iterator[Unit]:
    merged: set[str] = set()
    faults: dict[str, str] = {}
    for weight, layer in trace.layers.items():
        biases = {id(call.bias) for call in layer.calls if call.bias is not None}
        parts = [weight, *(trace.names.get(bias, "") for bias in biases)]
        if not _is_unit(trace, layer, parts, size) or excluded.intersection(parts):
            continue
        norm = _norm_behind(trace, layer) if merge else None
        if norm is not None and excluded.intersection([norm, *trace.affine_names(norm)]):
            norm = None
        if norm is not None:
            merged.add(norm)
        yield _layer_unit(weight, parts[1] if len(parts) == 2 else None, norm, layer.calls)
    for path in trace.norm_inputs:
        affine = trace.affine_names(path)
        # Read as an affine map, a lone BN without gamma and beta is a constant; its mu and sigma by themselves are not.
        if excluded.intersection([path, *affine]) or (merge and path not in merged and not affine):
            continue
        fault = _fault_of(trace, path, size)
        if fault is not None:
            faults[path] = fault
        elif path not in merged:
            name = _join(path, "weight").removesuffix(".weight")
            kind: Kind = "norm" if merge else "unmerged"
            yield Unit(name, kind, (trace.norms[path].num_features, 1, 2 if merge else 4), norm=path)
    if faults:
        raise _refused(trace.model, faults)


def _layer_unit(weight: str, bias: str | None, norm: str | None, calls: list[Call]) -> Unit:
    call = calls[0]
    columns = call.weight[0].numel() + (bias is not None or norm is not None)
    return Unit(
        name=weight.removesuffix(".weight"),
        kind="linear" if call.convolution is None else "conv",
        shape=(call.groups, call.weight.shape[0] // call.groups, columns),
        weight=weight,
        bias=bias,
        norm=norm,
        convolution=call.convolution,
        calls=len(calls),
    )


def _is_unit(trace: _Discovery, layer: _Layer, parts: list[str], size: int) -> bool:
    """Whether all uses of these parameters are calls of one linear map with examples along the first dimension."""
    first = layer.calls[0]
    rows, rank = first.weight.shape[0], first.weight.dim()
    if first.convolution is None and rank != 2:
        return False
    same = all(
        (call.convolution, call.groups, call.bias is None) == (first.convolution, first.groups, first.bias is None)
        and (call.bias is None or call.bias.shape == (rows,))
        for call in layer.calls
    )
    batched = all(
        call.input.shape[0] == size
        and (call.input.dim() >= rank if call.convolution is None else call.input.dim() == rank)
        for call in layer.calls
    )
    return same and batched and len(parts) <= 2 and all(trace.users[part] == {parts[0]} for part in parts)


def _norm_behind(trace: _Discovery, layer: _Layer) -> str | None:
    """Return the BN that is the only user of the layer's only output, its channels being the layer's rows."""
    if len(layer.outputs) != 1 or (layer.calls[0].convolution is None and layer.outputs[0].dim() != 2):
        return None
    users = trace.output_users[id(layer.outputs[0])]
    return next(iter(users)) if len(users) == 1 else None


def _fault_of(trace: _Discovery, path: str, size: int) -> str | None:
    """Return why a BN has no merged weight of its own, and what to do about it; None if it has one."""
    norm, inputs = trace.norms[path], trace.norm_inputs[path]
    if norm.running_mean is None:
        return "has no running statistics, so it has no anchor; build it with track_running_stats=True"
    if len(inputs) > 1:
        return (
            f"is called {len(inputs)} times in one forward pass, so it has {len(inputs)} merged weights; give each "
            "call a BN of its own"
        )
    if inputs[0] is None or any(trace.users[name] != {path} for name in trace.affine_names(path)):
        return (
            "transforms its gamma, beta or statistics, or shares them with another layer, so it has no merged weight "
            "of its own; give it plain parameters of its own"
        )
    if inputs[0].shape[0] != size:
        return (
            f"normalises {inputs[0].shape[0]} rows for a batch of {size} examples; keep the batch as its first "
            "dimension"
        )
    return None


def _refused(model: nn.Module, faults: dict[str, str]) -> UnitError:
    """Return the error for BN layers with their faults: all of them are named, with patterns that exclude them all."""
    if len(faults) == 1:
        ((path, fault),) = faults.items()
        return UnitError(f"'{path}' {fault}, or exclude '{path}'")
    kinds = {re.sub(r"\d+", "", fault): f"'{path}' {fault}" for path, fault in reversed(faults.items())}
    return UnitError(
        f"{'; '.join(reversed(kinds.values()))}; or add {patterns_for(model, faults)} to exclude, which leaves out all "
        f"{len(faults)} BN layers that are refused: {', '.join(map(repr, faults))}"
    )


def _rows(model: nn.Module, units: list[Unit], excluded: set[str], used: set[str]) -> Iterator[Row]:
    owner = {name: unit for unit in units for name in parameters_of(model, unit)}
    for name, parameter in model.named_parameters():
        unit = owner.get(name)
        note = "" if name in used else UNSEEN
        if unit is None:
            yield Row(name, "-", "excluded", parameter.numel(), note)
            continue
        if unit.norm is not None and unit.weight is not None:
            note = f"merged with {unit.norm}" if name in (unit.weight, unit.bias) else f"merged with {unit.name}"
        yield Row(name, unit.name, unit.kind, parameter.numel(), note)
    for unit in units:
        if unit.kind == "unmerged" and unit.norm is not None:
            for name, note in (("running_mean", "mu, a statistic"), ("running_var", "sigma, a statistic")):
                yield Row(_join(unit.norm, name), unit.name, unit.kind, unit.shape[0], note)
