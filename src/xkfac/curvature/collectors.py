"""What is collected of each unit while a network runs forward and backward, and how it becomes curvature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from xkfac.curvature.blocks import Block, Corrected, Diagonal, KhatriRao, Kronecker, Term, parts, symmetrised
from xkfac.curvature.moments import Draw, Moments, batch_gradient, unit_gradients, unit_inputs
from xkfac.curvature.patches import Patches
from xkfac.curvature.processes import Layout
from xkfac.curvature.shared_moments import Coupling, SharedMoments
from xkfac.errors import UnitError
from xkfac.model.merged_weight import BoundUnit
from xkfac.model.units import Unit

JOINT = "/joint"  # no unit's name


class Collector(ABC):
    """Takes what the capture saw of one unit in a batch: its inputs, then the gradients of each backward pass."""

    def __init__(self, unit: Unit, dtype: torch.dtype) -> None:
        self.unit, self.dtype = unit, dtype

    def _x(self, inputs: Sequence[Tensor]) -> Tensor:
        return _joined([unit_inputs(self.unit, input, self.dtype) for input in inputs])

    def _g(self, gradients: Sequence[Tensor]) -> Tensor:
        return _joined([unit_gradients(self.unit, gradient, self.dtype) for gradient in gradients])

    @abstractmethod
    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Take a batch's inputs, one tensor a call of the unit."""

    @abstractmethod
    def gradients(self, gradients: Sequence[Tensor], draw: Draw) -> None:
        """Take the gradients at the outputs of these calls, from a backward pass."""

    @abstractmethod
    def block(self, examples: int) -> Block | None:
        """Return the unit's curvature block, resting on so many examples; None where it is part of a joint one."""

    def layouts(self) -> list[Layout]:
        """Return the layouts of what adds up over the processes of a shared pass."""
        return []

    def root(self, examples: int) -> Tensor | None:
        """Return the root of M from this process's examples, None where there is none."""
        return None

    def sums(self, examples: int, root: Tensor | None) -> list[Tensor]:
        """Return what adds up over processes, `root` being that of all."""
        return []

    def take(self, sums: list[Tensor], root: Tensor | None) -> None:  # noqa: B027
        """Take the sums of all processes in place of this one's."""

    def held(self) -> dict[str, Tensor]:
        """Return the tensors of the block that every process of a shared pass has already."""
        return {}


def _joined(calls: list[Tensor]) -> Tensor:
    """Return the calls of a unit side by side, as further positions."""
    return calls[0] if len(calls) == 1 else torch.cat(calls, 2)


class _Factors:
    """Moments of a merged weight of a `shape` [groups, rows, columns], and how they add up over processes."""

    moments: Moments
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        raise NotImplementedError

    @property
    def _shared(self) -> SharedMoments:
        assert isinstance(self.moments, SharedMoments)
        return self.moments

    def layouts(self) -> list[Layout]:
        """Return the layouts of the factors' sums."""
        return self._shared.layouts(self.shape, self.dtype)

    def root(self, examples: int) -> Tensor | None:
        """Return the root of M."""
        return self._shared.root(examples)

    def sums(self, examples: int, root: Tensor | None) -> list[Tensor]:
        """Return the factors' sums."""
        return self._shared.sums(self.shape[1], examples, root)

    def take(self, sums: list[Tensor], root: Tensor | None) -> None:
        """Take the factors' sums of all processes."""
        self._shared.take(sums, root)


class FactorCollector(_Factors, Collector):
    """Collects Kronecker factors."""

    def __init__(self, unit: Unit, dtype: torch.dtype, moments: Moments) -> None:
        super().__init__(unit, dtype)
        self.moments = moments
        self.patches = Patches(unit)
        self._images = moments.images(self.patches) if unit.calls == 1 else None

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the unit."""
        return self.unit.shape

    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Take a batch's inputs; the calls of a unit that has several are further positions, which are written out."""
        if self._images is not None:
            self._images(self.patches.image(inputs[0], self.dtype))
        else:
            self.moments.add_inputs(self._x(inputs))

    def gradients(self, gradients: Sequence[Tensor], draw: Draw) -> None:
        """Take the gradients of one backward pass."""
        self.moments.add_gradients(self._g(gradients), draw)

    def block(self, examples: int) -> Block:
        """Return the block."""
        return Kronecker(self.moments.terms(self.unit.shape[1], examples))


