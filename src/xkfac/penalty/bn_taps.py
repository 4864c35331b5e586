"""BN that gives the statistics of its mini-batch to the penalty, and takes the penalty's gradient in them along."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.model.hooks import Hook, replace_forward, runs_its_class
from xkfac.model.merged_weight import (
    BoundUnit,
    Interpretation,
    Reading,
    norm_input,
    plus_statistics,
    wide,
    with_statistics,
)
from xkfac.model.renorm import _BatchRenorm
from xkfac.penalty.side_stream import SideStream

Note = Callable[[Reading], None]
_Hook = Callable[[nn.Module, tuple[Tensor, ...], dict[str, Tensor]], Any]
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""BN layers whose forward pass is known to be BN and nothing else."""


def learns(norm: Any) -> bool:
    """Whether a BN takes in a mini-batch of training.

    In a curvature pass it uses the statistics of mini-batches, too, but its running ones stand still: see `set_mode`.
    """
    return bool(norm.training and norm.track_running_stats)


class BnReading(Reading):
    """A reading with mean and 1 / sqrt(var + eps) [C] as BN itself has computed them.

    The gradient of a loss in mean and var is given as the gradient in two `placeholders` [C], tensors without values,
    and so reaches the backward pass of BN. With `sums` it is given in another form. BN gives
    dh_n = s (g_n - S / M - (h_n - mean) X / (M (var + eps))), with s = gamma / sqrt(var + eps), from the sums
    S = sum_n g_n and X = sum_n g_n (h_n - mean) of the gradients g_n in its output. A gradient in mean and var adds to
    dh_n what a change of these sums would: dS = -dL/dmean / s and dX = -2 (var + eps) dL/dvar / s. Given dS and dX, it
    costs no pass over the activations.
    """

    inverse: Tensor
    placeholders: tuple[Tensor, Tensor]
    sums: bool

    def __init__(self, tensors: Sequence[Tensor], eps: float, population: Tensor | None) -> None:
        mean, inverse, *placeholders = tensors
        names = ("mean", "inverse", "placeholders", "sums", "_eps", "population")
        values = (mean, inverse, tuple(placeholders), mean.device.type == "cuda", eps, population)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(self, name, value)

    @property
    def var(self) -> Tensor:
        """The variance [C] of the mini-batch, with gradient."""
        return self.inverse.pow(-2) - self._eps  # type: ignore[attr-defined, no-any-return]


class Tap:
    """Reads the statistics of a unit's BN, as `BoundUnit.observe` does, while the BN runs.

    The gradient through the statistics joins the BN's own on the way back, where a second use of the input would cost
    another pass over it. Where the BN is torch's own, the statistics are those that it works out anyway.
    """

    def __init__(self, bound: BoundUnit, interpretation: Interpretation, side: SideStream | None = None) -> None:
        self._bound, self._interpretation, self._side = bound, interpretation, side
        self._through = interpretation in ("bn", "brn")
        self._counts: dict[int, Tensor] = {}

    def put_on(self, note: Note) -> Any:
        """Have the unit's BN give `note` a reading of every mini-batch of training, until `remove()` of the result."""
        norm = self._bound.norm
        if type(norm) not in PLAIN or not runs_its_class(norm) or not self._through:
            return norm.register_forward_pre_hook(Hook(self._hook(note)), with_kwargs=True)

        def forward(module: Any, input: Tensor) -> Tensor:
            if not learns(module):
                return type(module).forward(module, input)  # type: ignore[no-any-return]
            if self._is_normalised_here(module, input):
                output, reading = self.normalise(module, input)
                note(reading)
                return output
            return type(module).forward(module, self._noted(input, note))  # type: ignore[no-any-return]

        return replace_forward(norm, forward)

    def _hook(self, note: Note) -> _Hook:
        def read(module: nn.Module, inputs: tuple[Tensor, ...], keywords: dict[str, Tensor]) -> Any:
            if not learns(module):
                return None
            input = self._noted(norm_input(inputs, keywords), note)
            return ((input, *inputs[1:]), keywords) if inputs else (inputs, {**keywords, "input": input})

        return read

    def _noted(self, input: Tensor, note: Note) -> Tensor:
        """Return what the BN should take in for `input`, after its reading was noted."""
        if torch.compiler.is_compiling():
            reading = self._bound.read(input, self._interpretation)
        else:
            input, reading = self(input)
        note(reading)
        return input

    def __call__(self, input: Tensor) -> tuple[Tensor, Reading]:
        """Return what the BN should take in for `input` [N, C, ...], of the same values, and the reading."""
        differentiable = input.requires_grad and torch.is_grad_enabled()
        if not self._through or not differentiable or torch._C._are_functorch_transforms_active():
            return input, self._bound.observe(input, self._interpretation, self._population())
        input, mean, var = with_statistics(input, self.wait)
        norm = self._bound.norm
        if isinstance(norm, _BatchRenorm) and self._interpretation == "brn":
            return input, Reading(mean, var, *norm.correction(mean.detach(), var.detach()))
        return input, Reading(mean, var, population=self._population_read())

    def _is_normalised_here(self, module: Any, input: Tensor) -> bool:
        """Whether `normalise` does what the BN would, in its own precision."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return False
        if not (input.requires_grad and torch.is_grad_enabled()) or input.dim() < 2 or module.momentum is None:
            return False
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        own = [one.dtype for one in (module.weight, module.bias, module.running_mean) if one is not None]
        narrow = input.dtype in (torch.bfloat16, torch.float16) and input.device.type == "cuda"
        return all(one == wide for one in own) and (narrow or input.dtype == wide) and input.numel() > input.shape[1]

    def normalise(self, module: Any, input: Tensor) -> tuple[Tensor, Reading]:
        """Return the output of a BN in training mode for `input` [N, C, ...], and the reading."""
        module._check_input_dim(input)
        population = self._population_read()
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        output, *tensors = _Normalised.apply(input, module.weight, module.bias, module, self)  # type: ignore[no-untyped-call]
        return output, BnReading(tensors, module.eps, population)

    def _population(self) -> Tensor | None:
        return None if self._side is None else self._side.population(self._bound.unit.name)

    def _population_read(self) -> Tensor | None:
        """Return a copy of the population's statistics [2, C], where the interpretation reads them."""
        if self._interpretation != "brn":
            return None
        population, norm = self._population(), self._bound.norm
        if population is not None:
            return population
        # A copy, since the forward pass is about to change the buffers in place.
        return torch.stack([wide(norm.running_mean), wide(norm.running_var)])

    def wait(self) -> None:
        """Have the current stream wait for gradients from the side stream."""
        if self._side is not None:
            self._side.wait_for_statistics()

    def count(self, number: int, device: torch.device) -> Tensor:
        """Return how many values a channel has, as BN's kernels take it."""
        count = self._counts.get(number)
        if count is None:
            count = torch.full((1,), number, dtype=torch.int32, device=device)
            # What is made while a graph is captured has its value in replays of that graph alone.
            if not torch.cuda.is_current_stream_capturing():
                self._counts[number] = count
        return count


