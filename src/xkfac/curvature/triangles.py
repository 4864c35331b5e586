"""Symmetric matrices as triangles that lie in memory without gaps, folded by blocks: no table of indices is needed.

With F = h + k, k = F - h and h = F // 2, the matrix has the blocks T [h, h], S [h, k] and C [k, k] on and above its
diagonal. S is kept as it is. The upper triangle of C and the lower one of T, moved down by a row, fill a rectangle
[h + 1, k]: F (F + 1) / 2 numbers in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xkfac.curvature.gram import mirror_


def folded(matrix: Tensor) -> Tensor:
    """Return the triangles [groups, F (F + 1) / 2] of symmetric matrices [groups, F, F]."""
    size = matrix.shape[-1]
    half = size // 2
    rectangle = matrix.new_zeros(matrix.shape[0], half + 1, size - half)
    rectangle[:, : size - half] = matrix[:, half:, half:].triu()
    rectangle[:, 1:, :half] += matrix[:, :half, :half].tril()
    return torch.cat([matrix[:, :half, half:].flatten(1), rectangle.flatten(1)], 1)


def unfolded(triangle: Tensor, size: int) -> Tensor:
    """Return the symmetric matrices [groups, F, F] of triangles [groups, F (F + 1) / 2], for F = `size`."""
    half = size // 2
    side, rectangle = torch.split(triangle, [half * (size - half), (half + 1) * (size - half)], 1)
    rectangle = rectangle.view(len(triangle), half + 1, size - half)
    matrix = triangle.new_empty(triangle.shape[0], size, size)
    matrix[:, :half, half:] = side.view(len(triangle), half, size - half)
    matrix[:, half:, half:] = rectangle[:, : size - half]
    matrix[:, :half, :half] = rectangle[:, 1:, :half].mT
    return mirror_(matrix)  # what lies below the diagonal so far belongs to the other block
