"""The factors of a unit, from the activations that enter it and the gradients that come back.

Every unit is first brought into one format: inputs x [groups, N, S, D] and output gradients g [groups, N, S, C], with
N examples, S positions, D columns of W~ (homogeneous coordinate included) and C rows. The gradient of the batch's
summed loss is then sum_{n,s} g_ns x_ns^T, and the mathematics is written once.

A *grouping* is a chain of ever coarser partitions of the N*S pairs (example, position). With x averaged and g summed
over the blocks of each partition, x_k and g_k,

    sum_{n,s} g x^T = sum_k sum_blocks g_k (x_k - x_{k+1})^T,      x_{last+1} = 0,

holds exactly: it is the analysis of variance of x. Replacing the expectation of each level's square by a Kronecker
product gives the curvature as a sum of terms, one a level:

    kfac          element                          A (x) H'
    paper         element < location               (A - A') (x) (N H' - H'') / (N - 1) + A' (x) H''  (eq. bnsimple)
    pooled        element < batch                  locations are examples too
    hierarchical  element < example < batch

where a location's block holds all examples at one position, an example's block all positions of one example. In the
paper's *form* the means are those of the mini-batch and the finer gradients are centred; in the *mean* form the means
are those of the population, so the last input factor is a Gram matrix of a few vectors.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.autocorrelation import PatchGram
from xkfac.errors import UnitError
from xkfac.grams import Gram
from xkfac.kronecker import Term, root_term, symmetrised
from xkfac.patches import Patches, unroll
from xkfac.units import Unit

Grouping = Literal["paper", "pooled", "hierarchical"]
Form = Literal["paper", "mean"]
Level = tuple[int, ...]

# A level is the tuple of axes of [groups, N, S, features] over which its blocks extend.
ELEMENT: Level = ()
LOCATION: Level = (1,)
EXAMPLE: Level = (2,)
BATCH: Level = (1, 2)

KFAC: tuple[Level, ...] = (ELEMENT,)
GROUPINGS: dict[Grouping, tuple[Level, ...]] = {
    "paper": (ELEMENT, LOCATION),
    "pooled": (ELEMENT, BATCH),
    "hierarchical": (ELEMENT, EXAMPLE, BATCH),
}


def unit_inputs(unit: Unit, input: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the input of a unit's linear map as x [groups, N, S, D]; a convolution's input is unrolled (im2col)."""
    input = input.detach().to(dtype)
    if unit.convolution is not None:
        return unroll(input, unit.convolution, unit.shape[0], homogeneous=unit.homogeneous)
    if unit.kind == "linear":
        x = input.flatten(1, -2).unsqueeze(0) if input.dim() > 2 else input[None, :, None, :]
    else:
        x = input.flatten(2).permute(1, 0, 2).unsqueeze(3) if input.dim() > 2 else input.t()[:, :, None, None]
    return F.pad(x, (0, 1), value=1.0) if unit.homogeneous else x


