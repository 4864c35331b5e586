"""What a job learns, made of loaded data: tasks in their order, the network that meets them, examples of each."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import nn

from xkfac.experiments.data.augmentation import Augmentation, ImageExamples
from xkfac.experiments.data.digits import Batch, DataError, Part, Parts, PermutedExamples, permutation
from xkfac.experiments.data.trees import in_data_folder
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.networks.weights import is_download, load_source
from xkfac.experiments.recipes.recipe import Images, Line, Recipe
from xkfac.experiments.runs.job_folder import RunError
from xkfac.experiments.runs.task_inference import measure, measure_heads, meet, some
from xkfac.experiments.runs.training import accuracy
from xkfac.routing.router import By, Router
from xkfac.task_layers import enter_task, give_task_layers, give_task_norms, using_task


class Refused(RunError):
    """Data that a phase of tuning must not read."""


class _Tasks:
    """The tasks of a job and the network that learns them, fixed by a seed: what all kinds of tasks share.

    known: how many tasks the initial network knows. exclude: patterns of the parameters that no memory protects.
    only: the one task whose examples may be used, and not its test part; None where all may be. device: where data and
    network are.
    """

    tasks: Sequence[str] = ()
    known: int = 0
    exclude: Sequence[str] = ()
    only: int | None = None
    device: torch.device

    def restricted(self, task: int) -> Self:
        """Return the same tasks, of which the examples of one alone can be reached, and nothing of its test part."""
        alone = copy.copy(self)
        alone.only = task
        return alone

    def meet(self, model: nn.Module, task: int) -> None:
        """Keep what a router by features of the network itself has to know of a task, once it is learnt."""

    def _check(self, tasks: Iterable[int], part: str = "") -> None:
        """Refuse all but the examples of the one task that may be used; whoever reads examples asks first."""
        if self.only is not None and (list(tasks) != [self.only] or part == "test"):
            names = ", ".join(self.tasks[task] for task in tasks)
            raise Refused(
                f"what is chosen on task '{self.tasks[self.only]}' must not depend on '{names}'"
                + (" by its test part" if part == "test" else "")
                + "; this is a fault in xkfac, please report it"
            )


@dataclass
class PermutedTasks(_Tasks):
    """Permutations of the pixels of one data set, for the perceptron of a line.

    Where tasks have layers of their own, no image of a test comes with its task: the task of each is inferred, among
    those that were met so far, by what is known of their training images.
    """

    line: Line
    seed: int
    parts: Parts

    def __post_init__(self) -> None:
        features = self.parts.train.x.shape[1]
        self.tasks = [f"permutation {task}" for task in range(self.line.tasks)]
        self._classes = int(self.parts.train.y.max()) + 1
        self._permutations = [permutation(features, self.seed, task) for task in range(self.line.tasks)]
        self._own_bn = self.line.resolved_method().own_bn
        self._apart = self._own_bn or bool(self.line.own)
        self._router: Router | None = None
        self._met = 0
        self.device = self.parts.train.x.device

    def network(self) -> nn.Module:
        """Return the perceptron with its initial weights."""
        network = perceptron(self.parts.train.x.shape[1], self._classes, self.line, self.seed)
        give_task_layers(network, self.tasks, self.line.own)
        if self._own_bn:
            give_task_norms(network, self.tasks)
        enter_task(network, self.tasks[0])
        return network.to(self.device)

    def enter(self, model: nn.Module, task: int) -> None:
        """Use the layers of a task, where it has its own."""
        if self._apart:
            enter_task(model, self.tasks[task])
            self._met = max(self._met, task + 1)

    def _measure(self, model: nn.Module, task: int) -> dict[str, Any]:
        """Return what a router that knows the tasks met so far, by features of the initial network, makes of a task."""
        self._router = self._router or Router(self.network())
        meet(self._router, self.tasks[: self._met], lambda place: self.fixed(place, "train").chunks())
        return measure(self._router, model, task, self._batches(self.parts.test, task, 500))

    def _batches(self, part: Part, task: int, size: int = 10_000) -> Iterator[Batch]:
        """Yield the examples of a part under the permutation of a task."""
        columns = self._permutations[task].to(self.device)
        for x, y in zip(torch.split(part.x, size), torch.split(part.y, size), strict=True):
            yield x.index_select(1, columns), y

    def inference(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return how well tasks are inferred, where they have layers of their own."""
        there = self._apart and len(self.parts.test) > 0
        return [self._measure(model, task) for task in range(len(self.tasks))] if there else []

    def train(self, tasks: range) -> PermutedExamples:
        """Return the training examples under the permutations of some tasks."""
        self._check(tasks)
        return PermutedExamples(self.parts.train, [self._permutations[task] for task in tasks])

    def fixed(self, task: int, part: Literal["train", "validation"]) -> PermutedExamples:
        """Return a part under the permutation of a task."""
        self._check((task,))
        return PermutedExamples(getattr(self.parts, part), [self._permutations[task]])

    def accuracy(self, model: nn.Module, task: int, part: Literal["validation", "test"]) -> float:
        """Return the percentage of a part under the permutation of a task that the network gets right."""
        self._check((task,), part)
        chosen: Part = getattr(self.parts, part)
        if self._met and part == "test" and len(chosen):
            return float(self._measure(model, task)["inferred"])
        # Where tasks have their own layers, this is of the task that is learnt, for choices on it.
        with using_task(model, self.tasks[task]) if self._met else contextlib.nullcontext():
            return accuracy(model, self._batches(chosen, task))


