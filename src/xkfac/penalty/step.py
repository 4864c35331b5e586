"""A penalised step: everything that the penalty needs in a training step, owned by one object."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xkfac.curvature.operator import Curvature
from xkfac.methods import Method
from xkfac.model.hooks import Hook
from xkfac.model.merged_weight import Reading, bind
from xkfac.model.passes import device_of, norms_of
from xkfac.model.units import Unit
from xkfac.penalty.bn_readings import BnReadings
from xkfac.penalty.bn_taps import BnReading
from xkfac.penalty.fused import FusedPenalty
from xkfac.penalty.implicit import Implicit
from xkfac.penalty.interval import IMPLICIT, Interval
from xkfac.penalty.quadratic import Penalty
from xkfac.penalty.side_stream import SideStream
from xkfac.penalty.stiffness import stiffness


class PenalisedStep:
    """L_s of a network under the BN statistics of its latest forward pass, as value and as gradients.

    It owns the bound units, the quadratic penalty and its fused form, the readings of BN, the side stream, and the
    interval at which steps evaluate the penalty. The model carries hooks until `close`.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        units: Iterable[Unit],
        curvature: Curvature,
        anchor: Mapping[str, Tensor],
        damping: float,
        every: int | None,
    ) -> None:
        device = device_of(model)
        self.method = method
        self._follows = every is None
        if every is None and (device.type != "cpu" or (dist.is_available() and dist.is_initialized())):
            every = 1  # to look at gradients would synchronise the device, and processes would not decide alike
        self.interval = Interval(every)
        self._implicit_every = IMPLICIT if method.interpretation == "eval" else 1
        self.bound = bind(model, units)
        norms = norms_of(model).values() if method.fixed_bn or method.fixed_affine else ()
        self._fixed = {id(one) for norm in norms for one in norm.parameters(recurse=False)}
        self.quadratic = Penalty(curvature, anchor, damping)
        self._fused = FusedPenalty(self.quadratic, self.bound) if self.bound else None
        self._zero = torch.zeros((), device=device)
        self._side: SideStream | None = None
        fixed = method.fixed_bn or method.fixed_statistics
        if self._fused is not None and self._fused.is_known_before(method.interpretation, fixed):
            gather = self._fused.gather

            def without_statistics() -> tuple[Tensor, dict[str, Tensor]]:  # which no pass reads where they are fixed
                return gather()[0], {}

            self._side = SideStream(without_statistics if fixed else gather, list(model.parameters()), device)
        self.readings = BnReadings(model, method, self.bound, self._side)
        self._hook: Any = None
        if self._side is not None:
            self._hook = model.register_forward_pre_hook(Hook(self._before_forward))

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if self._side is not None and not torch.compiler.is_compiling() and not self.interval.skips_next:
            self._side.start(module)

    def value(self) -> Tensor:
        """Return L_s for the readings since the last call; differentiable."""
        return self._value_and_product(None)[0]

    def next(self, loss: Tensor) -> tuple[Tensor | None, int]:
        """Return L_s of a training step, differentiable, and its weight; None and 0 where the interval leaves it out.

        A loss without gradients, as a validation has it, is that of no step, and the interval does not count it.

        Raises XkfacError where the readings are not those of all forward passes that `loss` depends on.
        """
        if self._fused is None or torch.compiler.is_compiling() or not loss.requires_grad:
            return self.value(), 1
        if self.interval.skips():
            self.readings.take(loss)
            return None, 0
        value, product = self._value_and_product(loss)
        return value, self.interval.weight(product)

    def _value_and_product(self, loss: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._fused is None:
            return self._zero, self._zero
        readings = self.readings.take(loss)
        if not torch.compiler.is_compiling():
            return self._fused.value_and_product(readings, self._side_for(readings))
        # A compiler fuses by itself, if it sees the single operations.
        weights = {name: bound.merged_weight(readings.get(name)) for name, bound in self.bound.items()}
        return self.quadratic(weights), self._zero

    def _side_for(self, readings: Mapping[str, Reading]) -> SideStream | None:
        return self._side if self._side is not None and self._side.covers(readings) else None

    def backward(self, loss: Tensor, source: float | Tensor, target: float | Tensor) -> Tensor | None:
        """Add the gradients of source * L_s + target * loss to `.grad` of all parameters.

        Those of L_s in parameters are added at once, after the backward pass of the loss and of the BN statistics.
        Returns L_s, or None where the interval leaves it out.
        """
        assert self._fused is not None
        start = target.to(loss.dtype) if isinstance(target, Tensor) else loss.new_full((), target)
        readings = self.readings.take(loss)
        if self.interval.skips():
            loss.backward(start)  # type: ignore[no-untyped-call]
            return None
        side = self._side_for(readings)
        penalty, pairs = self._fused.value_and_gradients(readings, source, side, self.interval.weight)
        own = [pair for pair in pairs if pair[0].is_leaf]
        inner = [pair for pair in pairs if not pair[0].is_leaf]
        tapped = {id(one) for reading in readings.values() for one in _waited_for(reading)}
        if side is not None and any(id(tensor) not in tapped for tensor, _ in inner):
            side.wait([penalty, *(gradient for _, gradient in pairs)])
        torch.autograd.backward([loss, *(a for a, _ in inner)], [start, *(b for _, b in inner)])
        if side is not None:
            side.wait([penalty, *(gradient for _, gradient in own)])
        accumulate(own)
        return penalty

    @property
    def bears_strength(self) -> bool:
        """Whether implicit steps are stable under any strength: they have all of the penalty, which reads no batch."""
        known = self.method.settings.kind != "corrected" and (self.method.merge or self.method.per_parameter)
        return self.method.interpretation == "eval" and known

    def undamped(self) -> Tensor:
        """Return L_s without its damping, every BN read with its population statistics."""
        return self._zero if self._fused is None else self._fused.undamped()

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that L_s depends on, but for those that stay fixed."""
        known = {id(one): one for bound in self.bound.values() for one in bound.parameters()}
        return [one for key, one in known.items() if one.requires_grad and one.is_leaf and key not in self._fixed]

    def changed_by(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the `parameters`; where all are frozen, those that an optimizer has, which may learn later."""
        known = {id(one) for group in optimizer.param_groups for one in group["params"]}
        frozen = [one for bound in self.bound.values() for one in bound.parameters() if id(one) not in self._fixed]
        return self.parameters or [one for one in frozen if id(one) in known]

    def gradients(self, implicit: Implicit | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return the parameters that L_s depends on, each with the gradient in it under population statistics."""
        parameters = self.parameters
        if self._fused is None or not parameters:
            return []
        with torch.enable_grad():
            gradients = list(torch.autograd.grad(self._fused({}), parameters))
        return list(zip(parameters, gradients if implicit is None else implicit(parameters, gradients), strict=True))

    def implicit(self, weight: float, momentum: float, rank: int) -> Implicit:
        """Return what makes steps implicit in `weight` times L_s; an interval that was not given becomes fixed.

        Explicit steps bear k eta ls h up to 2 (1 + m^k) / (1 - m^k), as `stable_lr` says; half of it is taken.
        """
        if self._follows:
            self.interval = Interval(self._implicit_every)
        every, curvature, damping = self.interval.every, self.quadratic.curvature, self.quadratic.damping
        bearable = (1 + momentum**every) / (1 - momentum**every)
        return Implicit(curvature, damping, self.bound.values(), weight * every, rank, bearable)

    def stable_lr(self, source: float, momentum: float, implicit: Implicit | None, iterations: int, seed: int) -> float:
        """Return the learning rate above which SGD with a momentum m diverges on source * L_s.

        A step with k-fold weight, followed by k - 1 without the penalty, multiplies displacement and velocity along an
        eigenvector of eigenvalue mu by a matrix of determinant m^k and trace 1 + m^k - lr k mu (1 + m + ... + m^(k-1)).
        Its eigenvalues are below 1 in size while the trace is above -(1 + m^k).
        """
        largest = stiffness(lambda: self.gradients(implicit), iterations, seed) if self.bound and source else 0.0
        if largest <= 0:
            return float("inf")
        k = 1 if self.interval.adapts else self.interval.every
        return 2 * (1 + momentum**k) / (k * source * largest * sum(momentum**i for i in range(k)))

    def close(self) -> None:
        """Take the hooks off the model."""
        self.readings.remove()
        if self._hook is not None:
            self._hook.remove()


def accumulate(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to `.grad` of parameters, all at once."""
    waiting = list(pairs)
    while waiting:
        # A parameter of several units has as many gradients, and a turn takes one of each.
        turn = {id(parameter): (parameter, gradient) for parameter, gradient in waiting}
        waiting = [(a, b) for a, b in waiting if turn[id(a)][1] is not b]
        known = []
        for parameter, gradient in turn.values():
            if parameter.grad is None:
                parameter.grad = gradient
            elif parameter.grad.is_sparse:  # that of an embedding, to which nothing dense can be added in place
                parameter.grad = gradient + parameter.grad
            else:
                known.append((parameter.grad, gradient))
        if known:
            torch._foreach_add_([a for a, _ in known], [b for _, b in known])


def _waited_for(reading: Reading) -> tuple[Tensor, Tensor]:
    """Return the tensors of a reading whose gradients a `Tap` waits for by itself."""
    return reading.placeholders if isinstance(reading, BnReading) else (reading.mean, reading.var)