def unit_gradients(unit: Unit, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient at a unit's output as g [groups, N, S, C]."""
    gradient = gradient.detach().to(dtype)
    if unit.kind == "linear":
        return gradient.flatten(1, -2).unsqueeze(0) if gradient.dim() > 2 else gradient[None, :, None, :]
    groups, rows, _ = unit.shape
    return gradient.reshape(gradient.shape[0], groups, rows, -1).permute(1, 0, 3, 2)


def batch_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient [groups, C, D] of the batch's summed loss with respect to W~: sum_{n,s} g_ns x_ns^T."""
    return g.flatten(1, 2).mT @ x.flatten(1, 2)


def _over(blocks: Tensor, level: Level) -> Tensor:
    return blocks.mean(level, keepdim=True) if level else blocks


def _blocks(tensor: Tensor) -> int:
    return tensor.shape[1] * tensor.shape[2]


class Moments:
    """Accumulates the factors of a unit over batches, for one grouping and form.

    Input factors are sums, gradient factors averages over positions, both per example, as the paper has them for
    convolutions. Batches count by their number of examples. Inputs come as x, or as images of which x are the patches;
    the factors are the same.
    """

    def __init__(self, name: str, levels: tuple[Level, ...], form: Form) -> None:
        self.name = name
        self.levels = levels
        self.population = form == "mean" and len(levels) > 1
        self._left = [Gram() for _ in levels]
        self._right = [Gram() for _ in levels]
        self._positions = 1
        # In the mean form inputs are taken from a fixed point, the first batch's mean, and the population's mean is
        # known at the end: the covariance is then no difference of large numbers, and no batch is looked at twice.
        self._origin: Tensor | None = None
        self._drift: Tensor | None = None
        self._images: _Images | None = None

    def add_inputs(self, x: Tensor) -> None:
        """Take the inputs x [groups, N, S, D] of one batch."""
        _, examples, positions, _ = x.shape
        means = [_over(x, level) for level in self.levels]
        coarse = self._add_means(means[1:], examples, positions)
        self._left[0].add(x - coarse[0] if coarse else x)

    def add_images(self, image: Tensor, patches: Patches) -> None:
        """Take the inputs of one batch as the patches of an image [N, C, ...], which are not written out."""
        positions = patches.positions(image)
        if EXAMPLE in self.levels[1:2] and positions == 1:  # nothing varies within an example
            self.add_inputs(patches.unrolled(image))
            return
        if self._images is None:
            self._images = _Images(patches)
        mean = image.mean(0, keepdim=True)
        means = [self._images.over(image, mean, level) for level in self.levels[1:]]
        coarse = self._add_means(means, image.shape[0], positions)
        if not coarse:
            self._images.add(image, None)
        elif self.levels[1] == LOCATION:
            self._images.add(image, mean, fixed=coarse[0] is self._origin)
        else:
            deviations = self._images.add(image, mean)
            self._add_between(patches.unrolled(mean), coarse[0], image.shape[0])
            if self.levels[1] == EXAMPLE:
                self._left[0].add(patches.averaged(deviations, homogeneous=0.0), -positions)

    def _add_means(self, means: list[Tensor], examples: int, positions: int) -> list[Tensor]:
        """Take the means of the levels but the first; return them, the last from the population in the mean form."""
        if self.population:
            means = [*means[:-1], self._from_origin(means[-1], examples, positions)]
        deviations = [fine - coarse for fine, coarse in pairwise(means)]
        if means and not self.population:
            deviations.append(means[-1])
        for total, part in zip(self._left[1:], deviations, strict=False):
            # A level's blocks stand for all N * S elements: an average over blocks times N * S.
            total.add(part, examples * positions / _blocks(part))
        return means

    def _add_between(self, location: Tensor, coarse: Tensor, examples: int) -> None:
        """Add what deviations x - `coarse` have beyond x - `location`, the batch's means by location [groups, 1, S, D].

        With x = y + location, where y sums to zero over the examples at each location, the squares of deviations from
        one point are those of y and those of the locations. Deviations from an example's mean lack its own square, of
        y averaged over positions.
        """
        self._left[0].add(location - coarse.mean(1, keepdim=True), examples)

    def _from_origin(self, mean: Tensor, examples: int, positions: int) -> Tensor:
        """Return the origin, having noted how far a batch's mean is from it."""
        if self._origin is None or self._drift is None:
            self._origin, self._drift, self._positions = mean, torch.zeros_like(mean), positions
        if mean.shape != self._origin.shape:
            raise UnitError(
                f"unit '{self.name}' has {mean.shape[2]} positions in one batch and {self._origin.shape[2]} in "
                "another, so its mean by location is undefined; use form='paper', or grouping='pooled'"
            )
        self._drift.add_(mean - self._origin, alpha=examples)
        return self._origin

    def add_gradients(self, g: Tensor, weight: float = 1.0) -> None:
        """Take the gradients g [groups, N, S, C] of one backward pass, which counts `weight`."""
        weight /= g.shape[2]
        sums = [g.sum(level, keepdim=True) if level else g for level in self.levels]
        for total, part, coarser in zip(self._right, sums, [*sums[1:], None], strict=True):
            count = 1 if coarser is None or self.population else _blocks(part) // _blocks(coarser)
            if coarser is None or count == 1:
                total.add(part, weight)
            else:  # (n H_k - H_{k+1}) / (n - 1), n blocks of this level in one of the next, as a Gram matrix
                total.add(part - coarser / count, weight * count / (count - 1))

    def _input_factors(self) -> list[Tensor]:
        """Return the sums of the levels' input factors; in the mean form there is none of the last."""
        first, *others = [gram.sum() for gram in self._left]
        if self._images is not None:
            first = self._images.sum() if first is None else first + self._images.sum()
        return [factor for factor in (first, *others) if factor is not None]

    def terms(self, rows: int, examples: int) -> tuple[Term, ...]:
        """Return the terms, one a level, with input factors [groups, D, D] and gradient factors [groups, rows, rows].

        `examples` is how many were taken in all.

        The gradient factors are zero where no gradient ever arrived.
        """
        left = [factor / examples for factor in self._input_factors()]
        none = left[0].new_zeros(left[0].shape[0], rows, rows)
        right = [none if (factor := gram.sum()) is None else factor / examples for gram in self._right]
        if self._origin is None or self._drift is None:
            return tuple(Term(a, h) for a, h in zip(left, right, strict=True))
        scale = (self._positions / self._origin.shape[2]) ** 0.5
        drift = (self._drift / examples * scale).flatten(1, 2)
        left[-1] = left[-1] - symmetrised(drift.mT @ drift)
        root = self._origin.flatten(1, 2) * scale + drift
        return (*(Term(a, h) for a, h in zip(left, right, strict=False)), root_term(root, right[-1]))


class _Images:
    """Accumulates the Gram matrix of patches of images, or of their deviations from an image."""

    def __init__(self, patches: Patches) -> None:
        self.patches = patches
        self._gram = PatchGram(patches)
        self._fixed: Tensor | None = None
        self._sums: Tensor | None = None

    def over(self, image: Tensor, mean: Tensor, level: Level) -> Tensor:
        """Return means [groups, ., ., D] of an image's patches over a level, where `mean` is the image's over N."""
        if level == LOCATION:
            return self.patches.unrolled(mean)
        return self.patches.averaged(image if level == EXAMPLE else mean)

    def add(self, image: Tensor, centre: Tensor | None, *, fixed: bool = False) -> Tensor:
        """Take deviations from the image `centre` [1, C, ...], or from the first one ever given where it is `fixed`.

        Returns the deviations.
        """
        if centre is None:
            self._add_sums(image)
        else:
            if fixed:
                self._fixed = centre = centre if self._fixed is None else self._fixed
            image = image - centre
        self._gram.add(image)
        return image

    def _add_sums(self, image: Tensor) -> None:
        """Take the products with the homogeneous coordinate, which deviations do not have."""
        if self.patches.homogeneous:
            mean = self.patches.averaged(image.mean(0, keepdim=True))
            sums = mean[:, 0] * (image.shape[0] * self.patches.positions(image))
            self._sums = sums if self._sums is None else self._sums.add_(sums)

    def sum(self) -> Tensor:
        """Return the sum [groups, D, D]."""
        total = self._gram.sum()
        assert total is not None
        if not self.patches.homogeneous:
            return total
        total = F.pad(total, (0, 1, 0, 1))
        if self._sums is not None:
            total[:, -1:] = self._sums
            total[:, :, -1:] = self._sums.mT
        return total
