"""What storing memories in bfloat16 does: to the size of a file, to the penalty, and to tasks that follow.

    python benchmarks/storage.py [--output results/storage]

Files and penalties: a ResNet-50 at 64 pixels, its memory from two batches of made-up images, written and read in
float32 and in bfloat16; the penalty along random displacements in proportion to the weights, against that of the
memory in process. Tasks: eight of digits in a row, pixels permuted anew for each, as in benchmarks/sequence.py, the
memory going through a file between any two tasks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import batches, digits, keep, mlp, provenance, train

import xkfac

sys.path.append(str(Path(__file__).parent / "peers"))
from nets import Case, resnet

DTYPES: dict[str, torch.dtype | None] = {"in process": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
DIRECTIONS = 20


def through_file(memory: xkfac.Memory, dtype: torch.dtype | None, path: Path) -> xkfac.Memory:
    """Return a memory as its file gives it back; without a dtype, as it is."""
    if dtype is None:
        return memory
    memory.save(path, storage_dtype=dtype)
    return xkfac.Memory.load(path)


def penalties(memory: xkfac.Memory) -> list[float]:
    """Return v^T H v / 2 along displacements v that are random multiples of the weights' size, unit by unit."""
    found = []
    for seed in range(DIRECTIONS):
        generator = torch.Generator().manual_seed(seed)
        moved = {
            name: torch.randn(weight.shape, generator=generator) * weight.std()
            for name, weight in memory.anchor.items()
        }
        found.append(memory.curvature.quadratic(moved).item())
    return found


def files(case: Case, folder: Path) -> dict[str, dict[str, float]]:
    """Return, by dtype, megabytes, seconds to write and to read, and the mean and largest change of the penalty."""
    memory = xkfac.consolidate(case.net, list(torch.split(case.inputs, 8)), "xkfac", draws=1)
    exact, path = penalties(memory), folder / "memory.safetensors"
    rows = {}
    for name, dtype in DTYPES.items():
        if dtype is None:
            continue
        start = time.perf_counter()
        memory.save(path, storage_dtype=dtype)
        saved = time.perf_counter()
        loaded = xkfac.Memory.load(path)
        end = time.perf_counter()
        changes = [abs(b / a - 1) for a, b in zip(exact, penalties(loaded), strict=True)]
        rows[name] = {
            "megabytes": path.stat().st_size / 1e6,
            "save seconds": saved - start,
            "load seconds": end - saved,
            "mean change": statistics.mean(changes),
            "largest change": max(changes),
        }
    return rows


def accuracy(dtype: torch.dtype | None, strength: float, seed: int, tasks: int, epochs: int, folder: Path) -> float:
    """Return the average test accuracy after the last of several tasks of digits, in percent."""
    torch.manual_seed(seed)
    net, memory, tests = mlp(64), None, []
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    for task in range(tasks):
        images, labels = digits(1000 * seed + task if task else None)
        x, y = images[order[:1400]], labels[order[:1400]]
        tests.append((images[order[1400:]], labels[order[1400:]]))
        learner = None
        if memory is not None:
            learner = xkfac.Learner(net, memory, strength=strength)
            learner.begin(batches(x, y, 32, 0))
        train(net, x, y, epochs, 100 * seed + task, 0.1, learner)
        data = batches(x, y, 32, 5)
        made = xkfac.consolidate(net, data, "xkfac") if learner is None else learner.finish(data)
        memory = through_file(made, dtype, folder / "memory.safetensors")
    net.eval()
    with torch.no_grad():
        return statistics.mean(100 * (net(x).argmax(1) == y).float().mean().item() for x, y in tests)


def table(results: dict[str, Any]) -> str:
    """Return both tables."""
    lines = [
        "| ResNet-50 | file, MB | save, s | load, s | change of the penalty, mean | largest |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in results["files"].items():
        size, save, load, mean, most = row.values()
        lines.append(f"| {name} | {size:.0f} | {save:.1f} | {load:.1f} | {mean:.1e} | {most:.1e} |")
    lines += ["", "| digits, penalty times | memory between tasks | average accuracy |", "|---|---|---|"]
    for key, values in results["accuracy"].items():
        lines.append(f"| {key} | {statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/storage"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    record = {**provenance(), "seeds": list(range(options.seeds))}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        accuracies = {
            f"{strength:g} | {stored}": [
                accuracy(dtype, strength, seed, options.tasks, options.epochs, folder) for seed in range(options.seeds)
            ]
            for strength in (1.0, 10.0)
            for stored, dtype in DTYPES.items()
        }
        torch.manual_seed(0)
        results = {"files": files(resnet(50, 64, 16, classes=1000), folder), "accuracy": accuracies}
    keep(options.output, record, results, table(results))


if __name__ == "__main__":
    main()
