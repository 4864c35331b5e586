"""What a curvature batch costs beside a plain forward and backward pass: a network for images, both as CUDA graphs.

    python benchmarks/curvature_time.py --device cuda [--model resnet50] [--pixels 224] [--batch 32] [--output FOLDER]

The cost of a batch is taken inside a pass, from one batch to a later one, so that what a pass does once is no part of
it; that part is shown beside it. The methods take turns in one process, and the median counts. Peak memory is that of
the pass above what lay on the device before. Operations are those of matrix products and convolutions; bytes are those
that operations read and write, as if no cache held any. On a GPU, a pass that waited for the device in its later
batches would fail.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import bytes_of, keep, operations_of, provenance
from torch import Tensor, nn
from torch.nn import functional as F

import xkfac
from xkfac.experiments.networks.backbones import make_backbone

METHODS: dict[str, dict[str, Any]] = {
    "K-FAC": {"method": "kfac"},
    "XK-FAC": {"method": "xkfac"},
    "XK-FAC, the paper's form": {"method": "xkfac", "form": "paper"},
    "XK-FAC, hierarchical": {"method": "xkfac", "grouping": "hierarchical"},
    "fixed BN, hierarchical": {"method": "fixed-bn"},
    "XK-FAC, 8 draws": {"method": "xkfac", "draws": 8},
    "XK-FAC, hierarchical, 8 draws": {"method": "xkfac", "grouping": "hierarchical", "draws": 8},
    "fixed BN, hierarchical, 8 draws": {"method": "fixed-bn", "draws": 8},
}
Batch = tuple[Tensor, Tensor]
Run = Callable[[Iterable[Batch]], None]
GIB = 2**30


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Watched:
    """Yields a batch some times and notes when the first `skipped` are done and when all are.

    To wait for the device in between is an error.
    """

    def __init__(self, batch: Batch, skipped: int, count: int, device: str) -> None:
        self.batch, self.skipped, self.count, self.device = batch, skipped, count, device
        self.times: list[float] = []

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.count):
            if number == self.skipped:
                self.times.append(now(self.device))
                if self.device == "cuda":
                    torch.cuda.set_sync_debug_mode("error")
            yield self.batch
        if self.device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        self.times.append(now(self.device))


def plain_pass(net: nn.Module, batch: Batch, device: str) -> Run:
    """Return plain forward and backward passes, replays of a graph on a GPU."""
    x, y = batch

    def once() -> None:
        for parameter in net.parameters():
            parameter.grad = None
        F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]

    net.train()
    once()
    if device != "cuda":
        return lambda batches: [once() for _ in batches] and None
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        once()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    return lambda batches: [graph.replay() for _ in batches] and None


def curvature_pass(net: nn.Module, device: str, made: dict[str, Any]) -> Run:
    def run(batches: Iterable[Batch]) -> None:
        xkfac.consolidate(net, batches, exclude=["heads.*"], graph=device == "cuda", **made)

    return run


def seconds_of(run: Run, batch: Batch, skipped: int, count: int, device: str) -> tuple[float, float]:
    """Return the seconds of a batch, and those of what a pass does beside its batches."""
    watched = Watched(batch, skipped, count, device)
    start = now(device)
    run(watched)
    whole = now(device) - start
    each = (watched.times[1] - watched.times[0]) / (count - skipped)
    return each, whole - count * each


def peak_of(run: Callable[[], None]) -> float:
    """Return how many GiB more than before lie on the GPU at most."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / GIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/curvature-time"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--stem", default="standard", choices=["standard", "small"])
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="tf32", choices=["float32", "tf32"], help="of the network")
    parser.add_argument("--grams", default="bfloat16", choices=["float32", "tf32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs=2, default=[8, 40], help="skipped, and all of a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="NAME")
    options = parser.parse_args()
    torch.set_float32_matmul_precision({"float32": "highest", "tf32": "high", "bfloat16": "medium"}[options.grams])
    torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    torch.manual_seed(0)
    device, (skipped, count) = options.device, options.batches
    net = make_backbone(options.model, {"source": 1000}, stem=options.stem, seed=0).to(device)
    net.to(memory_format=torch.channels_last)
    net.enter("source")
    x = torch.randn(options.batch, 3, options.pixels, options.pixels, device=device)
    batch = x.to(memory_format=torch.channels_last), torch.randint(0, 1000, (options.batch,), device=device)
    record = {**provenance(), "options": {key: str(value) for key, value in vars(options).items() if key != "output"}}
    made = {name: {"draws": 1, **METHODS[name]} for name in options.methods}
    runs = {"plain": plain_pass(net, batch, device)}
    runs |= {name: curvature_pass(net, device, one) for name, one in made.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(options.rounds + 1):
        for name, run in runs.items():
            found = seconds_of(run, batch, skipped, count, device)
            if turn:  # the first makes what is made once in a process
                seconds[name].append(found)
    costs = {}
    for name in runs:
        single = curvature_pass(net, "cpu", made[name]) if name in made else plain_pass(net, batch, "cpu")
        costs[name] = {"gflop": operations_of(lambda single=single: single([batch]))}
        # What a pass does once is in both, and is no part of a batch.
        costs[name]["gb"] = bytes_of(lambda single=single: single([batch] * 2)) - bytes_of(
            lambda single=single: single([batch])
        )
        if device == "cuda":
            costs[name]["peak_gib"] = peak_of(lambda single=single: single([batch]))
    plain = statistics.median(each for each, _ in seconds["plain"])
    lines = [
        "| batch | ms | ratio to plain | once a pass, ms | GFLOP of products | TFLOP/s | GB moved | TB/s | peak, GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, values in seconds.items():
        each, once = (statistics.median(column) for column in zip(*values, strict=True))
        cost = costs[name]
        lines.append(
            f"| {name} | {1000 * each:.3f} | {each / plain:.2f} | {1000 * once:.0f} | {cost['gflop']:.1f} | "
            f"{cost['gflop'] / each / 1000:.1f} | {cost['gb']:.1f} | {cost['gb'] / each / 1000:.2f} | "
            f"{cost.get('peak_gib', float('nan')):.2f} |"
        )
    keep(options.output, record, {"seconds": seconds, "costs": costs}, "\n".join(lines))


if __name__ == "__main__":
    main()
