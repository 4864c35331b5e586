"""One head, two image sets of ten classes each, task-specific BN: what inferring the task of each test image costs.

    python benchmarks/one_head_routing.py --data FOLDER --pairs flowers:0/cars:0 ... [--output results/routing/one-head]

Pairs and training are those of `one_head.py`: XK-FAC, implicit steps. All images of the classes, of either part of a
data set, are split into as many folds as there are seeds; each seed tests on one fold and learns from the others, so
that every image is a test image once. At most --train images of a set are learnt from, by the router too, and at most
--test of a fold are tested. Beside accuracies with tasks given stands what is lost where they are inferred, with the
standard error of this difference over images. Routers by early features, by last ones ("last" ages while the second
task is learnt), and by those of the source network.

The second table says what is lost where the images come in batches of one task, which is inferred for all of a batch
together. The third says how often the likeliest task of an image is right by its probability, over all pairs. The last
says how many images are unknown; `other` are of no task: of MNIST, or of Flowers for pairs with MNIST. Results are
written after every run.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from certainty import FROM, UNKNOWN, groups, percent
from common import keep, provenance
from one_head import ARCHIVES, BATCH, LR, PAIRS, Examples, batches, consolidated, digits, learn, network, pictures
from torch import Tensor, nn

import xkfac
from xkfac.routing.router import By
from xkfac.task_layers import task_layers_of

KINDS: tuple[By, ...] = ("early", "last", "source")
TASKS = ("old", "new")
PIXELS = 32
TOGETHER = (4, 8, 16, 32)  # images in a batch of one task


@dataclass(frozen=True)
class Case:
    """A pair of sets, and the fold that is tested."""

    folder: Path
    pair: str
    seed: int
    folds: int
    epochs: int
    strength: float
    train: int
    test: int

    def images_of(self, name: str) -> tuple[Examples, Examples]:
        """Return training and test images of a set."""
        if name == "mnist":
            parts = digits(self.folder / "mnist", 6000, PIXELS)
        else:
            archive, group = name.split(":")
            classes = range(10 * int(group), 10 * int(group) + 10)
            parts = pictures(self.folder / f"{ARCHIVES[archive]}.zip", classes, PIXELS)
        x, y = torch.cat([parts[0][0], parts[1][0]]), torch.cat([parts[0][1], parts[1][1]])
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        tested = torch.arange(len(y)) % self.folds == self.seed
        train, test = order[~tested][: self.train], order[tested][: self.test]
        return (x[train], y[train]), (x[test], y[test])


def learnt(case: Case, old: Examples, new: Examples) -> tuple[nn.Module, nn.Module]:
    """Return a network with task-specific BN before and after it learns the second task."""
    torch.manual_seed(case.seed)
    source = network()
    held = len(old[1]) // 5
    learn(source, (old[0][held:], old[1][held:]), 2 * case.epochs, 0.1, case.seed, None)
    aside = old[0][:held], old[1][:held]
    memory = consolidated(source, list(batches(aside, case.seed, min(BATCH, held)))[:60], "xkfac", "own", case.seed)
    net = copy.deepcopy(source)
    learner = xkfac.Learner(net, memory, strength=case.strength)
    learn(net, new, case.epochs, LR, case.seed + 50, learner, True)
    learner.close()
    for one in (source, net):
        xkfac.give_task_norms(one.eval(), ["old", "new"])
    for path, layer in task_layers_of(net).items():
        layer.of["old"].load_state_dict(source.get_submodule(path).of["old"].state_dict())  # type: ignore[union-attr, index]
    return source, net


def router_of(by: By, before: nn.Module, after: nn.Module, sets: list[Examples]) -> xkfac.Router:
    """Return a router that meets the old task before the new one is learnt, and the new one afterwards."""
    router = xkfac.Router(before, by)
    for task, model, (x, y) in zip(("old", "new"), (before, after), sets, strict=True):
        router.model = model
        router.add_task(task, zip(x.split(250), y.split(250), strict=True))
    return router


def run(case: Case) -> dict[str, Any]:
    """Return what one fold of a pair gives, by kind of features and task."""
    torch.set_num_threads(1)
    names = PAIRS.get(case.pair, case.pair).split("/")
    (old, old_test), (new, new_test) = map(case.images_of, names)
    before, after = learnt(case, old, new)
    foreign = case.images_of("flowers:0" if "mnist" in names else "mnist")[1][0]
    found: dict[str, Any] = {"pair": case.pair, "seed": case.seed, "train": [len(old[1]), len(new[1])]}
    for by in KINDS:
        router = router_of(by, before, after, [old, new])
        of = [of_task(router, place, *test) for place, test in enumerate((old_test, new_test))]
        unknown = {f"{level:g}": percent(router(foreign, unknown=level).tasks < 0) for level in UNKNOWN}
        found[by] = {"old": of[0], "new": of[1], "other unknown": unknown}
    print(f"{case.pair}, fold {case.seed}: {table([found]).splitlines()[2]}", flush=True)
    return found


@torch.no_grad()
def of_task(router: xkfac.Router, place: int, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Return numbers of images of a task.

    given: right with the task given; lost, squared: the sum over images of what inferring the task takes from this, and
    of its square; task: those whose task is right; groups: by probability; unknown: by level.
    """
    given = (router(x, task=router.tasks[place]).outputs.argmax(1) == y).int()
    answer = router(x)
    lost, right = given - (answer.outputs.argmax(1) == y).int(), answer.tasks == place
    return {
        "images": len(y),
        "given": int(given.sum()),
        "lost": int(lost.sum()),
        "squared": int(lost.square().sum()),
        "task": int(right.sum()),
        "together": {f"{size}": _lost_together(router, x, y, given, size) for size in TOGETHER},
        "groups": groups(answer.probabilities.max(1).values, right, torch.ones(len(y))),
        "unknown": {f"{level:g}": int((router(x, unknown=level).tasks < 0).sum()) for level in UNKNOWN},
    }


