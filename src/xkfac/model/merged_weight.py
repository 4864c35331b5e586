"""The merged weight W~ of a unit under an interpretation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from xkfac.errors import MismatchError, NotFiniteError
from xkfac.model.passes import unwrap
from xkfac.model.renorm import _BatchRenorm, keep
from xkfac.model.units import Unit

Interpretation = Literal["bn", "brn", "const", "eval"]
INTERPRETATIONS: tuple[Interpretation, ...] = ("bn", "brn", "const", "eval")


@dataclass(frozen=True)
class Reading:
    """Statistics under which a BN is read, all [C]: W~ = (gamma r / sqrt(var + eps)) w, and so on (eq. mergebrn).

    `differentiable` is False where the gradient should flow through mean and var and cannot, since gradients were
    disabled when they were read. With `population` [2, C], mean and variance, r and d are not worked out yet: they are
    those that bring the value to these statistics.
    """

    mean: Tensor
    var: Tensor
    r: Tensor | float = 1.0
    d: Tensor | float = 0.0
    differentiable: bool = True
    population: Tensor | None = None


class _Statistics(torch.autograd.Function):
    """h [N, C, ...] -> h, and its mean and variance [C]; their gradients in h are one pass over it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, wait: Callable[[], None]) -> tuple[Tensor, Tensor, Tensor]:
        if input.device.type in ("cpu", "cuda"):
            # BN's own kernel, which reads activations several times as fast as `var_mean`.
            mean, var = torch.batch_norm_update_stats(wide(input), None, None, 0.0)
        else:
            mean, var = _mean_and_var(input)
        ctx.save_for_backward(input, mean)
        ctx.wait = wait
        ctx.set_materialize_grads(False)
        return input.view_as(input), mean, var

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, to_mean: Tensor | None, to_var: Tensor | None
    ) -> tuple[Tensor | None, None]:
        if to_mean is None and to_var is None:
            return gradient, None
        input, mean = ctx.saved_tensors
        ctx.wait()
        return plus_statistics(gradient, input, mean, to_mean, to_var), None


def with_statistics(input: Tensor, wait: Callable[[], None]) -> tuple[Tensor, Tensor, Tensor]:
    """Return an input [N, C, ...] itself, and its mean and variance [C]; their gradients join on the way back.

    `wait` is called before a gradient in the statistics is used, which may come from another stream.
    """
    return _Statistics.apply(input, wait)  # type: ignore[no-any-return, no-untyped-call]


def plus_statistics(
    gradient: Tensor | None, input: Tensor, mean: Tensor, to_mean: Tensor | None, to_var: Tensor | None
) -> Tensor:
    """Return g_n + (dmu + 2 dvar (h_n - mu)) / M for M values per channel, [N, C, ...]."""
    count, shape = input.numel() // input.shape[1], (-1, *[1] * (input.dim() - 2))
    to_mean = torch.zeros_like(mean) if to_mean is None else to_mean
    to_var = torch.zeros_like(mean) if to_var is None else to_var
    constant = torch.addcmul(to_mean, to_var, mean, value=-2)
    through = torch.addcmul(constant.view(shape), wide(input), to_var.view(shape), value=2)
    total = through / count if gradient is None else torch.add(gradient, through, alpha=1 / count)
    return total.to(input.dtype)


def _mean_and_var(input: Tensor) -> tuple[Tensor, Tensor]:
    axes = [axis for axis in range(input.dim()) if axis != 1]
    var, mean = torch.var_mean(wide(input), axes, correction=0)
    return mean, var


