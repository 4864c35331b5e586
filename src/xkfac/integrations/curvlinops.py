"""curvlinops: the curvature of a memory as a linear operator on the parameters (needs curvlinops-for-pytorch)."""

import torch
from torch import Tensor, nn

from xkfac.integrations.parameter_space import pulled, pushed
from xkfac.memory import Memory
from xkfac.model.merged_weight import bind
from xkfac.model.passes import unwrap

try:
    from curvlinops._torch_base import PyTorchLinearOperator
except ImportError as error:
    raise ImportError(f"{error}; install it by: pip install 'xkfac[curvlinops]'", name=error.name) from error


class CurvatureLinearOperator(PyTorchLinearOperator):  # type: ignore[misc]
    """J^T H J on the parameters that take gradients, in their order, for H the curvature of a memory.

    J is the derivative of the merged weights at the model's parameters and population statistics, so that a layer and
    its BN are coupled as they are in the network. Per example: multiply by the number of examples for a sum over data.
    Parameters that the memory leaves out have zero curvature.
    """

    SELF_ADJOINT = True

    def __init__(self, model: nn.Module, memory: Memory) -> None:
        self._parameters = [p for p in unwrap(model).parameters() if p.requires_grad]
        self._units = list(bind(model, memory.units).values())
        self._curvature = memory.curvature.to(self.device)
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        super().__init__(shapes, shapes)

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self._parameters[0].dtype

    def _matmat(self, columns: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            merged = [one.merged_weight() for one in self._units]
        products = [self._product(merged, column) for column in zip(*(c.unbind(-1) for c in columns), strict=True)]
        return [torch.stack(parts, -1) for parts in zip(*products, strict=True)]

    def _product(self, merged: list[Tensor], v: tuple[Tensor, ...]) -> list[Tensor]:
        names = [one.unit.name for one in self._units]
        displacements = dict(zip(names, pushed(merged, self._parameters, v), strict=True))
        products = self._curvature.product(displacements)
        return pulled(merged, self._parameters, [products[name] for name in names])
