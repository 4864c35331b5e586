"""Tables of TOML: dataclasses made from them with every key and type checked, and values written back."""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from xkfac.errors import XkfacError, nearest, shortened
from xkfac.plain_values import Range, from_plain, record_of, shown

_MANY = 10**9  # of what only has to be a number that anything can count up to
_DEEPEST = 16  # tables and lists in one another; a recipe has four


def whole(least: int, most: int = _MANY) -> Range:
    """Return the range of whole numbers, both ends included."""
    return Range(f"at least {least} and at most {most:,}", lambda value: least <= value <= most)


def number(least: float, below: float = math.inf) -> Range:
    """Return the range of finite numbers from `least` on, those that are `below` another if it is given."""
    bound = "" if below == math.inf else f" and below {below:g}"
    return Range(f"a number of at least {least:g}{bound}", lambda value: least <= value < below)


Count = Annotated[int, whole(0)]
Share = Annotated[float, number(0, 1)]


class RecipeError(XkfacError):
    """A recipe that cannot be run as it is written."""


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Return the table that a TOML text is, named `where` in errors; `check_values` is left to the caller."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:  # also what Python says of numbers with too many digits
        raise RecipeError(f"'{where}' is not valid TOML: {error}") from None


def _too_deep(where: str) -> RecipeError:
    return RecipeError(f"'{shortened(where)}' is nested too deeply: a recipe needs no more than {_DEEPEST} levels")


def check_values(value: Any, where: str) -> None:
    """Check that a value is not nested too deeply and has no whole number that TOML does not have."""
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > _DEEPEST:
            raise _too_deep(where)
        if isinstance(item, dict | list):
            inner = item.values() if isinstance(item, dict) else item
            waiting += [(each, depth + 1) for each in inner]
        elif isinstance(item, int) and not -(2**63) <= item < 2**63:
            raise RecipeError(f"'{shortened(where)}' holds a whole number of more than 64 bits; give a smaller one")


def as_table(value: Any, where: str) -> dict[str, Any]:
    """Return `value` if it is a table, named `where` in the error that says it is none."""
    if not isinstance(value, dict):
        raise RecipeError(f"'{where}' is {shown(value)}; it must be a table")
    return value


def check_keys(table: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise RecipeError for the first key that is not known, with the nearest one that is."""
    for key in table:
        if key not in known:
            raise RecipeError(
                f"{where}: the key '{shortened(key)}' is not known{nearest(key, known)}; the keys are "
                f"{', '.join(sorted(known))}"
            )


def build(cls: Any, table: Mapping[str, Any], where: str, **made: Any) -> Any:
    """Return an instance of a dataclass from a table, each value checked against the field's type and range."""
    needed, free, _ = record_of(cls)
    hints = {**needed, **free}
    check_keys(table, hints.keys() - made.keys(), where)
    missing = next((name for name in needed if name not in (*table, *made)), None)
    if missing is not None:
        raise RecipeError(f"{where}: the key '{missing}' is missing")
    values = {key: typed(value, hints[key], f"{where}: {key}") for key, value in table.items()}
    return cls(**values, **made)


def typed(value: Any, hint: Any, where: str) -> Any:
    """Return a value as the type that a field's hint asks for, or raise RecipeError."""
    try:
        return from_plain(hint, value, where)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def _read_value(text: str) -> Any:
    """Return the value that a text is in TOML, or the text itself."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except RecursionError:
        raise _too_deep(text) from None
    except ValueError:
        return text
    check_values(value, text)
    return value


def read_setting(setting: str, example: str) -> tuple[str, Any]:
    """Return the key and the value of a setting such as "epochs=30"; its error shows an example."""
    key, equals, text = setting.partition("=")
    if not equals or not all(step.strip() for step in key.split(".")):
        raise RecipeError(f"the setting '{shortened(setting)}' must have the form key=value, such as {example}")
    return key.strip(), _read_value(text.strip())


def settings_of(cls: Any, settings: Iterable[str]) -> Any:
    """Return an instance of a dataclass from settings such as "epochs=30", all others at their defaults."""
    return build(cls, dict(read_setting(setting, "epochs=30") for setting in settings), "settings")


def write_key(name: str) -> str:
    """Return a key as TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name)


def write_value(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON lets it stand, TOML does not
    if isinstance(value, Mapping):
        inner = ", ".join(f"{write_key(key)} = {write_value(item)}" for key, item in value.items())
        return "{ " + inner + " }" if inner else "{}"
    return "[" + ", ".join(write_value(item) for item in value) + "]"
