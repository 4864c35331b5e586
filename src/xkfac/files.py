"""Files of named tensors with a description: safetensors, checked by a digest, written atomically."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import io
import json
import math
import operator
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xkfac.curvature.gram import mirror_
from xkfac.errors import MemoryFileError

FORMAT = "xkfac-memory"
VERSION = 1
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64"}
_OF_NETWORKS = {
    **_DTYPES,
    **{torch.float16: "F16", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


def triangle(matrix: Tensor) -> Tensor:
    """Return the lower triangle of symmetric matrices [..., F, F] as [..., F (F + 1) / 2]."""
    rows = [row.narrow(-1, 0, place) for place, row in enumerate(matrix.unbind(-2), 1)]
    return torch.cat(rows, -1) if rows else matrix.flatten(-2)


def symmetric(packed: Tensor) -> Tensor:
    """Return the symmetric matrices [..., F, F] of packed triangles [..., F (F + 1) / 2]."""
    size = (math.isqrt(8 * packed.shape[-1] + 1) - 1) // 2
    matrix = packed.new_empty(*packed.shape[:-1], size, size)
    rows = torch.split(packed, list(range(1, size + 1)), -1)
    for place, (own, row) in enumerate(zip(matrix.unbind(-2), rows, strict=True), 1):
        own.narrow(-1, 0, place).copy_(row)
    mirror_(matrix.view(math.prod(packed.shape[:-1]), size, size).mT)
    return matrix


def lower_root(matrix: Tensor) -> Tensor:
    """Return lower triangular L [..., F, F] with L L^T = A for symmetric A, up to what makes A no positive matrix.

    Rounded entry by entry, L still gives a positive semi-definite matrix; a rounded A does not.
    """
    wide = matrix.double()
    diagonal = wide.diagonal(dim1=-2, dim2=-1)
    empty = diagonal <= 0
    # A singular A needs a little on its diagonal, in proportion, so that every feature keeps its own scale; what is
    # added stays far below the digits that bfloat16 has, and an eigendecomposition takes several times as long.
    for jitter in (0.0, 1e-10, 1e-8, 1e-6, 1e-5, 1e-4):
        root, info = torch.linalg.cholesky_ex(wide + torch.diag_embed(diagonal.clamp(min=0) * jitter + 1.0 * empty))
        if not bool(info.any()):
            return torch.where(empty[..., None, :] | empty[..., :, None], 0.0, root).to(matrix.dtype)
    values, vectors = torch.linalg.eigh(wide)
    upper: Tensor = torch.linalg.qr((vectors * values.clamp(min=0).sqrt()[..., None, :]).mT).R
    return upper.mT.to(matrix.dtype)


def write(
    path: str | Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor], format: str = FORMAT
) -> None:
    """Write tensors and a JSON description to `path`, replacing what is there only once all is on disk.

    `format` says what the file is; `read` refuses any other. A symbolic link is followed: what it points to is
    replaced, and the link stays.

    Raises MemoryFileError when that fails; what was at `path` is then as it was.
    """
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(description)
    version = str(VERSION)
    digest = _digest(format, version, text, ready)
    write_tensors(path, ready, {"format": format, "version": version, "description": text, "digest": digest})


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write tensors to a safetensors file that any reader of the format reads, as atomically as `write`."""
    path = Path(path)
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    for name, tensor in ready.items():
        if tensor.dtype not in _OF_NETWORKS:
            raise MemoryFileError(f"'{path}' cannot hold '{name}', which is of {tensor.dtype}; convert it first")
    try:
        _replace(_target(path), ready, metadata)
    except MemoryFileError:
        raise
    except (OSError, ValueError) as error:
        raise MemoryFileError(
            f"'{path}' could not be written and is as it was before ({error}); free space there or choose another place"
        ) from error


