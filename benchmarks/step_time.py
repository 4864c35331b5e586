"""What a penalised training step costs beside a plain one: a network for images, its step captured as a CUDA graph.

    python benchmarks/step_time.py --device cuda [--model resnet18] [--pixels 64] [--batch 32] [--output FOLDER]
    python benchmarks/step_time.py --device cuda --model resnet50 --stem standard --pixels 224 --precision tf32
    python benchmarks/step_time.py --device cpu --precision float32 --steps 16 --rounds 3

Weights and pictures are made up, since times do not depend on them. All steps are of one process and take turns, a
round of some steps each; the median over rounds counts, as a ratio to the plain step. On the CPU nothing is captured.
Operations are those of matrix products and convolutions in one step; bytes are those that operations read and write, as
if no cache held any. Both, and the peak of memory on a GPU, are those of a step that evaluates the penalty. Steps are
implicit in the penalty where the method's curvature allows for it, and --every sets the learner's `penalty_every`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import bytes_of, keep, operations_of, provenance
from torch import Tensor

import xkfac
from xkfac.experiments.data.augmentation import Augmentation, ImageExamples
from xkfac.experiments.data.digits import Part, batches, stream
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.runs.training import Stepper, make_optimizer

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "K-FAC": {"method": "kfac"},
    "XK-FAC": {"method": "xkfac"},
    "XK-FAC, the paper's form": {"method": "xkfac", "form": "paper"},
    "XK-FAC, hierarchical": {"method": "xkfac", "grouping": "hierarchical"},
    "own BN": {"method": "own-bn"},
    "EWC": {"method": "ewc"},
    "fixed BN, hierarchical (default)": {"method": "fixed-bn"},
}


def network(options: argparse.Namespace) -> ManyHeaded:
    net = make_backbone(options.model, {"source": 100, "target": 200}, stem=options.stem, seed=0).to(options.device)
    net.to(memory_format=torch.channels_last)
    return net


def stepper(options: argparse.Namespace, pictures: Part, method: dict[str, Any] | None) -> tuple[Stepper, float]:
    """Return the steps of a method on the target, and the seconds of `implicit`; its memory is of a few batches."""
    net, augmentation, learner = network(options), Augmentation(options.pixels, (0.5, 1.0)), None
    implicit, seconds = None, 0.0
    if method is not None:
        plain = ImageExamples(pictures, augmentation, False)
        order = batches(len(pictures), options.batch, seed=0, task=0, epoch=-1)[:2].to(options.device)
        net.enter("source")
        memory = xkfac.consolidate(net, [plain.take(index) for index in order], exclude=["heads.*"], draws=1, **method)
        net.enter("target")  # before the learner: it lets the whole trunk learn, a fixed BN too
        learner = xkfac.Learner(net, memory, penalty_every=options.every)
        learner.load_state_dict({"begun": True, "balance": None})
        start = now(options.device)
        implicit = None if options.explicit else learner.implicit(0.01, 0.9)
        seconds = now(options.device) - start
    else:
        net.enter("target")
    pool = ImageExamples(pictures, augmentation, True)
    pool.redraw(0, 0, 0)
    autocast = torch.bfloat16 if options.precision == "bfloat16" else None
    return Stepper(net, pool, make_optimizer(net, 0.9), learner, autocast=autocast, implicit=implicit), seconds


def evaluating_step(each: Stepper, index: Tensor) -> None:
    if each.learner is not None and not (interval := each.learner._step.interval).adapts:
        interval.captures(interval.every)  # so that the next step evaluates the penalty
    each._step(index)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def held(device: str) -> float:
    """Return the GiB that lie on the GPU now, from which on its peak is counted."""
    if device != "cuda":
        return float("nan")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def peak_of(each: Stepper, index: Tensor, device: str) -> float:
    """Return the GiB that a step needs at its peak beyond what lies on the GPU before it."""
    before = held(device)
    evaluating_step(each, index)
    return torch.cuda.max_memory_allocated() / 2**30 - before if device == "cuda" else before


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
    parser.add_argument("--every", type=int, help="the learner's penalty_every; its default unless given")
    parser.add_argument("--explicit", action="store_true", help="plain steps, not implicit ones")
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
    index = order[0].to(options.device)
    steppers: dict[str, Stepper] = {}
    costs: dict[str, dict[str, float]] = {}
    for name in options.methods:
        before = held(options.device)
        steppers[name], once = stepper(options, pictures, METHODS[name])
        learner = steppers[name].learner
        costs[name] = {"begin_seconds": once, "every": learner._step.interval.every if learner else 1}
        costs[name]["held_gib"] = held(options.device) - before
        costs[name]["peak_gib"] = peak_of(steppers[name], index, options.device)
    seconds: dict[str, list[float]] = {name: [] for name in steppers}
    for turn in range(options.rounds + 1):
        for name, each in steppers.items():
            start = time.perf_counter()
            each.epoch(order, 1e-8)
            if turn:  # the first captures the graph
                seconds[name].append((time.perf_counter() - start) / len(order))
    for name, each in steppers.items():
        costs[name]["gflop"] = operations_of(lambda each=each: evaluating_step(each, index))
        costs[name]["gb"] = bytes_of(lambda each=each: evaluating_step(each, index))
    plain = statistics.median(seconds["plain"])
    lines = [
        "| step | penalty every | ms | ratio to plain | GFLOP of products | GB moved | held, GiB | peak beyond, GiB | "
        "implicit, s |",
        "|" + "---|" * 9,
    ]
    for name, values in seconds.items():
        middle, cost = statistics.median(values), costs[name]
        numbers = f"{1000 * middle:.3f} | {middle / plain:.2f} | {cost['gflop']:.1f} | {cost['gb']:.1f}"
        memory = f"{cost['held_gib']:.2f} | {cost['peak_gib']:.2f} | {cost['begin_seconds']:.1f}"
        lines.append(f"| {name} | {cost['every']} | {numbers} | {memory} |")
    keep(options.output, record, {"seconds": seconds, "costs": costs}, "\n".join(lines))


if __name__ == "__main__":
    main()
