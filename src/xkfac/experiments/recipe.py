"""Recipes: small TOML files that say what an experiment runs, line by line.

    name = "mine"
    [data]
    set = "digits"
    [defaults]                  # of every line
    tasks = 5
    [lines.xkfac]               # one curve of a figure
    label = "XK-FAC"
    [lines.fine-tuning]
    method = "fine-tuning"

Every key is explained at the field of its class: `Recipe`, `Data`, `Line`, `Figure`.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from xkfac.curvature import Settings
from xkfac.errors import XkfacError
from xkfac.experiments.toml import (
    RecipeError,
    as_table,
    build,
    check_keys,
    nearest,
    read_value,
    typed,
    write_key,
    write_value,
)
from xkfac.methods import METHODS, Method, get_method

DataSet = Literal["mnist", "digits"]
Norm = Literal["bn", "brn", "none"]
JOINT = "joint"

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_READING = ("interpretation", "recentre")
_PENALISED_ONLY = ("damping", "strength", *_READING, "curvature", "consolidate", "keep")


@dataclass(frozen=True)
class Data:
    """The data of an experiment.

    set: `mnist`, read from the data folder, or `digits`, which scikit-learn ships. validation: examples that are split
    off the training part, for early stopping and for choices on the target alone. train: at most so many training
    examples, 0 for all. measure: the part that accuracies are measured on, `test`, or `validation` for a recipe that
    helps to choose something, which test examples must not.
    """

    set: DataSet = "mnist"
    validation: int = 5000
    train: int = 0
    measure: Literal["test", "validation"] = "test"


@dataclass(frozen=True)
class Line:
    """One curve of a figure: a network, how it is trained, and what protects it.

    label, note: what figures and tables call it, and what it is. tasks: how many are learnt, one after the other.
    norm: `bn`, `brn` or `none` before each ReLU. widths: units of the hidden layers.
    epochs, batch, lr, momentum: SGD; the learning rate is divided by `lr_factor` every `lr_every` epochs.
    target_lr: the learning rate from the second task on, where it is another; at 0 BN's statistics alone move.
    early_stopping: keep the epoch that is best on the validation split of the current target.
    average: the epochs at the end whose weights are averaged, 0 for the last weights alone.
    method: one of `xkfac.METHODS`, or `joint`, which trains on all tasks at once, for each number of tasks in `at`.
    interpretation, recentre: the method's own unless given. fixed_bn: every BN stays as the first task left it.
    damping, strength: those of `xkfac.Learner`.
    curvature: changes to the method's `xkfac.Settings`, such as {form = "paper", draws = 1}.
    consolidate: the part of a task that its curvature is estimated on, `train` or `validation`.
    keep: `average` the factors over tasks, or keep `all` terms.
    """

    label: str = ""
    note: str = ""
    tasks: int = 10
    norm: Norm = "bn"
    widths: tuple[int, ...] = (128, 128)
    epochs: int = 15
    batch: int = 128
    lr: float = 0.1
    target_lr: float | None = None
    lr_every: int = 5
    lr_factor: float = 10.0
    momentum: float = 0.9
    early_stopping: bool = True
    average: int = 0
    method: str = "xkfac"
    at: tuple[int, ...] = ()
    interpretation: str | None = None
    recentre: bool | None = None
    fixed_bn: bool = False
    damping: float = 1e-4
    strength: float = 1.0
    curvature: Mapping[str, Any] = field(default_factory=dict)
    consolidate: Literal["train", "validation"] = "train"
    keep: Literal["average", "all"] = "average"

    @property
    def penalised(self) -> bool:
        """Whether the line has a penalty at all."""
        return self.resolved_method().penalised

    def learning_rate(self, task: int, epoch: int) -> float:
        """Return the learning rate of an epoch of a task, both counted from 0."""
        first = self.lr if task == 0 or self.target_lr is None else self.target_lr
        try:
            return float(first / self.lr_factor ** (epoch // self.lr_every))
        except OverflowError:
            return 0.0

    def resolved_method(self) -> Method:
        """Return the library's method of the line; joint training is fine-tuning on all tasks at once."""
        if self.method == JOINT:
            return METHODS["fine-tuning"]
        given: dict[str, Any] = {"interpretation": self.interpretation, "recentre": self.recentre}
        if self.fixed_bn:
            given = {"interpretation": "eval", "recentre": False, **_given(given), "fixed_bn": True}
        return get_method(self.method, **self.curvature, **_given(given))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


