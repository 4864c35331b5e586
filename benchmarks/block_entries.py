"""How large the entries of K-FAC's and XK-FAC's blocks are on ImageNet's ResNet-50, beside the paper's three numbers.

    python benchmarks/block_entries.py --data FOLDER --weights resnet50.safetensors --pixels 224 [--device cuda]

The paper has 5.65e-7 for K-FAC, 4.96e-7 for XK-FAC and 1.19e-7 for their difference, a single product
(N A' - A) / (N - 1) (x) (H' - H''): its mean entry is known but for the noise of H''. A mean of absolute values counts
noise as entries, so as many draws are made as it takes: 9 in 10 entries are those of the last stage and of the head,
and backward passes that stop there cost little. Their H'' has `--deep` draws per batch, that of the other units
`--draws`, each in two halves: half the distance between the halves is the noise of their mean. What the difference
would be without it is estimated as if both were normal, sqrt(d^2 - noise^2) unit by unit.
FOLDER holds `imagenet1000-128.zip`; its images are enlarged where --pixels is larger.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from common import keep, provenance
from torch import Tensor, nn
from torch.nn import functional as F

import xkfac
from routing import BATCH, Batches, percent, some
from xkfac.curvature.blocks import Kronecker, Term
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.inspect.entries import MeanEntry, mean_absolute, over_blocks
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.weights import load_source

PAPER = {"K-FAC": 5.65e-7, "XK-FAC": 4.96e-7, "difference": 1.19e-7}
SETTINGS = xkfac.METHODS["paper"].settings
Blocks = dict[str, Kronecker]


def blocks_of(net: nn.Module, data: Batches, draws: int, seed: int, exclude: list[str]) -> Blocks:
    settings = dataclasses.replace(SETTINGS, draws=draws)
    blocks = xkfac.estimate(net, data, settings, seed=seed, exclude=exclude).curvature.to("cpu").blocks
    return {unit: block for unit, block in blocks.items() if isinstance(block, Kronecker)}


def factors(block: Kronecker) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return A, A', H', H'' of a block in the paper's form, (A - A') (x) (N H' - H'') / (N - 1) + A' (x) H''."""
    within, between = block.terms
    fine = within.right + (between.right - within.right) / BATCH
    return within.dense_left + between.dense_left, between.dense_left, fine, between.right


def entries(halves: tuple[Kronecker, Kronecker]) -> dict[str, MeanEntry]:
    """Return the mean absolute entries of a unit's block by K-FAC, by XK-FAC, of the difference, and of its noise."""
    (a, mean, *first), (_, _, *second) = map(factors, halves)
    fine, coarse = ((one + other) / 2 for one, other in zip(first, second, strict=True))
    noise = ((first[0] - first[1]) - (second[0] - second[1])) / 2
    rest = (BATCH * fine - coarse) / (BATCH - 1)
    shift = (BATCH * mean - a) / (BATCH - 1)
    generator = torch.Generator().manual_seed(0)
    return {
        "K-FAC": mean_absolute([Term(a, fine)], generator),
        "XK-FAC": mean_absolute([Term(a - mean, rest), Term(mean, coarse)], generator),
        "difference": mean_absolute([Term(shift, fine - coarse)], generator),
        "noise of the difference": mean_absolute([Term(shift, noise)], generator),
    }


def without_noise(found: dict[str, MeanEntry]) -> MeanEntry:
    seen, noise = found["difference"], found["noise of the difference"]
    return dataclasses.replace(seen, mean=math.sqrt(max(seen.mean**2 - noise.mean**2, 0.0)))


@torch.no_grad()
def accuracy(net: nn.Module, batches: Batches) -> float:
    net.eval()
    return percent(torch.cat([net(x).argmax(1) == y for x, y in batches]))


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batches", type=int, default=62)
    parser.add_argument("--draws", type=int, default=8, help="per batch, even")
    parser.add_argument("--deep", type=int, default=512, help="per batch, for the last stage and the head; even")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("results/block-entries"))
    options = parser.parse_args()
    record = provenance()
    parts = load_pictures(options.data / "imagenet1000-128.zip", pixels=128, resize="squash", validation=0.0)
    net = make_backbone(options.model, {"imagenet": len(parts.classes)}, seed=0)
    load_source(net, options.weights, "imagenet")
    net.to(options.device, memory_format=torch.channels_last)

    def enlarged(batches: Batches) -> Batches:
        return [(F.interpolate(x, size=options.pixels, mode="bilinear", antialias=True), y) for x, y in batches]

    data = enlarged(some(parts.train, options.batches * BATCH, options.device))
    right = accuracy(net, enlarged(some(parts.test, 10_000, options.device)))
    net.train()
    halves = [blocks_of(net, data, options.draws // 2, seed, []) for seed in (0, 1)]
    paths = [path for path, layer in net.named_modules() if isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.Linear)]
    shallow = [path for path in paths if "layer4" not in path and "head" not in path]
    net.get_submodule("trunk.layer3").register_forward_hook(lambda _, __, output: output.detach())  # gradients end here
    for blocks, seed in zip(halves, (2, 3), strict=True):
        blocks |= blocks_of(net, data, options.deep // 2, seed, shallow)
    by_unit = {unit: entries((halves[0][unit], halves[1][unit])) for unit in halves[0]}
    rows: dict[str, Any] = {"accuracy": right, "images": len(data) * BATCH}
    for part, units in (("all", list(by_unit)), ("last stage and head", sorted(set(by_unit) - set(shallow)))):
        found = {name: over_blocks([by_unit[unit][name] for unit in units]) for name in by_unit[units[0]]}
        found["difference without noise"] = over_blocks([without_noise(by_unit[unit]) for unit in units])
        rows[part] = {name: mean.mean for name, mean in found.items() if mean is not None}
    names = list(rows["all"])
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {part} | " + " | ".join(f"{rows[part][name]:.2e}" for name in names) + " |"
        for part in ("all", "last stage and head")
    ]
    lines.append("| the paper | " + " | ".join(f"{PAPER[name]:.2e}" if name in PAPER else "" for name in names) + " |")
    units = {unit: {name: mean.mean for name, mean in found.items()} for unit, found in by_unit.items()}
    keep(options.output, record, rows | {"units": units}, "\n".join(lines))


if __name__ == "__main__":
    main()
