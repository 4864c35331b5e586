"""The data sets of permuted-image experiments: loaded, checked, split, permuted and shuffled, fixed by keys alone."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import torch
from torch import Tensor

from xkfac.errors import XkfacError
from xkfac.experiments.files import at_home, nearest, replace_file
from xkfac.experiments.packages import PackageError, imported

DATA_SETS = ("digits", "mnist")
DIGITS_TEST = 400
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
TIMEOUT = 30.0
LARGEST_FILE = 2**26  # bytes, unpacked; those of MNIST have 47 million at most


class DataError(XkfacError):
    """A data set is missing, damaged, unknown, or too small for what is asked of it."""


class Checksums(NamedTuple):
    """What a published file must be: the MD5 of the .gz file, the SHA-256 of the content, its idx dimensions."""

    packed_md5: str
    content_sha256: str
    dimensions: int


MNIST = {
    "train-images-idx3-ubyte": Checksums(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db", 3
    ),
    "train-labels-idx1-ubyte": Checksums(
        "d53e105ee54ea40749a09fcbcd1e9432", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5", 1
    ),
    "t10k-images-idx3-ubyte": Checksums(
        "9fb629c4189551a2d022fa330f9573f3", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7", 3
    ),
    "t10k-labels-idx1-ubyte": Checksums(
        "ec29112dd5afa0611ce80d1b7f02629c", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2", 1
    ),
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
    Raises DataError when the key holds anything but text and integers.
    """
    if not key or any(isinstance(item, bool) or not isinstance(item, (str, int)) for item in key):
        raise DataError(f"the key of a random stream is {key!r}; it must be of text and integers, as ('weights', 0)")
    digest = hashlib.blake2b(json.dumps(key).encode(), digest_size=4).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big"))


def permutation(features: int, seed: int, task: int) -> Tensor:
    """Return the permutation [features] of a task's pixels, fixed by (seed, task); task 0 has the original images."""
    _check_count("features", features, 1)
    _check_count("task", task, 0)
    if task == 0:
        return torch.arange(features, device="cpu")
    return torch.randperm(features, generator=stream("permutation", seed, task), device="cpu")


