"""BN with constant statistics, gamma and beta: one affine map per channel, which keeps no activation in memory."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Constants = tuple[Tensor, Tensor]


def is_constant(
    input: Tensor, mean: Tensor | None, weight: Tensor | None, bias: Tensor | None, held: bool = False
) -> bool:
    """Whether `normalised` does what BN in evaluation mode does, faster, and with the same rounding.

    held: gamma and beta are constant though they require gradients, which then are zero.
    For vectors [N, C] a function of Python takes longer than what it saves.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or input.dim() < 3 or mean is None:
        return False
    own = [one for one in (mean, weight, bias) if one is not None]
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    learns = not held and any(one.requires_grad for one in own)
    return not learns and all(one.dtype == wide for one in own)


def normalised(
    input: Tensor,
    mean: Tensor,
    var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    constants: Constants | None = None,
) -> Tensor:
    """Return gamma (h - mean) / sqrt(var + eps) + beta for h [N, C, ...]; differentiable in h.

    constants: those of the BN, where they are at hand.
    """
    if input.is_cuda:
        var, zero = constants or constants_of([var], [eps])[0]
    else:
        zero = torch.zeros_like(mean)
    return _Map.apply(input, weight, bias, mean, var, zero, eps)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def constants_of(variances: Sequence[Tensor], eps: Sequence[float]) -> list[Constants]:
    """Return 1 / sqrt(var + eps) and zeros [C] of some BN layers, which `normalised` needs on a GPU."""
    inverses = torch._foreach_add(list(variances), list(eps))
    torch._foreach_rsqrt_(inverses)
    zeros = torch.zeros_like(max(inverses, key=len))
    return [(inverse, zeros[: len(inverse)].to(inverse)) for inverse in inverses]


class _Map(torch.autograd.Function):
    """h -> gamma (h - mean) / sqrt(var + eps) + beta, of which the derivative is the same map with mean = beta = 0.

    spread: var, on a GPU 1 / sqrt(var + eps). There cuDNN has no derivative of BN in evaluation mode, and both passes
    are the kernel of the last step of `SyncBatchNorm`, which takes activations of any layout and dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, *rest: Any
    ) -> Tensor:
        spread, zero, eps = rest
        ctx.save_for_backward(weight, spread, zero)
        ctx.eps = eps
        if input.is_cuda:
            return torch.batch_norm_elemt(input, weight, bias, mean, spread, eps)
        return F.batch_norm(input, mean, spread, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight, spread, zero = ctx.saved_tensors
        none = [torch.zeros_like(zero) if asked else None for asked in ctx.needs_input_grad[1:3]]
        return _Map.apply(gradient, weight, None, zero, spread, zero, ctx.eps), *none, *[None] * 4  # type: ignore[no-untyped-call]
