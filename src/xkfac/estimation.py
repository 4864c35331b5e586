"""Estimate the curvature of a network: the Fisher information of its units, from one backward pass a batch.

With labels drawn from the model's own output, the cross terms between different examples' losses vanish in
expectation, so the gradient G of the batch's *summed* loss is all that is needed: H' = E[sum_m G_m G_m^T] / N and
H'' = E[(sum_m G_m)(sum_m G_m)^T] / N, inter-example terms of BN included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac.batches import Forward, default_forward, labels_of, size_of
from xkfac.collecting import (
    Collector,
    Collectors,
    FactorCollector,
    JointCollector,
    JointMember,
    MarginalCollector,
    SquareCollector,
    UnmergedCollector,
)
from xkfac.curvature import Basis, Curvature, CurvatureKind, Labels, Settings
from xkfac.errors import NotFiniteError, UnitError, XkfacError
from xkfac.factors import Form, Grouping, Moments
from xkfac.graphs import Replayed
from xkfac.kronecker import Block, Corrected, Kronecker, eigenbasis
from xkfac.likelihood import Likelihood, get_likelihood
from xkfac.merging import BoundUnit
from xkfac.passes import (
    Progress,
    Statistics,
    batches,
    count_batches,
    device_of,
    full_precision,
    set_mode,
    untouched,
    unwrap,
)
from xkfac.tracing import Trace, read_call
from xkfac.units import Coverage, Unit, find_units


@dataclass
class Estimate:
    """A curvature with the units it covers and the number of examples it rests on."""

    curvature: Curvature
    coverage: Coverage
    examples: int


def estimate(
    model: nn.Module,
    loader: Iterable[Any],
    kind: CurvatureKind = "xkfac",
    *,
    form: Form = "mean",
    grouping: Grouping = "paper",
    labels: Labels = "sampled",
    draws: int | None = None,
    statistics: Statistics = "batch",
    cross_layer: bool = False,
    basis: Basis = "gradients",
    likelihood: str | Likelihood = "categorical",
    merge: bool = True,
    units: bool = True,
    exclude: Iterable[str] = (),
    forward: Forward | None = None,
    max_batches: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: Progress = False,
    graph: bool = False,
) -> Estimate:
    """Estimate the curvature of `model` on the data of `loader`; the model is left as it was, bit by bit.

    `kind` to `basis` are explained at `Settings`; `merge`, `units`, `exclude` and `forward` at `find_units`.
    Factors are accumulated in `dtype`, float32 unless the model is float64, also under autocast. `seed` fixes the
    labels that are drawn. With `graph` the work of a batch is recorded as a CUDA graph and replayed for all batches of
    the same shape, which pays on a GPU for small networks. The network runs in evaluation mode but for its BN, which
    uses mini-batch statistics; a batch of a single example has none and runs with the population's.

    Raises UnitError for a network, XkfacError for arguments or data, that cannot be treated.
    """
    settings = Settings(kind, form, grouping, labels, draws, statistics, cross_layer, basis)
    run = _Run(
        unwrap(model),
        settings,
        get_likelihood(likelihood),
        forward or default_forward,
        dtype or _wide_dtype(model),
        seed,
        lambda batch: find_units(model, batch, merge=merge, units=units, exclude=exclude, forward=forward),
        graph,
    )
    if graph and device_of(run.model).type != "cuda":
        raise XkfacError("graph=True needs the model on a CUDA device; leave it out")
    with untouched(run.model):
        feed = {"max_batches": max_batches, "progress": progress}
        collectors, examples = run.over(loader, run.first_collector, **feed)
        with full_precision(device_of(run.model)):
            curvature = collectors.curvature()
            _check_finite(curvature)
            bases = {name: _basis(block) for name, block in curvature.blocks.items()} if kind == "corrected" else {}
        if kind == "corrected":
            collectors, again = run.over(
                loader, lambda unit: SquareCollector(unit, run.dtype, bases[unit.name]), **feed
            )
            if again != examples:
                raise XkfacError(
                    f"kind='corrected' passes over the data twice, and the loader gave {examples} examples, then "
                    f"{again}; use a loader that can be iterated again"
                )
            curvature = collectors.curvature()
    _check_finite(curvature)
    assert run.coverage is not None
    return Estimate(curvature, run.coverage, examples)


def _check_finite(curvature: Curvature) -> None:
    for unit, tensor in curvature.tensors():
        if not bool(tensor.isfinite().all()):
            raise NotFiniteError(
                f"the factors of unit '{unit}' are not finite; check the data and the network's outputs, or estimate "
                "in float32 instead of a reduced precision"
            )


def _wide_dtype(model: nn.Module) -> torch.dtype:
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _basis(block: Block) -> Corrected | None:
    if not isinstance(block, Kronecker):
        return None
    return eigenbasis(*block.marginals())


def _exactly(device: torch.device) -> AbstractContextManager[Any]:
    """Return `full_precision`, or nothing where nothing would be rounded: a unit needs this twice a batch."""
    return full_precision(device) if torch.is_autocast_enabled(device.type) else nullcontext()


class _Capture(Trace):
    """Shows every unit's inputs and output gradients to its collector."""

    def __init__(self, model: nn.Module, units: Iterable[Unit], collectors: Collectors) -> None:
        super().__init__(model)
        self.collectors = collectors
        self.layers = {id(model.get_parameter(u.weight)): u for u in units if u.kind in ("linear", "conv") and u.weight}
        self.norms = {u.norm: u for u in units if u.norm is not None}
        self.leaves: list[Tensor] = []
        self.woken: dict[int, Tensor] = {}
        self.weight = 1.0
        self.examples = 0
        self._calls: dict[str, int] = {}
        self._inputs: dict[str, list[Tensor]] = {}
        self._gradients: dict[str, dict[int, Tensor]] = {}

    def watch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = read_call(func, args, kwargs)
        unit = self.layers.get(id(call.weight)) if call is not None else None
        if call is not None and unit is not None:
            self._see_input(unit, call.input)
            if unit.norm is not None:
                return func(*args, **kwargs)
            self._wake(call.input, call.bias, call.weight)
            return self._tap(unit, func(*args, **kwargs))
        unit = self.norms.get(self.norm) if func is F.batch_norm and self.norm is not None else None
        if unit is None:
            return func(*args, **kwargs)
        input = args[0] if args else kwargs["input"]
        if unit.weight is None:
            self._see_input(unit, input)
        self._wake(input, getattr(self.model.get_submodule(str(self.norm)), "bias", None))
        return self._tap(unit, func(*args, **kwargs))

    def begin_batch(self, examples: int) -> None:
        """Forget the graph of the batch before."""
        self.examples = examples
        self.leaves = []
        for seen in (self._calls, self._inputs, self._gradients):
            seen.clear()

    def end_forward(self) -> None:
        """Check that every unit ran."""
        for unit in (*self.layers.values(), *self.norms.values()):
            calls = self._calls.get(unit.name, 0)
            if calls != unit.calls:
                raise UnitError(
                    f"unit '{unit.name}' ran {calls} times on this batch but {unit.calls} on the first; exclude it, or "
                    "make the network run the same layers on every batch"
                )
        joint = self.collectors.joint
        if joint is not None and joint.units:
            with _exactly(device_of(self.model)):
                joint.flush_inputs()

    def _see_input(self, unit: Unit, input: Tensor) -> None:
        if not torch.is_grad_enabled():
            raise UnitError(
                f"unit '{unit.name}' ran with gradients disabled (torch.no_grad, or checkpointing with "
                "use_reentrant=True); use use_reentrant=False, or exclude it"
            )
        if input.shape[0] != self.examples:
            raise UnitError(
                f"unit '{unit.name}' got {input.shape[0]} rows for a batch of {self.examples} examples; its first "
                "dimension must be the batch, or exclude it"
            )
        self._calls[unit.name] = self._calls.get(unit.name, 0) + 1
        seen = self._inputs.setdefault(unit.name, [])
        seen.append(input.detach())
        if len(seen) == unit.calls:
            with torch.no_grad(), _exactly(input.device):
                self.collectors.of[unit.name].inputs(self._inputs.pop(unit.name))

    def _wake(self, input: Tensor, *candidates: Any) -> None:
        """Make a graph begin here where none reaches the unit: let one parameter, the smallest, ask for a gradient.

        Unlike a tensor put in between, it is there again when a checkpointed segment is recomputed.
        """
        if input.requires_grad:
            return
        for parameter in candidates:
            if isinstance(parameter, nn.Parameter):
                self.woken[id(parameter)] = parameter.requires_grad_()
                return

    def _tap(self, unit: Unit, output: Tensor) -> Tensor:
        """Return `output` with a hook that catches its gradient, also where an in-place operation follows."""
        if output.shape[0] != self.examples:
            raise UnitError(
                f"unit '{unit.name}' gave {output.shape[0]} rows for a batch of {self.examples} examples; a BN that "
                "splits its batch has no merged weight, so use a plain BatchNorm layer, or exclude it"
            )
        if not output.requires_grad:  # a BN without parameters of its own
            leaf = output.detach().requires_grad_()
            self.leaves.append(leaf)
            output = leaf.clone()
        call = self._calls[unit.name] - 1
        output.register_hook(lambda gradient: self._see_gradient(unit, call, gradient))  # type: ignore[no-untyped-call]
        return output

    def _see_gradient(self, unit: Unit, call: int, gradient: Tensor) -> None:
        seen = self._gradients.setdefault(unit.name, {})
        seen[call] = gradient.detach()
        if len(seen) == unit.calls:
            del self._gradients[unit.name]
            with torch.no_grad(), _exactly(gradient.device):
                self.collectors.of[unit.name].gradients([seen[k] for k in sorted(seen)], self.weight)

    def end_backward(self) -> None:
        """Pass on what waits for the whole backward pass; a call without gradient counts as zero."""
        for name, seen in list(self._gradients.items()):
            some = next(iter(seen.values()))
            calls = range(self._calls[name])
            with torch.no_grad(), _exactly(some.device):
                self.collectors.of[name].gradients([seen.get(k, torch.zeros_like(some)) for k in calls], self.weight)
        self._gradients.clear()
        joint = self.collectors.joint
        if joint is not None and joint.units:
            with _exactly(device_of(self.model)):
                joint.flush_gradients(self.weight)


