"""Make a source network: train a backbone on a tree of pictures, from where it was left off.

NAME.safetensors               the weights, in the names of torchvision or timm; there once all is done
NAME.json                      what was measured, with command, commit, seed and hardware
NAME.checkpoint.safetensors    the state after the last epoch, no pickle; gone once all is done
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac import storage
from xkfac.errors import MemoryFileError, XkfacError
from xkfac.experiments.augmentation import Augmentation
from xkfac.experiments.backbones import ManyHeaded, Stem, make_backbone, save_source
from xkfac.experiments.data import stream
from xkfac.experiments.files import replace_file
from xkfac.experiments.images import PictureParts, Pictures, Resize, find_tree, load_pictures
from xkfac.experiments.provenance import provenance

CHECKPOINT = "xkfac-pretraining"
CHUNK = 1000  # pictures that are measured at a time


class PretrainingError(XkfacError):
    """A source network that cannot be made as asked."""


@dataclass(frozen=True)
class Pretraining:
    """How a source network is made; all of it decides its numbers.

    validation: share of the training pictures that is set aside. lr: the greatest learning rate, reached in a line
    after `warmup`, a share of all steps, from where it falls to 0 along a cosine. decay: weight decay of all weights
    but biases and those of normalisation. smoothing: of labels. scale: range of a random crop's area, (1, 1) for none.
    mixup, cutmix: alpha of the Beta distribution of shares, 0 for none. average: decay of the running average of
    weights and BN statistics that becomes the result, 0 for the last weights themselves.

    Raises PretrainingError when one of them makes no sense.
    """

    model: str = "resnet18"
    stem: Stem = "standard"
    pixels: int = 64
    resize: Resize = "squash"
    stored: int | None = None
    validation: float = 0.1
    epochs: int = 60
    batch: int = 256
    lr: float = 0.2
    warmup: float = 0.1
    momentum: float = 0.9
    decay: float = 5e-4
    smoothing: float = 0.1
    scale: tuple[float, float] = (0.25, 1.0)
    flip: bool = True
    mixup: float = 0.0
    cutmix: float = 0.0
    average: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {"epochs": (1, math.inf)}
        limits["batch"] = (2, math.inf)  # BN has no variance of one picture
        limits |= dict.fromkeys(("lr", "decay", "mixup", "cutmix"), (0, math.inf))
        limits |= dict.fromkeys(("warmup", "momentum", "smoothing", "average"), (0, 1))
        for name, (least, below) in limits.items():
            value = getattr(self, name)
            if not least <= value < below:
                bound = "" if below == math.inf else f" and less than {below}"
                raise PretrainingError(f"{name} is {value}; it must be at least {least}{bound}")
        if self.mixup and self.cutmix:
            raise PretrainingError("mixup and cutmix are both given; a batch is mixed one way, so leave one at 0")
        for name, known in (("stem", get_args(Stem)), ("resize", get_args(Resize))):
            if getattr(self, name) not in known:
                raise PretrainingError(f"{name} is '{getattr(self, name)}'; it must be one of {', '.join(known)}")

    @property
    def augmentation(self) -> Augmentation:
        """How pictures become inputs."""
        return Augmentation(self.pixels, scale=self.scale, flip=self.flip)

    def rates(self, steps: int) -> Tensor:
        """Return the learning rates [epochs, steps] of all steps."""
        total, warm = self.epochs * steps, round(self.warmup * self.epochs * steps)
        step = torch.arange(total, dtype=torch.float64, device="cpu")
        falling = 0.5 * (1 + torch.cos(math.pi * (step - warm) / max(total - warm, 1)))
        return (self.lr * torch.where(step < warm, (step + 1) / max(warm, 1), falling)).float().view(-1, steps)


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
    data: str | PictureParts,
    weights: str | Path,
    settings: Pretraining | None = None,
    *,
    task: str = "source",
    folder: Path | None = None,
    device: str | torch.device = "auto",
    cache: Path | None = None,
    workers: int = 1,
    progress: Callable[[Epoch], None] | None = None,
    decoding: Callable[[int, int], None] | None = None,
) -> Pretrained:
    """Train a source network on a tree of pictures, write its weights, and return what was measured.

    data: the name of a tree in `folder`, by default in XKFAC_DATA, or its parts. weights: the .safetensors file to
    make. The same call goes on after an interruption, to the same numbers. The validation part is measured after every
    epoch, the test part once at the end. progress: called after every epoch. cache, workers, decoding: as in
    `load_pictures`.

    Raises PretrainingError when the file is there already, a checkpoint beside it is of other settings or data, the
    loss is not finite, or the pictures do not fit on the device.
    """
    settings, path, place = settings or Pretraining(), Path(weights), _place(device)
    _check_target(path)
    name = data if isinstance(data, str) else "pictures"
    if isinstance(data, str):
        tree = find_tree(data, folder)
        name = tree.stem
        data = load_pictures(
            tree,
            pixels=settings.pixels,
            resize=settings.resize,
            stored=settings.stored,
            validation=settings.validation,
            cache=cache,
            workers=workers,
            progress=decoding,
        )
    _check_data(data, settings, place)
    with _tuned(place), ThreadPoolExecutor(1) as writer:
        job = _Job(data.to(place), path, settings, task, writer)
        job.restore()
        while len(job.history) < settings.epochs:
            job.epoch()
            if progress is not None:
                progress(job.history[-1])
        return job.finish(name, place)


class _Job:
    """A source network in the making."""

    def __init__(
        self, parts: PictureParts, path: Path, settings: Pretraining, task: str, writer: ThreadPoolExecutor
    ) -> None:
        self.parts, self.path, self.settings, self.task = parts, path, settings, task
        self._writer, self._written = writer, writer.submit(lambda: None)
        place = parts.train.x.device
        net = make_backbone(settings.model, {task: len(parts.classes)}, stem=settings.stem, seed=settings.seed)
        net = net.to(place, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.trainer = _Trainer(net, parts.train, settings)
        self.history: list[Epoch] = []
        self._checkpoint = path.with_name(f"{path.stem}.checkpoint.safetensors")
        told = {**asdict(settings), "task": task, "pictures": _digest(parts)}
        self._told: dict[str, Any] = json.loads(json.dumps(told))

    def restore(self) -> None:
        """Take up the state of the checkpoint, if there is one."""
        if not self._checkpoint.exists():
            return
        remedy = f"remove '{self._checkpoint}' to start anew"
        try:
            description, tensors = storage.read(self._checkpoint, CHECKPOINT)
        except MemoryFileError as error:
            raise PretrainingError(f"the checkpoint cannot be gone on with: {error}, or {remedy}") from None
        for field, value in self._told.items():
            if description["told"].get(field) != value:
                raise PretrainingError(
                    f"'{self._checkpoint}' is of {field} {description['told'].get(field)!r}, not {value!r}; go on with "
                    f"the former, or {remedy}"
                )
        own = self.trainer.state()
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self.history = [Epoch(**entry) for entry in description["history"]]

    def epoch(self) -> None:
        """Train for an epoch, measure, and have a checkpoint written beside the next one."""
        start, number = time.monotonic(), len(self.history)
        loss = self.trainer.epoch(number)
        if not math.isfinite(loss):
            raise PretrainingError(f"the loss is {loss} in epoch {number + 1}; lower lr, now {self.settings.lr}")
        validation = self._accuracy(self.parts.validation) if len(self.parts.validation) else None
        entry = Epoch(number + 1, self.settings.epochs, loss, validation, time.monotonic() - start)
        self.history.append(entry)
        description = {"told": self._told, "history": [asdict(one) for one in self.history]}
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.trainer.state().items()}
        self._written.result()
        self._written = self._writer.submit(storage.write, self._checkpoint, description, state, CHECKPOINT)

    def finish(self, name: str, place: torch.device) -> Pretrained:
        """Measure the test part and write the weights with what is known of them."""
        self._written.result()
        test, validation = self._accuracy(self.parts.test), self.history[-1].validation
        known = {"data": name, "test": test, "validation": validation, "settings": asdict(self.settings)}
        known |= provenance(place, torch.get_num_threads())
        seconds = sum(entry.seconds for entry in self.history)
        told = {**known, "seconds": seconds, "classes": self.parts.classes, "history": [*map(asdict, self.history)]}
        _write(self.path.with_suffix(".json"), json.dumps(told, indent=1) + "\n")
        save_source(self.trainer.result, self.path, self.task, known)
        self._checkpoint.unlink(missing_ok=True)
        return Pretrained(self.path, self.parts.classes, validation, test, tuple(self.history))

    def _accuracy(self, pictures: Pictures) -> float:
        return accuracy(self.trainer.result, pictures, self.settings.augmentation)


class _Trainer:
    """Runs epochs; on a GPU a step, augmentation included, is captured as a graph and replayed from then on.

    All that is random in an epoch, and its learning rates, are on the device before it starts; a step finds its share
    of them by its place.
    """

    def __init__(self, net: ManyHeaded, pictures: Pictures, settings: Pretraining) -> None:
        self.net, self.settings, self._pictures = net, settings, pictures
        self._device = pictures.x.device
        self._augmentation = settings.augmentation
        self._rates = settings.rates(len(pictures) // settings.batch)
        self._optimizer = _optimizer(net, settings, self._device)
        self._average = copy.deepcopy(net).requires_grad_(False) if settings.average else None
        self._place = torch.zeros(1, dtype=torch.long, device=self._device)
        self._loss = torch.zeros((), device=self._device)
        self._draws: dict[str, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def result(self) -> ManyHeaded:
        """The network to be measured and kept."""
        return self._average or self.net

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that training changes from epoch to epoch, not copied, by name."""
        state = {f"net/{name}": tensor for name, tensor in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            state[f"momentum/{name}"] = self._optimizer.state[parameter]["momentum_buffer"]
        if self._average is not None:
            state |= {f"average/{name}": tensor for name, tensor in self._average.state_dict().items()}
        return state

    def epoch(self, number: int) -> float:
        """Train for epoch `number`, from 0, and return the mean loss of its steps."""
        draws = self._drawn(number)
        if not self._draws:
            self._draws = {name: tensor.to(self._device) for name, tensor in draws.items()}
        for name, tensor in draws.items():
            self._draws[name].copy_(tensor)
        self.net.train()
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            if devices and self._graph is None:
                self._graph = self._captured()
            # Dropout and the like draw from torch's own generators.
            torch.manual_seed(stream("pretraining", "noise", self.settings.seed, number).initial_seed())
            self._place.zero_()
            self._loss.zero_()
            for _ in range(self._rates.shape[1]):
                self._step() if self._graph is None else self._graph.replay()
        if self._average is not None:
            for mine, latest in zip(self._average.buffers(), self.net.buffers(), strict=True):
                if not mine.is_floating_point():
                    mine.copy_(latest)
        return float(self._loss) / self._rates.shape[1]

    def _drawn(self, number: int) -> dict[str, Tensor]:
        """Return the draws of an epoch on the CPU, each [steps, ...], fixed by the seed and its number."""
        settings, steps = self.settings, self._rates.shape[1]
        shape = (steps, settings.batch)

        def generator(what: str) -> torch.Generator:
            return stream("pretraining", what, settings.seed, number)

        order = torch.randperm(len(self._pictures), generator=generator("order"), device="cpu")
        step = number * steps + torch.arange(steps, device="cpu")
        return {
            "order": order[: math.prod(shape)].view(shape),
            "crops": self._augmentation.draw(shape, generator("crops")),
            "mixes": _mixes(settings, steps, generator("mixes")),
            "rates": self._rates[number],
            # A running average forgets faster at first, so that it is not held back by where training started.
            "fresh": 1 - torch.minimum(torch.tensor(settings.average), (1 + step) / (10 + step)),
        }

    def _step(self) -> None:
        draw = {name: tensor.index_select(0, self._place)[0] for name, tensor in self._draws.items()}
        y = self._pictures.y.index_select(0, draw["order"])
        x = self._augmentation.augmented(self._pictures.x.index_select(0, draw["order"]), draw["crops"])
        x, share = self._mixed(x, draw["mixes"])
        with _half(self._device):
            scores = self.net(x)
        loss = F.cross_entropy(scores.float(), y, label_smoothing=self.settings.smoothing)
        if share is not None:
            other = F.cross_entropy(scores.float(), y.flip(0), label_smoothing=self.settings.smoothing)
            loss = torch.lerp(other, loss, share)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self._optimizer.param_groups:
            group["lr"].copy_(draw["rates"])
        self._optimizer.step()
        self._follow(draw["fresh"])
        self._loss += loss.detach()
        self._place += 1

    def _mixed(self, x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return inputs mixed with those of the reversed batch, and the share of a picture that is its own."""
        if self.settings.mixup:
            return torch.lerp(x.flip(0), x, mix[0]), mix[0]
        if self.settings.cutmix:
            side = torch.arange(x.shape[-1], device=x.device)
            down, across = ((side >= mix[i]) & (side < mix[i + 1]) for i in (1, 3))
            return torch.where(down[:, None] & across, x.flip(0), x), mix[0]
        return x, None

    @torch.no_grad()
    def _follow(self, fresh: Tensor) -> None:
        if self._average is None:
            return
        mine, latest = (
            [t for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()]
            for net in (self._average, self.net)
        )
        moved = torch._foreach_sub(latest, mine)
        torch._foreach_mul_(moved, fresh)
        torch._foreach_add_(mine, moved)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Return the graph of a step; those that warm it up leave no trace."""
        changed = [*self.state().values()]
        before = [tensor.clone() for tensor in changed]
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._place.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        return graph


@torch.no_grad()
def accuracy(net: nn.Module, pictures: Pictures, augmentation: Augmentation) -> float:
    """Return the percentage of pictures that a network in evaluation mode gets right."""
    net.eval()
    right = torch.zeros((), dtype=torch.long, device=pictures.x.device)
    for x, y in zip(torch.split(pictures.x, CHUNK), torch.split(pictures.y, CHUNK), strict=True):
        with _half(x.device):
            right += (net(augmentation.plain(x)).argmax(1) == y).sum()
    return 100 * right.item() / len(pictures)


def _mixes(settings: Pretraining, steps: int, generator: torch.Generator) -> Tensor:
    """Return how the batches of an epoch are mixed [steps, 5]: the own share; top, bottom, left, right of a box."""
    alpha = settings.mixup or settings.cutmix
    if not alpha:
        return torch.ones(steps, 5, device="cpu")
    with torch.random.fork_rng(devices=()):  # the Beta distribution takes no generator
        torch.default_generator.manual_seed(generator.initial_seed())
        share = torch.distributions.Beta(torch.tensor(alpha), torch.tensor(alpha)).sample((steps,))
        centre = torch.rand(2, steps)
    half = (1 - share).sqrt() / 2
    ends = torch.stack((centre - half, centre + half)).clamp(0, 1).mul(settings.pixels).round()
    if settings.cutmix:
        share = 1 - (ends[1] - ends[0]).prod(0) / settings.pixels**2
    return torch.stack((share, ends[0, 0], ends[1, 0], ends[0, 1], ends[1, 1]), -1)


def _optimizer(net: nn.Module, settings: Pretraining, device: torch.device) -> torch.optim.SGD:
    """Return SGD with a learning rate on the device and momentum from the start, as a graph needs them."""
    decayed = [parameter for parameter in net.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in net.parameters() if parameter.dim() <= 1]
    groups = [
        {"params": members, "lr": torch.zeros((), device=device), "weight_decay": decay}
        for members, decay in ((decayed, settings.decay), (others, 0.0))
        if members
    ]
    momentum = settings.momentum
    optimizer = torch.optim.SGD(groups, momentum=momentum, nesterov=momentum > 0, fused=True)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _half(device: torch.device) -> torch.autocast:
    """Return a context in which a GPU multiplies in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextlib.contextmanager
def _tuned(device: torch.device) -> Iterator[None]:
    """Let cuDNN choose its fastest algorithms; its flags are given back."""
    if device.type != "cuda":
        yield
        return
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=True):
        yield


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise PretrainingError(
            f"'{path}' could not be written ({error.strerror}); free space there, and the same call goes on"
        ) from None


def _place(device: str | torch.device) -> torch.device:
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise PretrainingError("device is 'cuda', but torch sees no GPU; use the cpu, or install a CUDA build of torch")
    return place


def _check_target(path: Path) -> None:
    if path.suffix != ".safetensors":
        raise PretrainingError(f"the weights '{path}' must end in .safetensors, which is what is written")
    if path.exists():
        raise PretrainingError(f"the weights '{path}' exist already; remove them, or choose another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PretrainingError(
            f"the folder '{path.parent}' cannot be made ({error.strerror}); choose another"
        ) from None


def _check_data(parts: PictureParts, settings: Pretraining, place: torch.device) -> None:
    if settings.batch > len(parts.train):
        raise PretrainingError(
            f"batch is {settings.batch}, but there are {len(parts.train)} training pictures; choose a smaller one"
        )
    if not len(parts.test):
        raise PretrainingError("there are no test pictures to measure the network on; load the part 'test' too")
    size = sum(part.x.numel() for part in (parts.train, parts.validation, parts.test))
    if place.type == "cuda" and size > (free := torch.cuda.mem_get_info(place)[0]):
        raise PretrainingError(
            f"the pictures take {size / 2**30:.1f} GiB and the GPU has {free / 2**30:.1f} GiB free; use fewer pixels, "
            "or weights that others have trained"
        )


def _digest(parts: PictureParts) -> str:
    """Return what tells pictures from others: all labels, the number of pictures, and some of them."""
    digest = hashlib.blake2b(json.dumps(parts.classes).encode(), digest_size=8)
    for part in (parts.train, parts.validation, parts.test):
        few = part.x[:: max(1, len(part) // 100)].cpu()
        digest.update(f"{list(part.x.shape)} {part.y.tolist()} {few.long().sum((1, 2, 3)).tolist()}".encode())
    return digest.hexdigest()
