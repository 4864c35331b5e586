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

Where no example affects another, since BN has the statistics of the population, the gradient factors of example and
batch have one expectation. The hierarchical grouping then has two terms, or one for units of a single position, with
the factor that has N times as many samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.curvature.blocks import Term, root_term, symmetrised
from xkfac.curvature.gram import Gram
from xkfac.curvature.input_moments import BATCH, ELEMENT, EXAMPLE, LOCATION, Deviations, Level, no_mean
from xkfac.curvature.patch_gram import PatchGram
from xkfac.curvature.patches import Patches, unroll
from xkfac.model.units import Unit

Grouping = Literal["paper", "pooled", "hierarchical"]
Form = Literal["paper", "mean"]

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


def level_sums(g: Tensor, levels: tuple[Level, ...]) -> list[Tensor]:
    """Return the sums of g over the blocks of every level, each from those of the level before."""
    sums = [g]
    for level in levels[1:]:
        sums.append(sums[-1].sum(level, keepdim=True))
    return sums


def _uncoupled(element: Term, example: Term, batch: Term) -> tuple[Term, ...]:
    """Return the terms of a hierarchical grouping where gradients of different examples are independent."""
    joined = Term(example.left + batch.dense_left, example.right)
    return (element, joined) if element.left.any() else (joined,)


def _beside(passes: Sequence[Tensor]) -> Tensor:
    return passes[0] if len(passes) == 1 else torch.cat(list(passes), 1)


def _blocks(tensor: Tensor) -> int:
    return tensor.shape[1] * tensor.shape[2]


@dataclass(frozen=True)
class Draw:
    """A backward pass of a batch: what it counts, and which it is `of` how many labels drawn for the batch.

    A draw is one more sample of H'', and N * S more of H', whose positions are alike. So of many draws each takes a
    part of the positions for H', one in sqrt(of / 2): its error grows by a twentieth at 8 draws and a tenth at 32, and
    its Gram matrix, which costs as much as half of a backward pass, is made of a half and a quarter of the rows.
    """

    weight: float = 1.0
    place: int = 0
    of: int = 1

    def share_of(self, g: Tensor) -> tuple[Tensor, float]:
        """Return the positions of g [groups, N, S, C] that are this draw's, and what they count in place of all."""
        step = min(max(round((self.of / 2) ** 0.5), 1), g.shape[2])
        first = self.place % step
        return (g, 1.0) if step == 1 else (g[:, :, first::step], self.of / len(range(first, self.of, step)))


ONE = Draw()


