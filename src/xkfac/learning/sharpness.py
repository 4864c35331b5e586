"""Sharpness-aware losses: learn where the loss stays low around the weights, so that a quadratic holds for longer.

A penalty is the curvature at one point, and later tasks move the weights away from it, along directions in which it was
flat and the loss was not. Sharpness-aware minimisation takes each step with the gradient at W + rho g / |g|, g that at
W: where the loss is largest nearby, to first order. The penalty itself stays where it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from xkfac.errors import XkfacError
from xkfac.model.hooks import paused
from xkfac.model.passes import norms_of


class _WithGradients(torch.autograd.Function):
    """A loss as it is, whose gradients in some tensors are given."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *(scale * gradient for gradient in ctx.saved_tensors))


def sharpened(model: nn.Module, loss: Tensor, again: Callable[[], Tensor], rho: float) -> Tensor:
    """Return `loss` with the gradients that it has at weights moved by `rho` along them.

    loss: of a forward pass of the model. again: does the same pass once more and returns its loss; it is called with
    the weights moved, and BN's running statistics do not follow it. rho: the distance, over all parameters that take
    gradients; 0.1 for a perceptron. Give the result to `learner.backward` or `learner.objective` in place of the loss:
    the penalty is that of the weights and the statistics of the first pass. A step costs twice as much.

    Raises XkfacError for a distance that is not above 0.
    """
    if not 0 < rho < float("inf"):
        raise XkfacError(
            f"rho of a sharpened loss must be a number above 0, not {rho}; leave `sharpened` out without it"
        )
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The penalty may go through the statistics of this pass later on.
    found = torch.autograd.grad(loss, learning, retain_graph=True, allow_unused=True)
    pairs = [(parameter, gradient) for parameter, gradient in zip(learning, found, strict=True) if gradient is not None]
    reached, gradients = [parameter for parameter, _ in pairs], [gradient for _, gradient in pairs]
    with _moved(reached, gradients, rho), _statistics_kept(model), paused():
        there = torch.autograd.grad(again(), reached)
    return _WithGradients.apply(loss.detach(), there, *reached)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def _moved(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rho: float) -> Iterator[None]:
    """Move parameters by `rho` along gradients meanwhile; afterwards they are what they were, bit by bit."""
    norm = torch.stack([one.to(gradients[0].device) for one in torch._foreach_norm(list(gradients))]).norm()
    scale = rho / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    # Through `data`, since a backward pass of the first loss may follow and would take a change for one that matters.
    weights = [parameter.data for parameter in parameters]
    before = [weight.clone() for weight in weights]
    torch._foreach_add_(weights, [gradient * scale.to(gradient.device) for gradient in gradients])
    try:
        yield
    finally:
        torch._foreach_copy_(weights, before)


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Leave BN's running statistics as they are meanwhile."""
    kept = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms_of(model).values() if norm.training]
    counts = [count.clone() if count is not None else None for _, _, count in kept]
    for norm, _, _ in kept:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for (norm, momentum, count), before in zip(kept, counts, strict=True):
            norm.momentum = momentum
            if before is not None:
                count.copy_(before)