class SquareCollector(Collector):
    """Collects E[(batch gradient)^2] / N, the exact diagonal of the Fisher, in the parameters' or another basis.

    Of a batch that processes have parts of, each squares the gradient of the whole.
    """

    coupling: Coupling | None = None

    def __init__(self, unit: Unit, dtype: torch.dtype, basis: Corrected | None = None) -> None:
        super().__init__(unit, dtype)
        self.basis = basis
        self.total: Tensor | None = None
        self._inputs: Sequence[Tensor] = ()

    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Take a batch's inputs."""
        self._inputs = inputs

    def gradients(self, gradients: Sequence[Tensor], draw: Draw) -> None:
        """Take the gradients of one backward pass."""
        self.see(batch_gradient(self._x(self._inputs), self._g(gradients)), draw)

    def see(self, gradient: Tensor, draw: Draw) -> None:
        """Take the gradient [groups, rows, columns] of one backward pass from this process's examples."""
        if self.coupling is None:
            self.add(gradient, draw.weight)
        else:
            self.add(self.coupling.total(gradient), draw.weight * self.coupling.share)

    def add(self, gradient: Tensor, weight: float) -> None:
        """Take the gradient [groups, rows, columns] with respect to W~ of one backward pass."""
        if self.basis is not None:
            gradient = self.basis.right.mT @ gradient @ self.basis.left
        square = gradient.square() * weight
        self.total = square if self.total is None else self.total.add_(square)

    def block(self, examples: int) -> Block:
        """Return the block."""
        values = torch.zeros(self.unit.shape, dtype=self.dtype) if self.total is None else self.total / examples
        if self.basis is None:
            return Diagonal(values)
        return replace(self.basis, scales=values.to(self.basis.left.device))

    def layouts(self) -> list[Layout]:
        """Return the layout of the squares' sum."""
        return [Layout(self.unit.shape, self.dtype)]

    def sums(self, examples: int, root: Tensor | None) -> list[Tensor]:
        """Return the sum of squares."""
        return [torch.zeros(self.unit.shape, dtype=self.dtype) if self.total is None else self.total]

    def take(self, sums: list[Tensor], root: Tensor | None) -> None:
        """Take the sum of squares of all processes."""
        (self.total,) = sums

    def held(self) -> dict[str, Tensor]:
        """Return the basis."""
        return {} if self.basis is None else {k: v for k, v in parts(self.basis).items() if k != "scales"}


class UnmergedCollector(SquareCollector):
    """Collects E[(dL/dp)^2] / N for every gamma, beta, mu and sigma of a BN y = gamma (h - mu) / sigma + beta.

    mu and sigma, those that the BN applies to the batch, are regarded as parameters: with x = (h - mu) / sigma and the
    gradient G at the output, dL/dgamma = sum G x, dL/dbeta = sum G, dL/dmu = -gamma / sigma dL/dbeta and
    dL/dsigma = -gamma / sigma dL/dgamma.
    """

    def __init__(self, unit: Unit, dtype: torch.dtype, bound: BoundUnit) -> None:
        super().__init__(unit, dtype)
        self.bound = bound
        self._scale: Tensor

    @torch.no_grad()
    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Take a batch's input [N, C, ...] of the BN, which is about to run, and normalise it as the BN will."""
        (input,) = inputs
        input = input.to(self.dtype)
        mean, std = self.bound.normalisation(self.bound.applied(input))
        each = (-1, *[1] * (input.dim() - 2))
        self._inputs = [(input - mean.view(each)) / std.view(each)]
        gamma = self.bound.norm.weight
        self._scale = (1 if gamma is None else gamma.to(self.dtype)) / std.to(self.dtype)

    def add(self, gradient: Tensor, weight: float) -> None:
        """Take the gradient [C, 1, 2] with respect to gamma and beta of one backward pass."""
        statistics = -self._scale[:, None, None] * gradient.flip(2)
        super().add(torch.cat([gradient, statistics], 2), weight)


