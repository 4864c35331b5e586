"""Calibrate a memory: measure, while source data is there, by how much the quadratic penalty falls short.

L_s approximates how the expected loss of the source grows, KL(p* || p) for p* what the network says at the anchor. It
leaves out what couples the units, and all beyond second order, and a network is surer of its training examples than of
others. The displacements that a target causes are where this shows: they go where the penalty finds it cheap. So a
proxy task is learnt by a copy of the network, under the penalty itself, and on held-out examples the real divergence is
compared with the predicted one along that path. Their ratio is the scale that the penalty lacks. A stronger penalty
leads along another path, so the measurement is repeated under the penalty with the scale found.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.calibration import Calibration, CurvePoint
from xkfac.errors import NotFiniteError, XkfacError
from xkfac.learning.extending import with_options
from xkfac.learning.learner import Learner
from xkfac.memory import Memory
from xkfac.model.batches import Forward, default_forward, to_device
from xkfac.model.likelihood import Likelihood
from xkfac.model.merged_weight import bind
from xkfac.model.passes import Progress, batches, check_loaded, device_of, full_precision, norms_of, untouched, unwrap
from xkfac.penalty.quadratic import Penalty

POINTS = 4  # of a path: its end, its half, its quarter, ...
HALVINGS = 8  # of the learning rate, where steps are too long for the curvature
DRAWS = 4  # labels drawn for each held-out example
CPU = torch.device("cpu")


@dataclass(frozen=True)
class _Way:
    """How a path is learnt."""

    steps: int
    lr: float
    damping: float
    seed: int

    @property
    def stops(self) -> list[int]:
        """The steps after which the network is measured."""
        return sorted({math.ceil(self.steps / 2**k) for k in range(POINTS)})


def calibrate(
    model: nn.Module,
    memory: Memory,
    held_out: Iterable[Any],
    *,
    proxy: Iterable[Any] | None = None,
    rounds: int = 3,
    steps: int = 160,
    lr: float = 0.02,
    damping: float = 1e-4,
    forward: Forward | None = None,
    max_batches: int | None = 64,
    seed: int = 0,
    progress: Progress = False,
) -> Memory:
    """Return the memory with a `Calibration`: the scale of its penalty, and how far the scaled one can be trusted.

    held_out: examples of the source that the network was not trained on, of all tasks that the memory stands for;
    labels are not needed. They are kept while this runs, at most `max_batches` batches. proxy: other inputs, nearer to
    the targets to come, labels not needed either; by default every other batch of `held_out` is learnt from and the
    rest measures. `rounds` paths of `steps` steps of SGD with momentum 0.9 are learnt, from the rate `lr`, or what the
    penalty bears, along a cosine. `damping` is that of the learner to come. forward: by default the memory's. The model
    is left as it was, bit by bit.

    Raises MismatchError when the model is not at the memory's anchor, XkfacError for a memory without a penalty, data
    too few, or a path along which nothing could be measured.
    """
    _check(memory, rounds, steps, lr)
    model = unwrap(model)
    check_loaded(model)
    memory = with_options(memory, forward=forward)
    run = memory.forward or default_forward
    way = _Way(steps, lr, damping, seed)
    with untouched(model):
        measuring = _kept(held_out, max_batches, progress, "held-out")
        if proxy is None:
            measuring, learning = _halves(measuring)
        else:
            learning = _kept(proxy, max_batches, progress, "proxy")
        model.eval()
        source = _Source(model, memory, run, measuring, seed)
        task = _ProxyTask(model, memory.likelihood, run, learning, seed)
        scale = 1.0
        for _ in range(rounds):
            curve, way = _measured(model, memory, source, task, scale, way)
            calibration = Calibration.of(curve, source.examples)
            scale = calibration.scale
            if not 0 < scale < math.inf:
                raise XkfacError(
                    "the source's loss did not rise along the calibration's path, so the scale of the penalty cannot "
                    "be measured; raise lr or steps, or give more held-out examples"
                )
    return replace(memory, calibration=calibration)


def _check(memory: Memory, rounds: int, steps: int, lr: float) -> None:
    if not memory.method.penalised or not memory.units:
        raise XkfacError(f"a memory of method '{memory.method.name}' has no penalty that could be calibrated")
    for name, value in (("rounds", rounds), ("steps", steps)):
        if value < 1:
            raise XkfacError(f"{name} of a calibration must be at least 1, not {value}")
    if not 0 < lr < math.inf:
        raise XkfacError(f"lr of a calibration must be a positive number, not {lr}")


def _kept(loader: Iterable[Any], max_batches: int | None, progress: Progress, what: str) -> list[Any]:
    """Return the batches of a loader that have more than one example, on the CPU; BN cannot learn from a single one."""
    passed = batches(loader, CPU, max_batches=max_batches, progress=progress, what=what)
    kept = [batch for size, batch in passed if size > 1]
    if not kept:
        raise XkfacError(f"the {what} loader of a calibration has no batch of more than one example; use larger ones")
    return kept


def _halves(kept: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    if len(kept) < 2:
        raise XkfacError(
            "a calibration learns from some held-out batches and measures on others, and the loader gave a single one; "
            "use smaller batches, or pass proxy=..."
        )
    return list(kept[::2]), list(kept[1::2])


def _measured(
    model: nn.Module, memory: Memory, source: _Source, task: _ProxyTask, scale: float, way: _Way
) -> tuple[list[CurvePoint], _Way]:
    """Return the curve of a path under `scale` times the penalty, and how it was learnt: in steps short enough for it.

    Learning starts from a penalty of zero, so where it descends, the scaled penalty stays below the loss at the start.
    """
    for _ in range(HALVINGS):
        curve: list[CurvePoint] = []
        path = _path(model, memory, task, scale, way)
        with contextlib.suppress(NotFiniteError):  # the learner notices a path that diverges before its next stop
            for network in path:
                curve.append(source.point(network))
                if not (scale * curve[-1].predicted <= task.start and math.isfinite(curve[-1].real)):
                    path.close()
                    break
            else:
                return curve, way
        way = replace(way, lr=way.lr / 2)
    raise XkfacError(f"the calibration's path diverges even at a learning rate of {2 * way.lr:.2g}; pass a smaller lr")


class _Source:
    """Measures displaced networks by the examples of the source.

    The real rise of the loss is E KL(p* || p). For labels y that the network draws at the anchor, with output o* and
    score s*(y) there, L(o, y) - L(o*, y) - s*(y)^T (o - o*) has this mean, since that of the score is zero; where
    outputs are natural parameters, as for every likelihood of the library, each y gives the divergence itself.
    """

    def __init__(self, model: nn.Module, memory: Memory, run: Forward, kept: Sequence[Any], seed: int) -> None:
        self.kept, self.run, self.likelihood = kept, run, memory.likelihood
        self.device = device_of(model)
        held = memory.to(self.device)
        self.norms = copy.deepcopy(norms_of(model)) if memory.method.own_bn else {}
        self.units, self.penalty = held.units, Penalty(held.curvature, held.anchor)
        generator = torch.Generator(self.device).manual_seed(seed)
        with torch.no_grad():
            # In float64 a small rise is not lost beside the loss.
            self.before = [run(model, to_device(batch, self.device)).double() for batch in kept]
            self.labels = [[memory.likelihood.sample(o, generator) for _ in range(DRAWS)] for o in self.before]
        self.examples = sum(len(output) for output in self.before)

    @torch.no_grad()
    def point(self, network: nn.Module) -> CurvePoint:
        """Return the predicted penalty, without damping, and the real rise of the loss; leaves evaluation mode on."""
        network.eval()
        if self.norms:  # the source is used with its own BN, and learning goes on with the proxy's
            network = copy.deepcopy(network)
            for path, norm in self.norms.items():
                network.get_submodule(path).load_state_dict(norm.state_dict())
        return CurvePoint(self._predicted(network), self._real(network))

    def _predicted(self, network: nn.Module) -> float:
        with full_precision(self.device):
            weights = {name: bound.merged_weight() for name, bound in bind(network, self.units).items()}
            return self.penalty(weights).item()

    def _real(self, network: nn.Module) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for batch, labels, before in zip(self.kept, self.labels, self.before, strict=True):
            now = self.run(network, to_device(batch, self.device)).double()
            rises = [self._rise(before, now, one).sum() for one in labels]
            total += torch.stack(rises).mean() / self.likelihood.predictions(now)
        return total.item() / self.examples

    def _rise(self, before: Tensor, now: Tensor, labels: Tensor) -> Tensor:
        """Return the rise of the loss [N] for drawn labels, without its part of first order."""
        first = self.likelihood.score(before, labels) * (now - before)
        nll = self.likelihood.nll
        return nll(now, labels) - nll(before, labels) - first.reshape(len(first), -1).sum(1)


class _ProxyTask:
    """A task made from inputs alone: through a new readout, answer each example as the network answers another one.

    The answers are drawn from the network's output for an example of another batch. The readout is linear over
    dimension 1 of the standardised outputs, near zero at first, and gives outputs on their own scale, so it goes with
    any likelihood.
    """

    def __init__(self, model: nn.Module, likelihood: Likelihood, run: Forward, kept: Sequence[Any], seed: int) -> None:
        self.kept, self.likelihood, self.run = kept, likelihood, run
        self.device = device_of(model)
        generator = torch.Generator(self.device).manual_seed(seed + 1)
        with torch.no_grad():
            outputs = [run(model, to_device(batch, self.device)) for batch in kept]
            answers = torch.cat([likelihood.sample(output, generator) for output in outputs])
            order = torch.randperm(len(answers), generator=torch.Generator().manual_seed(seed + 1))
            self.labels = torch.split(answers[order.to(self.device)], [len(output) for output in outputs])
            wide = torch.promote_types(outputs[0].dtype, torch.float32)
            flat = torch.cat([_channels(output).transpose(0, 1).flatten(1) for output in outputs], 1).to(wide)
            std, self.mean = torch.std_mean(flat, 1, correction=0)
            self.std = std.clamp(min=1e-6)
            losses = [self.loss(model, self.readout(seed), index) for index in range(len(kept))]
            self.start = torch.stack(losses).mean().item()

    def readout(self, seed: int) -> nn.Parameter:
        """Return a new readout [channels, channels + 1], its bias last."""
        channels = len(self.mean)
        weight = torch.randn(channels, channels, generator=torch.Generator().manual_seed(seed)) * (0.1 / channels**0.5)
        return nn.Parameter(torch.cat([weight, torch.zeros(channels, 1)], 1).to(self.mean))

    def loss(self, model: nn.Module, readout: Tensor, index: int) -> Tensor:
        """Return the mean loss of batch `index`."""
        output = self.run(model, to_device(self.kept[index], self.device))
        rows = _channels(output)
        shape = (-1, *[1] * (rows.dim() - 2))
        mean, std = self.mean.view(shape), self.std.view(shape)
        answer = torch.einsum("oc,nc...->no...", readout[:, :-1], (rows - mean) / std) + readout[:, -1].view(shape)
        answered = (answer * std + mean).reshape(output.shape)
        return self.likelihood.nll(answered, self.labels[index]).mean() / self.likelihood.predictions(output)


def _channels(output: Tensor) -> Tensor:
    """Return an output as [N, channels, ...]."""
    return output[:, None] if output.dim() == 1 else output


def _release(network: nn.Module, memory: Memory) -> None:
    """Let those parameters alone take gradients that a target learns.

    What the memory does not cover, such as the head of a source task, is not a target's to change; but a BN of its own
    is.
    """
    covered = {row.parameter for row in memory.coverage.rows if row.unit != "-"}
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in covered)
    if memory.method.own_bn:
        for norm in norms_of(network).values():
            norm.requires_grad_(True)


def _path(
    model: nn.Module, memory: Memory, task: _ProxyTask, scale: float, way: _Way
) -> Generator[nn.Module, None, None]:
    """Learn the proxy task with a copy of the network under `scale` times the penalty; yield the copy at the stops."""
    network = copy.deepcopy(model)
    memory = replace(memory, calibration=None)  # one of before is what this measures anew
    torch.manual_seed(way.seed)
    _release(network, memory)
    readout = task.readout(way.seed)
    learnt = [readout, *(parameter for parameter in network.parameters() if parameter.requires_grad)]
    with Learner(network, memory, damping=way.damping, strength=scale, penalty_every=1) as learner, torch.enable_grad():
        learner.begin(task.kept, forward=task.run)
        optimizer = torch.optim.SGD(learnt, min(way.lr, 0.5 * learner.stable_lr(0.9)), momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, way.steps)
        for step, index in enumerate(islice(cycle(range(len(task.kept))), way.steps), 1):
            network.train()
            optimizer.zero_grad()
            learner.backward(task.loss(network, readout, index))
            optimizer.step()
            schedule.step()
            if step in way.stops:
                yield network
