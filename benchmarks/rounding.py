"""What rounding does to the eigenvalues of factors: once to TF32 or bfloat16, or as a sum of two bfloat16 matrices.

    python benchmarks/rounding.py --weights resnet18-tiny.safetensors --tree tiny-imagenet-100.zip [--output FOLDER]

A network whose source is a tree of images gets a memory of some batches of its validation images; the smallest
eigenvalue of each dense factor of some units is shown over its largest, for every way to round it. A negative one is a
direction along which a penalty drives weights away.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from common import keep, provenance
from torch import Tensor

import xkfac
from xkfac.experiments.augmentation import Augmentation
from xkfac.experiments.backbones import load_source, make_backbone
from xkfac.experiments.courses import PicturePool
from xkfac.experiments.data import batches
from xkfac.experiments.images import load_pictures
from xkfac.kronecker import Kronecker
from xkfac.stacking import _in_two


def tf32(matrix: Tensor) -> Tensor:
    """Return a matrix rounded to ten bits behind the leading one, ties away from zero."""
    return ((matrix.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "exact": lambda matrix: matrix,
    "TF32": tf32,
    "bfloat16": lambda matrix: matrix.bfloat16(),
    "two of bfloat16": lambda matrix: torch.stack(_in_two(matrix[None])[0].double().chunk(2)).sum(0),
}
UNITS = ("layer1.0.conv1", "layer2.0.conv1", "layer2.1.conv2", "layer3.1.conv2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tree", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/rounding"))
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--units", nargs="+", default=list(UNITS), help="how the names of units end")
    options = parser.parse_args()
    record = {**provenance(), "seed": 0}
    source = load_pictures(options.tree, parts=("validation",), pixels=options.pixels, resize="squash", validation=0.1)
    net = make_backbone("resnet18", {"source": len(source.classes)}, stem="small", seed=0)
    load_source(net, options.weights, "source")
    plain = PicturePool(source.validation, Augmentation(options.pixels), False)
    order = batches(len(plain), 32, seed=0, task=0, epoch=0)[: options.batches]
    memory = xkfac.consolidate(net, [plain.take(index) for index in order], exclude=["heads.*"], draws=1)
    results: dict[str, dict[str, float]] = {}
    for name, block in memory.curvature.blocks.items():
        if isinstance(block, Kronecker) and name.endswith(tuple(options.units)):
            for place, term in enumerate(block.terms, 1):
                factors = {"input": None if term.low_rank else term.left[0], "gradient": term.right[0]}
                for kind, factor in factors.items():
                    if factor is not None:
                        largest = torch.linalg.eigvalsh(factor.double())[-1]
                        row = {way: torch.linalg.eigvalsh(round_(factor).double())[0] for way, round_ in WAYS.items()}
                        results[f"{name}, {kind} factor {place}"] = {k: float(v / largest) for k, v in row.items()}
    lines = ["| factor | " + " | ".join(WAYS) + " |", "|---|" + "---|" * len(WAYS)]
    lines += [f"| {name} | " + " | ".join(f"{row[way]:.1e}" for way in WAYS) + " |" for name, row in results.items()]
    keep(options.output, record, results, "\n".join(lines))


if __name__ == "__main__":
    main()
