"""What is collected of each unit while a network runs forward and backward, and how it becomes curvature."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from xkfac.curvature.blocks import Block, Corrected, Diagonal, KhatriRao, Kronecker, Term, symmetrised
from xkfac.curvature.input_moments import Means
from xkfac.curvature.moments import Draw, Moments, batch_gradient, unit_gradients
from xkfac.curvature.operator import Settings
from xkfac.curvature.patches import Patches
from xkfac.curvature.processes import Processes
from xkfac.errors import UnitError
from xkfac.model.merged_weight import BoundUnit
from xkfac.model.units import Unit


class Collector(ABC):
    """Takes what the capture saw of one unit in a batch: its inputs, then the gradients of each backward pass.

    like: a tensor of the dtype and on the device of what is accumulated.
    """

    def __init__(self, unit: Unit, like: Tensor) -> None:
        self.unit, self.like = unit, like
        self.patches = Patches(unit)

    def _x(self, inputs: Sequence[Tensor]) -> Tensor:
        return self.patches.unrolled(self.patches.image(inputs, self.like.dtype))

    def _g(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradients of all calls as those of further positions."""
        calls = [unit_gradients(self.unit, gradient, self.like.dtype) for gradient in gradients]
        return calls[0] if len(calls) == 1 else torch.cat(calls, 2)

    @abstractmethod
    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Take a batch's inputs, one tensor per call of the unit."""

    @abstractmethod
    def gradients(self, gradients: Sequence[Tensor], draw: Draw) -> None:
        """Take the gradients at the outputs of these calls, from a backward pass."""


class Source(Collector):
    """A collector that has a curvature block."""

    @abstractmethod
    def block(self, examples: int) -> Block | KhatriRao:
        """Return the unit's curvature block, resting on so many examples."""

    def means(self, examples: int) -> Means | None:
        """Return the means of this process's examples, None where there are none."""
        return None

    @abstractmethod
    def share(self, processes: Processes, examples: int, means: Means | None) -> None:
        """Take the sums of all processes in place of those over this one's examples; means: those of all examples."""


class FactorCollector(Source):
    """Collects Kronecker factors."""

    def __init__(self, unit: Unit, like: Tensor, settings: Settings) -> None:
        super().__init__(unit, like)
        coupled = settings.statistics == "batch"
        self.moments = Moments(self.patches, settings.levels, settings.form, coupled=coupled)

    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Take a batch's inputs."""
        self.moments.inputs.add(self.patches.image(inputs, self.like.dtype))

    def gradients(self, gradients: Sequence[Tensor], draw: Draw) -> None:
        """Take the gradients of one backward pass."""
        self.moments.add_gradients(self._g(gradients), draw)

    def block(self, examples: int) -> Block | KhatriRao:
        """Return the block."""
        return Kronecker(self.moments.terms(examples))

    def means(self, examples: int) -> Means | None:
        """Return the means of the inputs."""
        return self.moments.inputs.means(examples)

    def share(self, processes: Processes, examples: int, means: Means | None) -> None:
        """Take the sums of the factors of all processes."""
        self.moments.share(processes, self.like, examples, means)


class SquareCollector(Source):
    """Collects E[(batch gradient)^2] / N, the exact diagonal of the Fisher, in the parameters' or another basis."""

    def __init__(self, unit: Unit, like: Tensor, basis: Corrected | None = None) -> None:
        super().__init__(unit, like)
        self.basis = basis
        self.sums = self._zeros()
        self._inputs: Sequence[Tensor] = ()

    def _zeros(self) -> list[Tensor]:
        """Return what is accumulated before anything is."""
        return [self.like.new_zeros(self.unit.shape)]

    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Take a batch's inputs."""
        self._inputs = inputs

    def gradients(self, gradients: Sequence[Tensor], draw: Draw) -> None:
        """Take the gradients of one backward pass."""
        self.add(batch_gradient(self._x(self._inputs), self._g(gradients)), draw.weight)

    def add(self, gradient: Tensor, weight: float) -> None:
        """Take the gradient [groups, rows, columns] with respect to W~ of one backward pass."""
        if self.basis is not None:
            gradient = self.basis.right.mT @ gradient @ self.basis.left
        self.sums[0] += gradient.square() * weight

    def block(self, examples: int) -> Block:
        """Return the block."""
        values = self.sums[0] / examples
        return Diagonal(values) if self.basis is None else replace(self.basis, scales=values)

    def share(self, processes: Processes, examples: int, means: Means | None) -> None:
        """Take the sum of squares of all processes."""
        self.sums = [processes.total(self.sums[0])]