def _lost_together(router: xkfac.Router, x: Tensor, y: Tensor, given: Tensor, size: int) -> int:
    outputs = torch.cat([router(batch, together=True).outputs for batch in x.split(size)])
    return int((given - (outputs.argmax(1) == y).int()).sum())


def share(runs: list[dict[str, Any]], by: str, task: str, key: str) -> float:
    """Return the percentage of images of a task, over runs."""
    return 100 * sum(one[by][task][key] for one in runs) / sum(one[by][task]["images"] for one in runs)


def error(runs: list[dict[str, Any]], by: str, task: str, key: str) -> float:
    """Return the standard error of this percentage, from how much images differ."""
    images = sum(one[by][task]["images"] for one in runs)
    mean, squared = (share(runs, by, task, one) / 100 for one in (key, "squared" if key == "lost" else key))
    return 100 * math.sqrt((squared - mean**2) / images)


def table(runs: list[dict[str, Any]]) -> str:
    """Return what is lost by pair and kind of features, old task / new task, and how sure routers may be."""
    names = ["pair", "folds", "test images", "task given", *(f"lost, {by}" for by in KINDS)]
    names += [f"task right, {by}" for by in KINDS]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    pairs = list(dict.fromkeys(one["pair"] for one in runs))
    for pair in pairs:
        of = [one for one in runs if one["pair"] == pair]
        shown = [("early", "given"), *((by, "lost") for by in KINDS)]
        cells = [pair, str(len(of)), " / ".join(str(sum(one["early"][task]["images"] for one in of)) for task in TASKS)]
        for by, key in shown:
            numbers = (f"{share(of, by, task, key):.1f} ± {error(of, by, task, key):.1f}" for task in TASKS)
            cells.append(" / ".join(numbers))
        cells += [" / ".join(f"{share(of, by, task, 'task'):.1f}" for task in TASKS) for by in KINDS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n\n".join(
        ["\n".join(lines), together_table(runs, pairs), probability_table(runs), unknown_table(runs, pairs)]
    )


def together_table(runs: list[dict[str, Any]], pairs: list[str]) -> str:
    kinds = [by for by in KINDS if by != "last"]
    names = ["lost by batches of one task", *(f"{by}, {size} images" for by in kinds for size in (1, *TOGETHER))]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for pair in pairs:
        of, cells = [one for one in runs if one["pair"] == pair], []
        for by in kinds:
            images = {task: sum(one[by][task]["images"] for one in of) for task in TASKS}
            for size in (1, *TOGETHER):
                lost = (
                    sum(one[by][task]["lost"] if size == 1 else one[by][task]["together"][f"{size}"] for one in of)
                    for task in TASKS
                )
                cells.append(
                    " / ".join(f"{100 * number / images[task]:.1f}" for task, number in zip(TASKS, lost, strict=True))
                )
        lines.append("| " + " | ".join([pair, *cells]) + " |")
    return "\n".join(lines)


def probability_table(runs: list[dict[str, Any]]) -> str:
    lines = ["| probability | " + " | ".join(f"{by}: images, mean, right" for by in KINDS) + " |", "|---|---|---|---|"]
    for place, low in enumerate(FROM[:-1]):
        cells = []
        for by in KINDS:
            of = [one[by][task]["groups"][place] for one in runs for task in TASKS]
            images = sum(one["images"] for one in of)
            means = (sum(one["images"] * one[key] for one in of) / max(images, 1) for key in ("sure", "right"))
            cells.append(f"{images}, " + ", ".join(f"{mean:.1f}" for mean in means))
        lines.append(f"| from {low:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def unknown_table(runs: list[dict[str, Any]], pairs: list[str]) -> str:
    columns = [(by, f"{level:g}") for by in KINDS for level in UNKNOWN]
    lines = ["| unknown: old, new, other | " + " | ".join(f"{by}, unknown={level}" for by, level in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for pair in pairs:
        of, cells = [one for one in runs if one["pair"] == pair], []
        for by, level in columns:
            images = {task: sum(one[by][task]["images"] for one in of) for task in TASKS}
            shares = [100 * sum(one[by][task]["unknown"][level] for one in of) / images[task] for task in TASKS]
            shares.append(statistics.fmean(one[by]["other unknown"][level] for one in of))
            cells.append(", ".join(f"{value:.1f}" for value in shares))
        lines.append(f"| {pair} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, default=3, help="folds, each with a network of its own")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--strength", type=float, default=300.0)
    parser.add_argument("--train", type=int, default=1000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("results/routing/one-head"))
    options = parser.parse_args()
    record, runs = provenance(), list[dict[str, Any]]()
    how = (options.epochs, options.strength, options.train, options.test)
    cases = [
        Case(options.data, pair, seed, options.seeds, *how) for pair in options.pairs for seed in range(options.seeds)
    ]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for found in pool.map(run, cases):
            runs.append(found)
            keep(options.output, record, runs, table(runs), show=False)
    print(table(runs))


if __name__ == "__main__":
    main()
