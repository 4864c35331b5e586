r"""Which curvature predicts the real source loss of a real network, and what calibration says of its scale.

    python benchmarks/prediction.py --weights resnet18.safetensors --source tiny-imagenet-100.zip \
        --targets cub200.zip flowers102.zip [--output results/prediction]

Source and targets are folders or zips with `train/<class>/<image>` and `test/<class>/<image>`; the weights are those of
a network that learnt the source's train part without its validation share. One half of that share gives every curvature
its batches, the other half measures. Every target is really learnt, a short way: without a penalty, and with each
curvature's own penalty at each strength. At points of these paths the penalty that every curvature predicts is compared
with the real rise of the source loss, and of the divergence from what the network said before.

Of the points whose real rise is at least `--floor`: `ratio` is the geometric mean of real / predicted, what the penalty
would have to be multiplied by; `spread` the standard deviation of its logarithm, what no scale can mend (0.69 is a
factor of two); `rank` Spearman's correlation over all points. Nothing is tuned, and every curvature that is listed
runs. Curvatures with own BN, where the source is measured with the BN layers that it had, run by themselves; their
penalties take steps that are implicit in them.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common import keep, provenance
from torch import Tensor
from torch.nn import functional as F

import xkfac
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import Part
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.networks.weights import load_source
from xkfac.model.merged_weight import bind
from xkfac.model.passes import norms_of
from xkfac.penalty.quadratic import Penalty

VARIANTS: dict[str, dict[str, Any]] = {
    "K-FAC": {"method": "kfac"},
    "XK-FAC": {"method": "xkfac", "form": "mean"},
    "pooled": {"method": "xkfac", "form": "mean", "grouping": "pooled"},
    "hierarchical": {"method": "xkfac", "form": "mean", "grouping": "hierarchical"},
    "corrected": {"method": "corrected"},
    "diagonal": {"method": "diagonal"},
    # Of the network as it answers in evaluation mode, where the real loss is measured.
    "K-FAC, population": {"method": "kfac", "statistics": "population"},
    "pooled, population": {"method": "xkfac", "form": "mean", "grouping": "pooled", "statistics": "population"},
    "hierarchical, population": {
        "method": "xkfac",
        "form": "mean",
        "grouping": "hierarchical",
        "statistics": "population",
    },
    "own BN, K-FAC": {"method": "own-bn", "kind": "kfac", "grouping": "paper"},
    "own BN, paper's grouping": {"method": "own-bn", "grouping": "paper"},
    "own BN, pooled": {"method": "own-bn", "grouping": "pooled"},
    "own BN, hierarchical": {"method": "own-bn"},
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = "heads*"
NONE = "none"
Batch = tuple[Tensor, Tensor]


@dataclass
class Point:
    """A network on its way to a target: what really happened to the source, and what each curvature predicts."""

    target: str
    penalised_by: str
    strength: float
    step: int
    loss: float
    divergence: float
    accuracy: float
    target_loss: float
    predicted: dict[str, float]


class Batches:
    """Full batches of pictures (x, y) on the device; a new order for every pass, fixed by the seed."""

    def __init__(self, part: Part, size: int, prepare: Callable[[Tensor], Tensor], seed: int) -> None:
        self.part, self.size, self.prepare = part, min(size, len(part)), prepare
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return len(self.part) // self.size

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.part), generator=self.generator).to(DEVICE)
        for index in order.split(self.size)[: len(self)]:
            yield self.prepare(self.part.x[index]), self.part.y[index]


class Measure:
    """Measures a network by examples of the source that neither its weights nor a curvature have seen.

    own_bn: with the BN layers that the network has now, whatever it has later.
    """

    def __init__(
        self, net: ManyHeaded, source: str, part: Part, prepare: Callable[[Tensor], Tensor], *, own_bn: bool
    ) -> None:
        self.source, self.part, self.prepare = source, part, prepare
        self.norms = copy.deepcopy(norms_of(net)) if own_bn else {}
        self.before = self._outputs(net)
        self.loss = F.cross_entropy(self.before, part.y)

    @torch.no_grad()
    def _outputs(self, net: ManyHeaded) -> Tensor:
        flag = net.training
        net.eval()
        used = copy.deepcopy(net) if self.norms else net
        for path, norm in self.norms.items():
            used.get_submodule(path).load_state_dict(norm.state_dict())
        with used.using(self.source):
            outputs = torch.cat([used(self.prepare(x)) for x in self.part.x.split(500)])
        net.train(flag)
        return outputs

    def __call__(self, net: ManyHeaded) -> tuple[float, float, float]:
        """Return the rise of the loss, the divergence KL(before || now), and the accuracy in percent."""
        now = self._outputs(net)
        rise = F.cross_entropy(now, self.part.y) - self.loss
        divergence = F.kl_div(now.log_softmax(1), self.before.log_softmax(1), reduction="batchmean", log_target=True)
        accuracy = 100 * (now.argmax(1) == self.part.y).double().mean()
        return rise.item(), divergence.item(), accuracy.item()


def halves(part: Part, seed: int) -> tuple[Part, Part]:
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed)).to(part.x.device)
    return tuple(Part(part.x[index], part.y[index]) for index in order.chunk(2))  # type: ignore[return-value]


@torch.no_grad()
def predictions(net: ManyHeaded, penalties: dict[str, Penalty], units: Any) -> dict[str, float]:
    """Return L_s of the network's merged weights by every curvature, without damping."""
    weights = {name: bound.merged_weight() for name, bound in bind(net, units).items()}
    return {name: penalty(weights).item() for name, penalty in penalties.items()}


