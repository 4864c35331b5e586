"""Infer which task an input is of, by the statistics of each task's inputs, where tasks have layers of their own.

Two numbers per feature are kept of a task: mean and variance of its inputs, as a BN in front of the network would have
them. An input is of the task under whose normal distribution, features taken as independent, it is likeliest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from xkfac.errors import MismatchError, XkfacError
from xkfac.model.batches import inputs_of, tensors


@dataclass(frozen=True, eq=False)
class _Statistics:
    """Mean and variance [F] of the inputs of a task."""

    mean: Tensor
    var: Tensor


class TaskInference:
    """Infers the task of an input by mean and variance of each task's inputs.

    floor: added to every variance, as a share of a task's mean one; a feature that never varies in a task then says
    much, but not everything.
    """

    def __init__(self, floor: float = 0.1) -> None:
        if not 0 < floor < float("inf"):
            raise XkfacError(f"floor must be a positive number, not {floor}")
        self.floor = floor
        self._of: dict[str, _Statistics] = {}

    @property
    def tasks(self) -> list[str]:
        """The tasks that are told apart, in the order in which they were learnt."""
        return list(self._of)

    def learn(self, task: str, loader: Iterable[Any]) -> None:
        """Learn the inputs of a task from batches as training has them, whose first entry is x [N, ...].

        What was known of the task is replaced. Raises XkfacError for a loader without inputs, MismatchError for inputs
        of another size than those of other tasks.
        """
        count = 0
        mean = square = torch.zeros((), dtype=torch.double)
        for batch in loader:
            x = _rows(batch)
            more, own = count + len(x), x.mean(0)
            step = own - mean.to(own.device)
            square = square.to(own.device) + (x - own).square().sum(0) + step.square() * (count * len(x) / more)
            mean = mean.to(own.device) + step * (len(x) / more)
            count = more
        if count == 0:
            raise XkfacError(f"the loader of task '{task}' gave no inputs; pass its training examples")
        self._check(task, mean)
        self._of[task] = _Statistics(mean.float(), (square / count).float())

    def scores(self, x: Tensor) -> Tensor:
        """Return the log-likelihood [N, tasks] of inputs x [N, ...] under each task, up to one constant.

        Raises XkfacError before any task is learnt, MismatchError for inputs of another size.
        """
        if not self._of:
            raise XkfacError("no task is known yet; call learn(task, loader) with the inputs of each")
        rows = _rows(x)
        self._check("x", rows[0] if len(rows) else rows.new_zeros(rows.shape[1]))
        mean = torch.stack([known.mean for known in self._of.values()]).to(rows)
        var = torch.stack([known.var for known in self._of.values()]).to(rows)
        var = var + self.floor * var.mean(1, keepdim=True).clamp(min=torch.finfo(var.dtype).tiny)
        centre = mean.mean(0)
        rows, mean = rows - centre, mean - centre
        squares = rows.square() @ var.reciprocal().T - 2 * rows @ (mean / var).T + (mean.square() / var).sum(1)
        scores: Tensor = -0.5 * (squares + var.log().sum(1))
        return scores

    def state_dict(self) -> dict[str, Tensor]:
        """Return mean and variance of every task, `mean/TASK` and `var/TASK`."""
        return {f"{kind}/{task}": getattr(own, kind) for task, own in self._of.items() for kind in ("mean", "var")}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take what a `state_dict` has in place of what is known.

        Raises MismatchError, before anything is changed, where a mean or a variance is missing.
        """
        tasks = dict.fromkeys(name.partition("/")[2] for name in state)
        if set(state) != {f"{kind}/{task}" for task in tasks for kind in ("mean", "var")}:
            raise MismatchError(
                "the state is not that of a TaskInference, which has 'mean/TASK' and 'var/TASK' of each"
            )
        self._of = {task: _Statistics(state[f"mean/{task}"], state[f"var/{task}"]) for task in tasks}

    def _check(self, name: str, row: Tensor) -> None:
        for task, known in self._of.items():
            if known.mean.shape != row.shape:
                raise MismatchError(
                    f"inputs of '{name}' have {row.numel()} features and those of task '{task}' {known.mean.numel()}; "
                    "tasks can be told apart by inputs of one size alone"
                )


def _rows(batch: Any) -> Tensor:
    """Return the inputs of a batch as rows [N, F] of double precision: sums over many features decide."""
    found = list(tensors(inputs_of(batch)))
    if len(found) != 1 or found[0].dim() < 2:
        raise XkfacError(
            "tasks are told apart by inputs that are one tensor [N, ...]; pass batches of (inputs, labels), or tensors"
        )
    return found[0].detach().flatten(1).double()
