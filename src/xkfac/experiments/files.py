"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, replacing what is there only once all is on disk.

    Raises OSError when that fails; what was at `path` is then as it was.
    """
    temporary = path.parent / f".xkfac-{secrets.token_hex(8)}.part"
    try:
        temporary.write_bytes(content)
        flush(temporary)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Bring a file onto the disk."""
    handle = os.open(path, os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
