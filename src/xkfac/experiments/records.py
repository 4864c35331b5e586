"""What the JSON files of a run hold, field by field: each record is checked before anything of it is used."""

import re
from dataclasses import dataclass
from typing import Annotated, TypedDict

from xkfac.plain_values import Amount, Range, Record

Whole = Annotated[int, Range("a whole number", lambda value: True)]
Percent = Annotated[float, Range("a number from 0 to 100", lambda value: 0 <= value <= 100)]
Place = Annotated[str, Range("'cpu' or 'cuda'", re.compile(r"cpu|cuda(:\d{1,3})?").fullmatch)]
MemoryName = Annotated[str, Range("the name of a memory file", re.compile(r"memory-\d+\.safetensors").fullmatch)]

# run.json holds more than is checked here. Runs of earlier versions have no digest of their recipe.
FACTS = Record(
    {"place": Place, "data": str | None},
    free={"classes": dict[str, int], "tuning": Record({"scatter": bool}, more=True), "recipe_sha256": str},
    more=True,
)


@dataclass(frozen=True)
class Trial:
    """A trial of a tuning: a setting of the grid, with a damping where the line has a penalty, and what it reached.

    validation: the accuracy of the weights that it kept on the validation part of its task; None where it diverged, and
    before it has ended. kept: the epoch whose weights were kept. seconds: its training.
    """

    number: int
    lr: Amount
    damping: Amount | None
    validation: Percent | None
    kept: Whole = -1
    seconds: Amount = 0.0

    @property
    def setting(self) -> str:
        """Its setting in words."""
        return f"lr {self.lr:g}" + ("" if self.damping is None else f", damping {self.damping:g}")


class Inferred(TypedDict):
    """How a task is inferred, and the percentages taken for each task: of its images, and of batches of them."""

    inferred: Percent
    taken: list[Percent]
    together: list[Percent]


class _Given(TypedDict):
    given: Percent
    inferred: Percent
    taken: list[Percent]


class Inference(_Given, total=False):
    """The same beside what is right with the task given, and by other features."""

    together: list[Percent]
    others: dict[str, Inferred]


# events.jsonl; the free fields are those that earlier versions, and tuning, leave out.
EVENTS = {
    "start": Record({"line": str, "seed": int, "untrained": list[Percent]}, free={"tasks": list[str]}),
    "epoch": Record(
        {
            "task": int,
            "epoch": int,
            "lr": Amount,
            "loss": float | None,
            "penalty": float | None,
            "validation": Percent,
        },
        free={"time": float},
    ),
    "choice": Record({"task": int, **Trial.__annotations__}),
    "task": Record(
        {"task": int, "accuracy": list[Percent], "kept": Whole, "seconds": Amount},
        free={"before": Percent | None, "inference": list[Inference], "time": float},
    ),
    "warning": Record({"text": str}),
    "end": Record({}, free={"diverged": int | None}),
}
