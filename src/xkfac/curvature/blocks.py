"""The algebra of curvature blocks: products, traces, dense matrices, averages. It knows nothing of networks.

A block acts on displacements of a merged weight, [groups, C, D], and stands for one symmetric positive semi-definite
matrix per group on vec of it, rows running fastest: (A (x) H) vec(V) = vec(H V A).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from xkfac.curvature.averaging import Partition, average, average_means
from xkfac.curvature.products import add_product_, product
from xkfac.errors import XkfacError


@dataclass(frozen=True)
class Term:
    """A (x) H with the input factor A [groups, D, D] and the gradient factor H [groups, C, C].

    With `low_rank`, `left` is a root R [groups, r, D] of A = R^T R.
    """

    left: Tensor
    right: Tensor
    low_rank: bool = False

    def product(self, displacement: Tensor) -> Tensor:
        """Return H V A for V [groups, C, D]."""
        if self.low_rank:
            return self.right @ (displacement @ self.left.mT) @ self.left
        return self.right @ displacement @ self.left

    def add_product(self, displacement: Tensor, out: Tensor) -> None:
        """Add H V A to `out`, both [groups, C, D], in place."""
        inner = product(displacement, self.left.mT) if self.low_rank else displacement
        add_product_(out, product(self.right, inner), self.left)

    @property
    def dense_left(self) -> Tensor:
        """The input factor A [groups, D, D]."""
        return symmetrised(self.left.mT @ self.left) if self.low_rank else self.left


@dataclass(frozen=True)
class Kronecker:
    """A sum of Kronecker products, sum_k A_k (x) H_k.

    Where the last term is kept by its root, the root's rows are, up to a scale, the means of a population (one per
    location) whose covariance is the input factor of the term before it.
    """

    terms: tuple[Term, ...]

    def product(self, displacement: Tensor) -> Tensor:
        """Return sum_k H_k V A_k (eq. bp for one layer) for V [groups, C, D]."""
        total = self.terms[0].product(displacement)
        for term in self.terms[1:]:
            total = total + term.product(displacement)
        return total

    def add_product(self, displacement: Tensor, out: Tensor) -> None:
        """Add sum_k H_k V A_k to `out`, both [groups, C, D], in place."""
        for term in self.terms:
            term.add_product(displacement, out)

    def dense(self) -> Tensor:
        """Return the matrices [groups, C D, C D]."""
        return torch.stack([_kron(term.dense_left, term.right) for term in self.terms]).sum(0)

    def diagonal(self) -> Tensor:
        """Return the diagonal, [groups, C, D]."""
        parts = [t.right.diagonal(dim1=1, dim2=2)[:, :, None] * _left_diagonal(t)[:, None, :] for t in self.terms]
        return torch.stack(parts).sum(0)

    def average(self, other: Kronecker, own: float, others: float, *, homogeneous: bool = False) -> Kronecker:
        """Return own * (this) + others * (the other), every two terms as one product that has their trace.

        The size stays the same. `homogeneous`: the last column of the input factors is that of a coordinate 1.
        """
        unit = Partition.whole(self.terms[0].left, self.terms[0].right, homogeneous=homogeneous)
        return Kronecker(_averaged(self.terms, other.terms, (own, others), unit))

    def scale(self, factor: float) -> Kronecker:
        """Return factor times the block."""
        return Kronecker(tuple(replace(t, right=factor * t.right) for t in self.terms))

    def join(self, other: Kronecker) -> Kronecker:
        """Return the exact sum of two blocks: all terms of both."""
        return Kronecker(self.terms + other.terms)


@dataclass(frozen=True)
class Diagonal:
    """A diagonal block, `values` [groups, C, D]."""

    values: Tensor

    def product(self, displacement: Tensor) -> Tensor:
        """Return the elementwise product with V [groups, C, D]."""
        return self.values * displacement

    def add_product(self, displacement: Tensor, out: Tensor) -> None:
        """Add the elementwise product with V to `out`, both [groups, C, D], in place."""
        out.addcmul_(self.values, displacement)

    def dense(self) -> Tensor:
        """Return the matrices [groups, C D, C D]."""
        return torch.diag_embed(self.values.mT.flatten(1))

    def diagonal(self) -> Tensor:
        """Return the diagonal, [groups, C, D]."""
        return self.values

    def average(self, other: Diagonal, own: float, others: float) -> Diagonal:
        """Return own * (this) + others * (the other), which is exact."""
        return Diagonal(own * self.values + others * other.values)

    def scale(self, factor: float) -> Diagonal:
        """Return factor times the block."""
        return Diagonal(factor * self.values)

    def join(self, other: Diagonal) -> Diagonal:
        """Return the exact sum of two blocks."""
        return Diagonal(self.values + other.values)


@dataclass(frozen=True)
class Corrected:
    """Exact variances `scales` [groups, C, D] in the Kronecker eigenbasis U_A, U_H of the factors.

    `left`, `right` hold the eigenvectors as columns, `left_values`, `right_values` the factors' eigenvalues, from
    which the factors are rebuilt when blocks are averaged.
    """

    left: Tensor
    right: Tensor
    left_values: Tensor
    right_values: Tensor
    scales: Tensor

    def product(self, displacement: Tensor) -> Tensor:
        """Return U_H (s * (U_H^T V U_A)) U_A^T for V [groups, C, D]."""
        inner = self.scales * (self.right.mT @ displacement @ self.left)
        return self.right @ inner @ self.left.mT

    def add_product(self, displacement: Tensor, out: Tensor) -> None:
        """Add U_H (s * (U_H^T V U_A)) U_A^T to `out`, both [groups, C, D], in place."""
        inner = product(product(self.right.mT, displacement), self.left).mul_(self.scales)
        add_product_(out, product(self.right, inner), self.left.mT)

    def dense(self) -> Tensor:
        """Return the matrices [groups, C D, C D]."""
        basis = _kron(self.left, self.right)
        return basis * self.scales.mT.flatten(1)[:, None, :] @ basis.mT

    def diagonal(self) -> Tensor:
        """Return the diagonal, [groups, C, D]."""
        return self.right.square() @ self.scales @ self.left.square().mT

    def average(self, other: Corrected, own: float, others: float) -> Corrected:
        """Return the block in the eigenbasis of the average of the two products of factors.

        Its scales are the exact diagonal of own * (this) + others * (the other) in that basis.
        """
        left = _rebuild(self.left, self.left_values), _rebuild(other.left, other.left_values)
        right = _rebuild(self.right, self.right_values), _rebuild(other.right, other.right_values)
        basis = eigenbasis(*average(left, right, (own, others), Partition.whole(self.left, self.right)))
        scales = own * self._rotated(basis) + others * other._rotated(basis)
        return Corrected(basis.left, basis.right, basis.left_values, basis.right_values, scales)

    def _rotated(self, basis: Corrected) -> Tensor:
        return (basis.right.mT @ self.right).square() @ self.scales @ (basis.left.mT @ self.left).square().mT

    def scale(self, factor: float) -> Corrected:
        """Return factor times the block."""
        return Corrected(self.left, self.right, self.left_values, factor * self.right_values, factor * self.scales)

    def join(self, other: Corrected) -> Corrected:
        """Refuse: a sum of corrected blocks is no corrected block."""
        raise XkfacError("eigenvalue-corrected curvature cannot keep all terms; use keep='average'")


@dataclass(frozen=True)
class KhatriRao:
    """Blocks {A}_{l,l'} (x) {H}_{l,l'} for all pairs of several units: the Khatri-Rao product A * H.

    `terms` hold A [1, sum D_l, sum D_l] and H [1, sum C_l, sum C_l]; `rows` and `columns` partition them.
    """

    terms: tuple[Term, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def product(self, displacements: Sequence[Tensor]) -> list[Tensor]:
        """Return sum_{l'} {H}_{l,l'} V_{l'} {A}_{l,l'}^T (eq. bp) for V_l [1, C_l, D_l], one l after the other."""
        totals = [torch.zeros_like(displacement) for displacement in displacements]
        self.add_product(displacements, totals)
        return totals

    def add_product(self, displacements: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Add the products to `out`, one l after the other, in place."""
        for term in self.terms:
            if term.low_rank:
                roots = torch.split(term.left[0], list(self.columns), 1)
                inner = torch.cat([product(v, root.mT[None]) for v, root in zip(displacements, roots, strict=True)], 1)
                outer = torch.split(product(term.right, inner), list(self.rows), 1)
                for total, part, root in zip(out, outer, roots, strict=True):
                    add_product_(total, part, root[None])
        for displacement, (left, rights) in zip(displacements, self._dense, strict=False):
            parts = torch.split(product(displacement.expand(len(left), -1, -1), left), list(self.columns), 2)
            for total, right, part in zip(out, rights, parts, strict=True):
                add_product_(total, right[None], part.flatten(0, 1)[None])

    @cached_property
    def _dense(self) -> list[tuple[Tensor, list[Tensor]]]:
        """For every l', {A_k}_{l',:} [terms, D_l', sum D_l] and {H_1}_{l,l'}, {H_2}_{l,l'}, ... side by side by l.

        All terms that are no roots at once, and cut once: a training step has no time to copy them.
        """
        terms = [term for term in self.terms if not term.low_rank]
        if not terms:
            return []
        lefts = torch.split(torch.cat([term.left for term in terms]), list(self.columns), 1)
        rights = [_blocks(term.right[0], self.rows) for term in terms]
        units = range(len(self.rows))
        return [
            (left.contiguous(), [torch.cat([blocks[i][j] for blocks in rights], 1) for i in units])
            for j, left in enumerate(lefts)
        ]

    def dense(self) -> Tensor:
        """Return the matrix over all units one after the other, [sum C_l D_l, sum C_l D_l]."""
        total = []
        for term in self.terms:
            left, right = _blocks(term.dense_left[0], self.columns), _blocks(term.right[0], self.rows)
            pairs = [zip(a, h, strict=True) for a, h in zip(left, right, strict=True)]
            total.append(torch.cat([torch.cat([torch.kron(a, h) for a, h in row], 1) for row in pairs]))
        return torch.stack(total).sum(0)

    def own_block(self, place: int) -> Kronecker:
        """Return the block {A}_{l,l} (x) {H}_{l,l} of the unit at a place."""
        return Kronecker(self.cut([place]).terms)

    def cut(self, places: Sequence[int]) -> KhatriRao:
        """Return the blocks between the units at some places alone."""
        starts = ([0, *accumulate(sizes)] for sizes in (self.columns, self.rows))
        columns, rows = ([i for place in places for i in range(*of[place : place + 2])] for of in starts)
        lefts = [(t.left if t.low_rank else t.left[:, columns])[:, :, columns] for t in self.terms]
        rights = [t.right[:, rows][:, :, rows] for t in self.terms]
        terms = [replace(t, left=a, right=h) for t, a, h in zip(self.terms, lefts, rights, strict=True)]
        return KhatriRao(tuple(terms), *(tuple(of[place] for place in places) for of in (self.rows, self.columns)))

    def average(self, other: KhatriRao, own: float, others: float, *, homogeneous: Sequence[bool] = ()) -> KhatriRao:
        """Return own * (this) + others * (the other), every two terms as one; a unit's own block as `Kronecker` does.

        `homogeneous`: of which units the last column of the input factors is that of a coordinate 1.
        """
        units = Partition(self.columns, self.rows, tuple(homogeneous) or (False,) * len(self.rows))
        return KhatriRao(_averaged(self.terms, other.terms, (own, others), units), self.rows, self.columns)

    def scale(self, factor: float) -> KhatriRao:
        """Return factor times the product."""
        return KhatriRao(Kronecker(self.terms).scale(factor).terms, self.rows, self.columns)

    def join(self, other: KhatriRao) -> KhatriRao:
        """Return the exact sum: all terms of both."""
        return KhatriRao(self.terms + other.terms, self.rows, self.columns)


