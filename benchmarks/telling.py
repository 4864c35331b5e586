"""How often the task of a permuted image is told right by the image alone, see `TaskTeller`.

    python benchmarks/telling.py --data FOLDER [--tasks 50] [--seed 0] [--output results/telling]

A task is known by mean and variance of each pixel of its training images. All test images of all tasks are asked.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import keep, provenance

from xkfac.experiments.data.digits import load, permutation
from xkfac.experiments.runs.task_inference import TaskInference


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("results/telling"))
    options = parser.parse_args()
    torch.set_num_threads(2)
    record = {**provenance(), "seed": options.seed}
    results = {}
    for data in ("mnist", "digits"):
        parts = load(data, options.data, validation=5000 if data == "mnist" else 200)
        orders = [permutation(parts.train.x.shape[1], options.seed, task) for task in range(options.tasks)]
        teller = TaskInference()
        for task, order in enumerate(orders):
            teller.learn(str(task), [parts.train.x[:, order]])
        wrong = sum(
            int((teller.scores(parts.test.x[:, order]).argmax(1) != task).sum()) for task, order in enumerate(orders)
        )
        results[data] = {"images": options.tasks * len(parts.test), "wrong": wrong}
    rows = [f"| {data} | {options.tasks} | {row['images']:,} | {row['wrong']:,} |" for data, row in results.items()]
    keep(
        options.output,
        record,
        results,
        "\n".join(["| images | tasks | asked | told wrong |", "|---|---|---|---|", *rows]),
    )


if __name__ == "__main__":
    main()
