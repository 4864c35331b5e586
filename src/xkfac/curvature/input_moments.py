"""First and second moments of a unit's inputs, taken from a point that is the same for all batches.

In the mean form that point is the mean of the first batch, and the population's mean is known at the end: the
covariance is then no difference of large numbers, and no batch is looked at twice. K-FAC takes its inputs from zero.
Whatever is linear in the inputs, the means by location among it, is kept of the image and unrolled once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xkfac.curvature.gram import add_gram, mirror_, rounded, rounds, summed_in, unrounded
from xkfac.curvature.patch_gram import PatchGram
from xkfac.curvature.patches import Patches

# On a CPU rows wait for so many of them: a product reads and writes the whole matrix, which is larger than a cache.
ROOM = 512

# Numbers of bfloat16 are off by up to 2^-8 of themselves, so that inputs need not be taken from their mean before they
# are rounded unless its square is so many times their variance: what they are off by is 7e-4 of the variance then.
FAR = 256.0


class Rows:
    """Accumulates sum r and sum r r^T over rows r = x - origin of inputs x [N, F, 1]; without an origin it is zero.

    On a CPU rows are written to where they wait, and for most batches that is all. On a GPU nothing waits: it could not
    be replayed.
    """

    def __init__(self, like: Tensor) -> None:
        features = like.shape[1]
        self._total = like.new_zeros(1, features, features)
        self._sums = like.new_zeros(features, 1)
        # Memory that is asked for anew in every batch would cost more than what is done with it.
        self._waiting = like.new_empty(ROOM if like.device.type == "cpu" else 0, features, 1)
        self._count = 0

    def add(self, rows: Tensor, origin: Tensor | None) -> None:
        """Take rows [N, F, 1], from an origin [1, F, 1] or zero."""
        room = len(self._waiting)
        if room == 0:
            rows = rows if origin is None else rows - origin
            self._sums += rows.sum(0)
            self._accumulate(rows)
            return
        for some in torch.split(rows, room) if len(rows) > room else (rows,):
            count = len(some)
            if self._count + count > room:
                self._flush()
            waiting = self._waiting.narrow(0, self._count, count)
            if origin is None:
                waiting.copy_(some)
            else:
                torch.sub(some, origin, out=waiting)
            self._sums += waiting.sum(0)
            self._count += count

    def _flush(self) -> None:
        if self._count:
            self._accumulate(self._waiting[: self._count])
            self._count = 0

    def _accumulate(self, rows: Tensor) -> None:
        add_gram(self._total, rows.squeeze(2).mT.unsqueeze(0))

    def sums(self) -> Tensor:
        """Return sum r, [1, F]."""
        self._flush()
        return self._sums.mT

    def settle(self, examples: int) -> Tensor:
        """Take the rows from their mean instead; return how far it is from the origin before, [1, F]."""
        drift = self.sums() / examples
        add_gram(self._total, drift.mT.unsqueeze(0), -float(examples))
        self._sums.zero_()
        return drift

    def into(self, total: Tensor, scale: float) -> None:
        """Write scale times sum r r^T to `total` [1, F, F], exactly symmetric."""
        self._flush()
        mirror_(torch.mul(self._total, scale, out=total))


def _is_near(image: Tensor, mean: Tensor) -> bool:
    """Whether zero is near enough to images [N, C, ...] of a mean [1, C, ...] for them to be rounded as they are."""
    square = mean.square().sum()
    return bool(square <= FAR * (image.square().mean(0).sum() - square))


def _summed(image: Tensor) -> Tensor:
    """Return the sum [1, C, ...] over images [N, C, ...], in the dtype that products are summed in."""
    dtype, last = summed_in(image.dtype), image.movedim(1, -1)
    if image.dtype == dtype or not image.is_cuda or not (image.is_contiguous() or last.is_contiguous()):
        return image.sum(0, keepdim=True, dtype=dtype)
    # As a product it reads as fast as memory gives, which a sum of numbers of two bytes does not.
    rows = image if image.is_contiguous() else last
    total = torch.mm(image.new_ones(1, len(image)), rows.flatten(1), out_dtype=dtype).view(1, *rows.shape[1:])
    return total if rows is image else total.movedim(-1, 1)


class Deviations:
    """Accumulates the moments of patches of images; `centred`: from the first batch's mean by location, else from zero.

    Where they are centred, all images are of one size. Images that are rounded for their products are taken from zero
    unless that is far from them, since a difference is more to write than a rounded copy.
    """

    def __init__(self, patches: Patches, *, centred: bool) -> None:
        self.patches, self.centred = patches, centred
        self._origin: Tensor | None = None
        self._from_zero = False
        self._rows: Rows | None = None
        self._gram = PatchGram(patches)
        # Sums over examples by size of the image, and how many examples: numbers that a recorded graph counts too.
        self._sums: dict[torch.Size, Tensor] = {}
        self._counts: dict[torch.Size, Tensor] = {}

    def size(self) -> torch.Size | None:
        """Return the size that images must have, None where any will do."""
        return None if self._origin is None else self._origin.shape[2:]

    def add(self, image: Tensor) -> None:
        """Take the patches of images [N, C, ...]."""
        if self.centred and self._origin is None:
            self._origin = image.mean(0, keepdim=True)
            self._from_zero = rounds(image) and not self.patches.is_row(image) and _is_near(image, self._origin)
            if self._from_zero:
                self._origin.zero_()
        if not self.centred and self.patches.homogeneous:
            self._count(image)
        if self.patches.is_row(image):
            if self._rows is None:
                self._rows = Rows(image)
            self._rows.add(image, self._origin)
            return
        if self._origin is not None:
            image = rounded(image if self._from_zero else image - self._origin)
        self._gram.add(image)
        sums = _summed(image)
        known = self._sums.get(image.shape[2:])
        if known is None:
            self._sums[image.shape[2:]] = sums
        else:
            known += sums

    def _count(self, image: Tensor) -> None:
        if image.shape[2:] not in self._counts:
            self._counts[image.shape[2:]] = image.new_zeros(())
        self._counts[image.shape[2:]] += len(image)

    def _totals(self) -> dict[torch.Size, Tensor]:
        """Return the sums [1, C, ...] over examples by size of the image."""
        if self._rows is None:
            return self._sums
        rows = self._rows.sums().unsqueeze(2)
        return {**self._sums, rows.shape[2:]: rows}

    def settle(self, examples: int) -> None:
        """Move the origin to the mean of the `examples` taken: S - N d d^T, where d is how far it moves."""
        assert self._origin is not None
        if self._rows is not None:
            drift = self._rows.settle(examples).unsqueeze(2)
        else:
            (sums,) = self._sums.values()
            drift = sums / examples
            self._gram.add(unrounded(drift), -float(examples))
            sums.zero_()
        self._origin = self._origin + drift

    def origin(self) -> Tensor | None:
        """Return the patches [groups, 1, S, D] of the origin, the homogeneous coordinate 1; None where it is zero."""
        return None if self._origin is None else self.patches.unrolled(self._origin)

    def drift(self) -> Tensor | None:
        """Return the sum of deviations from the origin, [groups, 1, S, D]; None where the origin is zero."""
        if self._origin is None:
            return None
        (sums,) = self._totals().values()
        drift = self.patches.unrolled(sums)
        if self.patches.homogeneous:
            drift[..., -1] = 0
        return drift

    def sum(self, scale: float = 1.0) -> Tensor:
        """Return scale times the sum of squares [groups, D, D], exactly symmetric."""
        groups, _, columns = self.patches.unit.shape
        total = next(iter(self._totals().values())).new_empty(groups, columns, columns)
        features = columns - self.patches.homogeneous
        inner = total[:, :features, :features]
        if self._rows is None:
            self._gram.into(inner, scale)
        else:
            self._rows.into(inner, scale)
            rest = self._gram.sum()  # of batches with other numbers of positions
            if rest is not None:
                inner += scale * rest
        if self.patches.homogeneous:
            # Deviations have no homogeneous coordinate.
            last = total.new_zeros(groups, columns) if self.centred else self._first_moments() * scale
            total[:, -1] = last
            total[:, :, -1] = last
        return total

    def _first_moments(self) -> Tensor:
        """Return the sums of patches over examples and positions, [groups, D], their number as the last."""
        totals = []
        for size, sums in self._totals().items():
            patches = self.patches.averaged(sums)[:, 0, 0]
            patches[:, -1] = self._counts[size]
            totals.append(patches * self.patches.positions(sums))
        return torch.stack(totals).sum(0)
