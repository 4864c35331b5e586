"""Whether a run that is killed again and again gives the numbers of an unbroken one, bit by bit.

    python benchmarks/kills.py [--kills 200] [--seed 0] [--longest 1.5] [--folder FOLDER]

A small run with several methods, one that balances its losses among them, goes through once without a break. Then
`xkfac run` and `xkfac resume` work on the same recipe until they are killed (SIGKILL, the command and its worker
alike), at a random moment up to `--longest` seconds after the run's files first changed. Each run that reaches its end
is compared with the unbroken one: all events but for their times, and all tensors of the last checkpoints. The next
run then starts from nothing. The exit code is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from xkfac import files as storage
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job_folder import CHECKPOINT

RECIPE = """
name = "kills"
title = "Killed again and again"
[data]
set = "digits"
validation = 200
train = 600
[defaults]
tasks = 3
epochs = 3
batch = 32
widths = [24, 128]
lr_every = 1
lr_factor = 2
curvature = { draws = 1 }
[lines.single]
method = "single"
[lines.balanced]
balance = true
balance_every = 2
[lines.xkfac]
[lines.hierarchical]
curvature = { draws = 1, grouping = "hierarchical" }
[lines.cross-layer]
curvature = { draws = 1, cross_layer = true }
[lines.kfac]
method = "kfac"
keep = "all"
[lines.corrected]
method = "corrected"
[lines.ewc]
method = "ewc"
[lines.own-bn]
method = "own-bn"
own = ["6"]
"""
TIMES = ("time", "seconds")


def started(*arguments: object) -> subprocess.Popen[str]:
    """Start the command in a group of its own, one job at a time, a checkpoint whenever there can be one."""
    return subprocess.Popen(
        [sys.executable, "-m", "xkfac.cli", *map(str, arguments), "-j", "1", "--quiet"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "XKFAC_CHECKPOINT_SECONDS": "0", "OMP_NUM_THREADS": "1"},
    )


def fingerprint(folder: Path) -> set[tuple[str, int]]:
    """Return the files of all jobs of a run with their sizes."""
    return {(str(path), path.stat().st_size) for path in folder.glob("jobs/*/*/events.jsonl")}


def killed(process: subprocess.Popen[str], folder: Path, moment: float) -> bool:
    """Kill a process `moment` seconds after the run has changed; return False where it ended by itself first."""
    before = fingerprint(folder)
    while process.poll() is None and fingerprint(folder) == before:
        time.sleep(0.01)
    try:
        process.wait(moment)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    _, error = process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the run '{folder}' ended with exit code {process.returncode}: {error}")
    return False


def events(run: RunFolder) -> dict[str, list[dict[str, Any]]]:
    """Return the events of all jobs, times left out."""
    return {
        job.line: [{key: value for key, value in event.items() if key not in TIMES} for event in job.events()]
        for job in run.jobs()
    }


def tensors(run: RunFolder) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint of every job."""
    found = {}
    for job in run.jobs():
        path = max(job.path.glob("checkpoint-*.safetensors"), key=lambda one: int(one.stem.rpartition("-")[2]))
        found.update({f"{job.line}: {name}": tensor for name, tensor in storage.read(path, CHECKPOINT)[1].items()})
    return found


def differences(run: RunFolder, unbroken: RunFolder) -> list[str]:
    """Return what differs between two runs, one line each."""
    found = []
    for line, expected in events(unbroken).items():
        ours = events(run)[line]
        pairs = [(a, b) for a, b in zip(ours, expected, strict=False) if json.dumps(a) != json.dumps(b)]
        found += [f"line '{line}': {a} where the unbroken run has {b}" for a, b in pairs]
        if len(ours) != len(expected):
            found.append(f"line '{line}': {len(ours)} events where the unbroken run has {len(expected)}")
    ours, expected = tensors(run), tensors(unbroken)
    same = [name for name in expected if name in ours and torch.equal(ours[name], expected[name])]
    return found + [f"tensor '{name}' differs" for name in sorted({*ours, *expected} - set(same))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=1.5, help="seconds from a change of the files to the kill")
    parser.add_argument("--folder", type=Path, help="where the runs go; by default a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sys.exit(work(folder, options.kills, options.longest, random.Random(options.seed)))


def work(folder: Path, wanted: int, longest: float, moments: random.Random) -> int:
    """Kill runs so many times, each to its end; return how many differ from the unbroken one."""
    recipe = folder / "kills.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    if killed(started("run", recipe, "--device", "cpu", "-o", folder / "unbroken"), folder / "unbroken", 1e9):
        raise AssertionError
    unbroken = RunFolder.open(folder / "unbroken")
    count = sum(map(len, events(unbroken).values()))
    kills = runs = differing = 0
    while kills < wanted:
        path = folder / f"run-{runs}"
        process, own = started("run", recipe, "--device", "cpu", "-o", path), 0
        while killed(process, path, moments.uniform(0, longest) if kills < wanted else 1e9):
            kills, own = kills + 1, own + 1
            process = (
                started("resume", path)
                if (path / "run.json").exists()
                else started("run", recipe, "--device", "cpu", "-o", path)
            )
        found = differences(RunFolder.open(path), unbroken)
        runs, differing = runs + 1, differing + bool(found)
        print(f"run {runs}: {own} kills, {len(found)} differences", *found[:5], sep="\n  ", flush=True)
    print(f"{kills} kills in {runs} runs of {len(unbroken.jobs())} jobs with {count} events: {differing} runs differ")
    return min(differing, 1)


if __name__ == "__main__":
    main()
