"""Every unit as a convolution of images: its patches, written out or averaged over positions.

A linear layer is a convolution of one tap over its positions, a lone BN a depthwise one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.curvature.products import product
from xkfac.model.tracing import Convolution
from xkfac.model.units import Unit

_POINT = Convolution((1,), (1,), ((0, 0),), (1,))


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution: at position t, tap j reads pixel t * stride + j * dilation - low."""

    size: int
    taps: int
    stride: int
    dilation: int
    low: int
    high: int

    @property
    def positions(self) -> int:
        """The number of positions."""
        return (self.size + self.low + self.high - self.dilation * (self.taps - 1) - 1) // self.stride + 1

    def pixels(self, tap: int) -> list[int]:
        """Return the pixels that a tap reads, padding left out."""
        first = tap * self.dilation - self.low
        read = range(first, first + self.positions * self.stride, self.stride)
        return [pixel for pixel in read if 0 <= pixel < self.size]

    def live(self) -> tuple[Axis, int]:
        """Return the axis without outer taps that read nothing but padding, and its first tap."""
        taps = [tap for tap in range(self.taps) if self.pixels(tap)] or range(self.taps)
        first, last = taps[0], taps[-1]
        # How far the taps that are left reach beyond the image; negative where they stop short of its border.
        low = self.low - first * self.dilation
        end = (self.positions - 1) * self.stride + (last - first) * self.dilation - low
        return Axis(self.size, last - first + 1, self.stride, self.dilation, low, end - self.size + 1), first


def axes_of(convolution: Convolution, space: torch.Size) -> list[Axis]:
    """Return the axes of a convolution on images of size `space`."""
    fields = zip(space, convolution.kernel, convolution.stride, convolution.dilation, convolution.padding, strict=True)
    return [Axis(size, taps, stride, dilation, *pads) for size, taps, stride, dilation, pads in fields]


def padded(image: Tensor, pads: list[tuple[int, int]]) -> Tensor:
    """Return an image with zeros around its last axes, or cropped where a pad is negative."""
    flat = [side for pair in reversed(pads) for side in pair]
    return F.pad(image, flat) if any(flat) else image


def unroll(input: Tensor, convolution: Convolution, groups: int, *, homogeneous: bool = False) -> Tensor:
    """Return the patches of `input` [N, C, ...] as [groups, N, S, C / groups * K], features ordered as in a weight.

    With `homogeneous` a 1 is appended to each; the patches are written once, in their place.
    """
    axes = axes_of(convolution, input.shape[2:])
    image = padded(input, [(axis.low, axis.high) for axis in axes]).contiguous()
    examples, channels = image.shape[:2]
    channels //= groups
    positions = [axis.positions for axis in axes]
    steps = image.stride()[2:]
    windows = image.as_strided(
        (groups, examples, *positions, channels, *convolution.kernel),
        (
            image.stride(1) * channels,
            image.stride(0),
            *(step * axis.stride for step, axis in zip(steps, axes, strict=True)),
            image.stride(1),
            *(step * axis.dilation for step, axis in zip(steps, axes, strict=True)),
        ),
    )
    features = channels * math.prod(convolution.kernel)
    patches = image.new_empty(groups, examples, math.prod(positions), features + homogeneous)
    patches[..., :features].view(windows.shape).copy_(windows)
    if homogeneous:
        patches[..., features] = 1
    return patches


class Patches:
    """How the inputs of a unit are patches x [groups, N, S, D] of images [N, C, ...].

    A unit that a forward pass calls several times has the positions of all calls side by side; the patches of a
    convolution are written out for that, and are then the image themselves.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.groups, self.homogeneous = unit.shape[0], unit.homogeneous
        self.convolution = _POINT if unit.convolution is None or unit.calls > 1 else unit.convolution
        self._reads: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def image(self, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return a unit's inputs, one per call, as an image, without a copy of a single one of the right type."""
        images = [self._image(input if input.dtype == dtype else input.to(dtype)) for input in inputs]
        return images[0] if len(images) == 1 else torch.cat(images, 2)

    def _image(self, input: Tensor) -> Tensor:
        if self.unit.convolution is not None:
            if self.convolution is not _POINT:
                return input
            return unroll(input, self.unit.convolution, self.groups).permute(1, 0, 3, 2).flatten(1, 2)
        if input.dim() == 2:
            return input.unsqueeze(2)
        return input.flatten(1, -2).mT if self.unit.kind == "linear" else input.flatten(2)

    def is_row(self, image: Tensor) -> bool:
        """Whether the patches of an image are its rows: a linear layer's inputs, one per example."""
        return self.convolution is _POINT and self.groups == 1 and image.shape[2] == 1

    def positions(self, image: Tensor) -> int:
        """Return S."""
        if self.convolution is _POINT:
            return image.shape[2]
        return math.prod(axis.positions for axis in axes_of(self.convolution, image.shape[2:]))

    def unrolled(self, image: Tensor) -> Tensor:
        """Return the patches [groups, N, S, D]."""
        if self.convolution is _POINT:
            x = torch.unflatten(image, 1, (self.groups, -1)).permute(1, 0, 3, 2)
            return F.pad(x, (0, 1), value=1.0) if self.homogeneous else x
        return unroll(image, self.convolution, self.groups, homogeneous=self.homogeneous)

    def averaged(self, image: Tensor) -> Tensor:
        """Return the patches' means over positions, [groups, N, 1, D], from the image itself, read once.

        The homogeneous coordinate is left out.
        """
        space = image.shape[2:]
        if (space, image.dtype) not in self._reads:
            reads = reduce(torch.kron, [_reads(axis) for axis in axes_of(self.convolution, space)])
            self._reads[space, image.dtype] = reads.to(image)
        reads = self._reads[space, image.dtype]
        last = image.movedim(1, -1)
        if last.is_contiguous():
            sums = product(reads.mT.expand(len(image), -1, -1), last.flatten(1, -2)).mT
        else:
            sums = product(image.reshape(1, -1, space.numel()), reads[None])
        return (sums / self.positions(image)).reshape(len(image), self.groups, 1, -1).transpose(0, 1)


def _reads(axis: Axis) -> Tensor:
    """Return [size, taps]: at how many positions a tap reads a pixel. These numbers are exact in any dtype."""
    reads = torch.zeros(axis.size, axis.taps)
    for tap in range(axis.taps):
        reads[axis.pixels(tap), tap] = 1
    return reads
