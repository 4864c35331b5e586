"""A branch beside the forward pass: what of the penalty needs no activation runs on a side stream of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.model.merged_weight import Reading


class Branch:
    """Forks where a forward pass of the model begins and joins where its results are used.

    Under the interpretation brn, in a net that does not clip, W~ - W~* and its product with the curvature depend on
    parameters and on the population's statistics of before the forward pass alone; those of units without BN always
    depend on parameters alone. `gather` copies these, all in one
    tensor, and returns it with the statistics [2, C] by unit that are in it; it is called at the fork, since the
    forward pass changes them. Parameters that change between the fork and their use leave it without effect. Captured
    as a CUDA graph, the work becomes a branch parallel to the forward pass; on other devices it runs in its turn.
    """

    def __init__(
        self,
        gather: Callable[[], tuple[Tensor, dict[str, Tensor]]],
        parameters: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        self._gather, self._parameters = gather, parameters
        self._versions: list[int] = []
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._main: Any = None
        self._fork: Any = None
        self._statistics: Any = None
        self._end: Any = None
        self._names: set[str] = set()
        self._open = False
        self._fresh: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}
        self.vectors: Tensor

    @torch.no_grad()
    def begin(self, module: nn.Module) -> None:
        """Fork: the forward pass of the model is about to begin."""
        self._given = {}
        self._open = module.training and not torch.compiler.is_compiling()
        if not self._open:
            self._fresh = {}
            return
        self.vectors, self._fresh = self._gather()
        self._names = set(self._fresh)
        self._versions = [parameter._version for parameter in self._parameters]
        if self._stream is not None:
            self._fork = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._fork.record()

    def population(self, name: str) -> Tensor | None:
        """Return the statistics [2, C] of a unit's BN at the fork, or None if it has run since."""
        found = self._fresh.pop(name, None)
        if found is not None:
            self._given[name] = found
        return found

    def covers(self, readings: Mapping[str, Reading]) -> bool:
        """Whether the readings are those of the forward pass since the fork, and of all BN."""
        given = self._given
        read = self._open and all(
            name in given and name in readings and readings[name].population is given[name] for name in self._names
        )
        return read and self._versions == [parameter._version for parameter in self._parameters]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run on the branch what is inside, which must depend on nothing that came after the fork."""
        self._given, self._open = {}, False
        if self._stream is None:
            yield
            return
        self._main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(self._fork)
        with torch.cuda.stream(self._stream):
            yield
        self._end = self._stream.record_event()

    def catch_up(self, tensor: Tensor) -> None:
        """From here on, depend on all of the forward pass too; a tensor of it will be used."""
        if self._stream is not None:
            self._stream.wait_stream(self._main)
            tensor.record_stream(self._stream)

    def give_statistics(self, gradient: Tensor) -> None:
        """Let the backward pass have the gradient in the statistics, while the branch goes on."""
        if self._stream is not None:
            gradient.record_stream(self._main)
            self._statistics = self._stream.record_event()

    def wait_for_statistics(self) -> None:
        """Have the current stream wait for what `give_statistics` gave."""
        if self._statistics is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._statistics)

    def join(self, results: list[Tensor]) -> None:
        """Have the current stream wait for the end of the branch, whose results it will use."""
        if self._end is None:
            return
        here = torch.cuda.current_stream(self._stream.device)
        here.wait_event(self._end)
        for tensor in results:
            # It was made on one stream and is used on another: its memory must outlive that use.
            tensor.record_stream(here)
        # An event of a step must not be waited for in another, which may be one that is captured.
        self._statistics = self._end = None