@dataclass
class ImageTasks(_Tasks):
    """Tasks of images for a network with one head per task; it knows the first of them, the source."""

    line: Line
    seed: int
    data: ImageData

    def __post_init__(self) -> None:
        self.tasks, self.known, self.exclude = self.data.recipe.order(self.seed), 1, ("heads.*",)
        self.device = self.data.place
        self._own_bn = self.line.resolved_method().own_bn
        self._infer_tasks = self.data.images.infer_tasks
        self._last: Router | None = None

    def network(self) -> ManyHeaded:
        """Return a copy of the source network."""
        network = copy.deepcopy(self.data.source(self.seed)).to(self.device)
        network.give_layers(self.line.own, norms=self._own_bn)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network

    def enter(self, model: nn.Module, task: int) -> None:
        """Use the head of a task."""
        assert isinstance(model, ManyHeaded)
        model.enter(self.tasks[task])

    def _examples(self, task: int, part: str, *, augmented: bool = False) -> ImageExamples:
        self._check((task,), part)
        name = self.tasks[task]
        options = self.data.recipe.tasks[name]
        augmentation = Augmentation(self.data.images.pixels, options.scale, flip=options.flip)
        return ImageExamples(getattr(self.data.parts[name], part), augmentation, augmented)

    def train(self, tasks: range) -> ImageExamples:
        """Return the training images of one task, augmented."""
        (task,) = tasks
        return self._examples(task, "train", augmented=True)

    def fixed(self, task: int, part: Literal["train", "validation"]) -> ImageExamples:
        """Return the images of a part of a task as evaluation sees them."""
        return self._examples(task, part)

    def accuracy(self, model: nn.Module, task: int, part: Literal["validation", "test"]) -> float:
        """Return the percentage of the images of a part of a task that the network gets right."""
        assert isinstance(model, ManyHeaded)
        with model.using(self.tasks[task]):
            return accuracy(model, self._examples(task, part).chunks())

    def _train(self, task: int) -> Iterable[Batch]:
        return self.fixed(task, "train").chunks()

    def meet(self, model: nn.Module, task: int) -> None:
        """Keep the statistics of a task under the network as it is now. They are in no checkpoint."""
        if self._infer_tasks:
            self._last = self._last or Router(model, "last", using=ManyHeaded.using)
            self._last.add_task(self.tasks[task], some(self._train(task)))

    def inference(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return how well tasks are inferred from features of the source network, where they have their own layers."""
        tests = [self._examples(task, "test") for task in range(len(self.tasks))]
        if not (self._own_bn or self.line.own or self._infer_tasks) or not all(map(len, tests)):
            return []
        kinds: tuple[By, ...] = ("source", "early") if self._infer_tasks else ("source",)
        routers = {by: Router(self.network(), by, using=ManyHeaded.using) for by in kinds}
        for router in routers.values():
            meet(router, self.tasks, self._train)
        if self._last and self._last.tasks == list(self.tasks):  # not so in a job that was interrupted
            routers["last"] = self._last
        return [measure_heads(routers, model, task, test.chunks()) for task, test in enumerate(tests)]


TaskSequence = PermutedTasks | ImageTasks


@dataclass
class PermutedData:
    """One data set, of which every task is a permutation."""

    parts: Parts
    classes: Mapping[str, int] = field(default_factory=dict)

    def sequence(self, line: Line, seed: int) -> PermutedTasks:
        """Return the permutations and the perceptron of a job."""
        if line.batch > len(self.parts.train):
            raise DataError(f"batch is {line.batch}, but there are {len(self.parts.train)} training examples; lower it")
        return PermutedTasks(line, seed, self.parts)


@dataclass
class ImageData:
    """The images of each task, and the network of the source. classes: how many each task has."""

    recipe: Recipe
    images: Images
    folder: Path | None
    place: torch.device
    parts: dict[str, Parts]
    classes: Mapping[str, int]
    _networks: dict[int, ManyHeaded] = field(default_factory=dict, init=False)

    def source(self, seed: int) -> ManyHeaded:
        """Return the source network of a seed, which is made and read once; jobs work on copies."""
        if seed not in self._networks:
            weights = self.images.weights
            network = make_backbone(self.images.model, self.classes, stem=self.images.stem, seed=seed)
            file = weights if is_download(weights) else in_data_folder(weights, self.folder, "weights")
            load_source(network, file, next(iter(self.recipe.tasks)))
            self._networks[seed] = network
        return self._networks[seed]

    def sequence(self, line: Line, seed: int) -> ImageTasks:
        """Return the tasks of a job in the order of its repeat."""
        for name, parts in self.parts.items():
            if 0 < len(parts.train) < line.batch:
                raise DataError(
                    f"batch is {line.batch}, and task '{name}' has {len(parts.train)} training images; lower it"
                )
            _check_held_out(line, name, len(parts.validation), calibrated=name == next(iter(self.recipe.tasks)))
        return ImageTasks(line, seed, self)


def _check_held_out(line: Line, task: str, count: int, *, calibrated: bool) -> None:
    """Check that a part of `count` images is enough for what a line does with it; a part not loaded has none."""
    if line.consolidate == "validation" and count == 1:
        raise DataError(f"the curvature of task '{task}' cannot be estimated on one validation image; set more aside")
    batches = count // min(line.batch, count) if count else 0
    if calibrated and line.calibrated and min(batches, line.batches or batches) == 1:
        raise DataError(
            f"a calibration needs two batches of validation images and task '{task}' gives one, of {count}; choose a "
            "smaller batch, or set more images aside or more batches"
        )


RunData = PermutedData | ImageData