Block = Kronecker | Diagonal | Corrected


def is_zero(block: Block) -> bool:
    """Whether a block is exactly zero; a Kronecker product of positive semi-definite factors is if its trace is."""
    if isinstance(block, Kronecker):
        traces = (t.right.diagonal(dim1=1, dim2=2).sum(1) * _left_diagonal(t).sum(1) for t in block.terms)
        return not any(bool(trace.any()) for trace in traces)
    return not bool((block.scales if isinstance(block, Corrected) else block.values).any())


def symmetrised(matrix: Tensor) -> Tensor:
    """Return matrices [..., F, F], symmetric up to rounding, as exactly symmetric ones."""
    return (matrix + matrix.mT) / 2


def _averaged(
    ours: Sequence[Term], theirs: Sequence[Term], weights: tuple[float, float], units: Partition
) -> tuple[Term, ...]:
    """Return the averages of two sums of terms, term by term."""
    if len(ours) != len(theirs):
        raise XkfacError(f"{len(ours)} and {len(theirs)} terms have no average; estimate both alike, or keep all terms")
    first, second = ours[-1], theirs[-1]
    rooted = len(ours) > 1 and first.low_rank and second.low_rank and first.left.shape == second.left.shape
    dense = list(zip(ours, theirs, strict=True))[: -1 if rooted else None]
    terms = [Term(*average((a.dense_left, b.dense_left), (a.right, b.right), weights, units)) for a, b in dense]
    if not rooted:
        return tuple(terms)
    *finer, last = terms
    both = (first.left, second.left), (first.right, second.right)
    root, right, scatter = average_means(*both, last.right, weights, units)
    last = Term(last.left + symmetrised(scatter.mT @ scatter), last.right)
    return (*finer, last, Term(root, right, low_rank=True))


