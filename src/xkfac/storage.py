"""Files of named tensors with a description: safetensors, checked by a digest, written atomically."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from xkfac.errors import MemoryFileError

FORMAT = "xkfac-memory"
VERSION = 1


def triangle(matrix: Tensor) -> Tensor:
    """Return the lower triangle of symmetric matrices [..., F, F] as [..., F (F + 1) / 2]."""
    rows, columns = torch.tril_indices(matrix.shape[-1], matrix.shape[-1], device=matrix.device)
    return matrix[..., rows, columns]


def symmetric(packed: Tensor) -> Tensor:
    """Return the symmetric matrices [..., F, F] of packed triangles [..., F (F + 1) / 2]."""
    size = round((8 * packed.shape[-1] + 1) ** 0.5 - 1) // 2
    rows, columns = torch.tril_indices(size, size, device=packed.device)
    matrix = packed.new_empty(*packed.shape[:-1], size, size)
    matrix[..., rows, columns] = packed
    matrix[..., columns, rows] = packed
    return matrix


def write(path: str | Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write tensors and a JSON description to `path`, replacing what is there only once all is on disk."""
    path = Path(path)
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(description, sort_keys=True)
    metadata = {"format": FORMAT, "version": str(VERSION), "description": text, "digest": _digest(text, ready)}
    if not path.parent.is_dir():
        raise MemoryFileError(f"'{path}' cannot be written: the folder '{path.parent}' does not exist")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file(ready, temporary, metadata)
        with open(temporary, "rb+") as file:  # noqa: PTH123
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except (OSError, SafetensorError) as error:
        raise MemoryFileError(f"'{path}' could not be written: {error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def read(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the memory-mapped tensors of a file.

    Raises MemoryFileError when the file is missing, truncated, changed, foreign, or of a newer version.
    """
    path = Path(path)
    if not path.is_file():
        raise MemoryFileError(f"there is no memory file '{path}'")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            _check_header(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError, ValueError, KeyError) as error:
        if isinstance(error, MemoryFileError):
            raise
        raise MemoryFileError(
            f"'{path}' is truncated, damaged, or no safetensors file ({error}); fetch or make it again"
        ) from None
    if _digest(metadata["description"], tensors) != metadata["digest"]:
        raise MemoryFileError(f"'{path}' is damaged: its content does not match its digest; fetch or make it again")
    description: dict[str, Any] = json.loads(metadata["description"])
    return description, tensors


def _check_header(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise MemoryFileError(f"'{path}' is a safetensors file but no xkfac memory; name a file that Memory.save wrote")
    version = metadata.get("version", "")
    if not version.isdecimal() or "digest" not in metadata or "description" not in metadata:
        raise MemoryFileError(f"'{path}' is damaged: its header is incomplete; fetch or make it again")
    if int(version) > VERSION:
        raise MemoryFileError(
            f"'{path}' has format version {version}, and this xkfac reads up to {VERSION}; upgrade xkfac to read it"
        )


def _digest(description: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(f"{VERSION}{description}".encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        size = tensor.numel() * tensor.element_size()
        digest.update((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"")
    return digest.hexdigest()
