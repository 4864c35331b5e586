"""What rounding does to factors: those of a penalty, rounded themselves, and Gram matrices of rounded inputs.

    python benchmarks/rounding.py --weights resnet18-tiny.safetensors --tree tiny-imagenet-100.zip [--output FOLDER]

A network whose source is a tree of images gets a memory of some batches of its validation images; the smallest
eigenvalue of each dense factor of some units is shown over its largest, for every way to round it: once to TF32 or
bfloat16, or as a sum of two bfloat16 matrices. A negative one is a direction along which a penalty drives weights away.
Then a memory is made as a GPU makes it at the matmul precision "medium", inputs and gradients rounded to bfloat16 for
their products; `distance` is that of a factor to the exact one over its norm.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import torch
from common import keep, provenance
from torch import Tensor

import xkfac
from xkfac.curvature import gram as grams
from xkfac.curvature import input_moments as deviations
from xkfac.curvature import patch_gram as autocorrelation
from xkfac.curvature.blocks import Kronecker
from xkfac.experiments.data.augmentation import Augmentation, ImageExamples
from xkfac.experiments.data.digits import batches
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.weights import load_source
from xkfac.penalty.layout import _in_two


def tf32(matrix: Tensor) -> Tensor:
    """Return a matrix rounded to ten bits behind the leading one, ties away from zero."""
    return ((matrix.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "exact": lambda matrix: matrix,
    "TF32": tf32,
    "bfloat16": lambda matrix: matrix.bfloat16(),
    "two of bfloat16": lambda matrix: torch.stack(_in_two(matrix)).double().sum(0),
}
UNITS = ("layer1.0.conv1", "layer2.0.conv1", "layer2.1.conv2", "layer3.1.conv2")


@contextlib.contextmanager
def rounding() -> Iterator[None]:
    """Have Gram matrices be of bfloat16 vectors on a CPU, as they are on a GPU; what is exact there is of float64."""

    def rounds(tensor: Tensor) -> bool:
        return tensor.dtype == torch.float32

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if rounds(tensor) else tensor

    with contextlib.ExitStack() as patches:
        for module in (grams, autocorrelation, deviations):
            patches.enter_context(mock.patch.object(module, "rounded", rounded))
        patches.enter_context(mock.patch.object(deviations, "rounds", rounds))
        yield


def factors_of(memory: xkfac.Memory, endings: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the dense factors of units whose names end so."""
    for name, block in memory.curvature.blocks.items():
        if isinstance(block, Kronecker) and name.endswith(tuple(endings)):
            for place, term in enumerate(block.terms, 1):
                if not term.low_rank:
                    yield f"{name}, input factor {place}", term.left[0]
                yield f"{name}, gradient factor {place}", term.right[0]


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
    plain = ImageExamples(source.validation, Augmentation(options.pixels), False)
    order = batches(len(plain), 32, seed=0, task=0, epoch=0)[: options.batches]
    given = [plain.take(index) for index in order]
    factors = dict(factors_of(xkfac.consolidate(net, given, "xkfac", exclude=["heads.*"], draws=1), options.units))
    with rounding():
        coarse = dict(factors_of(xkfac.consolidate(net, given, "xkfac", exclude=["heads.*"], draws=1), options.units))
    results: dict[str, dict[str, float]] = {}
    for name, factor in factors.items():
        largest = torch.linalg.eigvalsh(factor.double())[-1]
        smallest = {way: torch.linalg.eigvalsh(round_(factor).double())[0] for way, round_ in WAYS.items()}
        smallest["of rounded vectors"] = torch.linalg.eigvalsh(coarse[name].double())[0]
        results[name] = {way: float(value / largest) for way, value in smallest.items()}
        results[name]["distance"] = float((coarse[name] - factor).norm() / factor.norm())
    columns = [*WAYS, "of rounded vectors", "distance"]
    lines = ["| factor | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(f"{row[key]:.1e}" for key in columns) + " |" for name, row in results.items()]
    keep(options.output, record, results, "\n".join(lines))


if __name__ == "__main__":
    main()
