"""Keep a network near the radius of its memory's calibration while it learns: shorten steps, raise the strength.

The scale of a calibration is measured with made-up tasks. A target of another kind than the past pulls harder, most of
all in its first steps, and throws the network far beyond where the penalty follows the real loss of the past. The
strength that holds it cannot be known before the target is learnt, so it is found while it is.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from xkfac.errors import XkfacWarning
from xkfac.model.passes import device_of, parallel_of

INTERVAL = 16
"""As many steps are watched one by one when a task begins, and after the strength was raised; later every such one."""

LIMIT = 4.0
"""L_s without damping over the radius up to which watched steps may go: twice as far as the calibration measured.

Under a penalty that is F times as strong for now it is this over the root of F.
"""

DRIFT = 16.0
"""The same for a network that goes there slowly, in steps that are not watched: four times as far."""

GROWTH = 4.0
"""What the strength is multiplied by where a step would go further."""

_FAR = 16.0  # times the calibrated strength from which on the target counts as one of another kind
_SHORTEST = 2**-20  # share of a step; one that is still too long is taken back


class TrustRegion:
    """Watches the steps of an optimizer by the distance of the network, L_s without damping over the radius.

    Where a step goes beyond `LIMIT`, and further out than the network was when last watched, it is shortened until it
    does not, its momentum with it, and the strength is multiplied by `GROWTH`; or, while the penalty is stronger for
    now, it stays so. After `INTERVAL` steps without that only every `INTERVAL`-th is watched, by `DRIFT`, and is no
    longer shortened. distance: gives that of the model as it is. grow: multiplies the strength for good. annealed: how
    many times its strength the penalty has for now; when that falls, steps are watched one by one again. state: that of
    a task in progress. `last` is the distance when last watched, `grown` what the strength was multiplied by in all.

    A watched step waits for the device. Steps that are compiled, or replayed from a CUDA graph, are not watched.
    Processes of a DistributedDataParallel model go by the largest distance among them, so that all decide alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        distance: Callable[[], float],
        grow: Callable[[float], None],
        annealed: Callable[[], float],
        state: dict[str, Any] | None = None,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._own_distance, self._grow, self._annealed = distance, grow, annealed
        state = state or {"since": 0, "last": 0.0, "grown": 1.0}
        self._since, self._factor = int(state["since"]), float(state.get("factor", annealed()))
        self.last, self.grown = float(state["last"]), float(state["grown"])
        self._before: list[Tensor] = []
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def _parameters(self) -> list[Tensor]:
        return [one for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad]

    def _distance(self) -> float:
        distance = self._own_distance()
        parallel = parallel_of(self._model)
        if parallel is None:
            return distance
        largest = torch.tensor(distance if math.isfinite(distance) else math.inf, device=device_of(self._model))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel.process_group)
        return largest.item()

    def _before_step(self, *_: Any) -> None:
        if self._factor != (factor := self._annealed()):
            self._since, self._factor = 0, factor
        if self._since < INTERVAL and not _unwatchable():
            self._before = [one.detach().clone() for one in self._parameters()]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if _unwatchable():
            return
        before, self._before = self._before, []
        self._since += 1
        if not before and self._since % INTERVAL:
            return
        limit = max((LIMIT if before else DRIFT) / math.sqrt(self._factor), self.last)
        distance = self._distance()
        if not distance <= limit:  # what is not finite counts as too far
            if before:
                distance = self._shorten(before, limit)
            if math.isfinite(distance):
                self._raise_strength()
        self.last = distance

    def _shorten(self, before: list[Tensor], limit: float) -> float:
        """Halve a step until the network is within the limit, or else take it back; return the distance then.

        A step that is not finite however short stays, for others to find.
        """
        parameters = self._parameters()
        share, distance = 1.0, math.inf
        while share > _SHORTEST and not distance <= limit:
            share /= 2
            for parameter, start in zip(parameters, before, strict=True):
                parameter.lerp_(start, 0.5)
            distance = self._distance()
        if limit < distance < math.inf:
            share = 0.0
            for parameter, start in zip(parameters, before, strict=True):
                parameter.copy_(start)
            distance = self._distance()
        for parameter in parameters:
            momentum = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                momentum.mul_(share)
        return distance

    def _raise_strength(self) -> None:
        growth = self._factor if self._factor > 1 else GROWTH
        self._since, self._factor, was_near = 0, 1.0, self.grown < _FAR
        self._grow(growth)
        self.grown *= growth
        if was_near and self.grown >= _FAR:
            warnings.warn(
                f"the penalty needs {self.grown:g} times its calibrated strength to hold the network where it follows "
                "the real loss of the past, so the target is of another kind than the past, and may be learnt less "
                "well than with task-specific BN (give_task_norms, and method='own-bn')",
                XkfacWarning,
                stacklevel=6,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps that follow depend on, beside the strength."""
        return {"since": self._since, "last": self.last, "grown": self.grown, "factor": self._factor}

    def remove(self) -> None:
        """Leave the optimizer's steps as they are again."""
        for hook in self._hooks:
            hook.remove()


def _unwatchable() -> bool:
    """Whether a step is being compiled or captured, so that nothing of it can be looked at."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
