"""What the numbers of a recipe may be, key by key."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from xkfac.experiments.recipes.recipe import Data, Images, Line, Recipe, Task
from xkfac.experiments.recipes.toml_tables import RecipeError, shown
from xkfac.experiments.records import Kind

_MANY = 10**9  # of what only has to be a number that anything can count up to


def _whole(least: int, most: int = _MANY) -> Kind:
    return Kind(f"at least {least} and at most {most:,}", lambda value: least <= value <= most)


def _number(least: float, below: float = math.inf) -> Kind:
    bound = "" if below == math.inf else f" and below {below:g}"
    return Kind(f"a number of at least {least:g}{bound}", lambda value: least <= value < below)


_RANGES: Mapping[type, Mapping[str, Kind]] = {
    Line: {
        "tasks": _whole(1, 10_000),
        "epochs": _whole(1, 1_000_000),
        "batch": _whole(2),
        "lr_every": _whole(1),
        "average": _whole(0),
        "batches": _whole(0),
        "head_epochs": _whole(0),
        "balance_every": _whole(1),
        "widths": Kind(
            "up to 100 numbers, each at least 1 and at most 65,536",
            lambda values: len(values) <= 100 and all(1 <= value <= 65_536 for value in values),
        ),
        "lr": _number(0),
        "target_lr": _number(0),
        "lr_end": _number(0),
        "lr_factor": _number(1),
        "damping": _number(0),
        "strength": _number(0),
        "momentum": _number(0, 1),
        "label_smoothing": _number(0, 1),
        "keep": Kind("average, all or at least 1", lambda value: isinstance(value, str) or 1 <= value <= _MANY),
        "bn_momentum": Kind("above 0 and at most 1", lambda value: 0 < value <= 1),
    },
    Recipe: {
        "repeats": _whole(1, 10_000),
        "seed": _whole(0, 2**53),
        # Far beyond this many the system starts no more threads, and whatever needs one first is blamed.
        "threads": _whole(1, 1024),
    },
    Data: {"validation": _whole(0), "train": _whole(0)},
    Images: {
        "pixels": _whole(1, 8192),
        "validation": Kind("the share of the training part, from 0 up to 1", lambda value: 0 <= value < 1),
    },
    Task: {
        "limit": _whole(0),
        "scale": Kind(
            "two growing numbers above 0 and up to 1",
            lambda values: len(values) == 2 and 0 < values[0] <= values[1] <= 1,
        ),
    },
}


def check_ranges(part: Any, where: str, keys: Collection[str] | None = None) -> None:
    """Check the numbers of a part of a recipe, those of some keys alone if they are named.

    Raises RecipeError for the first that is out of its range.
    """
    for key, kind in _RANGES[type(part)].items():
        value = getattr(part, key)
        if value is None or (keys is not None and key not in keys):
            continue
        if not kind.holds(value):
            said = shown(list(value) if isinstance(value, tuple) else value)
            raise RecipeError(f"{where}{key} must be {kind.words}, not {said}")
