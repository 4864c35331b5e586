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
    if unit.kind == "linear":
        x = input.flatten(1, -2).unsqueeze(0) if input.dim() > 2 else input[None, :, None, :]
    elif unit.kind == "norm":
        x = input.flatten(2).permute(1, 0, 2).unsqueeze(3) if input.dim() > 2 else input.t()[:, :, None, None]
    else:
        assert unit.convolution is not None
        x = unroll(input, unit.convolution, unit.shape[0])
    return F.pad(x, (0, 1), value=1.0) if unit.homogeneous else x


def unit_gradients(unit: Unit, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient at a unit's output as g [groups, N, S, C]."""
    gradient = gradient.detach().to(dtype)
    if unit.kind == "linear":
        return gradient.flatten(1, -2).unsqueeze(0) if gradient.dim() > 2 else gradient[None, :, None, :]
    groups, rows, _ = unit.shape
    return gradient.reshape(gradient.shape[0], groups, rows, -1).permute(1, 0, 3, 2)


def unroll(input: Tensor, convolution: Convolution, groups: int) -> Tensor:
    """Return the patches of `input` [N, C, ...] as [groups, N, S, C / groups * K], features ordered as in a weight."""
    pads = [side for pair in reversed(convolution.padding) for side in pair]
    padded = F.pad(input, pads) if any(pads) else input
    padded = padded.contiguous()
    examples, channels, *space = padded.shape
    geometry = list(zip(space, convolution.kernel, convolution.stride, convolution.dilation, strict=True))
    positions = [(size - dilation * (kernel - 1) - 1) // stride + 1 for size, kernel, stride, dilation in geometry]
    steps = padded.stride()[2:]
    windows = padded.as_strided(
        (examples, groups, channels // groups, *positions, *convolution.kernel),
        (
            padded.stride(0),
            padded.stride(1) * (channels // groups),
            padded.stride(1),
            *(step * stride for step, stride in zip(steps, convolution.stride, strict=True)),
            *(step * dilation for step, dilation in zip(steps, convolution.dilation, strict=True)),
        ),
    )
    rank = len(space)
    space_axes, kernel_axes = range(3, 3 + rank), range(3 + rank, 3 + 2 * rank)
    return windows.permute(1, 0, *space_axes, 2, *kernel_axes).reshape(
        groups, examples, -1, channels // groups * torch.Size(convolution.kernel).numel()
    )


def batch_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient [groups, C, D] of the batch's summed loss with respect to W~: sum_{n,s} g_ns x_ns^T."""
    return g.flatten(1, 2).mT @ x.flatten(1, 2)


def gram(blocks: Tensor) -> Tensor:
    """Return sum over blocks of v v^T, [groups, F, F], for blocks [groups, ., ., F]."""
    flat = blocks.flatten(1, 2)
    return symmetrised(flat.mT @ flat)


def _over(blocks: Tensor, level: Level) -> Tensor:
    return blocks.mean(level, keepdim=True) if level else blocks


class Moments:
    """Accumulates the factors of a unit over batches, for one grouping and form.

    Input factors are sums, gradient factors averages over positions, both per example, as the paper has them for
    convolutions. Batches count by their number of examples.
    """

    def __init__(self, name: str, levels: tuple[Level, ...], form: Form) -> None:
        self.name = name
        self.levels = levels
        self.population = form == "mean" and len(levels) > 1
        self._left: list[Tensor] = []
        self._right: list[Tensor] = []
        self._mean: Tensor | None = None
        self._positions = 1
        self._examples = 0

    def add_inputs(self, x: Tensor) -> None:
        """Take the inputs x [groups, N, S, D] of one batch."""
        _, examples, positions, _ = x.shape
        means = [_over(x, level) for level in self.levels]
        finer = [mean - coarser for mean, coarser in pairwise(means)]
        # Scaled such that a level's blocks stand for all N * S elements: an average over blocks times N * S.
        scales = [examples * positions / (mean.shape[1] * mean.shape[2]) for mean in means]
        grams = [gram(part) * scale for part, scale in zip([*finer, means[-1]], scales, strict=True)]
        if self.population:
            grams.pop()
            grams[-1] += self._merge_mean(means[-1], examples, positions)
        self._left = grams if not self._left else [a + b for a, b in zip(self._left, grams, strict=True)]
        self._examples += examples

    def _merge_mean(self, mean: Tensor, examples: int, positions: int) -> Tensor:
        """Move the population mean and return the scatter between it and this batch's mean (Chan's update)."""
        if self._mean is None:
            self._mean, self._positions = mean, positions
            return torch.zeros_like(mean[:, 0, 0, :, None] * mean[:, 0, 0, None, :])
        if mean.shape != self._mean.shape:
            raise UnitError(
                f"unit '{self.name}' has {mean.shape[2]} positions in one batch and {self._mean.shape[2]} in "
                "another, so its mean by location is undefined; use form='paper', or grouping='pooled'"
            )
        total = self._examples + examples
        delta = mean - self._mean
        self._mean = self._mean + delta * (examples / total)
        return gram(delta) * (self._examples * examples / total * positions / mean.shape[2])

    def add_gradients(self, g: Tensor, weight: float = 1.0) -> None:
        """Take the gradients g [groups, N, S, C] of one backward pass, which counts `weight`."""
        positions = g.shape[2]
        sums = [g.sum(level, keepdim=True) if level else g for level in self.levels]
        grams = [gram(part) for part in sums]
        if not self.population:
            grams = [self._centred(sums, grams, k) for k in range(len(sums))]
        grams = [part * (weight / positions) for part in grams]
        self._right = grams if not self._right else [a + b for a, b in zip(self._right, grams, strict=True)]

    @staticmethod
    def _centred(sums: list[Tensor], grams: list[Tensor], k: int) -> Tensor:
        """Return (n H_k - H_{k+1}) / (n - 1), n blocks of level k in one of level k + 1, as a Gram matrix."""
        if k + 1 == len(sums):
            return grams[k]
        parts = sums[k].shape[1] * sums[k].shape[2] // (sums[k + 1].shape[1] * sums[k + 1].shape[2])
        return grams[k] if parts == 1 else gram(sums[k] - sums[k + 1] / parts) * (parts / (parts - 1))

    def terms(self, rows: int) -> tuple[Term, ...]:
        """Return the terms, one a level, with input factors [groups, D, D] and gradient factors [groups, rows, rows].

        The gradient factors are zero where no gradient ever arrived.
        """
        left = [part / self._examples for part in self._left]
        groups = left[0].shape[0]
        right = [part / self._examples for part in self._right] or [
            left[0].new_zeros(groups, rows, rows) for _ in self.levels
        ]
        terms = [Term(a, h) for a, h in zip(left, right, strict=False)]
        if self._mean is not None:
            root = self._mean.flatten(1, 2) * (self._positions / self._mean.shape[2]) ** 0.5
            terms.append(root_term(root, right[-1]))
        return tuple(terms)
