"""The files of an image tree: regular ones inside it alone, of a few formats, their sizes checked before they are read.

A link is followed where it leads to a regular file, or to a folder, inside the tree. Links that lead out of it, named
pipes, devices and files that are too large are errors. So are two links to one folder: links in a circle never end.
"""

import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from xkfac.experiments.data.digits import DataError
from xkfac.experiments.files import in_words, read_regular, reason

LARGEST_FILE = 2**28  # bytes of one image
MOST_PIXELS = 80_000_000  # of one image, which takes 240 MB when it is decoded
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # as Pillow calls them
ENDINGS = frozenset(
    (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
)
TEST_NAMES = ("test", "val", "validation")
PARTS = frozenset(("train", *TEST_NAMES))
Files = list[tuple[str, str]]  # names, with slashes, and stamps; the name of a folder ends with a slash


def list_files(path: Path) -> Files:
    """Return what is in a folder or a zip file; of folders beside the parts of the tree the names alone.

    Hidden files and `__MACOSX` are left out. A stamp changes when its file does; what is no image by its ending has an
    empty one.

    Raises DataError when the tree cannot be read, or an image of it is no regular file inside it, or is too large.
    """
    try:
        return list(_folder_files(path) if path.is_dir() else _zip_files(path))
    except (OSError, zipfile.BadZipFile, NotImplementedError, UnicodeError) as error:
        raise DataError(f"'{path}' cannot be read, or is a damaged zip ({reason(error)}); fetch it again") from error


def reader(path: Path) -> Callable[[str], bytes]:
    """Return a function from the name of an image in a tree to the bytes of its file.

    It raises OSError, or what zipfile does, for what cannot be read, is not inside the tree, or is too large.
    """
    if path.is_dir():
        root = path.resolve()
        return lambda name: read_regular(_inside(root, path / name), LARGEST_FILE, follow=False)
    archive = zipfile.ZipFile(path)

    def read(name: str) -> bytes:
        with archive.open(name) as file:
            content = file.read(LARGEST_FILE + 1)  # whatever size the archive declares
        if len(content) > LARGEST_FILE:
            raise OSError(f"it has more than {in_words(LARGEST_FILE)}")
        return content

    return read


def is_image(name: str) -> bool:
    """Whether a file is an image by its ending."""
    return PurePosixPath(name).suffix.lower() in ENDINGS


def _inside(root: Path, path: Path) -> Path:
    """Return where a path leads to, which must be inside a folder; both without links."""
    found = path.resolve(strict=True)
    if not found.is_relative_to(root):
        raise OSError("it is a link that leads out of the tree")
    return found


def _folder_files(path: Path) -> Iterator[tuple[str, str]]:
    """Yield what is in the parts of the tree, possibly below one folder more, and the names of other folders."""
    root, prefix = path.resolve(), ""
    linked: set[Path] = set()
    for folder, names, files in os.walk(path, onerror=_raise, followlinks=True):
        here = "".join(f"{step}/" for step in Path(folder).relative_to(path).parts)
        names[:] = [name for name in names if not hidden(name)]
        if not here and len(names) == 1 and PARTS.isdisjoint(names):
            prefix = f"{names[0]}/"
        else:
            yield from ((f"{here}{name}/", "") for name in names)
        if here == prefix:
            names[:] = PARTS.intersection(names)
        elif here:
            shown = (f"{here}{name}" for name in files if not hidden(name))
            yield from ((name, _stamp(path, root, name) if is_image(name) else "") for name in shown)
        for name in names:  # which are listed next
            _check_link(path, root, f"{here}{name}", linked)


def _raise(error: OSError) -> None:
    raise error


def _check_link(path: Path, root: Path, name: str, linked: set[Path]) -> None:
    """Check that no two links lead to one folder, as links in a circle do."""
    if not (path / name).is_symlink():
        return
    found = _found(path, root, name)
    if found in linked:
        raise DataError(f"'{name}' of '{path}' is the second link to a folder, or a link in a circle; remove it")
    linked.add(found)


def _stamp(path: Path, root: Path, name: str) -> str:
    """Return the stamp of a file, after checking that it may be read."""
    status = _found(path, root, name).lstat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"'{name}' of '{path}' is no regular file; remove it")
    _check_size(path, name, status.st_size)
    return f"{status.st_size}:{status.st_mtime_ns}"


def _found(path: Path, root: Path, name: str) -> Path:
    try:
        return _inside(root, path / name)
    except (OSError, RuntimeError) as error:  # RuntimeError is what links in a circle give
        raise DataError(f"'{name}' of '{path}' cannot be used ({reason(error)}); replace it or remove it") from None


def _zip_files(path: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: info for info in archive.infolist()}  # of two with one name the last one counts
    for name, info in members.items():
        if any(hidden(step) for step in name.split("/")):
            continue
        if is_image(name):
            _check_size(path, name, info.file_size)
        yield name, f"{info.file_size}:{info.CRC:08x}"


def _check_size(path: Path, name: str, size: int) -> None:
    if size > LARGEST_FILE:
        raise DataError(f"'{name}' of '{path}' has {in_words(size)}, more than {in_words(LARGEST_FILE)}; remove it")


def hidden(name: str) -> bool:
    """Whether a file or folder is none of the tree's."""
    return name.startswith(".") or name == "__MACOSX"
