"""Deep networks with one head per task on a trunk that torchvision or timm knows by name."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from xkfac.errors import nearest
from xkfac.experiments.data.digits import drawing_from
from xkfac.experiments.networks.library import BackboneError, classifier_path, library_model
from xkfac.task_layers import enter_task, give_task_layers, give_task_norms, using_task

Stem = Literal["standard", "small"]


@dataclass(frozen=True)
class Architecture:
    """Which network a trunk is of: its name, its stem, and the path of the classifier that was taken off."""

    model: str
    stem: Stem
    classifier: str


class ManyHeaded(nn.Module):
    """A trunk and one linear head per task; the head of the active task runs.

    All heads are there from the start, so that the structure of the state never changes. The trunk gives features
    [N, width]. Head and trunk weights are fixed by the seed alone, whatever other tasks there are. What is kept of a
    task is of the trunk: `xkfac.consolidate(net, loader, exclude=["heads.*"])`.
    """

    def __init__(
        self,
        trunk: nn.Module,
        width: int,
        tasks: Mapping[str, int],
        *,
        seed: int,
        bias: bool = True,
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__()
        self.trunk = trunk
        self.heads = nn.ModuleDict()
        for task, classes in tasks.items():
            with drawing_from("head", seed, task):
                head = nn.Linear(width, classes, bias)
            try:
                self.heads[task] = head
            except KeyError:
                raise BackboneError(
                    f"a task cannot be named '{task}', as its head is a module; choose another name"
                ) from None
        self.architecture = architecture
        self.active = next(iter(tasks))
        self.enter(self.active)

    @property
    def tasks(self) -> dict[str, int]:
        """The tasks and their numbers of classes."""
        return {task: self.head(task).out_features for task in self.heads}

    def head(self, task: str) -> nn.Linear:
        """Return the head of a task."""
        if task not in self.heads:
            known = ", ".join(self.heads)
            raise BackboneError(f"there is no head for task '{task}'{nearest(task, self.heads)}; name one of {known}")
        head = self.heads[task]
        assert isinstance(head, nn.Linear)
        return head

    def enter(self, task: str) -> None:
        """Make a task the active one: the trunk and its head learn, all other heads stand still."""
        head = self.head(task)
        self.requires_grad_(True)
        self.heads.requires_grad_(False)
        head.requires_grad_(True)
        enter_task(self.trunk, task)
        for parameter in self.heads.parameters():
            # An optimizer applies weight decay and momentum wherever there is a gradient, be it an old one.
            parameter.grad = parameter.grad if parameter.requires_grad else None
        self.active = task

    @contextlib.contextmanager
    def using(self, task: str) -> Iterator[None]:
        """Use the head of a task for a while, to measure it; what learns stays as it is."""
        self.head(task)
        with using_task(self.trunk, task), contextlib.ExitStack() as after:
            after.callback(setattr, self, "active", self.active)
            self.active = task
            yield

    def give_layers(self, own: Iterable[str] = (), *, norms: bool = True) -> None:
        """Give each task its own of the trunk's layers that patterns name, and BN, as copies of what is there."""
        give_task_layers(self.trunk, self.heads, own)
        if norms:
            give_task_norms(self.trunk, self.heads)
        self.enter(self.active)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores [N, classes] of the active task."""
        scores: Tensor = self.heads[self.active](self.trunk(x))
        return scores


def make_backbone(model: str, tasks: Mapping[str, int], *, stem: Stem = "standard", seed: int) -> ManyHeaded:
    """Return the network `model` with a head for every task (name -> classes), its weights fixed by the seed alone.

    model: a classification network of torchvision, as "resnet18", or "timm:NAME" for one of timm. Its classifier is
    taken off and says how wide a head is. stem: "small" leaves out the max-pooling behind the first convolution, for
    images of 64 pixels and below; weights of either stem have the same shapes.
    """
    with drawing_from("weights", seed):
        trunk = library_model(model)
    path = classifier_path(model, trunk)
    classifier = trunk.get_submodule(path)
    if not isinstance(classifier, nn.Linear):
        raise BackboneError(
            f"the classifier '{path}' of '{model}' is a {type(classifier).__name__}, not a linear layer, and cannot be "
            "replaced by heads; choose another model"
        )
    trunk.set_submodule(path, nn.Identity())
    if stem == "small":
        if not isinstance(getattr(trunk, "maxpool", None), nn.Module):
            raise BackboneError(f"'{model}' has no 'maxpool' that a small stem could leave out; use stem='standard'")
        trunk.maxpool = nn.Identity()
    architecture = Architecture(model, stem, path)
    bias = classifier.bias is not None
    return ManyHeaded(trunk, classifier.in_features, tasks, seed=seed, bias=bias, architecture=architecture)
