"""Permuted MNIST at small size with Avalanche's own strategies and with this library's plugin.

    python benchmarks/avalanche_table.py --data FOLDER [--output results/avalanche] [--processes 2] [--minutes 10]

Needs the extras `avalanche` and `experiments`. Five experiences of 5,000 training images, permuted as Avalanche's
`PermutedMNIST` does (the same images, one `RandomState(seed)` for all permutations); 784-100-100-10 with BN; SGD with
momentum 0.9, batch 32, three epochs. The strength and the learning rate of each method are chosen on other training
images with a seed of its own; then five seeds run with them, and the average test accuracy over all experiences after
the last one is kept. Runs that are done are kept in `runs.jsonl`, so that a later call goes on from there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy
import torch
from common import keep, provenance
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import xkfac
from xkfac.experiments.data.digits import Part, load
from xkfac.experiments.packages import imported

imported("torchvision", "Avalanche")  # before Avalanche, since it also loads beside another build of torch

from avalanche.benchmarks import nc_benchmark  # noqa: E402
from avalanche.benchmarks.utils import _make_taskaware_classification_dataset as as_dataset  # noqa: E402
from avalanche.training.plugins import EWCPlugin, LwFPlugin, ReplayPlugin, SynapticIntelligencePlugin  # noqa: E402
from avalanche.training.supervised import Naive  # noqa: E402

from xkfac.integrations.avalanche import XKFACPlugin  # noqa: E402

IMAGES, VALIDATION, TASKS, BATCH, SEEDS, TUNING_SEED = 5000, 2000, 5, 32, range(5), 100
EPOCHS, RATES = 3, (0.01, 0.05)


class CopyingSI(SynapticIntelligencePlugin):
    """Avalanche's SI with copies of weights and gradients.

    Its own keeps views of them on a CPU, so that weights before and after a step are the same, all importances are
    zero, and the accuracies are those of Naive, bit by bit.
    """

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Keep the weights that the experience begins with."""
        super().before_training_exp(strategy, **kwargs)
        _copy(self.ewc_data[0])

    def before_training_iteration(self, strategy: Any, **kwargs: Any) -> None:
        """Keep the weights before a step."""
        super().before_training_iteration(strategy, **kwargs)
        _copy(self.syn_data["old_theta"])


def _copy(kept: dict[str, Any]) -> None:
    for one in kept.values():
        one.data = one.data.clone()


# With momentum, a step may go against the gradient; SI then has negative importances without a limit, and diverges.
SI = "SI, weights copied, without momentum"
# What each method is called, the strengths it is tried with, and the plugins for one of them.
METHODS: dict[str, tuple[list[Any], Callable[[Any], list[Any]]]] = {
    "Naive": ([None], lambda _: []),
    "EWC": ([1.0, 10.0, 100.0, 1000.0, 10000.0], lambda value: [EWCPlugin(value)]),
    SI: ([1.0, 10.0, 100.0, 1000.0, 10000.0], lambda value: [CopyingSI(value)]),
    "LwF": ([0.3, 1.0, 3.0, 10.0, 30.0], lambda value: [LwFPlugin(value, temperature=2)]),
    "Replay, 200 images": ([None], lambda _: [ReplayPlugin(mem_size=200)]),
    "Replay, 1,000 images": ([None], lambda _: [ReplayPlugin(mem_size=1000)]),
    "K-FAC, calibrated": ([None], lambda _: [XKFACPlugin(method="kfac")]),
    "XK-FAC, calibrated": ([None], lambda _: [XKFACPlugin(method="xkfac")]),
    "xkfac's default (fixed BN), calibrated": ([None], lambda _: [XKFACPlugin()]),
}


class Images(TensorDataset):
    """Images and labels of one experience, as Avalanche expects them."""

    @property
    def targets(self) -> list[int]:
        """The labels."""
        return self.tensors[1].tolist()


def network() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (784, 100):
        layers += [nn.Linear(inputs, 100, bias=False), nn.BatchNorm1d(100), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(100, 10))


