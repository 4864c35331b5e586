"""The training of a source network: how it is made, and its epochs, captured as graphs on a GPU."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xkfac.errors import XkfacError
from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import Part, drawing_from, stream
from xkfac.experiments.networks.backbones import ManyHeaded, Stem
from xkfac.experiments.recipes.recipe import Resize, Scale
from xkfac.experiments.recipes.toml_tables import Share, whole
from xkfac.model.cuda_graphs import captured
from xkfac.plain_values import Amount, check_fields

CHUNK = 1000  # images that are measured at a time


class PretrainingError(XkfacError):
    """A source network that cannot be made as asked."""


@dataclass(frozen=True)
class Pretraining:
    """How a source network is made; all of it decides its numbers.

    validation: share of the training images that is set aside. lr: the greatest learning rate, reached in a line
    after `warmup`, a share of all steps, from where it falls to 0 along a cosine. decay: weight decay of all weights
    but biases and those of normalisation. smoothing: of labels. scale: range of a random crop's area, (1, 1) for none.
    cutmix: alpha of the Beta distribution of shares, 0 for none.
    """

    model: str = "resnet18"
    stem: Stem = "standard"
    pixels: Annotated[int, whole(1, 8192)] = 64
    resize: Resize = "squash"
    validation: Share = 0.1
    epochs: Annotated[int, whole(1, 100_000)] = 60
    batch: Annotated[int, whole(2)] = 256  # BN has no variance of one image
    lr: Amount = 0.2
    warmup: Share = 0.1
    momentum: Share = 0.9
    decay: Amount = 5e-4
    smoothing: Share = 0.1
    scale: Scale = (0.25, 1.0)
    flip: bool = True
    cutmix: Amount = 0.0
    seed: Annotated[int, whole(0, 2**53)] = 0

    def __post_init__(self) -> None:
        check_fields(self, PretrainingError)

    @property
    def augmentation(self) -> Augmentation:
        """How images become inputs."""
        return Augmentation(self.pixels, (self.scale[0], self.scale[1]), flip=self.flip)

    def rates(self, steps: int) -> Tensor:
        """Return the learning rates [epochs, steps] of all steps."""
        total, warm = self.epochs * steps, round(self.warmup * self.epochs * steps)
        step = torch.arange(total, dtype=torch.float64, device="cpu")
        falling = 0.5 * (1 + torch.cos(math.pi * (step - warm) / max(total - warm, 1)))
        return (self.lr * torch.where(step < warm, (step + 1) / max(warm, 1), falling)).float().view(-1, steps)


class Trainer:
    """Runs epochs; on a GPU a step, augmentation included, is captured as a graph and replayed from then on.

    All that is random in an epoch, and its learning rates, are on the device before it starts; a step finds its share
    of them by its place.
    """

    def __init__(self, net: ManyHeaded, pictures: Part, settings: Pretraining) -> None:
        self.net, self.settings, self._pictures = net, settings, pictures
        self._device = pictures.x.device
        self._rates = settings.rates(len(pictures) // settings.batch)
        self._optimizer = _optimizer(net, settings, self._device)
        self._place = torch.zeros(1, dtype=torch.long, device=self._device)
        self._loss = torch.zeros((), device=self._device)
        self._draws: dict[str, Tensor] = {}
        self._graph: torch.cuda.CUDAGraph | None = None

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that training changes from epoch to epoch, not copied, by name."""
        state = {f"net/{name}": tensor for name, tensor in self.net.state_dict().items()}
        for name, parameter in self.net.named_parameters():
            state[f"momentum/{name}"] = self._optimizer.state[parameter]["momentum_buffer"]
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
                self._graph = captured(self._step, warm_up=self._warm_up, changed=self.state().values())
            # Dropout and the like draw from torch's own generators.
            torch.manual_seed(stream("pretraining", "noise", self.settings.seed, number).initial_seed())
            self._place.zero_()
            self._loss.zero_()
            for _ in range(self._rates.shape[1]):
                self._step() if self._graph is None else self._graph.replay()
        return float(self._loss) / self._rates.shape[1]

    def _drawn(self, number: int) -> dict[str, Tensor]:
        """Return the draws of an epoch on the CPU, each [steps, ...], fixed by the seed and its number."""
        settings, shape = self.settings, (self._rates.shape[1], self.settings.batch)
        orders, crops = (stream("pretraining", what, settings.seed, number) for what in ("order", "crops"))
        order = torch.randperm(len(self._pictures), generator=orders, device="cpu")
        return {
            "order": order[: math.prod(shape)].view(shape),
            "crops": settings.augmentation.draw(shape, crops),
            "mixes": mixes(settings, shape[0], number),
            "rates": self._rates[number],
        }

    def _step(self) -> None:
        draw = {name: tensor.index_select(0, self._place)[0] for name, tensor in self._draws.items()}
        y = self._pictures.y.index_select(0, draw["order"])
        x = self.settings.augmentation.augmented(self._pictures.x.index_select(0, draw["order"]), draw["crops"])
        if self.settings.cutmix:
            x = self._mixed(x, draw["mixes"])
        with _half(self._device):
            scores = self.net(x)
        loss = F.cross_entropy(scores.float(), y, label_smoothing=self.settings.smoothing)
        if self.settings.cutmix:
            other = F.cross_entropy(scores.float(), y.flip(0), label_smoothing=self.settings.smoothing)
            loss = torch.lerp(other, loss, draw["mixes"][0])
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for group in self._optimizer.param_groups:
            group["lr"].copy_(draw["rates"])
        self._optimizer.step()
        self._loss += loss.detach()
        self._place += 1

    def _mixed(self, x: Tensor, mix: Tensor) -> Tensor:
        """Return inputs with a box of each taken from the reversed batch."""
        side = torch.arange(x.shape[-1], device=x.device)
        down, across = ((side >= mix[i]) & (side < mix[i + 1]) for i in (1, 3))
        return torch.where(down[:, None] & across, x.flip(0), x)

    def _warm_up(self) -> None:
        self._place.zero_()
        self._step()


