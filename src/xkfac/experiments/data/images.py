"""Images of a tree, decoded once into a cache from which many processes map them."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from xkfac.experiments.data.digits import DataError, Part, Parts
from xkfac.experiments.data.tree_files import FORMATS, MOST_PIXELS, reader
from xkfac.experiments.data.trees import ImageFile, Tree, labels_of
from xkfac.experiments.files import at_home, locked
from xkfac.experiments.packages import imported
from xkfac.experiments.recipes.recipe import Resize

PartName = Literal["train", "validation", "test"]
PART_NAMES: tuple[PartName, ...] = get_args(PartName)
VERSION = 1  # of what a cache file holds
FEW = 64  # images that one process has decoded before others are started

Progress = Callable[[int, int], None]


def load_pictures(
    path: str | Path | Tree,
    *,
    pixels: int,
    resize: Resize,
    validation: float,
    limit: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
    parts: Sequence[PartName] = PART_NAMES,
) -> Parts:
    """Return the parts of a tree, memory-mapped from the cache; what is not in there is decoded first.

    path: where it is, or a tree that was listed before.
    pixels: the side of a network's input. resize: "squash" resizes to a square of this side whatever the shape; "crop"
    resizes the shorter side to 256 / 224 of it and takes the centre, of which evaluation leaves out a border. Both
    resize as torchvision does; colours are RGB, and orientation tags are not heeded.
    validation, limit: see `Tree.split`; the validation part does not depend on `limit`.
    workers: processes that decode.
    progress: called with how many images are decoded, and of how many. parts: images of others are not opened.

    The cache is the folder XKFAC_CACHE, by default ~/.cache/xkfac. Processes that ask for the same wait for the first.
    Raises DataError when the tree is not as it must be, an image cannot be read, or the cache cannot be written.
    """
    imported("PIL.Image", "an image")
    stored = pixels if resize == "squash" else round(pixels * 256 / 224)
    tree = path if isinstance(path, Tree) else Tree.read(path)
    train, aside = tree.split(validation, limit)
    everything: dict[PartName, tuple[ImageFile, ...]] = {"train": train, "validation": aside, "test": tree.test}
    asked = {part: entries if part in parts else () for part, entries in everything.items()}
    folder = at_home(os.environ.get("XKFAC_CACHE") or "~/.cache/xkfac") / "pictures"
    files = {part: folder / _cache_name(tree.path, part, asked[part], stored, resize) for part in PART_NAMES}
    size = 3 * stored * stored  # bytes of an image
    missing = {files[part]: of for part, of in asked.items() if of and not _whole(files[part], len(of) * size)}
    total, done = sum(map(len, missing.values())), 0
    for file, entries in missing.items():
        images = _Decoded(tree.path, [entry.name for entry in entries], stored, resize)
        for count in _write(file, images, size, workers if len(entries) > FEW else 1):
            done += count
            if progress:
                progress(done, total)
    part_of = {part: Part(_mapped(files[part], len(of), stored), labels_of(of)) for part, of in asked.items()}
    return Parts(**part_of, classes=tree.classes)


def _write(path: Path, images: _Decoded, size: int, workers: int) -> Iterator[int]:
    """Write a cache file of images of a size in bytes, unless another process has by now; yield how many are done."""
    try:
        with _claimed(path, len(images) * size) as file:
            if file is None:
                yield len(images)
                return
            beside = torch.Generator()  # torch's own generator stays as it is
            for image in DataLoader(images, None, num_workers=0 if workers == 1 else workers, generator=beside):
                if isinstance(image, DataError):
                    raise image
                file.write(image)
                yield 1
    except OSError as error:
        raise DataError(
            f"the cache '{path.parent}' cannot be written ({error}); free space there, or name another folder in "
            "the variable XKFAC_CACHE"
        ) from error
    except RuntimeError as error:
        raise DataError(f"a process that decodes images ended ({error}); is memory short? use one worker") from error


def _cache_name(path: Path, part: str, entries: Sequence[ImageFile], stored: int, resize: str) -> str:
    """Return the name of a cache file: it changes with all that its content depends on.

    A zip file says by checksums what is in it, wherever it lies; files of a folder are known by place, size and time.
    """
    place = str(path.absolute()) if path.is_dir() else ""
    digest = hashlib.blake2b(json.dumps([VERSION, place, stored, resize]).encode(), digest_size=16)
    for entry in entries:
        digest.update(f"{entry.name}\0{entry.stamp}\n".encode(errors="surrogateescape"))
    return f"{path.stem}-{part}-{stored}-{digest.hexdigest()}.bytes"


def _whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _mapped(path: Path, count: int, stored: int) -> Tensor:
    """Return the images [count, 3, stored, stored] of a cache file, mapped; writing on them changes no file."""
    shape = (count, 3, stored, stored)
    if count == 0:
        return torch.empty(shape, dtype=torch.uint8, device="cpu")
    size = math.prod(shape)
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8, device="cpu").view(shape)


@contextlib.contextmanager
def _claimed(path: Path, size: int) -> Iterator[BinaryIO | None]:
    """Yield a file that becomes `path` when all went well, written by this process alone; None when `path` is there."""
    with locked(path.with_name(f".{path.name}.lock"), wait=math.inf):
        if _whole(path, size):
            yield None
            return
        part = path.with_name(f".{path.name}.part")  # one that a killed process left is written over
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


class _Decoded(Dataset[bytes | DataError]):
    """The images of a tree by their place among some names, decoded to bytes [3, stored, stored]."""

    def __init__(self, path: Path, names: Sequence[str], stored: int, resize: Resize) -> None:
        self._path, self._names, self._stored, self._resize = path, names, stored, resize
        self._read: Callable[[str], bytes] | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> bytes | DataError:
        """Return an image; an error is returned, because one that is raised in another process comes with a trace."""
        self._read = self._read or reader(self._path)  # each process opens the tree once
        name = self._names[index]
        try:
            return decoded(self._read(name), self._stored, self._resize)
        except Exception as error:  # readers of damaged files raise whatever they meet
            return DataError(f"'{name}' of '{self._path}' cannot be read as an image ({error}); replace or remove it")


def decoded(content: bytes, stored: int, resize: Resize) -> bytes:
    """Return the bytes [3, stored, stored] of an image file's content: RGB, resized as torchvision does.

    Raises whatever Pillow does, and ValueError for too many pixels, which are counted before any is decoded, and for
    grey values of more than 8 bits, whose range nobody knows.
    """
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # pixels are counted below
        opened = Image.open(io.BytesIO(content), formats=FORMATS)
    with opened as file:
        if file.width * file.height > MOST_PIXELS:
            raise ValueError(f"it has {file.width} x {file.height} pixels: save it with at most {MOST_PIXELS:,}")
        if file.mode.startswith(("I", "F")):
            raise ValueError("its values have more than 8 bits: save it with 8")
        image = file.convert("RGB")
    width, height = image.size
    if resize == "crop":
        short = min(width, height)
        width, height = (int(stored * side / short) for side in (width, height))
        if width * height > MOST_PIXELS:
            raise ValueError(f"its sides are {image.width} and {image.height}, too unlike to take the square between")
    else:
        width = height = stored
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - stored) / 2), round((height - stored) / 2)
    image = image.crop((left, top, left + stored, top + stored))
    return b"".join(channel.tobytes() for channel in image.split())