@dataclass(frozen=True)
class Figure:
    """A figure: average accuracy against the number of tasks for some lines."""

    title: str = ""
    note: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recipe:
    """An experiment: its data, its lines, how often each is repeated, and the figures that show them.

    The repeats have the seeds seed, seed + 1, ...; a seed fixes permutations, initial weights, batches and label draws.
    threads: CPU threads of one job; part of the recipe because sums over more threads round differently.
    """

    name: str
    lines: Mapping[str, Line]
    title: str = ""
    description: str = ""
    data: Data = field(default_factory=Data)
    repeats: int = 1
    seed: int = 0
    threads: int = 1
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @property
    def seeds(self) -> range:
        """The seeds of the repeats."""
        return range(self.seed, self.seed + self.repeats)

    def only(self, patterns: Sequence[str]) -> Recipe:
        """Return the recipe with those of its lines alone whose names match a pattern such as `kfac-*`."""
        chosen: dict[str, Line] = {}
        for pattern in patterns:
            hits = {name: line for name, line in self.lines.items() if fnmatch.fnmatchcase(name, pattern)}
            if not hits:
                raise RecipeError(
                    f"no line of recipe '{self.name}' matches '{pattern}'{nearest(pattern, self.lines)}; "
                    f"its lines are {', '.join(self.lines)}"
                )
            chosen |= hits
        lines = {name: line for name, line in self.lines.items() if name in chosen}
        figures = {
            key: replace(figure, lines=tuple(name for name in figure.lines if name in lines))
            for key, figure in self.figures.items()
        }
        return replace(self, lines=lines, figures={key: figure for key, figure in figures.items() if figure.lines})

    def to_toml(self) -> str:
        """Return the recipe with every key written out, as a run keeps it."""
        return "\n".join(_toml_lines(self)) + "\n"


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
    path = Path(source)
    if str(source) in named:
        text = named[str(source)]
    elif path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"'{source}' cannot be read as a recipe ({error})") from None
    else:
        raise RecipeError(
            f"there is no recipe '{source}'{nearest(str(source), named)}; give the path of a TOML file or one of "
            f"{', '.join(named)}"
        )
    return parse_recipe(text, str(source), settings)


