"""How often the penalty is evaluated: every k-th step with k-fold weight, k fixed or following from the steps."""

from typing import Any

import torch
from torch import Tensor

from xkfac.errors import XkfacError

LONGEST = 8
"""Steps at most between two evaluations where the interval follows from the steps."""

IMPLICIT = 8
"""Steps between two evaluations where steps are implicit and read no mini-batch statistics; these need 1."""

_TOO_LONG, _SHORT = 0.9, 0.98  # cosines of gradients of two evaluations in a row, below and above which k changes


class Interval:
    """Counts steps and says which of them evaluate the penalty, and with what weight.

    every: k. None: k follows from the steps. Where k is too large, a step overshoots along the stiffest directions of
    the penalty, whatever the optimizer, and dL_s/dW~ turns from one evaluation to the next. So k is halved where the
    cosine of two of them in a row is small, and doubled after two large ones in a row, up to `LONGEST`.

    Raises XkfacError for an interval that is no whole number of steps.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise XkfacError(f"penalty_every must be a whole number of steps of at least 1, or None, not {every!r}")
        self.adapts = every is None
        self.every = every or 1
        self._left = self._in_a_row = 0
        self._captured = 1
        self._before: Tensor | None = None

    @property
    def skips_next(self) -> bool:
        """Whether the next step goes without the penalty."""
        return self._left > 0

    def skips(self) -> bool:
        """Count a step, and return whether it goes without the penalty."""
        if self._captured % self.every and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise XkfacError(
                f"a captured step would evaluate the penalty in all of its replays or in none; capture {self.every} "
                f"steps in a row as one graph, after learner.captures({self.every}), or make the Learner with "
                "penalty_every=1"
            )
        self._left -= 1
        return self._left >= 0

    def captures(self, steps: int) -> None:
        """Expect that many steps in a row to be captured as one CUDA graph, the first of which evaluates the penalty.

        Raises XkfacError where replays of them would not be whole intervals.
        """
        if self.adapts or steps % self.every:
            every = "an interval that adapts" if self.adapts else f"penalty_every={self.every}"
            raise XkfacError(f"{steps} captured steps do not go with {every}; make the Learner with penalty_every=1")
        self._captured, self._left = steps, 0

    def weight(self, gradient: Tensor) -> int:
        """Return k for a step that evaluates the penalty and has found dL_s/dW~, a flat tensor."""
        if self.adapts:
            self._adapt(gradient)
        self._left = self.every - 1
        return self.every

    def _adapt(self, gradient: Tensor) -> None:
        before, self._before = self._before, gradient
        if before is None:
            return
        cosine = float(torch.dot(gradient, before) / (gradient.norm() * before.norm()))
        self._in_a_row = self._in_a_row + 1 if cosine > _SHORT else 0
        if cosine < _TOO_LONG:
            self.every = max(self.every // 2, 1)
        elif self._in_a_row == 2:
            self.every, self._in_a_row = min(2 * self.every, LONGEST), 0

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps that follow depend on."""
        return {"every": self.every, "left": self._left, "in_a_row": self._in_a_row, "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state up again."""
        if not self.adapts and state["every"] != self.every:
            raise XkfacError(
                f"the state is of a learner with penalty_every={state['every']}, and this one has {self.every}"
            )
        self.every, self._left, self._in_a_row = state["every"], state["left"], state["in_a_row"]
        self._before = state["before"]
