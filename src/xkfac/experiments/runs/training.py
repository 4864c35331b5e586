"""Training steps: plain on the CPU, replays of one captured graph on a GPU."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac.experiments.data.digits import Part
from xkfac.learning.learner import Learner
from xkfac.model.cuda_graphs import captured
from xkfac.penalty.implicit import Implicit

Batch = tuple[Tensor, Tensor]


class Examples:
    """What a stage trains on. device: where they are."""

    device: torch.device

    def __len__(self) -> int:
        raise NotImplementedError

    def take(self, index: Tensor) -> Batch:
        """Return the examples `index` [N] as inputs and labels [N]."""
        raise NotImplementedError

    def redraw(self, *key: int) -> None:
        """Draw anew what is random about the examples, if anything is, fixed by `key`: seed, task, epoch."""

    def chunks(self) -> Iterable[Batch]:
        """Return all of them, as they were drawn last, in large batches that statistics are taken of."""
        raise NotImplementedError


@dataclass(eq=False)
class PermutedExamples(Examples):
    """A part under one permutation, or under several at once, [n] or [tasks * n] examples."""

    part: Part
    permutations: Tensor

    def __post_init__(self) -> None:
        self.device = self.part.x.device

    def __len__(self) -> int:
        return len(self.part) * len(self.permutations)

    def chunks(self) -> Iterable[Batch]:
        """Return all examples under a single permutation in large batches."""
        return list(zip(*(torch.split(t, 8192) for t in (self.part.x, self.part.y)), strict=True))

    def take(self, index: Tensor) -> Batch:
        """Return the examples `index` [N] as inputs [N, features] and labels [N]."""
        if len(self.permutations) == 1:
            return self.part.x.index_select(0, index), self.part.y.index_select(0, index)
        task, example = index // len(self.part), index % len(self.part)
        x = self.part.x.index_select(0, example)
        return x.gather(1, self.permutations.index_select(0, task)), self.part.y.index_select(0, example)


def permuted_examples(part: Part, permutations: list[Tensor]) -> PermutedExamples:
    """Return a part under permutations [features] each; a single one is applied once and for all."""
    if len(permutations) == 1:
        one = permutations[0].to(part.x.device)
        return PermutedExamples(Part(part.x.index_select(1, one), part.y), one[None])
    return PermutedExamples(part, torch.stack(permutations).to(part.x.device))


def make_optimizer(model: nn.Module, momentum: float, protected: Iterable[Tensor] = ()) -> torch.optim.SGD:
    """Return SGD whose learning rate is a tensor and whose momentum is there from the start, as a graph needs them.

    Parameters that are `protected` are a group of their own, named so.
    """
    slow = {id(parameter) for parameter in protected}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": chosen, "lr": torch.zeros((), device=trained[0].device), "protected": kind}
        for kind in (False, True)
        if (chosen := [parameter for parameter in trained if (id(parameter) in slow) == kind])
    ]
    optimizer = torch.optim.SGD(groups, torch.zeros((), device=trained[0].device), momentum=momentum, fused=True)
    if momentum:
        for parameter in trained:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def momentum_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the momentum of parameters by their names, not copied."""
    states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    return {name: state["momentum_buffer"] for name, state in states.items() if "momentum_buffer" in state}


@torch.no_grad()
def load_momentum(model: nn.Module, optimizer: torch.optim.Optimizer, momentum: dict[str, Tensor]) -> None:
    """Put the momentum of parameters back in, in place."""
    for name, tensor in momentum.items():
        optimizer.state[model.get_parameter(name)]["momentum_buffer"].copy_(tensor)


class Stepper:
    """Runs epochs of training steps of a model on examples, with a learner's penalty if there is one.

    label_smoothing: that of the loss. autocast: the dtype that the network computes in, None for its own.
    implicit: makes the steps implicit in the penalty. On a GPU some steps in a row, data included, are captured as a
    graph at the first epoch and replayed from then on.
    """

    _in_a_row = 16

    def __init__(
        self,
        model: nn.Module,
        examples: Examples,
        optimizer: torch.optim.Optimizer,
        learner: Learner | None,
        *,
        label_smoothing: float = 0.0,
        autocast: torch.dtype | None = None,
        implicit: Implicit | None = None,
    ) -> None:
        self.model, self.examples, self.optimizer, self.learner = model, examples, optimizer, learner
        self._label_smoothing, self._autocast = label_smoothing, autocast
        self._implicit = implicit
        self._device = examples.device
        self._totals = torch.zeros(2, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._steps = 1
        self._order = torch.empty(0)
        self._place = torch.zeros(1, dtype=torch.long, device=self._device)

    def epoch(self, order: Tensor, lr: float, protected_lr: float | None = None) -> tuple[float, float]:
        """Train on batches `order` [steps, N] of indices; return the mean loss and the mean penalty L_s.

        protected_lr: the learning rate of protected parameters, where it is another.
        """
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr if protected_lr is None or not group["protected"] else protected_lr)
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
        with torch.autocast(self._device.type, self._autocast, enabled=self._autocast is not None):
            loss = F.cross_entropy(self.model(x), y, label_smoothing=self._label_smoothing)
        self.optimizer.zero_grad()
        values = [loss.detach()]
        if self.learner is None:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.learner.backward(loss)
            values.append(self.learner.last_penalty)
        if self._implicit is not None:
            self._implicit.step()
        self.optimizer.step()
        torch._foreach_add_(list(self._totals[: len(values)]), values)

    def rest(self) -> None:
        """Take the momentum of protected parameters away: they begin to move now."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"] if group["protected"] else ():
                self.optimizer.state[parameter]["momentum_buffer"].zero_()

    def _replay(self, order: Tensor) -> None:
        if self._graph is None:
            self._order = order.to(self._device)
            self._steps = max(n for n in range(1, self._in_a_row + 1) if len(order) % n == 0)
            self._graph = captured(self._row, warm_up=self._warm_up, changed=self._changing())
        self._order.copy_(order)
        self._place.zero_()
        for _ in range(len(order) // self._steps):
            self._graph.replay()
        # An event that blocks leaves the core to others, who may have a job on the CPU.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()

    def _row(self) -> None:
        if self.learner is not None:
            self.learner.captures(self._steps)
        self._next(self._steps)

    def _next(self, steps: int) -> None:
        """Take the batches of a row of steps from the epoch's order, and do them."""
        for index in self._order.view(-1, self._steps, self._order.shape[1]).index_select(0, self._place)[0][:steps]:
            self._step(index)
        self._place += 1

    def _warm_up(self) -> None:
        self._place.zero_()
        self._next(1)

    def _changing(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
        if self.learner is not None and self.learner.balance is not None:
            yield from self.learner.balance.state_dict().values()
        yield self._totals
        yield self._place


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the percentage of examples that a model in evaluation mode gets right; 0 where there are none."""
    model.eval()
    right: Tensor | int = 0
    count = 0
    for x, y in batches:
        if len(y):
            right = right + (model(x).argmax(1) == y).sum()
            count += len(y)
    return 100 * int(right) / max(count, 1)
