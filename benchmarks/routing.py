"""How well the task of an image is inferred, by `xkfac.Router`, and what it costs.

    python benchmarks/routing.py photographs --data FOLDER --weights resnet18.safetensors [--model resnet18]
    python benchmarks/routing.py permuted --data FOLDER [--tasks 50]
    python benchmarks/routing.py cost --data FOLDER [--device cuda]

`photographs`: a network that knows ImageNet, on ImageNet, CUB, Cars and Flowers at 128 pixels. Heads of targets are
nearest class means, so that accuracies with tasks given and inferred can be compared. Beside the routers stand
classifiers over the classes of all tasks, on features of the source network. Also: accuracy on ImageNet by the size of
the batch that BN's statistics are taken from, with stored statistics of Cars.
FOLDER holds the zips; `train` images fit, `test` images measure; weights must fit images of 128 pixels.
`permuted`: permutations of MNIST, features of an untrained perceptron. `cost`: time of a router's answer over that of
its network, for batches of one task and of two, among 2 and 50 tasks.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from certainty import certainty, certainty_table, percent
from common import keep, provenance
from torch import Tensor, nn

import xkfac
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import Part, Parts, load, permutation
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.networks.weights import load_source
from xkfac.experiments.runs.task_inference import assigned
from xkfac.model.passes import norms_of
from xkfac.routing.router import STATISTICS, By

TREES = {"imagenet": "imagenet1000-128", "birds": "cub200-128", "cars": "cars196-128", "flowers": "flowers102-128"}
Batches = list[tuple[Tensor, Tensor]]
BATCH = 32
BN_BATCHES = 40  # that BN's statistics, and accuracies with them, are of


def numbers_per_task(router: xkfac.Router) -> int:
    kept = [
        tensor for name in STATISTICS if not name.endswith("unit") and (tensor := getattr(router, name)) is not None
    ]
    return sum(tensor[0].numel() for tensor in kept)


def load_images(options: argparse.Namespace) -> dict[str, Parts]:
    return {task: load_pictures(options.data / f"{tree}.zip", pixels=128, resize="squash", validation=0.0)
            for task, tree in TREES.items()}  # fmt: skip


def some(pictures: Part, count: int, device: str, size: int = BATCH) -> Batches:
    """Return `count` images, drawn by a fixed seed, as batches of inputs and labels."""
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))[:count]
    plain = Augmentation(128).plain
    return [(plain(pictures.x[one].to(device)), pictures.y[one].to(device)) for one in order.split(size)]


def source_network(options: argparse.Namespace, parts: dict[str, Parts]) -> ManyHeaded:
    net = make_backbone(options.model, {task: len(of.classes) for task, of in parts.items()}, seed=0)
    load_source(net, options.weights, "imagenet")
    return net.to(options.device, memory_format=torch.channels_last).eval()


@torch.no_grad()
def estimate_statistics(net: nn.Module, batches: Batches) -> None:
    """Put the mean of the batches' statistics in every BN layer."""
    running = list(norms_of(net).values())
    before = [norm.momentum for norm in running]
    for norm in running:
        norm.reset_running_stats()
        norm.momentum, norm.training = None, True  # a plain mean over batches
    for x, _ in batches:
        net(x)
    for norm, momentum in zip(running, before, strict=True):
        norm.momentum, norm.training = momentum, False