def learn(
    net: ManyHeaded,
    target: str,
    loader: Batches,
    memory: xkfac.Memory,
    strength: float,
    options: argparse.Namespace,
) -> Iterator[tuple[int, float]]:
    """Learn a target a short way; yield (step, target loss) at the points of the path."""
    torch.manual_seed(options.seed)
    net.enter(target)
    with xkfac.Learner(net, memory, damping=options.damping, strength=strength) as learner:
        learner.begin(loader, max_batches=40)
        implicit = learner.implicit(options.lr, 0.9) if memory.method.own_bn else None
        # An unstable path says nothing about a curvature.
        lr = min(options.lr, 0.5 * learner.stable_lr(0.9, implicit=implicit))
        for norm in norms_of(net).values():
            norm.momentum = options.bn_momentum
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr, momentum=0.9)
        net.train()
        endless = itertools.chain.from_iterable(itertools.repeat(loader))
        stops = {math.ceil(options.steps / 2**k) for k in range(options.points)}
        for step, (x, y) in enumerate(itertools.islice(endless, options.steps), 1):
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            learner.backward(loss)
            if implicit is not None:
                implicit.step()
            optimizer.step()
            if step in stops:
                yield step, loss.item()


def rank_correlation(a: list[float], b: list[float]) -> float:
    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [order.index(v) + (order.count(v) - 1) / 2 for v in values]

    try:
        return statistics.correlation(ranks(a), ranks(b))
    except statistics.StatisticsError:  # fewer than two points, or all alike
        return math.nan


def quality(points: list[Point], variant: str, real: str, floor: float) -> dict[str, float]:
    """Return how well a curvature's predictions follow what was really measured."""
    pairs = [(p.predicted[variant], getattr(p, real)) for p in points]
    pairs = [(predicted, value) for predicted, value in pairs if math.isfinite(predicted + value)]
    logs = [math.log(value / predicted) for predicted, value in pairs if value >= floor and predicted > 0]
    return {
        "points": len(logs),
        "ratio": math.exp(statistics.fmean(logs)) if logs else math.nan,
        "spread": statistics.pstdev(logs) if len(logs) > 1 else math.nan,
        "rank": rank_correlation([p for p, _ in pairs], [v for _, v in pairs]),
    }


def summary(points: list[Point], variants: list[str], floor: float) -> list[dict[str, Any]]:
    """Return a row for every curvature, kind of path, and thing measured."""
    rows = []
    for variant, real in itertools.product(variants, ("loss", "divergence")):
        paths = {
            "all paths": points,
            "unpenalised": [p for p in points if p.penalised_by == NONE],
            "its own penalty": [p for p in points if p.penalised_by == variant],
        }
        for strength in sorted({p.strength for p in points if p.penalised_by == variant}):
            own = [p for p in points if (p.penalised_by, p.strength) == (variant, strength)]
            paths[f"its own penalty times {strength:g}"] = own
        for path, chosen in paths.items():
            rows.append({"curvature": variant, "real": real, "paths": path, **quality(chosen, variant, real, floor)})
    return rows


