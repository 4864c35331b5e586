"""Dataclasses from the plain values that `dataclasses.asdict` and JSON make of them, each checked by its type."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def from_plain(hint: Any, value: Any, what: str) -> Any:
    """Return the value of a type that a plain value stands for.

    hint: a dataclass, a tuple, a table of texts, a type or None, a Literal, text, flag, number, which must be finite,
    or whole number, which must be at least 0. what: names the value in errors.

    Raises ValueError where it stands for none.
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(value, dict):
        return _from_table(hint, value, what)
    if kind in (Union, UnionType):
        (inner,) = (one for one in arguments if one is not NoneType)
        return None if value is None else from_plain(inner, value, what)
    if kind is tuple and isinstance(value, (list, tuple)):
        hints = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(hints) == len(value):
            return tuple(from_plain(one, item, what) for one, item in zip(hints, value, strict=True))
    if kind is dict and isinstance(value, dict):
        return {from_plain(str, key, what): from_plain(arguments[1], item, what) for key, item in value.items()}
    if kind is Literal and any(value == one and type(value) is type(one) for one in arguments):
        return value
    if hint in (str, bool) and isinstance(value, hint):
        return value
    whole = type(value) is int and abs(value) < 2**63
    if hint is int and whole and value >= 0:
        return value
    if hint is float and (whole or (type(value) is float and math.isfinite(value))):
        return float(value)
    raise ValueError(f"{what} is {value!r:.100}")


def _from_table(hint: Any, table: dict[str, Any], what: str) -> Any:
    hints = get_type_hints(hint)
    for name in table:
        if name not in hints:
            raise ValueError(f"{what} has the unknown field '{name}'")
    for field in fields(hint):
        if field.name not in table and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{what} has no '{field.name}'")
    return hint(**{name: from_plain(hints[name], value, f"'{name}' of {what}") for name, value in table.items()})
