"""What a task of permuted MNIST costs with each method, as a ratio to plain fine-tuning of the same network.

    XKFAC_DATA=FOLDER python benchmarks/task_time.py [--output results/task-time-cpu] [--device cuda]

A task is all of it: re-centring, every epoch with its validation, the curvature pass, the tests on the tasks so far.
The methods take turns within one process, as lines of the recipes `permuted-mnist` and `permuted-mnist-own` (15 epochs,
full data); the first task, which has no penalty yet, does not count. On a GPU the steps of all methods, fine-tuning
too, are replays of captured graphs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from common import keep, provenance

from xkfac.experiments.data.digits import load
from xkfac.experiments.recipes.parsing import load_recipe
from xkfac.experiments.runs.job import JobRun
from xkfac.experiments.runs.job_folder import JobFolder
from xkfac.experiments.runs.tasks import PermutedTasks

LINES = ("fine-tuning", "ewc", "kfac-bn-brn", "xkfac-bn-brn", "xkfac-bn-bn", "xkfac-brn-brn", "corrected")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/task-time-cpu"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lines", nargs="+", default=list(LINES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record = {**provenance(), "seeds": list(range(options.turns))}
    recipe = load_recipe("permuted-mnist")
    lines_of = {**recipe.lines, **load_recipe("permuted-mnist-own").lines}
    parts = load("mnist", options.data, validation=recipe.data.validation).to(options.device)
    seconds: dict[str, list[float]] = {name: [] for name in options.lines}
    for turn in range(options.turns):
        for name in options.lines:
            with tempfile.TemporaryDirectory() as folder:
                line = replace(lines_of[name], tasks=options.tasks)
                job = JobFolder(Path(folder), name, turn)
                JobRun(line, turn, PermutedTasks(line, turn, parts), job, checkpoint_seconds=float("inf")).run()
                # The last task makes no memory, so it is not counted either.
                seconds[name] += job.result().seconds[1:-1]
    plain = statistics.median(seconds["fine-tuning"])
    lines = ["| method | seconds a task | ratio to fine-tuning |", "|---|---|---|"]
    for name, values in seconds.items():
        middle = statistics.median(values)
        lines.append(f"| {lines_of[name].label} | {middle:.2f} | {middle / plain:.2f} |")
    keep(options.output, record, seconds, "\n".join(lines))


if __name__ == "__main__":
    main()