class Moments:
    """Accumulates the factors of a unit over batches, for one grouping and form.

    coupled: whether the examples of a mini-batch affect each other.
    Input factors are sums, gradient factors averages over positions, both per example, as the paper has them for
    convolutions. Batches count by their number of examples. Inputs come as x, or as images of which x are the patches;
    the factors are the same.
    """

    def __init__(self, name: str, levels: tuple[Level, ...], form: Form, *, coupled: bool = True) -> None:
        self.name = name
        self.levels = levels
        self._coupled = coupled
        self.population = form == "mean" and len(levels) > 1
        self._left = [Gram() for _ in levels]
        self._right = [Gram() for _ in levels]
        # In the mean form inputs are taken from a fixed point, the first batch's mean, and the population's mean is
        # known at the end: the covariance is then no difference of large numbers, and no batch is looked at twice.
        self._first: Tensor | None = None
        self._moved: Tensor | None = None
        self._weight: Tensor | None = None  # a number of means, which a recorded graph counts too
        self._images: PatchGram | None = None
        self._deviations: Deviations | None = None
        # On a CPU gradients of one position an example are held until there are enough of them, as they are: nobody
        # changes a gradient that another has, and a few large operations take less time than many small ones.
        self._held: list[Tensor] = []
        self._rows = 0
        self._draw = ONE

    def add_inputs(self, x: Tensor) -> None:
        """Take the inputs x [groups, N, S, D] of one batch."""
        _, examples, positions, _ = x.shape
        means = [_over(x, level) for level in self.levels]
        coarse = self._add_means(means[1:], examples, positions)
        self._left[0].add(x - coarse[0] if coarse else x)

    def images(self, patches: Patches) -> Callable[[Tensor], None]:
        """Return what takes the inputs of a batch as images [N, C, ...], of which x are the patches."""
        if self.population or self.levels == KFAC:
            self._deviations = Deviations(self.name, patches, self.levels)
            return self._deviations.add
        if self.levels[1] == LOCATION:
            self._images = PatchGram(patches)
            return partial(self._add_centred, patches)
        return lambda image: self.add_inputs(patches.unrolled(image))

    def _add_centred(self, patches: Patches, image: Tensor) -> None:
        """Take images from the mini-batch's means by location."""
        assert self._images is not None
        mean = image.mean(0, keepdim=True)
        self._images.add(image - mean)
        self._left[1].add(patches.unrolled(mean), len(image))

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

    def _from_origin(self, mean: Tensor, examples: int, positions: int) -> Tensor:
        """Return the origin, having noted how far a batch's mean is from it; one of all positions counts as many."""
        if self._first is None or self._moved is None or self._weight is None:
            self._first, self._moved, self._weight = mean, torch.zeros_like(mean), mean.new_zeros(())
        if mean.shape != self._first.shape:
            raise no_mean(self.name, mean.shape[2], self._first.shape[2])
        weight = examples * positions / mean.shape[2]
        self._moved.add_(mean - self._first, alpha=weight)
        self._weight += weight
        return self._first

    def add_gradients(self, g: Tensor, draw: Draw = ONE) -> None:
        """Take the gradients g [groups, N, S, C] of one backward pass."""
        alone = self.population or len(self.levels) == 1  # no level is taken from the mean of a batch
        if g.is_cuda or g.shape[2] > 1 or not alone:
            self._add_gradients([g], draw)
            return
        if draw.weight != self._draw.weight:
            self._release()
        self._held.append(g)
        self._draw, self._rows = draw, self._rows + g.shape[1]
        if self._rows >= HELD:
            self._release()

    def _release(self) -> None:
        """Take the gradients that are held."""
        if self._held:
            self._add_gradients(self._held, self._draw)
        self._held, self._rows = [], 0

    def _add_gradients(self, passes: list[Tensor], draw: Draw) -> None:
        """Take the gradients of backward passes; of several there is one position an example, and no mean is taken."""
        sums = [_beside(level) for level in zip(*(level_sums(g, self.levels) for g in passes), strict=True)]
        counts = [1 if self.population else _blocks(a) // _blocks(b) for a, b in pairwise(sums)]
        self._add_squares(sums, [*counts, 1], draw, [1.0] * len(sums))

    def _add_squares(self, sums: list[Tensor], counts: list[int], draw: Draw, shares: list[float]) -> None:
        """Add the squares of the levels' sums, of which `counts` are one of the next level, each counting its share."""
        positions = sums[0].shape[2]
        for place, (total, part, count, share) in enumerate(zip(self._right, sums, counts, shares, strict=True)):
            weight = share * draw.weight / positions
            if count > 1:  # (n H_k - H_{k+1}) / (n - 1), n blocks of this level in one of the next, as a Gram matrix
                part = part - sums[place + 1] / count
                weight *= count / (count - 1)
            if place == 0:
                part, counted = draw.share_of(part)
                weight *= counted
            total.add(part, weight)

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
        return self._terms(left, right, root)

    def _terms(self, left: list[Tensor], right: list[Tensor], root: Tensor | None) -> tuple[Term, ...]:
        terms = tuple(Term(a, h) for a, h in zip(left, right, strict=False))
        if root is not None:
            terms = (*terms, root_term(root, right[-1]))
        return terms if self._coupled or self.levels != GROUPINGS["hierarchical"] else _uncoupled(*terms)

    def _left_factors(self, examples: int) -> tuple[list[Tensor], Tensor | None]:
        """Return the input factors, and in the mean form the root of the last [groups, ., D] instead of it."""
        root = self._root_of_means(examples)
        if self._deviations is not None:
            return self._deviations.factors(examples), root
        sums = [gram.sum() for gram in self._left]
        if self._images is not None:  # deviations have no homogeneous coordinate
            inner, last = self._images.sum(), self._images.patches.homogeneous
            sums[0] = None if inner is None else F.pad(inner, (0, last, 0, last))
        left = [factor / examples for factor in sums if factor is not None]
        if self._moved is not None and self._weight is not None:
            drift = (self._moved / (self._weight * examples) ** 0.5).flatten(1, 2)
            left[-1] = left[-1] - symmetrised(drift.mT @ drift)
        return left, root

    def _root_of_means(self, examples: int) -> Tensor | None:
        """Return the root R [groups, ., D] of M = R^T R from the examples taken; None but in the mean form."""
        if self._deviations is not None:
            return self._deviations.root(examples)
        if self._first is None or self._moved is None or self._weight is None:
            return None
        return ((self._first + self._moved / self._weight) * (self._weight / examples) ** 0.5).flatten(1, 2)
