"""How strong the penalty is in a step: as given; or as calibrated, stronger in the first steps, and raised if need be.

A new task pulls hardest in its first steps, when nothing of it is learnt yet. At the strength that suits the rest of
the task these steps throw the network far from its anchor, where the penalty does not follow the real loss of the past.
The penalty then brings the stiff directions back, but not what was lost. Under a penalty that begins stronger, the
network first learns along the directions that the past leaves free, and needs less of the others afterwards.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from xkfac.calibration import Calibration
from xkfac.errors import XkfacError
from xkfac.learning.step_guard import StepGuard
from xkfac.learning.trust_region import TrustRegion

FALL, FALLS = 4, 3
"""What the penalty is divided by each time it falls, and how often it does: it begins at 64 times its strength."""

STEPS = 64
"""Steps at most until then; fewer where one pass over the loader has fewer batches."""


class Annealing:
    """Counts the steps of an optimizer, and says how many times its strength the penalty has now: `factor`.

    The factor is 64, 16 and 4 for a third of `steps` each, and then 1. fallen: called when it has fallen. state: that
    of a task in progress.
    """

    def __init__(
        self, optimizer: Optimizer, steps: int, fallen: Callable[[], None], state: dict[str, Any] | None = None
    ) -> None:
        state = state or {"steps": max(1, min(steps, STEPS)), "done": 0, "factor": FALL**FALLS}
        self._steps, self._done, self.factor = int(state["steps"]), int(state["done"]), float(state["factor"])
        self._fallen = fallen
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        if self.factor == 1:
            return
        self._done += 1
        factor = float(FALL ** max(FALLS - FALLS * self._done // self._steps, 0))
        if factor != self.factor:
            self.factor = factor
            self._fallen()

    def end(self) -> None:
        """Let the factor be 1 from now on."""
        self.factor = 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps that follow depend on."""
        return {"steps": self._steps, "done": self._done, "factor": self.factor}

    def remove(self) -> None:
        """Stop counting."""
        self._hook.remove()


class Strength:
    """The factor on the penalty: `value`, and for now `annealed` times that.

    given: the value, which then stands. Else it is the scale of the calibration, which is annealed, and raised where
    the network would go far beyond its `radius`; 1 without a calibration. changed: called when it changes in a task.
    """

    def __init__(self, given: float | None, calibration: Calibration | None, changed: Callable[[], None]) -> None:
        scale = 1.0 if calibration is None else calibration.scale
        self.radius = None if calibration is None else calibration.radius
        self.value = scale if given is None else given
        self._calibrated = given is None and calibration is not None
        self._changed = changed
        self._annealing: Annealing | None = None

    @property
    def annealed(self) -> float:
        """How many times its value the strength is for now."""
        return 1.0 if self._annealing is None else self._annealing.factor

    @property
    def now(self) -> float:
        """The strength of the next step; raises XkfacError where a capture would keep one that falls later."""
        if self.annealed != 1 and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise XkfacError(
                "the penalty is stronger in the first steps of a task, and a captured step would stay so; call "
                "learner.captures(steps) before the capture"
            )
        return self.value * self.annealed

    def begin(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        steps: int,
        guard: StepGuard,
        bearable: bool,
        state: dict[str, Any] | None,
    ) -> None:
        """Follow the steps of an optimizer from here on. state: that of a learner whose task is in progress.

        bearable: whether steps are stable under a strength that begins so much larger. steps: in one pass over the
        target.
        """
        known = state or {}
        region = known.get("trust_region")
        self.value *= (region["grown"] if region else 1.0) / guard.grown
        self.remove()
        if not self._calibrated:
            return
        if bearable and (state is None or known.get("annealing")):
            self._annealing = Annealing(optimizer, steps, self._changed, known.get("annealing"))
        if self.radius:
            how = (guard.distance, self.multiply, lambda: self.annealed)
            guard.keep_within(TrustRegion(model, optimizer, *how, region))

    def multiply(self, factor: float) -> None:
        """Raise the value for good; it is annealed no more."""
        self.value *= factor
        if self._annealing is not None:
            self._annealing.end()
        self._changed()

    def settle(self) -> None:
        """Be at the value from now on."""
        if self._annealing is not None and self._annealing.factor != 1:
            self._annealing.end()
            self._changed()

    def state_dict(self) -> dict[str, Any] | None:
        """Return what the steps that follow depend on, beside the value; None where nothing is annealed."""
        return None if self._annealing is None else self._annealing.state_dict()

    def remove(self) -> None:
        """Stop following the optimizer; the value is for good."""
        if self._annealing is not None:
            self._annealing.remove()
        self._annealing = None
