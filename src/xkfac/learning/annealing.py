"""Let the penalty begin strong when a task begins, and fall to its strength in the first steps.

A new task pulls hardest in its first steps, when nothing of it is learnt yet. At the strength that suits the rest of
the task these steps throw the network far from its anchor, where the penalty does not follow the real loss of the past.
The penalty then brings the stiff directions back, but not what was lost. Under a penalty that begins stronger, the
network first learns along the directions that the past leaves free, and needs less of the others afterwards.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

START = 64.0
"""How many times its strength the penalty begins with."""

FALL = 4.0
"""What it is divided by each time it falls."""

STEPS = 64
"""Steps at most until it is at its strength; fewer where one pass over the loader has fewer batches."""


class Annealing:
    """Counts the steps of an optimizer, and says how many times its strength the penalty has now: `factor`.

    The factor falls in equal parts of `steps`: 64, 16, 4, 1. changed: called when it has fallen. state: that of a task
    in progress.
    """

    def __init__(
        self, optimizer: Optimizer, steps: int, changed: Callable[[], None], state: dict[str, Any] | None = None
    ) -> None:
        state = state or {"steps": max(1, min(steps, STEPS)), "done": 0, "factor": START}
        self._steps, self._done, self.factor = int(state["steps"]), int(state["done"]), float(state["factor"])
        self._changed = changed
        self._hook = optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        if self.factor == 1:
            return
        self._done += 1
        left, parts = START, 0
        while left > 1:
            left, parts = left / FALL, parts + 1
        factor = max(START / FALL ** (parts * self._done // self._steps), 1.0)
        if factor != self.factor:
            self.factor = factor
            self._changed()

    def end(self) -> None:
        """Let the penalty fall to its strength at once."""
        if self.factor != 1:
            self.factor = 1.0
            self._changed()

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps that follow depend on."""
        return {"steps": self._steps, "done": self._done, "factor": self.factor}

    def remove(self) -> None:
        """Stop counting."""
        self._hook.remove()
