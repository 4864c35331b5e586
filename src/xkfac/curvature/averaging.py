"""The average of Kronecker products: one product with the trace of their weighted sum, however a scale is split.

A (x) H is the same product as (c A) (x) (H / c), so that factors have no size of their own. Here every product of a
task t has its size evenly in both, tr(A_t) = tr(H_t), and the factors are averaged by themselves; the scale of the
result is that of the sum. With the traces a_t and h_t of the factors as they are and weights w_t,

    p_t = w_t sqrt(a_t h_t) / sum_t w_t sqrt(a_t h_t)
    A (x) H = (sum_t w_t a_t h_t) (sum_t p_t A_t / a_t) (x) (sum_t p_t H_t / h_t)

It does not change where a scale moves from A_t to H_t, for equal tasks it is their sum, and the weights act once.

Factors over several units have a scale per unit that can move, {A}_{l,l'} -> c_l c_l' {A}_{l,l'}. What multiplies them
are then numbers per unit: sqrt(u_l u_l') on the block of the units l and l', with u_l the number for unit l by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Partition:
    """The units that factors extend over: columns of A and rows of H per unit, and which inputs are extended by a 1.

    The 1, the homogeneous coordinate, is the last column of its unit.
    """

    columns: tuple[int, ...]
    rows: tuple[int, ...]
    homogeneous: tuple[bool, ...]

    @classmethod
    def whole(cls, left: Tensor, right: Tensor, *, homogeneous: bool = False) -> Partition:
        """Return that of one unit with the factors A [groups, ., D] and H [groups, C, C]."""
        return cls((left.shape[2],), (right.shape[2],), (homogeneous,))


def average(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], weights: Sequence[float], units: Partition
) -> tuple[Tensor, Tensor]:
    """Return A [groups, D, D] and H [groups, C, C] of the average of products with these factors."""
    traces = _traces(_diagonals(lefts), units.columns), _traces(_diagonals(rights), units.rows)
    of_left, of_right = _multipliers(*traces, weights)
    return _mixed(lefts, of_left, units.columns), _mixed(rights, of_right, units.rows)


def average_means(
    roots: Sequence[Tensor], rights: Sequence[Tensor], before: Tensor, weights: Sequence[float], units: Partition
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the root R, H and the scatter of the average of two products whose A = R^T R are kept by roots.

    The rows of a root [groups, r, D] are the means of a population up to a scale. With the scale taken off, R_t =
    s_t m_t, and with v_t = s_t^2 times the weight of A_t,

        v_1 m_1^T m_1 + v_2 m_2^T m_2 = (v_1 + v_2) m^T m + v_1 v_2 / (v_1 + v_2) (m_1 - m_2)^T (m_1 - m_2)

    with the common mean m. The last part, the scatter between the two, has no place in a root of the same size. It
    belongs to the covariance A' in the average before this one, with the gradient factor H' = `before`, times tr(H) /
    tr(H'), so that the trace of the whole stays what it is. It is returned by its own root [groups, r, D].

    The scale is the homogeneous coordinate where there is one: it is 1 in every mean, so that the scatter has none, and
    a bias whose curvature is zero in both tasks keeps it. Without one, the scale is the norm of R_t.
    """
    traces = _traces([root.square().sum(1) for root in roots], units.columns), _traces(_diagonals(rights), units.rows)
    of_left, of_right = _multipliers(*traces, weights)
    scales = [_scale(root, units) for root in roots]
    first, second = (
        root / _per_column(torch.where(scale == 0, 1, scale), root, units)
        for root, scale in zip(roots, scales, strict=True)
    )
    v, w = (share * scale.square() for share, scale in zip(of_left, scales, strict=True))
    total = v + w
    mean = first * _per_column(_over(v, total), first, units) + second * _per_column(_over(w, total), first, units)
    right = _mixed(rights, of_right, units.rows)
    outer, inner = _traces(_diagonals((right, before)), units.rows)
    share = (_over(v * w, total) * _over(outer, inner)).sqrt()
    return mean * _per_column(total.sqrt(), mean, units), right, (first - second) * _per_column(share, mean, units)


def _multipliers(
    left: Sequence[Tensor], right: Sequence[Tensor], weights: Sequence[float]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return what every A and every H is multiplied by, [groups, units], from their traces.

    A has the mean of the traces of the A_t; the rest of the scale is in H.
    """
    traces = list(zip(weights, left, right, strict=True))
    shares = torch.stack([w * (a * h).sqrt() for w, a, h in traces])
    shares = _over(shares, shares.sum(0))
    size = (shares * torch.stack(list(left))).sum(0)
    scale = _over(torch.stack([w * a * h for w, a, h in traces]).sum(0), size)
    of_left = [_over(p, a) * size for p, a in zip(shares, left, strict=True)]
    return of_left, [_over(p, h) * scale for p, h in zip(shares, right, strict=True)]


def _over(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, zero where b is."""
    return torch.where(b > 0, a / torch.where(b > 0, b, 1), 0)


def _diagonals(matrices: Sequence[Tensor]) -> list[Tensor]:
    return [matrix.diagonal(dim1=1, dim2=2) for matrix in matrices]


def _traces(diagonals: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the sums of diagonals [groups, F] per unit, [groups, units].

    In float64: products of traces have twice the range of the factors.
    """
    parts = [torch.split(diagonal.double(), list(sizes), 1) for diagonal in diagonals]
    return [torch.stack([part.sum(1).clamp(min=0) for part in each], 1) for each in parts]


def _mixed(matrices: Sequence[Tensor], multipliers: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Return the sum of matrices [groups, F, F], block {l,l'} of each multiplied by sqrt(u_l u_l')."""
    dtype = functools.reduce(torch.promote_types, (matrix.dtype for matrix in matrices))
    total = torch.zeros_like(matrices[0], dtype=dtype)
    repeats = torch.tensor(sizes, device=total.device)
    for matrix, u in zip(matrices, multipliers, strict=True):
        if len(sizes) == 1:
            total.addcmul_(matrix.to(dtype), u.to(dtype)[:, :, None])
        else:
            root = u.sqrt().to(dtype).repeat_interleave(repeats, 1)
            total.addcmul_(matrix.to(dtype), root[:, :, None] * root[:, None, :])
    return total


def _scale(root: Tensor, units: Partition) -> Tensor:
    """Return the scale [groups, units] of the means that a root [groups, r, D] holds, 0 where it is zero."""
    scales = []
    for part, homogeneous in zip(torch.split(root.double(), list(units.columns), 2), units.homogeneous, strict=True):
        norm, last = part.square().sum((1, 2)).sqrt(), part[:, 0, -1]
        scales.append(torch.where(last == 0, norm, last) if homogeneous else norm)
    return torch.stack(scales, 1)


def _per_column(values: Tensor, like: Tensor, units: Partition) -> Tensor:
    """Return numbers per unit [groups, units] as numbers per column [groups, 1, D], in the dtype of `like`."""
    repeats = torch.tensor(units.columns, device=values.device)
    return values.to(like.dtype).repeat_interleave(repeats, 1)[:, None, :]