@torch.no_grad()
def features_of(net: ManyHeaded, batches: Batches) -> tuple[Tensor, Tensor]:
    return torch.cat([net.trunk(x) for x, _ in batches]), torch.cat([y for _, y in batches])


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean [classes, F] of the features of each class; zero for one without images."""
    sums = torch.zeros(classes, features.shape[1]).to(features).index_add_(0, labels, features)
    return sums / labels.bincount(minlength=classes).clamp(min=1)[:, None]


@torch.no_grad()
def nearest_mean_head(head: nn.Linear, features: Tensor, labels: Tensor) -> None:
    """Make a head answer the class whose mean is nearest; classes without images never."""
    means = class_means(features, labels, head.out_features)
    missing = labels.bincount(minlength=head.out_features) == 0
    head.weight.copy_(2 * means)
    head.bias.copy_(-means.square().sum(1) - 1e9 * missing)


def photographs(options: argparse.Namespace) -> tuple[Any, str]:
    """Return what routers make of four sets of photographs, and a table."""
    parts = load_images(options)
    train = {task: some(of.train, options.images, options.device) for task, of in parts.items()}
    test = {task: some(of.test, options.tests, options.device) for task, of in parts.items()}
    net = source_network(options, parts)
    source = {task: (features_of(net, train[task]), features_of(net, test[task])) for task in TREES}
    rows = over_all_classes(source, net.tasks)
    for task in list(TREES)[1:]:
        nearest_mean_head(net.head(task), *source[task][0])
    routers = routers_of(net, train)
    scores: dict[str, list[Tensor]] = {by: [] for by in routers}
    for place, task in enumerate(TREES):
        features, labels = source[task][1]
        with torch.no_grad():
            right = net.head(task)(features).argmax(1) == labels
        for by, router in routers.items():
            scores[by].append(torch.cat([router.scores(x) for x, _ in test[task]]))
            row = {"given": percent(right), **assigned(router, place, scores[by][-1], right)}
            rows.setdefault(f"router, {by}", {})[task] = row
    sizes = by_batch_size(net, train["cars"][:BN_BATCHES], test["imagenet"][:BN_BATCHES])
    found = {"routing": rows, "numbers": {by: numbers_per_task(router) for by, router in routers.items()}}
    sure = {f"router, {by}": certainty(router, scores[by]) for by, router in routers.items()}
    tables = [photograph_table(rows, sizes), certainty_table(sure, list(TREES))]
    return found | {"certainty": sure, "batch statistics": sizes}, "\n\n".join(tables)


def routers_of(net: ManyHeaded, train: dict[str, Batches]) -> dict[By, xkfac.Router]:
    """Return routers that know all tasks. Where nothing is learnt, "last" has the features of "source"."""
    routers: dict[By, xkfac.Router] = {by: xkfac.Router(net, by, using=ManyHeaded.using) for by in ("source", "early")}
    for router in routers.values():
        for task in TREES:
            router.add_task(task, train[task])
    return routers


@torch.no_grad()
def over_all_classes(source: dict[str, Any], classes: dict[str, int]) -> dict[str, Any]:
    """Return what one classifier of the classes of all tasks makes of test images, on features of the source network.

    By the nearest class mean, and by the nearest in units of the covariance within classes, which is shared, with a
    mean variance added to its diagonal.
    """
    means, owners, centred = [], [], []
    for place, (task, ((features, labels), _)) in enumerate(source.items()):
        seen = labels.unique()
        of_task = class_means(features, labels, classes[task])
        means.append(of_task[seen])
        owners += [(place, label) for label in seen.tolist()]
        centred.append((features - of_task[labels]).double())
    covariance = sum(one.T @ one / len(one) for one in centred) / len(centred)
    covariance += covariance.diagonal().mean() * torch.eye(len(covariance)).to(covariance)
    whiten = torch.linalg.inv(torch.linalg.cholesky(covariance)).T.float()
    centres, owner, rows = torch.cat(means), torch.tensor(owners), {}
    for name, unit in (("nearest class mean", torch.eye(len(whiten)).to(whiten)), ("the same, whitened", whiten)):
        rows[f"{name}, all classes"] = found = {}
        for place, (task, (_, (features, labels))) in enumerate(source.items()):
            nearest = owner[torch.cdist(features @ unit, centres @ unit).argmin(1).cpu()]
            right = (nearest[:, 0] == place) & (nearest[:, 1] == labels.cpu())
            found[task] = {"taken": shares(nearest[:, 0], len(source)), "inferred": percent(right)}
    return rows


def shares(tasks: Tensor, count: int) -> list[float]:
    return [percent(tasks == task) for task in range(count)]


@torch.no_grad()
def by_batch_size(net: ManyHeaded, other: Batches, batches: Batches) -> dict[str, float]:
    """Return the accuracy on ImageNet, gamma and beta its own, by the statistics that BN uses."""
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    def accuracy(size: int, window: int | None = None) -> float:
        with net.using("imagenet"), xkfac.batch_statistics(net, window) if window else contextlib.nullcontext():
            return percent(torch.cat([net(one).argmax(1) for one in x.split(size)]) == y)

    found = {"its own": accuracy(BATCH)}
    estimate_statistics(net, other)
    found["those of cars"] = accuracy(BATCH)
    found |= {f"the batch of {size}": accuracy(size, 1) for size in (1, 4, 8, 16, 32, 64, 128)}
    return found | {f"a window of 64, batches of {size}": accuracy(size, 64) for size in (1, 8)}


def photograph_table(rows: dict[str, Any], statistics_of: dict[str, float]) -> str:
    names = list(TREES)
    lines = [routing_table(rows), "", "| images of | " + " | ".join(f"taken for {task}" for task in names) + " |"]
    lines.append("|---" * (len(names) + 1) + "|")
    for name, row in rows.items():
        lines += [
            f"| {name}: {task} | " + " | ".join(f"{one:.1f}" for one in row[task]["taken"]) + " |" for task in names
        ]
    lines += ["", "| BN statistics | accuracy on ImageNet |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value:.1f} |" for name, value in statistics_of.items())])


def routing_table(rows: dict[str, Any]) -> str:
    """Return a table of the share of images taken for those of their task, and of accuracies."""
    names = list(TREES)
    lines = [
        "| | "
        + " | ".join(f"{task}: right, 32 together" for task in names)
        + " | task given | mean | inferred | mean |"
    ]
    lines.append("|---" * (len(names) + 5) + "|")
    for name, row in rows.items():
        cells = [
            ", ".join(f"{row[task][key][place]:.1f}" for key in ("taken", "together") if key in row[task])
            for place, task in enumerate(names)
        ]
        for key in ("given", "inferred"):
            values = [row[task][key] for task in names if key in row[task]]
            cells += [", ".join(f"{one:.1f}" for one in values), f"{statistics.fmean(values):.1f}" if values else ""]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def permuted(options: argparse.Namespace) -> tuple[Any, str]:
    """Return how many images of permuted MNIST are taken for those of another permutation, and a table."""
    parts = load("mnist", options.data / "mnist", validation=5000)
    orders = [permutation(784, 0, task) for task in range(options.tasks)]
    router = xkfac.Router(many_perceptrons(options.tasks))
    images, test = parts.train.x[: options.images], parts.test.x[: options.tests]
    for task, order in enumerate(orders):
        router.add_task(f"{task}", images[:, order].split(1000))
    wrong = 0
    for task, order in enumerate(orders):
        wrong += sum(int((router(x).tasks != task).sum()) for x in test[:, order].split(500))
    found = {"tasks": options.tasks, "images": len(test) * options.tasks, "wrong": wrong}
    found["numbers"] = numbers_per_task(router)
    return found, "\n".join(
        ["| " + " | ".join(found) + " |", "|---" * 4 + "|", "| " + " | ".join(map(str, found.values())) + " |"]
    )


def many_perceptrons(tasks: int) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(784, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip
    xkfac.give_task_norms(net, [str(task) for task in range(tasks)])
    return net.eval()


def times_plain(runs: list[Callable[[], object]], device: str, turns: int) -> list[float]:
    """Return the time of each run over that of the first, the least of some turns in which they alternate.

    On the CPU it is the time of the process, which other processes do not change much.
    """
    clock = time.process_time if device == "cpu" else time.perf_counter
    least = [math.inf] * len(runs)
    for _ in range(turns):
        for place, run in enumerate(runs):
            if device != "cpu":
                torch.cuda.synchronize()
            start = clock()
            run()
            if device != "cpu":
                torch.cuda.synchronize()
            least[place] = min(least[place], clock() - start)
    return [one / least[0] for one in least[1:]]


@torch.no_grad()
def cost(options: argparse.Namespace) -> tuple[Any, str]:
    """Return the time of a router's answer over that of its network, and a table."""
    found = {}
    for name, count, net, shape, using in cost_cases(options):
        tasks = [str(task) for task in range(count)]
        x = torch.randn(options.batch, *shape, device=options.device)
        mixed = x.clone()
        mixed[::2] += 0.3 * (count - 1)
        for by in ("early", "last", "source"):
            router = xkfac.Router(net, by, using=using)
            for task in (tasks[0], tasks[-1]):
                router.add_task(task, [x[:8] + 0.3 * int(task)])
            repeat_first(router, tasks)
            last = x + 0.3 * (count - 1)
            runs = [lambda f=f, z=z: f(z) for f, z in ((net, x), (router, x), (router, last), (router, mixed))]
            ratios = times_plain(runs, options.device, options.turns)
            found[f"{name}, {by}"] = dict(zip(("first task", "last task", "two in a batch"), ratios, strict=True))
            print(f"{name}, {by}: {ratios}", flush=True)
    lines = [f"| batches of {options.batch} | of the first task | of the last | of both |", "|---|---|---|---|"]
    lines += [f"| {name} | " + " | ".join(f"{one:.2f}" for one in row.values()) + " |" for name, row in found.items()]
    return found, "\n".join(lines)


