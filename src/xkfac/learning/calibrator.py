"""Calibrate a memory: measure, while source data is there, by how much the quadratic penalty falls short.

L_s approximates how the expected loss of the source grows, KL(p* || p) for p* what the network says at the anchor. It
leaves out what couples the units, and all beyond second order, and a network is surer of its training examples than of
others. The displacements that a target causes are where this shows. So copies of the network learn made-up tasks, and
on held-out examples the real divergence is compared with the predicted one along these paths.

Their ratio grows with the distance, so it is read at one stated distance, where the real divergence is `RISE`. Steps
are so short that many are needed to get there: the path is then that of the gradient flow, whatever the learning rate.
No penalty acts on it: one that does may stop the network before it is there, and so near to the anchor it changes the
ratio little.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.calibration import RISE, Calibration, CurvePoint
from xkfac.errors import XkfacError
from xkfac.learning.learner import Learner
from xkfac.memory import Memory, with_options
from xkfac.model.batches import Forward, cloned, default_forward, to_device
from xkfac.model.likelihood import Likelihood
from xkfac.model.merged_weight import bind
from xkfac.model.passes import Progress, batches, check_loaded, device_of, full_precision, norms_of, untouched, unwrap
from xkfac.penalty.quadratic import Penalty

LR = 0.2  # of plain SGD, to begin with
SHORTEST, LONGEST = 8, 140  # steps of a path
ATTEMPTS = 12  # at a path, each with shorter steps
DRAWS = 4  # labels drawn for each held-out example
CPU = torch.device("cpu")


def calibrate(
    model: nn.Module,
    memory: Memory,
    held_out: Iterable[Any],
    *,
    proxy: Iterable[Any] | None = None,
    tasks: int = 3,
    forward: Forward | None = None,
    max_batches: int | None = 32,
    seed: int = 0,
    progress: Progress = False,
) -> Memory:
    """Return the memory with a `Calibration`: the scale of its penalty, and how far the scaled one can be trusted.

    held_out: examples of the source that the network was not trained on, of all tasks that the memory stands for;
    labels are not needed. They are kept while this runs, at most `max_batches` batches. proxy: other inputs, nearer to
    the targets to come, labels not needed either; by default every other batch of `held_out` is learnt from and the
    rest measures. tasks: how many made-up tasks are learnt; what each of them gave is in `scales`. forward: by default
    the memory's. The model is left as it was, bit by bit.

    Raises MismatchError when the model is not at the memory's anchor, XkfacError for a memory without a penalty, data
    too few, or tasks with which nothing could be measured.
    """
    if not memory.method.penalised or not memory.units:
        raise XkfacError(f"a memory of method '{memory.method.name}' has no penalty that could be calibrated")
    if tasks < 1:
        raise XkfacError(f"tasks of a calibration must be at least 1, not {tasks}")
    model = unwrap(model)
    check_loaded(model)
    memory = replace(with_options(memory, forward=forward), calibration=None)
    run = memory.forward or default_forward
    with untouched(model):
        measuring = _kept(held_out, max_batches, progress, "held-out")
        if proxy is None:
            measuring, learning = _halves(measuring)
        else:
            learning = _kept(proxy, max_batches, progress, "proxy")
        model.eval()
        source = _Source(model, memory, run, measuring, seed)
        curves, lr = [], LR
        for one in range(seed, seed + tasks):
            task = _ProxyTask(model, memory.likelihood, run, learning, one)
            curve, lr = _measured(model, memory, source, task, lr)
            curves.append(curve)
    calibration = Calibration.of(curves, source.examples)
    if not 0 < calibration.scale < math.inf:
        raise XkfacError(
            "the source's loss did not rise while a made-up task was learnt, so the scale of the penalty cannot be "
            "measured; give more held-out examples"
        )
    return replace(memory, calibration=calibration)


def _kept(loader: Iterable[Any], max_batches: int | None, progress: Progress, what: str) -> list[Any]:
    """Return the batches of a loader that have more than one example, on the CPU; BN cannot learn from a single one.

    They are copies: a loader may write its next batch where the last one was.
    """
    passed = batches(loader, CPU, max_batches=max_batches, progress=progress, what=what)
    kept = [cloned(batch) for size, batch in passed if size > 1]
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
    model: nn.Module, memory: Memory, source: _Source, task: _ProxyTask, lr: float
) -> tuple[list[CurvePoint], float]:
    """Return the curve of a task, to where the real rise is `RISE` or at most `LONGEST` steps, and its learning rate.

    A path that gets there in fewer than `SHORTEST` steps, or diverges, is learnt again in shorter ones.
    """
    for _ in range(ATTEMPTS):
        curve: list[CurvePoint] = []
        with contextlib.closing(_path(model, memory, task, lr)) as path:
            for step, network in path:
                curve.append(source.point(network))
                if not curve[-1].real < RISE:
                    if step < SHORTEST or not math.isfinite(curve[-1].real):
                        break
                    return curve, lr
            else:
                return curve, lr
        lr /= 4
    raise XkfacError(
        f"a made-up task diverges even at a learning rate of {4 * lr:.2g}, so the penalty cannot be calibrated; check "
        "that the held-out inputs are those that the network was trained on"
    )


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
    dimension 1 of the standardised outputs, drawn at random, and gives outputs on their own scale, so it goes with any
    likelihood. Such answers are wrong from the start, so it takes few steps until the network has to move.
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
        self.seed = seed

    def readout(self) -> nn.Parameter:
        """Return a new readout [channels, channels + 1], its bias last."""
        channels = len(self.mean)
        drawn = torch.randn(channels, channels, generator=torch.Generator().manual_seed(self.seed))
        weight = drawn / channels**0.5
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
    model: nn.Module, memory: Memory, task: _ProxyTask, lr: float
) -> Generator[tuple[int, nn.Module], None, None]:
    """Learn a task with a copy of the network, its BN as the method has it; yield steps and copy, ever more rarely."""
    network = copy.deepcopy(model)
    torch.manual_seed(task.seed)
    _release(network, memory)
    readout = task.readout()
    learnt = [readout, *(parameter for parameter in network.parameters() if parameter.requires_grad)]
    with Learner(network, memory) as learner, torch.enable_grad():
        learner.begin(task.kept, forward=task.run)
        optimizer = torch.optim.SGD(learnt, lr)
        stop = 1
        for step, index in enumerate(cycle(range(len(task.kept))), 1):
            network.train()
            optimizer.zero_grad()
            task.loss(network, readout, index).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            torch.clear_autocast_cache()  # inside autocast it would go on with copies of the weights before the step
            if step == stop:
                yield step, network
                stop += max(1, step // 2)
                if stop > LONGEST:
                    return
