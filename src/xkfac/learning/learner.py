"""Learn a target task without forgetting: begin, objective, finish, around any training loop."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from xkfac.errors import XkfacError
from xkfac.learning.balance import Balance
from xkfac.learning.begin_checks import (
    check_amounts,
    check_at_anchor,
    check_batch,
    check_interpretation,
    check_not_replaced,
    check_recentring,
)
from xkfac.learning.held_bn import HeldBN
from xkfac.learning.history import History
from xkfac.learning.implicit_steps import ImplicitSteps, check_optimizer
from xkfac.learning.step_guard import StepGuard
from xkfac.learning.strength import STEPS, Strength
from xkfac.memory import Memory, estimate_for, with_options
from xkfac.methods import get_method
from xkfac.model.batches import Forward
from xkfac.model.hooks import Hook
from xkfac.model.likelihood import Likelihood
from xkfac.model.merged_weight import Interpretation
from xkfac.model.passes import Progress, check_loaded, count_batches, device_of, same_random_state, unwrap, widest_dtype
from xkfac.model.recentre import recentre as recentre_model
from xkfac.model.streams import Stream
from xkfac.penalty.implicit import Implicit
from xkfac.penalty.step import PenalisedStep
from xkfac.routing.router import Router

Keep = Literal["average", "all"]
_OPEN = "_close_learner"  # what closes the learner of a model, kept with the model itself


class Learner(AbstractContextManager["Learner"]):
    """Protects what a network knows, as its memory says, while it learns a target task.

    damping: lambda, added to the curvature as lambda * I on W~. interpretation: how merged weights are read; the
    method's own unless given. importance: (ls, lt); by default T/(T+1) and 1/(T+1) for a memory of T tasks (eq.
    imp_hyp). strength: a factor on the penalty alone, which stands; by default 1, or what `calibrate` measured, which
    is 64 times as large in the first steps of the optimizer that `begin` got, and raised where these would go far
    beyond the calibration's radius. bn_momentum: how fast the running statistics of shared BN follow the target, from
    `begin` to `finish`; by default BN's own momentum. 0.01 keeps deep networks much better, small ones that take few
    steps worse. balance: adaptive alpha_s, alpha_t. penalty_every: k, to evaluate the penalty in every k-th step with
    k-fold weight; by default 1, on a CPU between 1 and 8 as steps allow, and 8 where they are `implicit` and read no
    mini-batch statistics. forward, exclude: how the model takes a batch of the target, and what is left out of its
    units, where not as in the memory.

    BN layers carry hooks from here on until `finish` or `close`; a new learner of the model closes this one. Make it
    before the first call of a compiled model, which would not notice hooks that come later, and with the
    DistributedDataParallel model where there is one, so that its processes re-centre alike.

    Raises MismatchError when the memory is not that of `model`, XkfacError for options that do not go together.
    """

    def __init__(
        self,
        model: nn.Module,
        memory: Memory,
        *,
        damping: float = 1e-4,
        interpretation: Interpretation | None = None,
        importance: tuple[float, float] | None = None,
        strength: float | None = None,
        bn_momentum: float | None = None,
        balance: Balance | None = None,
        penalty_every: int | None = None,
        forward: Forward | None = None,
        exclude: Iterable[str] | None = None,
    ) -> None:
        self._strength = Strength(strength, memory.calibration, self._renew)
        check_amounts(damping=damping, strength=self.strength, importance=importance, bn_momentum=bn_momentum)
        self._wrapped = model
        self.model = unwrap(model)
        check_loaded(self.model)
        device = device_of(self.model)
        self.memory = with_options(memory.to(device), exclude=exclude, forward=forward)
        self.method = memory.method
        if interpretation is not None:
            self.method = get_method(self.method, interpretation=interpretation)
            check_interpretation(self.method, memory.method)
        tasks = memory.tasks
        default = (tasks / (tasks + 1), 1 / (tasks + 1)) if self.method.penalised else (0.0, 1.0)
        self.importance = default if importance is None else importance
        self.balance = balance
        if balance is not None:
            balance.to(device)
        self.last_penalty = torch.zeros((), device=device)
        vars(self.model).pop(_OPEN, lambda: None)()  # two learners would both hold BN and change the steps
        read = self.memory.to(dtype=widest_dtype(self.model))
        self._step = PenalisedStep(
            self.model, self.method, memory.units, read.curvature, read.anchor, damping, penalty_every
        )
        self._bn_momentum = bn_momentum
        self._held: HeldBN | None = None
        self._implicit_steps: ImplicitSteps | None = None
        self._begun = self._closed = False
        self._guard = StepGuard(self.model, self._step, self._strength.radius, self.stable_lr)
        vars(self.model)[_OPEN] = Hook(self.close)

    def begin(
        self,
        loader: Iterable[Any] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        recentre: bool | None = None,
        forward: Forward | None = None,
        max_batches: int | None = None,
        progress: Progress = False,
        tolerance: float | None = None,
    ) -> None:
        """Start a target task: re-centre gamma and beta on its statistics (preprocessing), if the method does.

        loader: the target as training will draw it, augmentation included; statistics of other inputs would leave the
        anchor as soon as training begins. Its first batch also shows whether the network still has the units of the
        memory. With `recentre=False` no data is needed, and this is left to `finish`. The network must be at the
        memory's anchor, up to rounding, or a relative `tolerance` for each unit. forward: kept for `finish`.
        optimizer: SGD, whose steps are made `implicit` in the penalty until `finish`, for learning rates up to the
        largest that it, or its scheduler, has now: a strong penalty then allows the learning rate that a target needs.

        Raises MismatchError when the network has other weights, statistics or units, XkfacError when `loader` is
        missing, the method cannot re-centre, or the optimizer is none that can be made implicit.
        """
        self._check_open()
        check_not_replaced(self.model, self._step.bound)
        check_at_anchor(self._step.bound, self.memory.anchor, tolerance)
        recentre = self.method.recentre if recentre is None else recentre
        check_recentring(self.method, recentre, loader is not None)
        if optimizer is not None:  # refused before anything is changed
            check_optimizer(self.model, optimizer, self._step.changed_by(optimizer), self.method, self._bn_momentum)
        self.memory = with_options(self.memory, forward=forward)
        steps = (count_batches(loader, None) if loader is not None else None) or STEPS
        with same_random_state():
            if loader is not None:
                loader = Stream(loader, most=1)
                check_batch(self._wrapped, self.memory, loader.first)
                if recentre:
                    options: dict[str, Any] = {"max_batches": max_batches, "progress": progress}
                    recentre_model(self._wrapped, loader, forward=self.memory.forward, **options)
        self._start(optimizer, steps)

    def _check_open(self) -> None:
        if self._closed:
            raise XkfacError("this learner is closed and its hooks are gone; make a new Learner for the next task")

    def _start(self, optimizer: torch.optim.Optimizer | None, steps: int, state: dict[str, Any] | None = None) -> None:
        self._held = self._held or HeldBN(self._wrapped, self.method, self._bn_momentum)
        if optimizer is not None and (protected := self._step.changed_by(optimizer)):
            self._strength.begin(self._wrapped, optimizer, steps, self._guard, self._step.bears_strength, state)
            if self._implicit_steps is not None:
                self._implicit_steps.remove()
            self._implicit_steps = ImplicitSteps(optimizer, protected, self.implicit, (state or {}).get("implicit"))
        self._step.readings.clear()
        self._begun = True

    def _renew(self) -> None:
        if self._implicit_steps is not None:
            self._implicit_steps.renew()

    @property
    def strength(self) -> float:
        """The factor on the penalty, without what makes it stronger in a task's first steps."""
        return self._strength.value

    def penalty(self) -> Tensor:
        """Return L_s, damping included, for BN statistics of the latest training pass, else population statistics."""
        self._guard.stepped = True
        return self._step.value()

    def objective(self, loss: Tensor, share: float | None = None) -> Tensor:
        """Return ls * L_s + lt * L_t for the target's loss L_t (eq. cl), each over its alpha where balanced.

        Call it after the forward pass of each step, once; `loss` is the mean over the examples of that pass. Where
        gradients of several passes add up to one step, call it after each, with `share`, the part of the step that the
        pass is, such as 1/k: all of the objective is multiplied by it.

        Raises XkfacError before `begin`, for a loss that is no mean over examples, without a forward pass since the
        last call, with several of them in `loss`, or where one read a BN's statistics with gradients disabled.
        Raises NotFiniteError some steps after the penalty has ceased to be finite.
        """
        penalty, source, target = self._next(loss, share)
        if loss.requires_grad:  # else it is no training step
            self._guard.see(self.last_penalty, loss)
            self._rebalance(loss)
        if penalty is None:
            return loss * target  # type: ignore[no-any-return]
        if self.balance is None:
            return torch.add(target * loss, penalty, alpha=source)
        return penalty * source + loss * target  # type: ignore[no-any-return]

    def objective_(self, loss: Tensor, scale: float | Tensor | None = None) -> Tensor:
        """Turn `loss` into the objective in place and return it, for loops that call `loss.backward()` themselves.

        A callback of a framework often sees the loss right before the backward pass and cannot give it another one.
        scale: what the mean loss of the batch was multiplied by before, and the objective is too: 1 / k for one of k
        batches per optimizer step, times `scaler.get_scale()` of a gradient scaler. The gradients are those of
        `scale * objective(mean loss)`. What was derived from `loss` before this call stays without the penalty.

        Raises what `objective` does.
        """
        penalty, source, target = self._next(loss, scale)
        mean = loss.detach() if scale is None else loss.detach() / scale
        self._guard.see(self.last_penalty, mean)
        self._rebalance(mean)
        loss.mul_(target if scale is None else target / scale)
        return loss if penalty is None else loss.add_(penalty * source)

    def _next(self, loss: Tensor, share: float | Tensor | None) -> tuple[Tensor | None, Any, Any]:
        """Return L_s of a step, None where it goes without, and the factors of L_s and of the loss."""
        self._check_step(loss)
        penalty, weight = self._step.next(loss)
        self._guard.watch_backward(loss if penalty is None else penalty, share)
        if penalty is not None:
            self.last_penalty = penalty.detach()
        source, target = self._factors(share)
        return penalty, source * weight, target

    def backward(self, loss: Tensor, share: float | None = None) -> None:
        """Do what `objective(loss, share).backward()` does, in fewer operations, for steps that wait for launches.

        The penalty's gradient is added to `.grad` of all parameters at once, after the backward pass of the loss. Hooks
        on the gradients of parameters do not see it; use `objective` where there are such hooks, or a gradient scaler.
        """
        if not self._step.bound or self._wrapped is not self.model or torch.compiler.is_compiling():
            self.objective(loss, share).backward()  # type: ignore[no-untyped-call]
            return
        self._check_step(loss)
        if share is None:
            self._guard.accumulation.before_backward()
        penalty = self._step.backward(loss, *self._factors(share))
        self._guard.accumulation.after_backward()
        if penalty is not None:
            self.last_penalty = penalty
        self._guard.see(self.last_penalty, loss)
        self._rebalance(loss)

    def captures(self, steps: int) -> None:
        """Say, when a capture begins, that so many steps become one graph; the penalty is at its `strength` then."""
        self._strength.settle()
        self._step.interval.captures(steps)

    def _check_step(self, loss: Tensor) -> None:
        self._check_open()
        if not self._begun:
            raise XkfacError("call begin(target_loader) before the first objective(loss)")
        self._guard.before_step(loss)
        self._step.readings.check()
        if self._implicit_steps is not None:
            self._implicit_steps.check_used()
        self._guard.stepped = True

    @property
    def history(self) -> History:
        """Loss, penalty and distance from the anchor of every sixteenth step so far; `history.plot(path)` draws it."""
        return self._guard.history

    @property
    def over_radius(self) -> float | None:
        """L_s without damping over the radius of the calibration, above 1 beyond what it measured; None without one."""
        return self._guard.over_radius

    @property
    def protected(self) -> list[Tensor]:
        """The parameters that L_s depends on, which take gradients; all others, such as a new head, are free."""
        return self._step.parameters

    def implicit(self, lr: float, momentum: float = 0.0, *, rank: int = 128) -> Implicit:
        """Return what makes steps of a learning rate implicit in the penalty, where the network is now.

        Its `step()`, before each of the optimizer's (`begin(loader, optimizer)` sees to it), multiplies the gradients
        of protected parameters by (I + eta * ls * strength * (H + damping))^-1, eta = lr / (1 - momentum), block by
        block and along the stiff directions of a unit's inputs, of which beyond the first `rank` only those count that
        explicit steps cannot bear. From here on the penalty is evaluated in every step, in every eighth where it reads
        no mini-batch statistics, unless `penalty_every` was given.
        """
        weight = lr / (1 - momentum) * self.importance[0] * self._strength.now
        return self._step.implicit(weight, momentum, rank)

    def stable_lr(
        self, momentum: float = 0.0, *, implicit: Implicit | None = None, iterations: int = 16, seed: int = 0
    ) -> float:
        """Return the learning rate above which SGD diverges along the penalty's stiffest direction, whatever the loss.

        It is that of the `protected` parameters, 2 (1 + momentum) / (ls * strength * mu), with mu the largest
        eigenvalue of the Hessian of L_s in them, found by power iteration where the network is now, its BN read with
        population statistics; lower where `penalty_every` was given, infinite without a penalty. implicit: the steps
        are those that it makes; by default those of `begin`'s optimizer.
        """
        if implicit is None and self._implicit_steps is not None:
            implicit = self._implicit_steps.implicit
        return self._step.stable_lr(self.importance[0] * self._strength.now, momentum, implicit, iterations, seed)

    def _factors(self, share: float | Tensor | None) -> tuple[Any, Any]:
        """Return what L_s and L_t are multiplied by: numbers, or tensors where they are balanced."""
        source: Any = self.importance[0] * self._strength.now
        target: Any = self.importance[1]
        if share is not None:
            source, target = source * share, target * share
        if self.balance is None:
            return source, target
        # New tensors are what the backward pass keeps: the update changes the alphas in place before it runs.
        return source / self.balance.alpha_s, target / self.balance.alpha_t

    def _rebalance(self, loss: Tensor) -> None:
        if self.balance is not None:
            source, target = self.importance
            self.balance.update(self.last_penalty, loss.detach(), (source * self._strength.now, target))

    def finish(
        self,
        loader: Iterable[Any],
        *,
        keep: Keep = "average",
        likelihood: str | Likelihood | None = None,
        exclude: Iterable[str] | None = None,
        forward: Forward | None = None,
        max_batches: int | None = None,
        accumulation_dtype: torch.dtype | None = None,
        seed: int = 0,
        progress: Progress = False,
        graph: bool = False,
        router: Router | None = None,
    ) -> Memory:
        """End the target task: return the memory extended by it, H <- ls * H + lt * H_t (postprocessing).

        keep: `average` the factors (constant size) or keep `all` terms (exact, growing). Arguments left out are those
        of the learner, or those the memory was made with. The learner is closed. router: gets the statistics of the
        task whose layers are active.

        Raises XkfacError where nothing has protected the past, since `objective` was never called.
        """
        if keep not in get_args(Keep):
            raise XkfacError(f"keep is {keep!r}; it must be 'average' or 'all'")
        if not self._closed:
            self._guard.check_learnt()
        self.close()
        memory = with_options(self.memory, likelihood=likelihood, exclude=exclude, forward=forward)
        if router is not None:
            router.add_task(router.active_task, loader, max_batches=max_batches, progress=progress)
        new = estimate_for(
            self.method,
            self._wrapped,
            loader,
            likelihood=memory.likelihood,
            exclude=memory.exclude,
            forward=memory.forward,
            max_batches=max_batches,
            accumulation_dtype=accumulation_dtype,
            seed=seed,
            progress=progress,
            graph=graph,
        )
        return memory.extend(self.model, new, weights=self.importance, keep_all=keep == "all")

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint in the middle of a task needs beside the model's and the optimizer's state."""
        balance = self.balance.state_dict() if self.balance else None
        interval = self._step.interval.state_dict()
        implicit = None if self._implicit_steps is None else self._implicit_steps.state_dict()
        own = {"begun": self._begun, "balance": balance, "interval": interval, "implicit": implicit}
        return {**own, "annealing": self._strength.state_dict(), **self._guard.state_dict()}

    def load_state_dict(self, state: dict[str, Any], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take up a task in progress in place of `begin`, with its optimizer if it had one; load the model yourself."""
        self._check_open()
        if (state["balance"] is None) != (self.balance is None):
            raise XkfacError("the state is of a learner " + ("without" if self.balance else "with") + " a balance")
        if self.balance is not None:
            self.balance.load_state_dict(state["balance"])
        if (state.get("implicit") is None) != (optimizer is None) and self.protected:
            call, had = ("state, optimizer", "with") if optimizer is None else ("state", "without")
            raise XkfacError(f"the state is of a task begun {had} an optimizer; call load_state_dict({call})")
        if state["begun"]:
            self._start(optimizer, STEPS, state)
            self._guard.stepped = state.get("stepped", True)  # states of before it was kept do not say
        if "interval" in state:
            self._step.interval.load_state_dict(state["interval"])

    def close(self) -> None:
        """Take the hooks off the model, and give BN its momentum and frozen parameters their gradients back."""
        if not self._closed:
            vars(self.model).pop(_OPEN, None)
        self._step.close()
        self._guard.remove()
        if self._held is not None:
            self._held.release()
        self._strength.remove()
        if self._implicit_steps is not None:
            self._implicit_steps.remove()
        self._held, self._implicit_steps, self._begun, self._closed = None, None, False, True

    def __exit__(self, *_: object) -> None:
        self.close()
