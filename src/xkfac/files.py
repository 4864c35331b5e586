"""Files of named tensors with a description: safetensors, checked by a digest, written atomically."""

import contextlib
import ctypes
import hashlib
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from xkfac.curvature.gram import symmetric, triangle
from xkfac.errors import MemoryFileError

FORMAT = "xkfac-memory"
VERSION = 1
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
_DTYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}
_STEPS = 32767  # of a correlation in 16 bits, from 0 to 1


def correlations(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return positive semi-definite matrices [G, F, F] in 16 bits: triangles [G, F (F + 1) / 2] and diagonals [G, F].

    The triangles are those of the correlations c_ij = a_ij / sqrt(a_ii a_jj), shrunk to (1 - d) c_ij and rounded to
    multiples of 1 / 32767. Rounding adds an error E of no sign, and shrinking lifts the smallest eigenvalue by d, which
    is no less than |E|: the matrix stays positive semi-definite. Its diagonal is kept, all else is off by at most
    (d + 2^-16) sqrt(a_ii a_jj). d is 3.6e-5 sqrt(F), or larger for matrices whose entries are rounded alike.
    """
    diagonal = matrix.diagonal(dim1=1, dim2=2).float().clamp(min=0)
    scale = diagonal.rsqrt().where(diagonal > 0, 0.0)
    exact = (matrix.float() * scale[:, :, None] * scale[:, None, :]).clamp_(-1, 1)
    exact.diagonal(dim1=1, dim2=2).fill_(1.0)
    # A whole number of steps, so that correlations of 1 and -1 are not rounded at all.
    shrunk = torch.full_like(diagonal[:, :1], math.ceil(1.17 * math.sqrt(matrix.shape[1])))[:, :, None]
    while True:
        wanted = exact * (_STEPS - shrunk)
        stored = wanted.round()
        error = torch.sub(stored, wanted, out=wanted)
        error.diagonal(dim1=1, dim2=2).zero_()
        size = norm_bound(error)[:, None, None]
        if bool((size <= shrunk).all()):
            break
        shrunk = torch.where(size > shrunk, (1.25 * size).ceil().clamp(max=_STEPS), shrunk)
    stored.diagonal(dim1=1, dim2=2).fill_(_STEPS)
    return triangle(stored.to(torch.int16)), diagonal


def from_correlations(packed: Tensor, diagonal: Tensor) -> Tensor:
    """Return the symmetric matrices [G, F, F] that `correlations` has packed, in float32."""
    scale = (diagonal / _STEPS).sqrt()
    matrix = symmetric(packed).float().mul_(scale[:, :, None] * scale[:, None, :])
    matrix.diagonal(dim1=1, dim2=2).copy_(diagonal)
    return matrix


def norm_bound(matrix: Tensor) -> Tensor:
    """Return numbers [G] that the spectral norms of symmetric matrices [G, F, F] do not exceed, some 1.4 times them.

    By the power iteration, |M|^16 |<v, x>| <= |M^16 x| for the first eigenvector v and any x. Four random x are all
    nearly orthogonal to v, with products below 1/100, once in 10^8 matrices.
    """
    generator = torch.Generator(matrix.device).manual_seed(0)
    x = torch.randn(*matrix.shape[:2], 4, generator=generator, device=matrix.device, dtype=matrix.dtype)
    logarithm = torch.full_like(x[:, 0, 0], math.log(100))
    for _ in range(16):
        x = matrix @ x
        size = x.norm(dim=1).amax(1).clamp(min=torch.finfo(x.dtype).tiny)
        logarithm += size.log()
        x /= size[:, None, None]
    return (logarithm / 16).exp()


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
        if tensor.dtype not in _DTYPES:
            raise MemoryFileError(f"'{path}' cannot hold '{name}', which is of {tensor.dtype}; convert it first")
    try:
        with replacing(_target(path)) as temporary:
            save_file(ready, temporary, metadata)
    except MemoryFileError:
        raise
    except (OSError, ValueError) as error:
        raise MemoryFileError(
            f"'{path}' could not be written and is as it was before ({error}); free space there or choose another place"
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to write a file to, which replaces what is at `path` once it is all on disk.

    Raises OSError when that fails; what was at `path` is then as it was.
    """
    temporary = path.parent / f".xkfac-{secrets.token_hex(8)}.part"
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system lets a folder be flushed
        flush(path.parent, os.O_RDONLY)


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
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
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


def flush(path: Path, flags: int = os.O_RDWR) -> None:
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
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            _check_header(path, metadata, format)
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, it is no mapping
        # The digest is over the content; the header itself must be, byte for byte, the one that `write` makes.
        head = _head(tensors, metadata)
        with path.open("rb") as file:
            whole = file.read(len(head)) == head
        whole = whole and _digest(format, metadata["version"], metadata["description"], tensors) == metadata["digest"]
        description = json.loads(metadata["description"]) if whole else None
    except MemoryFileError:
        raise
    except (SafetensorError, OSError, RuntimeError, ValueError, LookupError, TypeError, MemoryError) as error:
        raise MemoryFileError(
            f"'{path}' cannot be read, is truncated, damaged, or no safetensors file ({error}); fetch or make it again"
        ) from None
    if not isinstance(description, dict):
        raise MemoryFileError(f"'{path}' is damaged: its content does not match its digest; fetch or make it again")
    return description, tensors


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
        raise MemoryFileError(f"'{path}' has format version {version}, this xkfac reads up to {VERSION}; upgrade xkfac")


def _digest(format: str, version: str, description: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps([format, version, description]).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(_raw(tensor))
    return digest.hexdigest()
