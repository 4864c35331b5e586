"""Products of matrices: as coarse as torch's own setting allows, and with the fastest library that torch has.

On a CPU torch multiplies float32 matrices with MKL, which on AMD's processors uses half of what AVX-512 can do. oneDNN,
with which torch computes convolutions, uses all of it, at the same precision: large products are twice as fast.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_LARGE = 2**21  # multiply-adds of a product, below which the way to oneDNN costs more than it saves


def rounds(like: Tensor) -> bool:
    """Whether products with `like` may be of bfloat16: float32 on a CUDA device at the matmul precision "medium".

    At "high" they are of TF32, which torch sees to by itself. Factors alone are rounded; sums are float32, and torch
    before 2.8, which cannot sum products of bfloat16 so, rounds nothing here.
    """
    if not (like.is_cuda and like.dtype == torch.float32 and hasattr(torch.ops.aten.bmm, "dtype")):
        return False
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


def product(first: Tensor, second: Tensor) -> Tensor:
    """Return A B [n, ., .] in the dtype that products are summed in."""
    dtype = summed_in(first.dtype)
    if first.dtype != dtype and first.is_cuda:
        return torch.bmm(first, second, out_dtype=dtype)
    first, second = first.to(dtype), second.to(dtype)
    quick = _quick(first, second)
    return first @ second if quick is None else quick


def add_product_(total: Tensor, first: Tensor, second: Tensor, scale: float = 1.0) -> None:
    """Add scale * A B to `total` [n, ., .], which has the dtype that products are summed in."""
    if first.dtype == total.dtype:
        quick = _quick(first, second)
        if quick is None:
            total.baddbmm_(first, second, alpha=scale)
        else:
            total.add_(quick, alpha=scale)
    elif first.dtype == torch.float64:
        total.add_(first @ second, alpha=scale)
    elif first.is_cuda:
        torch.baddbmm(total, first, second, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        add_product_(total, first.to(total.dtype), second.to(total.dtype), scale)


def in_rows(vectors: Tensor) -> Tensor:
    """Return vectors [n, F, K] for products of some of the features with others: F rows where that is quick."""
    large = vectors.device.type == "cpu" and vectors.dtype == torch.float32 and vectors[0].numel() >= _LARGE >> 7
    return vectors.contiguous() if large and torch.backends.mkldnn.enabled and _onednn() is not None else vectors


def _quick(first: Tensor, second: Tensor) -> Tensor | None:
    """Return A B [n, ., .] by oneDNN: of large float32 matrices on a CPU, without a graph; else None."""
    if first.device.type != "cpu" or first.dtype != torch.float32 or second.dtype != torch.float32:
        return None
    if first.shape[1] * first.shape[2] * second.shape[2] < _LARGE or not torch.backends.mkldnn.enabled:
        return None
    onednn = _onednn()
    if onednn is None or (torch.is_grad_enabled() and (first.requires_grad or second.requires_grad)):
        return None
    parts = [_by(onednn, a, b) for a, b in zip(first.unbind(), second.unbind(), strict=True)]
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _by(onednn: Callable[..., Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Return A B by x, w -> x w^T, of which w has to be dense: oneDNN has no quick way for other ones."""
    swap = _is_dense(first) and not _is_dense(second)
    x, w = (second.mT, first) if swap else (first, second.mT)
    result = onednn(x if 1 in x.stride() else x.contiguous(), _without_gaps(w), None, "none", [], "")
    return result.mT if swap else result


def _is_dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.mT.is_contiguous()


def _without_gaps(matrix: Tensor) -> Tensor:
    """Return a matrix as it lies in memory, but without numbers of others between its own."""
    return matrix.mT.contiguous().mT if matrix.stride(0) == 1 else matrix.contiguous()


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """Return oneDNN's x, w -> x w^T where torch has it and MKL is the slower one: on x86 processors with AVX-512.

    On Intel's own they are level. The choice follows from the machine alone, so that a run is repeated to the bit.
    """
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (available and torch.backends.cpu.get_cpu_capability() == "AVX512"):
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
