"""Eight tasks of digits in a row, pixels permuted anew for each: average accuracy over all of them at the end.

    python benchmarks/sequence.py [--output results/sequence]

64-64-64-10 with BN; memories from training examples, batch 32, damping 1e-4. Every combination of method, penalty
strength and learning rate that is listed is run and shown; none is chosen.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from common import batches, digits, keep, mlp, provenance, train

import xkfac

METHODS: dict[str, dict[str, Any]] = {
    "K-FAC": {"method": "kfac"},
    "XK-FAC": {"method": "xkfac"},
    "XK-FAC, paper's form": {"method": "xkfac", "form": "paper"},
}


def run(method: dict[str, Any], strength: float, lr: float, seed: int, tasks: int, epochs: int) -> float:
    """Return the average test accuracy after the last task, in percent; NaN where training diverged."""
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
        train(net, x, y, epochs, 100 * seed + task, lr, learner)
        data = batches(x, y, 32, 5)
        try:
            memory = xkfac.consolidate(net, data, **method) if learner is None else learner.finish(data)
        except xkfac.XkfacError:
            return float("nan")
    net.eval()
    with torch.no_grad():
        return statistics.mean(100 * (net(x).argmax(1) == y).float().mean().item() for x, y in tests)


def table(results: dict[str, list[float]]) -> str:
    lines = ["| method | strength | lr | average accuracy |", "|---|---|---|---|"]
    for key, values in results.items():
        lines.append(f"| {key} | {statistics.mean(values):.1f} ± {statistics.stdev(values):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/sequence"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    record = {**provenance(), "seeds": list(range(options.seeds))}
    results = {
        f"{name} | {strength:g} | {lr:g}": [
            run(method, strength, lr, seed, options.tasks, options.epochs) for seed in range(options.seeds)
        ]
        for strength in (1.0, 10.0)
        for lr in (0.1, 0.05)
        for name, method in METHODS.items()
    }
    keep(options.output, record, results, table(results))


if __name__ == "__main__":
    main()
