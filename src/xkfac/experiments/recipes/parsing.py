"""Recipes from TOML: read, changed by settings, every key checked before anything runs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from importlib import resources
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from xkfac.curvature.operator import Settings
from xkfac.errors import XkfacError, nearest, shortened
from xkfac.experiments.files import LARGEST_TEXT, check_path, read_regular, reason
from xkfac.experiments.recipes.recipe import (
    JOINT,
    SINGLE,
    TABLES,
    Data,
    Figure,
    Images,
    Line,
    Recipe,
    Task,
    without_effect,
)
from xkfac.experiments.recipes.sweeps import expanded, swept_key
from xkfac.experiments.recipes.toml_tables import (
    RecipeError,
    as_table,
    build,
    check_keys,
    check_values,
    parse_toml,
    read_setting,
)

LONGEST_NAME = 100  # what files are called by it must stay below 255 bytes
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_MOST_DRAWS = 1_000_000

# Keys of lines that recorded runs still have, each with the value at which it never had an effect.
_RETIRED = {"clip": 0.0}


def named_recipes() -> dict[str, str]:
    """Return the text of the recipes that come with the package, by name."""
    folder = resources.files("xkfac.experiments").joinpath("recipes")
    found = {Path(entry.name).stem: entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}


def load_recipe(source: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """Return a recipe by the name of one that comes with the package, or by the path of a TOML file.

    `settings` are changes such as "data.train=1000", "defaults.epochs=2", "lines.xkfac.damping=0.01" or "repeats=2"; a
    change of `defaults` overrides what the lines say themselves.

    Raises RecipeError for a recipe that is not there, not TOML, or has unknown, wrong or contradictory keys.
    """
    named = named_recipes()
    path = check_path(source)
    if str(source) in named:
        text = named[str(source)]
    elif path.is_file():
        try:
            text = read_regular(path, LARGEST_TEXT).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"'{source}' cannot be read as a recipe ({reason(error)})") from None
    else:
        raise RecipeError(
            f"there is no recipe '{source}'{nearest(str(source), named)}; give the path of a TOML file or one of "
            f"{', '.join(named)}"
        )
    return parse_recipe(text, str(source), settings)


def parse_recipe(text: str, source: str = "recipe", settings: Sequence[str] = (), *, recorded: bool = False) -> Recipe:
    """Return the recipe that a TOML text describes, with changes as in `load_recipe`.

    recorded: it is that of a run, with every key written out, of which some may have no effect in this version.
    """
    table = parse_toml(text, source)
    if recorded:
        _leave_out_defaults(table)
    for setting in settings:
        _apply(table, setting)
    check_values(table, source)  # a setting can nest tables too
    return _recipe(table, source)


def _leave_out_defaults(table: dict[str, Any]) -> None:
    """Take keys out of lines whose values are the defaults, or which never had an effect at their values."""
    defaults = {f.name: f.default for f in fields(Line) if f.name not in ("label", "tasks")} | _RETIRED
    for name, line in as_table(table.get("lines", {}), "lines").items():
        for key in [key for key in as_table(line, f"lines.{name}") if key in defaults and line[key] == defaults[key]]:
            del line[key]


def _recipe(table: dict[str, Any], source: str) -> Recipe:
    check_keys(table, {"defaults", *(f.name for f in fields(Recipe))}, source)
    given = {key: as_table(table[key], key) for key in ("defaults", *TABLES) if key in table}
    defaults, lines, figures = (given.get(key, {}) for key in ("defaults", "lines", "figures"))
    if not lines:
        raise RecipeError(f"'{source}' has no [lines.NAME] table, so there is nothing to run; add one for each curve")
    with_images = "images" in given or "tasks" in given
    world = _images(given) if with_images else {"data": build(Data, given.get("data", {}), "data")}
    tasks = world.get("tasks")
    lines = expanded(lines, defaults)
    defaults = {key: value for key, value in defaults.items() if key != "sweep"}
    # Also what no line has a use for: a value that means nothing is not passed over.
    build(Line, defaults, "defaults")
    built = {name: _line(name, as_table(own, f"lines.{name}"), defaults, tasks) for name, own in lines.items()}
    drawn: dict[str, Figure] = {}
    for key, own in figures.items():
        _check_name(key, "figure")
        figure = build(Figure, as_table(own, f"figures.{key}"), f"figures.{key}")
        shown = ([line for line in built if built[line].sweep.get("line") == name] or [name] for name in figure.lines)
        drawn[key] = replace(figure, lines=tuple(chain.from_iterable(shown)))
    alone = tuple(name for name, line in built.items() if not line.sweep)
    if not drawn and alone:  # sweeps have a figure of their own
        drawn = {"accuracy": Figure("Average accuracy", lines=alone)}
    plain = {"name": Path(source).stem, **{key: value for key, value in table.items() if key not in given}}
    recipe: Recipe = build(Recipe, plain, source, lines=built, figures=drawn, **world)
    _check_recipe(recipe)
    return recipe


def _images(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images and tasks of a recipe that has them."""
    if "data" in given:
        raise RecipeError("a recipe has [data], for permuted digits, or [images] and [tasks.NAME]; leave one out")
    tasks = given.get("tasks", {})
    if len(tasks) < 2:
        raise RecipeError(f"a recipe of images needs a source and a target; it has {len(tasks)} [tasks.NAME] tables")
    built = {}
    for name, own in tasks.items():
        _check_name(name, "task")
        if "." in name:
            raise RecipeError(f"the task name '{name}' must not have a dot")
        built[name] = build(Task, as_table(own, f"tasks.{name}"), f"tasks.{name}")
    images: Images = build(Images, given.get("images", {}), "images")
    source, *targets = built
    _check_orders(images, targets)
    chosen = images.orders[0] if images.orders else targets
    return {"images": images, "tasks": {name: task for name, task in built.items() if name in (source, *chosen)}}


