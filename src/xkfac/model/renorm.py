"""Batch renormalization, and conversion from and to batch normalization.

Ioffe, *Batch Renormalization* (2017): a layer that normalises with population statistics in training too, while the
gradient still flows through the statistics of the mini-batch.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from xkfac.errors import UnitError


@torch.library.custom_op("xkfac::keep", mutates_args=())
def _kept(tensor: Tensor) -> Tensor:
    return tensor.clone()


@_kept.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor)


def keep(tensor: Tensor) -> Tensor:
    """Return `tensor` such that a compiler may not compute it anew in the backward pass.

    What depends on a running statistic would come out different there, since BN has changed it by then.
    """
    return _kept(tensor) if torch.compiler.is_compiling() else tensor


class _BatchRenorm(_NormBase):
    """Batch renormalization over a mini-batch [N, C, ...].

    In training, with mini-batch statistics mu_bar, var_bar and population statistics mu, var,

        y = gamma * ((x - mu_bar) / sqrt(var_bar + eps) * r + d) + beta,
        r = clip(sqrt((var_bar + eps) / (var + eps)), 1 / r_limit, r_limit),
        d = clip((mu_bar - mu) / sqrt(var + eps), -d_limit, d_limit),

    where no gradient flows through r and d. The limits stay at (1, 0), which is batch normalization, for `warmup`
    training batches and are then relaxed linearly to `r_max` and `d_max`, reached at batch `r_steps` and `d_steps`.
    They follow from the buffer `num_batches_tracked`, so a state dict carries the whole schedule. In evaluation the
    layer is batch normalization.
    """

    _ranks: tuple[int, ...] = ()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup: int = 5_000,
        r_steps: int = 40_000,
        d_steps: int = 25_000,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, True, device=device, dtype=dtype)
        if not (1 <= r_max < float("inf") and 0 <= d_max < float("inf")):
            raise UnitError(f"batch renormalization needs finite r_max >= 1 and d_max >= 0, not {r_max} and {d_max}")
        if not 0 <= warmup <= min(r_steps, d_steps):
            raise UnitError(f"BatchRenorm needs 0 <= warmup <= r_steps and d_steps, not {warmup}, {r_steps}, {d_steps}")
        self.r_max, self.d_max = r_max, d_max
        self.warmup, self.r_steps, self.d_steps = warmup, r_steps, d_steps

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self._ranks:
            raise UnitError(
                f"{type(self).__name__} takes an input of {' or '.join(map(str, self._ranks))} dimensions, "
                f"not {input.dim()}"
            )

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the present r_limit and d_limit, scalars on the layer's device."""
        past = (self._batches() - self.warmup).clamp(min=0)
        r_part = (past / max(self.r_steps - self.warmup, 1)).clamp(max=1)
        d_part = (past / max(self.d_steps - self.warmup, 1)).clamp(max=1)
        return 1 + (self.r_max - 1) * r_part, self.d_max * d_part

    def _batches(self) -> Tensor:
        """Return the number of training batches so far, in float32 at least."""
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        return self.num_batches_tracked.to(torch.promote_types(self.running_mean.dtype, torch.float32))

    def correction(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Return r and d [C] for mini-batch statistics [C], clipped to the present limits and detached."""
        assert self.running_mean is not None
        assert self.running_var is not None
        with torch.no_grad():
            r_limit, d_limit = (limit.to(mean.dtype) for limit in self.limits())
            std = (self.running_var + self.eps).sqrt()
            r = ((var + self.eps).sqrt() / std).clamp(1 / r_limit, r_limit)
            d = ((mean - self.running_mean) / std).clamp(-d_limit, d_limit)
        return keep(r), keep(d)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` [N, C, ...]."""
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        count = input.numel() // input.shape[1]
        if count < 2:
            raise UnitError(
                f"{type(self).__name__} needs more than one value per channel in training, but got an input of shape "
                f"{list(input.shape)}"
            )
        with torch.no_grad():
            axes = [axis for axis in range(input.dim()) if axis != 1]
            var, mean = torch.var_mean(input.to(self.running_mean.dtype), axes, correction=0)
            r, d = self.correction(mean, var)
            if self.track_running_stats:
                self.num_batches_tracked.add_(1)
                rate = 1 / self._batches() if self.momentum is None else self.momentum
                self.running_mean.add_((mean - self.running_mean) * rate)
                self.running_var.add_((var * (count / (count - 1)) - self.running_var) * rate)
        # y = (gamma r) x_hat + (beta + gamma d): one fused normalisation, r and d constant.
        gamma = r if self.weight is None else self.weight * r
        beta = d if self.weight is None else self.weight * d
        beta = beta if self.bias is None else self.bias + beta
        return F.batch_norm(input, None, None, gamma, beta, True, 0.0, self.eps)

    def extra_repr(self) -> str:
        """Show the arguments of the layer and of its schedule."""
        base = "{num_features}, eps={eps}, momentum={momentum}, affine={affine}".format(**self.__dict__)
        return f"{base}, r_max={self.r_max}, d_max={self.d_max}, warmup={self.warmup}"


class BatchRenorm1d(_BatchRenorm):
    """Batch renormalization of [N, C] or [N, C, L]; see `_BatchRenorm` for the formula and the schedule."""

    _ranks = (2, 3)


class BatchRenorm2d(_BatchRenorm):
    """Batch renormalization of [N, C, H, W]; see `_BatchRenorm` for the formula and the schedule."""

    _ranks = (4,)


class BatchRenorm3d(_BatchRenorm):
    """Batch renormalization of [N, C, D, H, W]; see `_BatchRenorm` for the formula and the schedule."""

    _ranks = (5,)


_TO_RENORM: dict[type[nn.Module], type[_BatchRenorm]] = {
    nn.BatchNorm1d: BatchRenorm1d,
    nn.BatchNorm2d: BatchRenorm2d,
    nn.BatchNorm3d: BatchRenorm3d,
}
_TO_BATCHNORM: dict[type[nn.Module], type[nn.Module]] = {renorm: norm for norm, renorm in _TO_RENORM.items()}


def to_renorm(model: nn.Module, **schedule: Any) -> nn.Module:
    """Replace every BatchNorm of `model` by batch renormalization, in place, and return the model.

    Parameters (the same objects, so optimizers stay valid) and buffers are taken over, hence the function in
    evaluation mode stays the same. `schedule` goes to `BatchRenorm1d` and its siblings; the batches counted so far
    count towards it.

    Raises UnitError for a BatchNorm without running statistics, or of a class that is not torch's own.
    """
    return _replace(model, _BatchNorm, _TO_RENORM, schedule)


def to_batchnorm(model: nn.Module) -> nn.Module:
    """Replace every batch renormalization of `model` by BatchNorm, in place, and return the model."""
    return _replace(model, _BatchRenorm, _TO_BATCHNORM, {})


def _replace(
    model: nn.Module,
    old: type[nn.Module],
    table: Mapping[type[nn.Module], type[nn.Module]],
    arguments: dict[str, Any],
) -> nn.Module:
    """Replace all layers of class `old`, or none where one cannot be; a layer that is used twice stays shared."""
    paths = {module: path for path, module in model.named_modules() if isinstance(module, old)}
    new = {module: _convert(module, path, table, arguments) for module, path in paths.items()}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child in new:
                module._modules[name] = new[child]
    return new.get(model, model)


def _convert(
    norm: Any, path: str, table: Mapping[type[nn.Module], type[nn.Module]], arguments: dict[str, Any]
) -> nn.Module:
    name = path or type(norm).__name__
    if type(norm) not in table:
        raise UnitError(
            f"'{name}' is a {type(norm).__name__}, which has no counterpart; "
            "convert it to one of torch's BatchNorm layers first"
        )
    if norm.running_mean is None:
        raise UnitError(f"'{name}' has no running statistics; build it with track_running_stats=True")
    new = table[type(norm)](norm.num_features, norm.eps, norm.momentum, norm.affine, **arguments)
    new.weight, new.bias = norm.weight, norm.bias
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(new, buffer, getattr(norm, buffer))
    # The same dictionaries, so that handles of hooks can still remove them.
    new.__dict__.update({name: value for name, value in vars(norm).items() if name.endswith("_hooks")})
    return new.train(norm.training)
