"""What tuning keeps on disk: the trials of every stage of a job, the choice among them, and the events that follow.

    jobs/LINE/SEED/lock                              held while work of the job is handed out, or a choice is made
    jobs/LINE/SEED/stages/T/trials/N/                one point of the grid, learnt as a job is: events, checkpoints
    jobs/LINE/SEED/stages/T/trials/N/outcome.json    what it reached; the trial has ended once this is there
    jobs/LINE/SEED/stages/T/trials/N/weights.*       the network that it left
    jobs/LINE/SEED/stages/T/choice.json              the trial that the next task begins with; the stage has ended
    jobs/LINE/SEED/stages/T/memory.*                 the memory that the next task is learnt with
    jobs/LINE/SEED/stages/T/measured.json            accuracies on test parts, after all choices are made
    jobs/LINE/SEED/events.jsonl                      the job as if it had known the chosen settings from the start

Whole files replace each other, and each piece of work is done under a lock that ends with its process. So whoever
comes next finds every piece either done or free.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict

from torch import Tensor, nn

from xkfac import files as storage
from xkfac.errors import MemoryFileError
from xkfac.experiments.recipes.recipe import SINGLE, Line
from xkfac.experiments.records import Percent, Trial
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job_folder import JobFolder, RunError, read_record, write_record, write_text, writing
from xkfac.plain_values import Amount, Range

WEIGHTS = "xkfac-weights"
CHOICE_COLUMNS = ("line", "seed", "task", "lr", "damping", "validation", "runner-up", "why")


def with_setting(line: Line, trial: Trial) -> Line:
    """Return a line with the setting of a trial in place of its own."""
    return replace(line, lr=trial.lr, target_lr=None, damping=line.damping if trial.damping is None else trial.damping)


def grid_of(line: Line) -> list[Trial]:
    """Return the trials that a line chooses from on a target, each setting once, in the order of the recipe."""
    lr = line.lr if line.target_lr is None or line.method == SINGLE else line.target_lr
    rates = dict.fromkeys(line.grid.get("lr", (lr,)))
    dampings = dict.fromkeys(line.grid.get("damping", (line.damping,))) if line.penalised else (None,)
    settings = itertools.product(rates, dampings)
    return [Trial(number, lr, damping, None) for number, (lr, damping) in enumerate(settings)]


def ranked(outcomes: Sequence[Trial]) -> list[Trial]:
    """Return trials that did not diverge, the best first; of equals first a smaller lr, then a larger damping."""
    finite = [each for each in outcomes if each.validation is not None]
    return sorted(finite, key=lambda each: (-(each.validation or 0.0), each.lr, -(each.damping or 0.0), each.number))


@dataclass(frozen=True)
class Choice:
    """What was chosen on a task, and why.

    chosen: None where there was nothing to learn, or nothing that stayed finite, which `diverged` says.
    runner_up: the next best. trials: how many there were, of which `lost` diverged.
    """

    task: str
    chosen: Trial | None
    runner_up: Trial | None = None
    trials: int = 0
    lost: int = 0
    diverged: bool = False

    @property
    def why(self) -> str:
        """The reason in words."""
        best, second = self.chosen, self.runner_up
        lost = f"; {self.lost} diverged" if self.lost else ""
        if best is None:
            return f"all {self.trials} trials diverged" if self.diverged else "known from the start"
        if second is None or best.validation is None or second.validation is None:
            return ("the only one" if self.trials == 1 else f"the only one of {self.trials} left") + lost
        if best.validation > second.validation:
            margin = best.validation - second.validation
            return f"best of {self.trials}, by {margin:.2f} points{lost}"
        tie = "smaller lr" if best.lr < second.lr else "larger damping"
        return f"as good as the next of {self.trials}, with the {tie}{lost}"


@dataclass(frozen=True)
class ChoiceEntry:
    """What was chosen on a task of a job, as `choices.json` has it.

    runner_up: the next best of so many `trials`, some of which `diverged`.
    """

    line: str
    seed: int
    task: str
    lr: Amount | None
    damping: Amount | None
    validation: Percent | None
    runner_up: Trial | None
    trials: int
    diverged: int
    why: str

    @classmethod
    def of(cls, job: JobFolder, choice: Choice) -> Self:
        """Return the entry of a choice."""
        best = choice.chosen
        lr, damping, found = (None, None, None) if best is None else (best.lr, best.damping, best.validation)
        more = choice.runner_up, choice.trials, choice.lost, choice.why
        return cls(job.line, job.seed, choice.task, lr, damping, found, *more)

    def cells(self) -> list[str]:
        """Return its cells under `CHOICE_COLUMNS`."""

        def written(value: float | None, form: str = "g") -> str:
            return "-" if value is None else format(value, form)

        second, validation = self.runner_up, written(self.validation, ".2f")
        beside = f"{written(second.validation, '.2f')} ({second.setting})" if second else "-"
        setting = (written(self.lr), written(self.damping), validation)
        return [self.line, str(self.seed), self.task, *setting, beside, self.why]


@dataclass(frozen=True)
class Point:
    """What one setting of hyperparameters reached on a task, measured after all choices.

    label: the method. balanced: whether alpha_s and alpha_t were adapted. target: accuracy on the task in %. average:
    that over all tasks so far; both None of a setting that diverged. chosen: the method goes on with this setting.
    """

    task: str
    label: str
    balanced: bool
    lr: Amount
    damping: Amount | None
    target: Percent | None
    average: Percent | None
    chosen: bool


class Scattered(TypedDict):
    """Accuracies of a trial that need not be the chosen one, as `Point` has them."""

    target: Percent
    average: Percent


@dataclass(frozen=True)
class Measured:
    """Accuracies of a stage on test parts: of its task before it was learnt, and of all tasks so far after it.

    untrained: of the initial network, for the first stage. trials: by their numbers.
    """

    before: Percent | None
    accuracy: Annotated[list[Percent], Range("a list of accuracies", bool)]
    untrained: list[Percent] = field(default_factory=list)
    trials: dict[str, Scattered] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialFolder(JobFolder):
    """The folder of one trial, which is learnt as a job is."""

    @property
    def weights_file(self) -> Path:
        """Where the network is that it left."""
        return self.path / "weights.safetensors"

    def outcome(self) -> Trial | None:
        """Return what it reached, None if it has not ended."""
        return read_record(self.path / "outcome.json", Trial)

    def end(self, outcome: Trial, weights: Mapping[str, Tensor] | None) -> None:
        """Write what it reached, and remove the states that it went on from."""
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if weights is not None:
            with writing(self.weights_file):
                storage.write(self.weights_file, {}, weights, WEIGHTS)
        write_record(self.path / "outcome.json", outcome)
        self.tidy()

    def tidy(self) -> None:
        """Remove what a trial that has ended went on from."""
        remove(*self.path.glob("checkpoint-*"), *self.path.glob(".xkfac-*.part"))

    def load(self, model: nn.Module) -> None:
        """Give a network the weights that it left."""
        try:
            _, tensors = storage.read(self.weights_file, WEIGHTS)
        except MemoryFileError as error:
            raise RunError(f"{error} — or remove the folder '{self.path}' to try this point again") from None
        model.load_state_dict(tensors)


@dataclass(frozen=True)
class StageFolder:
    """The folder of one stage of a job: its trials, and what was chosen."""

    path: Path
    line: str
    seed: int

    def trial(self, number: int) -> TrialFolder:
        """Return the folder of a trial."""
        return TrialFolder(self.path / "trials" / str(number), self.line, self.seed)

    def outcomes(self, grid: Sequence[Trial]) -> list[Trial]:
        """Return those trials of a grid that have ended, with what they reached."""
        found = (self.trial(trial.number).outcome() for trial in grid)
        return [trial for trial in found if trial is not None]

    @property
    def memory(self) -> Path:
        """Where the memory is that the next task is learnt with."""
        return self.path / "memory.safetensors"

    def choice(self) -> Choice | None:
        """Return what was chosen, None if that is open."""
        return read_record(self.path / "choice.json", Choice)

    def measured(self) -> Measured | None:
        """Return what was measured of the chosen trial and of the others, None if that is still to be done."""
        return read_record(self.path / "measured.json", Measured)

    def load(self, model: nn.Module) -> None:
        """Give a network the weights of the chosen trial; where the source was given, it keeps those it has."""
        choice = self.choice()
        if choice is not None and choice.chosen is not None:
            self.trial(choice.chosen.number).load(model)


@dataclass(frozen=True)
class TunedJob:
    """A job that is tuned: a line with a seed, stage by stage."""

    run: RunFolder
    folder: JobFolder

    @property
    def line(self) -> Line:
        """The line as the recipe has it."""
        return self.run.recipe.lines[self.folder.line]

    @property
    def name(self) -> str:
        """What it is called in messages and studies."""
        return f"{self.folder.line}/{self.folder.seed}"

    def stage(self, task: int) -> StageFolder:
        """Return the folder of a stage."""
        return StageFolder(self.folder.path / "stages" / str(task), self.folder.line, self.folder.seed)

    def choices(self) -> list[Choice]:
        """Return what was chosen so far, task by task."""
        found: list[Choice] = []
        while len(found) < self.line.tasks and (choice := self.stage(len(found)).choice()) is not None:
            found.append(choice)
        return found

    def chosen(self) -> bool:
        """Whether nothing is left to choose."""
        return self._ended(self.choices())

    def _ended(self, choices: Sequence[Choice]) -> bool:
        return len(choices) == self.line.tasks or any(choice.diverged for choice in choices)

    def stages(self) -> range:
        """Return the tasks that were learnt, up to the one at which all trials diverged."""
        return range(sum(not choice.diverged for choice in self.choices()))

    def choose(self, task: int, choice: Choice, tasks: Sequence[str]) -> None:
        """Write what was chosen on a task; events first, because whoever sees the choice reads them."""
        self.tell(tasks, (*self.choices()[:task], choice))
        write_record(self.stage(task).path / "choice.json", choice)
        remove(*(self.stage(earlier).memory for earlier in range(task)))

    def sweep(self, upto: int | None = None) -> None:
        """Remove files that nobody resumes from: of the stages up to one, or of all stages once all is done.

        Processes that were killed leave half files, and states of trials that have ended.
        """
        tasks = range(self.line.tasks if upto is None else upto + 1)
        for stage in map(self.stage, tasks):
            remove(*stage.path.glob(".xkfac-*.part"))
            for path in stage.path.glob("trials/*"):
                TrialFolder(path, self.folder.line, self.folder.seed).tidy()
        remove(*self.folder.path.glob(".xkfac-*.part"), *(self.stage(task).memory for task in tasks if upto is None))

    def tell(self, tasks: Sequence[str], choices: Sequence[Choice] | None = None) -> None:
        """Write the events of the job anew from what was chosen, and measured, so far."""
        events = self._events(tasks, self.choices() if choices is None else choices)
        write_text(self.folder.path / "events.jsonl", "".join(f"{json.dumps(event)}\n" for event in events))

    def _events(self, tasks: Sequence[str], choices: Sequence[Choice]) -> Iterator[dict[str, Any]]:
        learnt = [choice for choice in choices if not choice.diverged]
        found = [self.stage(task).measured() for task in range(len(learnt))]
        untrained = found[0].untrained if found and found[0] else []
        job = {"line": self.folder.line, "seed": self.folder.seed}
        yield {"event": "start", **job, "untrained": untrained, "tasks": list(tasks[: self.line.tasks])}
        singles: list[float] = []
        for task, (choice, measured) in enumerate(zip(learnt, found, strict=True)):
            chosen = choice.chosen
            if chosen is not None:
                trial = self.stage(task).trial(chosen.number)
                yield from (event for event in trial.events() if event["event"] == "epoch")
                yield {"event": "choice", "task": task, **asdict(chosen)}
            if measured is not None:
                singles = [*singles, measured.accuracy[-1]]
                accuracy = singles if self.line.method == SINGLE else measured.accuracy
                kept, seconds = (-1, 0.0) if chosen is None else (chosen.kept, chosen.seconds)
                numbers = {"accuracy": accuracy, "before": measured.before, "kept": kept, "seconds": seconds}
                yield {"event": "task", "task": task, **numbers}
        if self._ended(choices) and all(found):
            yield {"event": "end", "diverged": len(learnt) if len(learnt) < len(choices) else None}


def tuned_jobs(run: RunFolder) -> list[TunedJob]:
    """Return the jobs of a run, networks of their own first, because others wait for their losses."""
    jobs = [TunedJob(run, folder) for folder in run.jobs()]
    return sorted(jobs, key=lambda job: job.line.method != SINGLE)


def remove(*paths: Path) -> None:
    """Remove files that are no longer needed; one that stays does no harm."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
