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

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from xkfac.curvature.blocks import Term, root_term
from xkfac.curvature.gram import Gram, add_gram, mirror_
from xkfac.curvature.input_moments import BATCH, ELEMENT, EXAMPLE, LOCATION, BatchDeviations, Deviations, Level, Means
from xkfac.curvature.patches import Patches
from xkfac.curvature.processes import Processes
from xkfac.curvature.products import product
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
    return product(g.flatten(1, 2).mT, x.flatten(1, 2))


def _uncoupled(element: Term, example: Term, batch: Term) -> tuple[Term, ...]:
    """Return the terms of a hierarchical grouping where gradients of different examples are independent.

    The input factor of the examples is given up.
    """
    left = example.left
    if batch.low_rank:
        add_gram(left, batch.left.mT)
        mirror_(left)
    else:
        left += batch.left
    joined = Term(left, example.right)
    return (element, joined) if element.left.any() else (joined,)


def _sum(blocks: Tensor, axes: Level) -> Tensor:
    """Return the sum over some axes, each of which stays with size 1, laid out in memory as the blocks are.

    Torch lays a sum out in the order of its axes, and is many times slower where its terms lie in another one.
    """
    order = sorted(range(blocks.dim()), key=blocks.stride, reverse=True)
    total = blocks.permute(order).sum([order.index(axis) for axis in axes], keepdim=True)
    return total.permute([order.index(axis) for axis in range(blocks.dim())])


def _beside(passes: Sequence[Tensor]) -> Tensor:
    return passes[0] if len(passes) == 1 else torch.cat(list(passes), 1)


@dataclass(frozen=True)
class Draw:
    """A backward pass of a batch: what it counts, and which one of how many, `of`, it is.

    A draw is one more sample of H'', and N * S more of H', whose positions are alike. So of 4 draws or more each takes
    half of the positions for H', which makes its error, less than half of that of H'', larger by 4 to 12%. To take
    fewer saves no time that can be measured. Positions of a half lie side by side, since others take long to copy.
    """

    weight: float = 1.0
    place: int = 0
    of: int = 1

    def share_of(self, g: Tensor) -> tuple[Tensor, float]:
        """Return the positions of g [groups, N, S, C] that are this draw's, and what they count in place of all."""
        size = g.shape[2]
        parts = min(max(self.of // 2, 1), 2, size)
        own = self.place % parts
        counted = self.of / len(range(own, self.of, parts))
        return g[:, :, own * size // parts : (own + 1) * size // parts], counted


ONE = Draw()


class Moments:
    """Accumulates the factors of a unit over batches, for one grouping and form.

    inputs: takes images of which the inputs x are the patches. coupled: whether the examples of a
    mini-batch affect each other.

    Input factors are sums, gradient factors averages over positions, both per example, as the paper has them for
    convolutions. Batches count by their number of examples.
    """

    def __init__(self, patches: Patches, levels: tuple[Level, ...], form: Form, *, coupled: bool = True) -> None:
        self.levels, self._shape = levels, patches.unit.shape
        self._coupled = coupled
        self.population = form == "mean" and len(levels) > 1
        # No level is taken from the mean of a mini-batch.
        self._alone = self.population or levels == KFAC
        self.inputs = Deviations(patches, levels) if self._alone else BatchDeviations(patches, levels)
        # Where no example affects another, the factor of the batch is that of the example.
        self._alike = self.population and not coupled and levels == GROUPINGS["hierarchical"]
        self._right = [Gram() for _ in levels[: -1 if self._alike else None]]
        # On a CPU gradients of one position an example are held until there are enough of them, as they are: nobody
        # changes a gradient that another has, and a few large operations take less time than many small ones.
        self._held: list[Tensor] = []
        self._rows = 0
        self._draw = ONE
        self._shared: tuple[list[Tensor], list[Tensor], Means | None] | None = None

    def add_gradients(self, g: Tensor, draw: Draw = ONE) -> None:
        """Take the gradients g [groups, N, S, C] of one backward pass."""
        if g.is_cuda or g.shape[2] > 1 or not self._alone:
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
        sums = [_beside(level) for level in zip(*(self._level_sums(g) for g in passes), strict=True)]
        blocks = [one.shape[1] * one.shape[2] for one in sums]
        counts = [1 if self.population else fine // coarse for fine, coarse in pairwise(blocks)]
        for place, (total, part, count) in enumerate(zip(self._right, sums, [*counts, 1], strict=True)):
            weight = draw.weight / sums[0].shape[2]
            if count > 1:  # (n H_k - H_{k+1}) / (n - 1), n blocks of this level in one of the next, as a Gram matrix
                part = part - sums[place + 1] / count
                weight *= count / (count - 1)
            if place == 0:
                part, counted = draw.share_of(part)
                weight *= counted
            total.add(part, weight)

    def _level_sums(self, g: Tensor) -> list[Tensor]:
        """Return the sums of g over the blocks of every level with a factor, each from those of the level before."""
        sums = [g]
        for level in self.levels[1 : len(self._right)]:
            sums.append(_sum(sums[-1], level))
        return sums

    def _gradient_factors(self) -> list[Tensor | None]:
        """Return the sums of the levels' gradient factors, None where no gradient ever arrived."""
        self._release()
        return [gram.sum() for gram in self._right]

    def share(self, processes: Processes, like: Tensor, examples: int, means: Means | None) -> None:
        """Take the sums of all processes in place of those of this one, which has seen so many examples.

        Sums add up over processes, but for one thing: in the mean form a process takes inputs from an origin of its
        own, and its scatter is that from its own mean. means: those of all examples, from which every process adds the
        scatter of its own mean; no difference of large numbers is taken on the way.
        """
        groups, rows, columns = self._shape
        left = [like.new_zeros(groups, columns, columns) for _ in range(len(self.levels) - self.population)]
        if examples:
            own = self.inputs.means(examples)
            left = [factor.mul_(examples) for factor in self.inputs.factors(examples)]
            if means is not None and own is not None:
                step = own.rows - means.rows
                left[-1].baddbmm_(step.mT, step, alpha=examples * own.count)  # only one triangle of it travels
        none = like.new_zeros(groups, rows, rows)
        right = [none if factor is None else factor for factor in self._gradient_factors()]
        left, right = ([processes.total_of_symmetric(one) for one in side] for side in (left, right))
        self._shared = left, right, means

    def terms(self, examples: int) -> tuple[Term, ...]:
        """Return the terms, one a level, with input factors [groups, D, D] and gradient factors [groups, C, C].

        `examples` is how many were taken in all. The terms are there in place of the sums, which are given up. The
        gradient factors are zero where no gradient ever arrived.
        """
        if self._shared is None:
            means = self.inputs.means(examples)
            left = self.inputs.factors(examples)
            none = left[0].new_zeros(self._shape[0], self._shape[1], self._shape[1])
            right = [none if factor is None else factor.div_(examples) for factor in self._gradient_factors()]
        else:
            left, right = ([factor / examples for factor in side] for side in self._shared[:2])
            means = self._shared[2]
        right += right[-1:] * self._alike
        del self.inputs
        self._right, self._shared = [], None
        terms = tuple(Term(a, h) for a, h in zip(left, right, strict=False))
        if means is not None:
            terms = (*terms, root_term(means.root, right[-1]))
        return terms if self._coupled or self.levels != GROUPINGS["hierarchical"] else _uncoupled(*terms)
