"""Implicit steps where BN follows the target: plain ones beside them, BN quick or slow, read in two ways.

    python benchmarks/implicit_bn.py --data FOLDER [--output results/implicit-bn]

The task sequence of `interval`: a perceptron 784-128-128-10 with BN learns three permutations of 10,000 digits, 3
epochs each, SGD with momentum 0.9, batch 128, curvature from held-out digits. Two rows differ in the steps, in BN's
momentum, or in how merged weights are read. Seeds 0 to 2.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import batches, keep, provenance
from interval import SEEDS, TASKS, learn

import xkfac
from xkfac.experiments.data.digits import load, permutation
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.recipes.recipe import Line

METHODS, STRENGTHS, LR = ("kfac", "xkfac"), (1.0, 10.0), 0.1
SETTINGS: dict[str, tuple[float | None, dict[str, Any]]] = {
    "BN's own momentum, 0.1": (None, {}),
    "momentum 0.01": (0.01, {}),
    "momentum 0.1, read as `eval`": (None, {"interpretation": "eval"}),
}


def average(parts: Any, seed: int, method: str, strength: float, setting: str, *, implicit: bool) -> float:
    """Return the average accuracy after all tasks, in %; NaN where the steps diverge."""
    momentum, options = SETTINGS[setting]
    net = perceptron(784, 10, Line(), seed)
    orders = [permutation(784, seed, task) for task in range(TASKS)]
    memory = None
    for order in orders:
        train, held_out = ((part.x[:, order], part.y) for part in (parts.train, parts.validation))
        optimizer = torch.optim.SGD(net.parameters(), LR, momentum=0.9)
        if memory is None:
            learn(net, *train, seed, optimizer)
            memory = xkfac.consolidate(net, batches(*held_out, 128, seed), method, **options)
            continue
        learner = xkfac.Learner(net, memory, strength=strength, bn_momentum=momentum)
        learner.begin(batches(*train, 128, seed), optimizer if implicit else None)
        try:
            learn(net, *train, seed, optimizer, learner)
        except xkfac.NotFiniteError:
            learner.close()
            return float("nan")
        memory = learner.finish(batches(*held_out, 128, seed))
    with torch.no_grad():
        net.eval()
        right = [(net(parts.test.x[:, order]).argmax(1) == parts.test.y).float().mean().item() for order in orders]
    return 100 * statistics.fmean(right)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/implicit-bn"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", xkfac.XkfacWarning)
    record = {**provenance(), "seeds": list(SEEDS), "lr": LR}
    parts = load("mnist", options.data, validation=5000, train=10_000)
    results: dict[str, list[float]] = {}
    lines = ["| method | strength | BN | plain steps | implicit steps |", "|---|---|---|---|---|"]
    for method, strength, setting in product(METHODS, STRENGTHS, SETTINGS):
        cells = []
        for implicit in (False, True):
            found = [average(parts, seed, method, strength, setting, implicit=implicit) for seed in SEEDS]
            results[f"{method}, x{strength:g}, {setting}, {'implicit' if implicit else 'plain'}"] = found
            finite = all(one == one for one in found)
            cells.append(f"{statistics.fmean(found):.1f} ± {statistics.stdev(found):.1f}" if finite else "diverged")
        lines.append(f"| {method} | {strength:g} | {setting} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    keep(options.output, record, results, "\n".join(lines))


if __name__ == "__main__":
    main()
