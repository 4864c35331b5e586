"""The data sets of permuted-image experiments: loaded, checked, split, permuted and shuffled, fixed by keys alone."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import torch
from torch import Tensor

from xkfac.errors import XkfacError
from xkfac.experiments.files import data_folder, read_regular, replace_file
from xkfac.experiments.packages import imported
from xkfac.experiments.recipes.recipe import DataSet

DIGITS_TEST = 400
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
TIMEOUT = 30.0
Batch = tuple[Tensor, Tensor]
LARGEST_FILE = 2**26  # bytes, unpacked; those of MNIST have 47 million at most
_UNREADABLE = (OSError, EOFError, ValueError, zlib.error)


class DataError(XkfacError):
    """A data set is missing, damaged, or too small for what is asked of it."""


# The SHA-256 of the unpacked content of each published file.
MNIST = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a data set: x, and labels y [n], int64.

    Of digits x is [n, features], float32 in [0, 1]; of images [n, 3, S, S], uint8.
    """

    x: Tensor
    y: Tensor

    def to(self, device: torch.device | str) -> Part:
        """Return the part on `device`."""
        return Part(self.x.to(device), self.y.to(device))

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Parts:
    """What one task of an experiment has, and the names of classes of images.

    No example is in two parts; a part of images that was not asked for is empty.
    """

    train: Part
    validation: Part
    test: Part
    classes: tuple[str, ...] = ()

    def to(self, device: torch.device | str) -> Parts:
        """Return all parts on `device`."""
        return Parts(self.train.to(device), self.validation.to(device), self.test.to(device), self.classes)


def stream(*key: str | int) -> torch.Generator:
    """Return a CPU generator fixed by `key` alone: what it is for, then numbers, as "permutation", seed, task.

    Different keys give unrelated streams: by chance alone two of them agree once in 2^32, as torch seeds by 32 bits.
    """
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=4).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big"))


@contextlib.contextmanager
def drawing_from(*key: str | int) -> Iterator[None]:
    """Draw on the CPU from the stream of a key; torch's own generator goes on as if nothing was drawn."""
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.default_generator.manual_seed(stream(*key).initial_seed())
        yield


def permutation(features: int, seed: int, task: int) -> Tensor:
    """Return the permutation [features] of a task's pixels, fixed by (seed, task); task 0 has the original images."""
    if task == 0:
        return torch.arange(features, device="cpu")
    return torch.randperm(features, generator=stream("permutation", seed, task), device="cpu")