def parse_recipe(text: str, source: str = "recipe", settings: Sequence[str] = ()) -> Recipe:
    """Return the recipe that a TOML text describes, with changes as in `load_recipe`."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"'{source}' is not valid TOML: {error}") from None
    for setting in settings:
        _apply(table, setting)
    return _recipe(table, source)


def _recipe(table: dict[str, Any], source: str) -> Recipe:
    table = dict(table)
    defaults = as_table(table.pop("defaults", {}), "defaults")
    lines = as_table(table.pop("lines", {}), "lines")
    figures = as_table(table.pop("figures", {}), "figures")
    for key in figures:
        _check_name(key, "figure")
    data = as_table(table.pop("data", {}), "data")
    if not lines:
        raise RecipeError(f"'{source}' has no [lines.NAME] table, so there is nothing to run; add one for each curve")
    build(Line, defaults, "defaults")
    made = {name: _line(name, as_table(own, f"lines.{name}"), defaults) for name, own in lines.items()}
    drawn = {key: build(Figure, as_table(own, f"figures.{key}"), f"figures.{key}") for key, own in figures.items()}
    if not drawn:
        drawn = {"accuracy": Figure("Average accuracy", lines=tuple(made))}
    known = {f.name for f in fields(Recipe)} - {"lines", "figures", "data"}
    check_keys(table, known | {"defaults", "lines", "figures", "data"}, source)
    recipe: Recipe = build(
        Recipe, {"name": Path(source).stem, **table}, source, lines=made, figures=drawn, data=build(Data, data, "data")
    )
    _check_recipe(recipe)
    return recipe


def _line(name: str, own: dict[str, Any], defaults: dict[str, Any]) -> Line:
    where = f"lines.{name}"
    _check_name(name, "line")
    method = typed({**defaults, **own}.get("method", Line.method), str, f"{where}: method")
    known = [*METHODS, JOINT]
    if method not in known:
        raise RecipeError(
            f"{where}: method '{method}' is not known{nearest(method, known)}; it is one of {', '.join(known)}"
        )
    useless = _without_effect({**defaults, **own})
    for key, why in useless.items():
        if key in own:
            raise RecipeError(f"{where}: '{key}' has no effect on {why}; leave it out")
    line: Line = build(
        Line, {"label": name, **{key: v for key, v in defaults.items() if key not in useless}, **own}, where
    )
    check_keys(line.curvature, {f.name for f in fields(Settings)}, f"{where}: curvature")
    try:
        line.resolved_method()
    except XkfacError as error:
        raise RecipeError(f"{where}: {error}") from None
    _check_numbers(line, where)
    return line


def _without_effect(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that would do nothing on a line, each with what it is that they would not act on."""
    method = line.get("method", Line.method)
    chosen = METHODS["fine-tuning" if method == JOINT else method]
    useless = {} if method == JOINT else {"at": f"method '{method}', only on '{JOINT}'"}
    if line.get("norm") == "none":
        useless |= dict.fromkeys(("fixed_bn", *_READING), "a network without BN")
    if not chosen.units:
        useless |= dict.fromkeys(_READING, f"method '{method}', which penalises every parameter by itself")
    if line.get("fixed_bn") is True:
        useless |= dict.fromkeys(_READING, "a line whose fixed_bn keeps BN as it is")
    if chosen.fixed_bn:
        useless |= dict.fromkeys(("fixed_bn", *_READING), f"method '{method}', which keeps BN as it is")
    if not chosen.penalised:
        useless |= dict.fromkeys(_PENALISED_ONLY, f"method '{method}', which has no penalty")
    if method == JOINT:
        useless |= dict.fromkeys(("fixed_bn", "target_lr"), f"method '{JOINT}', which has no second task")
    return useless


def _check_name(name: str, what: str) -> None:
    if not _NAME.fullmatch(name):
        raise RecipeError(
            f"the {what} name '{name}' must be made of lower-case letters, digits, '-', '_' and '.' alone"
        )


def _check_numbers(line: Line, where: str) -> None:
    for key, least in (("tasks", 1), ("epochs", 1), ("batch", 2), ("lr_every", 1), ("average", 0)):
        if getattr(line, key) < least:
            raise RecipeError(f"{where}: {key} must be at least {least}, not {getattr(line, key)}")
    for key in ("lr", "target_lr", "damping", "strength", "momentum"):
        if getattr(line, key) is not None and not 0 <= getattr(line, key) < float("inf"):
            raise RecipeError(f"{where}: {key} must be a number of at least 0, not {getattr(line, key)}")
    if not 1 <= line.lr_factor < float("inf"):
        raise RecipeError(f"{where}: lr_factor must be a number of at least 1, not {line.lr_factor}")
    if any(width < 1 for width in line.widths):
        raise RecipeError(f"{where}: widths must be at least 1, not {list(line.widths)}")
    if any(not 1 <= count <= line.tasks for count in line.at) or any(a >= b for a, b in pairwise(line.at)):
        raise RecipeError(f"{where}: 'at' must be growing numbers of tasks from 1 to {line.tasks}, not {list(line.at)}")
    if line.average > line.epochs:
        raise RecipeError(f"{where}: average={line.average} is more than the {line.epochs} epochs there are")
    if line.average and line.early_stopping:
        raise RecipeError(
            f"{where}: early_stopping keeps the weights of one epoch and average={line.average} those of several; "
            "choose one"
        )


