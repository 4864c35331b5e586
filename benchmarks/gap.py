r"""What sets learning in sequence with a quadratic penalty apart from joint training, one approximation at a time.

    python benchmarks/gap.py --data FOLDER --device cuda [--pool 2] [--rows ...] [--strengths ...] [--output FOLDER]
    python benchmarks/gap.py --data FOLDER --device cuda --best --seeds 0 1      (the same options beside these)
    python benchmarks/gap.py --table                                             (writes table.md from the record)

Tasks of permuted MNIST are learnt one after the other by a perceptron without BN, everything shared, one head. (--bn:
with BN in the first task, which is then frozen and folded into the weights.) The rows differ in what stands for the
loss of past tasks, and in nothing else:

    kron-average    K-FAC of each layer, tasks averaged as the library does
    ...-plain       without the shorter steps along stiff directions, as the library
    kron-kept       the same, every task's factors kept
    kron-cross      kron-average with blocks between layers
    block           the exact Fisher of each layer, summed over tasks
    full            the exact Fisher of all parameters, summed over tasks
    ...-own         every task's quadratic around the weights that it was learnt to; else all are around the latest
                    weights
    ...-noise       the Fisher averaged over weights with noise, --noise times the root mean square of a layer's
    replay          the real loss of past tasks, on as many of their images as of the new task's in each step
    joint           all tasks at once, as many steps in all
    ...-long        three times as many epochs

The objective is (L_t + strength * sum of quadratics + damping) / (number of tasks). SGD, momentum 0.9, cosine. Along
the directions of largest curvature the gradient is divided by 1 + lr * curvature / 2, which keeps every strength stable
and moves no minimum. The learning rate is at most half of what is stable along all others.

Strengths are chosen on seed 1000, by validation images of all tasks; other seeds run with these (--best), and their
test images count. A run that is in the record is not run again. --jobs: runs side by side, each a process; use NVIDIA's
multi-process service for several on one GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import provenance
from gap_sequence import WITHOUT_PENALTY, Job, Sequence, data

DEVELOPMENT = 1000
ROWS = {
    "kron-average-plain": "Kronecker factors, averaged over tasks, plain steps (the library)",
    "kron-average": "Kronecker factors, averaged over tasks",
    "kron-cross": "Kronecker factors, averaged over tasks, with blocks between layers",
    "kron-kept": "Kronecker factors of every task",
    "kron-kept-long": "Kronecker factors of every task, 3x steps",
    "kron-kept-own": "Kronecker factors of every task, around its own weights",
    "block": "exact Fisher of each layer",
    "full": "exact Fisher of all parameters",
    "full-own": "exact Fisher of all parameters, around each task's own weights",
    "kron-average-noise": "Kronecker factors, averaged over tasks, averaged around the weights",
    "full-noise": "exact Fisher of all parameters, averaged around the weights",
    "full-noise-long": "exact Fisher of all parameters, averaged around the weights, 3x steps",
    "full-long": "exact Fisher of all parameters, 3x steps",
    "replay": "real loss of past tasks",
    "replay-long": "real loss of past tasks, 3x steps",
    "joint": "joint training",
    "joint-long": "joint training, 3x steps",
}
# From one row to the next, and what the difference is; they lead from the library to joint training, but for the third,
# which stands for the fifth where the exact Fisher is too dear for three times the steps.
STEPS = [
    ("plain steps", "kron-average-plain", "kron-average"),
    ("averaging over tasks", "kron-average", "kron-kept"),
    ("too few steps, with Kronecker factors of every task", "kron-kept", "kron-kept-long"),
    ("Kronecker factors", "kron-kept", "block"),
    ("blocks: no terms between layers", "block", "full"),
    ("too few steps", "full", "full-long"),
    ("the quadratic itself", "full-long", "replay-long"),
    ("learning in sequence, with the real losses", "replay-long", "joint-long"),
]


def work(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """Return the record of a job, run in this process."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
    try:
        result = Sequence(job, data(folder, device, job.pool, job.examples)).run()
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # for the other processes
    return {"job": asdict(job), **result, **provenance()}


def final(run: dict[str, Any], name: str) -> float:
    """Return the average over all tasks after the last, 0 where a run diverged."""
    return statistics.fmean(run[name][-1]) if run["diverged"] is None else 0.0


