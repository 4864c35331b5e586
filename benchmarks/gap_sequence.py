"""For `gap.py`: one job, a row with a seed and a strength, its tasks learnt one after the other."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gap_fisher import Dense, KroneckerSum, Shape, Stiff, TaskFisher, forward, largest, loss_gradient, stable_limit
from torch import Tensor, nn

from xkfac.experiments.data.digits import Part, PermutedExamples, batches, load, permutation, stream
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.recipes.recipe import Line
from xkfac.experiments.runs.training import Stepper, make_optimizer

MOMENTUM = 0.9
SHORTEST = 2.0  # learning rate times curvature that steps along stiff directions do not exceed
WITHOUT_PENALTY = ("replay", "joint")


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
    damping: float
    noise: float

    @property
    def kind(self) -> str:
        """The row without its suffixes."""
        name = self.row
        for suffix in ("-plain", "-long", "-own", "-noise"):
            name = name.removesuffix(suffix)
        return name

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
        self.stiff = Stiff(torch.randn(rank, self.shape.count, generator=stream("directions")).to(self.flat))
        self.vector = torch.randn(self.shape.count, generator=stream("direction")).to(self.flat)
        self.seconds = {"learning": 0.0, "fisher": 0.0, "measuring": 0.0}
        self.stiffness: list[list[float]] = []  # largest curvature, largest beside U, and learning rate, by task
        self.divergence: dict[str, float] = {}
        torch.manual_seed(stream("noise", job.seed).initial_seed())

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
        pull = self.linear + moved * (self.job.damping * self.known)
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
        examples = PermutedExamples(self.parts["train"], [self.permutations[0]])
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
        if task == 1:
            self.divergence = self._divergence()
        if "-own" in self.job.row and task:
            self.linear.add_(self.penalty.product(self.flat - self.anchor))
        self.anchor.copy_(self.flat)
        count = len(self.parts["train"])
        noise = self.job.noise if "-noise" in self.job.row else 0.0
        self.penalty.extend(
            TaskFisher(self.shape, self.flat.clone(), lambda index: self.take(index + task * count)[0], count, noise)
        )
        self.stiff.update(self.penalty)

    def _divergence(self) -> dict[str, float]:
        """Return how far the answers on the first task have moved after the second, really and by the quadratic."""
        assert self.penalty is not None
        x, _ = self.take(torch.arange(min(5000, len(self.parts["train"])), device=self.device))
        before, now = (forward(self.shape.layers(flat), x)[1].log_softmax(1) for flat in (self.anchor, self.flat))
        moved = self.flat - self.anchor
        real = (before.exp() * (before - now)).sum(1).mean()
        return {"real": float(real), "predicted": float(moved @ self.penalty.product(moved) / 2)}

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
        result["divergence"] = self.divergence
        return {**result, "stiffness": self.stiffness, "seconds": self.seconds, "peak_gib": peak}
