"""Lightning: a `Callback` that protects what a module knows while it learns; the module stays as it is."""

import copy
import math
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any

from torch import Tensor

from xkfac.errors import XkfacError
from xkfac.learning.implicit_steps import sgd_among
from xkfac.learning.learner import Learner
from xkfac.memory import Memory

# Lightning has two names, each with a Callback of its own: take the one that the user has imported.
_LOADED = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
try:
    if _LOADED or find_spec("lightning") is None:
        from pytorch_lightning import Callback
    else:
        from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError(f"{error}; install Lightning by: pip install 'xkfac[lightning]'") from error


class XKFACCallback(Callback):  # type: ignore[misc]
    """Adds the penalty of a memory to the loss of every training step of a fit.

    memory: what the module knows, made of the LightningModule itself; after a fit it is the memory of one more task.
    loader: batches of the target for `begin` and `finish`; the trainer's own training loader unless given, which the
    hooks of the module for batches then prepare as they do in training. accumulate_grad_batches: micro-batches per
    optimizer step where a module with manual optimization accumulates gradients by itself. implicit: make the steps of
    SGD implicit in the penalty; those of other optimizers, or of several for protected parameters, are left as they
    are. options: those of `Learner`.

    The loss becomes the objective right before the trainer's backward pass, so that accumulation, gradient scaling,
    DDP and clipping treat both parts alike. What the module logs stays the plain loss. A checkpoint holds the state of
    the learner: to resume, give the callback the memory from before the task.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        loader: Iterable[Any] | None = None,
        accumulate_grad_batches: int | None = None,
        implicit: bool = True,
        **options: Any,
    ) -> None:
        self.memory = memory
        self.learner: Learner | None = None
        self._loader, self._accumulate, self._options = loader, accumulate_grad_batches, options
        self._implicit = implicit
        self._state: dict[str, Any] | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the learner before the module first runs, with the model that DDP wraps where there is one."""
        scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        # A gradient that is clipped, or skipped by a scaler, would lose the penalty of several steps.
        every = {"penalty_every": 1} if scaled or trainer.gradient_clip_val else {}
        self.learner = Learner(trainer.strategy.model, self.memory, **{**every, **self._options})

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin the task, now that the training loader is there, or take it up again from a checkpoint."""
        assert self.learner is not None
        sgd = sgd_among(trainer.optimizers, self.learner.protected)
        if self._state is not None and self._state["begun"]:
            self.learner.load_state_dict(self._state, sgd if self._state.get("implicit") else None)
        else:
            self.learner.begin(self._target(trainer), sgd if self._implicit else None)
        self._state = None

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Turn the loss into the objective, in the scale that the trainer has given it."""
        assert self.learner is not None
        parts = self._accumulate or trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None if parts == 1 else 1 / parts
        if scaler is not None:
            scale = scaler.get_scale() / parts
        self.learner.objective_(loss, scale)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Extend the memory; at `on_fit_end` the trainer has already left its device and its processes."""
        assert self.learner is not None
        self.memory = self.learner.finish(self._target(trainer))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the hooks off the module when a fit is interrupted."""
        if self.learner is not None:
            self.learner.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the learner, for the trainer's checkpoint."""
        return {} if self.learner is None else {"learner": self.learner.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts."""
        self._state = state_dict.get("learner")

    def _target(self, trainer: Any) -> Iterable[Any]:
        """Return the batches of the target as the training steps get them.

        Raises XkfacError where the trainer has several training loaders.
        """
        if self._loader is not None:
            return self._loader
        if isinstance(trainer.train_dataloader, (dict, list, tuple)):
            raise XkfacError("the trainer has several loaders; name the target's: XKFACCallback(memory, loader=...)")
        return _TrainingBatches(trainer)


class _TrainingBatches:
    """The batches of one epoch of a trainer's training loader, after the hooks of its module."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loader = trainer, trainer.train_dataloader
        if getattr(self._loader, "persistent_workers", False):
            # Such a loader has a single iterator, which the trainer holds already: a copy gets one of its own.
            self._loader = copy.copy(self._loader)
            self._loader._iterator = None

    def __iter__(self) -> Iterator[Any]:
        limit = self._trainer.num_training_batches
        for batch in islice(self._loader, None if limit == math.inf else limit):
            batch = self._trainer.precision_plugin.convert_input(batch)
            batch = self._trainer.lightning_module.on_before_batch_transfer(batch, 0)
            yield self._trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def __len__(self) -> int:
        return int(min(self._trainer.num_training_batches, len(self._loader)))