def _check_orders(images: Images, targets: list[str]) -> None:
    for order in images.orders:
        chosen = [name for name in targets if name in images.orders[0]]
        unknown = next((name for name in order if name not in targets), None)
        if unknown is not None:
            raise RecipeError(f"images: an order names '{unknown}', which is no target; they are {', '.join(targets)}")
        if sorted(order) != sorted(chosen) or not order:
            raise RecipeError(
                "images: an order must name each target once, and all orders the same targets "
                f"({', '.join(chosen or targets)}), and one is {', '.join(order)}"
            )


def _line(name: str, own: dict[str, Any], defaults: dict[str, Any], tasks: Mapping[str, Task] | None) -> Line:
    where = f"lines.{name}"
    _check_name(name, "line")
    useless = without_effect({**defaults, **own}, tasks is not None)
    for key, why in useless.items():
        if key in own:
            raise RecipeError(f"{where}: '{key}' has no effect on {why}; leave it out")
    count = {} if tasks is None else {"tasks": len(tasks)}
    line: Line = build(
        Line, {"label": name, **count, **{key: v for key, v in defaults.items() if key not in useless}, **own}, where
    )
    if tasks is not None and line.method == JOINT:
        raise RecipeError(f"{where}: method '{JOINT}' is for permuted digits; for images use '{SINGLE}' as the ceiling")
    if tasks is not None and line.tasks > len(tasks):
        raise RecipeError(f"{where}: tasks is {line.tasks}, and the recipe has {len(tasks)} [tasks.NAME] tables")
    check_keys(line.curvature, {f.name for f in fields(Settings)}, f"{where}: curvature")
    try:
        resolved = line.resolved_method()
    except XkfacError as error:
        raise RecipeError(f"{where}: {error}") from None
    if resolved.own_bn and tasks is None and line.norm == "none" and not line.own:
        raise RecipeError(f"{where}: a network without BN leaves nothing to each task; name layers in 'own'")
    check_keys(line.grid, ("lr", "damping") if resolved.penalised else ("lr",), f"{where}: grid")
    _check_numbers(line, where)
    return line


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise RecipeError(f"the {what} name '{shortened(name)}' may have a-z, 0-9, '-', '_' and '.' alone")
    if len(name) > LONGEST_NAME:
        raise RecipeError(
            f"the {what} name '{shortened(name)}' has {len(name)} characters; files are called by it, so that it must "
            f"have at most {LONGEST_NAME}"
        )


