"""How well the tasks of test images are inferred, and what that costs, where tasks have layers of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from xkfac.experiments.runs.training import Batch
from xkfac.routing.router import Router

Loader = Callable[[int], Iterable[Batch]]
IMAGES = 10_000  # of a task's training images, at most, that its statistics are of


def meet(router: Router, tasks: Sequence[str], train: Loader) -> None:
    """Add those of some tasks that a router does not know, with their training images."""
    for place, task in enumerate(tasks):
        if task not in router.tasks:
            router.add_task(task, _some(train(place)))


def _some(batches: Iterable[Batch]) -> Iterable[Batch]:
    left = IMAGES
    for x, y in batches:
        if left > 0:
            yield x[:left], y[:left]
        left -= len(x)


@torch.no_grad()
def measure(router: Router, model: nn.Module, task: int, test: Iterable[Batch], *, one_head: bool) -> dict[str, Any]:
    """Return the accuracy on a task with the task given and inferred, and how often it is taken for each, in %.

    one_head: an answer of another task's layers can be right; otherwise its classes are others.
    """
    router.model = model.eval()
    given = inferred = count = 0
    taken = torch.zeros(len(router.tasks), dtype=torch.long)
    for x, y in test:
        found = router(x)
        right = found.outputs.argmax(1) == y
        inferred += int((right if one_head else right & (found.tasks == task)).sum())
        given += int((router(x, task=router.tasks[task]).outputs.argmax(1) == y).sum())
        taken += torch.bincount(found.tasks, minlength=len(taken)).cpu()
        count += len(y)
    shares = {"given": 100 * given / count, "inferred": 100 * inferred / count}
    return {**shares, "taken": (100 * taken / count).tolist()}
