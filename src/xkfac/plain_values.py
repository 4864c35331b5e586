"""Values of types from the plain values that JSON and TOML make of them, each checked by its type and range."""

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints, is_typeddict

from xkfac.errors import nearest, shortened

_WORDS = {str: "a text", bool: "true or false", int: "a whole number of at least 0", float: "a finite number"}


class Record(NamedTuple):
    """A table of some fields by their types. free: those that may be missing. more: there may be others."""

    fields: Mapping[str, Any]
    free: Mapping[str, Any] = {}
    more: bool = False


class Range(NamedTuple):
    """What a value of a type may be, in words, and whether one is that: `Annotated[float, Range(...)]`."""

    words: str
    holds: Callable[[Any], bool]


# Ranges stand here, not in the class of a field: there a lambda would not see the names of its module.
Positive = Annotated[int, Range("at least 1", lambda value: value >= 1)]
Amount = Annotated[float, Range("a finite number of at least 0", lambda value: 0 <= value < math.inf)]


def from_plain(hint: Any, value: Any, what: str) -> Any:
    """Return the value of a type that a plain value stands for.

    hint: a dataclass, TypedDict or Record, a tuple, a list, a table by names, a type or None, a Literal, a text, a
    flag, a number, which must be finite, or a whole number, which must be at least 0; or one of these `Annotated` by a
    Range, which then alone says what numbers may be. what: names the value in errors.

    Raises ValueError where it stands for none.
    """
    kind, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if kind is Annotated:
        return _in_range(arguments[0], arguments[1], value, what)
    if isinstance(hint, Record):
        return _fields(hint, _table(value, what), what)
    if is_dataclass(hint) or is_typeddict(hint):
        return hint(**_fields(record_of(hint), _table(value, what), what))
    if kind in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        return from_plain(next(one for one in arguments if one is not NoneType), value, what)
    if kind in (tuple, list):
        return kind(_items(kind, arguments, value, what))
    if kind in (dict, Mapping):
        table = _table(value, what)
        return {from_plain(str, key, what): from_plain(arguments[1], table[key], _named(key, what)) for key in table}
    if kind is Literal:
        if any(value == one and type(value) is type(one) for one in arguments):
            return value
        names = [str(one) for one in arguments]
        near = nearest(value, names) if isinstance(value, str) else ""
        raise ValueError(f"{what} is {shown(value)}{near}; it must be one of {', '.join(names)}")
    right = _is_number(value, hint) and (value >= 0 if hint is int else math.isfinite(value))
    if right if hint in (int, float) else isinstance(value, hint):
        return hint(value)
    raise _wrong(what, value, _WORDS[hint])


def check_fields(instance: Any, error: type[Exception]) -> None:
    """Check every field of an instance of a dataclass by its type and range; raises `error` for the first at fault."""
    kind: Any = type(instance)
    needed, free, _ = record_of(kind)
    try:
        for name, hint in {**needed, **free}.items():
            if not is_dataclass(hint):
                from_plain(hint, getattr(instance, name), name)
    except ValueError as fault:
        raise error(str(fault)) from None


def shown(value: Any) -> str:
    """Return a value as an error shows it, in its middle left out if it is long."""
    return shortened(repr(list(value) if isinstance(value, tuple) else value))


def _wrong(what: str, value: Any, words: str) -> ValueError:
    return ValueError(f"{what} is {shown(value)}; it must be {words}")


def _is_number(value: Any, hint: Any) -> bool:
    return (type(value) is int and abs(value) < 2**63) or (hint is float and type(value) is float)


def _in_range(inner: Any, range: Range, value: Any, what: str) -> Any:
    if inner not in (int, float):
        found = from_plain(inner, value, what)
    elif _is_number(value, inner):
        found = inner(value)
    else:
        raise _wrong(what, value, "a whole number" if inner is int else "a number")
    if not range.holds(found):
        raise ValueError(f"{what} must be {range.words}, not {shown(found)}")
    return found


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(what, value, "a table")
    return value


def _items(kind: Any, arguments: tuple[Any, ...], value: Any, what: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise _wrong(what, value, "a list")
    many = kind is list or arguments[-1] is ...
    hints = arguments[:1] * len(value) if many else arguments
    if len(hints) != len(value):
        raise _wrong(what, value, f"a list of {len(hints)}")
    return [from_plain(one, item, what) for one, item in zip(hints, value, strict=True)]


def _fields(record: Record, table: dict[str, Any], what: str) -> dict[str, Any]:
    hints = {**record.fields, **record.free}
    unknown = next((name for name in table if name not in hints and not record.more), None)
    if unknown is not None:
        raise ValueError(f"{what} has the unknown field '{unknown}'")
    missing = next((name for name in record.fields if name not in table), None)
    if missing is not None:
        raise ValueError(f"{what} has no '{missing}'")
    return {name: from_plain(hints.get(name, Any), value, _named(name, what)) for name, value in table.items()}


def _named(name: str, what: str) -> str:
    """Return what an error calls a field of a table that it calls `what`."""
    return f"its '{name}'" if what == "it" else f"'{name}' of {what}"


@lru_cache
def record_of(hint: Any) -> Record:
    """Return the fields of a dataclass or TypedDict; those with a default, or not required, are free."""
    hints = get_type_hints(hint, include_extras=True)
    if is_typeddict(hint):
        needed = hint.__required_keys__
    else:
        needed = {field.name for field in fields(hint) if field.default is field.default_factory is MISSING}
    free = {name: one for name, one in hints.items() if name not in needed}
    return Record({name: one for name, one in hints.items() if name in needed}, free)
