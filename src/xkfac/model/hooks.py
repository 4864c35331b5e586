"""Hooks on a model that belong to the model alone: a copy of it, or a pickled one, is free of them."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn


class Hook:
    """A hook of a module; where the module is copied or pickled, the copy gets a hook that does nothing.

    `copy.deepcopy` shares plain functions, so a hook that is one would act in the name of the original for its copies:
    for a mean teacher, an average of weights, a checkpoint in memory.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Run the hook."""
        return self._function(*arguments)

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return _idle, ()


class ReplacedForward:
    """A forward pass put in the place of a module's own; a copy of the module, or a pickled one, runs its own."""

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """Run the module."""
        return self._function(self._module, *inputs, **keywords)

    def __reduce__(self) -> tuple[Callable[[nn.Module], Any], tuple[nn.Module]]:
        return _own_forward, (self._module,)

    def remove(self) -> None:
        """Give the module its own forward pass back."""
        if vars(self._module).get("forward") is self:
            del self._module.forward


def replace_forward(module: nn.Module, function: Callable[..., Any]) -> ReplacedForward:
    """Have `function(module, *inputs)` run in the place of a module's forward pass until it is removed."""
    replaced = ReplacedForward(module, function)
    module.forward = replaced
    return replaced


def runs_its_class(module: nn.Module) -> bool:
    """Whether a module's forward pass is the one of its class, also if it holds it as a copy of a replaced one does."""
    own = vars(module).get("forward")
    return own is None or getattr(own, "__func__", None) is type(module).forward


def _idle() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*arguments: Any) -> None:
    """Stand in for a hook."""


def _own_forward(module: nn.Module) -> MethodType:
    return MethodType(type(module).forward, module)
