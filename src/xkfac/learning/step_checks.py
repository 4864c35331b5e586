"""What is checked of a user's training steps: the loss, and gradients that add up over several steps."""

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from xkfac.errors import XkfacError, XkfacWarning
from xkfac.model.hooks import Hook

_SUM = 2  # torch's number for reduction="sum"
_PASSES = 64  # backward passes that are looked at: who accumulates gradients does so from the start


def check_loss(loss: Any) -> None:
    """Raise XkfacError for a loss that is not one number."""
    if not isinstance(loss, Tensor):
        raise XkfacError(f"the loss is a {type(loss).__name__}; objective takes it as the tensor that torch returned")
    if loss.dim() > 0:
        raise XkfacError(
            f"the loss has the shape {list(loss.shape)} and must be one number, the mean over the examples of the "
            "batch; call .mean() on it, or leave reduction='none' out"
        )


def check_reduction(loss: Tensor) -> None:
    """Raise XkfacError for a loss that is the sum over a batch of one of torch's losses; the penalty is per example.

    Only what autograd shows is noticed: a loss that was divided by anything passes, be it the number of examples.
    """
    node: Any = loss.grad_fn
    reduction = getattr(node, "_saved_reduction", None)
    if type(node).__name__.startswith("SumBackward") and node.next_functions:
        inner = getattr(node.next_functions[0][0], "_saved_reduction", None)
        reduction = None if inner is None else _SUM
    if reduction == _SUM:
        raise XkfacError(
            "the loss is a sum over the batch and the penalty is per example; use reduction='mean', or divide the sum "
            "by the number of examples"
        )


class Accumulation:
    """Notices that gradients add up over several objectives, none of which was said to be a share of a step.

    It looks at one parameter. A gradient that is there when a backward pass begins, and is the one that the last
    backward pass has left, was neither dropped nor set to zero: its version says so.
    """

    def __init__(self, parameter: Tensor | None) -> None:
        self._parameter = parameter
        self._left: tuple[Callable[[], Any], int] | None = None
        self._passes = 0
        self._handle: Any = None
        if parameter is not None:
            hook = Hook(lambda _: self.after_backward())
            self._handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    @property
    def looks(self) -> bool:
        """Whether it still looks at gradients."""
        return self._handle is not None

    def before_backward(self) -> None:
        """Look at the gradient before a backward pass; warns once, and stops looking after the first steps."""
        if self._handle is None or self._parameter is None:
            return
        gradient, left = self._parameter.grad, self._left
        self._passes += 1
        if gradient is not None and left is not None and left[0]() is gradient and left[1] == gradient._version:
            self.remove()
            warnings.warn(
                "gradients of several objectives add up, and each objective has all of the penalty in it, also where "
                "its loss was divided by their number; call objective(loss, share=1/k) for each of k batches per "
                "optimizer step, with the loss not divided, or, if they should not add up, optimizer.zero_grad() "
                "before each backward pass",
                XkfacWarning,
                stacklevel=2,
            )
        elif self._passes == _PASSES:
            self.remove()

    def after_backward(self) -> None:
        """Remember the gradient that a backward pass has left."""
        gradient = None if self._parameter is None else self._parameter.grad
        self._left = None if gradient is None else (weakref.ref(gradient), gradient._version)

    def remove(self) -> None:
        """Stop looking."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._parameter = self._left = None
