"""Start runs and go on with them: jobs side by side in processes of their own."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from xkfac.experiments.data.digits import DataError
from xkfac.experiments.files import check_path, data_folder
from xkfac.experiments.provenance import device_of, provenance
from xkfac.experiments.recipes.parsing import load_recipe, parse_recipe
from xkfac.experiments.recipes.recipe import SINGLE, Recipe
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job_folder import JobFolder, NotWritten, RunError
from xkfac.experiments.runs.results import RunResults
from xkfac.experiments.runs.run_data import load_run_data

Show = Callable[["RunFolder", "list[JobFolder]"], None]
"""Is called about twice a second with the run and the jobs that are running."""


class JobsFailed(RunError):
    """Jobs of a run that ended with an error; the others were run to their end."""

    exit_code = 1  # of the command


def start(
    recipe: str | Path | Recipe,
    folder: str | Path,
    *,
    settings: Sequence[str] = (),
    lines: Sequence[str] = (),
    jobs: int | None = None,
    device: str = "auto",
    data: str | Path | None = None,
    download: bool = False,
    show: Show | None = None,
) -> RunResults:
    """Run a recipe in a new folder and return its results.

    recipe: a `Recipe`, the name of one that comes with the package, or the path of a TOML file, changed by `settings`
    as in `load_recipe`. lines: names or patterns of the lines to run, all by default. jobs: how many jobs run side by
    side, by default one per core. device: `cpu`, `cuda`, or `auto`. data: the data folder, by default XKFAC_DATA.

    Raises XkfacError subclasses for a recipe, folder or data that cannot be used, before anything is run.
    """
    loaded = resolved(recipe, settings, lines)
    check_path(folder)  # before data is read, which can take long
    facts = checked(loaded, data, device, download=download, verbose=show is not None)
    run = RunFolder.create(Path(folder), loaded, facts)
    return _work(run, jobs, show)


def resolved(recipe: str | Path | Recipe, settings: Sequence[str], lines: Sequence[str]) -> Recipe:
    """Return a recipe, loaded with settings where it is a name or path, with those lines alone that are named."""
    if isinstance(recipe, Recipe) and settings:
        raise RunError("settings go with the name or path of a recipe, not with a Recipe; make the changes in it")
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, settings)
    return loaded.only(lines) if lines else loaded


def checked(
    recipe: Recipe, data: str | Path | None, device: str, *, download: bool = False, verbose: bool = False
) -> dict[str, Any]:
    """Return the facts of a run that is about to start; a fault in recipe, data or weights shows now, not in every job.

    verbose: say on standard error how far images are decoded, which is done once.
    """
    place, folder = device_of(device, RunError), data_folder(data)
    parse_recipe(recipe.to_toml(), recipe.name)  # one that was made in Python has not been checked
    loaded = load_run_data(
        recipe,
        folder,
        torch.device("cpu"),
        download=download,
        workers=os.cpu_count() or 1,
        progress=_decoding() if verbose else None,
    )
    for name, line in recipe.lines.items():
        try:
            loaded.sequence(line, recipe.seed)
        except DataError as error:
            raise RunError(f"lines.{name}: {error}") from None
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "place": str(place),
        "data": None if folder is None else str(folder.resolve()),
        "classes": dict(loaded.classes),
        **provenance(place, recipe.threads),
    }


def _decoding() -> Callable[[int, int], None]:
    """Return a function that says now and then how many images are decoded, where that takes a while."""
    last, said = time.monotonic(), False

    def tell(done: int, total: int) -> None:
        nonlocal last, said
        if time.monotonic() - last > 2 or (said and done == total):
            print(f"decoded {done:,} of {total:,} images", file=sys.stderr)
            last, said = time.monotonic(), True

    return tell


def resume(folder: str | Path, *, jobs: int | None = None, show: Show | None = None) -> RunResults:
    """Go on with a run that was interrupted and return its results; the numbers are those of an unbroken run."""
    run = RunFolder.open(Path(folder))
    if "tuning" in run.facts:
        raise RunError(
            f"'{folder}' is a tuning; go on with it by 'xkfac resume', or by xkfac.experiments.tuning.tuning.go_on"
        )
    return _work(run, jobs, show)


def results(folder: str | Path) -> RunResults:
    """Return what a run has measured so far."""
    return RunFolder.open(Path(folder)).results()


OUT_OF_MEMORY = "torch.OutOfMemoryError"


@dataclass(eq=False)
class Worker:
    """A process that does what messages ask for."""

    process: subprocess.Popen[str]

    @classmethod
    def start(cls, lock: int, threads: int, module: str = "xkfac.experiments.runs.worker") -> Self:
        """Start a process; it inherits the lock, so that the run is in use as long as any of them lives."""
        limits = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        # An interrupt is for this process alone: the other inherits the mask, so that none hits it while it starts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                pass_fds=(lock,),
                env={**os.environ, **limits, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return cls(process)

    def send(self, message: dict[str, Any]) -> None:
        """Say what is to be done."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is seen when its answer is awaited
            self.process.stdin.write(json.dumps(message) + "\n")

    @property
    def output(self) -> Any:
        """What the process answers on."""
        return self.process.stdout

    def answer(self) -> str | None:
        """Return the error of what has ended, None if there was none."""
        line = self.output.readline()
        if line:
            error: str | None = json.loads(line).get("error")
            return error
        code = self.process.wait()
        how = f"was killed by signal {-code}; is memory short?" if code < 0 else f"ended with exit code {code}"
        return f"its process {how}"

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _work(run: RunFolder, jobs: int | None, show: Show | None) -> RunResults:
    """Run all jobs that are not done."""
    most = most_processes(run, jobs)
    with run.locked() as lock:
        waiting = [job for job in run.jobs() if not job.result().done]
        failures: list[tuple[dict[str, Any], str]] = []

        def shown(messages: list[dict[str, Any]]) -> None:
            if show is not None:
                show(run, [run.job(message["line"], message["seed"]) for message in messages])

        for group in _in_turn(run, waiting):
            messages = [{"run": str(run.path), "line": job.line, "seed": job.seed} for job in group]
            failures += hand_out(messages, min(most, len(group)), lambda: Worker.start(lock, run.recipe.threads), shown)
        try:
            run.collect()
        except NotWritten:
            if not failures:  # else what failed first is what is said
                raise
    if failures:
        first, text = failures[0]
        raise JobsFailed(
            f"{len(failures)} of {len(waiting)} jobs failed; the first, '{first['line']}' with seed {first['seed']}: "
            f"{text}"
        )
    return run.results()


