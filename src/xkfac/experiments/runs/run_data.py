"""The data of a recipe, loaded onto a device, and the source network of one with images: what its jobs are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from xkfac.errors import XkfacError
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import DataError, Parts, load
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.data.trees import Tree, find_tree, in_data_folder
from xkfac.experiments.files import at_home
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.networks.weights import is_download, load_source
from xkfac.experiments.recipes.recipe import Images, Line, Recipe
from xkfac.experiments.runs.tasks import ImageTasks, PermutedTasks

PartName = Literal["train", "validation", "test"]
PARTS: tuple[PartName, ...] = ("train", "validation", "test")


def load_run_data(
    recipe: Recipe,
    folder: str | Path | None,
    place: torch.device,
    *,
    download: bool = False,
    classes: Mapping[str, int] | None = None,
    tasks: Sequence[str] | None = None,
    parts: Sequence[PartName] = PARTS,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> PermutedData | ImageData:
    """Return the data of a recipe from the data folder, on a device.

    download: fetch what is missing, where that is possible. classes, tasks, parts: load only these tasks and parts of
    images, and take the classes of the others from `classes`; nothing of the others is read. workers: processes that
    decode images which no cache has yet; `progress` is called with how many are done and how many there are.
    """
    if recipe.images is None:
        data = recipe.data
        loaded = load(data.set, folder, validation=data.validation, train=data.train or None, download=download)
        if data.measure == "validation":
            loaded = replace(loaded, test=loaded.validation)
        permuted = PermutedData(loaded.to(place))
        _check_layers(permuted, recipe)
        return permuted
    images, where = recipe.images, at_home(folder) if folder else None
    asked = [name for name in recipe.tasks if tasks is None or name in tasks]
    trees = {name: Tree.read(find_tree(recipe.tasks[name].tree, where)) for name in asked}
    counts = {**(classes or {}), **{name: len(tree.classes) for name, tree in trees.items()}}
    found = ImageData(recipe, images, where, place, {}, counts)
    found.source(recipe.seed)  # what does not fit is said before images are decoded, which can take hours
    _check_layers(found, recipe)
    for name, tree in trees.items():
        task = recipe.tasks[name]
        pictures = load_pictures(
            tree,
            pixels=images.pixels,
            resize=task.resize,
            validation=images.validation,
            limit=task.limit or None,
            parts=_needed(recipe, name, parts),
            workers=workers,
            progress=progress,
        )
        if images.measure == "validation":
            pictures = replace(pictures, test=pictures.validation)
        found.parts[name] = pictures.to(place)
    return found


def _check_layers(data: PermutedData | ImageData, recipe: Recipe) -> None:
    """Try to give tasks the layers that lines name for them."""
    for name, line in recipe.lines.items():
        try:
            if line.own:
                data.sequence(line, recipe.seed).network()
        except XkfacError as error:
            raise DataError(f"lines.{name}: {error}") from None


def _needed(recipe: Recipe, task: str, parts: Sequence[PartName]) -> list[PartName]:
    """Return those parts of a task that some job looks at; the source is not trained on, and can be large."""
    assert recipe.images is not None
    measured = recipe.images.measure == "validation"
    held_out = any(line.calibrated or line.consolidate == "validation" for line in recipe.lines.values())
    useless = {"test"} if measured else set()
    if task == next(iter(recipe.tasks)) and not measured and not held_out:
        useless.add("validation")
    return [part for part in parts if part not in useless]


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

    def __post_init__(self) -> None:
        self._networks: dict[int, ManyHeaded] = {}

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
        augmentations = {
            name: Augmentation(self.images.pixels, (task.scale[0], task.scale[1]), flip=task.flip)
            for name, task in self.recipe.tasks.items()
        }
        order, source = self.recipe.order(seed), self.source(seed)
        return ImageTasks(line, order, source, self.parts, augmentations, self.place, self.images.infer_tasks)


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