def root_term(root: Tensor, right: Tensor) -> Term:
    """Return the term of A = R^T R for a root R [groups, r, D], kept as a root where that is the cheaper form."""
    if 4 * root.shape[1] <= root.shape[2]:
        return Term(root, right, low_rank=True)
    return Term(symmetrised(root.mT @ root), right)


def parts(block: Block | KhatriRao) -> dict[str, Tensor]:
    """Return the tensors of a block by name; `assemble` is the inverse."""
    if isinstance(block, (Kronecker, KhatriRao)):
        named = {}
        for place, term in enumerate(block.terms):
            named[f"{'root' if term.low_rank else 'left'}.{place}"] = term.left
            named[f"right.{place}"] = term.right
        return named
    return {field.name: getattr(block, field.name) for field in fields(block)}


def assemble(like: type[Block], named: Mapping[str, Tensor]) -> Block:
    """Return the block of a class from its tensors by name."""
    if like is Kronecker:
        return Kronecker(_terms(named))
    return Diagonal(**named) if like is Diagonal else Corrected(**named)


def _terms(named: Mapping[str, Tensor]) -> tuple[Term, ...]:
    terms = []
    for place in range(len(named) // 2):
        low_rank = f"root.{place}" in named
        left = named[f"{'root' if low_rank else 'left'}.{place}"]
        terms.append(Term(left, named[f"right.{place}"], low_rank))
    return tuple(terms)


def khatri_rao(named: Mapping[str, Tensor], rows: Sequence[int], columns: Sequence[int]) -> KhatriRao:
    """Return a Khatri-Rao product from its tensors by name and its partitions."""
    return KhatriRao(_terms(named), tuple(rows), tuple(columns))


def eigenbasis(left: Tensor, right: Tensor, *, empty: bool = False) -> Corrected:
    """Return the eigenbasis of A [groups, D, D] and H [groups, C, C]; its scales are those of A (x) H.

    With `empty` shapes and dtypes are right, and the numbers are void.
    """
    sides = [(one[..., 0], one) if empty else eigh(one) for one in (left, right)]
    (left_values, left_vectors), (right_values, right_vectors) = sides
    scales = right_values[:, :, None] * left_values[:, None, :]
    return Corrected(left_vectors, right_vectors, left_values, right_values, scales)


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, none negative, and eigenvectors of positive semi-definite matrices [..., F, F].

    In float64: of factors of low rank, with their many equal eigenvalues, float32 may not converge. Where float64 does
    not either, the last digits of the diagonal are changed, which tells the eigenvalues apart.
    """
    wide = matrix.double()
    try:
        values, vectors = torch.linalg.eigh(wide)
    except RuntimeError:  # LinAlgError, a name that torch does not export
        size = torch.linspace(1, 2, wide.shape[-1], dtype=wide.dtype, device=wide.device)
        largest = wide.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True)
        values, vectors = torch.linalg.eigh(wide + torch.diag_embed(1e-13 * largest * size))
    return values.clamp(min=0).to(matrix.dtype), vectors.to(matrix.dtype)


def _blocks(matrix: Tensor, sizes: Sequence[int]) -> list[list[Tensor]]:
    """Return the blocks {M}_{i,j} of a matrix partitioned alike in rows and columns."""
    rows = torch.split(matrix, list(sizes), 0)
    return [[block.contiguous() for block in torch.split(row, list(sizes), 1)] for row in rows]


def _kron(left: Tensor, right: Tensor) -> Tensor:
    """Return A (x) H a group: [groups, C D, C D]."""
    groups, columns, rows = left.shape[0], left.shape[1], right.shape[1]
    return torch.einsum("gij,gab->giajb", left, right).reshape(groups, columns * rows, columns * rows)


def _left_diagonal(term: Term) -> Tensor:
    if term.low_rank:
        return term.left.square().sum(1)
    return term.left.diagonal(dim1=1, dim2=2)


def _rebuild(vectors: Tensor, values: Tensor) -> Tensor:
    return vectors * values[:, None, :] @ vectors.mT
