"""Which products of float32 matrices may be coarser than float32, as torch's own setting says."""

from __future__ import annotations

import torch
from torch import Tensor


def rounds(like: Tensor) -> bool:
    """Whether products with `like` may be of bfloat16: float32 on a CUDA device at the matmul precision "medium".

    At "high" they are of TF32, which torch sees to by itself. Factors alone are rounded; sums are float32, and torch
    before 2.8, which cannot sum products of bfloat16 so, rounds nothing here.
    """
    can = like.is_cuda and like.dtype == torch.float32 and hasattr(torch.ops.aten.bmm, "dtype")
    return can and _is_medium()


def _is_medium() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:
        # Torch refuses to answer where `torch.backends.*.fp32_precision` are set; these know no "medium" on CUDA.
        return False


def rounded(vectors: Tensor) -> Tensor:
    """Return vectors as their Gram matrices may have them."""
    return vectors.bfloat16() if rounds(vectors) else vectors


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
