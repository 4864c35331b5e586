"""How well the tasks of test images are inferred, and what that costs, where tasks have layers of their own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.experiments.data.digits import Batch
from xkfac.routing.router import By, Router

Loader = Callable[[int], Iterable[Batch]]
IMAGES = 10_000  # of a task's training images, at most, that its statistics are of
TOGETHER = 32  # images in a batch of one task


def meet(router: Router, tasks: Sequence[str], train: Loader) -> None:
    """Add those of some tasks that a router does not know, with their training images."""
    for place, task in enumerate(tasks):
        if task not in router.tasks:
            router.add_task(task, some(train(place)))


def some(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Yield the batches of at most `IMAGES` images."""
    left = IMAGES
    for x, y in batches:
        yield x[:left], y[:left]
        left -= len(x)
        if left <= 0:  # what comes after is not read
            return


@torch.no_grad()
def measure(router: Router, model: nn.Module, task: int, test: Iterable[Batch]) -> dict[str, Any]:
    """Return the accuracy on a task with the task given and inferred, and how often it is taken for each, in %.

    All tasks have the same classes: an answer of another task's layers can be right.
    """
    router.model = model.eval()
    given = inferred = count = 0
    taken = torch.zeros(len(router.tasks), dtype=torch.long)
    for x, y in test:
        found = router(x)
        inferred += int((found.outputs.argmax(1) == y).sum())
        given += int((router(x, task=router.tasks[task]).outputs.argmax(1) == y).sum())
        taken += torch.bincount(found.tasks, minlength=len(taken)).cpu()
        count += len(y)
    shares = {"given": 100 * given / count, "inferred": 100 * inferred / count}
    return {**shares, "taken": [100 * images / count for images in taken.tolist()]}


@torch.no_grad()
def measure_heads(routers: Mapping[By, Router], model: nn.Module, task: int, test: Iterable[Batch]) -> dict[str, Any]:
    """Return the same where each task has its own classes, so that only answers of the right task's head are right.

    Beside single images, shuffled batches of `TOGETHER` images are assigned `together`. `others`: the same by the
    features of all routers but the first.
    """
    first, *others = routers
    right, scores = list[Tensor](), {by: list[Tensor]() for by in routers}
    model.eval()
    for x, y in test:
        with routers[first].using(model, routers[first].tasks[task]):
            right.append(model(x).argmax(1) == y)
        for by, router in routers.items():
            scores[by].append(router.scores(x))
    answers = torch.cat(right)
    found = {by: assigned(router, task, torch.cat(scores[by]), answers) for by, router in routers.items()}
    entry = {"given": _percent(answers), **found[first]}
    return {**entry, "others": {by: found[by] for by in others}} if others else entry


def assigned(router: Router, task: int, scores: Tensor, right: Tensor) -> dict[str, Any]:
    """Return what becomes of images with these scores [N, T], of which these are answered right by their own task."""
    taken = router.log_posterior(scores).argmax(1)
    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0)).to(scores.device)
    batches = scores[order[: len(order) // TOGETHER * TOGETHER]].view(-1, TOGETHER, scores.shape[1]).sum(1)
    together = router.log_posterior(batches).argmax(1)
    return {
        "inferred": _percent(right & (taken == task)),
        "taken": _shares(taken, router),
        "together": _shares(together, router),
    }


def _percent(flags: Tensor) -> float:
    return 100 * int(flags.sum()) / len(flags)


def _shares(taken: Tensor, router: Router) -> list[float]:
    counts = torch.bincount(taken, minlength=len(router.tasks)).tolist()
    return [100 * count / max(len(taken), 1) for count in counts]  # float32 can round to above 100