def permuted(part: Part, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the images of each experience, scaled as Avalanche does, and their labels."""
    random = numpy.random.RandomState(seed)
    orders = [torch.from_numpy(random.permutation(784)) for _ in range(TASKS)]
    return [(((part.x - 0.1307) / 0.3081)[:, order], part.y) for order in orders]


def run(name: str, strength: Any, train: Part, test: Part, seed: int, lr: float) -> list[float]:
    """Return the test accuracy on each experience after the last one, in percent."""
    torch.manual_seed(seed)
    model = network()
    sets = [as_dataset(Images(*one)) for one in permuted(train, seed)]
    options = {"class_ids_from_zero_in_each_exp": True, "one_dataset_per_exp": True, "shuffle": False}
    stream = nc_benchmark(sets, sets, n_experiences=TASKS, task_labels=False, **options).train_stream
    momentum = 0.0 if name == SI else 0.9
    # Steps of one size in the long run, with momentum or without.
    optimizer = torch.optim.SGD(model.parameters(), 10 * lr * (1 - momentum), momentum=momentum)
    strategy = Naive(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=BATCH,
        train_epochs=EPOCHS,
        plugins=METHODS[name][1](strength),
        evaluator=None,
    )
    strategy.train(stream, drop_last=True)
    model.eval()
    with torch.no_grad():
        return [100 * (model(x).argmax(1) == y).float().mean().item() for x, y in permuted(test, seed)]


def parts(data: Part, seed: int) -> tuple[Part, Part]:
    """Return 5,000 training images of a seed, and others to choose by."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    chosen = order[:IMAGES], order[IMAGES : IMAGES + VALIDATION]
    own, others = (Part(data.x[index], data.y[index]) for index in chosen)
    return own, others


@functools.cache
def mnist(folder: Path) -> Any:
    return load("mnist", folder, validation=1)


def timed_run(folder: Path, until: float, key: list[Any]) -> dict[str, Any] | None:
    """Return the accuracies of one run, 0 where it diverged, with its CPU time; None after the moment `until`."""
    if time.monotonic() > until:
        return None
    name, strength, lr, seed = key
    data = mnist(folder)
    train, others = parts(data.train, seed)
    start = time.process_time()
    try:
        found = run(name, strength, train, others if seed == TUNING_SEED else data.test, seed, lr)
    except xkfac.NotFiniteError:
        found = [0.0] * TASKS
    return {"key": key, "accuracies": found, "cpu_s": time.process_time() - start}


class Runs:
    """The runs that are done, and the processes that do others of them."""

    def __init__(self, path: Path, folder: Path, minutes: float, processes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.processes = path, processes
        self.timed_run = functools.partial(timed_run, folder, time.monotonic() + 60 * minutes)
        lines = path.read_text().splitlines() if path.exists() else []
        self.done = {json.dumps(one["key"]): one for one in map(json.loads, lines)}

    def get(self, keys: Sequence[list[Any]]) -> list[float | None]:
        """Return the average accuracy of each run; None where there was no time for it."""
        missing = [key for key in keys if json.dumps(key) not in self.done]
        with multiprocessing.get_context("fork").Pool(self.processes) as pool, self.path.open("a") as file:
            for one in pool.imap_unordered(self.timed_run, missing):
                if one is not None:
                    self.done[json.dumps(one["key"])] = one
                    print(json.dumps(one), file=file, flush=True)
                    print(one["key"], f"{statistics.mean(one['accuracies']):.1f}", f"{one['cpu_s']:.0f} s", flush=True)
        found = [self.done.get(json.dumps(key)) for key in keys]
        return [None if one is None else statistics.mean(one["accuracies"]) for one in found]


def measured(runs: Runs) -> dict[str, Any]:
    """Return what was tried, what was chosen, and the accuracies with it, for each method that time was enough for."""
    grid = [
        [name, strength, lr, TUNING_SEED]
        for name, (strengths, _) in METHODS.items()
        for strength, lr in itertools.product(strengths, RATES)
    ]
    tuned = list(zip(runs.get(grid), grid, strict=True))
    chosen = {}
    for name in METHODS:
        tried = [(accuracy, strength, lr) for accuracy, (of, strength, lr, _) in tuned if of == name]
        if all(accuracy is not None for accuracy, *_ in tried):
            chosen[name] = tried, *max(tried, key=lambda one: one[0] or 0.0)[1:]
    keys = [[name, strength, lr, seed] for name, (_, strength, lr) in chosen.items() for seed in SEEDS]
    found = iter(runs.get(keys))
    results = {
        name: {"tried": tried, "strength": strength, "lr": lr, "accuracies": list(itertools.islice(found, len(SEEDS)))}
        for name, (tried, strength, lr) in chosen.items()
    }
    return {name: one for name, one in results.items() if None not in one["accuracies"]}


def table(results: dict[str, Any]) -> str:
    lines = ["| method | average accuracy | strength | lr |", "|---|---|---|---|"]
    for name, one in sorted(results.items(), key=lambda item: -statistics.mean(item[1]["accuracies"])):
        strengths = METHODS[name][0]
        chosen = "-" if len(strengths) == 1 else f"{one['strength']:g} of {', '.join(f'{s:g}' for s in strengths)}"
        mean, deviation = statistics.mean(one["accuracies"]), statistics.stdev(one["accuracies"])
        lines.append(f"| {name} | {mean:.1f} ± {deviation:.1f} | {chosen} | {one['lr']:g} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of MNIST")
    parser.add_argument("--output", type=Path, default=Path("results/avalanche"))
    parser.add_argument("--processes", type=int, default=1, help="how many runs there are at a time")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after so many minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="avalanche")
    record = {
        **provenance(),
        "avalanche-lib": metadata.version("avalanche-lib"),
        "seeds": list(SEEDS),
        "tuning_seed": TUNING_SEED,
    }
    results = measured(Runs(options.output / "runs.jsonl", options.data, options.minutes, options.processes))
    keep(options.output, record, results, table(results))
    missing = [name for name in METHODS if name not in results]
    if missing:
        raise SystemExit(f"runs of {', '.join(missing)} are still to be done; run this again")


if __name__ == "__main__":
    main()
