"""Choose hyperparameters without source data, as the paper does (sec:hyp): task by task, on the target alone.

For each task in its order every point of a line's grid is learnt from the state that the chosen one of the task before
left. The trial with the best accuracy on the validation part of the target is chosen, its memory is extended, and the
next task begins. What the run folder then holds is a normal run, with the chosen settings from task to task.
"""

import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xkfac.experiments.files import check_path
from xkfac.experiments.recipes.recipe import JOINT, SINGLE, Recipe
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job_folder import NotWritten, RunError, write_text, writing
from xkfac.experiments.runs.progress import LiveDisplay
from xkfac.experiments.runs.running import JobsFailed, Worker, checked, hand_out, most_processes, resolved
from xkfac.experiments.tuning.trials import ChoiceEntry, Point, TunedJob, grid_of, ranked, tuned_jobs
from xkfac.experiments.tuning.tuner import PHASES, Phase, phase_done

Show = Callable[[RunFolder, Phase], None]
"""Is called about twice a second with the run and the phase that its tuning is in."""


def tune(
    recipe: str | Path | Recipe,
    folder: str | Path,
    *,
    settings: Sequence[str] = (),
    lines: Sequence[str] = (),
    jobs: int | None = None,
    device: str = "auto",
    data: str | Path | None = None,
    download: bool = False,
    scatter: bool = True,
    show: Show | None = None,
) -> list[ChoiceEntry]:
    """Choose the hyperparameters of a recipe's lines in a folder, new or begun, and return what was chosen.

    recipe, settings, lines, jobs, device, data: those of `xkfac.experiments.start`. scatter: keep the weights of every
    trial until all choices are made, and measure them too. Several processes, also on several machines that share the
    folder, can work on it at once.

    Raises XkfacError subclasses for a recipe, folder or data that cannot be used, before anything is run, and
    JobsFailed when something failed on the way.
    """
    chosen_recipe = resolved(recipe, settings, lines)
    _check_tunable(chosen_recipe)
    path = check_path(folder)
    if (path / "run.json").exists():
        run = RunFolder.open(path)
        if "tuning" not in run.facts or run.recipe.to_toml() != chosen_recipe.to_toml():
            raise RunError(f"'{path}' holds another run, not the tuning of this recipe; choose another folder")
    else:
        facts = checked(chosen_recipe, data, device, download=download, verbose=show is not None)
        facts["tuning"] = {"scatter": scatter}
        run = _created(path, chosen_recipe, facts)
    return go_on(run, jobs=jobs, show=show)


def _check_tunable(recipe: Recipe) -> None:
    joint = next((name for name, line in recipe.lines.items() if line.method == JOINT), None)
    if joint is not None:
        raise RunError(
            f"line '{joint}' learns all tasks at once, the source included, and cannot be tuned on targets alone; "
            "leave it out by naming the others with --line"
        )
    world, data = recipe.world
    if data.validation == 0:
        raise RunError(f"tuning chooses by accuracy on the validation split and {world}.validation is 0; set it")


