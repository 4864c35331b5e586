"""BN layers that a task has of its own, as it has a head: for tasks that are told apart when the network is used.

Where it is known which task an input belongs to, its BN need not be shared. The layers' weights alone are common then,
and protected; gamma, beta and the statistics of every BN are kept with a task's head, and are free for the next one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from xkfac.errors import MismatchError, XkfacError
from xkfac.passes import norms_of, unwrap


class TaskNorm(nn.Module):
    """One BN a task, copies of a given one at first, of which that of the `active` task is used.

    All are there from the start, so that the structure of a state dict never changes.
    """

    def __init__(self, norm: nn.Module, tasks: Iterable[str]) -> None:
        super().__init__()
        self.of = nn.ModuleDict({task: copy.deepcopy(norm) for task in tasks})
        if not self.of:
            raise XkfacError("a TaskNorm needs the name of at least one task")
        self.active = next(iter(self.of))

    def enter(self, task: str) -> None:
        """Use the BN of a task; it learns, all others stand still.

        Raises XkfacError for a task that it has no BN for.
        """
        if task not in self.of:
            raise XkfacError(f"there is no BN for task '{task}'; name one of {', '.join(self.of)}")
        self.of.requires_grad_(False)
        self.of[task].requires_grad_(True)
        for parameter in self.of.parameters():
            # An optimizer applies weight decay and momentum wherever there is a gradient, be it an old one.
            parameter.grad = parameter.grad if parameter.requires_grad else None
        self.active = task

    def forward(self, x: Tensor) -> Tensor:
        """Return what the BN of the active task makes of an input."""
        normalised: Tensor = self.of[self.active](x)
        return normalised


def task_norms_of(model: nn.Module) -> list[TaskNorm]:
    """Return the `TaskNorm` layers of a model."""
    return [module for module in model.modules() if isinstance(module, TaskNorm)]


def give_task_norms(model: nn.Module, tasks: Iterable[str]) -> None:
    """Put a `TaskNorm` for these tasks in the place of every BN of a model."""
    names = list(tasks)
    for path, norm in norms_of(model).items():
        model.set_submodule(path, TaskNorm(norm, names))


def enter_task(model: nn.Module, task: str) -> None:
    """Use the BN of a task in every `TaskNorm` of a model; they learn, those of other tasks stand still.

    Raises XkfacError for a task that the layers have no BN for.
    """
    for norm in task_norms_of(model):
        norm.enter(task)


def norm_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of gamma, beta and the statistics of every BN of a model, to be kept with a task's head."""
    return {
        f"{path}.{name}": tensor.detach().clone()
        for path, norm in norms_of(unwrap(model)).items()
        for name, tensor in norm.state_dict().items()
    }


@torch.no_grad()
def load_norm_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Put a `norm_state` back in, in place.

    Raises MismatchError, before anything is changed, when it is of another network.
    """
    own = {
        f"{path}.{name}": tensor
        for path, norm in norms_of(unwrap(model)).items()
        for name, tensor in norm.state_dict(keep_vars=True).items()
    }
    for name in own.keys() | state.keys():
        if name not in own or name not in state or own[name].shape != state[name].shape:
            raise MismatchError(
                f"'{name}' of a BN is not alike in the network and in the norm state; load the state of this network"
            )
    for name, tensor in own.items():
        tensor.copy_(state[name])


@contextmanager
def with_norm_state(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Use the BN layers of another task for a while, to measure it."""
    before = norm_state(model)
    load_norm_state(model, state)
    try:
        yield
    finally:
        load_norm_state(model, before)
