"""Errors that a user of the library can meet; each carries one sentence that names the thing and the remedy."""

import difflib
from collections.abc import Iterable

_LONGEST_WORD = 100  # a longer one resembles nothing, and comparing it takes long


class XkfacError(ValueError):
    """Base of all errors that the library raises itself."""


class UnitError(XkfacError):
    """A part of a network cannot be treated as it stands."""


class NotFiniteError(UnitError):
    """A network, or its curvature, has numbers that are not finite."""


class MismatchError(XkfacError):
    """A memory and a model do not belong together."""


class MemoryFileError(XkfacError):
    """A memory file is damaged, foreign, or of another version."""


class XkfacWarning(UserWarning):
    """Something that a user should know and that is no error."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a remark that suggests the nearest known name, if one is near."""
    names = list(known) if len(name) <= _LONGEST_WORD else []
    close = difflib.get_close_matches(name, names, 1) or difflib.get_close_matches(name.lower(), names, 1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def shortened(text: str, width: int = 80) -> str:
    """Return a text of at most so many characters, the middle left out of a longer one."""
    return text if len(text) <= width else f"{text[: width // 2]}…{text[-(width - width // 2 - 1) :]}"
