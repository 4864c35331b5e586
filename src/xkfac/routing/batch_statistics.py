"""Evaluation with the statistics of the inputs at hand, for inputs of one domain in a row."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.errors import XkfacError
from xkfac.model.merged_weight import norm_input
from xkfac.model.passes import norms_of, unwrap


@contextmanager
def batch_statistics(model: nn.Module, window: int = 1) -> Iterator[None]:
    """Have every BN layer in evaluation mode use statistics of its inputs instead of stored ones, for a while.

    window: over how many examples statistics are taken. A batch of that many or more counts alone, which is what
    training mode does. A smaller batch of N counts N / window, and what came before the rest: the stored statistics at
    first. On leaving, all buffers are as before. No task is inferred, and no label is needed; but all examples of a
    window must be of one domain.

    Raises XkfacError for a window below 1, and for a BN layer without running statistics.
    """
    if window < 1:
        raise XkfacError(f"window is {window}; it must be at least 1 example")
    norms = norms_of(unwrap(model))
    for path, norm in norms.items():
        if norm.running_mean is None:
            raise XkfacError(f"'{path}' has no running statistics, and uses those of the batch as it is")
    before = {norm: (norm.running_mean.clone(), norm.running_var.clone()) for norm in norms.values()}
    follow = partial(_follow, window)
    hooks = [norm.register_forward_pre_hook(follow, with_kwargs=True) for norm in before]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for norm, (mean, var) in before.items():
                norm.running_mean.copy_(mean)
                norm.running_var.copy_(var)


@torch.no_grad()
def _follow(window: int, norm: Any, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> None:
    """Move the running statistics of a BN layer to those of its input x [N, C, ...], by the share N / window."""
    if norm.training:
        return
    x = norm_input(inputs, keywords)
    share = min(1.0, len(x) / window)
    var, mean = torch.var_mean(x.detach().to(norm.running_mean.dtype), (0, *range(2, x.dim())), correction=0)
    step = mean - norm.running_mean
    # The variance of a mixture: that of its parts, and that between their means.
    norm.running_var.lerp_(var, share).add_(step.square(), alpha=share * (1 - share))
    norm.running_mean.add_(step, alpha=share)
