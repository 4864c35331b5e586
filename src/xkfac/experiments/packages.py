"""Packages that experiments need and the library does not."""

import importlib
from typing import Any

import torch

from xkfac.errors import XkfacError

_CALLED = {"sklearn": "scikit-learn", "PIL": "Pillow"}
_OPERATORS: list[torch.library.Library] = []  # definitions last as long as their library


class PackageError(XkfacError):
    """A package that is not installed, or cannot be imported."""


def imported(name: str, what: str) -> Any:
    """Return a module that `what` needs."""
    try:
        try:
            return importlib.import_module(name)
        except RuntimeError as error:
            if "operator torchvision::" not in str(error):
                raise
            _define_operators()
            return importlib.import_module(name)
    except Exception as error:  # whatever a package does when it is imported
        package = name.partition(".")[0]
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise PackageError(
            f"{what} needs {_CALLED.get(package, package)}, which cannot be imported ({reason}): pip install "
            f"'xkfac[experiments]', and torchvision in the build for torch {torch.__version__}"
        ) from None


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
