"""Whether shrinking H'' pays: its error from few draws, that of the whole block, and what is forgotten.

    python benchmarks/shrinkage.py [--output results/shrinkage]

A perceptron (64-128-128-10) and a small convolutional network (16 channels, hierarchical grouping), both with BN, learn
1,000 of scikit-learn's digits. H'' is estimated on 12 batches of 32 others with K draws of labels each, and so has a
rank of at most 12 K. It is used as it is, or shrunk towards H' or towards the identity, both scaled to its trace. The
intensity is estimated from the spread of the draws as Ledoit and Wolf do: E|S - E[S]|^2 / |S - T|^2 for the mean S of
the draws and the target T. Errors are relative, in the Frobenius norm, averaged over the units that have another unit's
BN behind them, to the same batches with 192 draws each (2,304 in all); `block` has all terms. Then each network learns
digits with permuted pixels (the perceptron) or inverted ones (the convolutions), for as many epochs, at equal strength.
Forgotten: source accuracy before minus after, in points. Nothing is chosen here.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import batches, digits, keep, mlp, provenance, train
from draws import convnet
from torch import Tensor, nn

import xkfac
from xkfac.curvature.blocks import Kronecker

DRAWS, REFERENCE = (1, 4, 8, 32), 192
TARGETS = ("as it is", "to H'", "to its trace")
NETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "perceptron": (lambda: mlp(128), {"method": "xkfac"}),
    "convolutions": (lambda: convnet(16), {"method": "xkfac", "grouping": "hierarchical"}),
}
Batches = list[tuple[Tensor, Tensor]]
Factors = dict[str, list[Tensor]]  # the gradient factors of a unit's terms, [draws, groups, C, C] each


def sampled(net: nn.Module, held_out: Batches, count: int, options: dict[str, Any], seed: int) -> Factors:
    """Return the gradient factors of every draw of every batch by itself."""
    found: Factors = {}
    for draw in range(count):
        for place, batch in enumerate(held_out):
            memory = xkfac.consolidate(net, [batch], draws=1, seed=100_000 * seed + 1000 * place + draw, **options)
            for name, block in memory.curvature.blocks.items():
                assert isinstance(block, Kronecker)
                found.setdefault(name, [[] for _ in block.terms])  # type: ignore[arg-type]
                for factors, term in zip(found[name], block.terms, strict=True):
                    factors.append(term.right)  # type: ignore[attr-defined]
    return {name: [torch.stack(factors) for factors in levels] for name, levels in found.items()}  # type: ignore[arg-type]


def shrunk(samples: Tensor, fine: Tensor, target: str) -> tuple[Tensor, float]:
    """Return the mean of H'' over draws [T, groups, C, C] shrunk towards a target of its trace, and the intensity."""
    found = samples.mean(0)
    if target == "as it is":
        return found, 0.0
    goal = fine if target == "to H'" else torch.eye(fine.shape[-1]).expand_as(fine)
    trace = [one.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] for one in (found, goal)]
    goal = goal * (trace[0] / trace[1].clamp(min=1e-30))
    spread = (samples.square().sum((1, 2, 3)).mean() - found.square().sum()) / (len(samples) - 1)
    intensity = (spread / (found - goal).square().sum().clamp(min=1e-30)).clamp(0, 1)
    return found + intensity * (goal - found), intensity.item()


def with_factors(memory: xkfac.Memory, factors: Factors, target: str) -> tuple[xkfac.Memory, float]:
    """Return the memory with the gradient factors of some draws, H'' shrunk, and the mean intensity."""
    blocks, intensities = {}, []
    for name, block in memory.curvature.blocks.items():
        assert isinstance(block, Kronecker)
        right = [samples.mean(0) for samples in factors[name]]
        if len(right) > 1:
            right[-1], intensity = shrunk(factors[name][-1], right[0], target)
            intensities.append(intensity)
        blocks[name] = Kronecker(tuple(replace(t, right=h) for t, h in zip(block.terms, right, strict=True)))
    return replace(memory, curvature=replace(memory.curvature, blocks=blocks)), statistics.mean(intensities)


def error(found: list[tuple[Tensor, Tensor]], truth: list[tuple[Tensor, Tensor]]) -> float:
    """Return the relative error of a sum of products A (x) H, by their inner products."""

    def inner(one: list[tuple[Tensor, Tensor]], two: list[tuple[Tensor, Tensor]]) -> float:
        return sum(((a * b).sum((1, 2)) * (g * h).sum((1, 2))).sum().item() for a, g in one for b, h in two)

    squares = inner(truth, truth)
    return (max(inner(found, found) - 2 * inner(found, truth) + squares, 0.0) / squares) ** 0.5


def errors(memory: xkfac.Memory, truth: xkfac.Memory, units: list[str]) -> tuple[float, float]:
    """Return the errors of H'' and of the block, means over units."""
    rows = []
    for name in units:
        pairs = []
        for one in (memory, truth):
            block = one.curvature.blocks[name]
            assert isinstance(block, Kronecker)
            pairs.append([(t.dense_left.double(), t.right.double()) for t in block.terms])
        whole = torch.ones(len(pairs[0][0][0]), 1, 1, dtype=torch.float64)
        alone = [[(whole, terms[-1][1])] for terms in pairs]
        rows.append((error(alone[0], alone[1]), error(pairs[0], pairs[1])))
    return statistics.mean(row[0] for row in rows), statistics.mean(row[1] for row in rows)


def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return 100 * (net.eval()(x).argmax(1) == y).float().mean().item()


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return, by draws, target and strength, the errors, the intensity, points forgotten and accuracy on the target."""
    make, how = NETS[name]
    torch.manual_seed(seed)
    x, y = digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    changed = digits(seed + 50)[0][order] if name == "perceptron" else 1 - x
    net = make()
    train(net, x[:1000], y[:1000], options.epochs, seed, options.lr)
    before = accuracy(net, x[1400:], y[1400:])
    held_out = batches(x[1000:1400], y[1000:1400], 32, 5)
    truth = xkfac.consolidate(net, held_out, draws=REFERENCE, seed=seed, **how)
    units = [unit for unit, block in truth.curvature.blocks.items() if len(block.terms) > 1][:-1]  # type: ignore[union-attr]
    samples = sampled(net, held_out, max(options.draws), how, seed + 10)
    results = {}
    for draws in (*options.draws, REFERENCE):
        few = {n: [one[: draws * len(held_out)] for one in levels] for n, levels in samples.items()}
        for target in TARGETS if draws < REFERENCE else TARGETS[:1]:
            memory, intensity = with_factors(truth, few, target) if draws < REFERENCE else (truth, 0.0)
            of_h, of_block = errors(memory, truth, units)
            for strength in options.strengths:
                learning = copy.deepcopy(net)
                learner = xkfac.Learner(learning, memory, strength=strength)
                learner.begin(batches(changed[:1000], y[:1000], 32, 5))
                train(learning, changed[:1000], y[:1000], options.epochs, seed + 1, options.lr, learner)
                learner.close()
                results[f"{draws} | {target} | {strength:g}"] = {
                    "H''": of_h,
                    "block": of_block,
                    "intensity": intensity,
                    "forgotten": before - accuracy(learning, x[1400:], y[1400:]),
                    "target": accuracy(learning, changed[1400:], y[1400:]),
                }
    print(f"{name}, seed {seed}: done", flush=True)
    return results


def table(runs: dict[str, list[dict[str, dict[str, float]]]]) -> str:
    keys = ("H''", "block", "intensity", "forgotten", "target")
    names = "network | draws per batch | H'' | strength | error of H'' | of the block | intensity | forgotten | target"
    lines = [f"| {names} |", "|---" * 9 + "|"]
    for name, many in runs.items():
        for row in many[0]:
            cells = []
            for key in keys:
                values = [one[row][key] for one in many]
                deviation = f" ± {statistics.stdev(values):.1f}" if key in keys[3:] and len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.{1 if key in keys[3:] else 2}f}{deviation}")
            lines.append(f"| {name} | {row} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/shrinkage"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--strengths", type=float, nargs="+", default=[1.0])
    parser.add_argument("--draws", type=int, nargs="+", default=DRAWS)
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = {**provenance(), "seeds": list(range(options.seeds))}
    runs: dict[str, list[dict[str, dict[str, float]]]] = {}
    for name in options.nets:
        for seed in range(options.seeds):
            runs.setdefault(name, []).append(run(name, seed, options))
            keep(options.output, record, runs, table(runs), show=False)
    print(table(runs))


if __name__ == "__main__":
    main()
