"""What `rounded=True` does to an input factor on a CPU: the covariance of MNIST's pixels.

    python benchmarks/rounded_inputs.py --data FOLDER [--output results/rounded-inputs]

`distance` is that to the covariance in float32 over its norm; `sample` that of the covariance of as many other images,
where there are so many. `smallest` is the smallest eigenvalue over the largest.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import keep, provenance
from torch import Tensor, nn

import xkfac
from xkfac.experiments.data import load
from xkfac.precision import cpu_has_bfloat16


def factor(images: Tensor, *, rounded: bool) -> Tensor:
    """Return the input factor S [784, 784] of a layer in front of a BN."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(784, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 10))
    curvature = xkfac.estimate(net, images.split(125), draws=1, rounded=rounded).curvature
    left: Tensor = curvature.blocks["0"].terms[0].left[0, :784, :784]
    return left.double()


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/rounded-inputs"))
    options = parser.parse_args()
    if not cpu_has_bfloat16():
        raise SystemExit("this CPU has no products of bfloat16, so that nothing would be rounded; use another")
    torch.set_num_threads(2)
    record = provenance()
    images = load("mnist", options.data, validation=5000).train.x
    results = []
    for count in (1000, 5000, 25000, 55000):
        exact, rounded = (factor(images[:count], rounded=way) for way in (False, True))
        row = {"images": count, "distance": float((rounded - exact).norm() / exact.norm())}
        if 2 * count <= len(images):
            row["sample"] = float((factor(images[count : 2 * count], rounded=False) - exact).norm() / exact.norm())
        for name, matrix in (("exact", exact), ("rounded", rounded)):
            values = torch.linalg.eigvalsh(matrix)
            row[name] = float(values[0] / values[-1])
        results.append(row)
    head = ["| images | distance | sample | smallest, exact | smallest, rounded |", "|---|---|---|---|---|"]
    columns = ("distance", "sample", "exact", "rounded")
    cells = [[f"{row[name]:.1e}" if name in row else "" for name in columns] for row in results]
    rows = [f"| {row['images']:,} | {' | '.join(own)} |" for row, own in zip(results, cells, strict=True)]
    keep(options.output, record, results, "\n".join([*head, *rows]))


if __name__ == "__main__":
    main()
