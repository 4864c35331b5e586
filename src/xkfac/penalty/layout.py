"""Where the units of a network lie in one flat tensor, those of one shape on top of each other, and their products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xkfac.curvature.blocks import Block, Corrected, Diagonal, Kronecker, assemble, parts
from xkfac.curvature.operator import Curvature
from xkfac.curvature.products import add_product_, product, rounds
from xkfac.model.merged_weight import BoundUnit

_ALIGNMENT = 16  # numbers: where every group starts, as vectorised kernels like it

# Of how many numbers a row of W~ has a multiple, zeros at its end. The homogeneous coordinate makes it odd, and then
# the tensor cores of a GPU stand idle.
ROW = {"cuda": 8}

# The most columns of units whose factors are copied into a stack. A GPU has room to spare in products of that size and
# waits for launches; a CPU does not.
WIDEST = {"cuda": 1200}
_WIDEST_ELSEWHERE = 64


class _Place:
    """Where matrices W~ [groups, rows, columns] lie in a flat tensor: from `start`, their rows `width` apart."""

    def __init__(self, shape: tuple[int, int, int], width: int, start: int = 0) -> None:
        self.shape, self.width, self.start = shape, width, start

    def whole(self, flat: Tensor) -> Tensor:
        """Return W~ [groups, rows, columns]."""
        return self._view(flat, self.shape[2])

    def padded(self, flat: Tensor) -> Tensor:
        """Return W~ with its zeros, [groups, rows, width]."""
        return self._view(flat, self.width)

    def _view(self, flat: Tensor, columns: int) -> Tensor:
        groups, rows, _ = self.shape
        steps = (rows * self.width, self.width, 1)
        return flat.as_strided((groups, rows, columns), steps, self.start + int(flat.storage_offset()))


class Member(_Place):
    """A unit and its part of a flat tensor, which starts at `start`.

    role: `merged`, a layer with BN, or BN alone; `plain`, a layer with a bias; `whole`, what has one tensor as its W~.
    width: how far a row is from the next, a multiple of `row` numbers, of which those beyond `columns` are zero.
    order: where a convolution's weight lies in memory with its channels last, the columns of W~ are in that order here,
    so that no step has to copy it: column j is the former column order[j].
    """

    def __init__(self, bound: BoundUnit, row: int = 1) -> None:
        self.bound, self.name = bound, bound.unit.name
        groups, rows, self.columns = bound.unit.shape
        super().__init__(bound.unit.shape, -(-self.columns // row) * row)
        self.rows = groups * rows
        self.role = "whole"
        if bound.norm is not None and bound.unit.kind in ("linear", "conv", "norm"):
            self.role = "merged"
        elif bound.norm is None and bound.bias is not None:
            self.role = "plain"
        self.order = _order(bound) if self.role != "whole" and bound.unit.kind == "conv" else None
        self._kernel = () if self.order is None else tuple(bound.weight.shape[2:])

    @property
    def likeness(self) -> tuple[object, ...]:
        """What units of one group have in common."""
        return self.role, self.bound.unit.kind == "norm", self.bound.unit.shape, self._kernel

    def flat(self, weight: Tensor) -> Tensor:
        """Return a weight of the unit as a matrix [C, D], its columns in their order here."""
        return (weight if self.order is None else weight.movedim(1, -1)).reshape(self.rows, -1)

    def unflat(self, matrix: Tensor) -> Tensor:
        """Return a matrix [C, D] as a tensor shaped as the unit's weight, where that is another order."""
        if self.order is None:
            return matrix
        return matrix.reshape(self.rows, *self._kernel, -1).movedim(-1, 1)

    def arranged(self, anchor: Tensor) -> Tensor:
        """Return W~* [groups, rows, columns] with its columns in their order here."""
        return anchor if self.order is None else anchor.index_select(2, self.order.to(anchor.device))

    def bias_places(self) -> Tensor:
        """Return the places [C] of the last column of W~."""
        return torch.arange(self.rows) * self.width + self.start + self.columns - 1


