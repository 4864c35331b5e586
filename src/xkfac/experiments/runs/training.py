"""Training steps: plain on the CPU, replays of one captured graph on a GPU."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac.experiments.data.augmentation import ImageExamples
from xkfac.experiments.data.digits import Batch, PermutedExamples
from xkfac.learning.learner import Learner
from xkfac.model.cuda_graphs import captured
from xkfac.penalty.implicit import Implicit

Examples = PermutedExamples | ImageExamples


@dataclass
class Batches:
    """Batches of examples in an order [batches, N], made when they are asked for."""

    examples: Examples
    order: Tensor

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Batch]:
        for index in self.order.to(self.examples.device):
            yield self.examples.take(index)


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
