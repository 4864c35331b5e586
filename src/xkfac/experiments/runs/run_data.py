"""The data of a recipe, loaded onto a device and checked against its lines: what its jobs are made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from xkfac.errors import XkfacError
from xkfac.experiments.data.digits import DataError, load
from xkfac.experiments.data.images import PART_NAMES, PartName, load_pictures
from xkfac.experiments.data.trees import Tree, find_tree
from xkfac.experiments.files import data_folder
from xkfac.experiments.recipes.recipe import Recipe
from xkfac.experiments.runs.tasks import ImageData, PermutedData, RunData


def load_run_data(
    recipe: Recipe,
    folder: str | Path | None,
    place: torch.device,
    *,
    download: bool = False,
    classes: Mapping[str, int] | None = None,
    tasks: Sequence[str] | None = None,
    parts: Sequence[PartName] = PART_NAMES,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> RunData:
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
    images, where = recipe.images, data_folder(folder)
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


def _check_layers(data: RunData, recipe: Recipe) -> None:
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
