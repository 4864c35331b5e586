"""Watches the BN layers of a network while it learns, and keeps what a penalty reads of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from xkfac.branches import Branch
from xkfac.errors import XkfacError
from xkfac.hooks import Hook
from xkfac.merging import BoundUnit, Reading
from xkfac.methods import Method
from xkfac.passes import norms_of
from xkfac.taps import Tap


class Watch:
    """Keeps the readings of the BN layers of units since they were last taken, by unit.

    Under the interpretation eval nothing is read, and fixed BN runs in evaluation mode whatever its flag says.

    Raises XkfacError for a BN whose statistics one process cannot read.
    """

    def __init__(self, model: nn.Module, method: Method, bound: Mapping[str, BoundUnit], branch: Branch | None) -> None:
        self._method, self._bound, self._branch = method, bound, branch
        self.readings: dict[str, Reading] = {}
        self._blind: set[str] = set()
        self._handles: list[Any] = []
        if method.fixed_bn:
            for norm in norms_of(model).values():
                before, after = _evaluation()
                self._handles += [norm.register_forward_pre_hook(Hook(before)), norm.register_forward_hook(Hook(after))]
        elif method.interpretation != "eval":
            normed = [one for one in bound.values() if one.norm is not None]
            _check_readable(normed)
            for one in normed:
                tap = Tap(one, method.interpretation, branch)
                self._handles.append(tap.put_on(self._note(one.unit.name)))

    def _note(self, name: str) -> Callable[[Reading], None]:
        """Return a function that takes in a reading of a unit's BN."""

        def note(reading: Reading) -> None:
            # A checkpointed segment runs again inside the backward pass; its first run is the one that counts.
            if torch.compiler.is_compiling() or not _in_backward():
                self.readings[name] = reading
            elif name in self._blind and reading.mean.requires_grad:
                raise _without_gradient(name)

        return note

    def taken(self) -> tuple[dict[str, Reading], Branch | None]:
        """Return the readings since the last call, and the branch if it covers them."""
        self._check_differentiable()
        readings = dict(self.readings)
        self.readings.clear()
        covered = self._branch is not None and self._branch.covers(readings)
        return readings, self._branch if covered else None

    def _check_differentiable(self) -> None:
        """Refuse statistics that were read without gradient, as in the first run of a re-entrant checkpoint."""
        self._blind.clear()
        if torch.is_grad_enabled():
            self._blind.update(name for name, reading in self.readings.items() if not reading.differentiable)
        for name in self._blind:
            if self._bound[name].trainable:
                self.readings.clear()
                raise _without_gradient(name)

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
        self.readings.clear()


def _check_readable(normed: Sequence[BoundUnit]) -> None:
    """Refuse BN whose statistics span processes, before any hook is on."""
    for one in normed:
        if isinstance(one.norm, nn.SyncBatchNorm):
            raise XkfacError(
                f"'{one.unit.norm}' is a SyncBatchNorm, whose statistics one process cannot read; learn with BatchNorm "
                "layers in each process, or with interpretation='eval'"
            )


def _evaluation() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks that run a BN in evaluation mode whatever its flag says, and give the flag back after it."""
    flags: list[bool] = []

    def before(module: nn.Module, inputs: Any) -> None:
        flags.append(module.training)
        module.training = False

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        module.training = flags.pop()

    return before, after


def _without_gradient(unit: str) -> XkfacError:
    return XkfacError(
        f"the batch statistics of unit '{unit}' were read with gradients disabled, so the penalty cannot reach the "
        "weights through them; checkpoint with use_reentrant=False, or take the forward pass out of torch.no_grad"
    )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
