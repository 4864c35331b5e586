"""The data of a recipe, loaded onto a device, and the source network of one with images: what its jobs are made of."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from xkfac.errors import XkfacError
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import DataError, Parts, load
from xkfac.experiments.data.images import PictureParts, load_pictures
from xkfac.experiments.data.trees import Tree, find_tree
from xkfac.experiments.files import at_home
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.networks.weights import is_download, load_source
from xkfac.experiments.recipes.recipe import Line, Recipe
from xkfac.experiments.runs.tasks import Course, Permuted, PictureCourse

PartName = Literal["train", "validation", "test"]
PARTS: tuple[PartName, ...] = ("train", "validation", "test")


class Materials(Protocol):
    """What all jobs of a recipe share."""

    @property
    def classes(self) -> Mapping[str, int]:
        """How many classes each task of images has."""

    def course(self, line: Line, seed: int) -> Course:
        """Return what a job learns."""


def load_materials(
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
) -> Materials:
    """Return the materials of a recipe from the data folder, on a device.

    download: fetch what is missing, where that is possible. classes, tasks, parts: load only these tasks and parts of
    images, and take the classes of the others from `classes`; nothing of the others is read. workers: processes that
    decode images which no cache has yet; `progress` is told how many of how many are done.

    Raises DataError, BackboneError or WeightsError for whatever is missing, damaged, or does not fit.
    """
    if recipe.images is None:
        data = recipe.data
        loaded = load(data.set, folder, validation=data.validation, train=data.train or None, download=download)
        if data.measure == "validation":
            loaded = replace(loaded, test=loaded.validation)
        permuted = PermutedMaterials(loaded.to(place))
        permuted.check(recipe)
        return permuted
    images, where = recipe.images, at_home(folder) if folder else None
    asked = [name for name in recipe.tasks if tasks is None or name in tasks]
    trees = {name: Tree.read(find_tree(recipe.tasks[name].tree, where)) for name in asked}
    counts = {**(classes or {}), **{name: len(tree.classes) for name, tree in trees.items()}}
    made = PictureMaterials(recipe, where, place, {}, counts)
    made.check()  # before images are decoded, which can take hours
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
        made.parts[name] = pictures.to(place)
    return made


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
class PermutedMaterials:
    """One data set, of which every task is a permutation."""

    parts: Parts

    def __post_init__(self) -> None:
        self.classes: Mapping[str, int] = {}

    def check(self, recipe: Recipe) -> None:
        """Try what every job will need: the layers that tasks own."""
        for name, line in recipe.lines.items():
            try:
                if line.own:
                    Permuted(line, recipe.seed, self.parts).network()
            except XkfacError as error:
                raise DataError(f"lines.{name}: {error}") from None

    def course(self, line: Line, seed: int) -> Permuted:
        """Return the permutations and the perceptron of a job."""
        if line.batch > len(self.parts.train):
            raise DataError(
                f"batch is {line.batch}, but there are {len(self.parts.train)} training examples; choose a smaller one"
            )
        return Permuted(line, seed, self.parts)


@dataclass
class PictureMaterials:
    """The pictures of each task, and the network of the source."""

    recipe: Recipe
    folder: Path | None
    place: torch.device
    parts: dict[str, PictureParts]
    classes: Mapping[str, int]

    def __post_init__(self) -> None:
        self._networks: dict[int, ManyHeaded] = {}

    def check(self) -> None:
        """Try what every job will need: weights that fit the model and the data, and the layers that tasks own."""
        network = self._network(self.recipe.seed)
        for name, line in self.recipe.lines.items():
            try:
                if line.own:
                    copy.deepcopy(network).give_layers(line.own)
            except XkfacError as error:
                raise DataError(f"lines.{name}: {error}") from None

    def _network(self, seed: int) -> ManyHeaded:
        """Return the source network of a seed, which is made and read once; jobs work on copies."""
        if seed in self._networks:
            return self._networks[seed]
        images = self.recipe.images
        assert images is not None
        source = next(iter(self.recipe.tasks))
        network = make_backbone(images.model, self.classes, stem=images.stem, seed=seed)
        load_source(network, self._weights(images.weights), source)
        self._networks[seed] = network
        return network

    def _weights(self, name: str) -> str | Path:
        """Return a weights file: as it is named, or in the data folder."""
        path = at_home(name)
        if is_download(name) or path.is_absolute():
            return name if is_download(name) else path
        folder = self.folder or os.environ.get("XKFAC_DATA")
        if not folder:
            raise DataError(
                f"the weights '{name}' need a folder: name the one they are in with --data FOLDER or in the variable "
                "XKFAC_DATA, or give an absolute path"
            )
        return at_home(folder) / path

    def course(self, line: Line, seed: int) -> PictureCourse:
        """Return the tasks of a job in the order of its repeat."""
        images = self.recipe.images
        assert images is not None
        for name, parts in self.parts.items():
            if 0 < len(parts.train) < line.batch:
                raise DataError(
                    f"batch is {line.batch}, but task '{name}' has {len(parts.train)} training images; choose a "
                    "smaller one"
                )
            _check_held_out(line, name, len(parts.validation), calibrated=name == next(iter(self.recipe.tasks)))
        augmentations = {
            name: Augmentation(images.pixels, (task.scale[0], task.scale[1]), flip=task.flip)
            for name, task in self.recipe.tasks.items()
        }
        own_bn = line.resolved_method().own_bn
        return PictureCourse(
            self.recipe.order(seed), self._network(seed), self.parts, augmentations, self.place, own_bn, line.own
        )


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
