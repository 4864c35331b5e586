"""The stages of a job, where it is in them, and the batches that curvature is estimated on."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from xkfac.experiments.recipes.recipe import JOINT, SINGLE
from xkfac.experiments.records import Percent, Whole
from xkfac.experiments.runs.training import Batch, Examples
from xkfac.plain_values import Amount


@dataclass(frozen=True)
class Stage:
    """A training from its first to its last epoch, after which `count` tasks are known.

    It is on the next task; or, for `joint`, on the first `count` together, from scratch; or, for `single`, on the next
    task with a network of its own.
    """

    count: int
    kind: str = ""

    @property
    def task(self) -> int:
        """The task that is new."""
        return self.count - 1

    @property
    def tasks(self) -> range:
        """The tasks that are trained on."""
        return range(self.count) if self.kind == JOINT else range(self.task, self.count)

    @property
    def anew(self) -> bool:
        """Whether it begins with the initial network."""
        return self.kind in (JOINT, SINGLE)


@dataclass
class JobState:
    """Where a job is: everything that a checkpoint holds beside tensors and memory.

    rate: what learning rates of protected parameters are multiplied by. singles: for networks of their own, the
    accuracy of each so far.
    """

    stage: int = 0
    epoch: int = 0
    best: float = -1.0
    kept: Whole = -1
    before: Percent | None = None
    seconds: Amount = 0.0
    diverged: bool = False
    rate: Amount = 1.0
    singles: list[Percent] = field(default_factory=list)


@dataclass
class Batches:
    """Batches of examples in an order [batches, N], made when they are asked for."""

    examples: Examples
    order: Tensor

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        for index in self.order.to(self.examples.device):
            yield self.examples.take(index)