def batches(count: int, size: int, *, seed: int, task: int, epoch: int) -> Tensor:
    """Return the order of one epoch, [steps, size] int64 on the CPU: full batches of `count` shuffled examples.

    Fixed by (seed, task, epoch) and the number of examples; the count % size examples left over vary by epoch.
    Raises DataError when there is no full batch.
    """
    _check_count("the batch size", size, 1)
    if size > count:
        raise DataError(f"the batch size is {size}, but there are {count} examples; choose a smaller one")
    order = torch.randperm(count, generator=stream("batches", seed, task, epoch), device="cpu")
    return order[: count // size * size].view(-1, size)


def load(
    name: str,
    folder: Path | str | None,
    *,
    validation: int,
    train: int | None = None,
    download: bool = False,
    report: Callable[[str], None] | None = None,
) -> Parts:
    """Return the parts of the data set `name`, split the same way everywhere.

    "digits": 64 features, with scikit-learn, so that `folder` and `download` have nothing to do; 400 test examples.
    "mnist": 784 features, four files of 60,000 and 10,000 examples, plain or gzip, in `folder` or below it in `mnist`
    or `MNIST/raw`; None means the variable XKFAC_DATA. Only their content, by SHA-256, matters.

    validation: how many examples are set aside, the last ones of a fixed shuffle, never of the test part.
    train: the first so many of the rest; all of it by default.
    download: fetch missing files into `folder/MNIST/raw`. report: takes a line of progress; to stderr by default.

    Raises DataError when the name is unknown, a file is missing or damaged, or there are too few examples.
    """
    if name not in DATA_SETS:
        hint = nearest(str(name).lower(), DATA_SETS)
        raise DataError(f"data set '{name}' is not known{hint}; it is one of {', '.join(DATA_SETS)}")
    _check_count("validation", validation, 0)
    if train is not None:
        _check_count("train", train, 1)
    source = _digits() if name == "digits" else _mnist(folder, download, report or _to_stderr)
    order = torch.randperm(len(source.labels), generator=stream("split", name), device="cpu")
    rest = len(order) - validation
    if rest < (train or 1):
        raise DataError(
            f"{name} has {len(order)} examples beside the test part: validation={validation} leaves {max(rest, 0)} for "
            f"training, and {train or 1} must be left; lower validation" + (" or train" if train else "")
        )
    limit = rest if train is None else train
    return Parts(source.part(order[:limit]), source.part(order[rest:]), source.test)


class _Source(NamedTuple):
    """What a data set has: images [n, ...] with values up to `scale`, labels [n], and its test part."""

    images: Tensor
    labels: Tensor
    scale: int
    test: Part

    def part(self, index: Tensor) -> Part:
        """Return the examples `index` [k], picked while pixels are still bytes, so that floats are never copied."""
        return _scaled(self.images[index], self.labels[index], self.scale)


def _scaled(images: Tensor, labels: Tensor, scale: int) -> Part:
    return Part(images.flatten(1).float().div_(scale), labels.long())


def _digits() -> _Source:
    try:
        datasets = imported("sklearn.datasets", "the data set 'digits'")
    except PackageError as error:
        raise DataError(str(error)) from None
    images, labels = (torch.from_numpy(array) for array in datasets.load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=stream("test", "digits"), device="cpu")
    test, rest = order[:DIGITS_TEST], order[DIGITS_TEST:]
    return _Source(images[rest], labels[rest], 16, _scaled(images[test], labels[test], 16))


def _mnist(folder: Path | str | None, download: bool, report: Callable[[str], None]) -> _Source:
    folder = folder or os.environ.get("XKFAC_DATA")
    if not folder:
        raise DataError(
            "mnist needs a folder: name one that has its files with --data FOLDER or in the variable XKFAC_DATA, "
            "and add --download to have them fetched into it"
        )
    folder = at_home(folder)
    if not download and not folder.is_dir():
        what = "is no folder" if folder.exists() else "does not exist"
        raise DataError(
            f"'{folder}' {what}; name a folder that has the files of mnist, or add --download to fetch them"
        )
    paths = {}
    for name in MNIST:
        found = _find(name, folder)
        if found is None and not download:
            raise DataError(
                f"'{name}' is neither in '{folder}', plain or .gz, nor below it in mnist or MNIST/raw; put it there, "
                "or add --download to fetch it"
            )
        paths[name] = found or fetch(name, folder, report)
    images, labels, test_images, test_labels = (_read(path, MNIST[name]) for name, path in paths.items())
    return _Source(images, labels, 255, _scaled(test_images, test_labels, 255))


def _find(name: str, folder: Path) -> Path | None:
    places = (folder, folder / "mnist", folder / "MNIST" / "raw")
    paths = (place / f"{name}{suffix}" for place in places for suffix in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path, expected: Checksums) -> Tensor:
    """Return the checked content of an idx file, plain or gzip, as uint8 of its own shape."""
    remedy = "delete it and add --download to fetch it again"
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"  # the name says little: browsers unpack .gz files and keep the name
        with gzip.open(path) if packed else path.open("rb") as file:
            content = bytearray(
                file.read(LARGEST_FILE)
            )  # torch shares its memory, and would warn of bytes, which are read-only
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{path}' cannot be read, or is truncated or damaged ({error}); {remedy}") from error
    try:
        tensor = parse_idx(content, expected.dimensions)
    except DataError as error:
        raise DataError(f"'{path}' is damaged or no file of mnist: {error}; {remedy}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != expected.content_sha256:
        raise DataError(
            f"'{path}' is damaged or no file of mnist: the SHA-256 of its content is {found}, but should be "
            f"{expected.content_sha256}; {remedy}"
        )
    return tensor


def parse_idx(content: bytearray, dimensions: int) -> Tensor:
    """Return the array of an idx file of unsigned bytes, uint8 [...] of `dimensions` sizes, which shares its memory.

    Raises DataError when magic number, sizes and length do not agree.
    """
    magic = bytes((0, 0, 8, dimensions))
    if content[:4] != magic:
        raise DataError(f"it begins with '{content[:4].hex(' ')}', not with '{magic.hex(' ')}'")
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"its header ends after {len(content)} of {start} bytes")
    sizes = [int.from_bytes(content[at : at + 4], "big") for at in range(4, start, 4)]
    if math.prod(sizes) == 0 or len(content) != start + math.prod(sizes):
        raise DataError(
            f"its header gives the sizes {sizes}, {math.prod(sizes)} bytes in all, and {len(content) - start} follow"
        )
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(sizes)


def fetch(name: str, folder: Path, report: Callable[[str], None]) -> Path:
    """Fetch a file of MNIST into `folder/MNIST/raw` from the first mirror that has it intact, and return its path.

    Raises DataError that names each mirror and its failure; nothing half written remains.
    """
    target = folder / "MNIST" / "raw" / f"{name}.gz"
    failures = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for mirror in MIRRORS:
            report(f"fetching {mirror}{target.name}")
            content = _fetched(f"{mirror}{target.name}", MNIST[name].packed_md5)
            if isinstance(content, bytes):
                replace_file(target, content)
                report(f"fetched '{target}', {len(content) / 1024:,.0f} KiB")
                return target
            failures.append(f"{mirror} ({content})")
            report(f"failed: {failures[-1]}")
    except OSError as error:
        raise DataError(f"'{target}' could not be written ({error}); choose another folder with --data") from error
    raise DataError(
        f"'{target.name}' could not be fetched from {' nor from '.join(failures)}; try again later, or put the file "
        f"into '{target.parent}' yourself"
    )


def _fetched(url: str, md5: str) -> bytes | str:
    """Return what `url` gives, or in words why that is not the file with this MD5."""
    try:
        with urlopen(url, timeout=TIMEOUT) as response:
            content: bytes = response.read()
    except (OSError, HTTPException) as error:
        return str(error) or type(error).__name__
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return content if found == md5 else f"the MD5 of what it gave is {found}, but should be {md5}"


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(f"{name} is {value!r}; it must be an integer of at least {least}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)