def best(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, of every row, the run on the development sequence that is best on validation images."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        row = run["job"]["row"]
        if run["job"]["seed"] == DEVELOPMENT and (
            row not in found or final(run, "validation") > final(found[row], "validation")
        ):
            found[row] = run
    return found


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def table(runs: list[dict[str, Any]]) -> str:
    """Return the rows at their best strengths, the sum that leads from the first to the last, and all strengths.

    The last column: how many times more the answers on the first task have moved, after the second, than predicted.
    """
    chosen = best(runs)
    head = "| what stands for past tasks | strength | development | test | as learnt | forgotten | real / predicted |"
    lines = [head, "|---" * 7 + "|"]
    tests: dict[str, list[float]] = {}
    for row, label in ROWS.items():
        if row not in chosen:
            continue
        strength = chosen[row]["job"]["strength"]
        same = [
            run
            for run in runs
            if run["job"]["row"] == row and run["job"]["strength"] == strength and run["job"]["seed"] != DEVELOPMENT
        ]
        tests[row] = [final(run, "test") for run in same]
        ended = [run for run in same or [chosen[row]] if run["diverged"] is None and len(run["test"]) > 1]
        learnt = [statistics.fmean(part[-1] for part in run["test"]) for run in ended]
        lost = [before - final(run, "test") for before, run in zip(learnt, ended, strict=True)]
        ratios = [run["divergence"]["real"] / run["divergence"]["predicted"] for run in ended if run["divergence"]]
        cells = [f"{strength:g}" if strength else "", f"{final(chosen[row], 'validation'):.1f}"]
        cells += [_spread(values) for values in (tests[row], learnt, lost, ratios)]
        lines.append(f"| {' | '.join([label, *cells])} |")
    measured = {row: values or [final(chosen[row], "validation")] for row, values in tests.items()}
    lines += ["", "| taken away | points gained |", "|---|---|"]
    for name, worse, better in STEPS:
        if worse in measured and better in measured:
            lines.append(f"| {name} | {statistics.fmean(measured[better]) - statistics.fmean(measured[worse]):+.1f} |")
    lines += ["", "| development sequence, by strength | |", "|---|---|"]
    for row in ROWS:
        points = [run for run in runs if run["job"]["row"] == row and run["job"]["seed"] == DEVELOPMENT]
        points.sort(key=lambda run: run["job"]["strength"])
        cells = [
            f"x{run['job']['strength']:g}: "
            + ("diverged" if run["diverged"] is not None else f"{final(run, 'validation'):.1f}")
            for run in points
        ]
        if cells and row.removesuffix("-long") not in WITHOUT_PENALTY:
            lines.append(f"| {row} | {', '.join(cells)} |")
    return "\n".join(lines)


def jobs_of(options: argparse.Namespace, runs: list[dict[str, Any]]) -> list[Job]:
    """Return the jobs that are asked for and not in the record."""
    settings = {key: getattr(options, key) for key in Job.__dataclass_fields__ if hasattr(options, key)}
    shared = {"row", "seed", "strength"}
    for run in runs:
        other = {key for key, value in settings.items() if key not in shared and run["job"][key] != value}
        if other:
            raise SystemExit(f"the record in '{options.output}' has other settings ({', '.join(other)}); use --output")
    chosen = best(runs)
    jobs = []
    for row in options.rows:
        strengths = options.strengths
        if row.removesuffix("-long") in WITHOUT_PENALTY:
            strengths = [0.0]
        elif options.best:
            like = row if row in chosen else row.removesuffix("-long")
            if like not in chosen:
                raise SystemExit(f"row '{row}' has no run with seed {DEVELOPMENT}; run it at some strengths first")
            strengths = [chosen[like]["job"]["strength"]]
        jobs += [Job(row, seed, strength, **settings) for seed in options.seeds for strength in strengths]
    done = [run["job"] for run in runs]
    left = [job for job in jobs if asdict(job) not in done]
    return sorted(left, key=lambda job: -job.all_epochs * {"full": 9, "block": 6}.get(job.kind, 1))  # long ones first


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--strengths", type=float, nargs="+", default=[1.0, 3.0, 10.0, 30.0])
    parser.add_argument("--best", action="store_true", help="the best strength of each row on the development sequence")
    parser.add_argument("--seeds", type=int, nargs="+", default=[DEVELOPMENT])
    parser.add_argument("--pool", type=int, default=1, help="average so many pixels per side to one")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--examples", type=int, default=0, help="training images per task, 0 for all 55,000")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--damping", type=float, default=1e-4)
    parser.add_argument("--noise", type=float, default=0.6)
    parser.add_argument("--bn", action="store_true", help="BN in the first task, frozen and folded after it")
    parser.add_argument("--fisher-rows", type=int, default=50_000, help="rows of gradients per task, 0 for all")
    parser.add_argument("--every", type=int, default=4, help="steps from one product with the slow part to the next")
    parser.add_argument("--rank", type=int, default=512, help="directions whose product is taken at every step")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("results/gap"))
    parser.add_argument("--table", action="store_true", help="only make the table of what is in the record")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    path = options.output / "results.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    if not options.table:
        jobs = jobs_of(options, runs)
        options.output.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as workers:
            futures = {workers.submit(work, job, options.data, options.device): job for job in jobs}
            for future in as_completed(futures):
                if (error := future.exception()) is not None:
                    print(f"failed: {futures[future]}: {error!r}", flush=True)
                    continue
                runs.append(run := future.result())
                temporary = path.with_suffix(".part")
                temporary.write_text(json.dumps({"runs": runs}, indent=1))
                temporary.replace(path)
                job, spent = run["job"], ", ".join(f"{key} {value:.1f}" for key, value in run["seconds"].items())
                ended = (
                    f"diverged at {run['diverged']}"
                    if run["diverged"] is not None
                    else f"{final(run, 'validation'):.2f}"
                )
                head = f"{time.monotonic() - started:.0f} s: {job['row']} x{job['strength']:g} seed {job['seed']}"
                print(f"{head}: {ended} ({spent} s, {run['peak_gib']:.1f} GiB)", flush=True)
    (options.output / "table.md").write_text(table(runs) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
