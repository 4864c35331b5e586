r"""Why a penalty is smaller than the real rise of the source's loss: higher orders, coupling of layers, or factors.

    python benchmarks/decomposition.py --weights resnet18.safetensors --source tiny-imagenet-100.zip \
        --target cars196.zip [--output results/decomposition]

A target is learnt a short way, each task with BN of its own, without a penalty and with penalties of some strengths. At
the end of each path the divergence from what the source network said before is set beside quadratic forms of the same
displacement: that of the exact Fisher of all shared weights (from Jacobian-vector products, on the images that measure
the divergence), the sum of those of its diagonal blocks, a layer each, and what curvatures predict. Their ratios say
what each approximation takes away:

    divergence / exact      higher orders
    exact / blocks          layers that act together
    blocks / predicted      a block as Kronecker products of averages
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import torch
from common import keep, provenance
from prediction import HEADS, VARIANTS, Experiment, learn
from torch import Tensor
from torch.func import functional_call, jvp

import xkfac
from xkfac.experiments.networks.backbones import ManyHeaded
from xkfac.model.merged_weight import bind

PREDICTED = ["own BN, K-FAC", "own BN, paper's grouping", "own BN, hierarchical"]


class Fisher:
    """The exact Fisher of a network with categorical answers, as a quadratic form of displacements."""

    def __init__(self, net: ManyHeaded, task: str, x: Tensor) -> None:
        self.net, self.task, self.x = copy.deepcopy(net).eval(), task, x
        self.at = {name: parameter.detach() for name, parameter in self.net.named_parameters()}

    @torch.no_grad()
    def __call__(self, displacement: dict[str, Tensor]) -> float:
        """Return v^T F v / 2 for a displacement v by parameter; those that it leaves out stand still."""
        along = {name: displacement.get(name, torch.zeros_like(tensor)) for name, tensor in self.at.items()}
        total = 0.0
        with self.net.using(self.task):
            for x in self.x.split(50):
                outputs, change = jvp(lambda at, x=x: functional_call(self.net, at, (x,)), (self.at,), (along,))
                p = outputs.softmax(1)
                total += 0.5 * ((p * change.square()).sum(1) - (p * change).sum(1).square()).sum().item()
        return total / len(self.x)


def measured(experiment: Experiment, fisher: Fisher, net: ManyHeaded) -> dict[str, Any]:
    """Return the divergence of a displaced network and the quadratic forms of its displacement, in all and by layer."""
    memories, units = experiment.memories, next(iter(experiment.memories.values())).units
    parameters = dict(net.named_parameters())
    moved = {unit.weight: parameters[unit.weight].detach() - fisher.at[unit.weight] for unit in units}
    with torch.no_grad():
        weights = {name: bound.merged_weight() for name, bound in bind(net, units).items()}
    layers: dict[str, dict[str, float]] = {}
    for unit in units:
        layers[unit.name] = {"exact": fisher({unit.weight: moved[unit.weight]})}
        for name, memory in memories.items():
            block, change = memory.curvature.blocks[unit.name], weights[unit.name] - memory.anchor[unit.name]
            layers[unit.name][name] = 0.5 * (change * block.product(change)).sum().item()
    _, divergence, accuracy = experiment.measure(net)
    predicted = {name: sum(layer[name] for layer in layers.values()) for name in memories}
    blocks = sum(layer["exact"] for layer in layers.values())
    whole = {"divergence": divergence, "exact": fisher(moved), "blocks": blocks, **predicted}
    return {"accuracy": accuracy, **whole, "layers": layers}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="of the source network, classifier included")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path("results/decomposition"))
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.0, 3.0, 20.0])
    parser.add_argument("--measured", type=int, default=400)
    parser.add_argument("--curvature-batches", type=int, default=24)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--limit", type=int, help="read only so many training pictures of each tree (for a trial)")
    parser.add_argument("--cache", type=Path, help="folder of decoded pictures")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    fixed = {"model": "resnet18", "stem": "small", "pixels": 64, "resize": "squash", "validation": 0.1, "batch": 32}
    fixed |= {"curvature_from": "validation", "bn_momentum": 0.1, "damping": 1e-4, "points": 1}
    return argparse.Namespace(**vars(options), **fixed, targets=[options.target], variants=PREDICTED)


def table(paths: dict[str, dict[str, Any]]) -> str:
    columns = ["divergence", "exact", "blocks", *PREDICTED]
    lines = ["| penalty | source accuracy | " + " | ".join(columns) + " | divergence / exact | exact / blocks |"]
    lines.append("|---" * (len(columns) + 4) + "|")
    for name, path in paths.items():
        numbers = " | ".join(f"{path[column]:.3g}" for column in columns)
        ratios = f"{path['divergence'] / path['exact']:.2f} | {path['exact'] / path['blocks']:.2f}"
        lines.append(f"| {name} | {path['accuracy']:.1f} | {numbers} | {ratios} |")
    for name, path in paths.items():
        lines += ["", f"By layer, {name}: the exact block, and how many times too small each prediction is", ""]
        lines += ["| layer | exact | " + " | ".join(PREDICTED) + " |", "|---" * (len(PREDICTED) + 2) + "|"]
        for layer, found in path["layers"].items():
            ratios = " | ".join(f"{found['exact'] / found[column]:.2f}" for column in PREDICTED)
            lines.append(f"| {layer.removeprefix('trunk.')} | {found['exact']:.3g} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    options = arguments()
    record = {**provenance(), "options": {key: str(value) for key, value in vars(options).items()}}
    experiment = Experiment(options)
    for name in PREDICTED:
        made = {"exclude": [HEADS], "draws": options.draws, "seed": options.seed, **VARIANTS[name]}
        experiment.memories[name] = xkfac.consolidate(experiment.net, experiment.curvature_batches, **made)
    x = torch.cat([experiment.plain(part) for part in experiment.measure.part.x.split(200)])
    fisher = Fisher(experiment.net, experiment.source, x)
    paths = {}
    for strength in options.strengths:
        ((target, loader),) = experiment.targets.items()
        net = copy.deepcopy(experiment.net)
        for _ in learn(net, target, loader, experiment.memories[PREDICTED[-1]], strength, options):
            pass
        name = f"hierarchical times {strength:g}" if strength else "none"
        paths[name] = measured(experiment, fisher, net)
        print(table({name: paths[name]}), flush=True)
    keep(options.output, record, paths, table(paths))


if __name__ == "__main__":
    main()
