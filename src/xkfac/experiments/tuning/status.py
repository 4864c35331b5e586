"""How far a tuning is, for a person who watches it."""

from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.progress import LiveDisplay
from xkfac.experiments.tuning.trials import TunedJob, grid_of, ranked, tuned_jobs
from xkfac.experiments.tuning.tuner import Phase, phase_done


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
    numbers = range(len(grid_of(line)))
    outcomes = [each for each in (job.stage(task).trial(number).outcome() for number in numbers) if each is not None]
    best = next(iter(ranked(outcomes)), None)
    said = "-" if best is None else f"{best.validation:.2f} ({best.point})"
    row = [f"{line.label}, seed {job.folder.seed}", f"{task + 1}/{line.tasks}", f"{len(outcomes)}/{len(numbers)}", said]
    return len(outcomes), row