class _Normalised(torch.autograd.Function):
    """BN in training mode: h -> y, and mean, 1 / sqrt(var + eps) and the placeholders of `BnReading`."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Any, tap: Tap
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        # As `torch.batch_norm` chooses between its own two kernels and cuDNN's one, which takes less time.
        given = input, weight, bias, norm.running_mean, norm.running_var
        output, mean, inverse, *_ = torch._batch_norm_impl_index(
            *given, True, norm.momentum, norm.eps, torch.backends.cudnn.enabled
        )
        ctx.save_for_backward(input, weight, mean, inverse)
        ctx.tap, ctx.eps = tap, norm.eps
        ctx.set_materialize_grads(False)
        return output, mean, inverse, torch.empty_like(mean), torch.empty_like(mean)

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, to_mean: Tensor | None, to_inverse: Tensor | None, *given: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse = ctx.saved_tensors
        ctx.tap.wait()
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        if gradient is not None and input.device.type == "cuda" and not torch.is_grad_enabled():
            gradients, given = _by_sums(ctx, gradient, given), (None, None)
        elif gradient is not None:
            known = mean.detach(), inverse.detach()  # the derivative of this function takes them for functions of h
            gradients = torch.ops.aten.native_batch_norm_backward(
                gradient, input, weight, None, None, *known, True, ctx.eps, ctx.needs_input_grad[:3]
            )
        if input.device.type == "cuda":
            given = _from_sums(given, inverse, weight)
        to_mean, to_var = _total(to_mean, given[0]), given[1]
        if to_inverse is not None:
            to_var = _total(to_var, to_inverse * inverse.pow(3) * -0.5)
        own, *affine = gradients
        if to_mean is not None or to_var is not None:
            own = plus_statistics(own, input, mean, to_mean, to_var)
        wanted = ctx.needs_input_grad[1:3]
        return own, *(one if wants else None for one, wants in zip(affine, wanted, strict=True)), None, None


def _from_sums(changes: Sequence[Tensor | None], inverse: Tensor, weight: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return dL/dmean = -s dS and dL/dvar = -s dX / (2 (var + eps)), where dS and dX are given."""
    factors = (-1.0, 0), (-0.5, 2)
    gradients = [
        None if change is None else factor * change * inverse.pow(1 + power)
        for change, (factor, power) in zip(changes, factors, strict=True)
    ]
    return tuple(one if one is None or weight is None else one * weight for one in gradients)


def _by_sums(
    ctx: Any, gradient: Tensor, changes: Sequence[Tensor | None]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients in h, gamma and beta, the sums S and X changed by dS and dX, if given."""
    input, weight, mean, inverse = ctx.saved_tensors
    if gradient.stride() != input.stride():
        gradient = torch.empty_like(input).copy_(gradient)
    needs = ctx.needs_input_grad
    *sums, to_weight, to_bias = torch.batch_norm_backward_reduce(
        gradient, input, mean, inverse, weight, True, needs[1], needs[2]
    )
    pairs = [(own, change) for own, change in zip(sums, changes, strict=True) if change is not None]
    if pairs:
        torch._foreach_add_([own for own, _ in pairs], [change for _, change in pairs])
    count = ctx.tap.count(input.numel() // input.shape[1], input.device)
    own = torch.batch_norm_backward_elemt(gradient, input, mean, inverse, weight, sums[0], sums[1], count)
    return own, to_weight, to_bias


def _total(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second
