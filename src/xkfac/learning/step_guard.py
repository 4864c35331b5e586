"""Guards the training steps of a learner: each is checked for what would go wrong without a word."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from xkfac.errors import NotFiniteError, XkfacError
from xkfac.learning.begin_checks import check_not_replaced
from xkfac.learning.divergence import Monitor, StartingPoint, blamed_norm
from xkfac.learning.step_checks import Accumulation, check_loss, check_reduction
from xkfac.penalty.step import PenalisedStep


class StepGuard:
    """Checks losses, layers, gradients that add up, and the penalty of steps, as little as it can in each.

    radius: that of the memory's calibration, None without one. stable_lr: gives the learner's, where the network is. No
    step is synchronised, and a compiled one is not looked at. `stepped` is whether there was any step.
    """

    def __init__(
        self,
        model: nn.Module,
        step: PenalisedStep,
        radius: float | None,
        stable_lr: Callable[[], float],
    ) -> None:
        self._model, self._step = model, step
        self._radius, self._stable_lr = radius, stable_lr
        self._monitor = Monitor(radius)
        self.history = self._monitor.history
        self._starting_point: StartingPoint | None = None
        self._accumulation = Accumulation(None)
        self.stepped = False

    def before_step(self, loss: Tensor) -> None:
        """Check the loss, and at the first step what need not be checked again.

        Raises XkfacError for a loss that is no mean over examples, MismatchError for a layer that was replaced.
        """
        check_loss(loss)
        if torch.compiler.is_compiling() or not self._step.bound or self._starting_point is not None:
            return
        check_not_replaced(self._model, self._step.bound)
        check_reduction(loss)
        if loss.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._starting_point = StartingPoint(self._step.bound.values())
        weights = [one.weight for one in self._step.bound.values() if one.unit.weight is not None]
        leaves = (weight for weight in weights if weight.is_leaf and weight.requires_grad)
        self._accumulation = Accumulation(next(leaves, None))

    def watch_backward(self, penalty: Tensor, share: float | Tensor | None) -> None:
        """Look at gradients when the backward pass of a penalty comes, unless the share of a step is given."""
        accumulation = self._accumulation
        if torch.compiler.is_compiling():
            return
        if share is None and accumulation.looks and penalty.requires_grad:
            penalty.register_hook(lambda _: accumulation.before_backward())  # type: ignore[no-untyped-call]

    def before_backward(self, share: float | None) -> None:
        """Look at gradients, since a backward pass is about to begin."""
        if share is None:
            self._accumulation.before_backward()

    def after_backward(self) -> None:
        """Look at gradients, since the penalty's were added to them after a backward pass."""
        self._accumulation.after_backward()

    def see(self, penalty: Tensor, loss: Tensor) -> None:
        """Look at the penalty of a step, or of one before, and at its loss.

        Raises NotFiniteError for one that is not finite any more.
        """
        if torch.compiler.is_compiling():
            return
        if self._step.bound and not self._monitor.is_finite(penalty, loss, self._step.undamped):
            raise self._diverged()

    def check_learnt(self) -> None:
        """Check, after all steps, that there were any, that all is finite and, with a warning, within the radius."""
        if not self._step.bound:
            return
        check_not_replaced(self._model, self._step.bound)
        if not self.stepped:
            raise XkfacError(
                "objective was never called, so nothing has protected the past while the network learnt; call "
                "objective(loss) in every training step, or, if the network was trained otherwise on purpose, extend "
                "the memory with memory.extend(model, xkfac.estimate(model, loader, ...), weights=(ls, lt))"
            )
        undamped = self._step.undamped().item()
        if not math.isfinite(undamped):
            raise self._diverged()
        self._monitor.judge(undamped)

    @property
    def over_radius(self) -> float | None:
        """L_s without damping over the radius, where the network is now; None without a radius."""
        if self._radius is None or not self._step.bound:
            return None
        undamped = self._step.undamped().item()
        if self._radius == 0:
            return math.inf if undamped > 0 else 0.0
        return undamped / self._radius

    def remove(self) -> None:
        """Take the hook off the model."""
        self._accumulation.remove()

    def _diverged(self) -> NotFiniteError:
        """Return the error that says why the penalty is not finite any more."""
        norm = blamed_norm(self._step.bound.values())
        if norm is not None:
            return NotFiniteError(
                f"the statistics of '{norm}' are not finite although all weights are; check the inputs of the network"
            )
        limit = math.nan
        if self._starting_point is not None:
            with self._starting_point.restored():
                limit = self._stable_lr()
        return NotFiniteError(
            "the penalty is not finite any more: the steps are too long for it, since SGD diverges above a learning "
            f"rate of {limit:.2g} along its stiffest direction (stable_lr(), 1 + momentum times that with momentum); "
            "load the last finite weights and train with half of it at most"
        )
