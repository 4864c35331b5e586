"""Steps that take the stiff part of the penalty implicitly, so that a strong penalty does not slow learning down.

SGD bears a learning rate eta only up to 2 (1 + momentum) / (ls * mu) for the largest eigenvalue mu of the penalty's
Hessian, a limit that a handful of directions set for all. An implicit step along the penalty is one along
(I + eta ls H)^-1 times the gradient: it leaves directions alone in which the penalty is flat, shortens those in which
it is stiff, and ends where the other would, since the matrix is positive definite.

H is taken block by block, where the parameters are. With W~ = [s w, beta + s (b - mu)] and the unit's block
sum_k A_k (x) H_k, that of w is sum_k A_k (x) (S H_k S); it is diagonalised in the leading eigenvectors of its input
factors and all of its gradient factors. Few of these directions are stiff; the others count as flat, which makes the
product cheap enough for every step. Those of gamma, beta and b are C x C matrices.

The damping lambda adds lambda S^2 on the rows of w. With D = I + eta ls lambda S^2, (D + eta ls H)^-1 is
D^-1/2 (I + eta ls D^-1/2 H D^-1/2)^-1 D^-1/2: the same with other gradient factors, between two scalings of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.curvature.blocks import Block, Diagonal, Kronecker, Term, eigh, symmetrised
from xkfac.curvature.operator import Curvature
from xkfac.curvature.products import add_product_, product
from xkfac.model.merged_weight import BoundUnit
from xkfac.penalty.layout import Member
from xkfac.penalty.side_stream import side_by_side

_SWEEPS = 4  # of subspace iteration: leading eigenvectors need few, and for the last ones little depends on it
_FIRST = 32  # eigenvectors that are looked for at first, and twice as many while half of them or more are stiff
_LARGE = 2**20  # numbers of a weight from which on a GPU changes its gradient by itself, without a copy
_STIFF = 0.5  # eta ls h above which a direction is stiff; explicit steps along the others are stable up to 2


class Implicit:
    """Turns gradients of parameters that a penalty protects into those of steps that are implicit in the penalty.

    weight: eta * ls * strength, what the curvature and the damping are multiplied by. rank: how many directions of a
    unit's inputs are looked at, and more where `weight` times the curvature of the others is above `bearable`, so that
    explicit steps along them would not be stable. What has no Kronecker or diagonal block, and unmerged BN, are left as
    they are.
    """

    @torch.no_grad()
    def __init__(
        self,
        curvature: Curvature,
        damping: float,
        bound: Iterable[BoundUnit],
        weight: float,
        rank: int,
        bearable: float = 1.0,
        seed: int = 0,
    ) -> None:
        pairs: list[tuple[Tensor, _Part]] = []
        generator = torch.Generator("cpu").manual_seed(seed)
        for one in bound:
            block = curvature.block(one.unit.name)
            if block is not None and one.unit.kind != "unmerged":
                pairs += _parts_of(one, block, damping, weight, (rank, bearable), generator)
        alike: dict[tuple[Any, ...], list[tuple[Tensor, _Part]]] = {}
        for parameter, part in pairs:
            # A GPU waits for launches where weights are small; where they are large, and on a CPU, copies take longer.
            copied = parameter.device.type != "cpu" and parameter.numel() < _LARGE
            alone = 0 if copied else id(parameter)
            key = (type(part), parameter.shape, parameter.stride(), part.shape, alone)
            alike.setdefault(key, []).append((parameter, part))
        self._groups = [
            ([parameter for parameter, _ in pairs], type(pairs[0][1]).stacked([part for _, part in pairs]))
            for pairs in alike.values()
        ]
        self._largest_first = sorted(self._groups, key=lambda group: -sum(one.numel() for one in group[0]))

    @torch.no_grad()
    def __call__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of parameters as implicit steps have them, those of others as they are."""
        copies = [gradient.clone() for gradient in gradients]
        self._change({id(parameter): copy for parameter, copy in zip(parameters, copies, strict=True)})
        return copies

    @torch.no_grad()
    def step(self) -> None:
        """Change `.grad` of the parameters, after a backward pass and before the optimizer's step."""
        self._change({id(one): one.grad for one in self.parameters if one.grad is not None})

    def _change(self, gradients: dict[int, Tensor]) -> None:
        def change(members: Sequence[Tensor], part: _Part) -> None:
            # Members without a gradient count zero; what comes out for them is dropped.
            part([gradients[id(one)] if id(one) in gradients else torch.zeros_like(one) for one in members])

        met = [group for group in self._largest_first if any(id(member) in gradients for member in group[0])]
        if met:
            side_by_side([partial(change, *group) for group in met], met[0][0][0].device)

    @property
    def tensors(self) -> list[Tensor]:
        """All matrices, for a checkpoint."""
        return [getattr(part, name) for _, part in self._groups for name in part.tensors]

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Take the matrices of a checkpoint in place of the present ones; how many directions are stiff may differ."""
        places = [(part, name) for _, part in self._groups for name in part.tensors]
        for (part, name), tensor in zip(places, tensors, strict=True):
            setattr(part, name, tensor.to(getattr(part, name)))

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are changed."""
        return [parameter for members, _ in self._groups for parameter in members]


