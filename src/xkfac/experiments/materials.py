"""The data of a recipe, loaded onto a device, and the source network of one with images: what its jobs are made of."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from xkfac.experiments.augmentation import Augmentation
from xkfac.experiments.backbones import DOWNLOAD, ManyHeaded, load_source, make_backbone
from xkfac.experiments.courses import Course, Permuted, PictureCourse
from xkfac.experiments.data import DataError, Parts, load
from xkfac.experiments.images import PictureParts, load_pictures
from xkfac.experiments.recipe import Line, Recipe
from xkfac.experiments.trees import find_tree

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
        return PermutedMaterials(loaded.to(place))
    images, found = recipe.images, {}
    where = Path(folder) if folder else None
    for name, task in recipe.tasks.items():
        if tasks is not None and name not in tasks:
            continue
        pictures = load_pictures(
            find_tree(task.tree, where),
            pixels=images.pixels,
            resize=task.resize,
            validation=images.validation,
            limit=task.limit or None,
            parts=tuple(parts),
            workers=workers,
            progress=progress,
        )
        if images.measure == "validation":
            pictures = replace(pictures, test=pictures.validation)
        found[name] = pictures.to(place)
    made = PictureMaterials(recipe, where, place, found, {**(classes or {}), **_counts(found)})
    made.check()
    return made


def _counts(found: Mapping[str, PictureParts]) -> dict[str, int]:
    return {name: len(parts.classes) for name, parts in found.items()}


@dataclass
class PermutedMaterials:
    """One data set, of which every task is a permutation."""

    parts: Parts

    def __post_init__(self) -> None:
        self.classes: Mapping[str, int] = {}

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

    def check(self) -> None:
        """Try what every job will need: the weights of the source network must fit the model and the data."""
        self._network(self.recipe.seed)

    def _network(self, seed: int) -> ManyHeaded:
        images = self.recipe.images
        assert images is not None
        source = next(iter(self.recipe.tasks))
        network = make_backbone(images.model, self.classes, stem=images.stem, seed=seed)
        load_source(network, self._weights(images.weights), source)
        return network

    def _weights(self, name: str) -> str | Path:
        """Return a weights file: as it is named, or in the data folder."""
        if name == DOWNLOAD or Path(name).is_absolute():
            return name
        folder = self.folder or (Path(os.environ["XKFAC_DATA"]) if os.environ.get("XKFAC_DATA") else None)
        return name if folder is None else folder / name

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
        augmentations = {
            name: Augmentation(images.pixels, (task.scale[0], task.scale[1]), flip=task.flip)
            for name, task in self.recipe.tasks.items()
        }
        return PictureCourse(self.recipe.order(seed), self._network(seed), self.parts, augmentations, self.place)
