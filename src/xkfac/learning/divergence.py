"""What a look at training steps needs: values that no step waits for, where learning began, which BN is to blame."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from xkfac.model.merged_weight import BoundUnit


class Look:
    """The values of a tensor, which is copied from its device beside the work that follows."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: Any = None
        self._values = tensor
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_there(self) -> bool:
        """Whether the values have arrived."""
        return self._event is None or bool(self._event.query())

    def values(self) -> list[float]:
        """Return the values."""
        found: list[float] = self._values.tolist()
        return found


class StartingPoint:
    """Where a network has begun to learn, kept on the CPU: what a penalty is made of, its BN statistics among it."""

    def __init__(self, bound: Iterable[BoundUnit]) -> None:
        self._tensors = [tensor for one in bound for tensor in (*one.parameters(), *one.statistics())]
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Have the network there while inside."""
        now = [tensor.detach().clone() for tensor in self._tensors]
        try:
            self._write(self._values)
            yield
        finally:
            self._write(now)

    @torch.no_grad()
    def _write(self, values: Iterable[Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.copy_(value)


def blamed_norm(bound: Iterable[BoundUnit]) -> str | None:
    """Return the path of a BN whose statistics are not finite where all parameters are, as bad inputs leave it."""
    suspect = None
    for one in bound:
        if not all(bool(parameter.isfinite().all()) for parameter in one.parameters()):
            return None
        if suspect is None and not all(bool(statistic.isfinite().all()) for statistic in one.statistics()):
            suspect = one.unit.norm
    return suspect
