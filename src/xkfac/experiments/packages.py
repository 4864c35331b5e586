"""Packages that experiments need and the library does not."""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any

import torch

from xkfac.errors import XkfacError

_INSTALL = "pip install 'xkfac[experiments]'"
_CALLED = {"sklearn": "scikit-learn", "PIL": "Pillow"}
_WITH_TORCHVISION = ("torchvision", "timm")
_MISSING_OPERATOR = re.compile(r"operator torchvision::\w+ does not exist")
_OPERATORS: list[torch.library.Library] = []  # definitions last as long as their library


class PackageError(XkfacError):
    """A package that is not installed, or cannot be imported."""


def imported(name: str, what: str) -> Any:
    """Return a module that `what` needs.

    Raises PackageError with how to install its package, or, where it is installed, with why it cannot be imported.
    """
    package = name.partition(".")[0]
    try:
        try:
            return importlib.import_module(name)
        except RuntimeError as error:
            if not _MISSING_OPERATOR.search(str(error)):
                raise
            _define_operators()
            return importlib.import_module(name)
    except Exception as error:  # whatever a package does when it is imported
        missing = _missing(error)
        if missing is not None:
            by = "" if missing == package else f", which {_called(package)} imports,"
            raise PackageError(f"{what} needs {_called(missing)}{by} and it is not installed: {_INSTALL}") from None
        which = "torchvision" if package in _WITH_TORCHVISION else package
        fitting = f" in the build that fits torch {torch.__version__}" if which == "torchvision" else ""
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise PackageError(
            f"{what} needs {_called(package)}, which is installed but cannot be imported ({reason}); reinstall "
            f"{_called(which)}{fitting}"
        ) from None


def _called(package: str) -> str:
    return _CALLED.get(package, package)


def _missing(error: Exception) -> str | None:
    """Return the package whose absence an error is about, None if it is about something else."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    try:
        return package if importlib.util.find_spec(package) is None else None
    except (ImportError, ValueError):
        return package


def _define_operators() -> None:
    """Name the compiled operators that torchvision describes when it is imported.

    They do not load beside a torch of another build, such as one for CPUs alone. Networks for classification, those of
    timm among them, use none of them, and need no more than that the names are there.
    """
    if not _OPERATORS:
        _OPERATORS.append(torch.library.Library("torchvision", "FRAGMENT"))  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            _OPERATORS[0].define(schema)  # type: ignore[no-untyped-call]
