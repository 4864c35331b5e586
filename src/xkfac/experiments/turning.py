"""A first layer's inputs in the eigenbasis of their covariance, where the penalty's largest product is a scaling.

The inputs of the first layer are data, the same throughout a task. With orthogonal U the layer w on inputs x is the
layer w U on inputs x U, and SGD with momentum takes the same steps in both up to rounding. Where U diagonalises the
input factor S of the layer's curvature S (x) H' + M (x) H'', the product with S, the largest of a step, is a
multiplication by eigenvalues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from xkfac.experiments.data import Part
from xkfac.experiments.training import Pool
from xkfac.kronecker import Kronecker, Term
from xkfac.memory import Memory

_NOTHING = 1e-5  # of the factor's norm: what rounding leaves where a covariance has zeros


@dataclass(frozen=True, eq=False)
class Turn:
    """The turn of a first layer's inputs by U [D, D], and the memory as it is there."""

    weight: nn.Parameter
    basis: Tensor
    memory: Memory

    @classmethod
    def of(cls, model: nn.Module, memory: Memory) -> Turn | None:
        """Return the turn for a perceptron, or None where the first unit's curvature has no such form."""
        unit = memory.units[0]
        block = memory.curvature.blocks.get(unit.name)
        if unit.kind != "linear" or unit.weight is None or not unit.homogeneous or not isinstance(block, Kronecker):
            return None
        if len(block.terms) != 2 or block.terms[0].low_rank or not block.terms[1].low_rank:
            return None
        covariance, means = block.terms
        *_, last = covariance.left[0]
        if last.norm() > _NOTHING * covariance.left.norm():
            return None  # the homogeneous coordinate varies: this is no covariance of inputs
        values, vectors = torch.linalg.eigh(covariance.left[0, :-1, :-1].double())
        basis = vectors.to(covariance.left.dtype)
        scales = torch.cat([values.clamp(min=0), values.new_zeros(1)]).to(basis.dtype)[None, None]
        turned = Kronecker(
            (Term(scales, covariance.right, diagonal=True), replace(means, left=_turned(means.left, basis)))
        )
        anchor = {**memory.anchor, unit.name: _turned(memory.anchor[unit.name], basis)}
        curvature = replace(memory.curvature, blocks={**memory.curvature.blocks, unit.name: turned})
        weight = model.get_parameter(unit.weight)
        return cls(weight, basis, replace(memory, anchor=anchor, curvature=curvature))

    def pool(self, examples: Pool) -> Pool:
        """Return the examples with their inputs turned."""
        return replace(examples, part=Part(examples.part.x @ self.basis, examples.part.y))

    @contextmanager
    def turned(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Have the layer's weight, and its momentum, in the basis while inside."""
        self._multiply(optimizer, self.basis)
        yield
        self._multiply(optimizer, self.basis.mT)

    @torch.no_grad()
    def _multiply(self, optimizer: torch.optim.Optimizer, matrix: Tensor) -> None:
        for tensor in self._tensors(optimizer):
            tensor.copy_(tensor @ matrix)

    def _tensors(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        return [self.weight, *(v for v in optimizer.state[self.weight].values() if isinstance(v, Tensor))]


def _turned(rows: Tensor, basis: Tensor) -> Tensor:
    """Return rows [..., D + 1] with all but their homogeneous coordinate turned."""
    return torch.cat([rows[..., :-1] @ basis, rows[..., -1:]], -1)
