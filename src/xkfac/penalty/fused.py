"""L_s of a network and its gradient in every parameter at once: what a training step pays for the penalty.

`Penalty` of `BoundUnit.merged_weight` says the same in the paper's words and leaves the gradient to autograd, which
takes some sixty small operations per unit. Here the vectors of all BN lie side by side, units of one shape lie on top
of each other, and every large matrix is passed over as few times as its products allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xkfac.model.merged_weight import BoundUnit, Interpretation, Reading
from xkfac.model.renorm import _BatchRenorm
from xkfac.penalty.bn_taps import BnReading
from xkfac.penalty.layout import ROW, Member, Products, group
from xkfac.penalty.quadratic import Penalty
from xkfac.penalty.side_stream import SideStream

_Wanted = Sequence[tuple[torch.Size, torch.dtype] | None]


class FusedPenalty:
    """L_s as `penalty` gives it for the merged weights of `bound`, with the same gradients.

    A unit with BN is W~ = [s w, beta + s (b - center)], s = gamma / sqrt(spread + eps): under every interpretation the
    BN is the one of some statistics `center` and `spread` [C], which are the population's (eval, brn), the mini-batch's
    (bn, const), or between the two (brn in a net that clips r and d). The gradient flows through the mini-batch's. What
    is neither such a unit nor a plain layer is given by its `merged_weight`.

    The vectors of all units are one flat tensor: gamma, b, center, spread and beta of those with BN, then b of plain
    layers. The gradients in them are another in the same order, with mean and variance of the mini-batch in place of
    center and spread.
    """

    def __init__(self, penalty: Penalty, bound: Mapping[str, BoundUnit]) -> None:
        self._penalty = penalty
        like = next(iter(penalty.anchor.values()))
        self._groups = group([bound[name] for name in penalty.anchor], ROW.get(like.device.type, 1))
        members = [one for each in self._groups for one in each.members]
        self._merged = [one for one in members if one.role == "merged"]
        self._plain = [one for one in members if one.role == "plain"]
        self._channels = [one.rows for one in self._merged]
        self._count = sum(self._channels)
        self._sizes = [*self._channels * 5, *(one.rows for one in self._plain)]
        # Gaps between groups and rows stay zero, so that one inner product over everything is that of the units.
        size = max(each.end for each in self._groups)
        self._origin, self._displacement = like.new_zeros(size), like.new_zeros(size)
        for one in members:
            one.whole(self._origin).copy_(-one.arranged(penalty.anchor[one.name]))
        places = [one.bias_places() for one in (*self._merged, *self._plain)] or [torch.empty(0, dtype=torch.long)]
        self._places = torch.cat(places).to(like.device)
        self._start = self._vectors_at_start()
        most = max([0, *self._channels])
        self._fillers = like.new_ones(most), like.new_zeros(most)
        self._from = [each.weight(self._origin) for each in self._groups]
        self._to = [each.weight(self._displacement) for each in self._groups]
        self._products = Products(penalty.curvature, self._groups)

    def _vectors_at_start(self) -> Tensor:
        """Return what is taken off the vectors: -eps of spread, and the anchor's last column of beta and of b."""
        start = self._origin.new_zeros(sum(self._sizes))
        eps = [self._origin.new_full((one.rows,), float(one.bound.norm.eps)) for one in self._merged]
        if eps:
            start[3 * self._count : 4 * self._count] = -torch.cat(eps)
        start[4 * self._count :] = -self._origin[self._places]
        return start

    def is_known_before(self, interpretation: Interpretation, fixed: bool) -> bool:
        """Whether displacements are known before a forward pass: every BN is `fixed`, or read as brn, unclipped."""
        norms = [one.bound.norm for each in self._groups for one in each.members if one.bound.norm is not None]
        unclipped = len(norms) == len(self._merged) and not any(isinstance(norm, _BatchRenorm) for norm in norms)
        return unclipped and (not norms or fixed or interpretation == "brn")

    def gather(self, readings: Mapping[str, Reading] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a copy of the vectors, and center and spread [2, C] of every unit in it.

        A BN without a reading is read with its population statistics.
        """
        norms = [one.bound.norm for one in self._merged]
        effective = [_effective(one.bound, (readings or {}).get(one.name)) for one in self._merged]
        ones, zeros = self._fillers
        parts = [
            *self._filled([norm.weight for norm in norms], ones),
            *self._filled([one.bound.bias for one in self._merged], zeros),
            *(center for center, _ in effective),
            *(spread for _, spread in effective),
            *self._filled([norm.bias for norm in norms], zeros),
            *(one.bound.bias for one in self._plain if one.bound.bias is not None),
        ]
        vectors = torch.cat(parts).to(self._origin.dtype) if parts else self._origin.new_empty(0)
        both = vectors[2 * self._count : 4 * self._count].view(2, -1).split(self._channels, 1)  # type: ignore[no-untyped-call]
        return vectors, dict(zip([one.name for one in self._merged], both, strict=True))

    def _filled(self, tensors: Iterable[Tensor | None], filler: Tensor) -> list[Tensor]:
        return [filler[:size] if one is None else one for one, size in zip(tensors, self._channels, strict=True)]

    def __call__(self, readings: Mapping[str, Reading], side: SideStream | None = None) -> Tensor:
        """Return L_s, a scalar, for the readings by unit; a BN without one is read with its population statistics."""
        return self.value_and_product(readings, side)[0]

    def value_and_product(self, readings: Mapping[str, Reading], side: SideStream | None) -> tuple[Tensor, Tensor]:
        """Return L_s, differentiable, and dL_s/dW~ of all units in one flat tensor, without a graph.

        With a `side` stream that covers the readings, what needs no activation runs there.
        """
        inputs = self.inputs(readings)
        return _Fused.apply(self, readings, torch.is_grad_enabled(), side, *inputs)  # type: ignore[no-any-return, no-untyped-call]

    def value_and_gradients(
        self,
        readings: Mapping[str, Reading],
        factor: float | Tensor,
        side: SideStream | None = None,
        weight_of: Callable[[Tensor], int] = lambda product: 1,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return L_s and pairs of a tensor and the gradient in it, times `factor * weight_of(dL_s/dW~)`, without graph.

        The tensors are parameters, the statistics of readings or their `placeholders`, and others that L_s is made of.
        With a `side` stream the numbers are there after its `wait`, but for the gradients in statistics, which a `Tap`
        waits for by itself.
        """
        inputs = self.inputs(readings)
        with torch.no_grad(), torch.autocast(self._origin.device.type, enabled=False):
            statistics = self._statistics(readings, inputs)
            with nullcontext() if side is None else side.running():
                result = self.evaluate(readings, inputs, statistics, True, side)
                gradients = self.gradients(result, factor * weight_of(result.product), _wanted(inputs), side)
                value = self.value(result)
        return value, [(a, b) for a, b in zip(inputs, gradients, strict=True) if a is not None and b is not None]

    def undamped(self) -> Tensor:
        """Return L_s without its damping, every BN read with its population statistics."""
        with torch.no_grad(), torch.autocast(self._origin.device.type, enabled=False):
            result = self.evaluate({}, self.inputs({}), None, False, None)
            return self.value(_Result(result.product.sub_(self._displacement, alpha=self._penalty.damping), None, None))

    def _from_bn(self, readings: Mapping[str, Reading]) -> list[BnReading] | None:
        """Return the readings of all units with BN, if BN itself has made them all."""
        own = [one for unit in self._merged if isinstance(one := readings.get(unit.name), BnReading)]
        return own if len(own) == len(self._merged) else None

    def inputs(self, readings: Mapping[str, Reading]) -> list[Tensor | None]:
        """Return what L_s is a function of: the weights of all units, then the vectors, those of statistics too."""
        statistics: list[tuple[Tensor | None, Tensor | None]]
        if (own := self._from_bn(readings)) is not None:
            statistics = [one.placeholders for one in own]
        else:
            read = [readings.get(one.name) for one in self._merged]
            statistics = [(None, None) if one is None else (one.mean, one.var) for one in read]
        norms = [one.bound.norm for one in self._merged]
        return [
            *(_weight(one, readings) for each in self._groups for one in each.members),
            *(norm.weight for norm in norms),
            *(one.bound.bias for one in self._merged),
            *(mean for mean, _ in statistics),
            *(var for _, var in statistics),
            *(norm.bias for norm in norms),
            *(one.bound.bias for one in self._plain),
        ]

    def _statistics(self, readings: Mapping[str, Reading], inputs: Sequence[Tensor | None]) -> _Statistics | None:
        """Return the statistics of all mini-batches, or None where no gradient flows through them."""
        start, count = len(inputs) - len(self._sizes) + 2 * len(self._merged), len(self._merged)
        mean, var = inputs[start : start + count], inputs[start + count : start + 2 * count]
        if not any(one is not None and one.requires_grad for one in mean):
            return None
        if (own := self._from_bn(readings)) is not None:
            both = torch.cat([*(one.mean for one in own), *(one.inverse for one in own)])
            batch_mean, inverse = both.to(self._origin.dtype).view(2, -1)
            return _Statistics(batch_mean, inverse, own[0].sums)
        ones, zeros = self._fillers
        both = torch.cat([*self._filled(mean, zeros), *self._filled(var, ones)])
        batch_mean, batch_var = both.to(self._origin.dtype).view(2, -1)
        # What is taken off the vectors is -eps.
        return _Statistics(batch_mean, (batch_var - self._start[3 * self._count : 4 * self._count]).rsqrt_(), False)

    def evaluate(
        self,
        readings: Mapping[str, Reading],
        inputs: Sequence[Tensor | None],
        statistics: _Statistics | None,
        gradient: bool,
        side: SideStream | None,
    ) -> _Result:
        """Return P = dL_s/dW~, and what else the gradients are made of, for the inputs in their order."""
        rows = self._rows(self.gather(readings)[0] if side is None else side.vectors)
        weights = iter(inputs)
        tall = [each.tall([next(weights) for _ in each.members]) for each in self._groups]
        self._displace(tall, rows)
        product = self._displacement * self._penalty.damping
        self._products.add(self._displacement, product)
        if not gradient:
            return _Result(product, None, None)
        inner, vectors = self._vector_gradients(tall, rows, product)
        if statistics is not None:
            if side is not None:
                side.catch_up(statistics.mean)
            self._add_statistics(statistics, rows, inner, vectors)
        return _Result(product, rows.scale, vectors)

    def value(self, result: _Result) -> Tensor:
        """Return L_s, half the inner product of W~ - W~* and P, of the latest evaluation, once."""
        # A sum in pairs, for one running sum over millions of numbers would lose four digits of seven; a GPU has many.
        # H is positive semi-definite; in its null space rounding alone decides the sign.
        displacement, product = self._displacement, result.product
        value = torch.dot(displacement, product) if product.is_cuda else displacement.mul_(product).sum()
        return value.clamp_(min=0).mul_(0.5)

    def _rows(self, vectors: Tensor) -> _Rows:
        """Return the vectors over all channels of all BN, and the last column of W~ - W~* of all units."""
        gamma, bias, center, spread, last = (vectors - self._start).split([*[self._count] * 4, len(self._places)])  # type: ignore[no-untyped-call]
        inverse = spread.rsqrt_()
        scale, offset = gamma.mul_(inverse), bias - center
        last[: self._count].addcmul_(scale, offset)
        return _Rows(bias, inverse, scale, offset, last)

    def _displace(self, tall: Sequence[Tensor | None], rows: _Rows) -> None:
        """Write W~ - W~* of every unit to its place."""
        for each, weight, start, end in zip(self._groups, tall, self._from, self._to, strict=True):
            if each.role != "merged":
                assert weight is not None
                torch.add(start, weight, out=end)
            elif weight is None:
                torch.add(start, each.channels(rows.scale), out=end)
            else:
                torch.addcmul(start, weight, each.channels(rows.scale), out=end)
        self._displacement.index_copy_(0, self._places, rows.last)

    def _vector_gradients(self, tall: Sequence[Tensor | None], rows: _Rows, product: Tensor) -> tuple[Tensor, Tensor]:
        """Return p_w . w [channels] for P = [p_w, p_b], and the gradients in the vectors.

        Those in the mini-batch's mean and variance are left open.
        """
        vectors = torch.empty_like(self._start)
        inner = torch.empty_like(rows.scale)
        to_gamma, to_bias, _, _, to_last = vectors.split([*[self._count] * 4, len(self._places)])  # type: ignore[no-untyped-call]
        torch.index_select(product, 0, self._places, out=to_last)
        to_beta = to_last[: self._count]
        torch.mul(rows.scale, to_beta, out=to_bias)
        for each, weight in zip(self._groups, tall, strict=True):
            if each.role == "merged":
                ours = each.weight(product)
                torch.sum(ours if weight is None else ours * weight, 1, True, out=each.channels(inner))
        torch.addcmul(inner, to_beta, rows.offset, out=to_gamma).mul_(rows.inverse)
        return inner, vectors

    def _add_statistics(self, statistics: _Statistics, rows: _Rows, inner: Tensor, vectors: Tensor) -> None:
        """Write the gradients in mean and variance: -s p_b and -s (p_w . w + p_b (b - mean)) / (2 (var + eps)).

        As sums (see `BnReading`) they are p_b r and (p_w . w + p_b (b - mean)) r, with the r of BRN,
        sqrt(var + eps) / sqrt(spread + eps).
        """
        _, to_bias, to_mean, to_var, to_beta = vectors[: 5 * self._count].view(5, -1)
        torch.addcmul(inner, to_beta, rows.bias - statistics.mean, out=to_var)
        if statistics.sums:
            r = rows.inverse / statistics.inverse
            torch.mul(to_beta, r, out=to_mean)
            to_var.mul_(r)
        else:
            torch.neg(to_bias, out=to_mean)
            to_var.mul_(rows.scale).mul_(statistics.inverse.square().mul_(-0.5))

    def gradients(
        self, result: _Result, factor: float | Tensor, wanted: _Wanted, side: SideStream | None = None
    ) -> list[Tensor | None]:
        """Return `factor` times the gradient in every input that `wanted` has a shape and dtype of, or None."""
        assert result.scale is not None
        assert result.vectors is not None
        vectors = result.vectors * factor
        if side is not None:
            side.give_statistics(vectors)
        scale = result.scale * factor
        gradients: list[Tensor | None] = []
        for each in self._groups:
            count = len(each.members)
            if all(one is None for one in wanted[len(gradients) : len(gradients) + count]):
                gradients += [None] * count
            else:
                weight = each.weight(result.product)
                gradient = weight * (each.channels(scale) if each.role == "merged" else factor)
                gradients += [one.unflat(own) for one, own in zip(each.members, gradient.chunk(count), strict=True)]
        gradients += vectors.split(self._sizes)  # type: ignore[no-untyped-call]
        return [None if one is None else _as(one, want) for one, want in zip(gradients, wanted, strict=True)]


class _Fused(torch.autograd.Function):
    """The forward pass keeps P = dL_s/dW~ and the gradients in the vectors, so the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedPenalty,
        readings: Mapping[str, Reading],
        gradient: bool,
        side: SideStream | None,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(fused._origin.device.type, enabled=False):
            statistics = fused._statistics(readings, inputs)
            with nullcontext() if side is None else side.running():
                result = fused.evaluate(readings, inputs, statistics, gradient, side)
                value = fused.value(result)
        kept = [result.product, result.scale, result.vectors]
        if side is not None:
            side.wait([one for one in (value, *kept) if one is not None])
        ctx.save_for_backward(*kept)
        ctx.fused, ctx.wanted = fused, _wanted(inputs)
        ctx.mark_non_differentiable(result.product)
        ctx.set_materialize_grads(False)
        return value, result.product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: None) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.fused.gradients(_Result(*ctx.saved_tensors), factor, ctx.wanted)


@dataclass(frozen=True)
class _Rows:
    """Vectors [channels] of all units with BN: b, 1 / sqrt(spread + eps), s, b - center.

    `last` is the last column of W~ - W~*, of units with BN and then of plain layers.
    """

    bias: Tensor
    inverse: Tensor
    scale: Tensor
    offset: Tensor
    last: Tensor


@dataclass(frozen=True)
class _Statistics:
    """Mean and 1 / sqrt(var + eps) [channels] of all mini-batches; whether gradients in them are wanted as sums."""

    mean: Tensor
    inverse: Tensor
    sums: bool


@dataclass(frozen=True)
class _Result:
    """P = dL_s/dW~ of all units in one flat tensor, s [channels], and the gradients in the vectors."""

    product: Tensor
    scale: Tensor | None
    vectors: Tensor | None


def _wanted(inputs: Sequence[Tensor | None]) -> _Wanted:
    return [(one.shape, one.dtype) if one is not None and one.requires_grad else None for one in inputs]


def _as(gradient: Tensor, want: tuple[torch.Size, torch.dtype] | None) -> Tensor | None:
    """Return a gradient as its input wants it, which most are already."""
    if want is None:
        return None
    gradient = gradient if gradient.shape == want[0] else gradient.view(want[0])
    return gradient if gradient.dtype == want[1] else gradient.to(want[1])


def _weight(one: Member, readings: Mapping[str, Reading]) -> Tensor | None:
    """Return the tensor that the penalty takes in as the unit's weight; a BN alone has none."""
    if one.role == "whole" and one.bound.norm is not None:
        return one.bound.merged_weight(readings.get(one.name))
    return None if one.bound.unit.kind == "norm" else one.bound.weight


def _effective(one: BoundUnit, reading: Reading | None) -> tuple[Tensor, Tensor]:
    """Return center and spread [C] of the BN that the unit's own is under a reading."""
    if reading is None:
        return one.norm.running_mean, one.norm.running_var
    if reading.population is not None:
        return reading.population[0], reading.population[1]
    if not isinstance(reading.r, Tensor):
        return reading.mean, reading.var
    mean, std = one.normalisation(reading)
    return mean, std.square() - one.norm.eps