def _check_recipe(recipe: Recipe) -> None:
    _check_name(recipe.name, "recipe")
    for key, least in (("repeats", 1), ("seed", 0), ("threads", 1)):
        if getattr(recipe, key) < least:
            raise RecipeError(f"{key} must be at least {least}, not {getattr(recipe, key)}")
    for key in ("validation", "train"):
        if getattr(recipe.data, key) < 0:
            raise RecipeError(f"data.{key} must be at least 0, not {getattr(recipe.data, key)}")
    if recipe.data.measure == "validation" and recipe.data.validation == 0:
        raise RecipeError("data.measure is 'validation' and data.validation is 0; set it to some thousands")
    for name, line in recipe.lines.items():
        needs = "early_stopping" if line.early_stopping else "consolidate" if line.consolidate == "validation" else None
        if needs and recipe.data.validation == 0:
            raise RecipeError(
                f"lines.{name}: {needs} needs a validation split and data.validation is 0; set it to some thousands"
            )
    for key, figure in recipe.figures.items():
        for name in figure.lines:
            if name not in recipe.lines:
                raise RecipeError(f"figures.{key}: there is no line '{name}'{nearest(name, recipe.lines)}")


def _apply(table: dict[str, Any], setting: str) -> None:
    """Change a key of a recipe's table by a setting such as "defaults.epochs=2"."""
    path, equals, text = setting.partition("=")
    lines = as_table(table.get("lines", {}), "lines")
    keys = _path(path, lines)
    if not equals or not all(keys):
        raise RecipeError(f"the setting '{setting}' must have the form key=value, such as defaults.epochs=2")
    value = read_value(text.strip())
    if keys[0] == "lines" and len(keys) > 2 and keys[1] not in lines:
        raise RecipeError(f"the setting '{setting}' names no line{nearest(keys[1], lines)}")
    _put(table, keys, value)
    if keys[0] == "defaults" and len(keys) > 1:
        for line in lines.values():
            if isinstance(line, dict) and keys[1] in line:
                _put(line, keys[1:], value)


def _path(text: str, lines: Iterable[str]) -> list[str]:
    """Return the keys of a path such as "lines.kfac-0.1.lr"; the name of a line may have dots itself."""
    first, _, rest = text.strip().partition(".")
    name = max((name for name in lines if rest.startswith(f"{name}.")), key=len, default="")
    if first == "lines" and name:
        return [first, name, *(key.strip() for key in rest[len(name) + 1 :].split("."))]
    return [key.strip() for key in text.split(".")]


def _put(table: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        table = as_table(table.setdefault(key, {}), key)
    table[keys[-1]] = value


def _toml_lines(recipe: Recipe) -> Iterator[str]:
    tables: dict[str, Any] = {"data": recipe.data}
    tables |= {f"lines.{write_key(name)}": line for name, line in recipe.lines.items()}
    tables |= {f"figures.{write_key(name)}": figure for name, figure in recipe.figures.items()}
    yield from (f"{key} = {write_value(getattr(recipe, key))}" for key in _plain_fields(recipe))
    for name, table in tables.items():
        yield ""
        yield f"[{name}]"
        yield from (f"{key} = {write_value(getattr(table, key))}" for key in _plain_fields(table))


def _plain_fields(table: Any) -> Iterator[str]:
    for f in fields(table):
        value = getattr(table, f.name)
        if value is None or (f.name in ("lines", "figures", "data") and not isinstance(value, tuple)):
            continue
        if isinstance(table, Line) and f.name in _without_effect(vars(table)):
            continue
        yield f.name
