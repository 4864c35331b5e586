"""Looks at the penalty of training steps now and then, without waiting for the device, for what cannot be trusted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from xkfac.errors import XkfacWarning
from xkfac.learning.history import History
from xkfac.model.merged_weight import BoundUnit

INTERVAL = 16
"""Steps from one look to the next."""

LOST = 2.0
"""L_s without damping, in nats, above which past tasks are lost; the real rise of their loss is rather larger."""


class Monitor:
    """Looks at the penalty every `INTERVAL` steps, at values that the device has already worked out.

    radius: the largest penalty without damping up to which the calibration follows the real loss, None without one.
    """

    def __init__(self, radius: float | None) -> None:
        self._radius = radius
        self.history = History()
        self._steps = self._looked_at = 0
        self._warned = self._warned_of_loss = False
        self._look: _Look | None = None

    def is_finite(self, penalty: Tensor, loss: Tensor, undamped: Callable[[], Tensor]) -> bool:
        """Take in L_s and L_t of a step, and say whether what was last looked at is finite.

        undamped: gives L_s without damping, which is called where it is needed. Warns once of a penalty beyond the
        radius, and once of one that says that the past is lost. Nothing is looked at while a CUDA graph is captured.
        """
        if penalty.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        self._steps += 1
        if self._look is None and self._steps % INTERVAL == 0:
            values = [penalty, loss] if self._radius is None else [penalty, loss, undamped()]
            self._look = _Look(torch.stack([value.detach().to(penalty.dtype) for value in values]))
            self._looked_at = self._steps
        if self._look is None or not self._look.is_there():
            return True
        value, seen, *rest = self._look.values()
        self._look = None
        self.history.steps.append(self._looked_at)
        self.history.penalties.append(value)
        self.history.losses.append(seen)
        if LOST < value < math.inf and not self._warned_of_loss:
            self._judge_lost(undamped().item())
        for one in rest:
            self.history.over_radius.append(one / self._radius if self._radius else math.inf)
            self.judge(one, stacklevel=5)
        return math.isfinite(value)

    def _judge_lost(self, undamped: float) -> None:
        """Warn once, in the user's line, of a penalty without damping that says that the past is lost."""
        if not undamped > LOST:
            return
        self._warned_of_loss = True
        warnings.warn(
            f"after {self._looked_at} steps the penalty is {undamped:.2g}, the nats by which it predicts the loss of "
            "past tasks to have risen, so they are likely lost; start again with a lower learning rate, for SGD at "
            "most half of learner.stable_lr(momentum), or, if the target is of another kind than the past, with "
            "task-specific BN (method='own-bn')",
            XkfacWarning,
            stacklevel=5,
        )

    def judge(self, undamped: float, stacklevel: int = 4) -> None:
        """Warn once, in the user's line, of a penalty without damping that is beyond the radius."""
        radius = self._radius
        if radius is None or self._warned or not undamped > radius:
            return
        self._warned = True
        times = f"{undamped / radius:.2g} times" if radius else "beyond"
        warnings.warn(
            f"the penalty without damping is {undamped:.2g}, {times} the radius {radius:.2g} up to which its "
            f"calibration follows the real loss, so the past may be forgotten more than the penalty says; a larger "
            "strength, or fewer or shorter steps, stay nearer to it",
            XkfacWarning,
            stacklevel=stacklevel,
        )


class _Look:
    """The values of a tensor, which is copied from its device beside the work that follows."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        self._values = tensor
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_there(self) -> bool:
        return self._event is None or bool(self._event.query())

    def values(self) -> list[float]:
        found: list[float] = self._values.tolist()
        return found


class StartingPoint:
    """Where a network has begun to learn, kept on the CPU: what a penalty is made of, its BN statistics among it."""

    def __init__(self, bound: Iterable[BoundUnit]) -> None:
        self._tensors = [tensor for one in bound for tensor in (*one.parameters(), *one.statistics())]
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the network there while inside."""
        now = [tensor.detach().clone() for tensor in self._tensors]
        try:
            self._write(self._values)
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def _write(self, values: Iterable[Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.copy_(value)


def blamed_norm(bound: Iterable[BoundUnit]) -> str | None:
    """Return the path of a BN whose statistics are not finite where all parameters are, as bad inputs leave it."""
    suspect = None
    for one in bound:
        if not all(bool(parameter.isfinite().all()) for parameter in one.parameters()):
            return None
        if suspect is None and not all(bool(statistic.isfinite().all()) for statistic in one.statistics()):
            suspect = one.unit.norm
    return suspect