class Group(_Place):
    """Units of one shape, one matrix on top of the other, from `start` to `end` of a flat tensor.

    `first` is the place of the first of their channels among those of all BN.
    """

    def __init__(self, members: Sequence[Member], start: int, first: int) -> None:
        self.members, self.first, self._one = members, first, members[0]
        one = self._one
        super().__init__((len(members) * one.shape[0], *one.shape[1:]), one.width, start)
        self.role, self.rows = one.role, len(members) * one.rows
        for place, member in enumerate(members):
            member.start = start + place * one.rows * one.width
        self.end = start + self.rows * one.width

    def weight(self, flat: Tensor) -> Tensor:
        """Return W~ of all but for a bias, [members * C, D]."""
        shape = (self.rows, self._one.columns - (self.role != "whole"))
        return flat.as_strided(shape, (self.width, 1), self.start + int(flat.storage_offset()))

    def channels(self, row: Tensor) -> Tensor:
        """Return the part of a vector over the channels of all BN, [members * C, 1]."""
        return row.narrow(0, self.first, self.rows)[:, None]

    def tall(self, weights: Sequence[Tensor | None]) -> Tensor | None:
        """Return the members' weights on top of each other, [members * C, D]; None where the units are BN alone."""
        rows = [self._one.flat(weight) for weight in weights if weight is not None]
        if not rows:
            return None
        return rows[0] if len(rows) == 1 else torch.cat(rows)