class UnmergedCollector(SquareCollector):
    """Collects E[(dL/dp)^2] / N for every gamma, beta, mu and sigma of a BN y = gamma (h - mu) / sigma + beta.

    mu and sigma, those that the BN applies to the batch, are regarded as parameters: with x = (h - mu) / sigma and the
    gradient G at the output, dL/dgamma = sum G x, dL/dbeta = sum G, dL/dmu = -gamma / sigma dL/dbeta and
    dL/dsigma = -gamma / sigma dL/dgamma.
    """

    def __init__(self, unit: Unit, like: Tensor, bound: BoundUnit) -> None:
        super().__init__(unit, like)
        self.bound = bound
        self._scale: Tensor

    @torch.no_grad()
    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Take a batch's input [N, C, ...] of the BN, which is about to run, and normalise it as the BN will."""
        (input,) = inputs
        input = input.to(self.like.dtype)
        mean, std = self.bound.normalisation(self.bound.applied(input))
        each = (-1, *[1] * (input.dim() - 2))
        self._inputs = [(input - mean.view(each)) / std.view(each)]
        gamma = self.bound.norm.weight
        self._scale = (1 if gamma is None else gamma.to(self.like.dtype)) / std.to(self.like.dtype)

    def add(self, gradient: Tensor, weight: float) -> None:
        """Take the gradient [C, 1, 2] with respect to gamma and beta of one backward pass."""
        statistics = -self._scale[:, None, None] * gradient.flip(2)
        super().add(torch.cat([gradient, statistics], 2), weight)


class MarginalCollector(SquareCollector):
    """Collects the second moments E[g^T g] / N and E[g g^T] / N of columns and rows of the batch gradient g."""

    def _zeros(self) -> list[Tensor]:
        groups, rows, columns = self.unit.shape
        return [self.like.new_zeros(groups, size, size) for size in (columns, rows)]

    def add(self, gradient: Tensor, weight: float) -> None:
        """Take the gradient [groups, rows, columns] with respect to W~ of one backward pass."""
        self.sums[0] += symmetrised(gradient.mT @ gradient) * weight
        self.sums[1] += symmetrised(gradient @ gradient.mT) * weight

    def block(self, examples: int) -> Block:
        """Return the Kronecker product with these moments as its partial traces."""
        left, right = (total / examples for total in self.sums)
        root = left.diagonal(dim1=1, dim2=2).sum(1).clamp(min=torch.finfo(left.dtype).tiny).sqrt()[:, None, None]
        return Kronecker((Term(left / root, right / root),))

    def share(self, processes: Processes, examples: int, means: Means | None) -> None:
        """Take the sums of the two moments of all processes."""
        self.sums = [processes.total_of_symmetric(one) for one in self.sums]


class JointCollector(FactorCollector):
    """Collects the factors of all linear units together: rows and columns of several units side by side."""

    def __init__(self, units: Sequence[Unit], like: Tensor, settings: Settings) -> None:
        self.units = units
        self.rows, self.columns = (tuple(unit.shape[side] for unit in units) for side in (1, 2))
        whole = Unit(" and ".join(unit.name for unit in units), "linear", (1, sum(self.rows), sum(self.columns)))
        super().__init__(whole, like, settings)
        self.of_units: dict[str, Tensor] = {}
        self.to_units: dict[str, Tensor] = {}

    def flush_inputs(self) -> None:
        """Take the inputs of all units, once all have run.

        Raises UnitError that names all units with several positions per example.
        """
        refused = [f"'{name}' has {x.shape[2]}" for name, x in self.of_units.items() if x.shape[2] != 1]
        if refused:
            raise UnitError(
                f"cross-layer blocks are for linear layers of one position per example, and unit {', '.join(refused)}; "
                "exclude what has more, or use cross_layer=False"
            )
        self.inputs([torch.cat([self.of_units[unit.name][0, :, 0] for unit in self.units], 1)])

    def flush_gradients(self, draw: Draw) -> None:
        """Take the gradients of all units, zero where none arrived, once a backward pass is done."""
        like = next(iter(self.of_units.values()))
        missing = {unit.name: like.new_zeros(*like.shape[:3], unit.shape[1]) for unit in self.units}
        gradients = [self.to_units.get(unit.name, missing[unit.name])[0, :, 0] for unit in self.units]
        self.gradients([torch.cat(gradients, 1)], draw)
        self.to_units.clear()

    def block(self, examples: int) -> KhatriRao:
        """Return the Khatri-Rao product over all units, resting on so many examples."""
        return KhatriRao(self.moments.terms(examples), self.rows, self.columns)


class JointMember(Collector):
    """Passes the inputs and gradients of one linear unit on to the joint collector."""

    def __init__(self, unit: Unit, like: Tensor, joint: JointCollector) -> None:
        super().__init__(unit, like)
        self.joint = joint

    def inputs(self, inputs: Sequence[Tensor]) -> None:
        """Pass the inputs on."""
        self.joint.of_units[self.unit.name] = self._x(inputs)

    def gradients(self, gradients: Sequence[Tensor], draw: Draw) -> None:
        """Pass the gradients on."""
        self.joint.to_units[self.unit.name] = self._g(gradients)


@dataclass
class Collectors:
    """The collectors of one pass over the data, by unit, and that of units which have one block together."""

    of: dict[str, Collector]
    joint: JointCollector | None
    batches: int = 0
    examples: int = 0

    def sources(self) -> dict[str, Source]:
        """Return what has a block of its own, by the name of its unit."""
        joint = {} if self.joint is None else {self.joint.unit.name: self.joint}
        return {**{name: one for name, one in self.of.items() if isinstance(one, Source)}, **joint}