@dataclass
class _Run:
    """One estimate: passes over the data with collectors for the units."""

    model: nn.Module
    settings: Settings
    likelihood: Likelihood
    forward: Forward
    dtype: torch.dtype
    seed: int
    find: Callable[[Any], Coverage]
    graph: bool = False
    coverage: Coverage | None = None
    draws: int = 1

    def first_collector(self, unit: Unit) -> Collector:
        """Return the collector of the first pass: a unit's factors, its diagonal, or the moments of its gradient."""
        if self.settings.kind == "diagonal":
            return SquareCollector(unit, self.dtype)
        if self.settings.kind == "corrected" and self.settings.basis == "gradients":
            return MarginalCollector(unit, self.dtype)
        return FactorCollector(unit, self.dtype, self.settings)

    def over(
        self, loader: Iterable[Any], collector: Callable[[Unit], Collector], **feed: Any
    ) -> tuple[Collectors, int]:
        """Run over the data; return the collectors and the number of examples."""
        device = device_of(self.model)
        generator = torch.Generator(device).manual_seed(self.seed)
        self.draws = self.settings.draws_over(count_batches(loader, feed["max_batches"]))
        capture: _Capture | None = None
        mode: Statistics | None = None
        work: Callable[[Any], None]
        for size, batch in batches(loader, device, what="curvature", **feed):
            if self.coverage is None:
                self.coverage = self.find(batch)
            if capture is None:
                capture = _Capture(self.model, self.coverage.units, self._collectors(collector))
                self._only_free_gradients()
                work = partial(self._batch, capture, generator)
                if self.graph:
                    work = Replayed(work, generator)
            if mode != (mode := self.settings.statistics if size > 1 else "population"):
                set_mode(self.model, mode)
            work(batch)
            capture.collectors.examples += size
        assert capture is not None
        return capture.collectors, capture.collectors.examples

    def _collectors(self, collector: Callable[[Unit], Collector]) -> Collectors:
        assert self.coverage is not None
        joint = (
            JointCollector(Moments("joint", self.settings.levels, self.settings.form))
            if self.settings.cross_layer
            else None
        )
        made: dict[str, Collector] = {}
        for unit in self.coverage.units:
            if unit.kind == "free":
                made[unit.name] = SquareCollector(unit, self.dtype)
            elif unit.kind == "unmerged":
                made[unit.name] = UnmergedCollector(unit, self.dtype, BoundUnit(self.model, unit))
            elif joint is not None and unit.kind == "linear":
                made[unit.name] = JointMember(unit, self.dtype, joint)
            else:
                made[unit.name] = collector(unit)
        return Collectors(made, joint)

    def _free(self) -> list[Unit]:
        assert self.coverage is not None
        return [unit for unit in self.coverage.units if unit.kind == "free"]

    def _only_free_gradients(self) -> None:
        """Ask for the gradients of free parameters alone: a unit needs those of its output, not of its weight."""
        self.model.requires_grad_(False)
        for unit in self._free():
            self.model.get_parameter(unit.name).requires_grad_()

    def _batch(self, capture: _Capture, generator: torch.Generator, batch: Any) -> None:
        size = size_of(batch)
        capture.begin_batch(size)
        with torch.enable_grad(), capture.running():
            output = self.forward(self.model, batch)
        if not isinstance(output, Tensor) or output.dim() == 0 or output.shape[0] != size:
            raise XkfacError(
                f"the output of the network must be a tensor with {size} rows, one an example, but is "
                f"{list(output.shape) if isinstance(output, Tensor) else type(output).__name__}"
            )
        capture.end_forward()
        free = self._free()
        leaves = [*(self.model.get_parameter(unit.name) for unit in free), *capture.leaves, *capture.woken.values()]
        if not output.requires_grad:
            raise XkfacError("the output of the network depends on none of its parameters")
        scale = 1 / self.likelihood.predictions(output)
        for cotangent, weight, more in self._cotangents(output, batch, generator):
            capture.weight = weight * scale
            gradients = torch.autograd.grad(output, leaves, cotangent, retain_graph=more, allow_unused=True)
            capture.end_backward()
            for unit, gradient in zip(free, gradients, strict=False):
                squares = capture.collectors.of[unit.name]
                if gradient is not None and isinstance(squares, SquareCollector):
                    squares.add(gradient.to(self.dtype).reshape(unit.shape), capture.weight)

    def _cotangents(
        self, output: Tensor, batch: Any, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, float, bool]]:
        """Yield gradients of losses with respect to the output, the weight of each, and whether more may follow."""
        if self.settings.labels == "sampled":
            for draw in range(1, self.draws + 1):
                labels = self.likelihood.sample(output, generator)
                score = self.likelihood.score(output, labels)
                yield score, 1 / self.draws, draw < self.draws
        elif self.settings.labels == "empirical":
            labels = labels_of(batch)
            if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.shape[0] != output.shape[0]:
                raise XkfacError(f"labels='empirical' needs a tensor of {output.shape[0]} labels in each batch")
            yield self.likelihood.score(output, labels), 1.0, False
        else:
            for root in self.likelihood.root(output):
                for example in range(output.shape[0]):
                    one = torch.zeros_like(root)
                    one[example] = root[example]
                    yield one.to(output.dtype), 1.0, True
