"""What a strong penalty needs: short or implicit steps, and running statistics that follow slowly.

    python benchmarks/strong_penalty.py --data FOLDER [--output results/strong-penalty]

A small network of convolutions with BN learns the digits 0 to 4 of MNIST, then 5 to 9 with a new head under penalties
of growing strength; the curvature (hierarchical) and the calibration are of held-out digits. Steps: `plain`; `short`,
whose learning rate is at most half of `Learner.stable_lr`; `split`, where that holds for protected parameters and not
for the new head; `implicit`, the same with `Learner.implicit`. W~ is read as the method does (`brn`) or with population
statistics alone (`eval`). `BN` is the momentum of BN's running statistics while the target is learnt. Mean and standard
deviation over seeds; nothing is chosen here, every row is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import statistics
from pathlib import Path

import torch
from common import keep, provenance
from torch import Tensor, nn
from torch.nn import functional as F

import xkfac
from xkfac.experiments.data.digits import Part, load
from xkfac.model.merged_weight import Interpretation

Digits = tuple[Tensor, Tensor]
HEAD = 14
Row = tuple[float | str, str, Interpretation, float]
ROWS: list[Row] = [
    (0.0, "plain", "brn", 0.1),
    (1.0, "plain", "brn", 0.1),
    (1.0, "plain", "brn", 0.02),
    (1.0, "implicit", "eval", 0.02),
    (10.0, "plain", "brn", 0.1),
    (10.0, "short", "brn", 0.1),
    (10.0, "short", "brn", 0.02),
    (10.0, "split", "brn", 0.02),
    (10.0, "split", "eval", 0.02),
    (10.0, "implicit", "eval", 0.02),
    (100.0, "plain", "brn", 0.1),
    (100.0, "short", "brn", 0.1),
    (100.0, "short", "brn", 0.02),
    (100.0, "split", "brn", 0.02),
    (100.0, "split", "eval", 0.02),
    (100.0, "implicit", "brn", 0.02),
    (100.0, "implicit", "eval", 0.02),
    (100.0, "implicit", "eval", 0.1),
    (1000.0, "split", "brn", 0.02),
    (1000.0, "split", "eval", 0.02),
    (1000.0, "implicit", "eval", 0.02),
    ("calibrated", "short", "brn", 0.02),
    ("calibrated", "split", "brn", 0.02),
    ("calibrated", "implicit", "eval", 0.02),
]


def some(part: Part, first: int, count: int) -> Digits:
    """Return up to `count` of five digits as images [N, 1, 14, 14], and labels [N]."""
    chosen = ((part.y >= first) & (part.y < first + 5)).nonzero().flatten()[:count]
    images = F.avg_pool2d(part.x[chosen].view(-1, 1, 28, 28), 2)
    return (images - 0.13) / 0.3, part.y[chosen] - first


def network() -> nn.Sequential:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    convolutions = [*block(1, 16, 1), *block(16, 32, 2), *block(32, 32, 1), *block(32, 64, 2)]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5))


def batches(digits: Digits, seed: int, size: int = 32) -> list[Digits]:
    order = torch.randperm(len(digits[1]), generator=torch.Generator().manual_seed(seed))
    return [(digits[0][index], digits[1][index]) for index in order.split(size) if len(index) == size]


@torch.no_grad()
def accuracy(net: nn.Module, digits: Digits) -> float:
    net.eval()
    return 100 * (net(digits[0]).argmax(1) == digits[1]).float().mean().item()


def trained(digits: Digits, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.3)
    net.train()
    for epoch in range(3):
        for x, y in batches(digits, 1000 * seed + epoch):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y, label_smoothing=0.1).backward()
            optimizer.step()
        schedule.step()
    return net


def learn(
    source: nn.Sequential,
    memory: xkfac.Memory,
    digits: Digits,
    row: Row,
    epochs: int,
    seed: int,
) -> tuple[nn.Sequential, float, float]:
    """Learn the target; return the network, its trunk's first learning rate, the mean penalty of the last epoch."""
    strength, steps, interpretation, momentum = row
    net = copy.deepcopy(source)
    torch.manual_seed(seed)
    net[HEAD] = nn.Linear(64, 5)
    learner = xkfac.Learner(
        net,
        memory,
        strength=None if isinstance(strength, str) else strength,  # None: as calibrated
        interpretation=interpretation,
        bn_momentum=momentum,
    )
    learner.begin(batches(digits, seed))
    implicit = learner.implicit(0.05, 0.9) if steps == "implicit" else None
    lr = 0.05 if steps == "plain" else min(0.05, 0.5 * learner.stable_lr(0.9, implicit=implicit))
    head = {"params": list(net[HEAD].parameters()), "lr": lr if steps == "short" else 0.05}
    optimizer = torch.optim.SGD([{"params": learner.protected, "lr": lr}, head], lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(batches(digits, 0)), 1e-4)
    net.train()
    with contextlib.suppress(xkfac.NotFiniteError):  # a row that diverges shows what it ends with
        for epoch in range(epochs):
            penalties = []
            for x, y in batches(digits, 1000 * seed + 500 + epoch):
                optimizer.zero_grad()
                learner.backward(F.cross_entropy(net(x), y))
                penalties.append(learner.last_penalty.item())
                if implicit is not None:
                    implicit.step()
                optimizer.step()
                schedule.step()
    learner.close()
    return net, lr, statistics.fmean(penalties or [math.nan])


def spread(values: list[float], digits: int = 1) -> str:
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/strong-penalty"))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = {**provenance(), "seeds": list(range(options.seeds)), "epochs": options.epochs}
    mnist = load("mnist", options.data, validation=5000)
    results: dict[str, list[dict[str, float]]] = {str(row): [] for row in ROWS}
    before, scales = [], []
    for seed in range(options.seeds):
        net = trained(some(mnist.train, 0, 4000), seed)
        before.append(accuracy(net, some(mnist.test, 0, 2000)))
        held_out = batches(some(mnist.validation, 0, 2000), seed)
        memory = xkfac.consolidate(
            net, held_out, "xkfac", exclude=[str(HEAD)], draws=4, grouping="hierarchical", seed=seed
        )
        memory = xkfac.calibrate(net, memory, held_out, seed=seed)
        assert memory.calibration is not None
        scales.append(memory.calibration.scale)
        for row in ROWS:
            learnt, lr, penalty = learn(net, memory, some(mnist.train, 5, 4000), row, options.epochs, seed)
            target = accuracy(learnt, some(mnist.test, 5, 2000))
            learnt[HEAD] = net[HEAD]
            source = accuracy(learnt, some(mnist.test, 0, 2000))
            results[str(row)].append({"source": source, "target": target, "lr": lr, "penalty": penalty})
    lines = [
        f"Source {spread(before)}% before; the calibrated scale is {spread(scales)}.",
        "",
        "| penalty times | steps | read as | BN | source | target | penalty at the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for (strength, steps, interpretation, momentum), runs in zip(ROWS, results.values(), strict=True):
        found = {key: [run[key] for run in runs] for key in runs[0]}
        name = strength if isinstance(strength, str) else f"{strength:g}"
        cells = (spread(found["source"]), spread(found["target"]), spread(found["penalty"], 4))
        lines.append(f"| {name} | {steps} | {interpretation} | {momentum:g} | " + " | ".join(cells) + " |")
    keep(options.output, {**record, "before": before, "scales": scales}, results, "\n".join(lines))


if __name__ == "__main__":
    main()
