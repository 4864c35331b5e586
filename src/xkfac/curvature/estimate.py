"""Estimate the curvature of a network: the Fisher information of its units, from one backward pass a batch.

A pass begins at the output with random vectors that are independent between examples, of mean zero, and have the
output's Fisher as covariance. So the cross terms between examples vanish in expectation, and the gradient G of the
whole batch is all that is needed: H' = E[sum_m G_m G_m^T] / N and H'' = E[(sum_m G_m)(sum_m G_m)^T] / N, inter-example
terms of BN included.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from xkfac.curvature.assemble import Outcome, agreed, finished
from xkfac.curvature.blocks import Corrected
from xkfac.curvature.capture import Capture
from xkfac.curvature.collectors import (
    Collector,
    Collectors,
    FactorCollector,
    JointCollector,
    JointMember,
    MarginalCollector,
    SquareCollector,
    UnmergedCollector,
)
from xkfac.curvature.labels import Cotangents, Draws, warn_of_labels
from xkfac.curvature.operator import Curvature, CurvatureKind, Settings, SettingsOptions
from xkfac.curvature.processes import Processes, processes_of
from xkfac.errors import XkfacError, XkfacWarning
from xkfac.model.batches import Forward, default_forward, size_of
from xkfac.model.cuda_graphs import Replayed
from xkfac.model.likelihood import Likelihood, get_likelihood
from xkfac.model.merged_weight import BoundUnit
from xkfac.model.passes import (
    Progress,
    Statistics,
    batches,
    check_loaded,
    device_of,
    full_precision,
    norms_per_process,
    set_mode,
    untouched,
    unwrap,
    widest_dtype,
)
from xkfac.model.units import Coverage, Unit, as_patterns, find_units


@dataclass
class Estimate:
    """A curvature with the units it covers and the number of examples it rests on."""

    curvature: Curvature
    coverage: Coverage
    examples: int


def estimate(
    model: nn.Module,
    loader: Iterable[Any],
    settings: Settings | CurvatureKind = "xkfac",
    *,
    likelihood: str | Likelihood = "categorical",
    merge: bool = True,
    per_parameter: bool = False,
    exclude: Iterable[str] = (),
    forward: Forward | None = None,
    max_batches: int | None = None,
    accumulation_dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: Progress = False,
    graph: bool = False,
    **options: Unpack[SettingsOptions],
) -> Estimate:
    """Estimate the curvature of `model` on the data of `loader`; the model is left as it was, bit by bit.

    `settings` is a `Settings` or the kind of one, and `options` are fields of it to change. `merge`, `per_parameter`,
    `exclude` and `forward` are explained at `find_units`. Factors are accumulated in `accumulation_dtype`, float32
    unless the model is float64, also under autocast. `seed` fixes the labels that are drawn, batch by batch. With
    `graph` the work of a batch is recorded as a CUDA graph and replayed for all batches of the same shape, which pays
    on a GPU for small networks. The network runs in evaluation mode but for its BN, which uses mini-batch statistics; a
    batch of a single example has none and runs with the population's.

    The processes of a DistributedDataParallel model share the pass: each gives its own batches, and all get the
    curvature of all. See docs/scaling.md, also for SyncBatchNorm.

    Raises UnitError for a network, XkfacError for arguments or data, that cannot be treated.
    """
    if accumulation_dtype not in (None, torch.float32, torch.float64):
        raise XkfacError(f"accumulation_dtype is {accumulation_dtype}; it must be torch.float32 or torch.float64")
    settings = replace(settings if isinstance(settings, Settings) else Settings(settings), **options)
    finding: dict[str, Any] = {"merge": merge, "per_parameter": per_parameter, "exclude": as_patterns(exclude)}
    check_loaded(unwrap(model))
    run = _Run(
        unwrap(model),
        settings,
        get_likelihood(likelihood),
        forward or default_forward,
        torch.empty(0, dtype=accumulation_dtype or widest_dtype(model), device=device_of(model)),
        seed,
        lambda batch: find_units(model, batch, **finding, forward=run.checked),
        graph,
        processes_of(model),
    )
    if graph and device_of(run.model).type != "cuda":
        raise XkfacError("graph=True needs the model on a CUDA device; leave it out")
    if run.processes is not None:
        own = {"accumulation_dtype": run.like.dtype, "seed": seed, "graph": graph, "likelihood": run.likelihood.name}
        run.processes.agree({**vars(settings), **finding, **own, **run.likelihood.arguments})
    with untouched(run.model), norms_per_process(run.model):
        feed = {"max_batches": max_batches, "progress": progress}
        collectors, examples = run.over(loader, run.first_collector, **feed)
        curvature = run.finished(collectors, examples, decompose=settings.kind == "corrected")
        if settings.kind == "corrected":
            bases = {n: block if isinstance(block, Corrected) else None for n, block in curvature.blocks.items()}
            collectors, again = run.over(loader, lambda unit: SquareCollector(unit, run.like, bases[unit.name]), **feed)
            if again != examples:
                raise XkfacError(
                    f"kind='corrected' passes over the data twice, and the loader gave {examples} examples, then "
                    f"{again}; use a loader that can be iterated again"
                )
            curvature = run.finished(collectors, examples)
    assert run.coverage is not None
    if run.processes is None or run.processes.rank == 0:
        _warn_of_zero(curvature.zero_units())
    return Estimate(curvature, run.coverage, examples)


def _warn_of_zero(zero: list[str]) -> None:
    """Warn of units whose curvature is exactly zero, whatever the reason."""
    if zero:
        names = ", ".join(f"'{name}'" for name in zero[:8]) + (f" and {len(zero) - 8} more" if len(zero) > 8 else "")
        warnings.warn(
            f"the curvature is exactly zero, so that nothing is protected, in {names}; see that the output of the "
            "network depends on this and is not saturated, or exclude it",
            XkfacWarning,
            stacklevel=3,
        )


@dataclass
class _Run:
    """One estimate: passes over the data with collectors for the units."""

    model: nn.Module
    settings: Settings
    likelihood: Likelihood
    forward: Forward
    like: Tensor
    seed: int
    find: Callable[[Any], Coverage]
    graph: bool = False
    processes: Processes | None = None
    coverage: Coverage | None = None
    draws: Draws = field(init=False)

    def checked(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the model on a batch, and check that its output is one of the likelihood's."""
        output = self.forward(model, batch)
        if isinstance(output, Tensor):
            check_rows(output, size_of(batch))  # first: an output without rows is no question of the likelihood
            self.likelihood.check(output)
            warn_of_labels(self.likelihood, batch, output)
        return output

    def finished(self, collectors: Collectors, examples: int, *, decompose: bool = False) -> Curvature:
        """Return the curvature of a pass over so many examples, with `decompose` in its eigenbasis."""
        with full_precision(device_of(self.model)):
            return finished(collectors, self.processes, examples, decompose=decompose)

    def first_collector(self, unit: Unit) -> Collector:
        """Return the collector of the first pass: a unit's factors, its diagonal, or the moments of its gradient."""
        if self.settings.kind == "diagonal":
            return SquareCollector(unit, self.like)
        if self.settings.kind == "corrected":
            return MarginalCollector(unit, self.like)
        return FactorCollector(unit, self.like, self.settings)

    def over(
        self, loader: Iterable[Any], collector: Callable[[Unit], Collector], **feed: Any
    ) -> tuple[Collectors, int]:
        """Run over the data; return the collectors and the number of examples, in a shared pass that of all."""
        own, error = None, None
        try:
            with ExitStack() as hooks:
                own = self._over(loader, collector, hooks, **feed)
        except Exception as caught:
            if self.processes is None:
                raise
            error = caught
        if self.processes is None:
            assert own is not None
            self.draws.check([own.batches])
            return own, own.examples
        outcome = Outcome() if own is None else Outcome(own.batches, own.examples, self.coverage)
        if error is not None:
            outcome.error = str(error)
        try:
            self.coverage, batches, examples = agreed(self.processes, outcome)
        except XkfacError:
            if error is not None:
                raise error from None
            raise
        self.draws.check(batches)
        return own or self._collectors(collector), examples

    def _over(
        self, loader: Iterable[Any], collector: Callable[[Unit], Collector], hooks: ExitStack, **feed: Any
    ) -> Collectors | None:
        """Run over this process's data; return the collectors, None if there was none. `hooks` takes the model's."""
        device = device_of(self.model)
        generator = torch.Generator(device)
        self.draws = Draws(self.settings, self.processes)
        counted = self.draws.decide(loader, feed["max_batches"])
        labels, draws = self.settings.labels, self.draws.per_batch
        cotangents = Cotangents(labels, self.likelihood, self.seed, generator, draws)
        rank, ranks = (0, 1) if self.processes is None else (self.processes.rank, self.processes.size)
        capture: Capture | None = None
        mode: Statistics | None = None
        work: Callable[[Any], None]
        if rank > 0 and feed["progress"] is True:
            feed["progress"] = False
        steps = batches(counted, device, what="curvature", may_be_none=self.processes is not None, **feed)
        for place, (size, batch) in enumerate(steps):
            if self.coverage is None:
                self.coverage = self.find(batch)
            if capture is None:
                capture = Capture(self.model, self.coverage.units, self._collectors(collector))
                hooks.enter_context(capture.hooked())
                # A unit needs the gradients of its output, not of its weight.
                self.model.requires_grad_(False)
                for unit in self._free():
                    self.model.get_parameter(unit.name).requires_grad_()
                work = partial(self._batch, capture, cotangents)
                if self.graph:
                    work = Replayed(work, generator)
            if mode != (mode := self.settings.statistics if size > 1 else "population"):
                set_mode(self.model, mode)
            cotangents.begin_batch(place * ranks + rank)
            cotangents.check(batch)
            work(batch)
            capture.collectors.batches += 1
            capture.collectors.examples += size
        if capture is None:
            return None
        capture.forget()
        return capture.collectors

    def _collectors(self, collector: Callable[[Unit], Collector]) -> Collectors:
        assert self.coverage is not None
        linear = [unit for unit in self.coverage.units if unit.kind == "linear" and self.settings.cross_layer]
        joint = JointCollector(linear, self.like, self.settings) if linear else None
        of: dict[str, Collector] = {}
        for unit in self.coverage.units:
            if unit.kind == "free":
                of[unit.name] = SquareCollector(unit, self.like)
            elif unit.kind == "unmerged":
                of[unit.name] = UnmergedCollector(unit, self.like, BoundUnit(self.model, unit))
            elif joint is not None and unit.kind == "linear":
                of[unit.name] = JointMember(unit, self.like, joint)
            else:
                of[unit.name] = collector(unit)
        return Collectors(of, joint)

    def _free(self) -> list[Unit]:
        assert self.coverage is not None
        return [unit for unit in self.coverage.units if unit.kind == "free"]

    def _batch(self, capture: Capture, cotangents: Cotangents, batch: Any) -> None:
        size = size_of(batch)
        capture.begin_batch(size)
        with torch.enable_grad(), capture:
            output = self.forward(self.model, batch)
        check_rows(output, size)
        capture.end_forward()
        free = self._free()
        ends: list[Any] = [*(self.model.get_parameter(unit.name) for unit in free), *capture.ends]
        if not output.requires_grad:
            raise XkfacError("the output of the network depends on none of its parameters")
        for cotangent, capture.draw, more in cotangents.of(output, batch):
            gradients = torch.autograd.grad(output, ends, cotangent, retain_graph=more, allow_unused=True)
            capture.end_backward()
            for unit, gradient in zip(free, gradients, strict=False):
                squares = capture.collectors.of[unit.name]
                if gradient is not None and isinstance(squares, SquareCollector):
                    squares.add(gradient.to_dense().to(self.like.dtype).reshape(unit.shape), capture.draw.weight)


def check_rows(output: Any, size: int) -> None:
    """Check that an output is a tensor with one row per example."""
    if not isinstance(output, Tensor) or output.dim() == 0 or output.shape[0] != size:
        raise XkfacError(
            f"the output of the network must be a tensor with {size} rows, one per example, but is "
            f"{list(output.shape) if isinstance(output, Tensor) else type(output).__name__}"
        )
