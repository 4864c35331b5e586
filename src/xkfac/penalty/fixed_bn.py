"""BN that runs with its population statistics in training too, as the one affine map per channel that it then is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac.model.hooks import Hook, replace_forward, runs_its_class
from xkfac.model.passes import norms_of
from xkfac.penalty.bn_taps import PLAIN, learns

_Constants = tuple[Tensor, Tensor]


class FixedBn:
    """Runs every BN of a model in evaluation mode, whatever its flag says, until `remove`.

    A curvature pass, in which running statistics stand still, runs it as it wants. Where gamma and beta do not learn
    and the BN is torch's own, its backward pass is one product per activation, which keeps no activation in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        norms: list[Any] = list(norms_of(model).values())
        self._plain = [norm for norm in norms if type(norm) in PLAIN and runs_its_class(norm)]
        self._ready: dict[int, _Constants] = {}
        self._handles: list[Any] = [model.register_forward_pre_hook(Hook(self._prepare))]
        for norm in norms:
            if norm in self._plain:
                self._handles.append(replace_forward(norm, self._forward))
            else:
                before, after = _evaluation()
                self._handles += [norm.register_forward_pre_hook(Hook(before)), norm.register_forward_hook(Hook(after))]

    def remove(self) -> None:
        """Let every BN run as its flag says again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _prepare(self, module: nn.Module, inputs: Any) -> None:
        """Work out on a GPU what the BN layers of a forward pass need, of all at once: a kernel per BN would show."""
        if torch.compiler.is_compiling():
            return
        norms = [norm for norm in self._plain if learns(norm) and norm.running_var.is_cuda]
        self._ready = dict(zip(map(id, norms), _constants(norms), strict=True)) if norms else {}

    def _forward(self, module: Any, input: Tensor) -> Tensor:
        if not learns(module):
            return type(module).forward(module, input)  # type: ignore[no-any-return]
        module._check_input_dim(input)
        mean, var, weight, bias = module.running_mean, module.running_var, module.weight, module.bias
        if not _is_constant(module, input):
            return F.batch_norm(input, mean, var, weight, bias, False, 0.0, module.eps)
        if input.is_cuda:
            # Taken once: whoever runs the BN again outside of the model's forward pass may have changed it meanwhile.
            var, zero = self._ready.pop(id(module), None) or _constants([module])[0]
        else:
            zero = torch.zeros_like(mean)
        return _Map.apply(input, weight, bias, mean, var, zero, module.eps)  # type: ignore[no-any-return, no-untyped-call]


@torch.no_grad()
def _constants(norms: Iterable[Any]) -> list[_Constants]:
    """Return 1 / sqrt(var + eps) and zeros [C] for every BN."""
    norms = list(norms)
    inverses = torch._foreach_add([norm.running_var for norm in norms], [float(norm.eps) for norm in norms])
    torch._foreach_rsqrt_(inverses)
    zeros = torch.zeros_like(max(inverses, key=len))
    return [(inverse, zeros[: len(inverse)].to(inverse)) for inverse in inverses]


def _is_constant(module: Any, input: Tensor) -> bool:
    """Whether the BN is a map that does not learn, in the precision that it has by itself, of more than vectors.

    For vectors [N, C] a function of Python takes longer than what it saves.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or input.dim() < 3:
        return False
    own = [one for one in (module.weight, module.bias, module.running_mean) if one is not None]
    wide = torch.float64 if input.dtype == torch.float64 else torch.float32
    return not any(one.requires_grad for one in own) and all(one.dtype == wide for one in own)


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
        return _Map.apply(gradient, weight, None, zero, spread, zero, ctx.eps), *[None] * 6  # type: ignore[no-untyped-call]


def _evaluation() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks that run a BN in evaluation mode whatever its flag says, and give the flag back after it."""
    flags: list[bool] = []

    def before(module: Any, inputs: Any) -> None:
        flags.append(module.training)
        module.training = module.training and not module.track_running_stats

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        module.training = flags.pop()

    return before, after
