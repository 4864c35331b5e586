"""What the JSON files of a run hold, field by field: each record is checked before anything of it is used."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """What a field must be, in words, and whether a value is that."""

    words: str
    holds: Callable[[Any], bool]


Fields = Mapping[str, Kind]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WHOLE = Kind("a whole number", _is_whole)
COUNT = Kind("a whole number of at least 0", lambda value: _is_whole(value) and value >= 0)
NUMBER = Kind("a finite number", _is_number)
AMOUNT = Kind("a finite number of at least 0", lambda value: _is_number(value) and value >= 0)
PERCENT = Kind("a number from 0 to 100", lambda value: _is_number(value) and 0 <= value <= 100)


def optional(kind: Kind) -> Kind:
    """Return the kind of a field that may be null."""
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.holds(value))


def several(kind: Kind) -> Kind:
    """Return the kind of a list whose items are all of a kind."""
    return Kind(
        f"a list, each item {kind.words}",
        lambda value: isinstance(value, list) and all(map(kind.holds, value)),
    )


def named(kind: Kind) -> Kind:
    """Return the kind of a table whose values are all of a kind."""
    return Kind(
        f"a table, each value {kind.words}",
        lambda value: isinstance(value, dict) and all(map(kind.holds, value.values())),
    )


def fault(record: Any, fields: Fields, free: Iterable[str] = (), *, more: bool = False) -> str | None:
    """Return what is wrong with a record, None if nothing is.

    fields: what each must be. free: those that may be missing. more: whether there may be others.
    """
    if not isinstance(record, dict):
        return "it is no table"
    for name, kind in fields.items():
        if name not in record:
            if name not in free:
                return f"it has no '{name}'"
        elif not kind.holds(record[name]):
            return f"its '{name}' is not {kind.words}"
    unknown = None if more else next((name for name in record if name not in fields), None)
    return None if unknown is None else f"it has '{unknown}', which is not known"


def record(words: str, fields: Fields, free: Iterable[str] = (), *, more: bool = False) -> Kind:
    """Return the kind of a table that has some fields, of which those in `free` may be missing."""
    return Kind(words, lambda value: fault(value, fields, free, more=more) is None)


def matching(words: str, pattern: str) -> Kind:
    """Return the kind of a text that matches a regular expression as a whole."""
    return Kind(words, lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


# run.json, of which more is noted than is used. Runs of earlier versions have no digest of their recipe.
RECIPE_DIGEST = "recipe_sha256"
FACTS: Fields = {
    "place": matching("'cpu' or 'cuda'", r"cpu|cuda(:\d{1,3})?"),
    "data": optional(TEXT),
    "classes": named(COUNT),
    "tuning": record("a table with 'scatter'", {"scatter": FLAG}, more=True),
    RECIPE_DIGEST: TEXT,
}
FACTS_FREE = ("classes", "tuning", RECIPE_DIGEST)

# Checkpoints: the events so far, the memory, and where the job is.
STATE: Fields = {
    "events": COUNT,
    "events_sha256": TEXT,
    "stage": COUNT,
    "epoch": COUNT,
    "best": NUMBER,
    "kept": WHOLE,
    "before": optional(PERCENT),
    "seconds": AMOUNT,
    "diverged": FLAG,
    "rate": AMOUNT,
    "singles": several(PERCENT),
    "memory": optional(matching("the name of a memory file", r"memory-\d+\.safetensors")),
}
STATE_FREE = tuple(name for name in STATE if name != "events")

# outcome.json of a trial, choice.json and measured.json of a stage that is tuned.
OUTCOME: Fields = {
    "number": COUNT,
    "lr": AMOUNT,
    "damping": optional(AMOUNT),
    "validation": optional(PERCENT),
    "kept": WHOLE,
    "seconds": AMOUNT,
}
_IS_OUTCOME = record("what a trial reached", OUTCOME)
CHOICE: Fields = {
    "task": TEXT,
    "chosen": optional(_IS_OUTCOME),
    "runner_up": optional(_IS_OUTCOME),
    "trials": COUNT,
    "lost": COUNT,
    "diverged": FLAG,
}
MEASURED: Fields = {
    "before": optional(PERCENT),
    "untrained": several(PERCENT),
    "accuracy": Kind("a list of accuracies", lambda value: bool(value) and several(PERCENT).holds(value)),
    "trials": named(record("the accuracies of a trial", {"target": PERCENT, "average": PERCENT})),
}
MEASURED_FREE = ("untrained", "trials")

# choices.json and points.json of a tuning.
CHOSEN: Fields = {
    "line": TEXT,
    "seed": COUNT,
    "task": TEXT,
    "lr": optional(AMOUNT),
    "damping": optional(AMOUNT),
    "validation": optional(PERCENT),
    "runner_up": optional(_IS_OUTCOME),
    "trials": COUNT,
    "diverged": COUNT,
    "why": TEXT,
}
POINT: Fields = {
    "task": TEXT,
    "label": TEXT,
    "balanced": FLAG,
    "lr": AMOUNT,
    "damping": optional(AMOUNT),
    "target": optional(PERCENT),
    "average": optional(PERCENT),
    "chosen": FLAG,
}

# By images one by one, and by batches of one task: the percentages that are taken for each task.
_INFERRED: Fields = {"inferred": PERCENT, "taken": several(PERCENT), "together": several(PERCENT)}

# events.jsonl; the free fields are those that earlier versions, and tuning, leave out.
EVENTS: Mapping[str, Fields] = {
    "start": {"line": TEXT, "seed": COUNT, "untrained": several(PERCENT), "tasks": several(TEXT)},
    "epoch": {
        "task": COUNT,
        "epoch": COUNT,
        "lr": AMOUNT,
        "loss": optional(NUMBER),
        "penalty": optional(NUMBER),
        "validation": PERCENT,
        "time": NUMBER,
    },
    "choice": {"task": COUNT, **OUTCOME},
    "task": {
        "task": COUNT,
        "accuracy": several(PERCENT),
        "inference": several(
            record(
                "how a task is inferred",
                {"given": PERCENT, **_INFERRED, "others": named(record("other features", _INFERRED))},
                ("together", "others"),
            )
        ),
        "before": optional(PERCENT),
        "kept": WHOLE,
        "seconds": AMOUNT,
        "time": NUMBER,
    },
    "warning": {"text": TEXT},
    "end": {"diverged": optional(COUNT)},
}
EVENTS_FREE = ("tasks", "time", "before", "diverged", "inference")
