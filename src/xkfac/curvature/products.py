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
    result = _by_onednn(first, second)
    return first @ second if result is None else result


def add_product_(total: Tensor, first: Tensor, second: Tensor, scale: float = 1.0) -> None:
    """Add scale * A B to `total` [n, ., .], which has the dtype that products are summed in."""
    if first.dtype == total.dtype:
        result = _by_onednn(first, second)
        if result is None:
            total.baddbmm_(first, second, alpha=scale)
        else:
            total.add_(result, alpha=scale)
    elif first.dtype == torch.float64:
        total.add_(first @ second, alpha=scale)
    elif first.is_cuda:
        torch.baddbmm(total, first, second, out_dtype=total.dtype, alpha=scale, out=total)
    else:
        add_product_(total, first.to(total.dtype), second.to(total.dtype), scale)


def in_rows(vectors: Tensor) -> Tensor:
    """Return vectors [n, F, K] with every feature in a row, where oneDNN takes products of some features with others.

    It would copy what lies otherwise for each of them.
    """
    return vectors if _onednn_for(vectors) is None else vectors.contiguous()


def _by_onednn(first: Tensor, second: Tensor) -> Tensor | None:
    """Return A B [n, ., .] by oneDNN; None where it cannot be used, or the matrices are small."""
    multiply_adds = first.shape[1] * first.shape[2] * second.shape[2]
    linear = _onednn_for(first, second) if multiply_adds >= _LARGE else None
    if linear is None:
        return None
    products = [_product(linear, a, b) for a, b in zip(first.unbind(), second.unbind(), strict=True)]
    return products[0][None] if len(products) == 1 else torch.stack(products)


def _product(linear: Callable[..., Tensor], first: Tensor, second: Tensor) -> Tensor:
    """Return A B by x, w -> x w^T, where gaps between the rows of w would make oneDNN a thousand times slower."""
    swap = _is_dense(first) and not _is_dense(second)
    x, w = (second.mT, first) if swap else (first, second.mT)
    result = linear(x if 1 in x.stride() else x.contiguous(), _without_gaps(w), None, "none", [], "")
    return result.mT if swap else result


def _is_dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.mT.is_contiguous()


def _without_gaps(matrix: Tensor) -> Tensor:
    """Return a matrix without gaps, its rows and columns in the order in which they lie in memory."""
    return matrix.mT.contiguous().mT if matrix.stride(0) == 1 else matrix.contiguous()


def _onednn_for(*matrices: Tensor) -> Callable[..., Tensor] | None:
    """Return `_onednn()` where it can take some matrices: float32 on a CPU, without a graph."""
    plain = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in matrices)
    graph = torch.is_grad_enabled() and any(one.requires_grad for one in matrices)
    return _onednn() if plain and not graph and torch.backends.mkldnn.enabled else None


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """Return oneDNN's x, w -> x w^T where torch has it and MKL may be slower: on x86 processors with AVX-512.

    The choice follows from the machine alone, so that a run is repeated to the bit.
    """
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (available and torch.backends.cpu.get_cpu_capability() == "AVX512"):
        return None
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
