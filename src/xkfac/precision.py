"""Which products of float32 matrices may be coarser than float32, as torch's own setting says, or a pass asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

# What the pass that runs asks for, in whatever thread: the backward pass of a GPU has one of its own.
_asked = False


def rounds(like: Tensor) -> bool:
    """Whether products with `like` may be of bfloat16: float32 on a CUDA device at the matmul precision "medium".

    At "high" they are of TF32, which torch sees to by itself. Factors alone are rounded; sums are float32, and torch
    before 2.8, which cannot sum products of bfloat16 so, rounds nothing here.
    """
    return _can_round(like) and _is_medium()


def rounds_grams(vectors: Tensor) -> bool:
    """Whether Gram matrices may be of these vectors in bfloat16: as other products, or where a pass asks for it."""
    return rounds(vectors) or (_asked and _can_round(vectors))


def _is_medium() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except (
        RuntimeError
    ):  # torch answers only while `torch.backends.*.fp32_precision` are not set; these know no "medium"
        return False


def _can_round(like: Tensor) -> bool:
    return like.is_cuda and like.dtype == torch.float32 and hasattr(torch.ops.aten.bmm, "dtype")


def rounds_rows(rows: Tensor) -> bool:
    """Whether the Gram matrix of rows on a CPU may be of bfloat16: where a pass asks for it and it is faster.

    A CPU sums products in float32 too, but gives the sum in bfloat16, every entry off by up to 2^-8 of itself. Over the
    many products of a pass that averages out. Torch's own setting is about the network, too, and does not count.
    """
    fast = rows.device.type == "cpu" and rows.shape[1] >= 256 and cpu_has_bfloat16()
    return _asked and fast and rows.dtype == torch.float32


@cache
def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies matrices of bfloat16 faster than those of float32."""
    known = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile"))
    return bool(torch.backends.mkldnn.enabled) and any(ask is not None and ask() for ask in known)


def rounded(vectors: Tensor) -> Tensor:
    """Return vectors as their Gram matrices may have them."""
    return vectors.bfloat16() if rounds_grams(vectors) else vectors


@contextmanager
def rounding(asked: bool) -> Iterator[None]:
    """Let Gram matrices be of bfloat16 inside, if it is asked for."""
    global _asked
    before, _asked = _asked, asked
    try:
        yield
    finally:
        _asked = before


def unrounded(tensor: Tensor) -> Tensor:
    """Return a tensor whose products are not coarser than float32, whatever torch is set to: the same in float64.

    Torch's settings are left alone: what they inherit from each other can be read, but not put back. Apple's GPUs have
    no float64, and round nothing.
    """
    return tensor if tensor.device.type == "mps" else tensor.double()


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that products of a dtype are summed in."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def add_product_(total: Tensor, first: Tensor, second: Tensor, scale: float = 1.0) -> None:
    """Add scale * A B to `total` [n, ., .], which has the dtype that products are summed in."""
    if first.dtype == total.dtype:
        total.baddbmm_(first, second, alpha=scale)
    elif first.dtype == torch.float64:
        total.add_(first @ second, alpha=scale)
    elif first.is_cuda:
        torch.baddbmm(total, first, second, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total.baddbmm_(first.to(total.dtype), second.to(total.dtype), alpha=scale)
