"""Make a source network: train a backbone on a tree of images, from where it was left off.

NAME.safetensors               the weights, in the names of torchvision or timm; there once all is done
NAME.json                      what was measured, with command, commit, seed and hardware
NAME.checkpoint.safetensors    the state after the last epoch, no pickle; gone once all is done
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from xkfac import files as storage
from xkfac.errors import MemoryFileError
from xkfac.experiments.data.digits import Part, Parts
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.data.trees import find_tree
from xkfac.experiments.files import check_path, write_file
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.pretrainer import Pretraining, PretrainingError, Trainer, accuracy
from xkfac.experiments.networks.weights import save_source
from xkfac.experiments.provenance import device_of, provenance

CHECKPOINT = "xkfac-pretraining"


@dataclass(frozen=True)
class Epoch:
    """What was measured of an epoch: the mean loss of its steps, accuracy on the validation part in percent."""

    epoch: int
    epochs: int
    loss: float
    validation: float | None
    seconds: float


@dataclass(frozen=True)
class Pretrained:
    """A source network that was made: its file, and what was measured of it; accuracies in percent."""

    weights: Path
    classes: tuple[str, ...]
    validation: float | None
    test: float
    history: tuple[Epoch, ...]


def pretrain(
    data: str | Parts,
    weights: str | Path,
    settings: Pretraining | None = None,
    *,
    task: str = "source",
    folder: Path | None = None,
    device: str | torch.device = "auto",
    workers: int = 1,
    progress: Callable[[Epoch], None] | None = None,
) -> Pretrained:
    """Train a source network on a tree of images, write its weights, and return what was measured.

    data: the name of a tree in `folder`, by default in XKFAC_DATA, or its parts. weights: the .safetensors file to
    make. The same call goes on after an interruption, to the same numbers. The validation part is measured after every
    epoch, the test part once at the end. progress: called after every epoch. workers: processes that decode images.

    Raises PretrainingError when the file is there already, a checkpoint beside it is of other settings or data, the
    loss is not finite, or the images do not fit on the device.
    """
    settings, path, place = settings or Pretraining(), Path(weights), device_of(device, PretrainingError)
    _check_target(path)
    name = data if isinstance(data, str) else "pictures"
    if isinstance(data, str):
        tree = find_tree(data, folder)
        name = tree.stem
        data = load_pictures(
            tree,
            pixels=settings.pixels,
            resize=settings.resize,
            validation=settings.validation,
            workers=workers,
        )
    _check_data(data, settings, place)
    fastest = {"enabled": True, "benchmark": True, "deterministic": False, "allow_tf32": True}
    with torch.backends.cudnn.flags(**fastest) if place.type == "cuda" else nullcontext():
        job = _Job(data.to(place), path, settings, task)
        job.restore()
        while len(job.history) < settings.epochs:
            job.epoch()
            if progress is not None:
                progress(job.history[-1])
        return job.finish(name, place)


class _Job:
    """A source network in the making."""

    def __init__(self, parts: Parts, path: Path, settings: Pretraining, task: str) -> None:
        self.parts, self.path, self.settings, self.task = parts, path, settings, task
        place = parts.train.x.device
        net = make_backbone(settings.model, {task: len(parts.classes)}, stem=settings.stem, seed=settings.seed)
        net = net.to(place, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.trainer = Trainer(net, parts.train, settings)
        self.history: list[Epoch] = []
        self._checkpoint = path.with_name(f"{path.stem}.checkpoint.safetensors")
        origin = {**asdict(settings), "task": task, "pictures": _digest(parts)}
        self._origin: dict[str, Any] = json.loads(json.dumps(origin))

    def restore(self) -> None:
        """Take up the state of the checkpoint, if there is one."""
        if not self._checkpoint.exists():
            return
        remedy = f"remove '{self._checkpoint}' to start anew"
        try:
            description, tensors = storage.read(self._checkpoint, CHECKPOINT)
        except MemoryFileError as error:
            raise PretrainingError(f"the checkpoint cannot be resumed: {error}, or {remedy}") from None
        for field, value in self._origin.items():
            if description["told"].get(field) != value:
                raise PretrainingError(
                    f"'{self._checkpoint}' is of {field} {description['told'].get(field)!r}, not {value!r}; go on with "
                    f"the former, or {remedy}"
                )
        for name, tensor in self.trainer.state().items():
            tensor.copy_(tensors[name])
        self.history = [Epoch(**entry) for entry in description["history"]]

    def epoch(self) -> None:
        """Train for an epoch, measure, and write a checkpoint."""
        start, number = time.monotonic(), len(self.history)
        loss = self.trainer.epoch(number)
        if not math.isfinite(loss):
            raise PretrainingError(f"the loss is {loss} in epoch {number + 1}; lower lr, now {self.settings.lr}")
        validation = self._accuracy(self.parts.validation) if len(self.parts.validation) else None
        entry = Epoch(number + 1, self.settings.epochs, loss, validation, time.monotonic() - start)
        self.history.append(entry)
        description = {"told": self._origin, "history": [asdict(one) for one in self.history]}
        storage.write(self._checkpoint, description, self.trainer.state(), CHECKPOINT)

    def finish(self, name: str, place: torch.device) -> Pretrained:
        """Measure the test part and write the weights with what is known of them."""
        test, validation = self._accuracy(self.parts.test), self.history[-1].validation
        known = {"data": name, "test": test, "validation": validation, "settings": asdict(self.settings)}
        known |= provenance(place, torch.get_num_threads())
        seconds = sum(entry.seconds for entry in self.history)
        record = {**known, "seconds": seconds, "classes": self.parts.classes, "history": [*map(asdict, self.history)]}
        content = json.dumps(record, indent=1).encode() + b"\n"
        write_file(self.path.with_suffix(".json"), content, PretrainingError, "free space, and the same call goes on")
        save_source(self.trainer.net, self.path, self.task, known)
        self._checkpoint.unlink(missing_ok=True)
        return Pretrained(self.path, self.parts.classes, validation, test, tuple(self.history))

    def _accuracy(self, pictures: Part) -> float:
        return accuracy(self.trainer.net, pictures, self.settings.augmentation)


def _check_target(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise PretrainingError(f"the weights '{path}' must end in .safetensors, which is what is written")
    check_path(path.with_name(f"{path.stem}.checkpoint.safetensors"))
    if path.exists():
        raise PretrainingError(f"the weights '{path}' exist already; remove them, or choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PretrainingError(f"folder '{path.parent}' cannot be made ({error.strerror}); choose another") from None


def _check_data(parts: Parts, settings: Pretraining, place: torch.device) -> None:
    if settings.batch > len(parts.train):
        raise PretrainingError(f"batch is {settings.batch}, but there are {len(parts.train)} training images; lower it")
    if not len(parts.test):
        raise PretrainingError("there are no test images to measure the network on; load the part 'test' too")
    size = sum(part.x.numel() for part in (parts.train, parts.validation, parts.test))
    if place.type == "cuda" and size > (free := torch.cuda.mem_get_info(place)[0]):
        raise PretrainingError(
            f"the images take {size / 2**30:.1f} GiB and the GPU has {free / 2**30:.1f} GiB free; use fewer pixels, "
            "or weights that others have trained"
        )


def _digest(parts: Parts) -> str:
    """Return what tells images from others: all labels, the number of images, and some of them."""
    digest = hashlib.blake2b(json.dumps(parts.classes).encode(), digest_size=8)
    for part in (parts.train, parts.validation, parts.test):
        few = part.x[:: max(1, len(part) // 100)].cpu()
        digest.update(f"{list(part.x.shape)} {part.y.tolist()} {few.long().sum((1, 2, 3)).tolist()}".encode())
    return digest.hexdigest()
