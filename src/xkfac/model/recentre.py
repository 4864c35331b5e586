"""Re-centre BN on a new task: the preprocessing of the paper."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xkfac.errors import NotFiniteError, UnitError
from xkfac.model.batches import Forward, default_forward
from xkfac.model.merged_weight import batch_statistics, norm_input
from xkfac.model.passes import Progress, batches, check_loaded, device_of, norms_of, parallel_of, untouched, unwrap


def recentre(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    forward: Forward | None = None,
    max_batches: int | None = None,
    progress: Progress = False,
) -> None:
    """Re-centre the BN layers of `model` on new data: the preprocessing of the paper, in place.

    One pass in evaluation mode gives the exact pooled mean and variance of every BN's input; they become the
    population statistics, and gamma and beta are changed such that the function and W~ stay what they were. The
    processes of a DistributedDataParallel model pool their data, so that their parameters stay the same.

    Raises UnitError for a BN without affine parameters, or with a channel that is not finite on the new data; the model
    is unchanged then.
    """
    check_loaded(unwrap(model))
    parallel = parallel_of(model)
    model = unwrap(model)
    norms = {path: norm for path, norm in norms_of(model).items() if norm.running_mean is not None}
    pools = {path: _Pool() for path in norms}
    run = forward or default_forward
    with ExitStack() as hooks, untouched(model), torch.no_grad():
        for path, pool in pools.items():
            hooks.enter_context(norms[path].register_forward_pre_hook(pool.hook, with_kwargs=True))
        model.eval()
        steps = batches(loader, device_of(model), max_batches=max_batches, progress=progress, what="recentre")
        for _, batch in steps:
            run(model, batch)
    if parallel is not None:
        for path, pool in pools.items():
            pool.over_processes(norms[path], parallel.process_group)
    seen = {path: pool for path, pool in pools.items() if pool.count}
    for path, pool in seen.items():
        _check_recentrable(path, norms[path], pool)
    for path, pool in seen.items():
        _recentre_norm(norms[path], pool)


class _Pool:
    """Exact pooled mean and variance over batches, in float64 (Chan's update)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor
        self.scatter: Tensor

    def hook(self, module: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> None:
        values = norm_input(inputs, keywords).double()
        count = values.numel() // values.shape[1]
        mean, var = batch_statistics(values)
        if self.count == 0:
            self.count, self.mean, self.scatter = count, mean, var * count
            return
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.scatter = self.scatter + var * count + delta.square() * (self.count * count / total)
        self.count = total

    def over_processes(self, norm: Any, group: Any) -> None:
        """Pool over a process group; a process whose data did not pass the BN counts nothing."""
        if self.count == 0:
            self.mean = torch.zeros_like(norm.running_mean, dtype=torch.float64)
            self.scatter = torch.zeros_like(self.mean)
        sums = torch.cat([self.mean * self.count, self.mean.new_full((1,), self.count)])
        dist.all_reduce(sums, group=group)
        total = int(sums[-1])
        mean = sums[:-1] / max(total, 1)
        self.scatter = self.scatter + (self.mean - mean).square() * self.count
        dist.all_reduce(self.scatter, group=group)
        self.count, self.mean = total, mean

    @property
    def var(self) -> Tensor:
        return self.scatter / self.count


def _check_recentrable(path: str, norm: Any, pool: _Pool) -> None:
    if norm.weight is None or norm.bias is None:
        raise UnitError(
            f"'{path}' has no gamma and beta, so it cannot be re-centred; build it with affine=True, or begin with "
            "recentre=False"
        )
    stored = torch.cat([pool.mean, pool.var]).to(norm.running_var.dtype)
    if not bool(stored.isfinite().all()):
        raise NotFiniteError(f"the input of '{path}' is not finite on the new data; check the data and the network")


@torch.no_grad()
def _recentre_norm(norm: Any, pool: _Pool) -> None:
    mean, var = pool.mean, pool.var
    old_std = (norm.running_var.double() + norm.eps).sqrt()
    gamma = norm.weight.double()
    norm.bias.copy_(norm.bias.double() + gamma / old_std * (mean - norm.running_mean.double()))
    norm.weight.copy_((var + norm.eps).sqrt() / old_std * gamma)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(var)
