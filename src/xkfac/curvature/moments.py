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

from xkfac.curvature.blocks import Term, root_term, symmetrised
from xkfac.curvature.gram import Gram
from xkfac.curvature.input_moments import Deviations
from xkfac.curvature.patch_gram import PatchGram
from xkfac.curvature.patches import Patches, unroll
from xkfac.errors import UnitError
from xkfac.model.units import Unit

Grouping = Literal["paper", "pooled", "hierarchical"]
Form = Literal["paper", "mean"]
Level = tuple[int, ...]

# A level is the tuple of axes of [groups, N, S, features] over which its blocks extend.
ELEMENT: Level = ()
LOCATION: Level = (1,)
EXAMPLE: Level = (2,)
BATCH: Level = (1, 2)

HELD = 512  # gradients that wait for one product, on a CPU

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
        x = (input.flatten(1, -2) if input.dim() > 2 else input.unsqueeze(1)).unsqueeze(0)
    else:
        x = input.flatten(2).permute(1, 0, 2).unsqueeze(3) if input.dim() > 2 else input.t()[:, :, None, None]
    return F.pad(x, (0, 1), value=1.0) if unit.homogeneous else x


def unit_gradients(unit: Unit, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient at a unit's output as g [groups, N, S, C]."""
    gradient = gradient.detach()
    if gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    if unit.kind == "linear":
        return gradient.reshape(1, gradient.shape[0], -1, gradient.shape[-1])
    groups, rows, _ = unit.shape
    return gradient.reshape(gradient.shape[0], groups, rows, -1).permute(1, 0, 3, 2)


def batch_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient [groups, C, D] of the batch's summed loss with respect to W~: sum_{n,s} g_ns x_ns^T."""
    return g.flatten(1, 2).mT @ x.flatten(1, 2)


def _over(blocks: Tensor, level: Level) -> Tensor:
    return blocks.mean(level, keepdim=True) if level else blocks


def _beside(passes: list[Tensor]) -> Tensor:
    return passes[0] if len(passes) == 1 else torch.cat(passes, 1)


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
        self._first: Tensor | None = None
        self._moved: Tensor | None = None
        self._images: _Images | None = None
        self._deviations: Deviations | None = None
        # On a CPU gradients of one position an example are held until there are enough of them, as they are: nobody
        # changes a gradient that another has, and a few large operations take less time than many small ones.
        self._held: list[Tensor] = []
        self._rows = 0
        self._weight = 1.0

    @property
    def _origin(self) -> Tensor | None:
        """That point [groups, 1, ., D]; None but in the mean form."""
        return self._first if self._deviations is None else self._deviations.origin()

    @property
    def _drift(self) -> Tensor | None:
        """The sum over examples of what a batch's mean is away from the origin, of its shape."""
        return self._moved if self._deviations is None else self._deviations.drift()

    def add_inputs(self, x: Tensor) -> None:
        """Take the inputs x [groups, N, S, D] of one batch."""
        _, examples, positions, _ = x.shape
        means = [_over(x, level) for level in self.levels]
        coarse = self._add_means(means[1:], examples, positions)
        self._left[0].add(x - coarse[0] if coarse else x)

    def add_images(self, image: Tensor, patches: Patches) -> None:
        """Take the inputs of one batch as the patches of an image [N, C, ...], which are not written out."""
        positions = patches.positions(image)
        if self.levels == KFAC or (self.population and self.levels[1] == LOCATION):
            self._add_deviations(image, patches, positions)
            return
        if EXAMPLE in self.levels[1:2] and positions == 1:  # nothing varies within an example
            self.add_inputs(patches.unrolled(image))
            return
        if self._images is None:
            self._images = _Images(patches)
        mean = image.mean(0, keepdim=True)
        means = [self._images.over(image, mean, level) for level in self.levels[1:]]
        coarse = self._add_means(means, image.shape[0], positions)
        deviations = self._images.add(image, mean)
        if self.levels[1] != LOCATION:
            self._add_between(patches.unrolled(mean), coarse[0], image.shape[0])
            if self.levels[1] == EXAMPLE:
                self._left[0].add(patches.averaged(deviations, homogeneous=0.0), -positions)

    def _add_deviations(self, image: Tensor, patches: Patches, positions: int) -> None:
        """Take images where there is nothing but A, or S and M: from a fixed image, be it zero."""
        if self._deviations is None:
            self._deviations, self._positions = Deviations(patches, centred=self.population), positions
        size = self._deviations.size()
        if size is not None and size != image.shape[2:]:
            raise self._no_mean(positions, self._positions)
        self._deviations.add(image)

    def _no_mean(self, here: int, there: int) -> UnitError:
        return UnitError(
            f"unit '{self.name}' has {here} positions in one batch and {there} in another, so its mean by location is "
            "undefined; use form='paper', or grouping='pooled'"
        )

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
        if self._first is None or self._moved is None:
            self._first, self._moved, self._positions = mean, torch.zeros_like(mean), positions
        if mean.shape != self._first.shape:
            raise self._no_mean(mean.shape[2], self._first.shape[2])
        self._moved.add_(mean - self._first, alpha=examples)
        return self._first

    def add_gradients(self, g: Tensor, weight: float = 1.0) -> None:
        """Take the gradients g [groups, N, S, C] of one backward pass, which counts `weight`."""
        weight /= g.shape[2]
        alone = self.population or len(self.levels) == 1  # no level is taken from the mean of a batch
        if g.is_cuda or g.shape[2] > 1 or not alone:
            self._add_gradients([g], weight)
            return
        if weight != self._weight:
            self._release()
        self._held.append(g)
        self._weight, self._rows = weight, self._rows + g.shape[1]
        if self._rows >= HELD:
            self._release()

    def _release(self) -> None:
        """Take the gradients that are held."""
        if self._held:
            self._add_gradients(self._held, self._weight)
        self._held, self._rows = [], 0

    def _add_gradients(self, passes: list[Tensor], weight: float) -> None:
        """Take the gradients of backward passes; of several there is one position an example, and no mean is taken."""
        sums = [_beside([g.sum(level, keepdim=True) if level else g for g in passes]) for level in self.levels]
        for total, part, coarser in zip(self._right, sums, [*sums[1:], None], strict=True):
            count = 1 if coarser is None or self.population else _blocks(part) // _blocks(coarser)
            if coarser is None or count == 1:
                total.add(part, weight)
            else:  # (n H_k - H_{k+1}) / (n - 1), n blocks of this level in one of the next, as a Gram matrix
                total.add(part - coarser / count, weight * count / (count - 1))

    def _input_factors(self) -> list[Tensor]:
        """Return the sums of the levels' input factors; in the mean form there is none of the last."""
        if self._deviations is not None:
            return [self._deviations.sum()]
        first, *others = [gram.sum() for gram in self._left]
        if self._images is not None:
            first = self._images.sum() if first is None else first + self._images.sum()
        return [factor for factor in (first, *others) if factor is not None]

    def _gradient_factors(self) -> list[Tensor | None]:
        """Return the sums of the levels' gradient factors, None where no gradient ever arrived."""
        self._release()
        return [gram.sum() for gram in self._right]

    def terms(self, rows: int, examples: int) -> tuple[Term, ...]:
        """Return the terms, one a level, with input factors [groups, D, D] and gradient factors [groups, rows, rows].

        `examples` is how many were taken in all. The terms are there in place of the sums, which are given up.

        The gradient factors are zero where no gradient ever arrived.
        """
        left, root = self._left_factors(examples)
        none = left[0].new_zeros(left[0].shape[0], rows, rows)
        right = [none if factor is None else factor.div_(examples) for factor in self._gradient_factors()]
        self._left, self._right, self._images, self._deviations = [], [], None, None
        return as_terms(left, right, root, self.levels)

    def _left_factors(self, examples: int) -> tuple[list[Tensor], Tensor | None]:
        """Return the input factors, and in the mean form the root of the last [groups, ., D] instead of it."""
        if self._deviations is not None:
            if self.population:
                self._deviations.settle(examples)
            origin = self._deviations.origin()
            return [self._deviations.sum(1 / examples)], None if origin is None else origin.flatten(1, 2)
        left = [factor / examples for factor in self._input_factors()]
        if self._first is None or self._moved is None:
            return left, None
        scale = (self._positions / self._first.shape[2]) ** 0.5
        drift = (self._moved / examples * scale).flatten(1, 2)
        left[-1] = left[-1] - symmetrised(drift.mT @ drift)
        return left, self._first.flatten(1, 2) * scale + drift


def as_terms(
    left: list[Tensor], right: list[Tensor], root: Tensor | None, levels: tuple[Level, ...]
) -> tuple[Term, ...]:
    """Return one term per level, the last by its root if there is one.

    Where nothing varies within examples, since a unit has one position, levels that part positions have no term.
    """
    terms = [Term(a, h) for a, h in zip(left, right, strict=False)]
    if levels[1:2] == (EXAMPLE,) and not bool(terms[0].left.any()):
        terms = terms[1:]
    return tuple(terms) if root is None else (*terms, root_term(root, right[-1]))


class _Images:
    """Accumulates the Gram matrix of deviations of patches from their means by location, batch by batch."""

    def __init__(self, patches: Patches) -> None:
        self.patches = patches
        self._gram = PatchGram(patches)

    def over(self, image: Tensor, mean: Tensor, level: Level) -> Tensor:
        """Return means [groups, ., ., D] of an image's patches over a level, where `mean` is the image's over N."""
        if level == LOCATION:
            return self.patches.unrolled(mean)
        return self.patches.averaged(image if level == EXAMPLE else mean)

    def add(self, image: Tensor, mean: Tensor) -> Tensor:
        """Take an image [N, C, ...] with its mean [1, C, ...]; return its deviations."""
        deviations = image - mean
        self._gram.add(deviations)
        return deviations

    def sum(self) -> Tensor:
        """Return the sum [groups, D, D]; deviations have no homogeneous coordinate."""
        total = self._gram.sum()
        assert total is not None
        return F.pad(total, (0, 1, 0, 1)) if self.patches.homogeneous else total