def group(units: Sequence[BoundUnit], row: int = 1) -> list[Group]:
    """Return the units as groups that lie one after the other, their rows multiples of `row` numbers."""
    alike: dict[tuple[object, ...], list[Member]] = {}
    for unit in units:
        member = Member(unit, row)
        alike.setdefault(member.likeness, []).append(member)
    groups: list[Group] = []
    start = first = 0
    for members in alike.values():
        groups.append(Group(members, start, first))
        start = -(-groups[-1].end // _ALIGNMENT) * _ALIGNMENT
        first += groups[-1].rows if groups[-1].role == "merged" else 0
    return groups


class Products:
    """The product of a curvature with a flat displacement, narrow blocks of one shape at once.

    On a CUDA device at torch's float32 matmul precision "medium", those of dense float32 factors are of bfloat16.
    """

    def __init__(self, curvature: Curvature, groups: Sequence[Group]) -> None:
        self._parts: list[tuple[Block | Stack | Rounded, Group | Member]] = []
        joint = {one.name: one for each in groups for one in each.members if one.name in curvature.joint_units}
        self._joint, self._together = curvature.joint, [joint[name] for name in curvature.joint_units]
        coarse = any(rounds(tensor) for _, tensor in curvature.tensors())
        for each in groups:
            alone = [one for one in each.members if one.name in curvature.blocks]
            blocks = [_arranged(curvature.blocks[one.name], one.order) for one in alone]
            stacked = stack(blocks) if len(alone) == len(each.members) else None
            pairs = zip(blocks, alone, strict=True) if stacked is None else [(stacked, each)]
            for block, place in pairs:
                padded = _padded(block, place.width)
                self._parts.append((in_bfloat16(padded) if coarse else padded, place))
        self._rounds = any(isinstance(block, Rounded) for block, _ in self._parts)

    def add(self, displacement: Tensor, out: Tensor) -> None:
        """Add H v to `out`, both flat, in place (eq. bp)."""
        narrow = displacement.bfloat16() if self._rounds else displacement
        for block, place in self._parts:
            if isinstance(block, Rounded):
                block.add_product(place.padded(narrow), place.padded(out))
            elif isinstance(block, Kronecker | Stack):
                block.add_product(place.padded(displacement), place.padded(out))
            else:
                block.add_product(place.whole(displacement), place.whole(out))
        if self._joint is not None:
            pairs = [(one.whole(displacement), one.whole(out)) for one in self._together]
            self._joint.add_product([v for v, _ in pairs], [total for _, total in pairs])


@dataclass(frozen=True)
class Stack:
    """Sums of K Kronecker products sum_k A_k (x) H_k, `left` [groups * K, D, D] and `right` [groups, C, K * C]."""

    left: Tensor
    right: Tensor

    def add_product(self, displacement: Tensor, out: Tensor) -> None:
        """Add sum_k H_k (V A_k) to `out`, both [groups, C, D], in place: two products, whatever K."""
        groups, rows, columns = displacement.shape
        terms = len(self.left) // groups
        each = displacement[:, None].expand(groups, terms, rows, columns).reshape(groups * terms, rows, columns)
        add_product_(out, self.right, product(each, self.left).view(groups, terms * rows, columns))


@dataclass(frozen=True)
class Rounded:
    """A sum of K Kronecker products in bfloat16: `lefts` by term, `right` [groups, C, K * C].

    An input factor is A_k as the sum of two bfloat16 matrices [groups, D, D], or a root R_k [groups, r, D] of it by
    itself. Rounded once, a factor whose eigenvalues differ by orders of magnitude would have negative ones, along which
    a penalty would drive weights away; a root cannot have them.
    """

    lefts: tuple[tuple[Tensor, ...], ...]
    right: Tensor

    def add_product(self, displacement: Tensor, out: Tensor) -> None:
        """Add sum_k H_k (V A_k) to `out` [groups, C, D], in place, for V of bfloat16."""
        groups, rows, columns = displacement.shape
        inner = displacement.new_empty(groups, len(self.lefts) * rows, columns)
        for part, (first, *rest) in zip(inner.split(rows, 1), self.lefts, strict=True):  # type: ignore[no-untyped-call]
            torch.bmm(displacement if rest else torch.bmm(displacement, first.mT), first, out=part)
            for second in rest:
                part.baddbmm_(displacement, second)
        add_product_(out, self.right, inner)


def _in_two(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a factor [groups, D, D] as two of bfloat16 whose sum it is but for 2^-17 of it."""
    high = factor.bfloat16()
    return high, (factor - high).bfloat16()


def in_bfloat16(block: Block | Stack) -> Block | Stack | Rounded:
    """Return a sum of Kronecker products with factors of bfloat16; other blocks as they are."""
    if isinstance(block, Stack):
        groups, terms = len(block.right), len(block.left) // len(block.right)
        lefts = block.left.view(groups, terms, *block.left.shape[1:]).unbind(1)
        return Rounded(tuple(_in_two(left) for left in lefts), block.right.bfloat16())
    if not isinstance(block, Kronecker):
        return block
    return Rounded(
        tuple((term.left.bfloat16(),) if term.low_rank else _in_two(term.left) for term in block.terms),
        torch.cat([term.right for term in block.terms], 2).bfloat16(),
    )


def stack(blocks: Sequence[Block]) -> Block | Stack | None:
    """Return one block for several, one unit after the other, or None where it would save nothing or copy too much."""
    named = [parts(block) for block in blocks]
    alike = {
        (type(block), *((name, *part.shape) for name, part in one.items()))
        for block, one in zip(blocks, named, strict=True)
    }
    widest = max(part.shape[-1] for part in named[0].values())
    device = next(iter(named[0].values())).device.type
    if len(alike) > 1 or widest > WIDEST.get(device, _WIDEST_ELSEWHERE):
        return None
    sums = [block for block in blocks if isinstance(block, Kronecker)]
    if sums and len(sums[0].terms) > 1:
        lefts = [torch.stack([term.dense_left for term in one.terms], 1).flatten(0, 1) for one in sums]
        return Stack(torch.cat(lefts), torch.cat([torch.cat([term.right for term in one.terms], 2) for one in sums]))
    if len(blocks) == 1:
        return None
    return assemble(type(blocks[0]), {name: torch.cat([one[name] for one in named]) for name in named[0]})


def _order(bound: BoundUnit) -> Tensor | None:
    """Return the columns of W~ in the order of a weight that lies in memory with its channels last, or None."""
    weight = bound.weight
    if weight.is_contiguous() or not weight.movedim(1, -1).is_contiguous():
        return None
    columns = torch.arange(weight[0].numel()).view(weight.shape[1], -1).T.reshape(-1)
    return torch.cat([columns, torch.arange(len(columns), len(columns) + bound.unit.homogeneous)])


def _arranged(block: Block, order: Tensor | None) -> Block:
    """Return a block of a unit whose columns are in another order."""
    if order is None:
        return block
    order = order.to(next(iter(parts(block).values())).device)
    if isinstance(block, Kronecker):
        lefts = [term.left.index_select(2, order) for term in block.terms]
        pairs = zip(block.terms, lefts, strict=True)
        lefts = [left if term.low_rank else left.index_select(1, order) for term, left in pairs]
        return Kronecker(tuple(replace(term, left=left) for term, left in zip(block.terms, lefts, strict=True)))
    if isinstance(block, Diagonal):
        return Diagonal(block.values.index_select(2, order))
    assert isinstance(block, Corrected)
    # The eigenvectors of the input factor are columns: their numbers take the new order, they themselves stay.
    return replace(block, left=block.left.index_select(1, order))


def _padded(block: Block | Stack, width: int) -> Block | Stack:
    """Return sums of Kronecker products with zeros in their input factors up to a width; others as they are."""
    if isinstance(block, Stack):
        return Stack(_wider(block.left, width, width), block.right)
    if not isinstance(block, Kronecker):
        return block
    terms = [
        replace(term, left=_wider(term.left, term.left.shape[1] if term.low_rank else width, width))
        for term in block.terms
    ]
    return Kronecker(tuple(terms))


def _wider(factor: Tensor, rows: int, columns: int) -> Tensor:
    """Return a factor [groups, ., .] with zeros below and to the right, itself where it has the size."""
    if factor.shape[1:] == (rows, columns):
        return factor
    wider = factor.new_zeros(len(factor), rows, columns)
    wider[:, : factor.shape[1], : factor.shape[2]] = factor
    return wider
