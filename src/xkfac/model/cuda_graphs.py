"""CUDA graphs: work that repeats on batches of one shape, recorded once and replayed without the cost of launches."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from xkfac.errors import XkfacError
from xkfac.model.batches import cloned, tensors


class Replayed:
    """Calls `function(batch)`, from the second batch of a shape on by replaying the graph of that call.

    What the function changes must be tensors changed in place; it may draw from `generator`, and must not synchronise
    the device. A batch of another shape, the last one of a pass for example, is an ordinary call.
    """

    def __init__(self, function: Callable[[Any], None], generator: torch.Generator) -> None:
        self._function, self._generator = function, generator
        self._seen: list[tuple[torch.Size, torch.dtype]] | None = None
        self._batch: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Any) -> None:
        """Do the work for a batch of tensors on the device."""
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors(batch)]
        if self._seen is None:
            self._seen = shapes
            self._function(batch)
        elif shapes != self._seen:
            self._function(batch)
        else:
            if self._graph is None:
                self._batch = cloned(batch)
                try:
                    self._graph = captured(lambda: self._function(self._batch), generator=self._generator)
                except RuntimeError as error:
                    raise XkfacError(
                        f"the network cannot be recorded as a CUDA graph ({error}); use graph=False, or keep its "
                        "forward pass from synchronising the device"
                    ) from None
            for static, tensor in zip(tensors(self._batch), tensors(batch), strict=True):
                static.copy_(tensor)
            self._graph.replay()


def captured(
    work: Callable[[], None],
    *,
    warm_up: Callable[[], None] | None = None,
    changed: Iterable[Tensor] = (),
    generator: torch.Generator | None = None,
) -> torch.cuda.CUDAGraph:
    """Return the graph of `work`, which draws from `generator` if at all.

    warm_up: runs three times before, on another stream. changed: tensors that these runs change; they are put back.
    """
    kept = [(tensor, tensor.detach().clone()) for tensor in changed]
    if warm_up is not None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                warm_up()
        torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        work()
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
    return graph
