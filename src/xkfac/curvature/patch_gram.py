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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import grad as convolution_gradients

from xkfac.curvature.gram import Gram
from xkfac.curvature.patches import Axis, Patches, axes_of, padded
from xkfac.curvature.products import add_product_, rounded, summed_in

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

    def add(self, image: Tensor, scale: float = 1.0) -> None:
        """Take the patches of an image [N, C, ...], each counting `scale`, which may be negative."""
        of = self._of.get(image.shape[2:])
        if of is None:
            of = self._of[image.shape[2:]] = _OfSize(self.patches, image, self.way)
        image = torch.unflatten(rounded(image), 1, (of.groups, of.channels))
        for part in of.parts:
            part.add(image, scale)

    def sum(self) -> Tensor | None:
        """Return the sum [groups, C / groups * K, ...], ordered as in a weight, exactly symmetric; None if nothing."""
        for of in self._of.values():
            columns = of.channels * math.prod(of.kernel)
            total = of.like.new_empty(of.groups, columns, columns, dtype=summed_in(of.like.dtype))
            self.into(total)
            return total
        return None

    def into(self, total: Tensor, scale: float = 1.0) -> None:
        """Write scale times the sum to `total` [groups, C / groups * K, ...], which is written to once if possible."""
        for place, of in enumerate(self._of.values()):
            of.into(total, scale, fresh=place == 0)


class _OfSize:
    """Accumulates over images of one size, of which only taps that reach the image are looked at."""

    def __init__(self, patches: Patches, image: Tensor, way: Way | None) -> None:
        self.kernel, self.groups = patches.convolution.kernel, patches.groups
        self.channels = image.shape[1] // patches.groups
        self.like = image.new_empty(0)
        live = [axis.live() for axis in axes_of(patches.convolution, image.shape[2:])]
        axes = [axis for axis, _ in live]
        self.taps = [slice(first, first + axis.taps) for axis, first in live]
        self.way = way or way_of(axes, self.channels, image.device, image.dtype)
        self.parts: Sequence[_Unrolled | _Lags]
        self.parts = [_Unrolled(axes)] if self.way == "unrolled" else _parts(axes, self.way)
        self.whole = [axis.taps for axis in axes] == list(self.kernel) and self.parts[0].whole

    def into(self, total: Tensor, scale: float, *, fresh: bool) -> None:
        """Add scale times the sum to `total`, zero for taps that reach no image; what a `fresh` one holds is void."""
        blocks = torch.unflatten(torch.unflatten(total, 2, (self.channels, *self.kernel)), 1, (-1, *self.kernel))
        # [groups, C, *kernel, C, *kernel] -> channels last
        rank = len(self.kernel)
        blocks = blocks.movedim((1, rank + 2), (rank + 1, -1))
        if fresh and not self.whole:
            total.zero_()
        inner = blocks[(slice(None), *self.taps, slice(None), *self.taps, slice(None))]
        for place, part in enumerate(self.parts):
            part.into(inner[part.place], scale * part.sign, fresh=fresh and self.whole and place == 0)


def _examples_at_once(image: Tensor, features: int) -> int:
    """Return how many examples are written out together: as many as fit the processor's cache, or a GPU's memory."""
    limit = 2**22 if image.device.type == "cpu" else 2**28
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


def _in_large_pieces(image: Tensor) -> Tensor:
    """Return an image [..., F] in numbers of 16 bytes where F allows: a GPU copies these several times faster."""
    steps = (*image.stride()[:-1], image.shape[-1], image.storage_offset())
    fits = image.stride(-1) == 1 and all(step * image.element_size() % 16 == 0 for step in steps)
    return image.view(torch.complex128) if fits and image.shape[-1] * image.element_size() > 16 else image


def _written_out(image: Tensor, axes: list[Axis]) -> Tensor:
    """Return the windows of an image [groups, N, *space, F] with its padding, [groups, N, positions, taps * F]."""
    windows = _windows(_in_large_pieces(image), axes).flatten(2 + len(axes)).flatten(2, -2)
    return windows.view(image.dtype)


class _Unrolled:
    """The whole Gram matrix, from patches that are written out."""

    sign = 1
    whole = True

    def __init__(self, axes: list[Axis]) -> None:
        self.axes = axes
        self.place: tuple[slice, ...] = (slice(None),)
        self.gram = Gram()

    def add(self, image: Tensor, scale: float) -> None:
        """Take images [N, groups, F, *space]."""
        image = padded(image, [(axis.low, axis.high) for axis in self.axes])
        if all(axis.taps == 1 for axis in self.axes):
            steps = [slice(None, None, axis.stride) for axis in self.axes]
            chosen = image[(slice(None), slice(None), slice(None), *steps)]
            self.gram.add(chosen.flatten(3).permute(1, 0, 3, 2), scale)
            return
        image = image.movedim((1, 2), (0, -1)).contiguous()
        features = math.prod(axis.positions * axis.taps for axis in self.axes) * image.shape[0] * image.shape[-1]
        for some in torch.split(image, _examples_at_once(image, features), 1):
            self.gram.add(_written_out(some, self.axes), scale)

    def into(self, total: Tensor, scale: float, *, fresh: bool) -> None:
        """Add scale times the matrix to `total` [groups, *taps, F, *taps, F], or write it there."""
        gram = self.gram.sum()
        assert gram is not None
        _put(gram.view(total.shape), total, scale, fresh=fresh)