class MarginalCollector(SquareCollector):
    """Collects the second moments E[g^T g] / N and E[g g^T] / N of columns and rows of the batch gradient g."""

    def __init__(self, unit: Unit, dtype: torch.dtype) -> None:
        super().__init__(unit, dtype)
        self.left: Tensor | None = None
        self.right: Tensor | None = None

    def add(self, gradient: Tensor, weight: float) -> None:
        """Take the gradient [groups, rows, columns] with respect to W~ of one backward pass."""
        left, right = symmetrised(gradient.mT @ gradient) * weight, symmetrised(gradient @ gradient.mT) * weight
        self.left = left if self.left is None else self.left.add_(left)
        self.right = right if self.right is None else self.right.add_(right)

    def block(self, examples: int) -> Block:
        """Return the Kronecker product with these moments as its partial traces."""
        groups, rows, columns = self.unit.shape
        if self.left is None or self.right is None:
            return Kronecker((Term(torch.zeros(groups, columns, columns), torch.zeros(groups, rows, rows)),))
        left, right = self.left / examples, self.right / examples
        root = left.diagonal(dim1=1, dim2=2).sum(1).clamp(min=torch.finfo(left.dtype).tiny).sqrt()[:, None, None]
        return Kronecker((Term(left / root, right / root),))

    def layouts(self) -> list[Layout]:
        """Return the layouts of the two moments' sums."""
        groups, rows, columns = self.unit.shape
        return [Layout((groups, size, size), self.dtype, symmetric=True) for size in (columns, rows)]

    def sums(self, examples: int, root: Tensor | None) -> list[Tensor]:
        """Return the two moments' sums."""
        if self.left is None or self.right is None:
            return [torch.zeros(layout.shape, dtype=self.dtype) for layout in self.layouts()]
        return [self.left, self.right]

    def take(self, sums: list[Tensor], root: Tensor | None) -> None:
        """Take the two moments' sums of all processes."""
        self.left, self.right = sums


@dataclass
class JointCollector(_Factors):
    """Collects the factors of all linear units together: rows and columns of several units side by side."""

    moments: Moments
    dtype: torch.dtype
    units: list[Unit] = field(default_factory=list)
    _inputs: dict[str, Tensor] = field(default_factory=dict)
    _gradients: dict[str, Tensor] = field(default_factory=dict)

    def flush_inputs(self) -> None:
        """Take the inputs of all units, once all have run.

        Raises UnitError that names all units with several positions per example.
        """
        refused = [f"'{name}' has {x.shape[2]}" for name, x in self._inputs.items() if x.shape[2] != 1]
        if refused:
            raise UnitError(
                f"cross-layer blocks are for linear layers of one position per example, and unit {', '.join(refused)}; "
                "exclude what has more, or use cross_layer=False"
            )
        self.moments.add_inputs(torch.cat([self._inputs[unit.name] for unit in self.units], 3))

    def flush_gradients(self, draw: Draw) -> None:
        """Take the gradients of all units, zero where none arrived, once a backward pass is done."""
        size = next(iter(self._inputs.values()))
        missing = {u.name: size.new_zeros(*size.shape[:3], u.shape[1]) for u in self.units}
        gradients = [self._gradients.get(unit.name, missing[unit.name]) for unit in self.units]
        self.moments.add_gradients(torch.cat(gradients, 3), draw)
        self._gradients.clear()

    def block(self, examples: int) -> KhatriRao:
        """Return the Khatri-Rao product over all units, resting on so many examples."""
        rows = tuple(unit.shape[1] for unit in self.units)
        return KhatriRao(self.moments.terms(sum(rows), examples), rows, tuple(unit.shape[2] for unit in self.units))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of all units' weights together."""
        return 1, sum(unit.shape[1] for unit in self.units), sum(unit.shape[2] for unit in self.units)

    def held(self) -> dict[str, Tensor]:
        """Return nothing."""
        return {}


class JointMember(Collector):
    """Passes one linear unit's inputs and gradients on to the joint collector."""

    def __init__(self, unit: Unit, dtype: torch.dtype, joint: JointCollector) -> None:
        super().__init__(unit, dtype)
        self.joint = joint
        joint.units.append(unit)

    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Pass the inputs on."""
        self.joint._inputs[self.unit.name] = self._x(inputs)

    def gradients(self, gradients: Sequence[Tensor], draw: Draw) -> None:
        """Pass the gradients on."""
        self.joint._gradients[self.unit.name] = self._g(gradients)

    def block(self, examples: int) -> None:
        """Return nothing: the joint collector has the block."""


@dataclass
class Collectors:
    """The collectors of one pass over the data."""

    of: dict[str, Collector]
    joint: JointCollector | None
    batches: int = 0
    examples: int = 0

    def sources(self) -> dict[str, Collector | JointCollector]:
        """Return what has a block of its own, by unit; that of several units is `JOINT`."""
        joint = {} if self.joint is None or not self.joint.units else {JOINT: self.joint}
        return {**{name: one for name, one in self.of.items() if not isinstance(one, JointMember)}, **joint}