def _check_numbers(line: Line, where: str) -> None:
    draws = line.curvature.get("draws")
    if draws is not None and draws > _MOST_DRAWS:
        raise RecipeError(f"{where}: curvature.draws must be at most {_MOST_DRAWS:,}, not {draws}")
    if any(not 1 <= count <= line.tasks for count in line.at) or any(a >= b for a, b in pairwise(line.at)):
        raise RecipeError(f"{where}: 'at' must be growing numbers of tasks from 1 to {line.tasks}, not {list(line.at)}")
    if line.head_epochs >= line.epochs:
        raise RecipeError(f"{where}: head_epochs={line.head_epochs} leaves no epoch to what is protected; lower it")
    if line.average > line.epochs:
        raise RecipeError(f"{where}: average={line.average} is more than the {line.epochs} epochs there are")
    if line.average and line.early_stopping:
        raise RecipeError(f"{where}: early_stopping keeps one epoch and average={line.average} several; choose one")


def _check_recipe(recipe: Recipe) -> None:
    _check_name(recipe.name, "recipe")
    world, data = recipe.world
    amount = "some thousands" if world == "data" else "a share such as 0.1"
    missing = f"{world}.validation is 0; set it to {amount}" if data.validation == 0 else ""
    if missing and data.measure == "validation":
        raise RecipeError(f"{world}.measure is 'validation' and {missing}")
    for name, line in recipe.lines.items():
        wanting = (("early_stopping", line.early_stopping), ("consolidate", line.consolidate == "validation"))
        needs = next((key for key, wants in (*wanting, ("calibrated", line.calibrated)) if wants), None)
        if missing and needs:
            raise RecipeError(f"lines.{name}: {needs} needs a validation split and {missing}")
        if line.balance and not any(other.method == SINGLE for other in recipe.lines.values()):
            raise RecipeError(
                f"lines.{name}: balance needs C_t, the loss that fine-tuning reaches, and no line has the method "
                f"'{SINGLE}'; add one, or leave balance out"
            )
    for key, figure in recipe.figures.items():
        for name in figure.lines:
            if name not in recipe.lines:
                raise RecipeError(f"figures.{key}: there is no line '{shortened(name)}'{nearest(name, recipe.lines)}")


def _apply(table: dict[str, Any], setting: str) -> None:
    """Change a key of a recipe's table by a setting such as "defaults.epochs=2"."""
    path, value = read_setting(setting, "defaults.epochs=2")
    lines = as_table(table.get("lines", {}), "lines")
    keys = _path(path, lines)
    if keys[0] == "lines" and len(keys) > 2 and keys[1] not in lines:
        raise RecipeError(f"the setting '{shortened(setting)}' names no line{nearest(keys[1], lines)}")
    _put(table, keys, value)
    if keys[0] == "defaults" and len(keys) > 1:
        for line in lines.values():
            if not isinstance(line, dict) or keys[1] not in line:
                continue
            # A line that has a sweep of something else, or wants none, keeps that.
            if keys[1] != "sweep" or (line["sweep"] and swept_key(line["sweep"]) == swept_key(value)):
                _put(line, keys[1:], value)


def _path(text: str, lines: Iterable[str]) -> list[str]:
    """Return the keys of a path such as "lines.kfac-0.1.lr"; the name of a line may have dots itself."""
    first, _, rest = text.partition(".")
    name = max((name for name in lines if rest.startswith(f"{name}.")), key=len, default="")
    if first == "lines" and name:
        return [first, name, *(key.strip() for key in rest[len(name) + 1 :].split("."))]
    return [key.strip() for key in text.split(".")]


def _put(table: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        table = as_table(table.setdefault(key, {}), key)
    table[keys[-1]] = value
