r"""What sets learning in sequence with a quadratic penalty apart from joint training, one approximation at a time.

    python benchmarks/gap.py --data FOLDER --device cuda [--pool 2] [--rows ...] [--strengths ...] [--output FOLDER]
    python benchmarks/gap.py --data FOLDER --device cuda --best --seeds 0 1      (the same options beside these)
    python benchmarks/gap.py --table                                             (writes table.md from the record)

Tasks of permuted MNIST are learnt one after the other by a perceptron without BN, everything shared, one head. (--bn:
with BN in the first task, which is then frozen and folded into the weights.) The rows differ in what stands for the
loss of past tasks, and in nothing else:

    kron-average    K-FAC of each layer, tasks averaged as the library does
    ...-plain       without the shorter steps along stiff directions, as the library
    kron-kept       the same, every task's factors kept
    kron-cross      kron-average with blocks between layers
    block           the exact Fisher of each layer, summed over tasks
    full            the exact Fisher of all parameters, summed over tasks
    ...-own         every task's quadratic around the weights that it was learnt to; else all are around the latest
                    weights
    replay          the real loss of past tasks, on as many of their images as of the new task's in each step
    joint           all tasks at once, as many steps in all
    ...-long        three times as many epochs

The objective is (L_t + strength * sum of quadratics + damping) / (number of tasks). SGD, momentum 0.9, cosine. Along
the directions of largest curvature the gradient is divided by 1 + lr * curvature / 2, which keeps every strength stable
and moves no minimum. The learning rate is at most half of what is stable along all others.

Strengths are chosen on seed 1000, by validation images of all tasks; other seeds run with these (--best), and their
test images count. A run that is in the record is not run again. --jobs: runs side by side, each a process; use NVIDIA's
multi-process service for several on one GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import provenance
from gap_fisher import Dense, KroneckerSum, Shape, Stiff, TaskFisher, forward, largest, loss_gradient, stable_limit
from torch import Tensor, nn

from xkfac.experiments.data.digits import Part, batches, load, permutation, stream
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.recipes.recipe import Line
from xkfac.experiments.runs.training import Stepper, make_optimizer, pool

DEVELOPMENT, MOMENTUM, DAMPING = 1000, 0.9, 1e-4
SHORTEST = 2.0  # learning rate times curvature that steps along stiff directions do not exceed
ROWS = {
    "kron-average-plain": "Kronecker factors, tasks averaged, plain steps (the library)",
    "kron-average": "the same, steps shortened along stiff directions, as in all rows below",
    "kron-cross": "the same with blocks between layers",
    "kron-kept": "Kronecker factors of every task kept",
    "kron-kept-own": "the same, each task around its own weights",
    "block": "exact Fisher of each layer",
    "full": "exact Fisher of all parameters",
    "full-own": "the same, each task around its own weights",
    "full-long": "exact Fisher of all parameters, 3x steps",
    "full-own-long": "the same, each task around its own weights, 3x steps",
    "replay": "real loss of past tasks in place of a quadratic",
    "replay-long": "real loss of past tasks, 3x steps",
    "joint": "joint training",
    "joint-long": "joint training, 3x steps",
}
WITHOUT_PENALTY = ("replay", "joint")
# What a step of the table's sum is called, from one row to the next.
STEPS = [
    ("optimisation (steps that are stable)", "kron-average-plain", "kron-average"),
    ("averaging over tasks", "kron-average", "kron-kept"),
    ("Kronecker factors", "kron-kept", "block"),
    ("blocks (no terms between layers)", "block", "full"),
    ("one anchor for all tasks", "full", "full-own"),
    ("optimisation (3x steps)", "full-own", "full-own-long"),
    ("the quadratic itself", "full-own-long", "replay-long"),
    ("learning in sequence, with the real losses", "replay-long", "joint-long"),
]


@dataclass(frozen=True)
class Job:
    """A row with a seed and a strength, and all settings that its numbers depend on."""

    row: str
    seed: int
    strength: float
    pool: int
    hidden: int
    tasks: int
    examples: int
    epochs: int
    batch: int
    lr: float
    bn: bool
    fisher_rows: int
    every: int
    rank: int

    @property
    def kind(self) -> str:
        """The row without its suffixes."""
        return self.row.removesuffix("-plain").removesuffix("-long").removesuffix("-own")

    @property
    def all_epochs(self) -> int:
        """The epochs of a task."""
        return self.epochs * (3 if self.row.endswith("-long") else 1)


@functools.cache
def data(folder: Path, device: str, pooled: int, examples: int) -> dict[str, Part]:
    """Return MNIST on a device, every `pooled` x `pooled` pixels averaged to one."""
    parts = load("mnist", folder, validation=5000, train=examples or None)
    found = {}
    for name, part in (("train", parts.train), ("validation", parts.validation), ("test", parts.test)):
        x = F.avg_pool2d(part.x.view(-1, 1, 28, 28), pooled).flatten(1) if pooled > 1 else part.x
        found[name] = Part(x, part.y).to(device)
    return found


def folded(net: nn.Sequential) -> Tensor:
    """Return the flat vector of a perceptron, its BN with population statistics folded into the layers before it."""
    layers: list[Tensor] = []
    for module in net:
        if isinstance(module, nn.Linear):
            layers.append(torch.cat([module.weight, module.bias[:, None]], 1))
        elif isinstance(module, nn.BatchNorm1d):
            assert module.running_mean is not None
            assert module.running_var is not None
            scale = module.weight / (module.running_var + module.eps).sqrt()
            layers[-1] = layers[-1] * scale[:, None]
            layers[-1][:, -1] += module.bias - scale * module.running_mean
    return torch.cat([layer.flatten() for layer in layers]).detach()


class Sequence:
    """Learns the tasks of a job."""

    def __init__(self, job: Job, parts: dict[str, Part]) -> None:
        self.job, self.parts = job, parts
        self.device = parts["train"].x.device
        features = parts["train"].x.shape[1]
        self.shape = Shape((features, job.hidden, job.hidden, 10))
        self.permutations = torch.stack([permutation(features, job.seed, t) for t in range(job.tasks)]).to(self.device)
        line = Line(widths=(job.hidden, job.hidden), norm="bn" if job.bn else "none")
        self.start = perceptron(features, 10, line, job.seed).to(self.device)
        self.flat = folded(self.start)
        self.anchor, self.linear, self.grad, self.past, self.buffer = torch.zeros(5, self.shape.count).to(self.flat)
        self.known = 0
        self.penalty: KroneckerSum | Dense | None = None
        if job.kind not in WITHOUT_PENALTY:
            self.penalty = self._penalty()
        rank = min(job.rank, self.shape.count)
        self.stiff = Stiff(torch.randn(self.shape.count, rank, generator=stream("directions")).to(self.flat))
        self.vector = torch.randn(self.shape.count, generator=stream("direction")).to(self.flat)
        self.seconds = {"learning": 0.0, "fisher": 0.0, "measuring": 0.0}
        self.stiffness: list[list[float]] = []

    def _penalty(self) -> KroneckerSum | Dense:
        if self.job.kind.startswith("kron"):
            return KroneckerSum(self.shape, keep=self.job.kind == "kron-kept", cross=self.job.kind == "kron-cross")
        return Dense(self.shape, self.flat, blocks=self.job.kind == "block", rows=self.job.fisher_rows)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the training examples `index` [n], counted through all tasks."""
        part = self.parts["train"]
        task, example = index // len(part), index % len(part)
        x = part.x.index_select(0, example).gather(1, self.permutations.index_select(0, task))
        return x, part.y.index_select(0, example)

    def _step(self, index: Tensor, past: Tensor | None, lr: Tensor, *, first: bool) -> None:
        """Take one step on a batch, and on one of past tasks where there is."""
        layers = self.shape.layers(self.flat)
        loss_gradient(layers, *self.take(index), self.shape.layers(self.grad))
        if past is not None:
            loss_gradient(layers, *self.take(past), self.shape.layers(self.past))
            self.grad.add_(self.past, alpha=self.known).mul_(1 / (self.known + 1))
        elif self.penalty is not None and self.known:
            scale = self.job.strength / (self.known + 1)
            self.grad.mul_(1 / (self.known + 1)).add_(self.pull(first=first), alpha=scale)
            if not self.job.row.endswith("-plain"):
                self.grad.copy_(self.stiff.damped(self.grad, lr * (scale / SHORTEST)))
        self.buffer.mul_(MOMENTUM).add_(self.grad)
        self.flat.sub_(lr * self.buffer)

    def pull(self, *, first: bool) -> Tensor:
        """Return the gradient of the penalty.

        The product with a dense matrix is split: that with its directions of largest curvature is taken at every step,
        the rest in the first of every so many, with as many times the weight.
        """
        assert self.penalty is not None
        moved = self.flat - self.anchor
        pull = self.linear + moved * (DAMPING * self.known)
        if isinstance(self.penalty, KroneckerSum):
            return pull.add_(self.penalty.product(moved))
        along = self.stiff.product(moved)
        if first:
            pull.add_(self.penalty.product(moved).sub_(along), alpha=self.job.every)
        return pull.add_(along)

    def _rates(self, steps: int) -> Tensor:
        """Return the learning rate of every step, at most half of what is stable under the penalty."""
        rate = torch.tensor(self.job.lr, device=self.device)
        if self.penalty is not None and self.known:
            product, whole = self.penalty.product, isinstance(self.penalty, KroneckerSum)
            rest, self.vector = largest(lambda v: product(v) - self.stiff.product(v), self.vector)
            most, scale = self.stiff.values[-1], self.job.strength / (self.known + 1)
            rate = torch.minimum(rate, 0.5 * stable_limit(1 if whole else self.job.every, MOMENTUM) / (scale * rest))
            if self.job.row.endswith("-plain"):
                rate = torch.minimum(rate, 0.5 * stable_limit(1, MOMENTUM) / (scale * most))
            self.stiffness.append([float(scale * most), float(scale * rest), float(rate)])
        return rate * (1 + torch.cos(math.pi * torch.arange(steps, device=self.device) / steps)) / 2

    def _learn(self, order: Tensor, past: Tensor | None) -> None:
        """Take steps on batches `order` [steps, n], and `past` if there are, in captured groups on a GPU."""
        every = self.job.every
        rates = self._rates(len(order)).view(-1, every)
        orders = order.to(self.device).view(len(rates), every, -1)
        pasts = None if past is None else past.view_as(orders)
        self.buffer.zero_()
        place = torch.zeros(1, dtype=torch.long, device=self.device)

        def group() -> None:
            index, rate = orders.index_select(0, place)[0], rates.index_select(0, place)[0]
            old = None if pasts is None else pasts.index_select(0, place)[0]
            for step in range(every):
                self._step(index[step], None if old is None else old[step], rate[step], first=step == 0)
            place.add_(1)

        if self.device.type != "cuda":
            for _ in range(len(rates)):
                group()
            return
        before = self.flat.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            group()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            group()
        self.flat.copy_(before)
        self.buffer.zero_()
        place.zero_()
        for _ in range(len(rates)):
            graph.replay()
        torch.cuda.synchronize()

    def _order(self, count: int, task: int) -> Tensor:
        """Return the batches of all epochs, [steps, n], with a number of steps that groups of steps divide."""
        job = self.job
        epochs = [batches(count, job.batch, seed=job.seed, task=task, epoch=e) for e in range(job.all_epochs)]
        whole = len(epochs[0]) // job.every * job.every
        return torch.cat([one[:whole] for one in epochs])

    def _with_bn(self) -> None:
        """Learn the first task with BN, and fold it."""
        examples = pool(self.parts["train"], [self.permutations[0]])
        stepper = Stepper(self.start, examples, make_optimizer(self.start, MOMENTUM), None)
        for epoch in range(epochs := self.job.all_epochs):
            order = batches(len(examples), self.job.batch, seed=self.job.seed, task=0, epoch=epoch)
            stepper.epoch(order, self.job.lr * (1 + math.cos(math.pi * (epoch + 0.5) / epochs)) / 2)
        self.start.eval()
        self.flat.copy_(folded(self.start))

    def task(self, task: int) -> None:
        """Learn one task, or with joint training all."""
        job, count = self.job, len(self.parts["train"])
        if task == 0 and job.bn:
            self._with_bn()
            if job.kind != "joint":
                return
        if job.kind == "joint":
            self._learn(self._order(count * job.tasks, 0), None)
            return
        order, past = self._order(count, task), None
        if job.kind == "replay" and task:
            generator = torch.Generator(self.device).manual_seed(stream("past", job.seed, task).initial_seed())
            past = torch.randint(count * task, order.shape, generator=generator, device=self.device)
        self._learn(order + task * count, past)

    def extend(self, task: int) -> None:
        """Add the curvature of a task that was learnt, and move the anchor to where the weights are."""
        self.known = task + 1
        if self.penalty is None:
            return
        if "-own" in self.job.row and task:
            self.linear.add_(self.penalty.product(self.flat - self.anchor))
        self.anchor.copy_(self.flat)
        count = len(self.parts["train"])
        self.penalty.extend(
            TaskFisher(self.shape, self.flat.clone(), lambda index: self.take(index + task * count)[0], count)
        )
        self.stiff.update(self.penalty)

    def measure(self, name: str, tasks: Iterable[int]) -> list[float]:
        """Return the accuracies on a part of these tasks, in percent."""
        part, layers = self.parts[name], self.shape.layers(self.flat)
        right = [
            (forward(layers, part.x.index_select(1, self.permutations[task]))[1].argmax(1) == part.y).float().mean()
            for task in tasks
        ]
        return (100 * torch.stack(right)).tolist()

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """Learn all tasks; return the accuracies on all tasks so far after each, and what it took."""
        result: dict[str, Any] = {"validation": [], "test": [], "diverged": None}
        stages = [self.job.tasks - 1] if self.job.kind == "joint" else range(self.job.tasks)
        for task in stages:
            started = time.monotonic()
            with torch.enable_grad():
                self.task(0 if self.job.kind == "joint" else task)
            finite = bool(self.flat.isfinite().all())
            learnt = time.monotonic()
            if not finite:
                result["diverged"] = task
                break
            for name in ("validation", "test"):
                result[name].append(self.measure(name, range(task + 1)))
            measured = time.monotonic()
            if task + 1 < self.job.tasks:
                self.extend(task)
                self.flat.isfinite().all().item()  # waits for the device
            for key, spent in (
                ("learning", learnt - started),
                ("measuring", measured - learnt),
                ("fisher", time.monotonic() - measured),
            ):
                self.seconds[key] += spent
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        return {**result, "stiffness": self.stiffness, "seconds": self.seconds, "peak_gib": peak}


