"""What each curvature costs: time of a curvature batch and of a penalised step, and the size of the memory file.

    python benchmarks/cost.py [--output results/cost-cpu] [--nets mlp resnet18]

Times are ratios to one plain forward and backward of the same network and batch. The things that are compared take
turns within one process, and the median over the turns is shown, so that a slow moment of the machine hits all alike.
A curvature batch is timed from the moment the pass asks for a batch until it asks for the next one; what a pass does
once, such as putting the factors together, is no part of it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from common import keep, provenance
from torch import Tensor, nn
from torch.nn import functional as F

import xkfac

VARIANTS: dict[str, dict[str, Any]] = {
    "EWC": {"method": "ewc", "draws": 1},
    "diagonal": {"method": "diagonal", "draws": 1},
    "K-FAC": {"method": "kfac", "draws": 1},
    "XK-FAC, paper's form": {"method": "xkfac", "form": "paper", "draws": 1},
    "XK-FAC, mean form": {"method": "xkfac", "form": "mean", "draws": 1},
    "pooled": {"method": "xkfac", "form": "mean", "grouping": "pooled", "draws": 1},
    "hierarchical": {"method": "xkfac", "form": "mean", "grouping": "hierarchical", "draws": 1},
    "corrected": {"method": "corrected", "draws": 1},
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def mlp() -> tuple[nn.Module, Tensor]:
    """Return the 784-128-128-10 perceptron with BN, and a batch of 128."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((784, 128), (128, 128)):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(128, 10)), torch.randn(128, 784)


class Block(nn.Module):
    """The basic block of a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Identity() if stride == 1 and inputs == outputs else short

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of body and shortcut, rectified in place."""
        return torch.relu_(self.body(x) + self.short(x))


def resnet18(pixels: int) -> tuple[nn.Module, Tensor]:
    """Return a ResNet-18 with a 3x3 stem, and a batch of 32."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(a, b, 1 + (a != b)) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, max(1, pixels // 32), 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 100))
    return net, torch.randn(32, 3, pixels, pixels)


NETS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": mlp,
    "resnet18-32px": lambda: resnet18(32),
    "resnet18-64px": lambda: resnet18(64),
}


def now() -> float:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function: Callable[[], None]) -> float:
    start = now()
    function()
    return now() - start


def medians(timers: dict[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Return the median of the seconds that each timer takes of something; they take turns, after one of warming up."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(turns + 1):
        for name, timer in timers.items():
            taken = timer()
            if turn:
                times[name].append(taken)
    return {name: statistics.median(values) for name, values in times.items()}


def plain_step(net: nn.Module, x: Tensor, y: Tensor) -> None:
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()


def penalised_step(net: nn.Module, learner: xkfac.Learner, x: Tensor, y: Tensor) -> None:
    net.zero_grad()
    learner.objective(F.cross_entropy(net(x), y)).backward()


class Clocked:
    """A loader that notes when it is asked for a batch, a list for every pass."""

    def __init__(self, batch: Tensor, count: int) -> None:
        self.batch, self.count = batch, count
        self.passes: list[list[float]] = []

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the batch so many times."""
        self.passes.append([])
        for _ in range(self.count):
            self.passes[-1].append(now())
            yield self.batch

    def batch_seconds(self) -> float:
        """Return the mean time of a batch, in all passes together; the first of a pass prepares it, so it is left out.

        Not the median: some work waits until there is enough of it, so that only every few batches pay for it.
        """
        return sum((stamps[-1] - stamps[1]) / (len(stamps) - 2) for stamps in self.passes)


def curvature_seconds(net: nn.Module, x: Tensor, options: dict[str, Any]) -> float:
    loader = Clocked(x, 10)
    xkfac.consolidate(net, loader, **options)
    return loader.batch_seconds()


def file_size(memory: xkfac.Memory) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.safetensors"
        memory.save(path)
        return path.stat().st_size / 1e6


def measure(
    build: Callable[[], tuple[nn.Module, Tensor]], variants: list[str], turns: int
) -> dict[str, dict[str, float]]:
    """Return, by curvature, the ratios of times to a plain forward and backward, and the megabytes of the file."""
    torch.manual_seed(0)
    net, x = build()
    net, x = net.to(DEVICE).train(), x.to(DEVICE)
    y = torch.randint(10, (len(x),), device=DEVICE)
    sizes: dict[str, float] = {}
    passes: dict[str, Callable[[], float]] = {"plain": partial(seconds, partial(plain_step, net, x, y))}
    steps = dict(passes)
    for name in variants:
        own, options = copy.deepcopy(net), VARIANTS[name]
        memory = xkfac.consolidate(own, [x], **options)
        sizes[name] = file_size(memory)
        learner = xkfac.Learner(own, memory, penalty_every=1)
        learner.begin(recentre=False)
        steps[name] = partial(seconds, partial(penalised_step, own, learner, x, y))
        passes[name] = partial(curvature_seconds, net, x, options)
    passing, stepping = medians(passes, turns), medians(steps, 2 * turns)
    return {
        name: {
            "curvature batch": passing[name] / passing["plain"],
            "penalised step": stepping[name] / stepping["plain"],
            "megabytes": sizes[name],
        }
        for name in variants
    }


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = ["| net | curvature | curvature batch | penalised step | memory file, MB |", "|---|---|---|---|---|"]
    for net, rows in results.items():
        for name, row in rows.items():
            cells = [f"{row['curvature batch']:.2f}", f"{row['penalised step']:.2f}", f"{row['megabytes']:.1f}"]
            lines.append(f"| {net} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/cost-cpu"))
    parser.add_argument("--nets", nargs="+", default=["mlp", "resnet18-32px"], choices=list(NETS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    record = {**provenance(), "seeds": [0]}
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    results = {name: measure(NETS[name], options.variants, options.turns) for name in options.nets}
    keep(options.output, record, results, table(results))


if __name__ == "__main__":
    main()
