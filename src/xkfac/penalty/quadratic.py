"""The quadratic penalty L_s as one autograd function: value and gradient in one go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from xkfac.curvature.operator import Curvature
from xkfac.errors import MismatchError


class _Quadratic(torch.autograd.Function):
    """L_s of merged weights; the forward pass keeps dL_s/dW~, so the backward pass only scales it."""

    @staticmethod
    def forward(ctx: Any, penalty: Penalty, *weights: Tensor) -> Tensor:
        with torch.autocast(weights[0].device.type, enabled=False):
            value, gradients = penalty.value_and_gradient(weights)
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(scale * gradient for gradient in ctx.saved_tensors))


class Penalty:
    """L_s = (W~ - W~*)^T (H + damping I) (W~ - W~*) / 2 around an anchor W~*.

    Nothing in a call synchronises the device or branches on a tensor, so a step can be captured as a CUDA graph.

    Raises MismatchError when anchor and curvature are not of the same units.
    """

    def __init__(self, curvature: Curvature, anchor: Mapping[str, Tensor], damping: float = 0.0) -> None:
        for name in sorted({*anchor, *curvature.blocks, *curvature.joint_units}):
            if name not in anchor or name not in curvature:
                missing = "curvature" if name in anchor else "anchor"
                raise MismatchError(f"unit '{name}' has no {missing}; take both from one memory")
        self.curvature = curvature
        self.anchor = anchor
        self.damping = damping
        self.names = tuple(anchor)

    def __call__(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return L_s, a scalar, for the merged weights [groups, rows, columns] by unit; differentiable in them."""
        if not self.names:
            return torch.zeros(())
        return _Quadratic.apply(self, *(weights[name] for name in self.names))  # type: ignore[no-any-return, no-untyped-call]

    def value_and_gradient(self, weights: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
        """Return L_s and dL_s/dW~ (eq. bp), the value by the identity that follows it: half their inner product."""
        pairs = [(weight, self.anchor[name]) for name, weight in zip(self.names, weights, strict=True)]
        displacements = {
            name: weight.to(anchor.dtype) - anchor for name, (weight, anchor) in zip(self.names, pairs, strict=True)
        }
        products = self.curvature.product(displacements)
        gradients = [products[name] + self.damping * displacements[name] for name in self.names]
        inner = [(one * gradient).sum() for one, gradient in zip(displacements.values(), gradients, strict=True)]
        # H is positive semi-definite; in its null space rounding alone decides the sign.
        return torch.stack(inner).sum().clamp(min=0) / 2, gradients
