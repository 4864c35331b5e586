"""L_s of a network and its gradient in every parameter at once: what a training step pays for the penalty.

`Penalty` of `BoundUnit.merged_weight` says the same in the paper's words and leaves the gradient to autograd, which
takes some sixty small operations a unit. Here the vectors of all BN lie side by side, so that their arithmetic costs
the same for one unit and for fifty, and every large matrix is passed over as few times as its products allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xkfac.branches import Branch
from xkfac.merging import BoundUnit, Reading
from xkfac.penalty import Penalty
from xkfac.renorm import _BatchRenorm

_ALIGNMENT = 16  # numbers: where every unit starts, as vectorised kernels like it


class FusedPenalty:
    """L_s as `penalty` gives it for the merged weights of `bound`, with the same gradients.

    A unit with BN is W~ = [s w, beta + s (b - center)], s = gamma / sqrt(spread + eps): under every interpretation the
    BN is the one of some statistics `center` and `spread` [C], which are the population's (eval, brn), the mini-batch's
    (bn, const), or between the two (brn in a net that clips r and d). The gradient flows through the mini-batch's. What
    is neither such a unit nor a plain layer is given by its `merged_weight`.
    """

    def __init__(self, penalty: Penalty, bound: Mapping[str, BoundUnit]) -> None:
        self._penalty = penalty
        anchors = list(penalty.anchor.values())
        self._units, size = [], 0
        for name, anchor in penalty.anchor.items():
            self._units.append(_Member(bound[name], size))
            size += -(-anchor.numel() // _ALIGNMENT) * _ALIGNMENT
        self._plain = [one for one in self._units if one.role == "plain"]
        self._merged = [one for one in self._units if one.role == "merged"]
        # Gaps between units stay zero, so that one inner product over everything is that of the units.
        self._origin, self._moved = anchors[0].new_zeros(2, size)
        for one, anchor in zip(self._units, anchors, strict=True):
            one.whole(self._origin).copy_(-anchor)
        self._channels = [one.rows for one in self._merged]
        self._places = {one.bound.unit.name: one.whole(self._moved) for one in self._units}
        self._from = [(one.weight(self._origin), one.bias(self._origin)) for one in self._units]
        self._to = [(one.weight(self._moved), one.bias(self._moved)) for one in self._units]
        widest = max([0, *self._channels])
        self._ones, self._zeros = anchors[0].new_ones(widest), anchors[0].new_zeros(widest)
        self._eps = _eps(self._merged, anchors[0])

    @property
    def branches_off(self) -> bool:
        """Whether every unit's displacement can be known before a forward pass, under brn and without clipping."""
        norms = [one.bound.norm for one in self._units if one.bound.norm is not None]
        return len(norms) == len(self._merged) > 0 and not any(isinstance(norm, _BatchRenorm) for norm in norms)

    def __call__(self, readings: Mapping[str, Reading], branch: Branch | None = None) -> Tensor:
        """Return L_s, a scalar, for the readings by unit; a BN without one is read with its population statistics.

        With a `branch` that covers the readings, what needs no activation runs there.
        """
        read = [readings.get(one.bound.unit.name) for one in self._merged]
        norms = [one.bound.norm for one in self._merged]
        inputs = [
            *(one.input(readings) for one in self._units),
            *(one.bound.bias for one in self._plain),
            *(norm.weight for norm in norms),
            *(norm.bias for norm in norms),
            *(one.bound.bias for one in self._merged),
            *(reading and reading.mean for reading in read),
            *(reading and reading.var for reading in read),
        ]
        return _Fused.apply(self, read, torch.is_grad_enabled(), branch, *inputs)  # type: ignore[no-any-return, no-untyped-call]

    def evaluate(
        self, read: Sequence[Reading | None], inputs: Sequence[Tensor | None], gradient: bool, branch: Branch | None
    ) -> _Result:
        """Return the value, and what the gradients are made of, for the inputs in the order of `__call__`."""
        parts = self._split(inputs)

        def work() -> tuple[Tensor | None, ...]:
            return self._without_statistics(parts, read, gradient)

        value, product, scale, bias, inner, found = work() if branch is None else branch.run(work)
        assert value is not None
        assert product is not None
        if scale is not None and bias is not None and inner is not None and found is not None:
            self._add_statistics(parts, scale, bias, inner, found)
        return _Result(value, product, scale, found)

    def _without_statistics(
        self, parts: _Parts, read: Sequence[Reading | None], gradient: bool
    ) -> tuple[Tensor | None, ...]:
        """Return L_s, P, s, b, the row sums p_w . w, and the gradients [5, channels] in all but the statistics."""
        rows = self._rows(read, parts) if self._merged else None
        self._displace(parts, rows)
        product = self._moved * self._penalty.damping
        out = {one.bound.unit.name: one.whole(product) for one in self._units}
        self._penalty.curvature.add_product(self._places, out)
        # A sum in pairs, for one running sum over millions of numbers would lose four digits of seven. H is positive
        # semi-definite; in its null space rounding alone decides the sign.
        value = self._moved.mul_(product).sum().clamp_(min=0).mul_(0.5)
        if not gradient or rows is None:
            return value, product, None, None, None, None
        return value, product, rows.scale, rows.bias, *self._vector_gradients(rows, parts, product)

    def _split(self, inputs: Sequence[Any]) -> _Parts:
        sizes = [len(self._units), len(self._plain), *[len(self._merged)] * 5]
        rest = iter(inputs)
        return _Parts(*(list(islice(rest, size)) for size in sizes))

    def _rows(self, read: Sequence[Reading | None], parts: _Parts) -> _Rows:
        """Return the vectors over all channels of all BN, one after the other."""
        effective = [_effective(one.bound, reading) for one, reading in zip(self._merged, read, strict=True)]
        gamma, beta, bias, center, spread = self._side_by_side(
            self._filled(parts.gamma, self._ones),
            self._filled(parts.beta, self._zeros),
            self._filled(parts.bias, self._zeros),
            [one[0] for one in effective],
            [one[1] for one in effective],
        )
        inverse = (spread + self._eps).rsqrt_()
        scale, offset = gamma * inverse, bias - center
        return _Rows(bias, inverse, scale, offset, torch.addcmul(beta, scale, offset))

    def _filled(self, tensors: Sequence[Tensor | None], filler: Tensor) -> list[Tensor]:
        sizes = zip(tensors, self._channels, strict=True)
        return [filler[:size] if tensor is None else tensor for tensor, size in sizes]

    def _side_by_side(self, *rows: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.cat([one for row in rows for one in row]).to(self._origin.dtype).view(len(rows), -1).unbind()

    def _displace(self, parts: _Parts, rows: _Rows | None) -> None:
        """Write W~ - W~* of every unit to its place."""
        scales = iter(() if rows is None else torch.split(rows.scale, self._channels))
        shifts = iter(() if rows is None else torch.split(rows.shift, self._channels))
        biases = iter(parts.plain)
        for one, weight, start, end in zip(self._units, parts.weights, self._from, self._to, strict=True):
            if one.role == "merged":
                scale = next(scales)[:, None]
                if weight is None:
                    torch.add(start[0], scale, out=end[0])
                else:
                    torch.addcmul(start[0], weight.flatten(1), scale, out=end[0])
                torch.add(start[1], next(shifts), out=end[1])
            else:
                torch.add(start[0], weight.reshape(start[0].shape), out=end[0])
                if one.role == "plain":
                    torch.add(start[1], next(biases), out=end[1])

    def _vector_gradients(self, rows: _Rows, parts: _Parts, product: Tensor) -> tuple[Tensor, Tensor]:
        """Return p_w . w [channels] for P = dL_s/dW~ = [p_w, p_b], and the gradients in gamma, beta, b, [5, channels].

        The last two rows are left for those in the mini-batch's mean and variance.
        """
        found = rows.scale.new_empty(5, rows.scale.numel())
        to_gamma, to_beta, to_bias, _, _ = found.unbind()
        torch.cat([one.bias(product) for one in self._merged], out=to_beta)
        torch.mul(rows.scale, to_beta, out=to_bias)
        inner = torch.cat(
            [
                one.weight(product)[:, 0] if weight is None else (one.weight(product) * weight.flatten(1)).sum(1)
                for one, weight in zip(self._units, parts.weights, strict=True)
                if one.role == "merged"
            ]
        )
        torch.addcmul(inner, to_beta, rows.offset, out=to_gamma).mul_(rows.inverse)
        return inner, found

    def _add_statistics(self, parts: _Parts, scale: Tensor, bias: Tensor, inner: Tensor, found: Tensor) -> None:
        """Write the gradients in mean and variance: -s p_b and -s (p_w . w + p_b (b - mean)) / (2 (var + eps))."""
        if not any(mean is not None and mean.requires_grad for mean in parts.mean):
            return
        _, to_beta, to_bias, to_mean, to_var = found.unbind()
        mean, var = self._side_by_side(self._filled(parts.mean, self._zeros), self._filled(parts.var, self._ones))
        torch.neg(to_bias, out=to_mean)
        torch.addcmul(inner, to_beta, bias - mean, out=to_var).mul_(scale)
        to_var.div_((var + self._eps).mul_(-2))

    def gradients(self, result: _Result, factor: Tensor, inputs: Sequence[Any]) -> list[Tensor | None]:
        """Return `factor` times the gradient in every input that `inputs` wants one of, as (shape, dtype), or None."""
        wanted = iter(inputs)
        scales = iter(() if result.scale is None else torch.split(result.scale * factor, self._channels))
        found: list[Tensor | None] = []
        for one in self._units:
            scale = next(scales)[:, None] if one.role == "merged" else factor
            found.append(None if next(wanted) is None else one.weight(result.product) * scale)
        for one in self._plain:
            found.append(None if next(wanted) is None else one.bias(result.product) * factor)
        if result.vectors is not None:
            found += torch.split((result.vectors * factor).view(-1), self._channels * 5)
        return [None if one is None else _as(one, want) for one, want in zip(found, inputs, strict=True)]


class _Fused(torch.autograd.Function):
    """The forward pass keeps P = dL_s/dW~ and the gradients in the vectors, so the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        fused: FusedPenalty,
        read: list[Reading | None],
        gradient: bool,
        branch: Branch | None,
        *inputs: Tensor | None,
    ) -> Tensor:
        with torch.autocast(fused._origin.device.type, enabled=False):
            result = fused.evaluate(read, inputs, gradient, branch)
        ctx.save_for_backward(result.product, result.scale, result.vectors)
        ctx.fused = fused
        ctx.inputs = [(one.shape, one.dtype) if one is not None and one.requires_grad else None for one in inputs]
        return result.value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        result = _Result(factor, *ctx.saved_tensors)
        return None, None, None, None, *ctx.fused.gradients(result, factor, ctx.inputs)


class _Member:
    """A unit and its part of a flat tensor.

    role: `merged`, a layer with BN, or BN alone; `plain`, a layer with a bias; `whole`, what has one tensor as its W~.
    """

    def __init__(self, bound: BoundUnit, start: int) -> None:
        self.bound, self.start = bound, start
        groups, rows, columns = bound.unit.shape
        self.rows, self.columns = groups * rows, columns
        self.role = "whole"
        if bound.norm is not None and bound.unit.kind in ("linear", "conv", "norm"):
            self.role = "merged"
        elif bound.norm is None and bound.bias is not None:
            self.role = "plain"

    def whole(self, flat: Tensor) -> Tensor:
        """Return W~ [groups, rows, columns]."""
        shape = self.bound.unit.shape
        return flat.as_strided(shape, (shape[1] * shape[2], shape[2], 1), self._offset(flat))

    def weight(self, flat: Tensor) -> Tensor:
        """Return W~ but for a bias, [C, D]."""
        return flat.as_strided(
            (self.rows, self.columns - (self.role != "whole")), (self.columns, 1), self._offset(flat)
        )

    def bias(self, flat: Tensor) -> Tensor:
        """Return the last column of W~, [C]."""
        return flat.as_strided((self.rows,), (self.columns,), self._offset(flat) + self.columns - 1)

    def _offset(self, flat: Tensor) -> int:
        return self.start + int(flat.storage_offset())

    def input(self, readings: Mapping[str, Reading]) -> Tensor | None:
        """Return the tensor that the penalty takes in as the unit's weight."""
        if self.role == "whole" and self.bound.norm is not None:
            return self.bound.merged_weight(readings.get(self.bound.unit.name))
        return None if self.bound.unit.kind == "norm" else self.bound.weight


@dataclass(frozen=True)
class _Parts:
    """The inputs by kind: of all units, of plain layers with a bias, and of units with BN."""

    weights: list[Any]
    plain: list[Any]
    gamma: list[Any]
    beta: list[Any]
    bias: list[Any]
    mean: list[Any]
    var: list[Any]


@dataclass(frozen=True)
class _Rows:
    """Vectors [channels] of all units with BN: b, 1 / sqrt(spread + eps), s, b - center, and beta + s (b - center)."""

    bias: Tensor
    inverse: Tensor
    scale: Tensor
    offset: Tensor
    shift: Tensor


@dataclass(frozen=True)
class _Result:
    """L_s, P = dL_s/dW~ of all units in one flat tensor, s [channels], and the gradients in the vectors."""

    value: Tensor
    product: Tensor
    scale: Tensor | None
    vectors: Tensor | None


def _as(gradient: Tensor, want: tuple[torch.Size, torch.dtype] | None) -> Tensor | None:
    """Return a gradient as its input wants it, which most are already."""
    if want is None:
        return None
    gradient = gradient if gradient.shape == want[0] else gradient.view(want[0])
    return gradient if gradient.dtype == want[1] else gradient.to(want[1])


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


def _eps(merged: Sequence[_Member], like: Tensor) -> float | Tensor:
    """Return the eps of all BN, as a number where they agree, else [channels]."""
    values = [float(one.bound.norm.eps) for one in merged]
    if len(set(values)) <= 1:
        return values[0] if values else 0.0
    return torch.cat([like.new_full((one.rows,), eps) for one, eps in zip(merged, values, strict=True)])