def most_processes(run: RunFolder, jobs: int | None) -> int:
    """Return how many processes may work on a run side by side, by default one for each core."""
    if jobs is not None and jobs < 1:
        raise RunError(f"jobs must be at least 1, not {jobs}")
    if run.place.type == "cuda" and not torch.cuda.is_available():
        raise RunError(f"the run '{run.path}' was started on a GPU and there is none here; start it anew on the CPU")
    return jobs or max(1, (os.cpu_count() or 1) // run.recipe.threads)


def _in_turn(run: RunFolder, waiting: list[JobFolder]) -> list[list[JobFolder]]:
    """Return jobs in groups, each of which waits for the one before: C_t comes from networks of single tasks."""
    lines = run.recipe.lines
    if not any(lines[job.line].balance for job in waiting):
        return [waiting]
    first = [job for job in waiting if lines[job.line].method == SINGLE]
    return [first, [job for job in waiting if job not in first]]


def hand_out(
    messages: Sequence[dict[str, Any]],
    count: int,
    start_worker: Callable[[], Worker],
    show: Callable[[list[dict[str, Any]]], None],
) -> Iterator[tuple[dict[str, Any], str]]:
    """Have `count` processes do what messages ask for; yield those that failed, with the reason.

    What finds no room in a GPU's memory beside others is done when one of them has ended, by one process fewer.
    show: is called about twice a second with the messages that processes are on.
    """
    waiting = list(messages)
    busy: dict[Worker, dict[str, Any]] = {}
    with selectors.DefaultSelector() as ready, contextlib.ExitStack() as ending:

        def employ(worker: Worker | None) -> None:
            if not waiting:
                return
            if worker is None or not worker.alive:
                worker = start_worker()
                ending.callback(worker.stop)
                ready.register(worker.output, selectors.EVENT_READ, worker)
            busy[worker] = waiting.pop(0)
            worker.send(busy[worker])

        for _ in range(count):
            employ(None)
        while busy:
            for key, _ in ready.select(timeout=0.5):
                worker: Worker = key.data
                message, error = busy.pop(worker, None), worker.answer()  # one that waits for work may end by itself
                crowded = error is not None and OUT_OF_MEMORY in error and bool(busy)
                if crowded or not worker.alive:
                    ready.unregister(worker.output)
                if crowded and message is not None:
                    waiting.append(message)
                    worker.stop()  # its memory is what others need
                    continue
                if message is not None and error is not None:
                    yield message, error
                employ(worker)
            show(list(busy.values()))
