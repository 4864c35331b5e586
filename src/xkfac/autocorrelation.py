"""The Gram matrix of a convolution's patches, without writing the patches out where that is the longer way.

At stride 1 the block (k, k') of taps would depend on k' - k alone if the convolution had every position at which a tap
still touches the image: it would be the image's autocorrelation, sum_u X[u] X[u + k' - k]^T. A 3x3 kernel of 81 blocks
has 25 such lags, 13 up to transposition. A real convolution stops short of that by a few positions on each side of an
axis, so that its positions are

    prod over axes of (all - low side - high side),

and multiplying this out gives the patches' Gram matrix exactly, as a signed sum: the autocorrelation of the whole
image, those of strips along its borders (the taps of the thin axes written out), and the Gram matrices of its corners.
All of them are sums over batches, so they are what is accumulated; the matrix itself is put together once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor
from torch.nn import grad as convolution_gradients

from xkfac.grams import Gram, mirror_
from xkfac.patches import Axis, Patches, axes_of, padded

Way = Literal["unrolled", "products", "convolution"]

_WEIGHT_GRADIENTS: dict[int, Callable[..., Tensor]] = {
    1: convolution_gradients.conv1d_weight,
    2: convolution_gradients.conv2d_weight,
    3: convolution_gradients.conv3d_weight,
}


def way_of(axes: list[Axis], channels: int, device: torch.device, dtype: torch.dtype) -> Way:
    """Return how the Gram matrix of patches is computed fastest, as measured.

    convolution  lags are the weight gradient of a convolution of the image with itself, so that nothing is written
                 out: on a CPU, for images of 16 pixels or more, whatever the number of channels
    products     lags are written out beside the image, some examples at a time, for one product: on a GPU, in double
                 precision, for small images
    unrolled     patches are written out, some examples at a time: kernels of one tap, strides, and instead of products
                 of fewer than 16 channels
    """
    if all(axis.taps == 1 for axis in axes) or any(axis.stride > 1 for axis in axes):
        return "unrolled"
    if device.type == "cpu" and dtype == torch.float32 and math.prod(axis.size for axis in axes) >= 16:
        return "convolution"
    return "unrolled" if channels < 16 else "products"


class PatchGram:
    """Accumulates sum_ns x_ns x_ns^T of patches x, homogeneous coordinate left out, over images."""

    def __init__(self, patches: Patches, way: Way | None = None) -> None:
        self.patches, self.way = patches, way
        self._of: dict[torch.Size, _OfSize] = {}

    def add(self, image: Tensor) -> None:
        """Take the patches of an image [N, C, ...]."""
        of = self._of.get(image.shape[2:])
        if of is None:
            of = self._of[image.shape[2:]] = _OfSize(self.patches, image, self.way)
        of.add(image)

    def sum(self) -> Tensor | None:
        """Return the sum [groups, C / groups * K, ...], ordered as in a weight, exactly symmetric; None if nothing."""
        total: Tensor | None = None
        for of in self._of.values():
            total = of.sum() if total is None else total + of.sum()
        return total


class _OfSize:
    """Accumulates over images of one size, of which only taps that reach the image are looked at."""

    def __init__(self, patches: Patches, image: Tensor, way: Way | None) -> None:
        self.kernel, self.groups = patches.convolution.kernel, patches.groups
        self.channels = image.shape[1] // patches.groups
        live = [axis.live() for axis in axes_of(patches.convolution, image.shape[2:])]
        axes = [axis for axis, _ in live]
        self.taps = [slice(first, first + axis.taps) for axis, first in live]
        self.way = way or way_of(axes, self.channels, image.device, image.dtype)
        self.parts: list[_Unrolled] | list[_Lags]
        self.parts = [_Unrolled(axes)] if self.way == "unrolled" else _parts(axes, self.way)

    def add(self, image: Tensor) -> None:
        """Take images [N, C, ...]."""
        image = torch.unflatten(image, 1, (self.groups, self.channels))
        for part in self.parts:
            part.add(image)

    def sum(self) -> Tensor:
        """Return the sum, zero for taps that reach no image."""
        rank = len(self.kernel)
        first = self.parts[0].blocks()
        total = first.new_zeros(self.groups, *self.kernel, self.channels, *self.kernel, self.channels)
        inner = total[(slice(None), *self.taps, slice(None), *self.taps, slice(None))]
        for part in self.parts:
            inner[part.place].add_(first if part is self.parts[0] else part.blocks(), alpha=part.sign)
        order = [0, rank + 1, *range(1, rank + 1), 2 * rank + 2, *range(rank + 2, 2 * rank + 2)]
        columns = self.channels * math.prod(self.kernel)
        return mirror_(total.permute(order).reshape(self.groups, columns, columns))


def _examples_at_once(image: Tensor, features: int) -> int:
    """Return how many examples are written out together: as many as fit the processor's cache, or a GPU's memory."""
    limit = 2**23 if image.device.type == "cpu" else 2**28
    return max(1, limit // max(1, features * image.element_size()))


def _windows(image: Tensor, axes: list[Axis]) -> Tensor:
    """Return a view [groups, N, *positions, *taps, F] of an image [groups, N, *space, F] with its padding."""
    steps = image.stride()[2:-1]
    strides = [step * axis.stride for step, axis in zip(steps, axes, strict=True)]
    dilations = [step * axis.dilation for step, axis in zip(steps, axes, strict=True)]
    shape = (*image.shape[:2], *(axis.positions for axis in axes), *(axis.taps for axis in axes), image.shape[-1])
    return image.as_strided(
        shape, (*image.stride()[:2], *strides, *dilations, image.stride(-1)), image.storage_offset()
    )


class _Unrolled:
    """The whole Gram matrix, from patches that are written out."""

    sign = 1

    def __init__(self, axes: list[Axis]) -> None:
        self.axes, self.rank = axes, len(axes)
        self.place: tuple[slice, ...] = (slice(None),)
        self.gram = Gram()

    def add(self, image: Tensor) -> None:
        """Take images [N, groups, F, *space]."""
        image = padded(image, [(axis.low, axis.high) for axis in self.axes])
        if all(axis.taps == 1 for axis in self.axes):
            steps = [slice(None, None, axis.stride) for axis in self.axes]
            chosen = image[(slice(None), slice(None), slice(None), *steps)]
            self.gram.add(chosen.flatten(3).permute(1, 0, 3, 2))
            return
        image = image.movedim((1, 2), (0, -1)).contiguous()
        features = math.prod(axis.positions * axis.taps for axis in self.axes) * image.shape[0] * image.shape[-1]
        for some in torch.split(image, _examples_at_once(image, features), 1):
            rows = _windows(some, self.axes).flatten(2 + self.rank).flatten(2, -2)
            self.gram.add(rows)

    def blocks(self) -> Tensor:
        """Return [groups, *taps, F, *taps, F]."""
        total = self.gram.sum()
        assert total is not None
        shape = [*(axis.taps for axis in self.axes), total.shape[1] // math.prod(axis.taps for axis in self.axes)]
        return total.view(total.shape[0], *shape, *shape)


@dataclass(frozen=True)
class _Side:
    """Positions of an axis beyond its own on one side, [start, stop) as the pixel of tap 0, and taps that reach it."""

    axis: Axis
    start: int
    stop: int
    taps: range

    @classmethod
    def of(cls, axis: Axis, start: int, stop: int) -> _Side:
        """Return a side with those taps that read a pixel from one of its positions."""
        reach = [
            tap
            for tap in range(axis.taps)
            if start + tap * axis.dilation < axis.size and stop + tap * axis.dilation > 0
        ]
        return cls(axis, start, stop, range(reach[0], reach[-1] + 1) if reach else range(0))

    def written_out(self, image: Tensor, dim: int) -> Tensor:
        """Return an image [N, groups, T, F, *space] as [N * positions, groups, T * taps, F, *space without dim]."""
        first, last = self.start + self.taps[0] * self.axis.dilation, self.stop + self.taps[-1] * self.axis.dilation
        pads = [(0, 0)] * (image.dim() - dim)
        pads[0] = (-first, last - self.axis.size)
        image = padded(image, pads).unfold(dim, (len(self.taps) - 1) * self.axis.dilation + 1, 1)
        image = image[..., :: self.axis.dilation].movedim((dim, -1), (1, 4))
        return image.flatten(3, 4).flatten(0, 1)


def _parts(axes: list[Axis], way: Way) -> list[_Lags]:
    """Return what the Gram matrix of patches at stride 1 is a signed sum of."""
    choices: list[list[_Side | None]] = []
    for axis in axes:
        low = _Side.of(axis, -axis.dilation * (axis.taps - 1), -axis.low)
        high = _Side.of(axis, axis.positions - axis.low, axis.size)
        choices.append([None, *(side for side in (low, high) if side.start < side.stop and side.taps)])
    return [_Lags(axes, list(sides), way) for sides in product(*choices)]


class _Lags:
    """The part of a Gram matrix with all positions along some axes, and those of one side along the others."""

    def __init__(self, axes: list[Axis], sides: list[_Side | None], way: Way) -> None:
        self.axes, self.sides = axes, sides
        self.long = [axis for axis, side in zip(axes, sides, strict=True) if side is None]
        thin = [side for side in sides if side is not None]
        self.sign = (-1) ** len(thin)
        # A lag reaches over less than the image; the first axis needs it in one direction only.
        self.reach = [min(axis.taps, -(-axis.size // axis.dilation)) - 1 for axis in self.long]
        self.lags = [1 + reach * (1 + (place > 0)) for place, reach in enumerate(self.reach)]
        self.way: Way = "products" if thin else way
        chosen = [slice(None) if s is None else slice(s.taps.start, s.taps.stop) for s in sides]
        self.place = (slice(None), *chosen, slice(None), *chosen, slice(None))
        self.gram = Gram()
        self.total: Tensor | None = None

    def add(self, image: Tensor) -> None:
        """Take images [N, groups, F, *space]."""
        image, dim = image.unsqueeze(2), 4
        for side in self.sides:
            if side is None:
                dim += 1
            else:
                image = side.written_out(image, dim)
        image = image.flatten(2, 3)
        if not self.long:
            self.gram.add(image.transpose(0, 1).unsqueeze(2))
        elif self.way == "convolution":
            self._add_convolution(image)
        else:
            self._add_products(image)

    def _add_convolution(self, image: Tensor) -> None:
        """Add the lags as the weight gradient of a convolution of `image` with itself."""
        groups, features = image.shape[1:3]
        image = image.flatten(1, 2)
        pads = [reach * axis.dilation for reach, axis in zip(self.reach, self.long, strict=True)]
        ahead = padded(image, [(0, pads[0]), *[(0, 0)] * (len(pads) - 1)])
        lags = _WEIGHT_GRADIENTS[len(self.long)](
            ahead,
            (groups * features, features, *self.lags),
            image,
            padding=(0, *pads[1:]),
            dilation=tuple(axis.dilation for axis in self.long),
            groups=groups,
        )
        self.total = lags if self.total is None else self.total.add_(lags)

    def _add_products(self, image: Tensor) -> None:
        """Add the lags as one product of `image` with all its shifts, some examples at a time."""
        groups, features = image.shape[1:3]
        image = image.movedim((1, 2), (0, -1))
        pads = [reach * axis.dilation for reach, axis in zip(self.reach, self.long, strict=True)]
        around = padded(
            image, [(0 if place == 0 else pad, pad) for place, pad in enumerate(pads)] + [(0, 0)]
        ).contiguous()
        shifts = [
            Axis(axis.size, lags, 1, axis.dilation, 0 if place == 0 else pad, pad)
            for place, (axis, lags, pad) in enumerate(zip(self.long, self.lags, pads, strict=True))
        ]
        size = groups * features * math.prod(self.lags) * math.prod(axis.size for axis in self.long)
        at_once = _examples_at_once(image, size)
        if self.total is None:
            self.total = image.new_zeros(groups, features, math.prod(self.lags) * features)
        for some, shifted in zip(torch.split(image, at_once, 1), torch.split(around, at_once, 1), strict=True):
            windows = _windows(shifted, shifts).flatten(2 + len(shifts)).flatten(1, -2)
            self.total.baddbmm_(some.flatten(1, -2).mT, windows)

    def _by_lag(self) -> Tensor:
        """Return the lags in both directions, [groups, *lags, F, F]."""
        assert self.total is not None
        rank = len(self.long)
        if self.way == "convolution":
            groups = self.total.shape[0] // self.total.shape[1]
            lags = torch.unflatten(self.total, 0, (groups, -1)).movedim((1, 2), (-2, -1))
        else:
            lags = torch.unflatten(self.total, 2, (*self.lags, -1)).movedim(1, -2)
        before = lags[:, 1:].flip(list(range(1, rank + 1))).mT
        return torch.cat([before, lags], 1)

    def blocks(self) -> Tensor:
        """Return [groups, *taps, F, *taps, F]."""
        thin = [1 if side is None else len(side.taps) for side in self.sides]
        taps = [axis.taps if side is None else 1 for axis, side in zip(self.axes, self.sides, strict=True)]
        if self.long:
            total = self._of_taps(self._by_lag(), taps)
        else:
            whole = self.gram.sum()
            assert whole is not None
            total = whole.view(-1, *taps, *taps, *whole.shape[1:])
        rank, features = len(taps), total.shape[-1] // math.prod(thin)
        total = total.view(-1, *taps, *taps, *thin, features, *thin, features)
        first, second = range(1, rank + 1), range(rank + 1, 2 * rank + 1)
        third, fourth = range(2 * rank + 1, 3 * rank + 1), range(3 * rank + 2, 4 * rank + 2)
        one = [axis for pair in zip(first, third, strict=True) for axis in pair]
        two = [axis for pair in zip(second, fourth, strict=True) for axis in pair]
        total = total.permute(0, *one, 3 * rank + 1, *two, 4 * rank + 2)
        shape = [tap * thin_taps for tap, thin_taps in zip(taps, thin, strict=True)]
        return total.reshape(total.shape[0], *shape, features, *shape, features)

    def _of_taps(self, lags: Tensor, taps: list[int]) -> Tensor:
        """Return [groups, *taps, *taps, F, F] from lags in both directions, zero where a lag reaches no image."""
        for place, (axis, reach) in enumerate(zip(self.long, self.reach, strict=True)):
            index = torch.arange(axis.taps)
            lag = (index[None, :] - index[:, None]).flatten()
            dim = 1 + place
            chosen = lags.index_select(dim, (lag.clamp(-reach, reach) + reach).to(lags.device))
            inside = (lag.abs() <= reach).to(lags)
            lags = chosen * inside.view(-1, *[1] * (chosen.dim() - dim - 1))
        # [groups, pairs of taps by axis, F, F] -> first taps of all axes, then second taps
        pairs = [axis.taps for axis in self.long for _ in range(2)]
        lags = lags.reshape(lags.shape[0], *pairs, *lags.shape[-2:])
        rank = len(self.long)
        order = [0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1, 2 * rank + 2]
        lags = lags.permute(order)
        return lags.reshape(lags.shape[0], *taps, *taps, *lags.shape[-2:])
