"""For `gap.py`: a perceptron as one flat vector, its exact Fisher, and the quadratic penalties that are compared.

A layer is a matrix [C, D + 1], weights and bias side by side, and the flat vector holds the layers one after the other,
row by row. The Fisher of N examples is the sum over examples and classes of r r^T / N, with a row r per pair: the
gradient of the output along sqrt(p_c) (e_c - p). Nothing is drawn: all ten classes count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from xkfac.curvature.blocks import KhatriRao, Kronecker, Term
from xkfac.curvature.operator import Curvature

CHUNK = 4096  # rows of gradients that are written out at once
PANEL = 8192  # rows of a dense matrix that one product reads or writes: below 2^31 numbers each


@dataclass(frozen=True)
class Shape:
    """The sizes of a perceptron's layers: features, widths, classes."""

    sizes: tuple[int, ...]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """[C, D + 1] of each layer."""
        return [(outputs, inputs + 1) for inputs, outputs in pairwise(self.sizes)]

    @property
    def count(self) -> int:
        """The number of parameters."""
        return sum(rows * columns for rows, columns in self.shapes)

    @property
    def slices(self) -> list[slice]:
        """Where each layer lies in the flat vector."""
        ends = [0]
        for rows, columns in self.shapes:
            ends.append(ends[-1] + rows * columns)
        return [slice(*pair) for pair in pairwise(ends)]

    def layers(self, flat: Tensor) -> list[Tensor]:
        """Return the layers [..., C, D + 1] of vectors [..., P], as views."""
        return [flat[..., part].unflatten(-1, shape) for part, shape in zip(self.slices, self.shapes, strict=True)]


