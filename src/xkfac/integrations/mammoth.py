"""Mammoth: a `ContinualModel` beside its `ewc_on`; Mammoth is a repository, whose folder must be on the path."""

from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from xkfac.integrations.task_sequence import TaskSequence
from xkfac.memory import Memory

try:
    from models.utils.continual_model import ContinualModel
except ImportError as error:
    raise ImportError(f"{error}; run this in a clone of github.com/aimagelab/mammoth", name=error.name) from error


class XKFAC(ContinualModel):  # type: ignore[misc]
    """Keeps what the backbone has learnt in earlier tasks: `python main.py --model xkfac ...`.

    The penalty is calibrated after the first task unless `--xkfac_strength` is given. `--xkfac_memory FILE` saves the
    memory after each task, and continues with the one that is there. With `--optimizer sgd`, steps are implicit in the
    penalty unless `--xkfac_implicit 0` is given; those of other optimizers are not.
    """

    NAME = "xkfac"
    COMPATIBILITY: ClassVar[list[str]] = ["class-il", "domain-il", "task-il"]

    @staticmethod
    def get_parser(parser: Any) -> Any:
        """Add the options of this model."""
        parser.add_argument("--xkfac_method", default="fixed-bn", help="a method of xkfac")
        parser.add_argument("--xkfac_strength", type=float, help="factor on the penalty; calibrated unless given")
        parser.add_argument("--xkfac_exclude", nargs="*", default=[], help="patterns of layers that are not protected")
        parser.add_argument("--xkfac_implicit", type=int, choices=[0, 1], default=1, help="implicit steps of SGD")
        parser.add_argument("--xkfac_memory", type=Path, help="file of the memory")
        return parser

    def __init__(self, backbone: Any, loss: Any, args: Any, transform: Any, dataset: Any = None) -> None:
        super().__init__(backbone, loss, args, transform, dataset=dataset)
        path = args.xkfac_memory
        # Mammoth changes the working folder when it is imported: a relative path is one inside its clone.
        memory = Memory.load(path, backbone) if path is not None and path.exists() else None
        options = {"method": args.xkfac_method, "exclude": args.xkfac_exclude, "implicit": bool(args.xkfac_implicit)}
        if args.xkfac_strength is not None:
            options["strength"] = args.xkfac_strength
        self.tasks = TaskSequence(memory, **options)
        self._loader: Any = None

    def begin_task(self, dataset: Any) -> None:
        """Keep the batches that training will draw: Mammoth makes the optimizer of the task only after this call."""
        self._loader = dataset.train_loader

    def observe(self, inputs: Tensor, labels: Tensor, not_aug_inputs: Tensor, epoch: int | None = None) -> float:
        """Take one training step and return the objective; the first step of a task begins it."""
        if self._loader is not None:
            self.tasks.begin(self.net, self._loader, [self.opt])
            self._loader = None
        self.opt.zero_grad()
        loss = self.tasks.objective(self.loss(self.net(inputs), labels))
        loss.backward()  # type: ignore[no-untyped-call]
        self.opt.step()
        return loss.item()

    def end_task(self, dataset: Any) -> None:
        """Make the memory, or extend it, and save it if asked to."""
        if self._loader is not None:  # no step was taken: `--start_from` passes over the task
            return
        self.tasks.finish(self.net, dataset.train_loader, dataset.train_loader)
        if self.args.xkfac_memory is not None and self.tasks.memory is not None:
            self.tasks.memory.save(self.args.xkfac_memory)