def _replace(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file beside `path`, bring it onto the disk, and give it that name."""
    temporary = path.parent / f".xkfac-{secrets.token_hex(8)}.part"
    try:
        temporary.touch(exist_ok=False)
        save_file(tensors, temporary, metadata)
        _flush(temporary, os.O_RDWR)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system lets a folder be flushed
        _flush(path.parent, os.O_RDONLY)


def save_file(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file: length of the header, header, bytes of the tensors.

    The format is so simple that writing it here spares a copy of the data, and NumPy, which the library's own function
    of this name needs; and the same content gives the same bytes.
    """
    with path.open("wb") as file:
        file.write(_head(tensors, metadata))
        for name in _order(tensors):
            file.write(_raw(tensors[name]))


def _order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the order of tensors in a file: wide types first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _head(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return what stands before the tensors: the length of the header, and the header."""
    entries: dict[str, Any] = {"__metadata__": {key: metadata[key] for key in sorted(metadata)}}
    end = 0
    for name in _order(tensors):
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": _OF_NETWORKS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _raw(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor on the CPU, without a copy."""
    size = tensor.numel() * tensor.element_size()
    return (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""


def _target(path: Path) -> Path:
    """Return the regular file, there or still to be made, that a path leads to, symbolic links followed."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise MemoryFileError(f"'{path}' cannot be written: it is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        what = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise MemoryFileError(f"'{path}' cannot be written: it is a {what}, which holds no memory; name a regular file")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise MemoryFileError(f"'{path}' cannot be written: the folder '{target.parent}' does not exist; make it first")
    return target


def _flush(path: Path, flags: int) -> None:
    """Bring a file, or a folder's entries, onto the disk."""
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: str | Path, format: str = FORMAT) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors of a file of a format, in memory of their own.

    Nothing stays mapped: what the digest was checked on is what is kept, whatever becomes of the file. All lies at
    aligned addresses, as tensors do that are made in process, since matrix products round by the address of their
    operands.

    Raises MemoryFileError when the file is missing, truncated, changed, foreign, or of a newer version.
    """
    path = Path(path)
    try:
        _check_file(path)
        with path.open("rb") as file:
            metadata, tensors = _read_head(file, path, format)
            # The digest is over the content; the header itself must be, byte for byte, the one that `write` makes.
            head = _head(tensors, metadata)
            file.seek(0)
            whole = file.read(len(head)) == head and _fill(file, tensors)
        whole = whole and _digest(format, metadata["version"], metadata["description"], tensors) == metadata["digest"]
        description = json.loads(metadata["description"]) if whole else None
    except MemoryFileError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        raise MemoryFileError(
            f"'{path}' cannot be read, is truncated, damaged, or no safetensors file ({error}); fetch or make it again"
        ) from None
    if not isinstance(description, dict):
        raise MemoryFileError(f"'{path}' is damaged: its content does not match its digest; fetch or make it again")
    return description, tensors


def _read_head(file: io.BufferedReader, path: Path, format: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata of a file and its tensors, whose numbers are still to be read.

    No more memory is asked for than the file is large, whatever its header says.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise ValueError("its header is cut off")
    entries = json.loads(file.read(length))
    metadata = entries.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is no text")
    _check_header(path, metadata, format)
    dtypes = {name: dtype for dtype, name in _DTYPES.items()}
    tensors, left = {}, size - 8 - length
    for name, entry in entries.items():
        shape, dtype = entry["shape"], dtypes[entry["dtype"]]
        left -= math.prod(map(operator.index, shape)) * dtype.itemsize
        if min(shape, default=0) < 0 or left < 0:
            raise ValueError("it is shorter than its header says")
        tensors[name] = torch.empty(shape, dtype=dtype)
    if left:
        raise ValueError("it is longer than its header says")
    return metadata, tensors


def _fill(file: io.BufferedReader, tensors: Mapping[str, Tensor]) -> bool:
    """Read the numbers of tensors from where a file is; return whether they were all there, and nothing else."""
    for name in _order(tensors):
        place = memoryview(_raw(tensors[name])).cast("B")
        while place:
            count = file.readinto(place)
            if not count:
                return False
            place = place[count:]
    return not file.read(1)


def _check_file(path: Path) -> None:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "does not exist"
        raise MemoryFileError(f"'{path}' {what}; name a file that Memory.save wrote")


def _check_header(path: Path, metadata: Mapping[str, str], format: str) -> None:
    if metadata.get("format") != format:
        what = format.replace("-", " ", 1)
        raise MemoryFileError(f"'{path}' is a safetensors file but no {what}; name a file that was saved as one")
    version = metadata.get("version", "")
    if not version.isdecimal() or "digest" not in metadata or "description" not in metadata:
        raise MemoryFileError(f"'{path}' is damaged: its header is incomplete; fetch or make it again")
    if int(version) > VERSION:
        raise MemoryFileError(
            f"'{path}' has format version {version}, and this xkfac reads up to {VERSION}; upgrade xkfac to read it"
        )


def _digest(format: str, version: str, description: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps([format, version, description]).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_raw(tensor))
    return digest.hexdigest()
