"""What a penalised training step costs beside a plain one: a network for images, its step captured as a CUDA graph.

    python benchmarks/step_time.py --device cuda [--model resnet18] [--pixels 64] [--batch 32] [--output FOLDER]

Weights and pictures are made up, since times do not depend on them. All steps are of one process and take turns, a
round of some steps each; the median over rounds counts, as a ratio to the plain step. On the CPU nothing is captured.
Operations are those of matrix products and convolutions in one step; bytes are those that operations read and write, as
if no cache held any.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import bytes_of, keep, operations_of, provenance

import xkfac
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import Part, batches, stream
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.runs.tasks import ImageExamples
from xkfac.experiments.runs.training import Stepper, make_optimizer

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "K-FAC": {"method": "kfac"},
    "XK-FAC": {"method": "xkfac"},
    "XK-FAC, the paper's form": {"method": "xkfac", "form": "paper"},
    "XK-FAC, hierarchical": {"method": "xkfac", "grouping": "hierarchical"},
    "own BN": {"method": "own-bn"},
    "EWC": {"method": "ewc"},
    "fixed BN": {"method": "fixed-bn"},
}


def network(options: argparse.Namespace) -> ManyHeaded:
    net = make_backbone(options.model, {"source": 100, "target": 200}, stem=options.stem, seed=0).to(options.device)
    net.to(memory_format=torch.channels_last)
    return net


def stepper(options: argparse.Namespace, pictures: Part, method: dict[str, Any] | None) -> Stepper:
    """Return the steps of a method on the target; its memory is of a few batches."""
    net, augmentation, learner = network(options), Augmentation(options.pixels, (0.5, 1.0)), None
    if method is not None:
        plain = ImageExamples(pictures, augmentation, False)
        order = batches(len(pictures), options.batch, seed=0, task=0, epoch=-1)[:2].to(options.device)
        net.enter("source")
        memory = xkfac.consolidate(net, [plain.take(index) for index in order], exclude=["heads.*"], draws=1, **method)
        learner = xkfac.Learner(net, memory)
        learner.load_state_dict({"begun": True, "balance": None})
    net.enter("target")
    pool = ImageExamples(pictures, augmentation, True)
    pool.redraw(0, 0, 0)
    autocast = torch.bfloat16 if options.precision == "bfloat16" else None
    return Stepper(net, pool, make_optimizer(net, 0.9), learner, autocast=autocast)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/step-time"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--stem", default="small", choices=["standard", "small"])
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=64, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    options = parser.parse_args()
    torch.set_float32_matmul_precision({"float32": "highest", "tf32": "high", "bfloat16": "medium"}[options.precision])
    torch.backends.cudnn.allow_tf32 = options.precision != "float32"
    record = {**provenance(), "options": {key: str(value) for key, value in vars(options).items() if key != "output"}}
    count, side, generator = options.steps * options.batch, options.pixels, stream("step time")
    pictures = Part(
        torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator),
        torch.randint(0, 100, (count,), generator=generator),
    ).to(options.device)
    order = batches(count, options.batch, seed=0, task=0, epoch=0)
    steppers = {name: stepper(options, pictures, METHODS[name]) for name in options.methods}
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(options.rounds + 1):
        for name, each in steppers.items():
            start = time.perf_counter()
            each.epoch(order, 1e-4)
            if turn:  # the first captures the graph
                seconds[name].append((time.perf_counter() - start) / len(order))
    index = order[0].to(options.device)
    costs = {
        name: {
            "gflop": operations_of(lambda each=each: each._step(index)),
            "gb": bytes_of(lambda each=each: each._step(index)),
        }
        for name, each in steppers.items()
    }
    plain = statistics.median(seconds["plain"])
    lines = ["| step | ms | ratio to plain | GFLOP of products | GB moved |", "|---|---|---|---|---|"]
    for name, values in seconds.items():
        middle, cost = statistics.median(values), costs[name]
        numbers = f"{1000 * middle:.3f} | {middle / plain:.2f} | {cost['gflop']:.1f} | {cost['gb']:.1f}"
        lines.append(f"| {name} | {numbers} |")
    keep(options.output, record, {"seconds": seconds, "costs": costs}, "\n".join(lines))


if __name__ == "__main__":
    main()
