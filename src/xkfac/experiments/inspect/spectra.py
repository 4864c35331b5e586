"""The eigenvalues of curvature blocks.

Of one Kronecker product they are the products of the factors' eigenvalues, of a diagonal its entries, of a corrected
block its scales: all exact. Those of a sum of products are no products; of these the spectra of the terms are exact,
and so are trace and effective rank of the sum, while its largest eigenvalue is found by Lanczos' method.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from scipy.linalg import norm  # type: ignore[import-untyped]
from scipy.sparse.linalg import LinearOperator, eigsh  # type: ignore[import-untyped]
from torch import Tensor

from xkfac.curvature.blocks import Block, Corrected, Diagonal, Kronecker, Term

DECADES = 6  # what lies below is rounding, in factors of single precision
_BARS = " ▁▂▃▄▅▆▇█"
_DENSE = 512  # a matrix of this size is decomposed sooner than multiplied with
_ENOUGH = 1e-4  # of a residual; the error of a largest eigenvalue is mostly of the size of its square


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a positive semi-definite matrix, in a few numbers.

    size: how many there are. effective_rank: (sum of eigenvalues)^2 / sum of their squares, the participation ratio.
    ninety: how many of the largest make up 90% of the trace. decades: how many lie in each decade below the largest,
    [0.1, 1] of it first; `below` are those under all decades, zeros included.
    """

    size: int
    trace: float
    largest: float
    effective_rank: float
    ninety: int
    decades: tuple[int, ...]
    below: int

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Return the spectrum of eigenvalues [...]; those that rounding made negative count as zero."""
        values = values.detach().double().flatten().clamp(min=0).sort(descending=True).values
        total, largest = float(values.sum()), float(values[0])
        if not largest > 0:
            return cls(len(values), 0.0, 0.0, 0.0, 0, (0,) * DECADES, len(values))
        # A sum may miss its own 90% by rounding, the first eigenvalue alone may reach it.
        ninety = min(int((values.cumsum(0) < 0.9 * total).sum()) + 1, len(values))
        depth = (-(values / largest).log10()).floor()
        counts = tuple(int((depth == decade).sum()) for decade in range(DECADES))
        ratio = total**2 / float(values.square().sum())
        return cls(len(values), total, largest, ratio, ninety, counts, len(values) - sum(counts))

    @property
    def sparkline(self) -> str:
        """One bar per decade, the largest eigenvalues first; its height is the logarithm of how many lie there."""
        top = math.log1p(max(self.size, 1))
        return "".join(_BARS[math.ceil(math.log1p(count) / top * (len(_BARS) - 1))] for count in self.decades)


def spectra(block: Block) -> tuple[Spectrum, ...]:
    """Return the exact spectrum of each term of a block; one for a block that is no sum."""
    if isinstance(block, Kronecker):
        return tuple(Spectrum.of(_eigenvalues(term)) for term in block.terms)
    return (Spectrum.of(block.scales if isinstance(block, Corrected) else block.values),)


def _eigenvalues(term: Term) -> Tensor:
    """Return the eigenvalues of A (x) H, [groups, C, D] of them: all products of those of A and of H."""
    left = term.left.double()
    if term.low_rank:  # R^T R has the eigenvalues of R R^T, and zeros
        few = torch.linalg.eigvalsh(left @ left.mT)
        inner: Tensor = torch.nn.functional.pad(few, (0, left.shape[2] - few.shape[1]))
    else:
        inner = torch.linalg.eigvalsh(left)
    outer: Tensor = torch.linalg.eigvalsh(term.right.double())
    return outer.clamp(min=0)[:, :, None] * inner.clamp(min=0)[:, None, :]


def trace(block: Block) -> float:
    """Return the trace of a block over all groups."""
    return float(block.diagonal().double().sum())


def effective_rank(block: Block) -> float:
    """Return the participation ratio tr(F)^2 / tr(F^2) of a block F, without its eigenvalues; zero for a zero block.

    For a sum of Kronecker products, tr(F^2) = sum_{k,l} tr(A_k A_l) tr(H_k H_l), group by group.
    """
    if isinstance(block, Kronecker):
        lefts, rights = [term.dense_left for term in block.terms], [term.right for term in block.terms]
        square = 0.0
        for k in range(len(lefts)):
            for other in range(k + 1):
                both = _inner(lefts[k], lefts[other]) * _inner(rights[k], rights[other])
                square += (1 if k == other else 2) * float(both.sum())
    else:
        values = block.scales if isinstance(block, Corrected) else block.values
        square = float(values.double().square().sum())
    return trace(block) ** 2 / square if square > 0 else 0.0


def _inner(one: Tensor, other: Tensor) -> Tensor:
    """Return tr(M N) of symmetric matrices [groups, F, F], one number per group."""
    return (one * other).sum((1, 2), dtype=torch.float64)


def largest_eigenvalue(block: Block, seed: int = 0) -> tuple[float, float]:
    """Return the largest eigenvalue of a block and how far the next eigenvalue is from what is returned, at most.

    Exact where the block is small or no sum, the distance then zero; else by Lanczos' method, from below.
    """
    if isinstance(block, Diagonal | Corrected) or len(block.terms) == 1:
        return spectra(block)[0].largest, 0.0
    shape = (len(block.terms[0].right), block.terms[0].right.shape[-1], block.terms[0].left.shape[-1])
    if shape[1] * shape[2] <= _DENSE:
        return max(float(torch.linalg.eigvalsh(block.dense().double()).max()), 0.0), 0.0
    if trace(block) == 0:
        return 0.0, 0.0
    return _lanczos(block, shape, seed)


def _lanczos(block: Kronecker, shape: tuple[int, int, int], seed: int) -> tuple[float, float]:
    """Return the largest Ritz value of a block on displacements [groups, C, D], and its residual."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=block.terms[0].right.dtype)

    def product(vector: Any) -> Any:
        return block.product(torch.from_numpy(vector).view(shape)).flatten().numpy()

    operator = LinearOperator((start.numel(), start.numel()), product, dtype=start.numpy().dtype)
    (value,), vectors = eigsh(operator, 1, which="LA", v0=start.flatten().numpy(), tol=_ENOUGH)
    vector = vectors[:, 0]
    # An eigenvalue is no further from the Ritz value than the residual.
    return max(float(value), 0.0), float(norm(product(vector) - value * vector))
