"""Transformers: a `Trainer` that protects what a model knows while it learns the training set."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from xkfac.errors import XkfacError
from xkfac.learning.implicit_steps import sgd_among
from xkfac.learning.learner import Learner
from xkfac.memory import Memory
from xkfac.model.passes import same_random_state

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(f"{error}; install Transformers by: pip install 'xkfac[transformers]'") from error

STATE_FILE = "xkfac_learner.pt"
"""The file in each checkpoint folder with the state of the learner."""


class XKFACMixin:
    """Makes a Trainer add the penalty of a memory: `class MyTrainer(XKFACMixin, Seq2SeqTrainer)`.

    memory: what the model knows; after `train` it is the memory of one more task. learner_options: arguments of
    `Learner`, such as {"strength": 3.0}. implicit: make the steps of SGD (`optim="sgd"`) implicit in the penalty; those
    of other optimizers are left as they are. `train` begins and finishes the task with `get_train_dataloader()`; a
    checkpoint also holds the state of the learner, so that `train(resume_from_checkpoint=...)` takes the task up again:
    give it the memory from before the task. The loss that the Trainer logs is the objective.
    """

    learner: Learner | None = None

    def __init__(
        self: Any,
        *args: Any,
        memory: Memory,
        learner_options: Mapping[str, Any] | None = None,
        implicit: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.memory, self.implicit = memory, implicit
        self.learner_options = dict(learner_options or {})
        self.add_callback(_Moments(self))

    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Learn the training set under the penalty, then extend the memory by it.

        Raises XkfacError for a checkpoint without a learner's state, or for a model that DataParallel would wrap.
        """
        if self.args.n_gpu > 1:
            raise XkfacError("DataParallel copies the model in every step; start one process per GPU with torchrun")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
        self._checkpoint = resume_from_checkpoint or None
        self.learner = None
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
            assert self.learner is not None
            self.memory = self.learner.finish(self.get_train_dataloader())
        finally:
            if self.learner is not None:
                self.learner.close()
        return output

    def begin(self: Any) -> None:
        """Make the learner, and begin the task or take it up again; the Trainer calls it before its first step."""
        if self.learner is not None:  # the Trainer starts again with smaller batches
            return
        # A gradient that is clipped, as a Trainer does by default, or skipped would lose the penalty of several steps.
        every = {"penalty_every": 1} if self.args.max_grad_norm or self.args.fp16 else {}
        self.learner = Learner(self.model_wrapped, self.memory, **{**every, **self.learner_options})
        accelerated = self.optimizer
        sgd = sgd_among([getattr(accelerated, "optimizer", accelerated)], self.learner.protected)
        if self._checkpoint is None:
            with same_random_state():  # a loader of its own: the order of the training batches must not depend on it
                self.learner.begin(self.get_train_dataloader(), sgd if self.implicit else None)
            return
        path = Path(str(self._checkpoint), STATE_FILE)
        if not path.is_file():
            raise XkfacError(f"'{path}' does not exist; resume from a checkpoint that this trainer has written")
        state = torch.load(path, map_location=self.args.device)
        self.learner.load_state_dict(state, sgd if state.get("implicit") else None)

    def compute_loss(
        self: Any,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the objective of a training step, and the plain loss of an evaluation.

        In training the model is not given `num_items_in_batch`, which some models ignore: its loss is the mean over the
        batch, and the batch's share of the items is a factor of the objective.
        """
        if self.learner is None or not model.training or not torch.is_grad_enabled():
            kwargs["num_items_in_batch"] = num_items_in_batch
            return super().compute_loss(model, inputs, return_outputs, **kwargs)  # type: ignore[misc]
        share = self._share(inputs, num_items_in_batch)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        loss = self.learner.objective(loss, share)
        return (loss, outputs) if return_outputs else loss

    def _share(self: Any, inputs: Any, num_items_in_batch: Any) -> float:
        """Return the part of an optimizer step that a batch is, unless the Trainer itself divides the loss."""
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:  # the rule of the Trainer
            scaled = num_items_in_batch is not None or self.compute_loss_func is not None
        passes: int = self.current_gradient_accumulation_steps
        if not scaled or passes == 1:
            return 1.0
        if num_items_in_batch is None:
            return 1 / passes
        return float(self._get_num_items_in_batch([inputs], self.args.device) / num_items_in_batch)


class _Moments(TrainerCallback):  # type: ignore[misc]
    """Tells the mixin when training begins and when a checkpoint was written."""

    def __init__(self, trainer: XKFACMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.begin()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        learner = self._trainer.learner
        if state.is_world_process_zero and learner is not None:
            torch.save(learner.state_dict(), Path(args.output_dir, f"checkpoint-{state.global_step}", STATE_FILE))


class XKFACTrainer(XKFACMixin, Trainer):  # type: ignore[misc]
    """Transformers' `Trainer` with the further arguments of `XKFACMixin`."""
