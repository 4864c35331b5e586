"""Guards the training steps of a learner: each is checked for what would go wrong without a word."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.errors import NotFiniteError, XkfacError, XkfacWarning
from xkfac.learning.begin_checks import check_not_replaced, warn_of_shared_bn
from xkfac.learning.divergence import Look, StartingPoint, blamed_norm
from xkfac.learning.history import History
from xkfac.learning.step_checks import Accumulation, check_loss, check_reduction
from xkfac.learning.trust_region import TrustRegion
from xkfac.penalty.step import PenalisedStep

INTERVAL = 16
"""Steps from one look at the penalty to the next."""

LOST = 2.0
"""L_s without damping, in nats, above which past tasks are lost; the real rise of their loss is rather larger."""


class StepGuard:
    """Checks losses, layers, gradients that add up, and the penalty of steps, as little as it can in each.

    radius: the largest penalty without damping up to which the memory's calibration follows the real loss, None without
    one. stable_lr: gives the learner's, where the network is. No step is synchronised, and a compiled one is not looked
    at. `stepped` is whether there was any step. trust_region: what keeps the network within the radius, if anything
    does; the user then needs no warning of it.
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
        self.history = History()
        self.accumulation = Accumulation(None)
        self.stepped = False
        self.trust_region: TrustRegion | None = None
        self._starting_point: StartingPoint | None = None
        self._look: Look | None = None
        self._steps = self._looked_at = 0
        self._warned_of_radius = self._warned_of_loss = False

    def keep_within(self, trust_region: TrustRegion) -> None:
        """Take what keeps the network within the radius from now on."""
        if self.trust_region is not None:
            self.trust_region.remove()
        self.trust_region = trust_region

    @property
    def grown(self) -> float:
        """What the strength was multiplied by to keep the network within the radius, since the task began."""
        return 1.0 if self.trust_region is None else self.trust_region.grown

    def before_step(self, loss: Tensor) -> None:
        """Check the loss, and at the first step what need not be checked again.

        Raises XkfacError for a loss that is no mean over examples, MismatchError for a layer that was replaced.
        """
        check_loss(loss)
        if torch.compiler.is_compiling() or not self._step.bound or self._starting_point is not None:
            return
        check_not_replaced(self._model, self._step.bound)
        check_reduction(loss)
        if self._step.method.own_bn:
            warn_of_shared_bn(self._model)
        if loss.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._starting_point = StartingPoint(self._step.bound.values())
        weights = [one.weight for one in self._step.bound.values() if one.unit.weight is not None]
        leaves = (weight for weight in weights if weight.is_leaf and weight.requires_grad)
        self.accumulation = Accumulation(next(leaves, None))

    def watch_backward(self, value: Tensor, share: float | Tensor | None) -> None:
        """Look at gradients when the backward pass of a penalty or loss comes, unless the share of a step is given."""
        accumulation = self.accumulation
        if torch.compiler.is_compiling():
            return
        if share is None and accumulation.looks and value.requires_grad:
            value.register_hook(lambda _: accumulation.before_backward())  # type: ignore[no-untyped-call]

    def see(self, penalty: Tensor, loss: Tensor) -> None:
        """Take in L_s and L_t of a step; look at those of every `INTERVAL`-th step once the device has worked them out.

        Warns once of a penalty beyond the radius, and once of one that says that the past is lost. Nothing is looked at
        while a CUDA graph is captured.

        Raises NotFiniteError for a penalty that is not finite any more.
        """
        if torch.compiler.is_compiling() or not self._step.bound:
            return
        if penalty.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self._steps += 1
        if self._look is None and self._steps % INTERVAL == 0:
            values = [penalty, loss]
            if self._radius is not None and self.trust_region is None:
                values.append(self._step.undamped())
            self._look = Look(torch.stack([value.detach().to(penalty.dtype) for value in values]))
            self._looked_at = self._steps
        if self._look is None or not self._look.is_there():
            return
        value, seen, *undamped = self._look.values()
        self._look = None
        self.history.steps.append(self._looked_at)
        self.history.penalties.append(value)
        self.history.losses.append(seen)
        if LOST < value < math.inf and not self._warned_of_loss:
            self._judge_loss(self._step.undamped().item())
        if self.trust_region is not None:
            self.history.over_radius.append(self.trust_region.last)
        for one in undamped:
            self.history.over_radius.append(one / self._radius if self._radius else math.inf)
            self._judge_radius(one)
        if not math.isfinite(value):
            raise self._diverged()

    def _judge_loss(self, undamped: float) -> None:
        """Warn once, in the user's line, of a penalty without damping that says that the past is lost."""
        if not undamped > LOST:
            return
        self._warned_of_loss = True
        warnings.warn(
            f"after {self._looked_at} steps the penalty is {undamped:.2g}, the nats by which it predicts the loss of "
            "past tasks to have risen, so they are likely lost; start again with a lower learning rate, for SGD at "
            "most half of learner.stable_lr(momentum), or, if the target is of another kind than the past, with "
            "task-specific BN (give_task_norms, and method='own-bn')",
            XkfacWarning,
            stacklevel=4,
        )

    def _judge_radius(self, undamped: float) -> None:
        """Warn once, in the user's line, of a penalty without damping that is beyond the radius."""
        radius = self._radius
        if radius is None or self._warned_of_radius or self.trust_region is not None or not undamped > radius:
            return
        self._warned_of_radius = True
        times = f"{undamped / radius:.2g} times" if radius else "beyond"
        warnings.warn(
            f"the penalty without damping is {undamped:.2g}, {times} the radius {radius:.2g} up to which its "
            f"calibration follows the real loss, so the past may be forgotten more than the penalty says; a larger "
            "strength, or fewer or shorter steps, stay nearer to it",
            XkfacWarning,
            stacklevel=4,
        )

    def check_learnt(self) -> None:
        """Check, after all steps, that there were any, that all is finite and, with a warning, within the radius."""
        if not self._step.bound:
            return
        check_not_replaced(self._model, self._step.bound)
        if not self.stepped:
            raise XkfacError(
                "objective was never called, so nothing has protected the past while the network learnt; call "
                "objective(loss) in every training step, or, if the network was trained otherwise on purpose, extend "
                "the memory with memory.extend(model, xkfac.estimate(model, loader, memory.method.settings), "
                "weights=(ls, lt))"
            )
        undamped = self._step.undamped().item()
        if not math.isfinite(undamped):
            raise self._diverged()
        self._judge_radius(undamped)

    @property
    def over_radius(self) -> float | None:
        """L_s without damping over the radius, where the network is now; None without a radius."""
        if self._radius is None or not self._step.bound:
            return None
        undamped = self._step.undamped().item()
        if self._radius == 0:
            return math.inf if undamped > 0 else 0.0
        return undamped / self._radius

    def distance(self) -> float:
        """Return `over_radius`, 0 where there is none."""
        return self.over_radius or 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what the steps that follow depend on."""
        region = None if self.trust_region is None else self.trust_region.state_dict()
        return {"stepped": self.stepped, "trust_region": region}

    def remove(self) -> None:
        """Take the hooks off the model and the optimizer."""
        self.accumulation.remove()
        if self.trust_region is not None:
            self.trust_region.remove()

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
            "the penalty is not finite any more: a loss was not (check inputs and labels), or the steps are too long "
            f"for the penalty, since SGD diverges above a learning rate of {limit:.2g} along its stiffest direction "
            "(stable_lr(), 1 + momentum times that with momentum); load the last finite weights and train with half "
            "of it at most"
        )
