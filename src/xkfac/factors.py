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

import math
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.errors import UnitError
from xkfac.kronecker import Term, root_term, symmetrised
from xkfac.tracing import Convolution
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


def unroll(input: Tensor, convolution: Convolution, groups: int, *, homogeneous: bool = False) -> Tensor:
    """Return the patches of `input` [N, C, ...] as [groups, N, S, C / groups * K], features ordered as in a weight.

    With `homogeneous` a 1 is appended to each; the patches are written once, in their place.
    """
    pads = [side for pair in reversed(convolution.padding) for side in pair]
    padded = (F.pad(input, pads) if any(pads) else input).contiguous()
    examples, channels, *space = padded.shape
    channels //= groups
    geometry = zip(space, convolution.kernel, convolution.stride, convolution.dilation, strict=True)
    positions = [(size - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, dilation in geometry]
    steps = padded.stride()[2:]
    windows = padded.as_strided(
        (groups, examples, *positions, channels, *convolution.kernel),
        (
            padded.stride(1) * channels,
            padded.stride(0),
            *(step * stride for step, stride in zip(steps, convolution.stride, strict=True)),
            padded.stride(1),
            *(step * dilation for step, dilation in zip(steps, convolution.dilation, strict=True)),
        ),
    )
    features = windows[0, 0].numel() // math.prod(positions)
    patches = padded.new_empty(groups, examples, math.prod(positions), features + homogeneous)
    patches[..., :features].view(windows.shape).copy_(windows)
    if homogeneous:
        patches[..., features] = 1
    return patches


def batch_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient [groups, C, D] of the batch's summed loss with respect to W~: sum_{n,s} g_ns x_ns^T."""
    return g.flatten(1, 2).mT @ x.flatten(1, 2)


class Gram:
    """Accumulates sum of scale * v v^T over vectors v, [groups, F, F]; a few vectors at a time wait for more."""

    _wait = 128

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._waiting: list[Tensor] = []

    def add(self, blocks: Tensor, scale: float) -> None:
        """Take the vectors [groups, ., ., F]."""
        rows = blocks.flatten(1, 2)
        # On a GPU a thin product costs no more than the copy that would let it wait, and waiting cannot be replayed.
        if rows.shape[1] < self._wait and not rows.is_cuda:
            self._waiting.append(rows * scale**0.5)
            if sum(few.shape[1] for few in self._waiting) >= self._wait:
                self._flush()
        else:
            self._accumulate(rows, scale)

    def _flush(self) -> None:
        if self._waiting:
            self._accumulate(torch.cat(self._waiting, 1), 1.0)
            self._waiting = []

    def _accumulate(self, rows: Tensor, scale: float) -> None:
        if self._total is None:
            self._total = (rows.mT @ rows).mul_(scale)
        else:
            self._total.baddbmm_(rows.mT, rows, alpha=scale)

    def mean(self, count: int) -> Tensor | None:
        """Return the sum over `count`, exactly symmetric; None if nothing was taken."""
        self._flush()
        return None if self._total is None else symmetrised(self._total / count)


def _over(blocks: Tensor, level: Level) -> Tensor:
    return blocks.mean(level, keepdim=True) if level else blocks


def _blocks(tensor: Tensor) -> int:
    return tensor.shape[1] * tensor.shape[2]


class Moments:
    """Accumulates the factors of a unit over batches, for one grouping and form.

    Input factors are sums, gradient factors averages over positions, both per example, as the paper has them for
    convolutions. Batches count by their number of examples.
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

    def add_inputs(self, x: Tensor) -> None:
        """Take the inputs x [groups, N, S, D] of one batch."""
        _, examples, positions, _ = x.shape
        means = [_over(x, level) for level in self.levels]
        if self.population:
            means[-1] = self._from_origin(means[-1], examples, positions)
        deviations = [fine - coarse for fine, coarse in pairwise(means)]
        if not self.population:
            deviations.append(means[-1])
        for total, part in zip(self._left, deviations, strict=False):
            # A level's blocks stand for all N * S elements: an average over blocks times N * S.
            total.add(part, examples * positions / _blocks(part))

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

    def terms(self, rows: int, examples: int) -> tuple[Term, ...]:
        """Return the terms, one a level, with input factors [groups, D, D] and gradient factors [groups, rows, rows].

        `examples` is how many were taken in all.

        The gradient factors are zero where no gradient ever arrived.
        """
        left = [factor for gram in self._left if (factor := gram.mean(examples)) is not None]
        groups = left[0].shape[0]
        right = [
            left[0].new_zeros(groups, rows, rows) if (factor := gram.mean(examples)) is None else factor
            for gram in self._right
        ]
        if self._origin is None or self._drift is None:
            return tuple(Term(a, h) for a, h in zip(left, right, strict=True))
        scale = (self._positions / self._origin.shape[2]) ** 0.5
        drift = (self._drift / examples * scale).flatten(1, 2)
        left[-1] = left[-1] - symmetrised(drift.mT @ drift)
        root = self._origin.flatten(1, 2) * scale + drift
        return (*(Term(a, h) for a, h in zip(left, right, strict=False)), root_term(root, right[-1]))
