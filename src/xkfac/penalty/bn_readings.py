"""Hooks on the BN layers of a network while it learns, and the statistics that a penalty reads of them."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.errors import XkfacError
from xkfac.methods import Method
from xkfac.model.merged_weight import BoundUnit, Reading
from xkfac.penalty.bn_taps import Tap
from xkfac.penalty.fixed_bn import FixedBn
from xkfac.penalty.side_stream import SideStream


class BnReadings:
    """The readings of the BN layers of units since they were last taken, by unit.

    A pass without gradients, as a validation or a teacher makes it, does not count beside one with gradients. Under the
    interpretation eval nothing is read, and fixed BN runs in evaluation mode whatever its flag says.

    Raises XkfacError for a BN whose statistics one process cannot read.
    """

    def __init__(
        self, model: nn.Module, method: Method, bound: Mapping[str, BoundUnit], side: SideStream | None
    ) -> None:
        self._method, self._bound = method, bound
        self.readings: dict[str, Reading] = {}
        self._with_gradient: dict[str, Reading] = {}
        self._earlier: list[tuple[str, Callable[[], Any]]] = []
        self._blind: set[str] = set()
        self._handles: list[Any] = []
        if method.fixed_bn or method.fixed_statistics:
            self._handles.append(FixedBn(model, held=method.fixed_bn))
        elif method.interpretation != "eval":
            normed = [one for one in bound.values() if one.norm is not None]
            _check_readable(normed)
            for one in normed:
                tap = Tap(one, method.interpretation, side)
                self._handles.append(tap.put_on(self._note(one.unit.name)))

    def _note(self, name: str) -> Callable[[Reading], None]:
        """Return a function that takes in a reading of a unit's BN."""

        def note(reading: Reading) -> None:
            if torch.compiler.is_compiling():
                self._keep(name, reading)
            elif not _in_backward():
                self._remember_earlier(name)
                self._keep(name, reading)
            # A checkpointed segment runs again inside the backward pass; its first run is the one that counts.
            elif name in self._blind and reading.mean.requires_grad:
                raise _without_gradient(name)

        return note

    def _keep(self, name: str, reading: Reading) -> None:
        self.readings[name] = reading
        if torch.is_grad_enabled():
            self._with_gradient[name] = reading

    def _remember_earlier(self, name: str) -> None:
        """Remember, where a pass with gradients follows another one, the other's node in the graph while it lives."""
        node = self._with_gradient[name].mean.grad_fn if name in self._with_gradient else None
        if node is not None and torch.is_grad_enabled():
            living = [(unit, earlier) for unit, earlier in self._earlier if earlier() is not None]
            self._earlier = [*living, (name, weakref.ref(node))]

    def take(self, loss: Tensor | None = None) -> dict[str, Reading]:
        """Return the readings since the last call.

        Raises XkfacError where they lack gradients, or are not those of all passes that `loss` depends on.
        """
        readings = {**self.readings, **self._with_gradient} if torch.is_grad_enabled() else dict(self.readings)
        earlier = self._earlier
        self.clear()
        self._check_differentiable(readings)
        if loss is not None and earlier:
            self._check_single_pass(loss, earlier)
        return readings

    def clear(self) -> None:
        """Drop all readings."""
        self.readings.clear()
        self._with_gradient.clear()
        self._earlier = []

    def _check_differentiable(self, readings: Mapping[str, Reading]) -> None:
        """Refuse statistics that were read without gradient, as in the first run of a re-entrant checkpoint."""
        self._blind.clear()
        if torch.is_grad_enabled():
            self._blind.update(name for name, reading in readings.items() if not reading.differentiable)
        for name in self._blind:
            if self._bound[name].trainable:
                raise _without_gradient(name)

    def _check_single_pass(self, loss: Tensor, earlier: Sequence[tuple[str, Callable[[], Any]]]) -> None:
        """Refuse a loss of several forward passes through one BN, of which the penalty can read the last alone."""
        name = _reached(loss, {node: name for name, find in earlier if (node := find()) is not None})
        if name is not None:
            raise XkfacError(
                f"the loss depends on several forward passes through '{self._bound[name].unit.norm}' in training mode, "
                "and the penalty reads the statistics of one; call objective after each pass, with share=..., join the "
                "batches in one pass, or run the other passes in evaluation mode or under torch.no_grad()"
            )

    def check(self) -> None:
        """Raise XkfacError where a penalty needs readings, and no batch has passed since they were last taken."""
        if self._method.interpretation == "eval" or self._method.fixed_bn or self.readings:
            return
        waiting = [b for b in self._bound.values() if b.norm is not None and b.norm.training]
        if waiting:
            raise XkfacError(
                f"no batch has passed '{waiting[0].unit.norm}' in training mode since the last objective; call the "
                "model, then objective once, and make the learner before the first call of a compiled model"
            )

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.clear()


def _check_readable(normed: Sequence[BoundUnit]) -> None:
    """Refuse BN whose statistics span processes, before any hook is on."""
    for one in normed:
        if isinstance(one.norm, nn.SyncBatchNorm):
            raise XkfacError(
                f"'{one.unit.norm}' is a SyncBatchNorm, whose statistics one process cannot read; learn with BatchNorm "
                "layers in each process, or with interpretation='eval'"
            )


def _without_gradient(unit: str) -> XkfacError:
    return XkfacError(
        f"the batch statistics of unit '{unit}' were read with gradients disabled, so the penalty cannot reach the "
        "weights through them; checkpoint with use_reentrant=False, or take the forward pass out of torch.no_grad"
    )


def _reached(loss: Tensor, wanted: Mapping[Any, str]) -> str | None:
    """Return the name of the first of the `wanted` nodes that is in the graph of `loss`, or None."""
    waiting: list[Any] = [loss.grad_fn] if wanted else []
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node in wanted:
            return wanted[node]
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return None


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
