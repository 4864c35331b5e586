"""What every setting of hyperparameters reached, measured after all choices: the points of the paper's scatter."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """What one setting of hyperparameters reached on a task.

    label: the method. balanced: whether alpha_s and alpha_t were adapted. target: accuracy on the task in %. average:
    that over all tasks so far. chosen: whether the setting is the one that the method goes on with.
    """

    task: str
    label: str
    balanced: bool
    lr: float
    damping: float
    target: float
    average: float
    chosen: bool

    @property
    def finite(self) -> bool:
        """Whether both accuracies are numbers; those of a setting that diverged are not."""
        return math.isfinite(self.target) and math.isfinite(self.average)
