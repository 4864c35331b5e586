"""What a draw buys on a real ImageNet network: the error of its factors from labels and from random signs.

    python benchmarks/draws_imagenet.py --data FOLDER --weights resnet18.safetensors [--output results/draws-imagenet]

Gradient factors of a ResNet-18 at 128 pixels, of the library's default method and of XK-FAC, from `--batches` of 32
images. Errors are in the Frobenius norm against a reference of the same batches with many more draws of either kind,
relative to the reference, and averaged over the units with several terms; that of the reference is half the distance of
its halves, labels and signs. FOLDER holds `imagenet1000-128.zip`; BN's statistics are estimated at 128 pixels, so that
weights for others serve too. `surety` in the record: the median of the largest probability of an output.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from pathlib import Path

import torch
from common import keep, provenance
from torch import Tensor

import xkfac
from routing import BATCH, BN_BATCHES, Batches, estimate_statistics, some
from xkfac.curvature.blocks import Kronecker
from xkfac.curvature.operator import Labels
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.weights import load_source

DRAWN = ("sampled", "signs")
METHODS = {"fixed BN, the default": "fixed-bn", "XK-FAC": "xkfac"}
Factors = dict[str, dict[str, Tensor]]  # by name of the factor, then by unit


def factors(net: torch.nn.Module, data: Batches, method: str, labels: Labels, draws: int, seed: int) -> Factors:
    """Return the gradient factors of all units: of the finest term, and of the last."""
    settings = dataclasses.replace(xkfac.METHODS[method].settings, labels=labels, draws=draws)
    blocks = xkfac.estimate(net, data, settings, seed=seed).curvature.blocks
    several = {unit: block.terms for unit, block in blocks.items() if isinstance(block, Kronecker) and block.terms[1:]}
    return {
        "first term": {unit: terms[0].right for unit, terms in several.items()},
        "last term": {unit: terms[-1].right for unit, terms in several.items()},
    }


def mean(first: Factors, second: Factors) -> Factors:
    return {name: {unit: (one + second[name][unit]) / 2 for unit, one in of.items()} for name, of in first.items()}


def errors(found: Factors, truth: Factors) -> dict[str, float]:
    return {
        name: statistics.mean(float((found[name][unit] - one).norm() / one.norm()) for unit, one in of.items())
        for name, of in truth.items()
    }


@torch.no_grad()
def surety(net: torch.nn.Module, data: Batches) -> float:
    """Return the median over examples of the largest probability."""
    return float(torch.cat([net(x).softmax(1).amax(1) for x, _ in data]).median())


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/draws-imagenet"))
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--reference", type=int, default=64, help="draws of either kind per batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = load_pictures(options.data / "imagenet1000-128.zip", pixels=128, resize="squash", validation=0.0)
    net = make_backbone("resnet18", {"imagenet": len(parts.classes)}, seed=0)
    load_source(net, options.weights, "imagenet")
    data = some(parts.train, options.batches * BATCH, "cpu")
    estimate_statistics(net.eval(), some(parts.train, BN_BATCHES * BATCH, "cpu"))
    record = {**provenance(), "surety": surety(net, data)}
    results: dict[str, dict[str, float]] = {}
    for name, method in METHODS.items():
        halves = [factors(net, data, method, labels, options.reference, 100) for labels in DRAWN]
        truth = mean(*halves)
        results[f"{name} | reference | {options.reference}"] = {
            term: error / 2 for term, error in errors(halves[0], halves[1]).items()
        }
        for labels, draws in itertools.product(DRAWN, options.draws):
            results[f"{name} | {labels} | {draws}"] = errors(factors(net, data, method, labels, draws, 0), truth)
    lines = ["| method | drawn | draws | first term | last term |", "|---|---|---|---|---|"]
    lines += [f"| {key} | {' | '.join(f'{error:.3f}' for error in row.values())} |" for key, row in results.items()]
    keep(options.output, record, results, "\n".join(lines))


if __name__ == "__main__":
    main()