class _Scaled:
    """A diagonal matrix, `values` [n, ...]."""

    tensors = ("values",)

    def __init__(self, values: Tensor) -> None:
        self.values, self.shape = values, values.shape[1:]

    @classmethod
    def stacked(cls, parts: Sequence[Any]) -> _Scaled:
        return cls(torch.cat([part.values for part in parts]))

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        torch._foreach_mul_(list(gradients), list(self.values.unbind()))


class _Mixed:
    """Matrices [n, C, C] on vectors, `groups` of them on each one."""

    tensors = ("matrices",)

    def __init__(self, matrices: Tensor, groups: int) -> None:
        self.matrices, self.groups, self.shape = matrices, groups, (groups, *matrices.shape[1:])

    @classmethod
    def inverse(cls, curvature: Tensor, diagonal: Tensor, weight: float) -> _Mixed:
        """Return (I + weight * (curvature + diagonal))^-1, [groups, C, C], the diagonal given as a vector."""
        total = symmetrised(curvature.double()) + torch.diag_embed(diagonal.double().view(curvature.shape[:2]))
        unit = torch.eye(curvature.shape[1], dtype=torch.float64, device=curvature.device)
        inverse = symmetrised(torch.linalg.inv(unit + weight * total))
        return cls(inverse.to(curvature.dtype), len(curvature))

    @classmethod
    def stacked(cls, parts: Sequence[Any]) -> _Mixed:
        return cls(torch.cat([part.matrices for part in parts]), parts[0].groups)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        flat = torch.cat(list(gradients)).to(self.matrices.dtype).view(len(self.matrices), -1, 1)
        changed = torch.bmm(self.matrices, flat).view(len(gradients), -1)
        torch._foreach_copy_(list(gradients), list(changed.unbind()))


class _Turned:
    """(I + c H)^-1 on weights, G -> G + U_H (m * (U_H^T G U_A)) U_A^T, with m = 1 / (1 + c s) - 1 [n, C, r].

    The columns of G are in the order of `member`, in which weights lie in memory. rows: 1 / (1 + c lambda s^2)
    [n, C, 1], by which rows of G itself are multiplied where a strong damping is stiff too, else None.
    """

    def __init__(self, member: Member, left: Tensor, right: Tensor, change: Tensor, rows: Tensor | None = None) -> None:
        self.member, self.left, self.right, self.change, self.rows = member, left, right, change, rows
        self.shape = (*left.shape[:2], *right.shape, rows is None)

    @property
    def tensors(self) -> tuple[str, ...]:
        return ("left", "right", "change", *(() if self.rows is None else ("rows",)))

    @classmethod
    def inverse(
        cls,
        one: BoundUnit,
        terms: Sequence[tuple[Term, Tensor]],
        damping: Tensor,
        weight: float,
        rank: int,
        bearable: float,
        generator: torch.Generator,
    ) -> _Turned:
        """Return that of sum_k A_k (x) H_k on a unit's weight, given with the H_k, and damping, of the weight."""
        columns = one.weight[0].numel()
        damping = weight * damping.view(terms[0][1].shape[0], -1, 1)
        rows = 1 / (1 + damping) if bool((damping > _STIFF).any()) else None
        if rows is not None:
            terms = [(term, rows.sqrt() * right * rows.sqrt().mT) for term, right in terms]
        traces = [(_diagonal(term, columns).sum(1), _trace(right)) for term, right in terms]
        shares = [(term, share) for (term, _), (_, share) in zip(terms, traces, strict=True)]
        whole = [share[:, None, None] * right for (_, right), (share, _) in zip(terms, traces, strict=True)]
        right = _eigenvectors(torch.stack(whole).sum(0))
        along = [(right * torch.bmm(of, right)).sum(1)[:, :, None] for _, of in terms]
        total, tried = _weighted(shares, columns), min(_FIRST, rank, columns)
        while True:
            left = _leading(total, columns, tried, generator)
            scales = [own * _squares(term, left)[:, None, :] for own, (term, _) in zip(along, terms, strict=True)]
            scale = weight * torch.stack(scales).sum(0).clamp(min=0)
            steepest = scale.amax((0, 1))  # the first of these directions are the flattest
            few = 2 * int((steepest > _STIFF).sum()) < tried
            if tried == columns or few or (tried >= rank and float(steepest[0]) <= bearable):
                break
            tried = min(2 * tried, columns if tried >= rank else min(rank, columns))
        stiff = steepest > _STIFF
        stiff[: max(tried - rank, 0)] &= steepest[: max(tried - rank, 0)] > bearable
        left, change = left[:, :, stiff], 1 / (1 + scale[:, :, stiff]) - 1
        member = Member(one)
        if member.order is not None:
            left = left.index_select(1, member.order[:columns].to(left.device))
        return cls(member, left, right if rows is None else rows.sqrt() * right, change, rows)

    @classmethod
    def stacked(cls, parts: Sequence[Any]) -> _Turned:
        rank = max(part.left.shape[2] for part in parts)  # zeros beyond a part's own directions change nothing
        left, change = (
            torch.cat([F.pad(getattr(part, name), (0, rank - part.left.shape[2])) for part in parts])
            for name in ("left", "change")
        )
        rows = None if parts[0].rows is None else torch.cat([part.rows for part in parts])
        return cls(parts[0].member, left, torch.cat([part.right for part in parts]), change, rows)

    def __call__(self, gradients: Sequence[Tensor]) -> None:
        if not self.left.shape[2] and self.rows is None:
            return
        flats = [self.member.flat(gradient) for gradient in gradients]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        flat = flat.to(self.left.dtype).view(len(self.left), -1, self.left.shape[1])
        inner = product(self.right.mT, product(flat, self.left)).mul_(self.change)
        if self.rows is not None:
            flat.mul_(self.rows)
        add_product_(flat, product(self.right, inner), self.left.mT)
        if flat.data_ptr() != gradients[0].data_ptr():  # else it is the gradient itself
            parts = flat.view(-1, self.left.shape[1]).chunk(len(gradients))
            changed = [self.member.unflat(part).view(one.shape) for part, one in zip(parts, gradients, strict=True)]
            torch._foreach_copy_(list(gradients), changed)


