"""Tables of TOML: dataclasses made from them with every key and type checked, and values written back."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from xkfac.errors import XkfacError


class RecipeError(XkfacError):
    """A recipe that cannot be run as it is written."""


def as_table(value: Any, where: str) -> dict[str, Any]:
    """Return `value` if it is a table, named `where` in the error that says it is none."""
    if not isinstance(value, dict):
        raise RecipeError(f"'{where}' is {value!r}; it must be a table")
    return value


def check_keys(table: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise RecipeError for the first key that is not known, with the nearest one that is."""
    for key in table:
        if key not in known:
            raise RecipeError(
                f"{where}: the key '{key}' is not known{nearest(key, known)}; the keys are {', '.join(sorted(known))}"
            )


def build(cls: type[Any], table: Mapping[str, Any], where: str, **made: Any) -> Any:
    """Return an instance of a dataclass from a table, each value checked against the field's type."""
    hints = get_type_hints(cls)
    check_keys(table, {f.name for f in fields(cls)} - set(made), where)
    for f in fields(cls):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in (*table, *made):
            raise RecipeError(f"{where}: the key '{f.name}' is missing")
    values = {key: typed(value, hints[key], f"{where}: {key}") for key, value in table.items()}
    return cls(**values, **made)


def typed(value: Any, hint: Any, where: str) -> Any:
    """Return a value as the type that a field's hint asks for, or raise RecipeError."""
    origin, options = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in options:
            close = nearest(str(value), map(str, options))
            raise RecipeError(f"{where} is {value!r}{close}; it must be one of {', '.join(map(str, options))}")
        return value
    if origin in (Union, types.UnionType):
        return typed(value, next(option for option in options if option is not type(None)), where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise RecipeError(f"{where} is {value!r}; it must be a list")
        return tuple(typed(item, options[0], where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wanted = dict if origin is not None else hint
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}
        raise RecipeError(f"{where} is {value!r}; it must be {names[wanted]}")
    return value


def read_value(text: str) -> Any:
    """Return the value that a text is in TOML, or the text itself."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def settings_of(cls: type[Any], settings: Iterable[str]) -> Any:
    """Return an instance of a dataclass from settings such as "epochs=30", all others at their defaults."""
    table: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"the setting '{setting}' must have the form key=value, such as epochs=30")
        table[key.strip()] = read_value(text.strip())
    return build(cls, table, "settings")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a remark that suggests the nearest known name, if one is near."""
    close = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


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