def table(results: dict[str, Any]) -> str:
    before = results["before"]
    lines = [f"Source network before: accuracy {before['accuracy']:.1f}%, loss {before['loss']:.3f}.", ""]
    lines += [
        "| curvature | real | paths | points | real / predicted | spread | rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["summary"]:
        numbers = f"{row['points']} | {row['ratio']:.3g} | {row['spread']:.2f} | {row['rank']:.2f}"
        lines.append(f"| {row['curvature']} | {row['real']} | {row['paths']} | {numbers} |")
    lines += ["", "What calibration says, without any target:", ""]
    lines += ["| curvature | scale | radius | seconds |", "|---|---|---|---|"]
    for name, one in results["calibration"].items():
        lines.append(f"| {name} | {one['scale']:.3g} | {one['radius']:.3g} | {one['seconds']:.1f} |")
    lines += ["", "The end of every path:", ""]
    lines += ["| target | penalty | times | source accuracy | source loss | target loss |", "|---|---|---|---|---|---|"]
    last = max(point["step"] for point in results["points"])
    for p in (point for point in results["points"] if point["step"] == last):
        numbers = f"{p['accuracy']:.1f} | {p['loss']:+.3f} | {p['target_loss']:.2f}"
        lines.append(f"| {p['target']} | {p['penalised_by']} | {p['strength']:g} | {numbers} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="of the source network, classifier included")
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--targets", type=Path, nargs="+", required=True)
    parser.add_argument("--output", type=Path, default=Path("results/prediction"))
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--stem", default="small", choices=["standard", "small"])
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--resize", default="squash", choices=["squash", "crop"])
    parser.add_argument(
        "--validation", type=float, default=0.1, help="share of the source's train part, as in training"
    )
    parser.add_argument("--curvature-from", default="validation", choices=["validation", "train"])
    parser.add_argument("--limit", type=int, help="read only so many training pictures of each tree (for a trial)")
    parser.add_argument("--cache", type=Path, help="folder of decoded pictures")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--curvature-batches", type=int, default=75)
    parser.add_argument("--draws", type=int, default=2, help="labels drawn for each batch of a curvature")
    parser.add_argument("--measured", type=int, help="measure on so many pictures of their half, all by default")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--points", type=int, default=5, help="of a path: its end, its half, its quarter, ...")
    parser.add_argument("--lr", type=float, default=0.02, help="at most; a penalty may bear less")
    parser.add_argument(
        "--bn-momentum", type=float, default=0.02, help="of running statistics while a target is learnt"
    )
    parser.add_argument("--damping", type=float, default=1e-4)
    parser.add_argument("--strengths", type=float, nargs="+", default=[1.0, 30.0])
    shared = [name for name, given in VARIANTS.items() if given["method"] != "own-bn"]
    parser.add_argument("--variants", nargs="+", default=shared, choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--floor", type=float, default=0.01, help="the least real rise that counts")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Experiment:
    """The source network, its data, and a memory with every curvature."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        read = {"pixels": options.pixels, "resize": options.resize, "limit": options.limit, "workers": options.workers}
        read["cache"] = options.cache
        from_train = options.curvature_from == "train"
        parts = ("train", "validation") if from_train else ("validation",)
        source = load_pictures(options.source, validation=options.validation, parts=parts, **read)
        trees = {path.stem: load_pictures(path, validation=0.0, parts=("train",), **read) for path in options.targets}
        self.source = options.source.stem
        tasks = {self.source: len(source.classes), **{name: len(tree.classes) for name, tree in trees.items()}}
        net = make_backbone(options.model, tasks, stem=options.stem, seed=options.seed)
        load_source(net, options.weights, self.source)
        self.net = net.to(DEVICE, memory_format=torch.channels_last)
        self.net.enter(self.source)
        augmentation = Augmentation(pixels=options.pixels)
        self.plain, flip = augmentation.plain, torch.Generator().manual_seed(options.seed)
        estimating, measuring = halves(source.validation.to(DEVICE), options.seed)
        own = {VARIANTS[name]["method"] == "own-bn" for name in options.variants}
        if len(own) > 1:
            raise SystemExit("curvatures with own BN are measured by themselves; list either these or others")
        measuring = Part(measuring.x[: options.measured], measuring.y[: options.measured])
        self.measure = Measure(self.net, self.source, measuring, self.plain, own_bn=own.pop())
        given = source.train.to(DEVICE) if from_train else estimating
        # One list of batches for all: every curvature sees the same ones.
        loader = Batches(given, options.batch, self.plain, options.seed)
        self.curvature_batches = list(itertools.islice(loader, options.curvature_batches))
        self.held_out = list(Batches(measuring, options.batch, self.plain, options.seed))

        def flipped(x: Tensor) -> Tensor:
            mirrored = torch.rand(len(x), 1, 1, 1, generator=flip).to(DEVICE) < 0.5
            return self.plain(torch.where(mirrored, x.flip(3), x))

        self.targets = {
            name: Batches(tree.train.to(DEVICE), options.batch, flipped, options.seed) for name, tree in trees.items()
        }
        self.memories: dict[str, xkfac.Memory] = {}

    def consolidate(self) -> None:
        """Make a memory with every curvature."""
        for name in self.options.variants:
            start = time.perf_counter()
            given = {"exclude": [HEADS], "draws": self.options.draws, "seed": self.options.seed, **VARIANTS[name]}
            self.memories[name] = xkfac.consolidate(self.net, self.curvature_batches, **given)
            print(f"{name}: {self.memories[name]}, {time.perf_counter() - start:.1f} s", flush=True)

    def paths(self) -> list[Point]:
        """Learn every target without a penalty and with every curvature's at every strength."""
        penalties = {name: Penalty(memory.curvature, memory.anchor) for name, memory in self.memories.items()}
        ways = [(NONE, 0.0), *itertools.product(self.memories, self.options.strengths)]
        points = []
        for (target, loader), (name, strength) in itertools.product(self.targets.items(), ways):
            memory = self.memories.get(name) or next(iter(self.memories.values()))
            net = copy.deepcopy(self.net)
            for step, loss in learn(net, target, loader, memory, strength, self.options):
                predicted = predictions(net, penalties, memory.units)
                points.append(Point(target, name, strength, step, *self.measure(net), loss, predicted))
            self.options.output.mkdir(parents=True, exist_ok=True)
            (self.options.output / "points.json").write_text(json.dumps([asdict(point) for point in points]))
            end = points[-1]
            print(
                f"{target}, {name} times {strength:g}: source {end.accuracy:.1f}%, loss {end.loss:+.3f}, "
                f"predicted {end.predicted.get(name, math.nan):.3f}",
                flush=True,
            )
        return points

    def calibrations(self) -> dict[str, dict[str, Any]]:
        """Return what calibration says for every curvature, from the held-out examples alone."""
        found: dict[str, dict[str, Any]] = {}
        for name, memory in self.memories.items():
            start = time.perf_counter()
            try:
                calibration = xkfac.calibrate(self.net, memory, self.held_out, seed=self.options.seed).calibration
            except xkfac.XkfacError as error:
                found[name] = {"error": str(error), "scale": math.nan, "radius": math.nan}
            else:
                assert calibration is not None
                found[name] = asdict(calibration)
            found[name]["seconds"] = time.perf_counter() - start
            print(f"{name}: {found[name]}", flush=True)
        return found


def main() -> None:
    options = arguments()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    record = {**provenance(), "options": {key: str(value) for key, value in vars(options).items()}}
    start = time.perf_counter()
    experiment = Experiment(options)
    _, _, accuracy = experiment.measure(experiment.net)
    before = {"accuracy": accuracy, "loss": experiment.measure.loss.item()}
    print(f"source network: accuracy {accuracy:.1f}%, loss {before['loss']:.3f}", flush=True)
    experiment.consolidate()
    points = experiment.paths()
    results = {
        "before": before,
        "summary": summary(points, options.variants, options.floor),
        "calibration": experiment.calibrations(),
        "points": [asdict(point) for point in points],
        "seconds": time.perf_counter() - start,
    }
    keep(options.output, record, results, table(results))


if __name__ == "__main__":
    main()
