"""laplace-torch: a posterior of networks with BN from the curvature of a memory (needs laplace-torch)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from xkfac.curvature.blocks import Block, Diagonal, Kronecker
from xkfac.errors import XkfacError
from xkfac.integrations.parameter_space import pushed
from xkfac.memory import Memory, consolidate
from xkfac.model.likelihood import Categorical, Gaussian
from xkfac.model.merged_weight import BoundUnit, bind
from xkfac.model.passes import batches, device_of

try:
    from laplace.baselaplace import KronLaplace
    from laplace.utils.matrix import Kron
except ImportError as error:
    raise ImportError(f"{error}; install it by: pip install 'xkfac[laplace]'", name=error.name) from error


def kron_of(model: nn.Module, memory: Memory) -> Kron:
    """Return the curvature per example as a `Kron`: one block for each parameter that takes gradients.

    A block is J^T H J for J the derivative of the merged weights in that parameter, at population statistics. The
    weight of a layer has one Kronecker product; if the memory has several terms, the one with their partial traces.
    Weights of grouped convolutions, biases, gamma and beta have full or diagonal blocks. Parameters that the memory
    leaves out have zeros, so that their posterior is the prior.

    Raises XkfacError for an eigenvalue-corrected curvature.
    """
    blocks: dict[int, list[Tensor]] = {}
    for name, one in bind(model, memory.units).items():
        block = memory.curvature.block(name)
        assert block is not None
        if not isinstance(block, (Kronecker, Diagonal)):
            raise XkfacError(f"unit '{name}' has corrected factors, which are no Kron; use another method")
        blocks.update(_blocks(one, block))
    return Kron([blocks.get(id(p), [p.detach().new_zeros(p.numel())]) for p in model.parameters() if p.requires_grad])


def _blocks(one: BoundUnit, block: Block) -> Iterable[tuple[int, list[Tensor]]]:
    """Yield the block of each parameter of a unit, by the parameter's id."""
    merged = one.merged_weight()
    weight = None if one.unit.weight is None else one.weight
    affine = [] if one.norm is None else [one.norm.weight, one.norm.bias]
    for parameter in (weight, one.bias, *affine):
        if parameter is None or not parameter.requires_grad:
            continue
        # Every row of W~ depends on one row of the weight, and on one number of each other parameter.
        (rows,) = pushed([merged], [parameter], [torch.ones_like(parameter)])
        columns = one.unit.shape[2] - one.unit.homogeneous
        yield id(parameter), _of_weight(rows, columns, block) if parameter is weight else _of_rows(rows, block)


def _of_rows(rows: Tensor, block: Block) -> list[Tensor]:
    """Return the block of a parameter that moves row c of W~ along `rows` [groups, C, D] at c."""
    if isinstance(block, Diagonal):
        return [(rows.square() * block.values).sum(2).flatten()]
    assert isinstance(block, Kronecker)
    full = torch.stack([rows @ term.dense_left @ rows.mT * term.right for term in block.terms]).sum(0)
    return [full.flatten() if full.shape[1] == 1 else _block_diagonal(full)]


def _of_weight(rows: Tensor, columns: int, block: Block) -> list[Tensor]:
    """Return the block of a weight whose row c, times rows[:, c], is row c of W~, but for a last column."""
    if isinstance(block, Diagonal):
        return [(rows.square() * block.values)[:, :, :columns].flatten()]
    assert isinstance(block, Kronecker)
    scales = rows[:, :, :1] * rows[:, :, :1].mT
    left, right = _one_product(
        torch.stack([term.dense_left[:, :columns, :columns] for term in block.terms]),
        torch.stack([scales * term.right for term in block.terms]),
    )
    if len(left) == 1:
        return [right[0], left[0]]
    return [_block_diagonal([torch.kron(h, a) for h, a in zip(right, left, strict=True)])]


def _one_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return the A [groups, D, D] and H [groups, C, C] whose product has the partial traces of a sum of products."""
    of_left, of_right = (side.diagonal(dim1=2, dim2=3).sum(2)[:, :, None, None] for side in (left, right))
    total = (of_left * of_right).sum(0)
    return (of_right * left).sum(0), (of_left * right).sum(0) / total.masked_fill(total == 0, 1.0)


def _block_diagonal(blocks: Iterable[Tensor]) -> Tensor:
    found: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return found


class XKFACLaplace(KronLaplace):  # type: ignore[misc]
    """Laplace's `KronLaplace` with the curvature of a memory, for networks with BN: `fit`, then use it as any other.

    BN normalises with population statistics, and gamma and beta are uncertain as the weights are. memory: that of the
    training set; if there is none, `fit` makes one of `KFAC`. The other arguments are those of `KronLaplace`.
    """

    _key = ("all", "xkfac")
    DEFAULT: ClassVar[dict[str, Any]] = {"method": "kfac", "statistics": "population", "interpretation": "eval"}

    def __init__(self, model: nn.Module, likelihood: str, memory: Memory | None = None, **options: Any) -> None:
        self.memory = memory
        super().__init__(model, likelihood, **options)

    def fit(self, train_loader: Iterable[Any], override: bool = True, progress_bar: bool = False) -> None:
        """Set the posterior at the model's parameters; the loader is read for the loss and the number of examples.

        Raises XkfacError with `override=False`: extend the memory instead.
        """
        if not override:
            raise XkfacError("a posterior of a memory is not extended by fit; give it the memory of all data")
        likelihood = "categorical" if self.likelihood == "classification" else "gaussian"
        memory = self.memory or consolidate(self.model, train_loader, likelihood=likelihood, **self.DEFAULT)
        self.model.eval()
        self.mean = parameters_to_vector(self.params).detach()
        self.loss, self.n_data = torch.zeros((), device=self._device), 0
        with torch.no_grad():
            for size, (x, y, *_) in batches(train_loader, device_of(self.model), progress=progress_bar, what="loss"):
                output = self.model(x)
                self.loss += self.backend.factor * self.backend.lossfunc(output, y)
                self.n_data += size
        self.n_outputs = self.model.output_size = output.shape[-1]
        kron = kron_of(self.model, memory.to(self._device, self._dtype))
        self.H_facs = kron * (self.n_data * _scale(memory, likelihood))
        self.H = self.H_facs.decompose(damping=self.damping)


def _scale(memory: Memory, likelihood: str) -> float:
    """Return the factor from a memory's curvature to that of Laplace's loss."""
    own = memory.likelihood
    if likelihood == "categorical" and isinstance(own, Categorical):
        return 1.0
    if likelihood == "gaussian" and isinstance(own, Gaussian):
        return float(own.variance)  # Laplace divides by the noise itself
    raise XkfacError(f"the memory's likelihood {own!r} does not go with {likelihood} outputs; make it with that one")
