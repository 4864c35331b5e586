"""The hard case: one head, two image sets of ten classes each, and what each part of a shared BN costs.

    python benchmarks/one_head.py --data FOLDER [--device cuda] [--seeds 3] [--workers 1] [--output results/one-head]

A network of three convolutions with BN, a pool and a linear layer learns ten classes, and then ten others with the same
ten outputs. FOLDER holds MNIST's idx files (in `mnist`) and `tiny-imagenet-100.zip`. Pairs: `digits`, MNIST, then ten
classes of Tiny ImageNet; `photographs`, ten classes of Tiny ImageNet and then ten others; on request any SET/SET, where
SET is mnist or tiny:2, flowers:0, cars:0, cub:0 and so on: the ten classes from 20, from 0 and so on
(`flowers102-128.zip`, `cars196-128.zip`, `cub200-128.zip`). Curves over the strength of the penalty, for several
curvatures and for these treatments of BN:

    shared    gamma and beta are learnt and re-centred, statistics follow the batches (as the paper has it)
    eval      the same, merged weights read with population statistics
    affine    gamma and beta stand still and are not re-centred, statistics follow the batches
    fixed     gamma, beta and statistics stand still (with hierarchical factors: the library's default)
    target    statistics are those of the new task from its start on and stand still, gamma and beta are learnt
    own       each task has gamma, beta and statistics of its own; the task of a test image is known

Accuracies on test images of the old and the new task, BN with stored statistics (`stored`) or with those of batches of
32 test images of one task (`batch`); for `own` also with one of the two taken from the new task.
What inferring the task costs is measured by `one_head_routing.py`. Steps: SGD, momentum 0.9, batch 64, cosine, learning
rate at most 0.05 and at most half of `Learner.stable_lr`; with --implicit the optimizer goes to `begin`, as in README's
ten lines, which allows for --lr at every strength. --rows CURVATURE/BN picks rows. For
each source network `moments` has the loss on the new task before a step, and the mean square of what each BN gives
without gamma and beta: 1 on the images that its statistics are of. Nothing is chosen here. Results are written after
every curve.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy
import torch
from common import keep, provenance
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import xkfac
from xkfac.experiments.data.digits import load
from xkfac.model.passes import norms_of, set_mode, untouched

Examples = tuple[Tensor, Tensor]
BATCH, LR, DRAWS = 64, 0.05, 8
PAIRS = {"digits": "mnist/tiny:0", "photographs": "tiny:0/tiny:1"}
ARCHIVES = {"tiny": "tiny-imagenet-100", "flowers": "flowers102-128", "cars": "cars196-128", "cub": "cub200-128"}
STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
CURVATURES: dict[str, dict[str, Any]] = {
    "hierarchical": {"method": "xkfac", "grouping": "hierarchical"},
    "xkfac": {"method": "xkfac"},
    "paper": {"method": "paper"},
    "kfac": {"method": "kfac"},
    "diagonal": {"method": "diagonal"},
}
ROWS = [
    *(("hierarchical", bn) for bn in ("shared", "eval", "affine", "fixed", "target", "own")),
    *(("xkfac", bn) for bn in ("shared", "affine", "own")),
    *(("kfac", bn) for bn in ("shared", "fixed", "target")),
    ("diagonal", "shared"),
    ("paper", "shared"),
]


@dataclass(frozen=True)
class Run:
    """One point of a curve."""

    pair: str
    curvature: str
    bn: str
    strength: float
    seed: int
    lr: float
    accuracies: dict[str, float] = field(default_factory=dict)
    calibrated: bool = False
    moments: dict[str, float] = field(default_factory=dict)


def pictures(archive: Path, classes: range, pixels: int) -> tuple[Examples, Examples]:
    """Return training and test images [N, 3, pixels, pixels] of some classes of a zip of `part/CLASS/NAME`."""
    found: dict[str, list[tuple[Tensor, int]]] = {"train": [], "test": []}
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if not name.endswith("/"))
        every = sorted({name.split("/")[1] for name in names})
        wanted = {every[place]: label for label, place in enumerate(classes)}
        for name in names:
            part, label = name.split("/")[0], wanted.get(name.split("/")[1])
            if label is None or part not in found:
                continue
            with file.open(name) as raw:
                image = Image.open(raw).convert("RGB").resize((pixels, pixels), Image.Resampling.BILINEAR)
            found[part].append((torch.from_numpy(numpy.array(image)).permute(2, 0, 1), label))
    made = []
    for part in ("train", "test"):
        x = torch.stack([image for image, _ in found[part]]).float() / 255
        made.append(((x - 0.45) / 0.27, torch.tensor([label for _, label in found[part]])))
    return made[0], made[1]


def digits(folder: Path, count: int, pixels: int) -> tuple[Examples, Examples]:
    parts = load("mnist", folder, validation=0)
    made = []
    for part in (parts.train, parts.test):
        x = F.pad(part.x[:count].view(-1, 1, 28, 28), (2, 2, 2, 2)).expand(-1, 3, -1, -1)
        if pixels != 32:
            x = F.interpolate(x, size=pixels, mode="bilinear", antialias=True)
        made.append(((x - 0.1) / 0.3, part.y[:count]))
    return made[0], made[1]


def network() -> nn.Sequential:
    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32, 1),
        *block(32, 64, 2),
        *block(64, 128, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def batches(examples: Examples, seed: int, size: int = BATCH) -> Iterator[Examples]:
    order = torch.randperm(len(examples[1]), generator=torch.Generator().manual_seed(seed)).to(examples[1].device)
    for index in order.split(size):
        if len(index) == size:
            yield examples[0][index], examples[1][index]


def learn(
    net: nn.Module,
    examples: Examples,
    epochs: int,
    lr: float,
    seed: int,
    learner: xkfac.Learner | None,
    implicit: bool = False,
) -> float:
    """Train; return the learning rate that was used."""
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr, momentum=0.9)
    if learner is not None:
        learner.begin(list(batches(examples, seed - 50)), optimizer if implicit else None)
        if not implicit:
            optimizer.param_groups[0]["lr"] = lr = min(lr, 0.5 * learner.stable_lr(0.9))
    steps = epochs * (len(examples[1]) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    net.train()
    for epoch in range(epochs):
        for x, y in batches(examples, 1000 * seed + epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            if learner is None:
                loss.backward()
            else:
                learner.backward(loss)
            optimizer.step()
            schedule.step()
    return lr


@torch.no_grad()
def accuracy(net: nn.Module, examples: Examples, statistics: str) -> float:
    """Return the percentage right with stored statistics, or those of batches of 32."""
    size = 32 if statistics == "batch" else 1000
    right = seen = 0
    with untouched(net):
        set_mode(net, "batch" if statistics == "batch" else "population")
        for x, y in batches(examples, 0, min(size, len(examples[1]))):
            right += int((net(x).argmax(1) == y).sum())
            seen += len(y)
    return 100 * right / seen


@torch.no_grad()
def moments(source: nn.Sequential, new: Examples) -> dict[str, float]:
    """Return the loss of the source network on a new task, and mean squares of its BN outputs before gamma and beta."""
    found = {}
    x, y = new[0][:1000], new[1][:1000]
    with untouched(source):
        source.eval()
        for layer in source:
            if isinstance(layer, nn.BatchNorm2d):
                normal = F.batch_norm(x, layer.running_mean, layer.running_var, eps=layer.eps)
                found[f"BN {len(found) + 1}"] = normal.square().mean().item()
            x = layer(x)
    return {**found, "loss": F.cross_entropy(x, y).item()}


def consolidated(
    net: nn.Module, held_out: list[Examples], curvature: str, bn: str, seed: int, labels: str = "signs"
) -> xkfac.Memory:
    options = dict(CURVATURES[curvature]) | {"labels": labels}
    method = options.pop("method")
    if bn in ("fixed", "own"):
        options |= {"statistics": "population", "interpretation": "eval", "recentre": False, f"{bn}_bn": True}
    if bn == "target":
        options |= {"statistics": "population", "interpretation": "eval", "fixed_statistics": True}
    if bn == "affine":
        options |= {"fixed_affine": True, "recentre": False}
    if bn == "eval":
        options["interpretation"] = "eval"
    return xkfac.consolidate(net, held_out, method, draws=DRAWS, seed=seed, **options)


def mixed(net: nn.Sequential, norms: dict[str, Tensor], kinds: tuple[str, ...]) -> nn.Sequential:
    """Return the network with those tensors of another task's BN whose names end in one of `kinds`."""
    made = copy.deepcopy(net)
    state = made.state_dict()
    made.load_state_dict({**state, **{name: value for name, value in norms.items() if name.endswith(kinds)}})
    return made


