"""Catch every unit's inputs and output gradients as a network runs forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from xkfac.curvature.collectors import Collectors
from xkfac.curvature.moments import ONE
from xkfac.errors import UnitError
from xkfac.model.constant_bn import Constants, constants_of, is_constant, normalised
from xkfac.model.merged_weight import norm_input
from xkfac.model.passes import device_of, full_precision
from xkfac.model.tracing import Trace, read_call
from xkfac.model.units import Unit

_NOTHING = nullcontext()
_REST = (("training", False), ("momentum", 0.1), ("eps", 1e-5))  # of the arguments of `F.batch_norm`, with defaults


def _exactly(device: torch.device) -> AbstractContextManager[Any]:
    """Return `full_precision`, or nothing where nothing would be rounded: a unit needs this twice a batch."""
    return full_precision(device) if torch.is_autocast_enabled(device.type) else _NOTHING


class Capture(Trace):
    """Shows every unit's inputs and output gradients to its collector."""

    def __init__(self, model: nn.Module, units: Iterable[Unit], collectors: Collectors) -> None:
        super().__init__(model)
        self.collectors = collectors
        self.layers = {id(model.get_parameter(u.weight)): u for u in units if u.kind in ("linear", "conv") and u.weight}
        self.norms = {u.norm: u for u in units if u.norm is not None}
        # Where backward passes end: nothing behind the first units is computed.
        self.ends: list[Tensor | GradientEdge] = []
        self.draw = ONE
        self.examples = 0
        self._calls: dict[str, int] = {}
        self._inputs: dict[str, list[Tensor]] = {}
        self._gradients: dict[str, dict[int, Tensor]] = {}
        self._shapes: dict[tuple[str, int], torch.Size] = {}  # of outputs, by call
        self._constants: dict[str, tuple[Tensor, Constants]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one torch function, and look at it if it is part of a unit."""
        kwargs = kwargs or {}
        call = read_call(func, args, kwargs)
        unit = self.layers.get(id(call.weight)) if call is not None else None
        if call is not None and unit is not None:
            self._see_input(unit, call.input)
            if unit.norm is not None:
                return func(*args, **kwargs)
            first = self._wake(call.input, call.bias, call.weight)
            return self._tap(unit, func(*args, **kwargs), first)
        path = self.norm if func is F.batch_norm else None
        unit = self.norms.get(path) if path is not None else None
        if path is None or unit is None:
            return func(*args, **kwargs)
        input = norm_input(tuple(args), kwargs)
        if unit.weight is None:
            self._see_input(unit, input)
        first = self._wake(input, getattr(self.model.get_submodule(path), "bias", None))
        return self._tap(unit, self._normalised(path, *args, **kwargs), first)

    def _normalised(
        self,
        path: str,
        input: Tensor,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        """Do what `F.batch_norm` does, in less time where its statistics are the population's, which stand still."""
        training, _, eps = (*rest, *(more.get(name, own) for name, own in _REST[len(rest) :]))
        if training or not is_constant(input, running_mean, weight, bias):
            return F.batch_norm(input, running_mean, running_var, weight, bias, *rest, **more)
        known = self._constants.get(path)
        if input.is_cuda and (known is None or known[0] is not running_var):
            known = self._constants[path] = running_var, constants_of([running_var], [eps])[0]
        return normalised(input, running_mean, running_var, weight, bias, eps, known and known[1])

    def begin_batch(self, examples: int) -> None:
        """Forget the graph of the batch before."""
        self.examples = examples
        self.forget()

    def forget(self) -> None:
        """Let go of a batch's graph: its nodes for parameters belong to a stream, and another pass would meet them."""
        self.ends = []
        for seen in (self._calls, self._inputs, self._gradients, self._shapes):
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
        if joint is not None:
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
        seen = [*self._inputs.pop(unit.name, ()), input.detach()]
        if len(seen) < unit.calls:
            self._inputs[unit.name] = seen
            return
        with _exactly(input.device):  # what is detached records nothing
            self.collectors.of[unit.name].inputs(seen)

    def _wake(self, input: Tensor, *candidates: Any) -> bool:
        """Make a graph begin here where none reaches the unit: let one parameter, the smallest, ask for a gradient.

        Unlike a tensor put in between, it is there again when a checkpointed segment is recomputed. Whether it was so.
        """
        if input.requires_grad:
            return False
        for parameter in candidates:
            if isinstance(parameter, nn.Parameter):
                parameter.requires_grad_()
                return True
        return True

    def _tap(self, unit: Unit, output: Tensor, first: bool) -> Tensor:
        """Return `output` with a hook that catches its gradient, also where an in-place operation follows.

        Behind the `first` unit of a path the backward pass ends here.
        """
        if output.shape[0] != self.examples:
            raise UnitError(
                f"unit '{unit.name}' gave {output.shape[0]} rows for a batch of {self.examples} examples; a BN that "
                "splits its batch has no merged weight, so use a plain BatchNorm layer, or exclude it"
            )
        if not output.requires_grad:  # a BN without parameters of its own
            leaf = output.detach().requires_grad_()
            self.ends.append(leaf)
            output = leaf.clone()
        elif first:
            self.ends.append(get_gradient_edge(output))
        call = self._calls[unit.name] - 1
        self._shapes[unit.name, call] = output.shape
        output.register_hook(lambda gradient: self._see_gradient(unit, call, gradient))  # type: ignore[no-untyped-call]
        return output

    def _see_gradient(self, unit: Unit, call: int, gradient: Tensor) -> None:
        seen = {**self._gradients.pop(unit.name, {}), call: gradient}
        if len(seen) < unit.calls:
            self._gradients[unit.name] = seen
            return
        with _exactly(gradient.device):  # a backward pass records nothing
            self.collectors.of[unit.name].gradients([seen[k] for k in sorted(seen)], self.draw)

    def end_backward(self) -> None:
        """Pass on what waits for the whole backward pass; a call without gradient counts as zero."""
        for name, seen in list(self._gradients.items()):
            some = next(iter(seen.values()))
            # The calls may have different numbers of positions.
            all_calls = [
                seen[k] if k in seen else some.new_zeros(self._shapes[name, k]) for k in range(self._calls[name])
            ]
            with torch.no_grad(), _exactly(some.device):
                self.collectors.of[name].gradients(all_calls, self.draw)
        self._gradients.clear()
        joint = self.collectors.joint
        if joint is not None:
            with _exactly(device_of(self.model)):
                joint.flush_gradients(self.draw)