_Part = _Scaled | _Mixed | _Turned
"""A symmetric matrix that changes the gradient of one parameter, or those of several of one shape, in place."""


def _parts_of(
    one: BoundUnit, block: Block, damping: float, weight: float, most: tuple[int, float], generator: torch.Generator
) -> list[tuple[Tensor, _Part]]:
    """Return the parameters of a unit, each with the inverse of its block of I + weight * (H + damping).

    most: the rank, and what is bearable beyond it.
    """
    groups, rows, columns = one.unit.shape
    if one.unit.kind == "free":
        return (
            [(one.weight, _scaled(one.weight, block.values + damping, weight))] if isinstance(block, Diagonal) else []
        )
    scale, inverse, offset = _affine(one)
    alone = one.unit.kind == "norm"  # a BN without a layer, as if in front of it were one of weights 1
    weights = torch.ones_like(inverse)[:, None] if alone else one.weight.flatten(1)
    # dW~ / dgamma of each channel, homogeneous coordinate included.
    along = torch.cat([weights * inverse[:, None], (offset * inverse)[:, None]], 1)
    affine = one.norm is not None and one.norm.weight is not None
    if isinstance(block, Diagonal):
        values = block.values.reshape(groups * rows, columns) + damping
        of = [] if alone else [(one.weight, values[:, : weights.shape[1]] * scale.square()[:, None])]
        of += [] if one.bias is None else [(one.bias, values[:, -1] * scale.square())]
        of += [(one.norm.bias, values[:, -1]), (one.norm.weight, (values * along.square()).sum(1))] if affine else []
        return [(parameter, _scaled(parameter, own, weight)) for parameter, own in of]
    if not isinstance(block, Kronecker):
        return []
    by_group = scale.view(groups, rows, 1)
    terms = [(term, by_group * term.right * by_group.mT) for term in block.terms]
    of_weight = damping * scale.square()
    pairs: list[tuple[Tensor, _Part]] = []
    if not alone:
        pairs.append((one.weight, _Turned.inverse(one, terms, of_weight, weight, *most, generator)))
    if not one.unit.homogeneous:
        return pairs
    affine = affine and one.norm.weight.requires_grad  # a fixed BN takes no steps
    last = [_diagonal(term, columns)[:, -1, None, None] for term in block.terms]
    if one.bias is not None:
        total = torch.stack([a * right for a, (_, right) in zip(last, terms, strict=True)]).sum(0)
        pairs.append((one.bias, _Mixed.inverse(total, of_weight, weight)))
    if affine:
        total = torch.stack([a * term.right for a, term in zip(last, block.terms, strict=True)]).sum(0)
        pairs.append((one.norm.bias, _Mixed.inverse(total, torch.full_like(scale, damping), weight)))
        rows_of = along.view(groups, rows, columns).to(total.dtype)
        squares = torch.stack([t.right * torch.bmm(rows_of, _times(t, rows_of.mT)) for t in block.terms]).sum(0)
        pairs.append((one.norm.weight, _Mixed.inverse(squares, damping * along.square().sum(1), weight)))
    return pairs


