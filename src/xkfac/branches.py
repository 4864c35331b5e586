"""A branch beside the forward pass: what of the penalty needs no activation runs on a side stream of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.merging import BoundUnit, Interpretation, Reading, _wide
from xkfac.renorm import _BatchRenorm


class Branch:
    """Forks where a forward pass of the model begins and joins where its results are used.

    Under the interpretation brn, in a net that does not clip, W~ - W~* and its product with the curvature depend on
    parameters and on the population's statistics of before the forward pass alone. `gather` copies these, all in one
    tensor, and returns it with the statistics [2, C] by unit that are in it; it is called at the fork, since the
    forward pass changes them. A forward pass must leave the parameters alone, as all but very unusual ones do. Captured
    as a CUDA graph, the work becomes a branch parallel to the forward pass; on other devices it runs in its turn.
    """

    def __init__(self, gather: Callable[[], tuple[Tensor, dict[str, Tensor]]], device: torch.device) -> None:
        self._gather = gather
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._main: Any = None
        self._fork: Any = None
        self._statistics: Any = None
        self._end: Any = None
        self._names: set[str] = set()
        self._fresh: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}
        self.vectors: Tensor

    @torch.no_grad()
    def begin(self, module: nn.Module) -> None:
        """Fork: the forward pass of the model is about to begin."""
        self._given = {}
        if torch.compiler.is_compiling() or not module.training:
            self._fresh = {}
            return
        self.vectors, self._fresh = self._gather()
        self._names = set(self._fresh)
        if self._stream is not None:
            self._fork = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._fork.record()

    def population(self, name: str) -> Tensor | None:
        """Return the statistics [2, C] of a unit's BN at the fork, or None if it has run since."""
        found = self._fresh.pop(name, None)
        if found is not None:
            self._given[name] = found
        return found

    def covers(self, readings: Mapping[str, Reading]) -> bool:
        """Whether the readings are those of the forward pass since the fork, and of all BN."""
        given = self._given
        return bool(given) and all(
            name in given and name in readings and readings[name].population is given[name] for name in self._names
        )

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run on the branch what is inside, which must depend on nothing that came after the fork."""
        self._given = {}
        if self._stream is None:
            yield
            return
        self._main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(self._fork)
        with torch.cuda.stream(self._stream):
            yield
        self._end = self._stream.record_event()

    def catch_up(self, tensor: Tensor) -> None:
        """From here on, depend on all of the forward pass too; a tensor of it will be used."""
        if self._stream is not None:
            self._stream.wait_stream(self._main)
            tensor.record_stream(self._stream)

    def give_statistics(self, gradient: Tensor) -> None:
        """Let the backward pass have the gradient in the statistics, while the branch goes on."""
        if self._stream is not None:
            gradient.record_stream(self._main)
            self._statistics = self._stream.record_event()

    def wait_for_statistics(self) -> None:
        """Have the current stream wait for what `give_statistics` gave."""
        if self._statistics is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._statistics)

    def join(self, results: list[Tensor]) -> None:
        """Have the current stream wait for the end of the branch, whose results it will use."""
        if self._end is None:
            return
        here = torch.cuda.current_stream(self._stream.device)
        here.wait_event(self._end)
        for tensor in results:
            # It was made on one stream and is used on another: its memory must outlive that use.
            tensor.record_stream(here)
        # An event of a step must not be waited for in another, which may be one that is captured.
        self._statistics = self._end = None


class Tap:
    """Reads the statistics of a unit's BN, as `BoundUnit.observe` does, from the input on its way into the BN.

    The gradient through the statistics then joins the BN's own on the way back, where a second use of the input would
    cost another pass over it.
    """

    def __init__(self, bound: BoundUnit, interpretation: Interpretation, branch: Branch | None = None) -> None:
        self._bound, self._interpretation, self._branch = bound, interpretation, branch
        self._through = interpretation in ("bn", "brn") and not isinstance(bound.norm, _BatchRenorm)
        self._twos = torch.full_like(_wide(bound.norm.running_var), 2.0)

    def __call__(self, input: Tensor) -> tuple[Tensor, Reading]:
        """Return what the BN should take in for `input` [N, C, ...], of the same values, and the reading."""
        bound, branch = self._bound, self._branch
        population = None if branch is None else branch.population(bound.unit.name)
        differentiable = input.requires_grad and torch.is_grad_enabled()
        if not self._through or not differentiable or torch._C._are_functorch_transforms_active():
            return input, bound.observe(input, self._interpretation, population)
        input, mean, var = _Tapped.apply(input, self._twos, branch)  # type: ignore[no-untyped-call]
        if self._interpretation == "bn":
            return input, Reading(mean, var)
        if population is None:
            # A copy, since the forward pass is about to change the buffers in place.
            population = torch.stack([_wide(bound.norm.running_mean), _wide(bound.norm.running_var)])
        return input, Reading(mean, var, population=population)


class _Tapped(torch.autograd.Function):
    """h [N, C, ...] -> h, and its mean and variance [C]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, twos: Tensor, branch: Branch | None) -> tuple[Tensor, Tensor, Tensor]:
        if input.device.type in ("cpu", "cuda"):
            # BN's own kernel, which reads activations several times as fast as `var_mean`.
            mean, var = torch.batch_norm_update_stats(_wide(input), None, None, 0.0)
        else:
            var, mean = torch.var_mean(_wide(input), [axis for axis in range(input.dim()) if axis != 1], correction=0)
        ctx.save_for_backward(input, mean)
        ctx.twos, ctx.branch = twos, branch
        ctx.set_materialize_grads(False)
        return input.view_as(input), mean, var

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, to_mean: Tensor | None, to_var: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        """Return g_n + (dmu + 2 dvar (h_n - mu)) / M for M values a channel."""
        if to_mean is None and to_var is None:
            return gradient, None, None
        input, mean = ctx.saved_tensors
        if ctx.branch is not None:
            ctx.branch.wait_for_statistics()
        to_mean = torch.zeros_like(mean) if to_mean is None else to_mean
        to_var = torch.zeros_like(mean) if to_var is None else to_var
        through = _through(_wide(input), mean, to_mean, to_var, ctx.twos)
        count = input.numel() // input.shape[1]
        total = through / count if gradient is None else torch.add(gradient, through, alpha=1 / count)
        return total.to(input.dtype), None, None


def _through(input: Tensor, mean: Tensor, to_mean: Tensor, to_var: Tensor, twos: Tensor) -> Tensor:
    """Return dmu + 2 dvar (h - mu), [N, C, ...]."""
    if input.device.type == "cuda" and mean.dtype == twos.dtype and not torch.is_grad_enabled():
        # The affine map of synchronised BN, which is one kernel and has no gradient of its own.
        return torch.batch_norm_elemt(input, to_var, to_mean, mean, twos, 0.0)
    shape = (-1, *[1] * (input.dim() - 2))
    constant = torch.addcmul(to_mean, to_var, mean, value=-2)
    return torch.addcmul(constant.view(shape), input, to_var.view(shape), value=2)
