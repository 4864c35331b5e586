"""Training steps: plain on the CPU, replays of one captured graph on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac.experiments.data import Part
from xkfac.learner import Learner


@dataclass(frozen=True, eq=False)
class Pool:
    """What a stage trains on: a part under one permutation, or under several at once, [n] or [tasks * n] examples."""

    part: Part
    permutations: Tensor

    def __len__(self) -> int:
        return len(self.part) * len(self.permutations)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples `index` [N] as inputs [N, features] and labels [N]."""
        if len(self.permutations) == 1:
            return self.part.x.index_select(0, index), self.part.y.index_select(0, index)
        task, example = index // len(self.part), index % len(self.part)
        x = self.part.x.index_select(0, example)
        return x.gather(1, self.permutations.index_select(0, task)), self.part.y.index_select(0, example)


def pool(part: Part, permutations: list[Tensor]) -> Pool:
    """Return the pool of a part under permutations [features] each; a single one is applied once and for all."""
    if len(permutations) == 1:
        one = permutations[0].to(part.x.device)
        return Pool(Part(part.x.index_select(1, one), part.y), one[None])
    return Pool(part, torch.stack(permutations).to(part.x.device))


def make_optimizer(model: nn.Module, momentum: float) -> torch.optim.SGD:
    """Return SGD whose learning rate is a tensor and whose momentum is there from the start, as a graph needs them."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = torch.zeros((), device=parameters[0].device)
    optimizer = torch.optim.SGD(parameters, rate, momentum=momentum, fused=True)
    if momentum:
        for parameter in parameters:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class Stepper:
    """Runs epochs of training steps of a model on a pool, with a learner's penalty if there is one.

    On a GPU some steps in a row, data included, are captured as a graph at the first epoch and replayed from then on.
    """

    _in_a_row = 16

    def __init__(
        self, model: nn.Module, examples: Pool, optimizer: torch.optim.Optimizer, learner: Learner | None
    ) -> None:
        self.model, self.examples, self.optimizer, self.learner = model, examples, optimizer, learner
        self._device = examples.part.x.device
        self._totals = torch.zeros(2, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 1
        self._order = torch.empty(0)
        self._place = torch.zeros(1, dtype=torch.long, device=self._device)

    def epoch(self, order: Tensor, lr: float) -> tuple[float, float]:
        """Train on batches `order` [steps, N] of indices; return the mean loss and the mean penalty L_s."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)
        self._totals.zero_()
        if self._device.type == "cuda":
            self._replay(order)
        else:
            for index in order:
                self._step(index)
        loss, penalty = (self._totals / len(order)).tolist()
        return loss, penalty

    def _step(self, index: Tensor) -> None:
        x, y = self.examples.take(index)
        loss = F.cross_entropy(self.model(x), y)
        objective = loss if self.learner is None else self.learner.objective(loss)
        self.optimizer.zero_grad()
        objective.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._totals[0] += loss.detach()
        if self.learner is not None:
            self._totals[1] += self.learner.last_penalty

    def _replay(self, order: Tensor) -> None:
        if self._graph is None:
            self._order = order.to(self._device)
            self._steps = max(n for n in range(1, self._in_a_row + 1) if len(order) % n == 0)
            self._graph = self._captured()
        self._order.copy_(order)
        self._place.zero_()
        for _ in range(len(order) // self._steps):
            self._graph.replay()
        # An event that blocks leaves the core to others, who may have a job on the CPU.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()

    def _next(self) -> None:
        self._step(self._order.index_select(0, self._place)[0])
        self._place += 1

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Return the graph of some steps; those that warm it up leave no trace."""
        changed = list(self._changing())
        before = [tensor.detach().clone() for tensor in changed]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._place.zero_()
                self._next()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self._steps):
                self._next()
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        return graph

    def _changing(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        yield self._totals
        yield self._place


@torch.no_grad()
def accuracy(model: nn.Module, part: Part, permutation: Tensor | None = None, chunk: int = 10_000) -> float:
    """Return the percentage of a part's examples, columns permuted, that a model in evaluation mode gets right."""
    model.eval()
    right = torch.zeros((), dtype=torch.long, device=part.x.device)
    for x, y in zip(torch.split(part.x, chunk), torch.split(part.y, chunk), strict=True):
        if permutation is not None:
            x = x.index_select(1, permutation.to(x.device))
        right += (model(x).argmax(1) == y).sum()
    return 100 * right.item() / len(part)