def work(job: Job, folder: Path, device: str) -> dict[str, Any]:
    """Return the record of a job, run in this process."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        result = Sequence(job, data(folder, device, job.pool, job.examples)).run()
    finally:
        if device == "cuda":
            torch.cuda.empty_cache()  # for the other processes
    return {"job": asdict(job), **result, **provenance()}


def final(run: dict[str, Any], name: str) -> float:
    """Return the average over all tasks after the last, 0 where a run diverged."""
    return statistics.fmean(run[name][-1]) if run["diverged"] is None else 0.0


def best(runs: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, of every row, the run on the development sequence that is best on validation images."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        row = run["job"]["row"]
        if run["job"]["seed"] == DEVELOPMENT and (
            row not in found or final(run, "validation") > final(found[row], "validation")
        ):
            found[row] = run
    return found


def _spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.fmean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def table(runs: list[dict[str, Any]]) -> str:
    """Return the rows at their best strengths, the sum that leads from the first to the last, and all strengths."""
    chosen = best(runs)
    lines = ["| for past tasks | strength | development | test | as learnt | forgotten |", "|---" * 6 + "|"]
    tests: dict[str, list[float]] = {}
    for row, label in ROWS.items():
        if row not in chosen:
            continue
        strength = chosen[row]["job"]["strength"]
        same = [
            run
            for run in runs
            if run["job"]["row"] == row and run["job"]["strength"] == strength and run["job"]["seed"] != DEVELOPMENT
        ]
        tests[row] = [final(run, "test") for run in same]
        ended = [run for run in same or [chosen[row]] if run["diverged"] is None and len(run["test"]) > 1]
        learnt = [statistics.fmean(part[-1] for part in run["test"]) for run in ended]
        lost = [before - final(run, "test") for before, run in zip(learnt, ended, strict=True)]
        cells = [f"{strength:g}" if strength else "", f"{final(chosen[row], 'validation'):.1f}"]
        lines.append(f"| {' | '.join([label, *cells, _spread(tests[row]), _spread(learnt), _spread(lost)])} |")
    measured = {row: values or [final(chosen[row], "validation")] for row, values in tests.items()}
    lines += ["", "| what it costs | points |", "|---|---|"]
    for name, worse, better in STEPS:
        if worse in measured and better in measured:
            lines.append(f"| {name} | {statistics.fmean(measured[better]) - statistics.fmean(measured[worse]):+.1f} |")
    lines += ["", "| development sequence, by strength | |", "|---|---|"]
    for row in ROWS:
        points = [run for run in runs if run["job"]["row"] == row and run["job"]["seed"] == DEVELOPMENT]
        points.sort(key=lambda run: run["job"]["strength"])
        cells = [
            f"x{run['job']['strength']:g}: "
            + ("diverged" if run["diverged"] is not None else f"{final(run, 'validation'):.1f}")
            for run in points
        ]
        if cells and row.removesuffix("-long") not in WITHOUT_PENALTY:
            lines.append(f"| {row} | {', '.join(cells)} |")
    return "\n".join(lines)


def jobs_of(options: argparse.Namespace, runs: list[dict[str, Any]]) -> list[Job]:
    """Return the jobs that are asked for and not in the record."""
    settings = {key: getattr(options, key) for key in Job.__dataclass_fields__ if hasattr(options, key)}
    chosen = best(runs)
    jobs = []
    for row in options.rows:
        strengths = options.strengths
        if row.removesuffix("-long") in WITHOUT_PENALTY:
            strengths = [0.0]
        elif options.best:
            like = row if row in chosen else row.removesuffix("-long")
            if like not in chosen:
                raise SystemExit(f"row '{row}' has no run with seed {DEVELOPMENT}; run it at some strengths first")
            strengths = [chosen[like]["job"]["strength"]]
        jobs += [Job(row, seed, strength, **settings) for seed in options.seeds for strength in strengths]
    done = [run["job"] for run in runs]
    left = [job for job in jobs if asdict(job) not in done]
    return sorted(left, key=lambda job: -job.all_epochs * {"full": 9, "block": 6}.get(job.kind, 1))  # long ones first


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--strengths", type=float, nargs="+", default=[0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--best", action="store_true", help="the best strength of each row on the development sequence")
    parser.add_argument("--seeds", type=int, nargs="+", default=[DEVELOPMENT])
    parser.add_argument("--pool", type=int, default=1, help="average so many pixels per side to one")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tasks", type=int, default=20)
    parser.add_argument("--examples", type=int, default=0, help="training images per task, 0 for all 55,000")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--bn", action="store_true", help="BN in the first task, frozen and folded after it")
    parser.add_argument("--fisher-rows", type=int, default=50_000, help="rows of gradients per task, 0 for all")
    parser.add_argument("--every", type=int, default=4, help="steps from one product with the slow part to the next")
    parser.add_argument("--rank", type=int, default=256, help="directions whose product is taken at every step")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("results/gap"))
    parser.add_argument("--table", action="store_true", help="only make the table of what is in the record")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    path = options.output / "results.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    if not options.table:
        jobs = jobs_of(options, runs)
        options.output.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as workers:
            futures = {workers.submit(work, job, options.data, options.device): job for job in jobs}
            for future in as_completed(futures):
                if (error := future.exception()) is not None:
                    print(f"failed: {futures[future]}: {error!r}", flush=True)
                    continue
                runs.append(run := future.result())
                temporary = path.with_suffix(".part")
                temporary.write_text(json.dumps({"runs": runs}, indent=1))
                temporary.replace(path)
                job, spent = run["job"], ", ".join(f"{key} {value:.1f}" for key, value in run["seconds"].items())
                ended = (
                    f"diverged at {run['diverged']}"
                    if run["diverged"] is not None
                    else f"{final(run, 'validation'):.2f}"
                )
                head = f"{time.monotonic() - started:.0f} s: {job['row']} x{job['strength']:g} seed {job['seed']}"
                print(f"{head}: {ended} ({spent} s, {run['peak_gib']:.1f} GiB)", flush=True)
    (options.output / "table.md").write_text(table(runs) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
