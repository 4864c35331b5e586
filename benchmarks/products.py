"""Products of float32 matrices on one CPU thread: torch's own beside those of the library, which go through oneDNN.

    python benchmarks/products.py [--output results/products-cpu]

The shapes are those of a displacement [C, D] and an input factor [D, D], and of inputs [D, K] and their transposes. The
medians of ten turns; errors are those against float64, over the norm.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import keep, provenance
from torch import Tensor

from xkfac.curvature import products

SHAPES = {"displacement": [(512, 4609), (256, 2305), (128, 1153), (64, 577), (128, 785)], "inputs": [(128, 4608)]}


def seconds(work: Callable[[], Tensor]) -> float:
    work()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/products-cpu"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for what, shapes in SHAPES.items():
        for rows, columns in shapes:
            torch.manual_seed(0)
            first = torch.randn(1, rows, columns)
            second = torch.randn(1, columns, columns) if what == "displacement" else first.mT
            exact = first.double() @ second.double()
            row: dict[str, float] = {}
            for name, product in (("torch", torch.bmm), ("library", products.product)):
                taken = seconds(lambda product=product, a=first, b=second: product(a, b))
                row[f"{name}, GFLOP/s"] = 2e-9 * first.numel() * second.shape[2] / taken
                row[f"{name}, error"] = float((product(first, second) - exact).norm() / exact.norm())
            results[f"{what}, {rows} x {columns}"] = row
    columns_ = list(next(iter(results.values())))
    lines = [f"| product | {' | '.join(columns_)} |", "|---|" + "---|" * len(columns_)]
    for name, row in results.items():
        cells = [f"{row[key]:.0f}" if "GFLOP" in key else f"{row[key]:.1e}" for key in columns_]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    keep(options.output, {**provenance(), "oneDNN": products._onednn() is not None}, results, "\n".join(lines))


if __name__ == "__main__":
    main()
