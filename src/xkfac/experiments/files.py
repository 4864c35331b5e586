"""Files: paths that can be used, regular files read within a limit, files that are there as a whole or not at all."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xkfac.errors import XkfacError, shortened
from xkfac.files import replacing

LARGEST_TEXT = 2**24  # bytes of a recipe, of run.json, of one choice; real ones have some thousands
_LONGEST_NAME = 255  # bytes; that of all usual file systems
LARGEST_RECORD = 2**30  # bytes of events and other files that grow with a run


def check_path(path: str | Path) -> Path:
    """Return a path that the system can look up, whether or not something is there.

    Raises XkfacError for one that is too long, holds a null character, or lies in a folder that may not be searched.
    """
    path = Path(path)
    try:
        _look_up(path)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        remedy = "a shorter one" if getattr(error, "errno", None) == errno.ENAMETOOLONG else "another one"
        raise XkfacError(f"the path '{shortened(str(path))}' cannot be used ({reason(error)}); give {remedy}") from None
    return path


def _look_up(path: Path) -> None:
    # A folder that is not there yet would hide that a name in it is too long.
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))
    path.lstat()


def at_home(path: str | Path) -> Path:
    """Return a path that the system can look up, with `~` at its beginning replaced by the home folder."""
    try:
        return check_path(Path(path).expanduser())
    except RuntimeError as error:
        raise XkfacError(f"the path '{shortened(str(path))}' cannot be used ({error}); give another one") from None


def data_folder(folder: str | Path | None) -> Path | None:
    """Return the folder that data is in, by default that of the variable XKFAC_DATA; None where neither is given."""
    given = folder or os.environ.get("XKFAC_DATA")
    return at_home(given) if given else None


def reason(error: BaseException) -> str:
    """Return what is behind an error, in the words of the system where it has some."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return reason(error.__cause__) if error.__cause__ is not None else str(error) or type(error).__name__


def read_regular(path: Path, limit: int, *, follow: bool = True) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; nothing else is waited for or read.

    follow: whether `path` itself may be a link.

    Raises OSError.
    """
    # Without O_NONBLOCK a named pipe would be waited for that nobody writes to.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is no regular file")
        if status.st_size > limit:
            raise OSError(f"it has more than {in_words(limit)}")
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)  # what is appended meanwhile is left for the next reading
    finally:
        os.close(handle)


def in_words(size: int) -> str:
    """Return a number of bytes in words."""
    return f"{size >> 30} GiB" if size >= 2**30 else f"{size >> 20} MiB" if size >= 2**20 else f"{size} bytes"


def read_json(path: Path, limit: int = LARGEST_TEXT) -> Any:
    """Return the value that a JSON file holds.

    Raises OSError when the file cannot be read, and ValueError when it holds no JSON.
    """
    return parse_json(read_regular(path, limit))


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text.

    Raises ValueError when it is none, or is nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, replacing what is there only once all is on disk; raises OSError when that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def write_file(path: Path, content: bytes, error: type[XkfacError] = XkfacError, remedy: str = "free space") -> None:
    """Write a file as `replace_file` does; raises `error`, with the reason and the remedy, when that fails."""
    try:
        replace_file(path, content)
    except OSError as fault:
        raise error(f"'{path}' could not be written ({fault.strerror}); {remedy}, or choose another folder") from None


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False, wait: float = 0.0) -> Iterator[int | None]:
    """Lock a file, made if need be, for as long as this lasts; yield its descriptor, or None where others hold it.

    A lock ends with the processes that hold its descriptor, however they end. shared: several may hold it so. wait: how
    many seconds others are waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end, free = time.monotonic() + wait, False
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(handle, "rb+"):
        while not free:
            try:
                fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                free = True
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(0.02)
        yield handle if free else None