@torch.no_grad()
def accuracy(net: nn.Module, pictures: Part, augmentation: Augmentation) -> float:
    """Return the percentage of images that a network in evaluation mode gets right."""
    net.eval()
    right = torch.zeros((), dtype=torch.long, device=pictures.x.device)
    for x, y in zip(torch.split(pictures.x, CHUNK), torch.split(pictures.y, CHUNK), strict=True):
        with _half(x.device):
            right += (net(augmentation.plain(x)).argmax(1) == y).sum()
    return 100 * right.item() / len(pictures)


def mixes(settings: Pretraining, steps: int, number: int) -> Tensor:
    """Return how the batches of an epoch are mixed [steps, 5]: the own share; top, bottom, left, right of a box."""
    if not settings.cutmix:
        return torch.ones(steps, 5, device="cpu")
    with drawing_from("pretraining", "mixes", settings.seed, number):  # the Beta distribution takes no generator
        alpha = torch.tensor(settings.cutmix)
        share = torch.distributions.Beta(alpha, alpha).sample((steps,))
        centre = torch.rand(2, steps)
    half = (1 - share).sqrt() / 2
    ends = torch.stack((centre - half, centre + half)).clamp(0, 1).mul(settings.pixels).round()
    share = 1 - (ends[1] - ends[0]).prod(0) / settings.pixels**2
    return torch.stack((share, ends[0, 0], ends[1, 0], ends[0, 1], ends[1, 1]), -1)


def _optimizer(net: nn.Module, settings: Pretraining, device: torch.device) -> torch.optim.SGD:
    """Return SGD with a learning rate on the device and momentum from the start, as a graph needs them."""
    groups = [
        {"params": members, "lr": torch.zeros((), device=device), "weight_decay": settings.decay if decayed else 0.0}
        for decayed in (True, False)
        if (members := [parameter for parameter in net.parameters() if (parameter.dim() > 1) == decayed])
    ]
    momentum = settings.momentum
    optimizer = torch.optim.SGD(groups, momentum=momentum, nesterov=momentum > 0, fused=True)
    for parameter in net.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _half(device: torch.device) -> torch.autocast:
    """Return a context in which a GPU multiplies in bfloat16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
