"""Watch a forward pass at the level of torch functions: which linear maps run, and which BN is running."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from xkfac.model.hooks import Hook
from xkfac.model.passes import norms_of

_CONVOLUTIONS: dict[Callable[..., Any], int] = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}


@dataclass(frozen=True)
class Convolution:
    """The geometry of a convolution, each field with one entry a spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]


@dataclass
class Call:
    """One call of a linear map in a forward pass."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    convolution: Convolution | None = None
    groups: int = 1


def read_call(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call | None:
    """Return the call of a linear map that a torch function is, or None for any other function."""
    if function is F.linear:
        return Call(*args, **kwargs)
    if function in _CONVOLUTIONS:
        return _conv(_CONVOLUTIONS[function], *args, **kwargs)
    return None


def _conv(
    rank: int,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Call:
    kernel = tuple(weight.shape[2:])
    dilations = _each(dilation, rank)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        pads = tuple((total // 2, total - total // 2) for total in totals)
    else:
        pads = tuple((p, p) for p in _each(0 if padding == "valid" else padding, rank))
    return Call(input, weight, bias, Convolution(kernel, _each(stride, rank), pads, dilations), index(groups))


def _each(value: Any, rank: int) -> tuple[int, ...]:
    values = tuple(map(index, (value,) if hasattr(value, "__index__") else value))  # plain numbers, not NumPy's
    return values * rank if len(values) == 1 else values


class Trace(TorchFunctionMode):
    """Watches the torch functions of a forward pass; `norm` is the path of the BN that is running, if any.

    A subclass says in `__torch_function__` what it does with each.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.norm: str | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch what runs inside."""
        with self.hooked(), self:
            yield

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Be told which BN runs, so that `with trace:` is all that a forward pass needs; the hooks are gone afterwards.

        A pass of many batches sets them once.
        """
        with ExitStack() as hooks:
            for path, norm in norms_of(self.model).items():
                hooks.enter_context(norm.register_forward_pre_hook(Hook(partial(self._enter, path))))
                hooks.enter_context(norm.register_forward_hook(Hook(partial(self._enter, None))))
            yield

    def _enter(self, norm: str | None, *_: Any) -> None:
        self.norm = norm
