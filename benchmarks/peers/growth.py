"""How this library's cost grows: with the batch, the width, the resolution, the draws, and the number of tasks."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nets import Batches, Case, perceptron, resnet
from torch.nn import functional as F
from turns import in_turns, plain_pass

import xkfac

SMALL = {"depth": 18, "pixels": 32, "batch": 16, "width": 16}
PASS = 3


@dataclass
class Point:
    """What was measured: a plain pass in ms, a curvature batch and a penalised step over it, the memory file in MB."""

    what: str
    value: int
    plain: float
    curvature: float
    step: float
    megabytes: float


def file_size(memory: xkfac.Memory) -> float:
    """Return the MB of a memory's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.safetensors"
        memory.save(path)
        return path.stat().st_size / 1e6


def later(case: Case, memory: xkfac.Memory, data: Batches, tasks: int) -> xkfac.Memory:
    """Return the memory of so many tasks, all of the same data."""
    for _ in range(tasks - 1):
        learner = xkfac.Learner(case.net, memory)
        learner.begin(recentre=False)
        learner.backward(F.cross_entropy(case.net(case.inputs), case.labels))
        memory = learner.finish(data)
    return memory


def point(what: str, value: int, case: Case, turns: int, tasks: int = 1, draws: int = 1) -> Point:
    """Measure one setting."""
    data = Batches((case.inputs, case.labels), PASS)
    memory = later(case, xkfac.consolidate(case.net, data, "xkfac", draws=draws), data, tasks)
    own = copy.deepcopy(case.net)  # plain passes move the running statistics away from the anchor
    plain = partial(plain_pass, case)
    passing, seconds = in_turns({"": partial(xkfac.consolidate, case.net, data, draws=draws)}, plain, turns)
    learner = xkfac.Learner(own, memory, penalty_every=1)
    learner.begin(recentre=False)

    def step() -> None:
        own.zero_grad()
        learner.backward(F.cross_entropy(own(case.inputs), case.labels))

    step()
    stepping, _ = in_turns({"": step}, plain, 3 * turns)
    learner.close()
    return Point(what, value, seconds * 1e3, passing[""] / PASS, stepping[""], file_size(memory))


def settings() -> list[tuple[str, int, Callable[[], Case], dict[str, Any]]]:
    """Return what is varied, its values, the networks, and further arguments of `point`."""
    varied: list[tuple[str, int, Callable[[], Case], dict[str, Any]]] = []
    for what, values in (("batch", (8, 16, 32, 64)), ("width", (8, 16, 32)), ("pixels", (16, 24, 32))):
        varied += [(what, value, partial(resnet, **{**SMALL, what: value}), {}) for value in values]
    varied += [("draws", value, perceptron, {"draws": value}) for value in (1, 4, 32)]
    varied += [("tasks", value, perceptron, {"tasks": value}) for value in (1, 5, 20)]
    return varied


def measure(turns: int) -> list[Point]:
    """Return all settings, measured one by one."""
    points = []
    for what, value, make, options in settings():
        torch.manual_seed(0)
        points.append(point(what, value, make(), turns * (5 if make is perceptron else 1), **options))
    return points