def measured(net: nn.Sequential, source: nn.Sequential, old: Examples, new: Examples, bn: str) -> dict[str, float]:
    found = {f"new {how}": accuracy(net, new, how) for how in ("stored", "batch")}
    found |= {f"old {how}": accuracy(net, old, how) for how in ("stored", "batch")}
    if bn == "own":
        paths = norms_of(source).items()
        norms = {f"{path}.{name}": tensor for path, norm in paths for name, tensor in norm.state_dict().items()}
        affine, kept = ("weight", "bias"), ("running_mean", "running_var")
        found["old own"] = accuracy(mixed(net, norms, (*affine, *kept)), old, "stored")
        found["old own statistics"] = accuracy(mixed(net, norms, kept), old, "stored")
        found["old own affine"] = accuracy(mixed(net, norms, affine), old, "stored")
        found["old own affine, batch"] = accuracy(mixed(net, norms, affine), old, "batch")
    return found


@dataclass(frozen=True)
class Case:
    """A pair of sets and a seed, on a device: who learns what."""

    folder: Path
    pair: str
    device: str
    seed: int
    epochs: int
    share: float
    lr: float = LR
    implicit: bool = False
    strengths: tuple[float, ...] = STRENGTHS
    calibrated: tuple[str, ...] = ()
    test: int = 10000
    pixels: int = 32
    labels: str = "signs"

    def images_of(self, name: str) -> tuple[Examples, Examples]:
        """Return training and test images of a set."""
        if name == "mnist":
            return digits(self.folder / "mnist", int(20000 * self.share), self.pixels)
        archive, group = name.split(":")
        first = 10 * int(group)
        return pictures(self.folder / f"{ARCHIVES[archive]}.zip", range(first, first + 10), self.pixels)

    def data(self) -> tuple[Examples, Examples, Examples, Examples, Examples]:
        """Return training, held-out and test images of the old task, and training and test images of the new one."""
        sets = PAIRS.get(self.pair, self.pair).split("/")
        (train, old), (target, new) = map(self.images_of, sets)
        target = shuffled(target, 7, int(len(target[1]) * self.share))
        train = shuffled(train, self.seed, len(train[1]))
        old = old[0][: self.test], old[1][: self.test]
        held = len(train[1]) // 5
        parts = (train[0][held:], train[1][held:]), (train[0][:held], train[1][:held]), old, target, new
        return tuple((x.to(self.device), y.to(self.device)) for x, y in parts)  # type: ignore[return-value]


