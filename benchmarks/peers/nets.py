"""The networks that are compared, with a batch of inputs and labels each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
    # torchvision's compiled operators do not load beside a CPU build of torch; what imports it here does not need them.
    _LIBRARY = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@dataclass(frozen=True)
class Case:
    """A network in training mode, inputs [N, ...] and labels [N]."""

    net: nn.Module
    inputs: Tensor
    labels: Tensor


class Batches(DataLoader):
    """A loader that gives one batch `count` times, and draws no random number when it is iterated.

    A tensor that a library marks in place, as one that asks for a gradient, is a view of the batch's own.
    """

    def __init__(self, batch: tuple[Tensor, Tensor], count: int = 1) -> None:
        super().__init__(range(len(batch[0]) * count), batch_size=len(batch[0]))
        self.batch = batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        """Return the batches."""
        return (tuple(tensor.detach() for tensor in self.batch) for _ in range(len(self)))


class Timed(Batches):
    """Batches that note the processor's time when each is asked for and when there are no more."""

    def __init__(self, batch: tuple[Tensor, Tensor], count: int) -> None:
        super().__init__(batch, count)
        self._asked: list[list[float]] = []  # by iteration

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches."""
        times: list[float] = []
        self._asked.append(times)
        for batch in super().__iter__():
            times.append(time.process_time())
            yield batch
        times.append(time.process_time())

    def seconds(self) -> float:
        """Return what a batch after the first took: the mean of each iteration that was not broken off, summed."""
        whole = [times for times in self._asked if len(times) > len(self)]
        return sum((times[-1] - times[1]) / (len(self) - 1) for times in whole)


class Residual(nn.Module):
    """A block of a ResNet: a body of convolutions with BN beside a shortcut. expansion: 1 for basic, 4 for bottleneck.

    No operation works in place, which some peers cannot follow.
    """

    def __init__(self, inputs: int, width: int, stride: int, expansion: int) -> None:
        super().__init__()
        outputs = width * expansion
        convs = (
            [(inputs, width, 3, stride), (width, width, 3, 1)]
            if expansion == 1
            else [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        )
        layers: list[nn.Module] = []
        for a, b, kernel, by in convs:
            layers += [nn.Conv2d(a, b, kernel, by, kernel // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Identity() if stride == 1 and inputs == outputs else short
        self.last = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the rectified sum of body and shortcut."""
        return self.last(self.body(x) + self.short(x))


def resnet(depth: int, pixels: int, batch: int, width: int = 64, classes: int = 10) -> Case:
    """Return a ResNet-18 or -50; its stem is 3x3 up to 32 pixels, and 7x7 with a pool beyond, as usual."""
    expansion, counts = {18: (1, (2, 2, 2, 2)), 50: (4, (3, 4, 6, 3))}[depth]
    stem: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    if pixels > 32:
        stem[0] = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        stem.append(nn.MaxPool2d(3, 2, 1))
    blocks, inputs = [], width
    for stage, count in enumerate(counts):
        for index in range(count):
            blocks.append(Residual(inputs, width << stage, 2 if stage and not index else 1, expansion))
            inputs = (width << stage) * expansion
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return Case(net, torch.randn(batch, 3, pixels, pixels), torch.randint(classes, (batch,)))


def perceptron(batch: int = 128, width: int = 128) -> Case:
    """Return the 784-width-width-10 perceptron with BN."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((784, width, width)):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
    return Case(nn.Sequential(*layers, nn.Linear(width, 10)), torch.randn(batch, 784), torch.randint(10, (batch,)))


NETS: dict[str, tuple[str, Callable[[], Case]]] = {
    "mlp": ("784-128-128-10, batch 128", perceptron),
    "resnet18-32px": ("ResNet-18 of width 32, 32x32, batch 32", lambda: resnet(18, 32, 32, width=32)),
    "resnet18-64px": ("ResNet-18, 64x64, batch 32", lambda: resnet(18, 64, 32)),
    "resnet50-64px": ("ResNet-50, 64x64, batch 8", lambda: resnet(50, 64, 8)),
}


def build(name: str) -> Case:
    """Return a case by name, always the same."""
    torch.manual_seed(0)
    return NETS[name][1]()
