"""One job: a line of a recipe with one seed, its tasks learnt one after the other, from where it was left off."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.errors import MemoryFileError, NotFiniteError
from xkfac.experiments.data import Parts, batches, permutation, stream
from xkfac.experiments.folder import JobFolder, RunError, not_written
from xkfac.experiments.networks import perceptron
from xkfac.experiments.recipe import JOINT, Line
from xkfac.experiments.training import Pool, Stepper, accuracy, make_optimizer, pool
from xkfac.experiments.turning import Turn
from xkfac.learner import Learner
from xkfac.memory import Memory, consolidate

CHECKPOINT_SECONDS = 10.0


@dataclass(frozen=True)
class Stage:
    """A training from its first to its last epoch: on the next task, or jointly on the first `count`, from scratch."""

    count: int
    joint: bool = False

    @property
    def tasks(self) -> range:
        """The tasks that are trained on."""
        return range(self.count) if self.joint else range(self.count - 1, self.count)


@dataclass
class Progress:
    """Where a job is: everything that a checkpoint holds beside tensors and memory."""

    stage: int = 0
    epoch: int = 0
    best: float = -1.0
    kept: int = -1
    before: float | None = None
    seconds: float = 0.0
    diverged: bool = False

    def next_stage(self) -> Progress:
        """Return the beginning of the next stage."""
        return Progress(stage=self.stage + 1)


@dataclass
class Sequence:
    """Learns the tasks of a line; the same numbers come out however often it is interrupted."""

    line: Line
    seed: int
    parts: Parts
    folder: JobFolder
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    progress: Progress = field(default_factory=Progress)
    memory: Memory | None = None

    def __post_init__(self) -> None:
        line = self.line
        self.stages = (
            [Stage(count, joint=True) for count in (line.at or (line.tasks,))]
            if line.method == JOINT
            else [Stage(count) for count in range(1, line.tasks + 1)]
        )
        self.method = line.resolved_method()
        features, self._classes = self.parts.train.x.shape[1], int(self.parts.train.y.max()) + 1
        self._permutations = [permutation(features, self.seed, task) for task in range(line.tasks)]
        self._saved = time.monotonic()
        self._memory_file: str | None = None
        self._best: dict[str, Tensor] = {}
        self._turn: Turn | None = None
        self.model = self._fresh()

    @property
    def _device(self) -> torch.device:
        return self.parts.train.x.device

    def _fresh(self) -> nn.Module:
        features = self.parts.train.x.shape[1]
        return perceptron(features, self._classes, self.line, self.seed).to(self._device)

    def run(self) -> None:
        """Run, or go on, to the end."""
        state = self.folder.restore()
        momentum: dict[str, Tensor] = {}
        if state is None:
            untrained = [accuracy(self.model, self.parts.test, p) for p in self._permutations]
            self.folder.note("start", line=self.folder.line, seed=self.seed, untrained=untrained)
        else:
            momentum = self._load(*state)
        while self.progress.stage < len(self.stages):
            if not self._finite_stage(momentum):
                self.folder.note("end", diverged=self.stages[self.progress.stage].count - 1)
                break
            momentum = {}
        else:
            self.folder.note("end", diverged=None)
        self._save({}, force=True)

    def _finite_stage(self, momentum: dict[str, Tensor]) -> bool:
        try:
            return self._stage(momentum)
        except NotFiniteError:  # weights can be finite still where statistics or curvature no longer are
            return False

    def _stage(self, momentum: dict[str, Tensor]) -> bool:
        """Train a stage to its end; return whether its numbers stayed finite."""
        stage, line, progress = self.stages[self.progress.stage], self.line, self.progress
        start = time.monotonic() - progress.seconds
        examples = pool(self.parts.train, [self._permutations[task] for task in stage.tasks])
        if progress.epoch == 0:
            if stage.joint:
                self.model = self._fresh()
            else:
                progress.before = accuracy(self.model, self.parts.test, self._permutations[stage.count - 1])
        with self._stepper(examples) as stepper:
            _load_momentum(self.model, stepper.optimizer, momentum)
            while progress.epoch < line.epochs and not progress.diverged:
                self._epoch(stepper, stage)
                progress.seconds = time.monotonic() - start
                self._save(_momentum(self.model, stepper.optimizer))
        return self._end_stage(examples, stage, start)

    @contextlib.contextmanager
    def _stepper(self, examples: Pool) -> Iterator[Stepper]:
        """Yield the stepper of a stage, with its learner begun or taken up again where there is a past to protect."""
        if self.memory is None or not self._protected:
            yield Stepper(self.model, examples, make_optimizer(self.model, self.line.momentum), None)
            return
        if self.progress.epoch == 0:
            # Statistics are pooled over all examples, so large batches give the same and are faster.
            chunks = zip(*(torch.split(t, 8192) for t in (examples.part.x, examples.part.y)), strict=True)
            with Learner(self.model, self.memory) as learner:
                learner.begin(list(chunks))
        # On a GPU the product that a turn saves runs beside the forward pass.
        self._turn = Turn.of(self.model, self.memory) if self._device.type == "cpu" else None
        memory, inputs = (
            (self.memory, examples) if self._turn is None else (self._turn.memory, self._turn.pool(examples))
        )
        with Learner(self.model, memory, damping=self.line.damping, strength=self.line.strength) as learner:
            learner.load_state_dict({"begun": True, "balance": None})
            yield Stepper(self.model, inputs, make_optimizer(self.model, self.line.momentum), learner)
        self._turn = None

    @property
    def _protected(self) -> bool:
        return self.method.penalised or self.method.fixed_bn

    def _batches(self, examples: Pool, stage: Stage) -> list[tuple[Tensor, Tensor]]:
        """Return the batches that curvature is estimated on: a shuffle of its own."""
        order = batches(
            examples.part, min(self.line.batch, len(examples)), seed=self.seed, task=stage.count - 1, epoch=-1
        )
        return [examples.take(index) for index in order.to(self._device)]

    def _epoch(self, stepper: Stepper, stage: Stage) -> None:
        line, progress = self.line, self.progress
        lr = line.learning_rate(0 if stage.joint else stage.count - 1, progress.epoch)
        order = self._order(stepper.examples, stage)
        if self._turn is None:
            loss, penalty = stepper.epoch(order, lr)
        else:
            with self._turn.turned(stepper.optimizer):
                loss, penalty = stepper.epoch(order, lr)
        validation = self._validation(stage)
        finite = math.isfinite(loss) and math.isfinite(penalty) and _is_finite(self.model)
        if not finite:
            progress.diverged = True
        elif line.average:
            self._add_to_average()
        elif validation >= progress.best or not line.early_stopping:
            progress.best, progress.kept = validation, progress.epoch
            self._best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.folder.note(
            "epoch",
            task=stage.count - 1,
            epoch=progress.epoch,
            lr=lr,
            loss=loss if finite else None,
            penalty=penalty if finite else None,
            validation=validation,
            time=time.time(),
        )
        progress.epoch += 1

    def _order(self, examples: Pool, stage: Stage) -> Tensor:
        size, keys = self.line.batch, {"seed": self.seed, "task": stage.count - 1, "epoch": self.progress.epoch}
        if not stage.joint:
            return batches(examples.part, size, **keys)
        shuffled = torch.randperm(len(examples), generator=stream("joint", *keys.values()), device="cpu")
        return shuffled[: len(examples) // size * size].view(-1, size)

    def _validation(self, stage: Stage) -> float:
        part = self.parts.validation
        if len(part) == 0:
            return 0.0
        values = [accuracy(self.model, part, self._permutations[task]) for task in stage.tasks]
        return sum(values) / len(values)

    def _add_to_average(self) -> None:
        """Take the weights at the end of an epoch into the average over the last ones."""
        progress, line = self.progress, self.line
        count = progress.epoch - (line.epochs - line.average) + 1
        if count < 1:
            return
        progress.kept = progress.epoch
        for name, tensor in self.model.state_dict().items():
            if count == 1 or not tensor.is_floating_point():
                self._best[name] = tensor.clone()
            else:
                self._best[name].lerp_(tensor, 1 / count)

    def _end_stage(self, examples: Pool, stage: Stage, start: float) -> bool:
        """Keep the weights that were chosen, extend the memory, measure; return whether there was anything to keep.

        Early stopping keeps the best epoch also of a stage that diverged later.
        """
        if not self._best or (self.progress.diverged and not self.line.early_stopping):
            return False
        self.model.load_state_dict(self._best)
        self._best = {}
        if not stage.joint:
            self._remember(examples, stage)
        tests = [accuracy(self.model, self.parts.test, p) for p in self._permutations[: stage.count]]
        self.folder.note(
            "task",
            task=stage.count - 1,
            accuracy=tests,
            before=self.progress.before,
            kept=self.progress.kept,
            seconds=time.monotonic() - start,
            time=time.time(),
        )
        self.progress = self.progress.next_stage()
        self._save({})
        return True

    def _remember(self, examples: Pool, stage: Stage) -> None:
        """Make or extend the memory; the last task's is of no use."""
        if self.progress.stage == len(self.stages) - 1 or not self._protected:
            return
        source = examples
        if self.line.consolidate == "validation":
            source = pool(self.parts.validation, [self._permutations[stage.count - 1]])
        loader = self._batches(source, stage)
        seed = stream("labels", self.seed, stage.count - 1).initial_seed()
        graph = self._device.type == "cuda"
        if self.memory is None:
            self.memory = consolidate(self.model, loader, self.method, seed=seed, graph=graph)
        else:
            self.memory = Learner(self.model, self.memory).finish(loader, keep=self.line.keep, seed=seed, graph=graph)
        self._memory_file = None

    def _save(self, momentum: dict[str, Tensor], *, force: bool = False) -> None:
        """Write a checkpoint if the last one is old enough."""
        if not force and time.monotonic() - self._saved < self.checkpoint_seconds:
            return
        if self.memory is not None and self._memory_file is None:
            name = f"memory-{self.memory.tasks}.safetensors"
            try:
                self.memory.save(self.folder.path / name)
            except MemoryFileError as error:
                raise not_written(self.folder.path / name, error) from None
            self._memory_file = name
        state = {**vars(self.progress), "memory": self._memory_file}
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"momentum/{name}": tensor for name, tensor in momentum.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self._best.items()}
        self.folder.save(state, tensors)
        self._saved = time.monotonic()

    def _load(self, state: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Take a checkpoint up; return the momentum of each parameter."""
        named: dict[str, dict[str, Tensor]] = {"model": {}, "momentum": {}, "best": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            named[kind][name] = tensor.to(self._device)
        self.model.load_state_dict(named["model"])
        self._best = named["best"]
        self._memory_file = state["memory"]
        if self._memory_file is not None:
            try:
                self.memory = Memory.load(self.folder.path / self._memory_file, self.model, device=self._device)
            except MemoryFileError as error:
                raise RunError(
                    f"{error} — or remove the folder '{self.folder.path}' to run this job again from its start"
                ) from None
        known = {key: value for key, value in state.items() if key in vars(self.progress)}
        self.progress = Progress(**known)
        return named["momentum"]


def _is_finite(model: nn.Module) -> bool:
    return math.isfinite(sum(tensor.double().sum() for tensor in model.state_dict().values()))


def _momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    return {name: state["momentum_buffer"] for name, state in states.items() if "momentum_buffer" in state}


@torch.no_grad()
def _load_momentum(model: nn.Module, optimizer: torch.optim.Optimizer, momentum: dict[str, Tensor]) -> None:
    for name, tensor in momentum.items():
        optimizer.state[model.get_parameter(name)]["momentum_buffer"].copy_(tensor)
