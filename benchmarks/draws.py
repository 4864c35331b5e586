"""What a draw buys: the error of H' and H'' by batches and draws per batch, and whether shrinking H'' pays.

    python benchmarks/draws.py [--output results/draws]

A small convolutional network with BN, trained on digits. The gradient factors of its three convolutions, in the
hierarchical grouping, are estimated from B batches of 32 examples with K draws each, of labels or of random signs, many
times over, and compared with the exact ones of all batches: all examples and classes, by as many backward passes.
Errors are in the Frobenius norm, relative to the exact factor, averaged over the three units: of H' and H'' as they are
estimated; of H' from all positions of every draw; of H' where it stands in the place of H'', as in K-FAC; and of H''
shrunk towards a target of the same trace, H' or the identity, by an intensity that is estimated from the draws
themselves as Ledoit and Wolf do, or the best there is.
Zero draws are one backward pass per class, in which all examples have that label, as some libraries do it by default.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from common import batches, digits, keep, provenance, train
from torch import Tensor, nn

from xkfac.curvature.moments import Draw
from xkfac.model.likelihood import Categorical

PLANS = [(1, 8), (1, 32), (2, 32), (4, 1), (4, 8), (16, 0), (16, 1), (16, 8), (16, 32), (64, 8)]
DRAWN = ("labels", "signs")
REPEATS = 20


def convnet(width: int) -> nn.Sequential:
    """Return a network of three convolutions with BN, a global average pool, and a linear head."""
    layers: list[nn.Module] = []
    for inputs, stride in ((1, 1), (width, 2), (width, 1)):
        layers += [nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def gradients(net: nn.Module, x: Tensor, cotangents: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return, by unit, the gradients [K, N, S, C] at the outputs of the BN layers, for K cotangents."""
    outputs: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _module, _args, output: outputs.append(output))
        for module in net.modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    logits = net(x)
    for hook in hooks:
        hook.remove()
    many = torch.autograd.grad(logits, outputs, cotangents(logits.detach()), is_grads_batched=True)
    return [g.flatten(3).transpose(2, 3).detach() for g in many]


def drawn(what: str, count: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
    likelihood = Categorical()

    def one(logits: Tensor) -> Tensor:
        if what == "signs":
            return likelihood.random_root(logits, generator)
        return likelihood.score(logits, likelihood.sample(logits, generator))

    return lambda logits: torch.stack([one(logits) for _ in range(count)])


def classes(logits: Tensor) -> Tensor:
    """Return one cotangent per class, in which all examples have that label."""
    return torch.stack(list(Categorical().root(logits)))


def every(logits: Tensor) -> Tensor:
    """Return one cotangent per example and class: together they are the Fisher of the outputs."""
    roots = torch.stack(list(Categorical().root(logits)))  # [classes, N, classes]
    return torch.einsum("kni,nm->kmni", roots, torch.eye(len(logits))).flatten(0, 1)


def square(g: Tensor) -> Tensor:
    return g.flatten(0, -2).mT @ g.flatten(0, -2)


def shrunk(vectors: Tensor, exact: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Return the mean of squares of vectors [T, C] shrunk towards a target of its trace: as estimated, and at best."""
    found = vectors.mT @ vectors / len(vectors)
    target = target * (found.trace() / target.trace())
    spread = (vectors.square().sum(1).square().mean() - found.square().sum()) / len(vectors)
    intensity = (spread / (found - target).square().sum()).clamp(0, 1)
    best = (((exact - found) * (target - found)).sum() / (target - found).square().sum()).clamp(0, 1)
    return {"estimated": found + intensity * (target - found), "best": found + best * (target - found)}


def errors_of(
    net: nn.Module, data: list[Tensor], what: str, draws: int, exact: list[tuple[Tensor, Tensor]], seed: int
) -> dict[str, float]:
    """Return the errors of one estimate from some batches, by name, each the mean over the units."""
    generator = torch.Generator().manual_seed(seed)
    examples = sum(len(x) for x in data)
    samples = [gradients(net, x, drawn(what, draws, generator) if draws else classes) for x in data]
    passes = draws or 1  # those of all classes add up to one draw
    found: dict[str, list[float]] = {}
    for unit, (fine, coarse) in enumerate(exact):
        batches_of = [sample[unit] for sample in samples]
        whole = sum(square(g) for g in batches_of) / (passes * examples)
        shares = [[Draw(1 / passes, k, passes).share_of(g[k : k + 1]) for k in range(draws)] for g in batches_of]
        shared = sum(counted * square(part) for one in shares for part, counted in one) / (passes * examples)
        shared = shared if draws else whole
        vectors = torch.cat([g.sum((1, 2)) for g in batches_of]) / (examples / len(data)) ** 0.5
        by_fine, by_trace = (shrunk(vectors, coarse, target) for target in (shared, torch.eye(len(coarse))))
        estimates = {
            "H'": (shared, fine),
            "H', all positions": (whole, fine),
            "H''": (vectors.mT @ vectors / (len(data) * passes), coarse),
            "H' in place of H''": (shared, coarse),
            "H'' to H'": (by_fine["estimated"], coarse),
            "H'' to H', best": (by_fine["best"], coarse),
            "H'' to its trace": (by_trace["estimated"], coarse),
            "H'' to its trace, best": (by_trace["best"], coarse),
        }
        for name, (estimate, truth) in estimates.items():
            found.setdefault(name, []).append(float((estimate - truth).norm() / truth.norm()))
    return {name: statistics.mean(values) for name, values in found.items()}


def plan(text: str) -> tuple[int, int]:
    count, draws = text.split("x")
    return int(count), int(draws)


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/draws"))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=8, help="channels of each of the three convolutions")
    parser.add_argument("--plans", nargs="+", default=PLANS, type=plan, metavar="BATCHESxDRAWS")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = {**provenance(), "repeats": options.repeats}
    torch.manual_seed(0)
    net, (images, labels) = convnet(options.width), digits()
    train(net, images, labels, options.epochs, 0)
    data = [x for x, _ in batches(images, labels, 32, 1)]
    examples = sum(len(x) for x in data)
    exact: list[tuple[Tensor, Tensor]] = []
    for x in data:
        found = [(square(g) / examples, square(g.sum((1, 2))) / examples) for g in gradients(net, x, every)]
        exact = found if not exact else [(a + c, b + d) for (a, b), (c, d) in zip(exact, found, strict=True)]
    results: dict[str, dict[str, float]] = {}
    for (count, draws), what in itertools.product(options.plans, DRAWN):
        if not draws and what != DRAWN[0]:
            continue
        rows = []
        for repeat in range(options.repeats):
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(repeat)).tolist()
            chosen = [data[order[k % len(data)]] for k in range(count)]
            rows.append(errors_of(net, chosen, what, draws, exact, repeat))
        results[f"{count} x {draws} {what}" if draws else f"{count} x all classes"] = {
            name: statistics.mean(row[name] for row in rows) for name in rows[0]
        }
    names = list(next(iter(results.values())))
    lines = [f"| batches x draws | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    lines += [f"| {plan} | {' | '.join(f'{row[n]:.3f}' for n in names)} |" for plan, row in results.items()]
    keep(options.output, record, results, "\n".join(lines))


if __name__ == "__main__":
    main()
