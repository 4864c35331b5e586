"""A process that runs jobs of a run, one after the other, as the process that started it names them.

Jobs come as lines of JSON on standard input, answers leave as lines on standard output. When the input ends, because
the other process closed it or is gone, this one ends at once: every file of a job is whole at every moment.

The environment variable XKFAC_CHECKPOINT_SECONDS changes how often a job writes its state.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from xkfac.errors import XkfacError
from xkfac.experiments.data import Parts, load
from xkfac.experiments.folder import RunFolder
from xkfac.experiments.sequence import CHECKPOINT_SECONDS, Sequence


def main() -> None:
    """Serve jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that hands out the jobs
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing that prints can be mistaken for an answer
    jobs: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    parts: Parts | None = None
    while True:
        job = jobs.get()
        answer: dict[str, Any] = {"done": True}
        try:
            run = RunFolder.open(Path(job["run"]))
            torch.set_num_threads(run.recipe.threads)
            if parts is None:
                parts = load_parts(run)
            line = run.recipe.lines[job["line"]]
            folder = run.job(job["line"], job["seed"])
            Sequence(line, job["seed"], parts, folder, checkpoint_seconds=_checkpoint_seconds()).run()
        except XkfacError as error:
            answer = {"error": str(error)}
        except Exception:  # whatever it is, the other process must hear of it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


def _checkpoint_seconds() -> float:
    text = os.environ.get("XKFAC_CHECKPOINT_SECONDS", str(CHECKPOINT_SECONDS))
    try:
        return float(text)
    except ValueError:
        raise XkfacError(f"XKFAC_CHECKPOINT_SECONDS is '{text}'; it must be a number of seconds") from None


def load_parts(run: RunFolder) -> Parts:
    """Return the data of a run on its device."""
    data = run.recipe.data
    parts = load(data.set, run.facts["data"], validation=data.validation, train=data.train or None)
    if data.measure == "validation":
        parts = replace(parts, test=parts.validation)
    return parts.to(torch.device(run.facts["place"]))


def _listen(jobs: queue.Queue[dict[str, Any]]) -> None:
    with contextlib.suppress(ValueError):
        for line in sys.stdin:
            jobs.put(json.loads(line))
    os._exit(1)


if __name__ == "__main__":
    main()