def batches(count: int, size: int, *, seed: int, task: int, epoch: int, what: str = "batches") -> Tensor:
    """Return the order of one epoch, [steps, size] int64 on the CPU: full batches of `count` shuffled examples.

    Fixed by (seed, task, epoch) and the number of examples; the count % size examples left over vary by epoch.
    """
    if size > count:
        raise DataError(f"the batch size is {size}, but there are {count} examples; choose a smaller one")
    order = torch.randperm(count, generator=stream(what, seed, task, epoch), device="cpu")
    return order[: count // size * size].view(-1, size)


class PermutedExamples:
    """A part to train on under permutations [features]: [n] examples of a single one, which is applied now, or more."""

    def __init__(self, part: Part, permutations: Sequence[Tensor]) -> None:
        self.device = part.x.device
        self._permutations = torch.stack([*permutations]).to(self.device)
        alone = len(permutations) == 1
        self.part = Part(part.x.index_select(1, self._permutations[0]), part.y) if alone else part

    def __len__(self) -> int:
        return len(self.part) * len(self._permutations)

    def take(self, index: Tensor) -> Batch:
        """Return the examples `index` [N] as inputs [N, features] and labels [N]."""
        if len(self._permutations) == 1:
            return self.part.x.index_select(0, index), self.part.y.index_select(0, index)
        task, example = index // len(self.part), index % len(self.part)
        x = self.part.x.index_select(0, example)
        return x.gather(1, self._permutations.index_select(0, task)), self.part.y.index_select(0, example)

    def chunks(self) -> Iterable[Batch]:
        """Return all examples under a single permutation in large batches."""
        return list(zip(*(torch.split(t, 8192) for t in (self.part.x, self.part.y)), strict=True))

    def redraw(self, *key: int) -> None:
        """Do nothing: these examples have nothing random about them."""


def load(
    name: DataSet, folder: Path | str | None, *, validation: int, train: int | None = None, download: bool = False
) -> Parts:
    """Return the parts of the data set `name`, split the same way everywhere.

    "digits": 64 features, with scikit-learn, so that `folder` and `download` have nothing to do; 400 test examples.
    "mnist": 784 features, four files of 60,000 and 10,000 examples, plain or gzip, in `folder` or below it in `mnist`
    or `MNIST/raw`; None means the variable XKFAC_DATA. Only their content, by SHA-256, matters.

    validation: how many examples are set aside, the last ones of a fixed shuffle, never of the test part.
    train: the first so many of the rest; all of it by default. download: fetch missing files into `folder/MNIST/raw`.

    Raises DataError when a file is missing or damaged, or there are too few examples.
    """
    images, labels, *test = _digits() if name == "digits" else _mnist(folder, download)
    scale = 16 if name == "digits" else 255
    order = torch.randperm(len(labels), generator=stream("split", name), device="cpu")
    rest = len(order) - validation
    if rest < (train or 1):
        raise DataError(
            f"{name} has {len(order)} examples beside the test part: validation={validation} leaves {max(rest, 0)} for "
            f"training, and {train or 1} must be left; lower validation" + (" or train" if train else "")
        )
    chosen = order[: rest if train is None else train], order[rest:]
    # Examples are picked while pixels are still bytes, so that floats are never copied.
    parts = [*((images[index], labels[index]) for index in chosen), test]
    learnt, aside, tested = (Part(x.flatten(1).float().div_(scale), y.long()) for x, y in parts)
    return Parts(learnt, aside, tested)


def _digits() -> list[Tensor]:
    """Return images and labels of scikit-learn's digits, then those of the test part."""
    datasets = imported("sklearn.datasets", "the data set 'digits'")
    images, labels = (torch.from_numpy(array) for array in datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=stream("test", "digits"), device="cpu")
    test, rest = order[:DIGITS_TEST], order[DIGITS_TEST:]
    return [images[rest], labels[rest], images[test], labels[test]]


def _mnist(folder: Path | str | None, download: bool) -> list[Tensor]:
    """Return images and labels of MNIST, then those of the test part."""
    folder = data_folder(folder)
    if folder is None:
        raise DataError(
            "mnist needs a folder: name one that has its files with --data FOLDER or in the variable XKFAC_DATA, "
            "and add --download to have them fetched into it"
        )
    if not download and not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise DataError(f"'{folder}' {what}; name a folder that has the files of mnist, or add --download")
    places = (folder, folder / "mnist", folder / "MNIST" / "raw")
    arrays = []
    for name in MNIST:
        paths = (place / f"{name}{suffix}" for place in places for suffix in ("", ".gz"))
        path = next((path for path in paths if path.is_file()), None)
        if path is None and not download:
            raise DataError(
                f"'{name}' is neither in '{folder}', plain or .gz, nor below it in mnist or MNIST/raw; put it there, "
                "or add --download to fetch it"
            )
        arrays.append(_read(path or _fetch(name, folder), name))
    return arrays


def _read(path: Path, name: str) -> Tensor:
    """Return the content of a file of MNIST, plain or gzip, as uint8 of its own shape."""
    try:
        content = _checked(read_regular(path, LARGEST_FILE), name)
    except _UNREADABLE as error:
        raise DataError(f"'{path}' is damaged or no file of mnist ({error}); delete it and add --download") from error
    dimensions = content[3]  # an idx file: four bytes, the sizes as big-endian integers, the array
    sizes = torch.frombuffer(content, dtype=torch.uint8, count=4 * dimensions, offset=4).view(-1, 4)
    shape = [int.from_bytes(bytes(size.tolist()), "big") for size in sizes]
    return torch.frombuffer(content, dtype=torch.uint8, offset=4 + 4 * dimensions).view(shape)


def _checked(content: bytes, name: str) -> bytearray:
    """Return the unpacked content of a file of MNIST, whose checksum must be right; its name says little of it."""
    if content[:2] == b"\x1f\x8b":
        with gzip.open(io.BytesIO(content)) as file:
            content = file.read(LARGEST_FILE)
    digest = hashlib.sha256(content).hexdigest()
    if digest != MNIST[name]:
        raise ValueError(f"the SHA-256 of its content is {digest}, but should be {MNIST[name]}")
    return bytearray(content)  # torch shares its memory, and would warn of bytes, which are read-only


def _fetch(name: str, folder: Path) -> Path:
    """Fetch a file of MNIST into `folder/MNIST/raw` from the first mirror that has it intact, and return its path."""
    target = folder / "MNIST" / "raw" / f"{name}.gz"
    failures = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for mirror in MIRRORS:
            print(f"fetching {mirror}{target.name}", file=sys.stderr)
            try:
                with urlopen(f"{mirror}{target.name}", timeout=TIMEOUT) as response:
                    content: bytes = response.read()
                _checked(content, name)
            except (*_UNREADABLE, HTTPException) as error:
                failures.append(f"{mirror} ({error})")
            else:
                replace_file(target, content)
                return target
    except OSError as error:
        raise DataError(f"'{target}' could not be written ({error}); choose another folder with --data") from error
    raise DataError(
        f"'{target.name}' could not be fetched from {' nor from '.join(failures)}; try again later, or put the file "
        f"into '{target.parent}' yourself"
    )
