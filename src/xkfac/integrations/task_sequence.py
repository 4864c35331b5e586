"""One memory across a sequence of tasks, for frameworks that say when a task begins and ends."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from xkfac.errors import XkfacError
from xkfac.learning.calibrator import calibrate as calibrated
from xkfac.learning.implicit_steps import sgd_among
from xkfac.learning.learner import Learner
from xkfac.memory import Memory, consolidate
from xkfac.model.units import as_patterns

_OF_LEARNER = ("damping", "importance", "strength", "bn_momentum", "balance")
_OF_PASS = ("max_batches", "accumulation_dtype", "seed", "progress", "graph")


class TaskSequence:
    """Makes a memory of the first task, protects it while further tasks are learnt, and extends it by each of them.

    memory: that of the tasks which the network knows already, if any. calibrate: measure the strength of the penalty
    after the first task, unless the options name one; options of that measurement, such as `{"tasks": 5}`, turn it on
    too. implicit: make the steps of SGD implicit in the penalty. options: those of `Learner` and of `consolidate`, by
    name.
    A copy or a pickle made in the middle of a task resumes it with the next `begin`, or `resume`.
    """

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        calibrate: bool | Mapping[str, Any] = True,
        implicit: bool = True,
        **options: Any,
    ) -> None:
        self.memory, self.implicit = memory, implicit
        self.calibrate = calibrate if "strength" not in options else False
        self._of_learner = {name: options.pop(name) for name in _OF_LEARNER if name in options}
        self._of_pass = {name: options.pop(name) for name in _OF_PASS if name in options}
        self._options = options
        self.learner: Learner | None = None
        self._state: dict[str, Any] | None = None

    def begin(self, model: nn.Module, loader: Iterable[Any], optimizers: Iterable[Any] = ()) -> None:
        """Start to learn a task, with its batches as training draws them; nothing is protected during the first.

        optimizers: those that step the model, of any kind; the steps of SGD are made implicit in the penalty.
        """
        if self.resume(model, optimizers) or self.memory is None:
            return
        if self.learner is not None:  # a task that was interrupted, whose hooks are still there
            self.learner.close()
        self.learner = self._learner(model, self.memory)
        self.learner.begin(loader, sgd_among(optimizers, self.learner.protected) if self.implicit else None)

    def resume(self, model: nn.Module, optimizers: Iterable[Any] = ()) -> bool:
        """Take up a task in progress, if there is one to be resumed; the model's own state is loaded before."""
        if self._state is None or self.memory is None:
            return False
        self.learner = self._learner(model, self.memory)
        implicit = self._state.get("implicit") is not None
        self.learner.load_state_dict(self._state, sgd_among(optimizers, self.learner.protected) if implicit else None)
        self._state = None
        return True

    def _learner(self, model: nn.Module, memory: Memory) -> Learner:
        return Learner(model, memory, forward=self._options.get("forward"), **self._of_learner)

    def objective(self, loss: Tensor) -> Tensor:
        """Return the objective of a step, from the mean loss of its batch; the loss itself during the first task."""
        return loss if self.learner is None else self.learner.objective(loss.squeeze())

    def finish(
        self, model: nn.Module, loader: Iterable[Any], held_out: Iterable[Any], heads: Iterable[str] = ()
    ) -> None:
        """End a task: make the memory of the first, and calibrate it on `held_out`, or extend it by a further one.

        heads: patterns of layers that belong to one task each, which no memory has.
        """
        if self.learner is not None:
            self.memory = self.learner.finish(loader, **self._of_pass)
            self.learner = None
        elif self.memory is None:
            options = {**self._options, "exclude": (*as_patterns(self._options.get("exclude", ())), *heads)}
            self.memory = consolidate(model, loader, **options, **self._of_pass)
            if self.calibrate is not False and self.memory.method.penalised:
                self._calibrate(model, self.memory, held_out)
        else:
            raise XkfacError("a task ended that did not begin; call begin before its first step")

    def _calibrate(self, model: nn.Module, memory: Memory, held_out: Iterable[Any]) -> None:
        """Measure the memory's calibration, alike on all processes: that of the first."""
        options = self.calibrate if isinstance(self.calibrate, Mapping) else {}
        measured = [calibrated(model, memory, held_out, **options).calibration]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(measured)
        self.memory = replace(memory, calibration=measured[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, and the state of the task in progress, for `torch.save`."""
        return {"memory": self.memory, "learner": self._state if self.learner is None else self.learner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; a task in progress is resumed with the next `begin`."""
        self.memory, self._state, self.learner = state["memory"], state["learner"], None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_state": self.state_dict()["learner"], "learner": None}
