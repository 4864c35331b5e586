"""Errors that a user of the library can meet; each carries one sentence that names the thing and the remedy."""


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