def _created(path: Path, recipe: Recipe, facts: dict[str, Any]) -> RunFolder:
    """Make the folder of a run as a whole, or open the one that another process made at the same moment."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not (path / "run.json").exists():
        RunFolder.create(path, recipe, facts)  # says what is wrong
    beside = path.parent / f".xkfac-{secrets.token_hex(8)}"
    RunFolder.create(beside, recipe, facts)
    try:
        with writing(path):
            beside.rename(path)
    except NotWritten:
        shutil.rmtree(beside, ignore_errors=True)
        if not (path / "run.json").exists():
            raise
    return RunFolder.open(path)


def go_on(run: RunFolder, *, jobs: int | None = None, show: Show | None = None) -> list[ChoiceEntry]:
    """Go on with the tuning of a run to its end, beside others that do so; the choices are those of an unbroken one."""
    most = most_processes(run, jobs)
    every = tuned_jobs(run)
    with run.locked(shared=True) as lock:
        for phase in PHASES:
            errors = _phase(run, phase, most, lock, show)
            if not all(phase_done(job, phase) for job in every):
                raise JobsFailed(errors[0] if errors else f"the phase '{phase}' of '{run.path}' did not end; resume it")
        found = chosen(run)
        _write_all(run.path / "choices.json", found)
        run.collect()
        if run.facts["tuning"]["scatter"]:  # the report draws target against average accuracy from it
            _write_all(run.path / "points.json", _points(run))
    return found


def _write_all(path: Path, entries: Iterable[Any]) -> None:
    write_text(path, json.dumps([asdict(entry) for entry in entries], indent=1) + "\n")


def _phase(run: RunFolder, phase: Phase, most: int, lock: int, show: Show | None) -> list[str]:
    """Have processes work on a phase until it is done; return what went wrong."""
    open_jobs = [job for job in tuned_jobs(run) if not phase_done(job, phase)]
    pieces = sum(len(grid_of(job.line)) if phase == "choose" else 1 for job in open_jobs)
    count = min(most, pieces)

    def shown(_: object) -> None:
        if show is not None:
            show(run, phase)

    threads, module = run.recipe.threads, "xkfac.experiments.tuning.tuner"
    messages = [{"run": str(run.path), "phase": phase}] * count
    failures = hand_out(messages, count, lambda: Worker.start(lock, threads, module), shown)
    return [error for _, error in failures]


def chosen(run: RunFolder) -> list[ChoiceEntry]:
    """Return what was chosen so far for each target, line by line."""
    jobs = (TunedJob(run, run.job(name, seed)) for name in run.recipe.lines for seed in run.recipe.seeds)
    return [ChoiceEntry.of(job.folder, choice) for job in jobs for choice in job.choices()[1:]]


def _points(run: RunFolder) -> Iterator[Point]:
    for job in tuned_jobs(run):
        for task, choice in enumerate(job.choices()):
            measured = job.stage(task).measured()
            if task == 0 or job.line.method == SINGLE or measured is None:
                continue
            for trial in grid_of(job.line):
                row: dict[str, Any] = {"target": None, "average": None, **measured.trials.get(str(trial.number), {})}
                best = choice.chosen is not None and trial.number == choice.chosen.number
                yield Point(choice.task, job.line.label, job.line.balance, trial.lr, trial.damping, **row, chosen=best)


class TuningDisplay(LiveDisplay):
    """Shows a tuning while it works: for every job its task, how many trials have ended, and the best so far."""

    def show(self, run: RunFolder, phase: Phase) -> None:
        """Show how far a tuning is."""
        if self._due:
            self._show(*tuning_status(run, phase))


def tuning_status(run: RunFolder, phase: Phase) -> tuple[str, tuple[str, ...], list[list[str]]]:
    """Return how far the tuning of a run is: in a line, and by columns with a row for each job that is at a task."""
    jobs = tuned_jobs(run)
    at_work = [job for job in jobs if phase == "choose" and not job.chosen()]
    found = [_row(job) for job in at_work]
    ended = sum(max(len(job.choices()) - 1, 0) * len(grid_of(job.line)) for job in jobs)
    total = sum(len(grid_of(job.line)) * (job.line.tasks - 1) for job in jobs)
    doing = {"prepare": "preparing", "choose": "choosing", "measure": "measuring"}[phase]
    trials = f", {ended + sum(count for count, _ in found)}/{total} trials" if phase == "choose" else ""
    head = f"{run.recipe.name}: {doing}, {sum(phase_done(job, phase) for job in jobs)}/{len(jobs)} jobs{trials}"
    return head, ("task", "trials", "best so far"), [row for _, row in found]


def _row(job: TunedJob) -> tuple[int, list[str]]:
    """Return how many trials of the current task of a job have ended, and its row: task, trials, best so far."""
    task, line = len(job.choices()), job.line
    grid = grid_of(line)
    outcomes = job.stage(task).outcomes(grid)
    best = next(iter(ranked(outcomes)), None)
    said = "-" if best is None else f"{best.validation:.2f} ({best.setting})"
    row = [f"{line.label}, seed {job.folder.seed}", f"{task + 1}/{line.tasks}", f"{len(outcomes)}/{len(grid)}", said]
    return len(outcomes), row
