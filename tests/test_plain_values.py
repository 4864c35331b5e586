"""Dataclasses come back from JSON as they were; what stands for no value of a type is refused."""

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

import pytest

from xkfac.plain_values import from_plain


@dataclass
class Inner:
    pair: tuple[int, str]
    many: tuple[tuple[int, int], ...] = ()


@dataclass
class Outer:
    word: Literal["a", "b"]
    number: float
    inner: Inner | None
    table: dict[str, Inner]
    flag: bool = field(default=True)


def test_values_come_back_from_json():
    inner = Inner((1, "x"), ((1, 2), (3, 4)))
    for value in (Outer("a", 0.5, inner, {"k": inner}, False), Outer("b", 2, None, {})):
        assert from_plain(Outer, json.loads(json.dumps(asdict(value))), "it") == value


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"word": "c"}, "its 'word' is 'c'"),
        ({"number": float("nan")}, "its 'number' is nan"),
        ({"number": True}, "its 'number' is True"),
        ({"number": 10**400}, "its 'number' is 1"),
        ({"flag": 0}, "its 'flag' is 0"),
        ({"inner": {"pair": [1]}}, r"'pair' of its 'inner' is \[1\]"),
        ({"inner": {"pair": [-1, "x"]}}, "'pair' of its 'inner' is -1"),
        ({"inner": {}}, "its 'inner' has no 'pair'"),
        ({"table": {"k": 3}}, "its 'table' is 3"),
        ({"more": 1}, "it has the unknown field 'more'"),
    ],
)
def test_values_of_another_type_are_refused_by_name(change, sentence):
    right = {"word": "a", "number": 1.0, "inner": None, "table": {}}
    from_plain(Outer, right, "it")
    with pytest.raises(ValueError, match=sentence):
        from_plain(Outer, {**right, **change}, "it")
