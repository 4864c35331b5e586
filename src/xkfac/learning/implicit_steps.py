"""Make the steps of an optimizer implicit in the penalty, from a task's begin to its end."""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from xkfac.errors import XkfacError, XkfacWarning
from xkfac.methods import Method
from xkfac.model.passes import norms_of, unwrap
from xkfac.penalty.implicit import Implicit

_QUICK = 0.05
"""Momentum of BN's statistics between one that implicit steps go well with, 0.01, and one that they do not, 0.1."""

_RATES = ("lr", "initial_lr", "max_lr")  # what schedulers write into a group: those with a warm-up begin below


class ImplicitSteps:
    """Changes gradients right before each step of SGD, so that it is implicit in the penalty.

    make: returns what makes steps of a learning rate and momentum implicit. They are those of the parameters that are
    `protected`, at their largest: the present learning rate, or the one that a scheduler has noted for later. state:
    that of a task in progress, to go on with.

    Raises XkfacError for an optimizer other than SGD, or one without a protected parameter.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        protected: Iterable[Tensor],
        make: Callable[[float, float], Implicit],
        state: dict[str, Any] | None = None,
    ) -> None:
        self._unused: Tensor | None = next(iter(protected := list(protected)))
        self._versions: set[int] = set()
        groups = _groups_to_change(optimizer, protected)
        of = max(groups, key=lambda group: _largest(group) / (1 - group["momentum"]))
        rates = (state["lr"], state["momentum"]) if state else (_largest(of), of["momentum"])
        self.lr, self.momentum = float(rates[0]), float(rates[1])
        self._make = make
        self.renew()
        _warn_of_explicit(protected, self.implicit)
        if state:  # made where the network was when the task began
            self.implicit.load(state["tensors"])
        self._groups = groups
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def renew(self) -> None:
        """Make anew what makes steps implicit, where the network is now: after a change of the penalty's strength."""
        self.implicit = self._make(self.lr, self.momentum)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._unused = None
        self._check_rates()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self.implicit.step()
            return None

        def then_implicit() -> Any:  # the gradients of this step are there only when the closure has run
            loss = closure()
            self.implicit.step()
            return loss

        return (optimizer,), {"closure": then_implicit}

    def _check_rates(self) -> None:
        for group in self._groups:
            lr = group["lr"]
            if not isinstance(lr, Tensor) and lr > 1.01 * self.lr:  # reading a tensor would wait for the device
                warnings.warn(
                    f"the learning rate has grown to {lr:.3g} from {self.lr:.3g} when the task began, for which the "
                    "steps are implicit in the penalty; make the scheduler before begin(loader, optimizer)",
                    XkfacWarning,
                    stacklevel=4,
                )
                self._groups = []
                break

    def check_used(self) -> None:
        """Warn once where weights change from call to call and the optimizer has not made any step yet.

        Two changes are let pass: a method that looks for flat minima displaces the weights before its first step.
        """
        if self._unused is None or torch.compiler.is_compiling():
            return
        self._versions.add(self._unused._version)
        if len(self._versions) > 3:
            self._unused = None
            warnings.warn(
                "the weights change, but not by steps of the optimizer that begin got, so no step is implicit in the "
                "penalty; give begin the optimizer that trains, or none",
                XkfacWarning,
                stacklevel=5,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs: about as many numbers as the protected parameters have."""
        return {"lr": self.lr, "momentum": self.momentum, "tensors": self.implicit.tensors}

    def remove(self) -> None:
        """Leave the optimizer's steps as they are again."""
        self._hook.remove()


def check_optimizer(
    model: nn.Module, optimizer: Optimizer, protected: Iterable[Tensor], method: Method, bn_momentum: float | None
) -> None:
    """Check the optimizer of a task; warn in the user's line of one from before a layer of the model was replaced.

    Warns of a BN, too, beside which implicit steps do harm: see `_warn_of_quick_bn`.

    Raises XkfacError where the steps of the protected parameters cannot be made implicit.
    """
    if protected := list(protected):
        _groups_to_change(optimizer, protected)
        _warn_of_quick_bn(model, method, bn_momentum)
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    own = dict(model.named_parameters())
    missing = [name for name, one in own.items() if one.requires_grad and id(one) not in held]
    if missing and held.difference(map(id, own.values())):
        warnings.warn(
            f"the optimizer lacks '{missing[0]}' and has parameters that the model does not have, so it is from before "
            "a layer was replaced, and the new one will not learn; make the optimizer after all changes to the model",
            XkfacWarning,
            stacklevel=3,
        )


def _warn_of_quick_bn(model: nn.Module, method: Method, momentum: float | None) -> None:
    """Warn in the user's line of a penalty that is read through statistics which follow mini-batches quickly.

    momentum: that of the learner in place of BN's own.
    """
    explicit = method.settings.kind == "corrected" or not method.merge
    if explicit or not method.follows_target or method.interpretation not in ("bn", "brn"):
        return
    norms = norms_of(unwrap(model))
    momenta = {name: momentum or norm.momentum or 0.0 for name, norm in norms.items()}
    quick = [name for name, own in momenta.items() if own > _QUICK]
    if quick:
        warnings.warn(
            f"the statistics of '{quick[0]}' follow the target with momentum {momenta[quick[0]]:g} and the penalty is "
            "read through them, where implicit steps can keep and learn less than plain ones; pass bn_momentum=0.01 or "
            "interpretation='eval' to the Learner, or leave the optimizer out of begin",
            XkfacWarning,
            stacklevel=4,
        )


def _warn_of_explicit(protected: Iterable[Tensor], implicit: Implicit) -> None:
    """Warn in the user's line of protected parameters whose steps stay as they are, with a stiff penalty on them."""
    changed = {id(one) for one in implicit.parameters}
    explicit = [id(one) not in changed for one in protected]
    if any(explicit):
        warnings.warn(
            f"steps of {sum(explicit)} of {len(explicit)} protected parameters do not become implicit in the penalty: "
            "those that methods 'corrected' and 'unmerged' penalise in their own way; keep the learning rate at most "
            "half of learner.stable_lr(momentum)",
            XkfacWarning,
            stacklevel=5,
        )


def _groups_to_change(optimizer: Optimizer, protected: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Return the groups of an optimizer that have protected parameters.

    Raises XkfacError for an optimizer other than SGD, or one without a protected parameter.
    """
    if not isinstance(optimizer, SGD):
        why = ", which scales its steps by itself; leave the optimizer out"
        if isinstance(getattr(optimizer, "optimizer", None), SGD):  # as Accelerate has it
            why = "; give begin the SGD inside of it, optimizer.optimizer"
        raise XkfacError(
            "begin(loader, optimizer) makes the steps of SGD implicit in the penalty, and cannot do so for "
            f"{type(optimizer).__name__}{why}"
        )
    groups = _groups_with(optimizer, protected)
    if not groups:
        raise XkfacError(
            "the optimizer has none of the parameters that the penalty protects; make it with those of the model "
            "that the learner has"
        )
    return groups


def sgd_among(optimizers: Iterable[Any], protected: Iterable[Tensor]) -> SGD | None:
    """Return the optimizer whose steps can be made implicit, for frameworks that bring their own optimizers.

    It is the one SGD that has protected parameters; None where there is no such optimizer, or several of them.
    """
    protected = list(protected)
    found = [one for one in optimizers if isinstance(one, SGD) and _groups_with(one, protected)]
    return found[0] if len(found) == 1 else None


def _groups_with(optimizer: Optimizer, parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    known = set(map(id, parameters))
    return [group for group in optimizer.param_groups if known.intersection(map(id, group["params"]))]


def _largest(group: dict[str, Any]) -> float:
    return max(float(group[name]) for name in _RATES if name in group)