def repeat_first(router: xkfac.Router, tasks: list[str]) -> None:
    """Give a router that knows the first and the last of some tasks those between, with the statistics of the first."""
    place = torch.tensor([0] * (len(tasks) - 1) + [1])
    for name in STATISTICS:
        if not name.endswith("unit") and (kept := getattr(router, name)) is not None:
            setattr(router, name, kept[place.to(kept.device)])
    router.tasks = tasks


def cost_cases(options: argparse.Namespace) -> list[tuple[str, int, nn.Module, tuple[int, ...], Any]]:
    """Return networks with task-specific layers: name, number of tasks, network, shape of inputs, and `using`."""
    cases: list[tuple[str, int, nn.Module, tuple[int, ...], Any]] = []
    for count in (2, 50):
        net = make_backbone(options.model, {str(task): 100 for task in range(count)}, seed=0)
        net.give_layers()
        net.to(options.device, memory_format=torch.channels_last).eval()
        cases.append((f"{options.model}, {count} tasks", count, net, (3, 128, 128), ManyHeaded.using))
    return [*cases, ("perceptron, 50 tasks", 50, many_perceptrons(50).to(options.device), (784,), xkfac.using_task)]


def main() -> None:
    """Measure, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["photographs", "permuted", "cost"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=3000, help="training images per task")
    parser.add_argument("--tests", type=int, default=10_000, help="test images per task, at most")
    parser.add_argument("--tasks", type=int, default=50)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("results/routing"))
    options = parser.parse_args()
    record = provenance()
    run = {"photographs": photographs, "permuted": permuted, "cost": cost}[options.part]
    found, text = run(options)
    keep(options.output / options.part, record, found, text)


if __name__ == "__main__":
    main()
