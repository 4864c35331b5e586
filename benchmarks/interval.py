"""What the learner's interval of the penalty saves on a CPU, and what it costs in accuracy. Permuted MNIST.

    python benchmarks/interval.py --data FOLDER [--output results/interval]
    python benchmarks/interval.py --data FOLDER --implicit --lr 0.05 0.1 0.2 --output results/interval-implicit

A perceptron 784-128-128-10 with BN learns three tasks of 10,000 images, 3 epochs each, SGD 0.03 with momentum 0.9,
batch 128, XK-FAC on held-out images. Two rows of a strength and learning rate differ in `penalty_every` alone. Times
are those of the processor in the training loops of the second and third task, over those of the same loop without a
learner in the same process. Seeds 0 to 2. --implicit: with the library's default method, and steps that are implicit in
the penalty. --lr: learning rates, each by itself.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import batches, keep, provenance
from torch import Tensor, nn

import xkfac
from xkfac.experiments.data.digits import load, permutation
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.recipes.recipe import Line

STRENGTHS, SEEDS, TASKS, EPOCHS = (1.0, 3.0, 10.0), range(3), 3, 3


def learn(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    seed: int,
    optimizer: torch.optim.Optimizer,
    learner: xkfac.Learner | None = None,
) -> float:
    """Train on a task; return the seconds that the steps took."""
    net.train()
    started = time.process_time()
    for epoch in range(EPOCHS):
        for a, b in batches(x, y, 128, seed * 100 + epoch):
            loss = F.cross_entropy(net(a), b)
            optimizer.zero_grad()
            if learner is None:
                loss.backward()
            else:
                learner.backward(loss)
            optimizer.step()
    return time.process_time() - started


def sequence(
    parts: Any, seed: int, strength: float, every: int | None, implicit: bool, lr: float
) -> tuple[float, float]:
    """Return the average accuracy after all tasks, and the time of penalised steps over that of plain ones."""

    def sgd(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(of.parameters(), lr, momentum=0.9)

    net = perceptron(784, 10, Line(), seed)
    plain = perceptron(784, 10, Line(), seed)
    orders = [permutation(784, seed, task) for task in range(TASKS)]
    memory, seconds, reference = None, 0.0, 0.0
    for order in orders:
        train, held_out = ((part.x[:, order], part.y) for part in (parts.train, parts.validation))
        if memory is None:
            learn(net, *train, seed, sgd(net))
            memory = xkfac.consolidate(net, batches(*held_out, 128, seed), "fixed-bn" if implicit else "xkfac")
            continue
        learner = xkfac.Learner(net, memory, strength=strength, penalty_every=every)
        optimizer = sgd(net)
        learner.begin(batches(*train, 128, seed), optimizer if implicit else None)
        seconds += learn(net, *train, seed, optimizer, learner)
        reference += learn(plain, *train, seed, sgd(plain))
        memory = learner.finish(batches(*held_out, 128, seed))
    with torch.no_grad():
        net.eval()
        right = [(net(parts.test.x[:, order]).argmax(1) == parts.test.y).float().mean().item() for order in orders]
    return 100 * statistics.fmean(right), seconds / reference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--implicit", action="store_true")
    parser.add_argument("--lr", type=float, nargs="+", default=[0.03])
    parser.add_argument("--output", type=Path, default=Path("results/interval"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = {**provenance(), "seeds": list(SEEDS)}
    parts = load("mnist", options.data, validation=5000, train=10_000)
    results: dict[str, list[tuple[float, float]]] = {}
    lines = ["| | accuracy by seed | mean | step / plain step |", "|---|---|---|---|"]
    for lr, strength in product(options.lr, STRENGTHS):
        for label, every in (("every step", 1), ("the default on a CPU", None)):
            runs = [sequence(parts, seed, strength, every, options.implicit, lr) for seed in SEEDS]
            name = f"lr {lr:g}, x{strength:g}, {label}"
            results[name] = runs
            accuracies, ratios = zip(*runs, strict=True)
            each = ", ".join(f"{one:.2f}" for one in accuracies)
            mean = f"{statistics.fmean(accuracies):.2f} | {statistics.median(ratios):.2f}"
            lines.append(f"| {name} | {each} | {mean} |")
            print(lines[-1], flush=True)
        keep(options.output, record, results, "\n".join(lines))


if __name__ == "__main__":
    main()