def _scaled(parameter: Tensor, curvature: Tensor, weight: float) -> _Scaled:
    return _Scaled(1 / (1 + weight * curvature.reshape(1, *parameter.shape)))


def _affine(one: BoundUnit) -> tuple[Tensor, Tensor, Tensor]:
    """Return s, 1 / sigma and b - mu [C] of a unit under population statistics; 1, 1 and 0 where it has no BN."""
    if one.norm is None:
        ones = torch.ones_like(one.weight.flatten(1)[:, 0])
        return ones, ones, torch.zeros_like(ones)
    inverse = (one.norm.running_var + one.norm.eps).rsqrt()
    offset = (0 if one.bias is None else one.bias) - one.norm.running_mean
    return inverse if one.norm.weight is None else inverse * one.norm.weight, inverse, offset


def _diagonal(term: Term, columns: int) -> Tensor:
    """Return the diagonal [groups, columns] of the first columns of A."""
    if term.low_rank:
        return term.left[:, :, :columns].square().sum(1)
    return term.left.diagonal(dim1=1, dim2=2)[:, :columns]


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=1, dim2=2).sum(1)


def _times(term: Term, vectors: Tensor) -> Tensor:
    """Return A V for V [groups, D, r], or the leading part of A where V has fewer rows."""
    columns = vectors.shape[1]
    left = term.left[:, :, :columns]
    return product(left.mT, product(left, vectors)) if term.low_rank else product(left[:, :columns], vectors)


def _squares(term: Term, vectors: Tensor) -> Tensor:
    """Return v^T A v [groups, r] for the columns v of V [groups, D, r], or that of the leading part of A."""
    return (vectors * _times(term, vectors)).sum(1)


def _weighted(terms: Sequence[tuple[Term, Tensor]], columns: int) -> list[Term]:
    """Return the leading part of sum_k share_k A_k, shares of sum 1, as one dense term and those of low rank."""
    shares = torch.stack([share for _, share in terms]).clamp(min=0)
    shares = (shares / shares.sum(0).clamp(min=torch.finfo(shares.dtype).tiny))[:, :, None, None]
    pairs = [(term, share) for (term, _), share in zip(terms, shares, strict=True)]
    result = [replace(term, left=share.sqrt() * term.left[:, :, :columns]) for term, share in pairs if term.low_rank]
    dense = [(term.left[:, :columns, :columns], share) for term, share in pairs if not term.low_rank]
    if dense:
        total = dense[0][0] * dense[0][1]
        for left, share in dense[1:]:
            total.addcmul_(left, share)
        result.append(replace(pairs[0][0], left=total, low_rank=False))
    return result


def _leading(terms: Sequence[Term], columns: int, rank: int, generator: torch.Generator) -> Tensor:
    """Return leading eigenvectors [groups, columns, rank] of the sum of some A, by subspace iteration."""
    like = terms[0].left
    start = torch.randn(len(like), columns, rank, generator=generator, dtype=torch.float64)
    vectors: Tensor = torch.linalg.qr(start.to(like))[0]
    for _ in range(_SWEEPS - 1 if rank < columns else 0):
        vectors = torch.linalg.qr(torch.stack([_times(term, vectors) for term in terms]).sum(0))[0]
    image = torch.stack([_times(term, vectors) for term in terms]).sum(0)
    return product(vectors, _eigenvectors(product(vectors.mT, image)))  # its own ones within the subspace


def _eigenvectors(matrix: Tensor) -> Tensor:
    """Return those of symmetric matrices [n, C, C] as columns; in float64 where that takes little time or is needed."""
    scale = _trace(matrix).clamp(min=torch.finfo(matrix.dtype).tiny)[:, None, None]  # small numbers would underflow
    scaled = symmetrised(matrix / scale)
    if matrix.shape[1] > 512:
        with suppress(RuntimeError):  # many equal eigenvalues, those of few examples, on which float32 may not converge
            vectors: Tensor = torch.linalg.eigh(scaled)[1]
            return vectors
    return eigh(scaled)[1].to(matrix.dtype)
