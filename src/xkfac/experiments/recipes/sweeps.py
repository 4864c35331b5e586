"""Sweeps: one line of a recipe, run at several strengths or learning rates, as one line per value.

    [lines.kfac]
    sweep = [0.1, 0.3, 1, 3, 10]            # strengths, short for { strength = [...] }
    [lines.fine-tuning]
    sweep = { lr = [0.1, 0.05, 0.02] }

Each value becomes a line of its own, `kfac-x0.1` or `fine-tuning-lr0.05`, so that jobs, seeds and resuming know nothing
of sweeps. Such a line keeps `sweep = { line = "kfac", label = "K-FAC", key = "strength" }`: what it is a point of.
"""

from collections.abc import Mapping
from typing import Any

from xkfac.experiments.recipes.recipe import SWEPT, method_of
from xkfac.experiments.recipes.toml_tables import RecipeError, as_table, check_keys, typed
from xkfac.plain_values import shown

_MARKS = {"strength": ("x", "x"), "lr": ("lr", "lr ")}  # before the value, in names and in labels


def swept_key(sweep: Any) -> str | None:
    """Return the key that a sweep, as a recipe has it, gives values of; None where it is of another form."""
    if isinstance(sweep, list):
        return "strength"
    if isinstance(sweep, dict) and len(sweep) == 1:
        return str(next(iter(sweep)))
    return None


def expanded(lines: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of all lines, each sweep replaced by its points.

    defaults: those of all lines. Their sweep holds for lines that have none, as far as it has an effect there.
    """
    tables: dict[str, Any] = {}
    for name, given in lines.items():
        own = dict(as_table(given, f"lines.{name}"))
        sweep, where = own.pop("sweep", None), f"lines.{name}: sweep"
        default = defaults.get("sweep")
        if sweep is None and (swept_key(default) != "strength" or _penalised({**defaults, **own})):
            sweep, where = default, "defaults: sweep"
        if isinstance(sweep, dict) and "line" in sweep:  # a point, as the recipe of a run has it written out
            points = {name: {**own, "sweep": sweep}}
        elif not sweep and isinstance(sweep, dict | list | None):
            points = {name: own}
        else:
            points = _points(name, own, defaults, sweep, where)
        twice = next((point for point in points if point in tables), None)
        if twice is not None:
            raise RecipeError(f"lines.{name}: the sweep makes a line '{twice}', which there is already; rename one")
        tables |= points
    return tables


def _penalised(table: Mapping[str, Any]) -> bool:
    method = method_of(table)
    return method is None or method.penalised


def _points(
    name: str, own: Mapping[str, Any], defaults: Mapping[str, Any], sweep: Any, where: str
) -> dict[str, dict[str, Any]]:
    key, values = _values(sweep, where)
    whole = {**defaults, **own}
    _check_beside(key, own, whole, where)
    label = typed(own.get("label", name), str, f"lines.{name}: label")
    # What the grid of all lines has no use for here is left out, as other keys of all lines are.
    useless = {key} if "grid" in own or _penalised(whole) else {key, "damping"}
    rest = {k: v for k, v in as_table(whole.get("grid", {}), f"lines.{name}: grid").items() if k not in useless}
    grid = {"grid": rest} if "grid" in whole else {}
    in_name, in_label = _MARKS[key]
    return {
        f"{name}-{in_name}{value:g}".replace("+", ""): {
            **own,
            **grid,
            "label": f"{label} {in_label}{value:g}",
            key: value,
            "sweep": {"line": name, "label": label, "key": key},
        }
        for value in values
    }


def _values(sweep: Any, where: str) -> tuple[str, tuple[float, ...]]:
    key = swept_key(sweep)
    if key is None:
        raise RecipeError(f"{where} is {shown(sweep)}; it must be a list of strengths, or one key with its values")
    check_keys([key], SWEPT, where)
    values = typed(sweep if isinstance(sweep, list) else sweep[key], tuple[float, ...], where)
    if any(value < 0 for value in values) or len(set(values)) < len(values) or not values:
        raise RecipeError(f"{where} must be different numbers of at least 0, not {shown(list(values))}")
    return key, values


def _check_beside(key: str, own: Mapping[str, Any], whole: Mapping[str, Any], where: str) -> None:
    """Raise RecipeError for keys that say something else of what is swept."""
    if key in own:
        raise RecipeError(f"{where} gives the values of '{key}', which the line has too; leave one out")
    if key == "lr" and "target_lr" in whole:
        raise RecipeError(f"{where} of lr does not act on targets beside target_lr; leave that out")
    if key == "lr" and "lr" in as_table(own.get("grid", {}), "grid"):
        raise RecipeError(f"{where} gives the values of lr, and so does grid.lr; leave one out")
