"""First and second moments of a unit's inputs, taken from a point that is the same for all batches.

In the mean form that point is the mean of the first batch, and the population's mean is known at the end: the
covariance is then no difference of large numbers, and no batch is looked at twice. K-FAC takes its inputs from zero.
Whatever is linear in the inputs, the means by location among it, is kept of the image and unrolled once, at the end.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.curvature.gram import Gram, add_gram, mirror_, stripe_of
from xkfac.curvature.patch_gram import PatchGram
from xkfac.curvature.patches import Patches
from xkfac.curvature.products import add_product_, rounded, rounds, summed_in, unrounded
from xkfac.errors import UnitError

# A level of a grouping is the tuple of axes of [groups, N, S, features] over which its blocks extend.
Level = tuple[int, ...]
ELEMENT: Level = ()
LOCATION: Level = (1,)
EXAMPLE: Level = (2,)
BATCH: Level = (1, 2)

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


@dataclass
class _Sums:
    """What is kept of images of one size: sum y [1, C, ...], how many there were, and the origin o [1, C, ...].

    The number is a tensor, so that a recorded graph counts too.
    """

    sums: Tensor
    count: Tensor
    origin: Tensor
    from_zero: bool


@dataclass(frozen=True)
class Means:
    """The `rows` [groups, ., D] of M = count * R^T R, each the mean of `count` inputs per example."""

    rows: Tensor
    count: float

    @property
    def root(self) -> Tensor:
        """The root of M."""
        return self.rows * math.sqrt(self.count)


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
    """Accumulates the moments of patches x of images, for the levels of K-FAC, or of a grouping in the mean form.

    Images are taken relative to an origin o that is the same for all batches of one size: y = x - o. The origin is the
    mean of the first batch. It is zero for K-FAC, and for images that are rounded before their products unless zero is
    far from them, since a difference costs more to write than a rounded copy. All groupings share sum y y^T and
    sum_n y, which is one pass over an image, and what follows from o is added once, at the end. Means over positions
    are linear in the image and are read off it: within an example, sum_s (y - mean y)^2 = sum_s y^2 - S (mean y)^2.
    """

    def __init__(self, patches: Patches, levels: tuple[Level, ...]) -> None:
        self.patches = patches
        self.centred = len(levels) > 1
        self.pooled, self.by_example = BATCH in levels, EXAMPLE in levels
        self._of: dict[torch.Size, _Sums] = {}
        self._rows: Rows | None = None
        self._gram = PatchGram(patches)
        # Means of examples, each counting as many as it has positions: of several positions, and of a single one.
        self._means, self._alone = Gram(), Gram()

    def add(self, image: Tensor) -> None:
        """Take the patches of images [N, C, ...].

        Raises UnitError for images of several sizes where means are by location.
        """
        of = self._of.get(image.shape[2:])
        if of is None:
            of = self._first(image)
        of.count += len(image)
        if self._rows is not None and self.patches.is_row(image):
            self._rows.add(image, of.origin if self.centred else None)
            return
        if self.centred:
            image = rounded(image if of.from_zero else image - of.origin)
        positions = self.patches.positions(image)
        if self.by_example:
            (self._means if positions > 1 else self._alone).add(self.patches.averaged(image), positions)
        if not self.by_example or positions > 1:  # nothing varies within an example of one position
            self._gram.add(image)
        of.sums += _summed(image)

    def _first(self, image: Tensor) -> _Sums:
        """Begin with images of another size."""
        if self.centred and not self.pooled and self._of:
            (known,) = self._of
            here, there = (self.patches.positions(image.new_empty(1, 1, *s)) for s in (image.shape[2:], known))
            raise UnitError(
                f"unit '{self.patches.unit.name}' has {here} positions in one batch and {there} in another, so its "
                "mean by location is undefined; use form='paper', or grouping='pooled'"
            )
        row = self.patches.is_row(image) and not self.pooled
        if row and self._rows is None:
            self._rows = Rows(image)
        none, mean = torch.zeros_like(image[:1]), image.mean(0, keepdim=True)
        from_zero = not self.centred or (rounds(image) and not row and _is_near(image, mean))
        of = _Sums(none, image.new_zeros(()), none.clone() if from_zero else mean, from_zero)
        self._of[image.shape[2:]] = of
        return of

    def settle(self, examples: int) -> None:
        """Move the origin to the mean of the `examples` taken: S - N d d^T, where d is how far it moves."""
        (of,) = self._of.values()
        if self._rows is not None:
            drift = self._rows.settle(examples).unsqueeze(2)
        else:
            drift = of.sums / examples
            self._gram.add(unrounded(drift), -float(examples))
            of.sums.zero_()
        of.origin = of.origin + drift

    def means(self, examples: int) -> Means | None:
        """Return the means by location, or the mean of all; None where inputs are not taken from a mean."""
        if not self.centred:
            return None
        if self.pooled:
            reference, mean, weight = self._mean()
            rows: Tensor = F.pad(reference + mean, (0, self.patches.homogeneous), value=1.0)
            return Means(rows.to(self._like), weight / examples)
        (of,) = self._of.values()
        sums = of.sums if self._rows is None else self._rows.sums().unsqueeze(2)
        return Means(self.patches.unrolled(of.origin + sums / examples).flatten(1, 2), 1.0)

    def factors(self, examples: int) -> list[Tensor]:
        """Return the input factors of the levels but the last one in the mean form, which is known by its root."""
        if self.pooled:
            return self._pooled(examples)
        if self.centred:
            self.settle(examples)
        return [self.sum(1 / examples)]

    def _mean(self) -> tuple[Tensor, Tensor, float]:
        """Return a point near the mean, how far that is from it, both [groups, 1, features], and the number of x."""
        moved = [(of, *self._moved(of)) for of in self._of.values()]
        reference = moved[0][1]
        weight, total = 0.0, torch.zeros_like(reference)
        for of, near, sums, positions in moved:
            weight += float(of.count) * positions
            total = total + ((near - reference) * float(of.count) + sums) * positions
        return reference, total / weight, weight

    def _moved(self, of: _Sums) -> tuple[Tensor, Tensor, int]:
        """Return the mean over positions of an origin and of the sums, [groups, 1, features], and the positions."""
        near, sums = (self.patches.averaged(unrounded(image))[:, :, 0] for image in (of.origin, of.sums))
        return near, sums, self.patches.positions(of.sums)

    def _pooled(self, examples: int) -> list[Tensor]:
        """Return the factors where positions are examples too: within and between examples, or both together."""
        reference, mean, weight = self._mean()
        groups, _, columns = self.patches.unit.shape
        features = columns - self.patches.homogeneous
        within: list[tuple[float, Tensor]] = []
        between = [(-weight, mean)]
        for of in self._of.values():
            count, (near, moved, positions) = float(of.count), self._moved(of)
            images = (of.origin, of.sums)
            location, sums = (self.patches.unrolled(unrounded(i))[:, 0, :, :features] for i in images)
            within += _shifted(sums - moved, location - near, count)
            between += _shifted(moved, near - reference, count, positions)
        inner, means, alone = (gram.sum() for gram in (self._gram, self._means, self._alone))
        parts = [([inner], within + between)]
        if self.by_example:
            # The means are taken from the sum of squares before what is beyond them is added to them, in their place.
            inner = inner if inner is None or means is None else inner.sub_(means)
            parts = [([inner], within), ([means, alone], between)]
        left = []
        for sums_of_squares, rows in parts:
            known = [one for one in sums_of_squares if one is not None]
            total = known[0] if known else self._like.new_zeros(groups, features, features)
            for one in known[1:]:
                total += one
            left.append(_with_rows(total, rows).div_(examples))
        pad = self.patches.homogeneous
        return [F.pad(factor, (0, pad, 0, pad)) if pad else factor for factor in left]

    @property
    def _like(self) -> Tensor:
        return next(iter(self._of.values())).sums

    def sum(self, scale: float = 1.0) -> Tensor:
        """Return scale times the sum of squares [groups, D, D], exactly symmetric."""
        groups, _, columns = self.patches.unit.shape
        total = self._like.new_empty(groups, columns, columns)
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
        for of in self._of.values():
            sums = of.sums
            if self._rows is not None and self.patches.is_row(sums):
                sums = self._rows.sums().unsqueeze(2)
            patches = F.pad(self.patches.averaged(sums)[:, 0, 0], (0, 1))
            patches[:, -1] = of.count
            totals.append(patches * self.patches.positions(sums))
        return torch.stack(totals).sum(0)


class BatchDeviations:
    """Accumulates the moments of patches x of images in the paper's form, in which means are those of a mini-batch."""

    def __init__(self, patches: Patches, levels: tuple[Level, ...]) -> None:
        self.patches, self.levels = patches, levels
        self._grams = [Gram() for _ in levels]
        self._images = PatchGram(patches) if levels[1] == LOCATION else None

    def add(self, image: Tensor) -> None:
        """Take the patches of images [N, C, ...]."""
        if self._images is not None:
            mean = image.mean(0, keepdim=True)
            self._images.add(image - mean)
            self._grams[1].add(self.patches.unrolled(mean), len(image))
            return
        x = self.patches.unrolled(image)
        means = [x.mean(level, keepdim=True) for level in self.levels[1:]]
        parts = [*(fine - coarse for fine, coarse in pairwise([x, *means])), means[-1]]
        for gram, part in zip(self._grams, parts, strict=True):
            # The blocks of a level stand for all N * S elements: an average over blocks times N * S.
            gram.add(part, x.shape[1] * x.shape[2] / (part.shape[1] * part.shape[2]))

    def means(self, examples: int) -> None:
        """Return None: no level is known by the means of the population."""

    def factors(self, examples: int) -> list[Tensor]:
        """Return the input factors of all levels."""
        sums = [gram.sum() for gram in self._grams]
        if self._images is not None:  # deviations have no homogeneous coordinate
            inner, last = self._images.sum(), self.patches.homogeneous
            sums[0] = None if inner is None else F.pad(inner, (0, last, 0, last))
        return [factor / examples for factor in sums if factor is not None]


def _shifted(sums: Tensor, shift: Tensor, count: float, scale: float = 1.0) -> list[tuple[float, Tensor]]:
    """Return rows, and what their squares count, that the squares of vectors have more when all are shifted.

    For `count` vectors y with sums Y [groups, rows, F] and a shift o, sum (y + o)^2 - y^2 = ((Y + N o)^2 - Y^2) / N.
    """
    return [(scale / count, sums + count * shift), (-scale / count, sums)] if bool(shift.any()) else []


def _with_rows(total: Tensor, rows: list[tuple[float, Tensor]]) -> Tensor:
    """Return a sum of squares [groups, F, F] with weighted squares of rows [groups, ., F], in its place."""
    if not rows:
        return total
    every = torch.cat([row for _, row in rows], 1)
    weighted = torch.cat([weight * row for weight, row in rows], 1).mT
    stripe = stripe_of(total.shape[1], total.device)
    for start in range(0, total.shape[1], stripe):
        part = slice(start, start + stripe)
        add_product_(total[:, part, start:], weighted[:, part], every[:, :, start:])
    return mirror_(total)
