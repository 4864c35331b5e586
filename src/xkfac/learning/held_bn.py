"""What a task does to a network's BN: parameters that stand still, statistics that follow slowly."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.methods import Method
from xkfac.model.passes import norms_of, parallel_of, unwrap


class HeldBN:
    """Treats every BN of a network as a method does, until `release`.

    momentum: that of running statistics which follow the target, None for BN's own. Gamma and beta that a method keeps
    stay where they are, whatever the optimizer. DistributedDataParallel, made while they required gradients, waits for
    these in every step. They then get gradients of zero, which are dropped once all processes have theirs: an
    optimizer would apply weight decay.
    """

    def __init__(self, model: nn.Module, method: Method, momentum: float | None) -> None:
        norms: list[Any] = list(norms_of(unwrap(model)).values())
        self._momenta = [(norm, norm.momentum) for norm in norms] if momentum and method.follows_target else []
        for norm, _ in self._momenta:
            norm.momentum = momentum
        affine = [parameter for norm in norms for parameter in norm.parameters(recurse=False)]
        held = affine if method.fixed_bn or method.fixed_affine else []
        self._learning = [parameter for parameter in held if parameter.requires_grad]
        waited_for = parallel_of(model) is not None
        self._handles = [one.register_hook(_zeroing(one)) for one in self._learning] if waited_for else []
        for parameter in held:
            parameter.requires_grad_(parameter.requires_grad and waited_for).grad = None

    def release(self) -> None:
        """Give BN its momentum and its parameters their gradients back."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._learning:
            parameter.requires_grad_(True)
        for norm, momentum in self._momenta:
            norm.momentum = momentum


def _zeroing(parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
    """Return a hook that makes the gradient of a parameter zero, and drops it when the backward pass is over."""
    engine: Any = torch.autograd.Variable._execution_engine

    def drop() -> None:
        parameter.grad = None

    def zero(gradient: Tensor) -> Tensor:
        # DistributedDataParallel queues its last work in this pass too; what the end of the pass queues comes after it.
        engine.queue_callback(lambda: engine.queue_callback(drop))
        return torch.zeros_like(gradient)

    return zero
