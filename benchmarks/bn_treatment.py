"""What a shared BN may do while a target is learnt: follow it at some momentum, or stand still. Permuted digits.

    python benchmarks/bn_treatment.py [--output results/bn-treatment]

A perceptron 64-128-128-10 with BN learns the digits and then, for 20 epochs (620 steps), permuted ones. Rows differ in
how BN is treated, columns in the strength of the penalty. Seeds 0 to 3; test images of the source are measured, and
nothing is chosen by them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path

import torch
from common import batches, digits, keep, mlp, provenance, train

import xkfac

ROWS = {
    "momentum 0.1": ("xkfac", 0.1),
    "momentum 0.03": ("xkfac", 0.03),
    "momentum 0.01": ("xkfac", 0.01),
    "fixed BN": ("fixed-bn", None),
}
STRENGTHS, SEEDS, EPOCHS, LR, TRAINING, HELD_OUT = (1.0, 10.0), range(4), 20, 0.01, 1000, 1400


def accuracy(net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return 100 * (net.eval()(images).argmax(1) == labels).float().mean().item()


def measure(seed: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return source points lost and target accuracy, by row and strength."""
    torch.manual_seed(seed)
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    source, target = ([part[order] for part in digits(permutation)] for permutation in (None, seed + 1))
    net = mlp(128)
    train(net, *(part[:TRAINING] for part in source), EPOCHS, seed, LR)
    before = accuracy(net, *(part[HELD_OUT:] for part in source))
    held_out = batches(*(part[TRAINING:HELD_OUT] for part in source), 32, seed)
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row, (method, momentum) in ROWS.items():
        for strength in STRENGTHS:
            learning = copy.deepcopy(net)
            memory = xkfac.consolidate(learning, held_out, method)
            learner = xkfac.Learner(learning, memory, strength=strength, bn_momentum=momentum, penalty_every=1)
            learner.begin(batches(*(part[:TRAINING] for part in target), 32, seed))
            train(learning, *(part[:TRAINING] for part in target), EPOCHS, seed, LR, learner)
            learner.close()
            kept, learnt = (accuracy(learning, *(part[HELD_OUT:] for part in task)) for task in (source, target))
            found.setdefault(row, {})[f"x{strength:g}"] = before - kept, learnt
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/bn-treatment"))
    options = parser.parse_args()
    record = {**provenance(), "seeds": list(SEEDS)}
    runs = [measure(seed) for seed in SEEDS]
    columns = [f"x{strength:g}" for strength in STRENGTHS]
    lines = [f"| source points lost (target accuracy) | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in ROWS:
        cells = []
        for column in columns:
            lost, learnt = zip(*(run[row][column] for run in runs), strict=True)
            each = ", ".join(f"{one:.1f}" for one in lost)
            cells.append(f"{each} ({statistics.fmean(learnt):.1f})")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    keep(options.output, record, runs, "\n".join(lines))


if __name__ == "__main__":
    main()
