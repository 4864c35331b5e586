"""What the data and the draws of a memory do for forgetting: two tasks of digits, the second with permuted pixels.

    python benchmarks/forgetting.py [--output results/forgetting]

The source network is trained on 1,000 digits; its memory is made from these, or from 400 that it has not seen, with
one, four or twenty draws per batch, of labels or of random signs. Forgotten: source accuracy before minus after, in
points.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
from common import batches, digits, keep, mlp, provenance, train
from torch import Tensor, nn

import xkfac

METHODS: dict[str, dict[str, Any]] = {
    "fine-tuning": {"method": "fine-tuning"},
    "fixed BN, the default": {"method": "fixed-bn"},
    "K-FAC": {"method": "kfac"},
    "XK-FAC": {"method": "xkfac"},
    "XK-FAC, paper's form": {"method": "xkfac", "form": "paper"},
    "corrected": {"method": "corrected"},
}
Part = tuple[Tensor, Tensor]


def parts(permutation_seed: int | None) -> list[Part]:
    """Return 1,000 training, 400 held-out and 397 test digits."""
    images, labels = digits(permutation_seed)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return [(images[index], labels[index]) for index in order.split([1000, 400, 397])]


def accuracy(net: nn.Module, part: Part) -> float:
    with torch.no_grad():
        return 100 * (net.eval()(part[0]).argmax(1) == part[1]).float().mean().item()


def run(seed: int, epochs: int, lr: float) -> dict[str, tuple[float, float]]:
    """Return (points forgotten, target accuracy) by method, data of the memory, what is drawn, and draws."""
    torch.manual_seed(seed)
    source, target = parts(None), parts(seed + 50)
    net = mlp(128)
    train(net, *source[0], epochs, seed, lr)
    before = accuracy(net, source[2])
    results = {}
    for name, options in METHODS.items():
        for data, part in (("training", source[0]), ("held out", source[1])):
            for labels, draws in itertools.product(("sampled", "signs"), (1, 4, 20)):
                if name == "fine-tuning" and (data, labels, draws) != ("training", "sampled", 1):
                    continue
                learning = copy.deepcopy(net)
                more = {} if name == "fine-tuning" else {"labels": labels, "draws": draws}
                memory = xkfac.consolidate(learning, batches(*part, 32, 5), **options, **more)
                learner = xkfac.Learner(learning, memory)
                learner.begin(batches(*target[0], 32, 5))
                train(learning, *target[0], epochs, seed + 1, lr, learner)
                learner.close()
                key = name if name == "fine-tuning" else f"{name} | {data} | {labels} | {draws}"
                results[key] = before - accuracy(learning, source[2]), accuracy(learning, target[2])
    return results


def table(runs: list[dict[str, tuple[float, float]]]) -> str:
    lines = ["| method | memory from | drawn | draws | forgotten | target |", "|---|---|---|---|---|---|"]
    for key in runs[0]:
        cells = [[one[key][place] for one in runs] for place in (0, 1)]
        shown = " | ".join(f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}" for values in cells)
        lines.append(f"| {key if '|' in key else key + ' | | | '} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/forgetting"))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02)
    options = parser.parse_args()
    record = {**provenance(), "seeds": list(range(options.seeds))}
    runs = [run(seed, options.epochs, options.lr) for seed in range(options.seeds)]
    keep(options.output, record, runs, table(runs))


if __name__ == "__main__":
    main()