def shuffled(examples: Examples, seed: int, count: int) -> Examples:
    order = torch.randperm(len(examples[1]), generator=torch.Generator().manual_seed(seed))[:count]
    return examples[0][order], examples[1][order]


def start(case: Case) -> tuple[dict[str, Tensor], list[Run]]:
    """Return the network that knows the old task, and the runs without a penalty."""
    torch.set_num_threads(1)
    train, _, old, target, new = case.data()
    torch.manual_seed(case.seed)
    source = network().to(case.device)
    learn(source, train, 2 * case.epochs, 0.1, case.seed, None)
    before = {f"old {how}": accuracy(source, old, how) for how in ("stored", "batch")}
    runs = [Run(case.pair, "", "before", 0.0, case.seed, 0.1, before, moments=moments(source, new))]
    both = torch.cat([train[0], target[0]]), torch.cat([train[1], target[1]])
    for name, examples in (("fine-tuning", target), ("joint training", both)):
        net = copy.deepcopy(source)
        learn(net, examples, case.epochs, case.lr, case.seed + 50, None)
        runs.append(Run(case.pair, "", name, 0.0, case.seed, case.lr, measured(net, source, old, new, "")))
    return {name: tensor.cpu() for name, tensor in source.state_dict().items()}, runs


def curve(case: Case, weights: dict[str, Tensor], curvature: str, bn: str) -> list[Run]:
    """Return the runs of one curvature and one treatment of BN over all strengths, the calibrated one last."""
    torch.set_num_threads(1)
    _, kept, old, target, new = case.data()
    source = network().to(case.device)
    source.load_state_dict(weights)
    held_out = list(batches(kept, case.seed, min(BATCH, len(kept[1]))))[:60]
    memory = consolidated(source, held_out, curvature, bn, case.seed, case.labels)
    if f"{curvature}/{bn}" in case.calibrated:
        memory = xkfac.calibrate(source, memory, held_out, seed=case.seed)
    # None is the calibrated strength, which steps that are implicit raise where they would leave the radius.
    strengths = [*case.strengths, *([None] if memory.calibration is not None else [])]
    runs = []
    for given in strengths:
        net = copy.deepcopy(source)
        learner = xkfac.Learner(net, memory, strength=given)
        try:
            lr = learn(net, target, case.epochs, case.lr, case.seed + 50, learner, case.implicit)
        except xkfac.NotFiniteError:
            print(f"{case.pair} {curvature}/{bn} x{learner.strength:g}, seed {case.seed}: diverged", flush=True)
            continue
        strength = learner.strength
        learner.close()
        found = measured(net, source, old, new, bn)
        runs.append(Run(case.pair, curvature, bn, strength, case.seed, lr, found, given is None))
        print(f"{case.pair} {curvature}/{bn} x{strength:g}, seed {case.seed}: {found}", flush=True)
    return runs


