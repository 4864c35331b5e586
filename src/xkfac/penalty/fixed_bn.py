"""BN that runs with its population statistics in training too, as the one affine map per channel that it then is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac.model.constant_bn import Constants, constants_of, is_constant, normalised
from xkfac.model.hooks import Hook, replace_forward, runs_its_class
from xkfac.model.passes import norms_of
from xkfac.penalty.bn_taps import PLAIN, learns


class FixedBn:
    """Runs every BN of a model in evaluation mode, whatever its flag says, until `remove`.

    A curvature pass, in which running statistics stand still, runs it as it wants. Where gamma and beta do not learn
    and the BN is torch's own, its backward pass is one product per activation, which keeps no activation in memory.
    held: they never do, also where they require gradients that DistributedDataParallel waits for.
    """

    def __init__(self, model: nn.Module, held: bool = False) -> None:
        self._held = held
        norms: list[Any] = list(norms_of(model).values())
        self._plain = [norm for norm in norms if type(norm) in PLAIN and runs_its_class(norm)]
        self._ready: dict[int, Constants] = {}
        self._handles: list[Any] = [model.register_forward_pre_hook(Hook(self._prepare))]
        for norm in norms:
            if norm in self._plain:
                self._handles.append(replace_forward(norm, self._forward))
            else:
                before, after = _evaluation()
                self._handles.append(norm.register_forward_pre_hook(Hook(before)))
                # Also after an error, which would leave the flag changed.
                self._handles.append(norm.register_forward_hook(Hook(after), always_call=True))

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
        constants = constants_of([norm.running_var for norm in norms], [norm.eps for norm in norms]) if norms else []
        self._ready = dict(zip(map(id, norms), constants, strict=True))

    def _forward(self, module: Any, input: Tensor) -> Tensor:
        if not learns(module):
            return type(module).forward(module, input)  # type: ignore[no-any-return]
        module._check_input_dim(input)
        mean, var, weight, bias = module.running_mean, module.running_var, module.weight, module.bias
        if not is_constant(input, mean, weight, bias, self._held):
            return F.batch_norm(input, mean, var, weight, bias, False, 0.0, module.eps)
        # Taken once: whoever runs the BN again outside of the model's forward pass may have changed it meanwhile.
        return normalised(input, mean, var, weight, bias, module.eps, self._ready.pop(id(module), None))


def _evaluation() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return hooks that run a BN in evaluation mode whatever its flag says, and give the flag back after it."""
    flags: list[bool] = []

    def before(module: Any, inputs: Any) -> None:
        flags.append(module.training)
        module.training = module.training and not module.track_running_stats

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        module.training = flags.pop()

    return before, after