def _put(values: Tensor, total: Tensor, scale: float, *, fresh: bool) -> None:
    if fresh:
        torch.mul(values, scale, out=total)
    else:
        total.add_(values, alpha=scale)


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
        self.whole = not thin and all(r == a.taps - 1 for r, a in zip(self.reach, self.long, strict=True))
        self.gram = Gram()
        self.total: Tensor | None = None

    def add(self, image: Tensor, scale: float) -> None:
        """Take images [N, groups, F, *space]."""
        image, dim = image.unsqueeze(2), 4
        for side in self.sides:
            if side is None:
                dim += 1
            else:
                image = side.written_out(image, dim)
        image = image.flatten(2, 3)
        if not self.long:
            self.gram.add(image.transpose(0, 1).unsqueeze(2), scale)
        elif self.way == "convolution":
            self._add_convolution(image, scale)
        else:
            self._add_products(image, scale)

    def _add_convolution(self, image: Tensor, scale: float) -> None:
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
        self.total = lags * scale if self.total is None else self.total.add_(lags, alpha=scale)

    def _add_products(self, image: Tensor, scale: float) -> None:
        """Add the lags as one product of `image` with all its shifts, some examples at a time."""
        groups, features = image.shape[1:3]
        image = image.movedim((1, 2), (0, -1))
        pads = [reach * axis.dilation for reach, axis in zip(self.reach, self.long, strict=True)]
        around = [(0 if place == 0 else pad, pad) for place, pad in enumerate(pads)]
        shifted = padded(_in_large_pieces(image), [*around, (0, 0)]).contiguous().view(image.dtype)
        shifts = [
            Axis(axis.size, lags, 1, axis.dilation, 0 if place == 0 else pad, pad)
            for place, (axis, lags, pad) in enumerate(zip(self.long, self.lags, pads, strict=True))
        ]
        size = groups * features * math.prod(self.lags) * math.prod(axis.size for axis in self.long)
        at_once = _examples_at_once(image, size)
        if self.total is None:
            dtype = summed_in(image.dtype)
            self.total = image.new_zeros(groups, features, math.prod(self.lags) * features, dtype=dtype)
        for some, others in zip(torch.split(image, at_once, 1), torch.split(shifted, at_once, 1), strict=True):
            windows = _written_out(others, shifts).flatten(1, 2)
            add_product_(self.total, some.flatten(1, -2).mT, windows, scale)

    def _by_lag(self) -> Tensor:
        """Return the lags in both directions, [groups, F, F, *lags], those of opposite lags exactly transposed."""
        assert self.total is not None
        if self.way == "convolution":
            lags = torch.unflatten(self.total, 0, (-1, self.total.shape[1]))
        else:
            lags = torch.unflatten(self.total, 2, (*self.lags, -1)).movedim(-1, 2)
        dims = list(range(3, 3 + len(self.long)))
        none, ahead = lags[:, :, :, :1], lags[:, :, :, 1:]
        none = (none + none.flip(dims).transpose(1, 2)) / 2
        return torch.cat([ahead.flip(dims).transpose(1, 2), none, ahead], 3)

    def into(self, total: Tensor, scale: float, *, fresh: bool) -> None:
        """Add scale times the part to `total` [groups, *taps, F, *taps, F], or write it there.

        Seen from one tap, the blocks with all others are a window of lags.
        """
        lags = self._by_lag() if self.long else self.gram.sum()
        assert lags is not None
        thin = [len(side.taps) for side in self.sides if side is not None]
        lags = torch.unflatten(torch.unflatten(lags, 2, (*thin, -1)), 1, (*thin, -1))
        # [groups, *thin, F, *thin, F, *lags] -> [groups, *thin, F, *(thin or lags, by axis), F]
        across, along = iter(range(len(thin) + 2, 2 * len(thin) + 2)), iter(range(2 * len(thin) + 3, lags.dim()))
        by_axis = [next(along if side is None else across) for side in self.sides]
        lags = lags.permute(*range(len(thin) + 2), *by_axis, 2 * len(thin) + 2)
        reaches = iter(self.reach)
        seen = [self._seen(axis, side, reaches) for axis, side in zip(self.axes, self.sides, strict=True)]
        for taps in product(*seen):
            first, second, window = zip(*taps, strict=True)
            target = total[(slice(None), *first, slice(None), *second, slice(None))]
            values = lags[(slice(None), *[slice(None)] * (len(thin) + 1), *window, slice(None))]
            _put(values, target, scale, fresh=fresh)

    def _seen(self, axis: Axis, side: _Side | None, reaches: Iterator[int]) -> list[tuple[Any, slice, slice]]:
        """Return, along an axis, every first tap with the second taps that it sees and their lags."""
        if side is not None:
            return [(slice(None), slice(None), slice(None))]
        reach = next(reaches)
        spans = [(tap, max(0, tap - reach), min(axis.taps, tap + reach + 1)) for tap in range(axis.taps)]
        return [(tap, slice(low, high), slice(low - tap + reach, high - tap + reach)) for tap, low, high in spans]