class BoundUnit:
    """A unit tied to the modules of a model that hold its parameters."""

    def __init__(self, model: nn.Module, unit: Unit) -> None:
        self.unit = unit
        self._weight = _locate(model, unit, unit.weight)
        self._bias = _locate(model, unit, unit.bias)
        self.norm: Any = None if unit.norm is None else _norm_at(model, unit)
        if unit.convolution is not None:
            self._check("kernel", unit.convolution.kernel, self.weight.shape[2:])
        self._check("merged weight", unit.shape, self._matrix_shape())
        if self.norm is not None:
            self._check("number of BN channels", (unit.shape[0] * unit.shape[1],), (int(self.norm.num_features),))

    def _check(self, what: str, memory: Iterable[int], model: Iterable[int]) -> None:
        if tuple(memory) != tuple(model):
            raise MismatchError(
                f"unit '{self.unit.name}': the memory's {what} is {_times(memory)}, the model's {_times(model)}; load "
                f"the memory's network, or leave a head that has changed out: memory.without('{self.unit.name}')"
            )

    @property
    def weight(self) -> Tensor:
        """The layer's weight, or the free parameter."""
        assert self._weight is not None
        weight: Tensor = getattr(*self._weight)
        return weight

    @property
    def bias(self) -> Tensor | None:
        """The layer's own bias."""
        return None if self._bias is None else getattr(*self._bias)

    def _matrix_shape(self) -> tuple[int, int, int]:
        groups = self.unit.shape[0]
        if self.unit.kind in ("norm", "unmerged"):
            return (self.norm.num_features, 1, 2 if self.unit.kind == "norm" else 4)
        if self.unit.kind == "free":
            return (1, 1, self.weight.numel())
        rows, columns = self.weight.shape[0], self.weight[0].numel()
        return (groups, rows // groups, columns + self.unit.homogeneous)

    def population(self) -> Reading:
        """Return the population statistics, as they are at this moment."""
        # Copies, since the next forward pass changes the buffers in place, maybe before this one's backward pass.
        return Reading(keep(self.norm.running_mean.clone()), keep(self.norm.running_var.clone()))

    def read(self, input: Tensor, interpretation: Interpretation) -> Reading:
        """Return the reading of the BN for a mini-batch `input` [N, C, ...] that is about to pass it.

        bn: mini-batch statistics, with gradient. const: the same, detached. brn: with r and d that bring the value
        to the population statistics while the gradient flows through the mini-batch's; r and d are clipped only in a
        batch-renormalized net, where the forward pass clips them too.
        """
        return self._with_correction(self.observe(input, interpretation))

    def observe(self, input: Tensor, interpretation: Interpretation, population: Tensor | None = None) -> Reading:
        """Return what `read` does, with the population's statistics in place of r and d that follow from them.

        `population` [2, C] is a copy of them, if one is at hand.
        """
        if interpretation == "const":
            return Reading(*batch_statistics(input.detach()))
        mean, var = batch_statistics(input)
        differentiable = torch.is_grad_enabled()
        if interpretation == "bn":
            return Reading(mean, var, differentiable=differentiable)
        if isinstance(self.norm, _BatchRenorm):
            return Reading(mean, var, *self.norm.correction(mean.detach(), var.detach()), differentiable)
        if population is None:
            # A copy, since the forward pass is about to change the buffers in place.
            population = torch.stack([wide(self.norm.running_mean), wide(self.norm.running_var)])
        return Reading(mean, var, differentiable=differentiable, population=population)

    def _with_correction(self, reading: Reading) -> Reading:
        """Return `reading` with r and d [C] that bring mini-batch statistics [C] to the population's."""
        if reading.population is None:
            return reading
        batch_mean, batch_var = reading.mean, reading.var
        with torch.no_grad():
            mean, var = reading.population
            std = (var + self.norm.eps).sqrt()
            r, d = (batch_var + self.norm.eps).sqrt() / std, (batch_mean - mean) / std
        return Reading(batch_mean, batch_var, keep(r), keep(d), reading.differentiable)

    def applied(self, input: Tensor) -> Reading:
        """Return the reading that the BN itself applies to a mini-batch `input` [N, C, ...] in its present mode."""
        if not self.norm.training:
            return self.population()
        return self.read(input, "brn" if isinstance(self.norm, _BatchRenorm) else "bn")

    def normalisation(self, reading: Reading) -> tuple[Tensor, Tensor]:
        """Return mu and sigma [C] of the BN under `reading`: y = gamma (h - mu) / sigma + beta.

        The equation of BRN, y = gamma ((h - mu_bar) / sigma_bar r + d) + beta, has this form with sigma = sigma_bar / r
        and mu = mu_bar - d sigma, r and d being constants.
        """
        std = (wide(reading.var) + self.norm.eps).sqrt() / reading.r
        return wide(reading.mean) - reading.d * std, std

    def parameters(self) -> list[Tensor]:
        """Return the parameters that the unit is made of."""
        own = [None if self._weight is None else self.weight, self.bias]
        affine = [] if self.norm is None else [self.norm.weight, self.norm.bias]
        return [parameter for parameter in (*own, *affine) if parameter is not None]

    def statistics(self) -> list[Tensor]:
        """Return the running mean and variance of the unit's BN, if it has one."""
        return [] if self.norm is None else [self.norm.running_mean, self.norm.running_var]

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the unit takes a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def merged_weight(self, reading: Reading | None = None) -> Tensor:
        """Return W~ [groups, rows, columns] (eq. mergebn, eq. mergebrn), read with population statistics by default.

        That of an unmerged BN is its gamma, beta, mu and sigma side by side, gamma = 1 and beta = 0 where it has none.
        Differentiable in the unit's parameters and in the statistics of `reading`.
        """
        reading = reading and self._with_correction(reading)
        if self.norm is None:
            weight = wide(self.weight)
            if self.bias is not None:
                weight = torch.cat([weight.flatten(1), wide(self.bias)[:, None]], 1)
            return weight.reshape(self.unit.shape)
        if self.unit.kind == "unmerged":
            mean, std = self.normalisation(reading or self.population())
            gamma = torch.ones_like(std) if self.norm.weight is None else wide(self.norm.weight)
            beta = torch.zeros_like(std) if self.norm.bias is None else wide(self.norm.bias)
            return torch.stack([gamma, beta, mean, std], 1).reshape(self.unit.shape)
        scale, shift = self._affine(reading or self.population())
        if self.unit.kind == "norm":
            return torch.stack([scale, shift], 1).reshape(self.unit.shape)
        weight = scale[:, None] * wide(self.weight).flatten(1)
        if self.bias is not None:
            shift = shift + scale * wide(self.bias)
        return torch.cat([weight, shift[:, None]], 1).reshape(self.unit.shape)

    def _affine(self, reading: Reading) -> tuple[Tensor, Tensor]:
        """Return gamma~ and beta~ [C]: the BN as the affine map it applies under `reading`."""
        mean, var = wide(reading.mean), wide(reading.var)
        inverse = (var + self.norm.eps).rsqrt() * reading.r
        if self.norm.weight is None:
            return inverse, reading.d - mean * inverse
        gamma = wide(self.norm.weight)
        scale = gamma * inverse
        shift = gamma * reading.d - scale * mean
        return scale, shift if self.norm.bias is None else shift + wide(self.norm.bias)


def bind(model: nn.Module, units: Iterable[Unit]) -> dict[str, BoundUnit]:
    """Tie units to a model, by name.

    Raises MismatchError for the first unit that the model does not have, or has in another shape.
    """
    model = unwrap(model)
    return {unit.name: BoundUnit(model, unit) for unit in units}


def anchor_of(model: nn.Module, units: Iterable[Unit]) -> dict[str, Tensor]:
    """Return the anchor: a copy of the merged weights W~ of a model under its population statistics.

    Raises NotFiniteError for a unit whose weight or statistics are not finite.
    """
    with torch.no_grad():
        anchor = {name: bound.merged_weight().clone() for name, bound in bind(model, units).items()}
    for name, weight in anchor.items():
        if not bool(weight.isfinite().all()):
            raise NotFiniteError(f"the merged weight of unit '{name}' is not finite; check weights and BN statistics")
    return anchor


def batch_statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance [C] of a mini-batch [N, C, ...], in float32 at least, with gradient."""
    # Compilers and the transforms of torch.func see through torch's own operation only.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not input.requires_grad:
        return _mean_and_var(input)
    return with_statistics(input, lambda: None)[1:]


def norm_input(inputs: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> Tensor:
    """Return the input of a BN, as a hook sees it, given by position or by keyword."""
    return inputs[0] if inputs else keywords["input"]


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 at least."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def _times(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def _locate(model: nn.Module, unit: Unit, name: str | None) -> tuple[nn.Module, str] | None:
    if name is None:
        return None
    path, _, attribute = name.rpartition(".")
    try:
        model.get_parameter(name)
        return model.get_submodule(path), attribute
    except AttributeError:
        raise MismatchError(f"unit '{unit.name}': the model lacks '{name}'; is it the memory's network?") from None


def _norm_at(model: nn.Module, unit: Unit) -> Any:
    assert unit.norm is not None
    try:
        norm = model.get_submodule(unit.norm)
    except AttributeError:
        norm = None
    if not isinstance(norm, (_BatchNorm, _BatchRenorm)):
        raise MismatchError(f"unit '{unit.name}': the model lacks BN '{unit.norm}'; is it the memory's network?")
    if norm.running_mean is None:
        raise MismatchError(
            f"unit '{unit.name}': the model's '{unit.norm}' has no running statistics; build it with "
            "track_running_stats=True"
        )
    return norm