def row_of(run: Run) -> tuple[str, str, str, str]:
    return run.pair, run.curvature, run.bn, "calibrated" if run.calibrated else f"{run.strength:g}"


def curves(runs: list[Run]) -> dict[str, dict[str, list[float]]]:
    """Return what every point of a curve has of the old and the new task with stored statistics, by seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        name = run.bn
        if run.curvature:
            name = f"{run.curvature} {run.bn} " + ("calibrated" if run.calibrated else f"x{run.strength:g}")
        point = found.setdefault(f"{run.pair}: {name}", {})
        point.setdefault("old", []).append(run.accuracies.get("old own", run.accuracies["old stored"]))
        if "new stored" in run.accuracies:
            point.setdefault("new", []).append(run.accuracies["new stored"])
        if run.calibrated:
            point.setdefault("strength", []).append(run.strength)
    return found


def table(runs: list[Run]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.accuracies))
    lines = ["| pair | curvature | BN | strength | " + " | ".join(keys) + " |", "|---" * (4 + len(keys)) + "|"]
    for place, same in itertools.groupby(runs, key=row_of):
        group = list(same)
        cells = []
        for key in keys:
            values = [run.accuracies[key] for run in group if key in run.accuracies]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            cells.append(f"{statistics.fmean(values):.1f}{spread}" if values else "")
        lines.append("| " + " | ".join([*place, *cells]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--share", type=float, default=1.0, help="the share of the training images that is used")
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--implicit", action="store_true", help="steps that are implicit in the penalty")
    parser.add_argument("--pairs", nargs="+", default=["digits", "photographs"])
    parser.add_argument("--rows", nargs="+", help="CURVATURE/BN, by default all")
    parser.add_argument("--strengths", nargs="+", type=float, default=STRENGTHS)
    parser.add_argument("--calibrated", nargs="+", default=[], help="rows, for a run at the calibrated strength too")
    parser.add_argument("--pixels", type=int, default=32, help="the side of an image")
    parser.add_argument("--test", type=int, default=10000, help="at most so many digits to measure on")
    parser.add_argument("--labels", default="signs", choices=["signs", "sampled"], help="of the curvature")
    parser.add_argument("--output", type=Path, default=Path("results/one-head"))
    options = parser.parse_args()
    record = {**provenance(), "seeds": options.seeds, "epochs": options.epochs, "implicit": options.implicit}
    rows = [tuple(row.split("/")) for row in options.rows] if options.rows else ROWS
    how = (options.epochs, options.share, options.lr, options.implicit, tuple(options.strengths))
    more = (tuple(options.calibrated), options.test, options.pixels, options.labels)
    cases = [
        Case(options.data, pair, options.device, seed, *how, *more)
        for seed in range(options.first, options.first + options.seeds)
        for pair in options.pairs
    ]
    places = {
        row: place for place, row in enumerate([("", "before"), ("", "fine-tuning"), ("", "joint training"), *ROWS])
    }
    found: list[Run] = []

    def add(runs: list[Run]) -> None:
        found.extend(runs)
        found.sort(key=lambda run: (run.pair, places[run.curvature, run.bn], run.calibrated, run.strength, run.seed))
        kept = {**record, "curves": curves(found)}
        keep(options.output, kept, [asdict(run) for run in found], table(found), show=False)

    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        started = []
        for weights, runs in pool.map(start, cases):
            started.append(weights)
            add(runs)
        jobs = [(case, weights, *row) for case, weights in zip(cases, started, strict=True) for row in rows]
        for runs in pool.map(curve, *zip(*jobs, strict=True)):
            add(runs)
    print(table(found))


if __name__ == "__main__":
    main()
