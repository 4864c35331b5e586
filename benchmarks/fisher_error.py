"""How far each curvature is from the exact Fisher, unit by unit, on small trained BN networks.

    python benchmarks/fisher_error.py [--output results/fisher-error]

The exact Fisher of a unit's merged weight takes a backward pass for every example and class. Every approximation is
estimated from the same batches with the same exact expectation over labels, so what is shown is its own error, free
of sampling noise. The error is |approximation - F| / |F| in the Frobenius norm, and beside it the scale: the trace of
the approximation over that of F.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from common import batches, convnet, digits, keep, mlp, provenance, train
from torch import Tensor, nn

import xkfac
from xkfac.curvature.moments import batch_gradient, unit_gradients
from xkfac.curvature.patches import Patches
from xkfac.model.units import Unit

CURVATURES: dict[str, dict[str, str]] = {
    "K-FAC": {"kind": "kfac"},
    "XK-FAC": {"kind": "xkfac", "form": "paper"},
    "mean form": {"kind": "xkfac", "form": "mean"},
    "pooled": {"kind": "xkfac", "form": "mean", "grouping": "pooled"},
    "hierarchical": {"kind": "xkfac", "form": "mean", "grouping": "hierarchical"},
    "corrected": {"kind": "corrected"},
    "diagonal": {"kind": "diagonal"},
}
NETS = {"linear": mlp, "convolutional": convnet}


def exact_fisher(net: nn.Sequential, data: list[Tensor], units: tuple[Unit, ...]) -> dict[str, Tensor]:
    """Return the Fisher of every unit, [C D, C D], from a backward pass for every example and class."""
    total = {unit.name: torch.zeros(()) for unit in units}
    names = dict(net.named_modules())
    for x in data:
        inputs: dict[nn.Module, Tensor] = {}
        outputs: dict[nn.Module, Tensor] = {}
        net.train()
        for module in net:
            inputs[module] = x
            x = outputs[module] = module(x)
        log_p = x.log_softmax(1)
        ends = [outputs[names[unit.norm or unit.name]] for unit in units]
        for n in range(log_p.shape[0]):
            for label in range(log_p.shape[1]):
                gradients = torch.autograd.grad(-log_p[n, label], ends, retain_graph=True)
                for unit, gradient in zip(units, gradients, strict=True):
                    patches = Patches(unit)
                    a = patches.unrolled(patches.image([inputs[names[unit.name]]], torch.float64))
                    flat = batch_gradient(a, unit_gradients(unit, gradient, torch.float64))[0].T.flatten()
                    total[unit.name] = total[unit.name] + log_p[n, label].exp().detach() * torch.outer(flat, flat)
    examples = sum(len(x) for x in data)
    return {name: fisher / examples for name, fisher in total.items()}


def measure(kind: str, seed: int, size: int, count: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Return (error, scale) by unit and curvature, for one trained network."""
    torch.manual_seed(seed)
    images, labels = digits()
    net = NETS[kind]()
    train(net, images, labels, epochs=10, seed=seed)
    net.double()
    data = [x.double() for x, _ in batches(images, labels, size, seed)[:count]]
    units = xkfac.find_units(net, data[0]).units
    fisher = exact_fisher(net, data, units)
    result: dict[str, dict[str, tuple[float, float]]] = {unit.name: {} for unit in units}
    for name, options in CURVATURES.items():
        curvature = xkfac.estimate(net, data, labels="exact", **options).curvature
        for unit in units:
            ours, truth = curvature.blocks[unit.name].dense()[0], fisher[unit.name]
            error = ((ours - truth).norm() / truth.norm()).item()
            result[unit.name][name] = error, (ours.trace() / truth.trace()).item()
    return result


def table(results: dict[str, list[dict[str, dict[str, tuple[float, float]]]]]) -> str:
    """Return the means over seeds as a Markdown table, the standard deviation of the error behind it."""
    lines = ["| net | unit | " + " | ".join(CURVATURES) + " |", "|---|---|" + "---|" * len(CURVATURES)]
    for kind, runs in results.items():
        for unit in runs[0]:
            cells = []
            for name in CURVATURES:
                errors = [run[unit][name][0] for run in runs]
                scale = statistics.mean(run[unit][name][1] for run in runs)
                cells.append(f"{statistics.mean(errors):.2f} ± {statistics.stdev(errors):.2f} (x{scale:.2f})")
            lines.append(f"| {kind} | {unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/fisher-error"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args()
    record = {**provenance(), "seeds": list(range(options.seeds))}
    results = {
        kind: [measure(kind, seed, options.batch_size, options.batches) for seed in range(options.seeds)]
        for kind in NETS
    }
    keep(options.output, record, results, table(results))


if __name__ == "__main__":
    main()
