"""From parameters to merged weights and back: the derivative J of W~, read with population statistics."""

from collections.abc import Sequence

import torch
from torch import Tensor


def pushed(merged: Sequence[Tensor], parameters: Sequence[Tensor], v: Sequence[Tensor]) -> list[Tensor]:
    """Return J v for merged weights that were computed from `parameters` with a graph."""
    dual = [torch.zeros_like(one, requires_grad=True) for one in merged]
    options = {"allow_unused": True, "materialize_grads": True}
    pulled_dual = torch.autograd.grad(merged, parameters, dual, create_graph=True, **options)
    linear = [pair for pair in zip(pulled_dual, v, strict=True) if pair[0].requires_grad]
    outputs, directions = [list(column) for column in zip(*linear, strict=True)]
    # Linear in `dual`, so that its derivative there, applied to v, is J v.
    return list(torch.autograd.grad(outputs, dual, directions, retain_graph=True, **options))


def pulled(merged: Sequence[Tensor], parameters: Sequence[Tensor], u: Sequence[Tensor]) -> list[Tensor]:
    """Return J^T u."""
    gradients = torch.autograd.grad(merged, parameters, u, retain_graph=True, allow_unused=True, materialize_grads=True)
    return list(gradients)
