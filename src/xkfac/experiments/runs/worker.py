"""A process that runs jobs of a run, one after the other, as the process that started it names them.

Jobs come as lines of JSON on standard input, answers leave as lines on standard output. When the input ends, because
the other process closed it or is gone, this one ends at once: every file of a job is whole at every moment.

The environment variable XKFAC_CHECKPOINT_SECONDS changes how often a job writes its state.
"""

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from xkfac.errors import XkfacError
from xkfac.experiments.recipes.recipe import SINGLE
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job import CHECKPOINT_SECONDS, JobRun
from xkfac.experiments.runs.job_folder import RunError
from xkfac.experiments.runs.run_data import load_run_data
from xkfac.experiments.runs.tasks import RunData

Work = Callable[[dict[str, Any]], None]


def main() -> None:
    """Serve jobs until the input ends."""
    loaded: list[RunData] = []

    def work(job: dict[str, Any]) -> None:
        run = RunFolder.open(Path(job["run"]))
        if not loaded:
            set_precision(run)
            loaded.append(load_run_data(run.recipe, run.facts["data"], run.place))
        run_job(run, job["line"], job["seed"], loaded[0], checkpoint_seconds())

    serve(work)


def serve(work: Work) -> None:
    """Do what each line of the input asks for, and answer, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that hands out the jobs
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that prints can be mistaken for an answer
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        job = jobs.get()
        answer: dict[str, Any] = {"done": True}
        try:
            work(job)
        except XkfacError as error:
            answer = {"error": str(error)}
        except Exception:  # whatever it is, the other process must hear of it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


def checkpoint_seconds() -> float:
    """Return how often a job writes its state."""
    text = os.environ.get("XKFAC_CHECKPOINT_SECONDS", str(CHECKPOINT_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise XkfacError(f"XKFAC_CHECKPOINT_SECONDS is '{text}'; it must be a number of seconds") from None


def set_precision(run: RunFolder) -> None:
    """Set threads and the precision of products as a run's recipe asks for."""
    torch.set_num_threads(run.recipe.threads)
    precision = run.recipe.precision if run.place.type == "cuda" else "float32"
    torch.set_float32_matmul_precision({"float32": "highest", "tf32": "high", "bfloat16": "medium"}[precision])
    torch.backends.cudnn.allow_tf32 = precision != "float32"


def run_job(run: RunFolder, name: str, seed: int, data: RunData, checkpoint_seconds: float) -> None:
    """Run a job of a run, or go on with it, to its end."""
    line = run.recipe.lines[name]
    JobRun(
        line,
        seed,
        data.sequence(line, seed),
        run.job(name, seed),
        checkpoint_seconds,
        floors=_floors(run, name, seed),
        autocast=autocast_of(run),
    ).run()


def _floors(run: RunFolder, name: str, seed: int) -> dict[str, float]:
    """Return C_t by task for a line whose losses are balanced, from jobs that have ended; else nothing."""
    lines = run.recipe.lines
    if not lines[name].balance:
        return {}
    for other, line in lines.items():
        if line.method == SINGLE and not run.job(other, seed).result().done:
            raise RunError(
                f"line '{name}' balances its losses by those of '{other}', whose job with seed {seed} has not ended; "
                "run that line first"
            )
    return run.floors(seed)


def autocast_of(run: RunFolder) -> torch.dtype | None:
    """Return the dtype that the networks of a run compute in, None for that of their weights, as always on the CPU."""
    return torch.bfloat16 if run.place.type == "cuda" and run.recipe.precision == "bfloat16" else None


def _listen(jobs: queue.Queue[dict[str, Any]]) -> None:
    with contextlib.suppress(ValueError):
        for line in sys.stdin:
            jobs.put(json.loads(line))
    os._exit(1)


if __name__ == "__main__":
    main()
