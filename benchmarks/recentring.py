r"""Where BN's statistics go when a task begins: re-centred on images as training draws them, or on plain ones.

    python benchmarks/recentring.py --weights resnet18-tiny.safetensors --source tiny-imagenet-100.zip \
        --target cub200.zip [--output results/recentring]

The memory is of held-out source images (hierarchical factors). The learner begins on the target, then augmented batches
pass in training mode and nothing is learnt: all that L_s becomes is the running statistics leaving the anchor.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import keep, provenance

import xkfac
from xkfac.experiments.data.augmentation import Augmentation, ImageExamples
from xkfac.experiments.data.digits import Part, batches
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.weights import load_source

AFTER = (1, 5, 10, 20, 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/recentring"))
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--images", type=int, default=1024, help="of the target")
    parser.add_argument("--curvature-batches", type=int, default=8)
    parser.add_argument("--least", type=float, default=0.5, help="the least area of a crop")
    options = parser.parse_args()
    record = {**provenance(), "seed": 0}
    how = {"pixels": options.pixels, "resize": "squash", "validation": 0.1}
    source = load_pictures(options.source, parts=("validation",), **how)
    target = load_pictures(options.target, parts=("train",), **how).train
    some = torch.randperm(len(target), generator=torch.Generator().manual_seed(0))[: options.images]
    target = Part(target.x[some], target.y[some])
    net = make_backbone("resnet18", {"source": len(source.classes)}, stem="small", seed=0)
    load_source(net, options.weights, "source")
    plain = ImageExamples(source.validation, Augmentation(options.pixels), False)
    order = batches(len(plain), 32, seed=0, task=0, epoch=0)[: options.curvature_batches]
    memory = xkfac.consolidate(
        net, [plain.take(index) for index in order], "xkfac", exclude=["heads.*"], draws=4, grouping="hierarchical"
    )
    augmentation = Augmentation(options.pixels, (options.least, 1.0))
    drawn = ImageExamples(target, augmentation, True)
    results: dict[str, list[float]] = {}
    for name, begun in (
        ("plain images", ImageExamples(target, augmentation, False)),
        ("as training draws them", drawn),
    ):
        load_source(net, options.weights, "source")
        drawn.redraw(0, 1, -1)
        with xkfac.Learner(net, memory, damping=0.0) as learner, torch.no_grad():
            learner.begin(begun.chunks())
            drawn.redraw(0, 1, 0)
            results[name] = []
            for step, index in enumerate(batches(len(drawn), 32, seed=0, task=1, epoch=0), 1):
                net.train()
                net(drawn.take(index)[0])
                if step in AFTER:
                    net.eval()
                    net(drawn.take(index)[0])  # BN is read with its population statistics
                    learner._step.readings.clear()
                    results[name].append(learner.penalty().item())
    lines = ["| re-centred on | " + " | ".join(f"after {n}" for n in AFTER) + " |", "|---|" + "---|" * len(AFTER)]
    lines += [f"| {name} | " + " | ".join(f"{value:.4f}" for value in row) + " |" for name, row in results.items()]
    keep(options.output, record, results, "\n".join(lines))


if __name__ == "__main__":
    main()