def forward(layers: Sequence[Tensor], x: Tensor, noise: float = 0.0) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of all layers, without the 1, and the logits.

    noise: every example meets weights of its own, with normal noise of so many times the root mean square of the
    layer's. That is, up to the backward pass, noise on its outputs in proportion to the norm of its inputs.
    """
    inputs = [x]
    for layer in layers:
        weight = layer[:, :-1]
        units = F.linear(inputs[-1], weight, layer[:, -1])
        if noise:
            size = weight.square().mean().sqrt() * inputs[-1].norm(dim=1, keepdim=True)
            units += noise * size * torch.randn_like(units)
        inputs.append(units.relu())
    return inputs[:-1], units


def backward(layers: Sequence[Tensor], inputs: Sequence[Tensor], delta: Tensor) -> list[Tensor]:
    """Return the gradients [..., N, C] at the outputs of all layers from `delta`, that at the logits."""
    deltas = [delta]
    for layer, inner in zip(layers[:0:-1], inputs[:0:-1], strict=True):
        deltas.append((deltas[-1] @ layer[:, :-1]) * (inner > 0))
    return deltas[::-1]


def loss_gradient(layers: Sequence[Tensor], x: Tensor, y: Tensor, out: Sequence[Tensor]) -> None:
    """Write the gradient of the mean cross-entropy of a batch to `out`, layers as views of a flat vector."""
    inputs, logits = forward(layers, x)
    delta = logits.softmax(1)
    delta.scatter_add_(1, y[:, None], delta.new_full((1, 1), -1).expand(len(y), 1))
    for one, inner, total in zip(backward(layers, inputs, delta / len(y)), inputs, out, strict=True):
        total[:, :-1] = one.mT @ inner
        total[:, -1] = one.sum(0)


def roots(logits: Tensor) -> Tensor:
    """Return sqrt(p_c) (e_c - p) for all classes c, [classes, N, classes]."""
    p = logits.softmax(1)
    eye = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
    return p.sqrt().T[:, :, None] * (eye[:, None, :] - p)


@dataclass
class TaskFisher:
    """The Fisher of one task at the weights `flat` [P], over the examples that `take` returns for indices.

    noise: average the Fisher over weights with noise, see `forward`.
    """

    shape: Shape
    flat: Tensor
    take: Callable[[Tensor], Tensor]
    examples: int
    noise: float = 0.0

    def _chunks(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield inputs [n, D] and gradients [classes, n, C] of all layers."""
        layers = self.shape.layers(self.flat)
        for index in torch.arange(self.examples, device=self.flat.device).split(CHUNK):
            inputs, logits = forward(layers, self.take(index), self.noise)
            yield inputs, backward(layers, inputs, roots(logits))

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A and H of all layers together, [sum (D + 1), sum (D + 1)] and [sum C, sum C]."""
        left = right = None
        for inputs, deltas in self._chunks():
            a = torch.cat([F.pad(one, (0, 1), value=1.0) for one in inputs], 1)
            h = torch.cat(deltas, 2).flatten(0, 1)
            left = a.mT @ a if left is None else left.addmm_(a.mT, a)
            right = h.mT @ h if right is None else right.addmm_(h.mT, h)
        assert left is not None
        assert right is not None
        return left / self.examples, right / self.examples

    def norms(self) -> Tensor:
        """Return the squared norms of all rows, [classes, N]."""
        parts = []
        for inputs, deltas in self._chunks():
            pairs = zip(inputs, deltas, strict=True)
            parts.append(torch.stack([(a.square().sum(1) + 1) * d.square().sum(2) for a, d in pairs]).sum(0))
        return torch.cat(parts, 1)

    def rows(self, count: int = 0) -> Iterator[Tensor]:
        """Yield rows G [n, P] with F = sum G^T G: all, or `count` of them, so that the sum is right on average.

        A row is drawn in proportion to its squared norm and rescaled, at equal distances along the sum of all, so that
        the trace is exact. Most examples are answered with certainty and have rows near zero. Noise changes the norms;
        half of the rows are then drawn at equal rates.
        """
        norms = self.norms().flatten().double()
        shares = norms / norms.sum()
        if self.noise:
            shares = (shares + 1 / len(shares)) / 2
        if count and count < len(shares):
            places = (torch.arange(count, device=shares.device) + 0.5) / count
            chosen = torch.searchsorted(shares.cumsum(0), places).clamp_(max=len(shares) - 1)
            scales = 1 / (count * self.examples * shares[chosen]).sqrt()
        else:
            chosen = torch.arange(len(shares), device=shares.device)
            scales = torch.full_like(shares, self.examples**-0.5)
        layers = self.shape.layers(self.flat)
        for part, scale in zip(chosen.split(CHUNK), scales.to(self.flat.dtype).split(CHUNK), strict=True):
            inputs, logits = forward(layers, self.take(part % self.examples), self.noise)
            which = (part // self.examples)[None, :, None].expand(1, -1, logits.shape[1])
            delta = roots(logits).gather(0, which)[0] * scale[:, None]
            result = torch.empty(len(part), self.shape.count, dtype=self.flat.dtype, device=self.flat.device)
            for out, a, d in zip(self.shape.layers(result), inputs, backward(layers, inputs, delta), strict=True):
                torch.mul(d[:, :, None], a[:, None, :], out=out[:, :, :-1])
                out[:, :, -1] = d
            yield result


class KroneckerSum:
    """Kronecker factors of all tasks: averaged as the library does, or kept (`keep`), with `cross` between layers."""

    def __init__(self, shape: Shape, *, keep: bool = False, cross: bool = False) -> None:
        self.shape, self.keep, self.cross = shape, keep, cross
        self.curvature: Curvature | None = None
        self._stacked: list[Term] = []

    def extend(self, task: TaskFisher) -> None:
        """Add the factors of a task."""
        rows, columns = zip(*self.shape.shapes, strict=True)
        left, right = task.factors()
        joint = KhatriRao((Term(left[None], right[None]),), rows, columns)
        names = [f"layer{place}" for place in range(len(rows))]
        if self.cross:
            new = Curvature({}, joint, tuple(names))
        else:
            new = Curvature({name: joint.own_block(place) for place, name in enumerate(names)})
        if self.curvature is not None:
            new = self.curvature.extend(new, 1.0, 1.0, homogeneous=names, keep_all=self.keep)
        self.curvature = new
        # All terms of a block as one, a group each: three products in place of three per task.
        self._stacked = [_stacked(block) for block in new.blocks.values() if isinstance(block, Kronecker)]

    def product(self, v: Tensor) -> Tensor:
        """Return the sum over tasks of F_t v for v [P]."""
        assert self.curvature is not None
        layers = [layer[None] for layer in self.shape.layers(v)]
        if self.curvature.joint is not None:
            return torch.cat([one.flatten() for one in self.curvature.joint.product(layers)])
        pairs = zip(self._stacked, layers, strict=True)
        return torch.cat([term.product(v.expand(len(term.left), -1, -1)).sum(0).flatten() for term, v in pairs])

    def products(self, vectors: Tensor) -> Tensor:
        """Return the products with the columns of [P, k]."""
        assert self.curvature is not None
        layers = self.shape.layers(vectors.mT)
        if self.curvature.joint is not None:
            return torch.cat([one.flatten(1) for one in _joint_products(self.curvature.joint, layers)], 1).mT
        pairs = zip(self.curvature.blocks.values(), layers, strict=True)
        return torch.cat([block.product(layer).flatten(1) for block, layer in pairs], 1).mT


def _stacked(block: Kronecker) -> Term:
    return Term(torch.cat([t.left for t in block.terms]).contiguous(), torch.cat([t.right for t in block.terms]))


def _joint_products(joint: KhatriRao, layers: Sequence[Tensor]) -> list[Tensor]:
    """Return `joint.product` of several displacements at once, layers [k, C, D]."""
    totals = [torch.zeros_like(layer) for layer in layers]
    for term in joint.terms:
        for i, (rows, columns) in enumerate(
            zip(term.right[0].split(joint.rows), term.left[0].split(joint.columns), strict=True)
        ):
            blocks = zip(rows.split(joint.rows, 1), columns.split(joint.columns, 1), layers, strict=True)
            for right, left, layer in blocks:
                totals[i] += right @ layer @ left.mT
    return totals


class Dense:
    """The exact Fisher, summed over tasks, as dense matrices: one of all parameters, or one per layer (`blocks`).

    rows: how many rows of gradients a task is estimated on, 0 for all.
    """

    def __init__(self, shape: Shape, like: Tensor, *, blocks: bool = False, rows: int = 0) -> None:
        self.slices, self.rows = shape.slices if blocks else [slice(0, shape.count)], rows
        sizes = [part.stop - part.start for part in self.slices]
        self.matrices = [like.new_zeros(size, size) for size in sizes]

    def extend(self, task: TaskFisher) -> None:
        """Add the Fisher of a task, in place."""
        with tensor_cores():
            for rows in task.rows(self.rows):
                for part, matrix in zip(self.slices, self.matrices, strict=True):
                    _add_gram(matrix, rows[:, part])
        for matrix in self.matrices:
            _mirror(matrix)

    def product(self, v: Tensor) -> Tensor:
        """Return the sum over tasks of F_t v for v [P]."""
        pairs = zip(self.slices, self.matrices, strict=True)
        # A panel at a time: a matrix may have more numbers than 32 bits can count.
        return torch.cat([torch.mv(panel, v[part]) for part, matrix in pairs for panel in matrix.split(PANEL)])

    def products(self, vectors: Tensor) -> Tensor:
        """Return the products with the columns of [P, k]."""
        pairs = zip(self.slices, self.matrices, strict=True)
        return torch.cat([panel @ vectors[part] for part, matrix in pairs for panel in matrix.split(PANEL)])


class Stiff:
    """The directions of largest curvature of a penalty F: U [k, P], orthonormal, and the diagonal s [k] of U F U^T."""

    def __init__(self, start: Tensor) -> None:
        self.basis, self.values = start, start.new_zeros(len(start))

    def update(self, penalty: KroneckerSum | Dense) -> None:
        """Follow a penalty that has changed, by a few steps of subspace iteration from the directions of before."""
        columns = self.basis.mT
        with tensor_cores():
            for _ in range(3):
                columns = torch.linalg.qr(penalty.products(columns)).Q
            inner = columns.mT @ penalty.products(columns)
            self.values, rotation = torch.linalg.eigh((inner + inner.mT) / 2)
            self.basis = rotation.mT @ columns.mT

    def product(self, v: Tensor) -> Tensor:
        """Return U^T s U v for v [P]."""
        return torch.mv(self.basis.mT, self.values * torch.mv(self.basis, v))

    def damped(self, gradient: Tensor, scale: Tensor) -> Tensor:
        """Return the gradient divided by 1 + scale * s along U: steps that are stable however large s is.

        The weights at which the gradient vanishes stay the same.
        """
        along = torch.mv(self.basis, gradient)
        return gradient - torch.mv(self.basis.mT, along * (1 - 1 / (1 + scale * self.values)))


def _add_gram(matrix: Tensor, rows: Tensor) -> None:
    """Add G^T G for rows G [n, P] to the lower triangle of a matrix [P, P], in place."""
    for start in range(0, len(matrix), PANEL):
        end = min(start + PANEL, len(matrix))
        matrix[start:end, :end].addmm_(rows[:, start:end].mT, rows[:, :end])


def _mirror(matrix: Tensor) -> None:
    """Copy the lower triangle of a matrix to the upper one; the panels on the diagonal have both."""
    for start in range(0, len(matrix), PANEL):
        end = min(start + PANEL, len(matrix))
        matrix[:start, start:end] = matrix[start:end, :start].mT


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Let products of float32 round their factors to TF32, with sums in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def largest(product: Callable[[Tensor], Tensor], start: Tensor, steps: int = 12) -> tuple[Tensor, Tensor]:
    """Return the largest eigenvalue of a symmetric operator and its eigenvector, by power iteration."""
    v = start / start.norm()
    for _ in range(steps):
        w = product(v)
        value = w.norm()
        v = w / value.clamp(min=1e-30)
    return value, v


def stable_limit(every: int, momentum: float) -> float:
    """Return the largest learning rate times curvature at which steps are stable for any smaller one too.

    SGD with momentum, where the gradient comes every so many steps with as many times the weight. For 1 it is
    2 (1 + momentum).
    """

    def radius(stiffness: float) -> float:
        total = torch.eye(2, dtype=torch.float64)
        for step in range(every):
            pull = every * stiffness if step == 0 else 0.0
            total = torch.tensor([[1 - pull, -momentum], [pull, momentum]], dtype=torch.float64) @ total
        return float(torch.linalg.eigvals(total).abs().max())

    low, high = 0.0, 2.5 * (1 + momentum)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)
    return low
