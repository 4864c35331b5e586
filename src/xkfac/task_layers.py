"""Task-specific layers: BN, heads or others, for networks whose task is known or inferred when they are used.

Shared layers alone are protected then; a task-specific layer is free while its task is learnt, at the cost of one copy
per task.
"""

import copy
import fnmatch
import glob
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from xkfac.errors import XkfacError
from xkfac.model.passes import norms_of


class TaskLayer(nn.Module):
    """One layer per task: copies of a given one, or given by task, as heads are. The layer of the `active` task runs.

    All exist from the start, so that the structure of a state dict never changes.
    """

    def __init__(self, layer: nn.Module | Mapping[str, nn.Module], tasks: Iterable[str] = ()) -> None:
        super().__init__()
        if isinstance(tasks, str):
            raise XkfacError(f"tasks is the single name '{tasks}'; give a list of all names, such as ['{tasks}']")
        given = layer if isinstance(layer, Mapping) else {task: copy.deepcopy(layer) for task in tasks}
        try:
            self.of = nn.ModuleDict(given)
        except KeyError as error:
            raise XkfacError(f"a task cannot have this name ({error.args[0]}); choose another one") from None
        if not self.of:
            raise XkfacError("a TaskLayer needs the name of at least one task")
        self.active = next(iter(self.of))

    def enter(self, task: str) -> None:
        """Use the layer of a task; it learns, and no other does.

        Raises XkfacError for a task that it has no layer for.
        """
        self.check(task)
        self.of.requires_grad_(False)
        self.of[task].requires_grad_(True)
        for parameter in self.of.parameters():
            # An optimizer applies weight decay and momentum wherever there is a gradient, be it an old one.
            parameter.grad = parameter.grad if parameter.requires_grad else None
        self.active = task

    def check(self, task: str) -> None:
        """Raise XkfacError for a task that it has no layer for."""
        if task not in self.of:
            raise XkfacError(f"there is no layer for task '{task}'; name one of {', '.join(self.of)}")

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return what the layer of the active task makes of its inputs."""
        return self.of[self.active](*inputs, **keywords)


def task_layers_of(model: nn.Module) -> dict[str, TaskLayer]:
    """Return the `TaskLayer` modules of a model by their path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, TaskLayer)}


def own_patterns(model: nn.Module, *, norms: bool) -> tuple[str, ...]:
    """Return patterns for `exclude` of the task-specific layers of a model: every `TaskLayer`, and BN with `norms`."""
    return tuple(glob.escape(path) for path in (*(norms_of(model) if norms else ()), *task_layers_of(model)))


def give_task_norms(model: nn.Module, tasks: Iterable[str]) -> None:
    """Put a `TaskLayer` for these tasks in the place of every BN of a model that is in none yet."""
    shared = _shared(model)
    _give(model, [path for path in norms_of(model) if path in shared], tasks)


def give_task_layers(model: nn.Module, tasks: Iterable[str], layers: Iterable[str]) -> None:
    """Put a `TaskLayer` for these tasks in the place of layers of a model, named by paths or patterns of them.

    A layer goes with all that is inside it.

    Raises XkfacError, before anything is changed, for a pattern that matches no shared layer with parameters.
    """
    modules = [path for path, module in _shared(model).items() if path and any(True for _ in module.parameters())]
    chosen: set[str] = set()
    for pattern in layers:
        hits = {path for path in modules if fnmatch.fnmatchcase(path, pattern)}
        if not hits:
            first = ", ".join(path for path in modules if "." not in path)
            raise XkfacError(f"no shared layer with parameters matches '{pattern}'; those on top are {first}")
        chosen |= hits
    outer = [path for path in modules if path in chosen and not any(path.startswith(f"{other}.") for other in chosen)]
    _give(model, outer, tasks)


def _shared(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by their path, but for every `TaskLayer` and what is inside."""
    own = tuple(task_layers_of(model))
    inside = tuple(f"{path}." for path in own)
    return {p: module for p, module in model.named_modules() if p not in own and not p.startswith(inside)}


def _give(model: nn.Module, paths: Iterable[str], tasks: Iterable[str]) -> None:
    names = tasks if isinstance(tasks, str) else list(tasks)
    layers = {path: TaskLayer(model.get_submodule(path), names) for path in paths}
    for path, layer in layers.items():
        model.set_submodule(path, layer)


def enter_task(model: nn.Module, task: str) -> None:
    """Use the layers of a task in every `TaskLayer` of a model; they learn, and those of other tasks do not.

    Raises XkfacError for a task that there are no layers for.
    """
    for layer in task_layers_of(model).values():
        layer.enter(task)


@contextmanager
def using_task(model: nn.Module, task: str) -> Iterator[None]:
    """Use the layers of a task in every `TaskLayer` of a model for a while, to measure it; what learns stays as it is.

    Raises XkfacError for a task that there are no layers for.
    """
    layers = task_layers_of(model).values()
    for layer in layers:
        layer.check(task)
    with ExitStack() as after:
        for layer in layers:
            after.callback(setattr, layer, "active", layer.active)
            layer.active = task
        yield
