"""What a job learns: tasks in their order, the network that meets them, and the examples of each."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import Parts, permutation, stream
from xkfac.experiments.data.images import PictureParts, Pictures
from xkfac.experiments.networks.backbones import ManyHeaded
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.recipes.recipe import Line
from xkfac.experiments.runs.task_inference import measure, meet
from xkfac.experiments.runs.training import Batch, Examples, Pool, accuracy, pool
from xkfac.routing.router import Router
from xkfac.task_layers import enter_task, give_task_layers, give_task_norms, using_task

Which = Literal["validation", "test"]


class Course(Protocol):
    """The tasks of a job and the network that learns them, fixed by a seed."""

    @property
    def tasks(self) -> Sequence[str]:
        """The names of the tasks, in the order in which they are learnt."""

    @property
    def given(self) -> int:
        """How many tasks the initial network knows."""

    @property
    def exclude(self) -> Sequence[str]:
        """Patterns of the parameters that no memory protects."""

    @property
    def device(self) -> torch.device:
        """Where data and network are."""

    def network(self) -> nn.Module:
        """Return the initial network."""

    def enter(self, model: nn.Module, task: int) -> None:
        """Have the network answer, and learn, a task."""

    def train(self, tasks: range) -> Examples:
        """Return the training examples of some tasks together."""

    def fixed(self, task: int, part: Literal["train", "validation"]) -> Examples:
        """Return the examples of a part of a task with nothing random about them."""

    def accuracy(self, model: nn.Module, task: int, part: Which) -> float:
        """Return the percentage of a part of a task that the network gets right."""

    def inference(self, model: nn.Module) -> list[dict[str, Any]] | None:
        """Return what `task_inference.measure` finds on each task, where tasks have layers of their own."""


@dataclass
class Permuted:
    """Permutations of the pixels of one data set, for the perceptron of a line.

    Where tasks have layers of their own, no image of a test comes with its task: the task is inferred for each image by
    itself, among the tasks that were met so far, from statistics of their training images.
    """

    line: Line
    seed: int
    parts: Parts

    given = 0
    exclude: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        features = self.parts.train.x.shape[1]
        self.tasks = [f"permutation {task}" for task in range(self.line.tasks)]
        self._classes = int(self.parts.train.y.max()) + 1
        self._permutations = [permutation(features, self.seed, task) for task in range(self.line.tasks)]
        self._own_bn = self.line.resolved_method().own_bn
        self._apart = self._own_bn or bool(self.line.own)
        self._router: Router | None = None
        self._met = 0

    @property
    def device(self) -> torch.device:
        """Where data and network are."""
        return self.parts.train.x.device

    def network(self) -> nn.Module:
        """Return the perceptron with its initial weights."""
        features = self.parts.train.x.shape[1]
        network = perceptron(features, self._classes, self.line, self.seed)
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

    def _known(self) -> Router:
        """Return the router, which knows the tasks that were met; its features are those of the initial network."""
        self._router = self._router or Router(self.network())
        meet(self._router, self.tasks[: self._met], lambda task: self.fixed(task, "train").chunks())
        return self._router

    def _measure(self, model: nn.Module, task: int) -> dict[str, Any]:
        test, columns = self.parts.test, self._permutations[task].to(self.device)
        chunks = zip(test.x.index_select(1, columns).split(500), test.y.split(500), strict=True)
        return measure(self._known(), model, task, chunks, one_head=True)

    def inference(self, model: nn.Module) -> list[dict[str, Any]] | None:
        """Return how well tasks are inferred, where they have layers of their own."""
        whole = self._apart and len(self.parts.test) > 0
        return [self._measure(model, task) for task in range(len(self.tasks))] if whole else None

    def train(self, tasks: range) -> Pool:
        """Return the training examples under the permutations of some tasks."""
        return pool(self.parts.train, [self._permutations[task] for task in tasks])

    def fixed(self, task: int, part: Literal["train", "validation"]) -> Pool:
        """Return the examples of a part under the permutation of a task."""
        return pool(self.parts.train if part == "train" else self.parts.validation, [self._permutations[task]])

    def accuracy(self, model: nn.Module, task: int, part: Which) -> float:
        """Return the percentage that the network gets right; 0 where there are no examples."""
        chosen = self.parts.test if part == "test" else self.parts.validation
        if len(chosen) == 0:
            return 0.0
        columns = self._permutations[task]
        if not self._met:
            return accuracy(model, chosen, columns)
        if part == "validation":  # of the task that is learnt, for choices on it
            with using_task(model, self.tasks[task]):
                return accuracy(model, chosen, columns)
        return float(self._measure(model, task)["inferred"])


@dataclass(eq=False)
class PicturePool:
    """Pictures that are augmented by draws which `redraw` makes for each of them, or not at all."""

    pictures: Pictures
    augmentation: Augmentation
    augmented: bool
    chunk: int = 256

    def __post_init__(self) -> None:
        self._draws = torch.zeros(len(self.pictures) if self.augmented else 0, 5, device=self.device)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.pictures.x.device

    def __len__(self) -> int:
        return len(self.pictures)

    def redraw(self, *key: int) -> None:
        """Draw the crop and the side of each picture anew, in place, so that a captured graph finds them."""
        if self.augmented:
            self._draws.copy_(self.augmentation.draw((len(self),), stream("augmentation", *key)))

    def take(self, index: Tensor) -> Batch:
        """Return the pictures `index` [N] as inputs [N, 3, pixels, pixels] and labels [N]."""
        x, y = self.pictures.x.index_select(0, index), self.pictures.y.index_select(0, index)
        if self.augmented:
            return self.augmentation.augmented(x, self._draws.index_select(0, index)), y
        return self.augmentation.plain(x), y

    def chunks(self) -> Iterable[Batch]:
        """Yield all of them in their order."""
        for index in torch.split(torch.arange(len(self), device=self.device), self.chunk):
            yield self.take(index)


@dataclass
class PictureCourse:
    """Tasks of pictures for a network with one head a task; it knows the first of them.

    source: the network as it knows the first task, a fresh one each time. parts: by task, of those that are needed.
    own_bn: each task has BN layers of its own; own: and these layers of the trunk, by patterns.
    """

    tasks: Sequence[str]
    source: ManyHeaded
    parts: dict[str, PictureParts]
    augmentations: dict[str, Augmentation]
    place: torch.device
    own_bn: bool = False
    own: tuple[str, ...] = ()

    given = 1
    exclude = ("heads.*",)

    @property
    def device(self) -> torch.device:
        """Where data and network are."""
        return self.place

    def network(self) -> ManyHeaded:
        """Return a copy of the source network."""
        network = copy.deepcopy(self.source).to(self.place)
        network.give_layers(self.own, norms=self.own_bn)
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return network

    def enter(self, model: nn.Module, task: int) -> None:
        """Use the head of a task."""
        assert isinstance(model, ManyHeaded)
        model.enter(self.tasks[task])

    def _parts(self, task: int) -> tuple[PictureParts, Augmentation]:
        name = self.tasks[task]
        return self.parts[name], self.augmentations[name]

    def train(self, tasks: range) -> PicturePool:
        """Return the training pictures of a task, augmented."""
        (task,) = tasks
        parts, augmentation = self._parts(task)
        return PicturePool(parts.train, augmentation, True)

    def fixed(self, task: int, part: Literal["train", "validation"]) -> PicturePool:
        """Return the pictures of a part as evaluation sees them."""
        parts, augmentation = self._parts(task)
        return PicturePool(parts.train if part == "train" else parts.validation, augmentation, False)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, task: int, part: Which) -> float:
        """Return the percentage of a part that the network with the task's head gets right; 0 without pictures."""
        parts, augmentation = self._parts(task)
        pictures = parts.test if part == "test" else parts.validation
        if len(pictures) == 0:
            return 0.0
        assert isinstance(model, ManyHeaded)
        model.eval()
        right = torch.zeros((), dtype=torch.long, device=self.place)
        with model.using(self.tasks[task]):
            for x, y in PicturePool(pictures, augmentation, False).chunks():
                right += (model(x).argmax(1) == y).sum()
        return 100 * right.item() / len(pictures)

    def inference(self, model: nn.Module) -> list[dict[str, Any]] | None:
        """Return how well tasks are inferred from features of the source network, where they have their own layers."""
        if not (self.own_bn or self.own) or any(len(self._parts(task)[0].test) == 0 for task in range(len(self.tasks))):
            return None
        router = Router(self.network(), "source", using=ManyHeaded.using)
        meet(router, self.tasks, lambda task: self.fixed(task, "train").chunks())

        def test(task: int) -> Iterable[Batch]:
            parts, augmentation = self._parts(task)
            return PicturePool(parts.test, augmentation, False).chunks()

        return [measure(router, model, task, test(task), one_head=False) for task in range(len(self.tasks))]
