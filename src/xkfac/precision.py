"""Which products of float32 matrices may be coarser than float32, as torch's own setting says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def rounds(like: Tensor) -> bool:
    """Whether products with `like` may be of bfloat16: float32 on a CUDA device at the matmul precision "medium".

    At "high" they are of TF32, which torch sees to by itself. Factors alone are rounded; sums are float32, and torch
    before 2.8, which cannot sum products of bfloat16 so, rounds nothing here.
    """
    asked = torch.get_float32_matmul_precision() == "medium"
    return asked and like.is_cuda and like.dtype == torch.float32 and hasattr(torch.ops.aten.bmm, "dtype")


def rounded(vectors: Tensor) -> Tensor:
    """Return vectors as their Gram matrices may have them."""
    return vectors.bfloat16() if rounds(vectors) else vectors


@contextmanager
def exactly() -> Iterator[None]:
    """Have products of float32 matrices be of float32 inside, whatever torch is set to."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that products of a dtype are summed in."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def add_product_(total: Tensor, first: Tensor, second: Tensor, scale: float = 1.0) -> None:
    """Add scale * A B to `total` [n, ., .], which has the dtype that products are summed in."""
    if first.dtype == total.dtype:
        total.baddbmm_(first, second, alpha=scale)
    elif first.is_cuda:
        torch.baddbmm(total, first, second, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        total.baddbmm_(first.to(total.dtype), second.to(total.dtype), alpha=scale)
