"""Avalanche: a plugin for strategies, and a regularization for agents (needs avalanche-lib)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from xkfac.integrations.task_sequence import TaskSequence
from xkfac.memory import Memory
from xkfac.model.passes import unwrap

try:
    from avalanche.distributed import DistributedHelper
    from avalanche.models import MultiHeadClassifier
    from avalanche.models.utils import avalanche_forward
    from avalanche.training.plugins import SupervisedPlugin
    from avalanche.training.regularization import RegularizationMethod
except ImportError as error:
    raise ImportError(f"{error}; install it by: pip install 'xkfac[avalanche]'", name=error.name) from error


def forward(model: nn.Module, batch: Any) -> Tensor:
    """Return the output of a model for a batch of images, labels and task labels, as strategies compute it."""
    output: Tensor = avalanche_forward(model, batch[0], batch[-1])
    return output


class XKFACPlugin(SupervisedPlugin, supports_distributed=True):  # type: ignore[call-arg, misc]
    """Keeps what a model has learnt in earlier experiences: `Naive(model, optimizer, plugins=[XKFACPlugin()])`.

    The memory of the first experience is calibrated unless `calibrate=False` or a `strength` is given; options of
    `xkfac.calibrate`, such as `{"tasks": 5}`, may stand in its place. memory: that of tasks learnt before. held_out: a
    stream such as `benchmark.valid_stream`, whose examples make the memory in place of those that were trained on.
    options: those of `Learner` and `consolidate`, such as `exclude=["classifier*"]` for a classifier that grows.
    The steps of SGD are made implicit in the penalty, unless `implicit=False`; those of other optimizers are not.
    Models of several heads are run with the task label of each example, and their heads are not penalised.
    """

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        held_out: Sequence[Any] | None = None,
        calibrate: bool | Mapping[str, Any] = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.tasks = TaskSequence(memory, calibrate=calibrate, **{"forward": forward, **options})
        self.held_out = held_out

    @property
    def memory(self) -> Memory | None:
        """The memory of all experiences that have ended."""
        return self.tasks.memory

    def before_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Begin, with the batches that training will draw."""
        self.tasks.begin(strategy.model, strategy.dataloader, [strategy.optimizer])

    def before_forward(self, strategy: Any, **kwargs: Any) -> None:
        """Resume, where the strategy was copied or loaded in the middle of an experience."""
        self.tasks.resume(strategy.model, [strategy.optimizer])

    def before_backward(self, strategy: Any, **kwargs: Any) -> None:
        """Add the penalty to the loss."""
        strategy.loss = self.tasks.objective(strategy.loss)

    def after_training_exp(self, strategy: Any, **kwargs: Any) -> None:
        """Make the memory, or extend it, from the experience's own examples, without those of a replay buffer."""
        examples = _examples(strategy.experience, self.held_out)
        loaders = _loaders(examples, strategy.train_mb_size, kwargs.get("num_workers", 0))
        self.tasks.finish(strategy.model, *loaders, _heads(strategy.model))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, also in the middle of an experience, beside model and optimizer."""
        return self.tasks.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; an experience in progress is resumed when the strategy trains on it again."""
        self.tasks.load_state_dict(state)


class XKFACRegularization(RegularizationMethod):  # type: ignore[misc]
    """The same for an `Agent` with a `model`: `agent.reg = XKFACRegularization()`, `loss = agent.reg(loss)`.

    Make it the last attribute that adapts, after the model and the optimizer. batch_size: of the passes over the
    examples of an experience; use that of your training. The other arguments are those of `XKFACPlugin`.
    """

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        batch_size: int = 32,
        held_out: Sequence[Any] | None = None,
        calibrate: bool | Mapping[str, Any] = True,
        **options: Any,
    ) -> None:
        self.tasks = TaskSequence(memory, calibrate=calibrate, **{"forward": forward, **options})
        self.batch_size, self.held_out = batch_size, held_out

    @property
    def memory(self) -> Memory | None:
        """The memory of all experiences that have ended."""
        return self.tasks.memory

    def pre_adapt(self, agent: Any, exp: Any) -> None:
        """Begin an experience."""
        loader = _loaders(exp.dataset.train(), self.batch_size)[0]
        self.tasks.begin(agent.model, loader, vars(agent).values())  # the agent may call its optimizer by any name

    def __call__(self, loss: Tensor) -> Tensor:
        """Return the objective of a step from the mean loss of its batch."""
        return self.tasks.objective(loss)

    def post_adapt(self, agent: Any, exp: Any) -> None:
        """End an experience."""
        loaders = _loaders(_examples(exp, self.held_out), self.batch_size)
        self.tasks.finish(agent.model, *loaders, _heads(agent.model))


def _examples(experience: Any, held_out: Sequence[Any] | None) -> Any:
    """Return what a memory is made from: the held-out examples of an experience, or its own."""
    if held_out is None:
        return experience.dataset.train()
    with experience.no_attribute_masking():
        return held_out[experience.current_experience].dataset.train()


def _heads(model: nn.Module) -> list[str]:
    """Return patterns of the heads that belong to one task each."""
    return [f"{name}.*" for name, module in unwrap(model).named_modules() if isinstance(module, MultiHeadClassifier)]


def _loaders(dataset: Any, size: int, workers: int = 0) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return loaders over the part of the examples that this process has, and over all of them, both shuffled.

    Mini-batches of one class alone would have other BN statistics than training has seen. No batch is smaller than the
    others, as BN cannot learn from a single example.
    """
    options: dict[str, Any] = {
        "batch_size": size,
        "drop_last": len(dataset) > size,
        "collate_fn": getattr(dataset, "collate_fn", None),
        "num_workers": workers,
    }
    every = DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(0), **options)
    if not DistributedHelper.is_distributed:
        return every, every
    return DataLoader(dataset, sampler=DistributedSampler(dataset), **options), every
