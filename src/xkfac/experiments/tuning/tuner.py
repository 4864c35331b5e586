"""A process that tunes: it takes whatever piece of work of a phase is free, until none is left.

Phases keep data apart. `prepare` makes what is known of the source and reads its training data; `choose` learns trials
and chooses among them, and loads the training and validation data of targets alone; `measure` comes after all choices
and reads the test parts. Each phase has processes of its own, so that nothing is left over from the one before.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from torch import nn

from xkfac.errors import MemoryFileError, NotFiniteError, XkfacError
from xkfac.experiments.data.images import PartName
from xkfac.experiments.recipes.recipe import SINGLE, Line
from xkfac.experiments.records import Trial
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job import CHECKPOINT_SECONDS, JobRun
from xkfac.experiments.runs.job_folder import JobFolder, RunError, held, write_record, writing
from xkfac.experiments.runs.run_data import load_run_data
from xkfac.experiments.runs.tasks import RunData, TaskSequence
from xkfac.experiments.runs.worker import autocast_of, checkpoint_seconds, serve, set_precision
from xkfac.experiments.tuning.trials import (
    Choice,
    Measured,
    Scattered,
    StageFolder,
    TunedJob,
    grid_of,
    ranked,
    remove,
    tuned_jobs,
    with_setting,
)
from xkfac.memory import Memory

Phase = Literal["prepare", "choose", "measure"]
PHASES: tuple[Phase, ...] = ("prepare", "choose", "measure")
PAUSE = 0.2  # seconds between looks at what others still work on
_KEPT = 2  # memories, and sequences of tasks, that a process keeps at hand


def phase_data(run: RunFolder, phase: Phase) -> RunData:
    """Load what a phase may read: training data of the source, or of the targets, or test parts."""
    recipe, names = run.recipe, list(run.recipe.tasks)
    tasks = {"prepare": names[:1], "choose": names[1:], "measure": names}[phase]
    parts: tuple[PartName, ...] = (recipe.world[1].measure,) if phase == "measure" else ("train", "validation")
    classes = run.facts.get("classes")
    return load_run_data(recipe, run.facts["data"], run.place, classes=classes, tasks=tasks, parts=parts)


@dataclass
class Tuner:
    """Works on a phase of the tuning of a run, beside others that do the same."""

    run: RunFolder
    phase: Phase
    checkpoint_seconds: float = CHECKPOINT_SECONDS
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = phase_data(self.run, self.phase)
        self.jobs = tuned_jobs(self.run)
        # What is made or read once for all trials of a job; the last ones stay at hand.
        self._sequence_of = lru_cache(_KEPT)(lambda name, seed: self.data.sequence(self.run.recipe.lines[name], seed))
        self._memory_at = lru_cache(_KEPT)(self._load)

    def work(self) -> None:
        """Go on until every job is done with the phase, by whomever; jobs that fail here are left aside."""
        step = self._measure if self.phase == "measure" else self._choose
        while waiting := [
            job for job in self.jobs if job.name not in self.failures and not phase_done(job, self.phase)
        ]:
            if not any(self._tried(step, job) for job in waiting):
                time.sleep(PAUSE)

    def _tried(self, step: Callable[[TunedJob], bool], job: TunedJob) -> bool:
        """Do a step of a job; return whether there was something to do."""
        try:
            return step(job)
        except XkfacError as error:
            self.failures[job.name] = str(error)
            return True

    def _choose(self, job: TunedJob) -> bool:
        """Learn a trial of a job, or choose among those of its task; False while others have to come first."""
        task = len(job.choices())
        if phase_done(job, self.phase) or not self._floors_known(job, task):
            return False
        grid = self._grid(job, task)
        with contextlib.ExitStack() as holding:
            with held(job.folder.path / "lock") as lock:
                if lock is None or job.stage(task).choice() is not None:
                    return lock is not None
                outcomes = job.stage(task).outcomes(grid)
                if len(outcomes) == len(grid):
                    self._settle(job, task, outcomes)
                    return True
                trial = self._take(job.stage(task), grid, holding)
            if trial is None:
                return False
            self._learn(job, task, trial)
        return True

    def _grid(self, job: TunedJob, task: int) -> list[Trial]:
        """Return what is tried on a task; on the source the settings of the line, and nothing where it is given."""
        if task:
            return grid_of(job.line)
        own = Trial(0, job.line.lr, job.line.damping if job.line.penalised else None, None)
        return [] if self._sequence(job).known else [own]

    def _take(self, stage: StageFolder, grid: Iterable[Trial], holding: contextlib.ExitStack) -> Trial | None:
        """Return a trial to work on, held: the first that has not ended and that nobody works on."""
        for trial in grid:
            folder = stage.trial(trial.number)
            lock = held(folder.path / "lock")
            # Whoever held it may have ended it just before it was free.
            if folder.outcome() is None and holding.enter_context(lock) is not None and folder.outcome() is None:
                return trial
        return None

    def _floors_known(self, job: TunedJob, task: int) -> bool:
        """Whether the networks of their own that the losses of a task are balanced by were all chosen."""
        if not job.line.balance or task == 0:
            return True
        singles = [each for each in self.jobs if each.line.method == SINGLE and each.folder.seed == job.folder.seed]
        failed = next((each for each in singles if each.name in self.failures), None)
        if failed is not None:
            raise RunError(f"its losses are balanced by those of '{failed.name}', which failed")
        return all(each.chosen() or each.stage(task).choice() is not None for each in singles)

    def _learn(self, job: TunedJob, task: int, trial: Trial) -> None:
        """Learn a trial, or go on with it, to its end."""
        folder = job.stage(task).trial(trial.number)
        learning = self._job_run(job, task, with_setting(job.line, trial), folder)
        if task and job.line.method != SINGLE:
            job.stage(task - 1).load(learning.model)
        carried = learning.turn_to(task, self._memory(job, task))
        finite = False
        with contextlib.suppress(NotFiniteError):
            finite = learning.learn(task, carried)
        state = learning.state
        validation = learning.sequence.accuracy(learning.model, task, "validation") if finite else None
        outcome = replace(trial, validation=validation, kept=state.kept, seconds=state.seconds)
        folder.end(outcome, learning.model.state_dict() if finite else None)

    def _job_run(self, job: TunedJob, task: int, line: Line, folder: JobFolder) -> JobRun:
        """Return a job that works on one task alone, with the settings of a line, in a folder."""
        seed, sequence = job.folder.seed, self._sequence(job).restricted(task)
        floors = self.run.floors(seed) if line.balance and task else {}
        options: dict[str, Any] = {"floors": floors, "autocast": autocast_of(self.run)}
        return JobRun(line, seed, sequence, folder, self.checkpoint_seconds, **options)

    def _settle(self, job: TunedJob, task: int, outcomes: list[Trial]) -> None:
        """Choose among the trials of a task and extend the memory; the caller holds the lock of the job."""
        stage, tasks, order = job.stage(task), self._sequence(job).tasks, ranked(outcomes)
        job.sweep(task)
        while order and not self._remember(job, task, order[0]):
            order = order[1:]  # a trial whose curvature is not finite has diverged too
        if not outcomes:  # the source is given
            self._remember(job, task, None)
        best, second = (*order, None, None)[:2]
        lost, diverged = len(outcomes) - len(order), bool(outcomes) and best is None
        job.choose(task, Choice(tasks[task], best, second, len(outcomes), lost, diverged), tasks)
        for each in outcomes:
            if each != best and not self.run.facts["tuning"]["scatter"]:
                remove(stage.trial(each.number).weights_file)

    def _remember(self, job: TunedJob, task: int, outcome: Trial | None) -> bool:
        """Write the memory that follows from a trial, or from the source as given; return whether it is finite."""
        if task + 1 == job.line.tasks or not job.line.protected:
            return True
        stage, learning = job.stage(task), self._job_run(job, task, job.line, job.folder)
        if outcome is not None:
            stage.trial(outcome.number).load(learning.model)
        learning.memory = self._memory(job, task)
        learning.sequence.enter(learning.model, task)
        try:
            learning.remember(task)
        except NotFiniteError:
            return False
        assert learning.memory is not None
        with writing(stage.memory):
            stage.path.mkdir(parents=True, exist_ok=True)
            learning.memory.save(stage.memory)
        return True

    def _sequence(self, job: TunedJob) -> TaskSequence:
        return self._sequence_of(job.folder.line, job.folder.seed)

    def _memory(self, job: TunedJob, task: int) -> Memory | None:
        """Return the memory that a task is learnt with, if there is one."""
        return self._memory_at(job.stage(task - 1)) if task and job.line.protected else None

    def _load(self, stage: StageFolder) -> Memory:
        model = self._sequence_of(stage.line, stage.seed).network()
        try:
            return Memory.load(stage.memory, model, device=self.run.place)
        except MemoryFileError as error:
            raise RunError(f"{error} — or start the tuning anew in another folder") from None

    def _measure(self, job: TunedJob) -> bool:
        """Measure a stage of a job on test parts; when all are, end the job."""
        for task in job.stages():
            with held(job.stage(task).path / "lock") as lock:
                if lock is not None and job.stage(task).measured() is None:
                    self._measure_stage(job, task)
                    return True
        if any(job.stage(task).measured() is None for task in job.stages()):
            return False
        with held(job.folder.path / "lock") as lock:
            if lock is not None:
                job.sweep()
                job.tell(self._sequence(job).tasks)
        return lock is not None

    def _measure_stage(self, job: TunedJob, task: int) -> None:
        stage, sequence, single = job.stage(task), self._sequence(job), job.line.method == SINGLE
        model = sequence.network()
        before = None
        untrained = [] if task or sequence.known else _accuracies(sequence, model, range(job.line.tasks))
        if task >= sequence.known and not single:
            if task:
                job.stage(task - 1).load(model)
            (before,) = _accuracies(sequence, model, [task])
        stage.load(model)
        accuracy = _accuracies(sequence, model, [task] if single else range(task + 1))
        scattered = self.run.facts["tuning"]["scatter"] and task and not single
        trials = dict(self._scattered(job, task, model)) if scattered else {}
        write_record(stage.path / "measured.json", Measured(before, accuracy, untrained, trials))
        choice = stage.choice()
        if choice is not None and choice.chosen is not None:
            others = set(range(choice.trials)) - {choice.chosen.number}
            remove(*(stage.trial(number).weights_file for number in others))

    def _scattered(self, job: TunedJob, task: int, model: nn.Module) -> Iterator[tuple[str, Scattered]]:
        """Yield the accuracy of every trial on its target, and on average over the tasks so far."""
        for number in range(len(grid_of(job.line))):
            trial = job.stage(task).trial(number)
            if trial.weights_file.is_file():
                trial.load(model)
                row = _accuracies(self._sequence(job), model, range(task + 1))
                yield str(number), {"target": row[-1], "average": statistics.fmean(row)}


def _accuracies(sequence: TaskSequence, model: nn.Module, tasks: Iterable[int]) -> list[float]:
    return [sequence.accuracy(model, task, "test") for task in tasks]


def phase_done(job: TunedJob, phase: Phase) -> bool:
    """Whether nothing of a phase is left of a job."""
    if phase == "prepare":
        return job.stage(0).choice() is not None
    return job.chosen() if phase == "choose" else job.folder.result().done


def _work(message: dict[str, Any]) -> None:
    run = RunFolder.open(Path(message["run"]))
    set_precision(run)
    tuner = Tuner(run, message["phase"], checkpoint_seconds())
    tuner.work()
    if tuner.failures:
        name, text = next(iter(tuner.failures.items()))
        raise RunError(f"{len(tuner.failures)} of {len(tuner.jobs)} jobs failed; the first, '{name}': {text}")


if __name__ == "__main__":
    serve(_work)
