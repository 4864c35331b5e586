"""Trees of images in folders named for their classes: found, listed and checked, split by keys alone.

A tree holds `train/<class>/<image>` and `test/<class>/<image>`, as a folder or as a zip file, possibly below one
folder more. In place of `test` it may have `val` or `validation`; the first of the three that is there is taken.
Images may lie deeper below their class. What is beside the classes, hidden files, `__MACOSX`, and notes such as .txt
or .csv are left out; any other file below a class must be an image of a format that is read (`tree_files`).
"""

import contextlib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from xkfac.errors import nearest
from xkfac.experiments.data.digits import DataError, stream
from xkfac.experiments.data.tree_files import FORMATS, PARTS, TEST_NAMES, Files, is_image, list_files
from xkfac.experiments.files import at_home, check_path, data_folder

NOTES = frozenset((".txt", ".csv", ".tsv", ".json", ".xml", ".md", ".html", ".db", ".ini"))


class ImageFile(NamedTuple):
    """An image of a tree: its name in there, its class by number, and what changes when its file does."""

    name: str
    label: int
    stamp: str


@dataclass(frozen=True)
class Tree:
    """What a tree holds; nothing is decoded. Classes are in the order of their names, images in that of theirs."""

    path: Path
    classes: tuple[str, ...]
    train: tuple[ImageFile, ...]
    test: tuple[ImageFile, ...]

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """List a folder or a zip file."""
        path = check_path(path)
        files = list_files(path)
        top = {name.split("/", 1)[0] for name, _ in files if "/" in name}
        base = f"{top.pop()}/" if len(top) == 1 and top.isdisjoint(PARTS) else ""
        below = {name[len(base) :].split("/", 1)[0] for name, _ in files if "/" in name[len(base) :]}
        test = next((name for name in TEST_NAMES if name in below), None)
        if "train" not in below or test is None:
            raise DataError(
                f"'{path}' has no part '{'test' if 'train' in below else 'train'}', only "
                f"{', '.join(sorted(below)) or 'files'}; put images into train/<class>/ and test/<class>/"
            )
        grouped = {part: _by_class(path, f"{base}{part}/", files) for part in ("train", test)}
        classes = _checked_classes(path, grouped["train"], grouped[test], test)

        def entries(part: str) -> tuple[ImageFile, ...]:
            pairs = ((label, file) for label, name in enumerate(classes) for file in sorted(grouped[part][name]))
            return tuple(ImageFile(name, label, stamp) for label, (name, stamp) in pairs)

        return cls(path, classes, entries("train"), entries(test))

    def split(self, validation: float, limit: int | None = None) -> tuple[tuple[ImageFile, ...], tuple[ImageFile, ...]]:
        """Return the images to train on and those set aside for validation, both of the train part.

        validation: the share of each class that is set aside, at least one image of it unless the share is 0.
        limit: at most so many of the rest, of each class in proportion; one of each class before two of any.
        Fixed by the names of a class and its images; fewer by `limit` are always among more.
        """
        kept: list[tuple[float, int, int]] = []
        aside: list[int] = []
        start = 0
        ties = torch.randperm(len(self.classes), generator=stream("split", "pictures", "limit"), device="cpu").tolist()
        sizes = torch.bincount(labels_of(self.train), minlength=len(self.classes)).tolist()
        for label, (name, size) in enumerate(zip(self.classes, sizes, strict=True)):
            if validation and size < 2:
                raise DataError(
                    f"class '{name}' of '{self.path}' has one training image, and none could be set aside for "
                    "validation; add images or set validation to 0"
                )
            count = min(max(round(validation * size), 1), size - 1) if validation else 0
            generator = stream("split", "pictures", "class", name)
            order = [start + place for place in torch.randperm(size, generator=generator, device="cpu").tolist()]
            rest = size - count
            aside += order[rest:]
            kept += [(rank / rest, ties[label], index) for rank, index in enumerate(order[:rest])]
            start += size
        if limit is not None:
            kept = sorted(kept)[:limit]
        train = sorted(index for _, _, index in kept)
        return tuple(self.train[index] for index in train), tuple(self.train[index] for index in sorted(aside))


def in_data_folder(name: str, folder: Path | None, what: str) -> Path:
    """Return a path that is absolute, or relative to the data folder; None means the variable XKFAC_DATA."""
    path, place = at_home(name), data_folder(folder)
    if not path.is_absolute() and place is None:
        raise DataError(
            f"the {what} '{name}' need a folder: name the one they are in with --data FOLDER or in the variable "
            "XKFAC_DATA, or give an absolute path"
        )
    return path if path.is_absolute() or place is None else (place / path).absolute()


def find_tree(name: str, folder: Path | None) -> Path:
    """Return the path of the tree `name`, or of `name.zip`: absolute, or relative to the data folder.

    folder: None means the variable XKFAC_DATA. Raises DataError when there is none.
    """
    path = in_data_folder(name, folder, "images")
    if not path.name:  # the root of the file system is no tree
        raise DataError(f"the images '{name}' are not named; give the name of a folder or a zip file")
    for candidate in map(check_path, (path, path.with_name(f"{path.name}.zip"))):
        # A named pipe or a device must not be opened: reading it may never end.
        if candidate.is_dir() or (candidate.is_file() and zipfile.is_zipfile(candidate)):
            return candidate
        if candidate.exists():
            raise DataError(f"'{candidate}' is neither a folder nor an intact zip file; fetch or make it again")
    known = []
    with contextlib.suppress(OSError):
        known = sorted(item.name for item in path.parent.iterdir() if item.is_dir() or item.suffix == ".zip")
    there = f"there are {', '.join(known[:10])}{', ...' * (len(known) > 10)}" if known else "nothing like it is there"
    raise DataError(
        f"there are no images '{path.name}', folder or zip file, in '{path.parent}'{nearest(path.name, known)}: "
        f"{there}; correct the name, or the folder with --data FOLDER"
    )


def labels_of(entries: Iterable[ImageFile]) -> Tensor:
    """Return the classes of images by number, [n] int64."""
    return torch.tensor([entry.label for entry in entries], dtype=torch.int64, device="cpu")


def _by_class(path: Path, prefix: str, files: Files) -> dict[str, Files]:
    """Return the images below `prefix` by class; a class without any has an empty list."""
    classes: dict[str, Files] = {}
    for name, stamp in files:
        label, slash, inner = name.removeprefix(prefix).partition("/")
        if not name.startswith(prefix) or not slash:
            continue
        pictures = classes.setdefault(label, [])
        if not inner or inner.endswith("/") or Path(inner).suffix.lower() in NOTES:
            continue
        if not is_image(inner):
            raise DataError(
                f"'{name}' of '{path}' is no image by its ending; remove it, or save it as one of {', '.join(FORMATS)}"
            )
        pictures.append((name, stamp))
    return classes


def _checked_classes(path: Path, train: dict[str, Files], test: dict[str, Files], name: str) -> tuple[str, ...]:
    for part, classes in (("train", train), (name, test)):
        if not classes:
            raise DataError(f"the part '{part}' of '{path}' has no classes; put images into {part}/<class>/")
        empty = sorted(label for label, pictures in classes.items() if not pictures)
        if empty:
            raise DataError(f"class '{empty[0]}' of '{path}' has no images in '{part}'; add some or remove its folder")
    for label in sorted(set(train) ^ set(test)):
        there, missing = ("train", name) if label in train else (name, "train")
        close = nearest(label, set(train if missing == "train" else test))
        raise DataError(
            f"class '{label}' of '{path}' is in '{there}' but not in '{missing}'{close}; add it there or remove it here"
        )
    return tuple(sorted(train))
