"""One job: a line of a recipe with one seed, its tasks learnt one after the other, from where it was left off.

A job is made of stages. Each is a training from its first to its last epoch on the task that is new, or for `joint` on
all tasks so far, after which the memory is extended and the network measured. A stage can also be learnt by itself,
from a given state, as trials of settings do.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xkfac.errors import MemoryFileError, NotFiniteError
from xkfac.experiments.data.digits import batches, stream
from xkfac.experiments.recipes.recipe import JOINT, SINGLE, UNPROTECTED, Line
from xkfac.experiments.runs.job_folder import JobFolder, JobState, RunError, writing
from xkfac.experiments.runs.tasks import TaskSequence
from xkfac.experiments.runs.training import Batches, Examples, Stepper, load_momentum, make_optimizer, momentum_of
from xkfac.learning.balance import Balance
from xkfac.learning.calibrator import calibrate
from xkfac.learning.learner import Learner
from xkfac.memory import Memory, consolidate
from xkfac.penalty.implicit import Implicit

CHECKPOINT_SECONDS = 10.0
Carried = dict[str, dict[str, Tensor]]
"""What a training in progress goes on with, by its kind: `momentum`, `balance`."""


@dataclass
class JobRun:
    """Learns the tasks of a line; the same numbers come out however often it is interrupted.

    floors: C_t by task, for a line whose losses are balanced. autocast: the dtype that the network computes in.
    """

    line: Line
    seed: int
    sequence: TaskSequence
    folder: JobFolder
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    floors: Mapping[str, float] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    state: JobState = field(default_factory=JobState)
    memory: Memory | None = None

    def __post_init__(self) -> None:
        self._anew = self.line.method in UNPROTECTED  # whether each stage begins with the initial network
        self.method = self.line.resolved_method()
        self._saved = time.monotonic()
        self._memory_file: str | None = None
        self._lent = False
        self._best: dict[str, Tensor] = {}
        self._start: dict[str, Tensor] = {}
        self._balance: Balance | None = None
        self.model = self.sequence.network()

    def turn_to(self, task: int, memory: Memory | None) -> Carried:
        """Turn to the stage of a task by itself, from the model as it is, or go on with it; return what `learn` needs.

        memory: is lent, so that checkpoints leave it out.
        """
        self.state, self._lent = JobState(stage=task), True
        state = self.folder.restore()
        carried = {} if state is None else self._load(*state)
        self.memory = memory
        self.sequence.enter(self.model, task)
        return carried

    def run(self) -> None:
        """Run, or go on, to the end."""
        state = self.folder.restore()
        carried: Carried = {}
        if state is None:
            known = range(0 if self.sequence.known else self.line.tasks)
            untrained = [self.sequence.accuracy(self.model, task, "test") for task in known]
            order = list(self.sequence.tasks[: self.line.tasks])
            self.folder.note("start", line=self.folder.line, seed=self.seed, untrained=untrained, tasks=order)
        else:
            carried = self._load(*state)
            if self.folder.result().done:
                return
        while self.state.stage < len(self.line.counts):
            try:
                finite = self._stage(carried)
            except NotFiniteError:  # weights can be finite still where statistics or curvature no longer are
                finite = False
            if not finite:
                self.folder.note("end", diverged=self._task)
                break
            carried = {}
        else:
            self.folder.note("end", diverged=None)
            self.memory = None
        self._save({}, force=True)

    @property
    def _task(self) -> int:
        """The task that is new in the stage that the job is in."""
        return self.line.counts[self.state.stage] - 1

    def _trained(self, task: int) -> range:
        """Return the tasks that are trained on in the stage of a task."""
        return range(0 if self.line.method == JOINT else task, task + 1)

    def _stage(self, carried: Carried) -> bool:
        """Go through a stage to its end; return whether its numbers stayed finite."""
        task, start = self._task, time.monotonic() - self.state.seconds
        self.sequence.enter(self.model, task)
        if task >= self.sequence.known:
            if self.state.epoch == 0:
                if self._anew:
                    self.model = self.sequence.network()
                    self.sequence.enter(self.model, task)
                else:
                    self.state.before = self.sequence.accuracy(self.model, task, "test")
            if not self.learn(task, carried):
                return False
            torch.cuda.empty_cache()  # jobs beside this one need the room
        if not self._anew:
            self.remember(task)
            torch.cuda.empty_cache()
        self._end_stage(task, start)
        return True

    def learn(self, task: int, carried: Carried) -> bool:
        """Train in the stage of a task and keep the weights that were chosen; return whether there were any.

        carried: the momentum, and the balance, of a training that goes on. Early stopping keeps the best epoch also of
        a training that diverged later.
        """
        line, state = self.line, self.state
        start = time.monotonic() - state.seconds
        examples = self.sequence.train(self._trained(task))
        with self._stepper(examples, task) as stepper:
            load_momentum(self.model, stepper.optimizer, carried.get("momentum", {}))
            if self._balance is not None and carried.get("balance"):
                self._balance.load_state_dict(carried["balance"])
            while state.epoch < line.epochs and not state.diverged:
                self._epoch(stepper, task)
                state.seconds = time.monotonic() - start
                balance = {} if self._balance is None else self._balance.state_dict()
                self._save({"momentum": momentum_of(self.model, stepper.optimizer), "balance": balance})
        if not self._best or (state.diverged and not line.early_stopping):
            return False
        self.model.load_state_dict(self._best)
        self._best = {}
        return True

    @contextlib.contextmanager
    def _stepper(self, examples: Examples, task: int) -> Iterator[Stepper]:
        """Yield the stepper of a stage, with its learner begun or taken up again where there is a past to protect."""
        line = self.line
        options: dict[str, Any] = {"label_smoothing": line.label_smoothing, "autocast": self.autocast}
        if self.memory is None or not line.protected:
            yield Stepper(self.model, examples, make_optimizer(self.model, line.momentum), None, **options)
            return
        self._balance = self._new_balance(task)
        scale = 1.0
        if line.calibrated:
            assert self.memory.calibration is not None
            scale = self.memory.calibration.scale
        with Learner(
            self.model,
            self.memory,
            damping=line.damping,
            strength=line.strength * scale,
            bn_momentum=line.bn_momentum,
            balance=self._balance,
            penalty_every=line.penalty_every,  # the same numbers on every device
        ) as learner:
            if self.state.epoch == 0:
                # Statistics are pooled over all examples, so large batches give the same and are faster. They are of
                # examples as training draws them: with others the running statistics would leave the anchor at once.
                examples.redraw(self.seed, task, -1)
                learner.begin(examples.chunks())
            else:
                learner.load_state_dict({"begun": True, "balance": self._balance and self._balance.state_dict()})
            first = line.learning_rate(task, 0)
            implicit = self._implicit(learner, first) if line.implicit else None
            if line.steady and self.state.epoch == 0:
                limit = learner.stable_lr(line.momentum, implicit=implicit)
                self.state.rate = min(1.0, 0.5 * limit / max(first, 1e-300))
            optimizer = make_optimizer(self.model, line.momentum, learner.protected)
            yield Stepper(self.model, examples, optimizer, learner, implicit=implicit, **options)
        self._balance = None
        self._start = {}

    def _implicit(self, learner: Learner, lr: float) -> Implicit:
        """Return what makes the steps of a stage implicit, as it was where the stage began."""
        now = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self._start = self._start or now
        self.model.load_state_dict(self._start)
        implicit = learner.implicit(lr, self.line.momentum)
        self.model.load_state_dict(now)
        return implicit

    def _new_balance(self, task: int) -> Balance | None:
        """Return the balance of a stage, with C_t as its floor, where the line has one."""
        if not self.line.balance:
            return None
        name = self.sequence.tasks[task]
        if name not in self.floors:
            raise RunError(
                f"line '{self.folder.line}' balances its losses and needs C_t of task '{name}', which no job of the "
                f"method '{SINGLE}' with seed {self.seed} has reached; run that line first"
            )
        return Balance(self.floors[name], self.line.balance_every)

    def _batches(self, examples: Examples, task: int) -> Batches:
        """Return the batches that curvature is estimated on: a shuffle of its own."""
        size = min(self.line.batch, len(examples))
        order = batches(len(examples), size, seed=self.seed, task=task, epoch=-1)
        return Batches(examples, order[: self.line.batches or None])

    def _epoch(self, stepper: Stepper, task: int) -> None:
        line, state = self.line, self.state
        lr = line.learning_rate(0 if self._anew else task, state.epoch)
        still = state.epoch < line.head_epochs
        rates = lr, 0.0 if still else lr * state.rate
        if 0 < state.epoch == line.head_epochs and line.momentum:
            stepper.rest()
        stepper.examples.redraw(self.seed, task, state.epoch)
        keys = {"seed": self.seed, "task": task, "epoch": state.epoch}
        what = "joint" if line.method == JOINT else "batches"
        order = batches(len(stepper.examples), line.batch, **keys, what=what)
        try:
            loss, penalty = stepper.epoch(order, *rates)
        except NotFiniteError:  # the learner notices it before the epoch ends
            loss = penalty = math.nan
        found = [self.sequence.accuracy(self.model, each, "validation") for each in self._trained(task)]
        validation = sum(found) / len(found)
        weights = float(sum(tensor.double().sum() for tensor in self.model.state_dict().values()))
        finite = all(map(math.isfinite, (loss, penalty, weights)))
        if not finite:
            state.diverged = True
        elif line.average:
            self._add_to_average()
        elif validation >= state.best or not line.early_stopping:
            state.best, state.kept = validation, state.epoch
            self._best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.folder.note(
            "epoch",
            task=task,
            epoch=state.epoch,
            lr=rates[0] if still else rates[1],
            loss=loss if finite else None,
            penalty=penalty if finite else None,
            validation=validation,
            time=time.time(),
        )
        state.epoch += 1

    def _add_to_average(self) -> None:
        """Take the weights at the end of an epoch into the average over the last ones."""
        state, line = self.state, self.line
        count = state.epoch - (line.epochs - line.average) + 1
        if count < 1:
            return
        state.kept = state.epoch
        for name, tensor in self.model.state_dict().items():
            if count == 1 or not tensor.is_floating_point():
                self._best[name] = tensor.clone()
            else:
                self._best[name].lerp_(tensor, 1 / count)

    def remember(self, task: int) -> None:
        """Make or extend the memory with a task; the last task's is of no use."""
        if task + 1 == self.line.tasks or not self.line.protected:
            return
        loader = self._batches(self.sequence.fixed(task, self.line.consolidate), task)
        seed = stream("labels", self.seed, task).initial_seed()
        graph = self.sequence.device.type == "cuda"
        if self.memory is None:
            self.memory = consolidate(
                self.model, loader, self.method, exclude=self.sequence.exclude, seed=seed, graph=graph
            )
            if self.line.calibrated:
                held_out = self._batches(self.sequence.fixed(task, "validation"), task)
                self.memory = calibrate(self.model, self.memory, held_out, seed=seed)
        else:
            learner = Learner(self.model, self.memory)
            # The stage was learnt with a learner of its own, before the weights of an epoch were chosen.
            learner.load_state_dict({"begun": True, "balance": None, "stepped": True})
            self.memory = learner.finish(loader, keep=self.line.keep, seed=seed, graph=graph)
        self._memory_file = None

    def _end_stage(self, task: int, start: float) -> None:
        """Measure what is known after the stage of a task, and turn to the next."""
        inference = []
        if not self._anew:
            self.sequence.meet(self.model, task)
            inference = self.sequence.inference(self.model) if task + 1 == self.line.tasks else []
        self.folder.note(
            "task",
            task=task,
            accuracy=self.measure(task),
            **({"inference": inference} if inference else {}),
            before=self.state.before,
            kept=self.state.kept,
            seconds=time.monotonic() - start,
            time=time.time(),
        )
        self.state = JobState(stage=self.state.stage + 1, singles=self.state.singles)
        self._save({})

    def measure(self, task: int) -> list[float]:
        """Return the accuracies on the tasks up to one; of networks of their own each counts for its task."""
        if self.line.method != SINGLE:
            return [self.sequence.accuracy(self.model, each, "test") for each in range(task + 1)]
        self.state.singles = [*self.state.singles, self.sequence.accuracy(self.model, task, "test")]
        return self.state.singles

    def _save(self, carried: Carried, *, force: bool = False) -> None:
        """Write a checkpoint if the last one is old enough."""
        if not force and time.monotonic() - self._saved < self.checkpoint_seconds:
            return
        if self.memory is not None and self._memory_file is None and not self._lent:
            name = f"memory-{self.memory.tasks}.safetensors"
            with writing(self.folder.path / name):
                self.memory.save(self.folder.path / name)
            self._memory_file = name
        state = {**vars(self.state), "memory": self._memory_file}
        kinds = {"model": self.model.state_dict(), **carried, "best": self._best, "start": self._start}
        tensors = {f"{kind}/{name}": tensor for kind, some in kinds.items() for name, tensor in some.items()}
        self.folder.save(state, tensors)
        self._saved = time.monotonic()

    def _load(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> Carried:
        """Take a checkpoint up; return what a training in progress goes on with."""
        named: Carried = {kind: {} for kind in ("model", "best", "start")}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            named.setdefault(kind, {})[name] = tensor.to(self.sequence.device)
        try:
            self.model.load_state_dict(named["model"])
        except (RuntimeError, KeyError, ValueError):
            raise RunError(
                f"the checkpoint of job '{self.folder.line}', seed {self.seed}, is not of the network that recipe.toml "
                f"describes; restore the recipe, or remove the folder '{self.folder.path}' to run this job again"
            ) from None
        self._best, self._start = named["best"], named["start"]
        self._memory_file = state["memory"]
        if self._memory_file is not None:
            try:
                self.memory = Memory.load(self.folder.path / self._memory_file, self.model, device=self.sequence.device)
            except MemoryFileError as error:
                raise RunError(
                    f"{error} — or remove the folder '{self.folder.path}' to run this job again from its start"
                ) from None
        known = {key: value for key, value in state.items() if key in vars(self.state)}
        self.state = JobState(**known)
        return named
