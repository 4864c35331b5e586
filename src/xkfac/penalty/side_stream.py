"""Work of the penalty that needs no activation, beside the forward pass: on a second stream of a CUDA device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.model.merged_weight import Reading

_MOST = 4  # streams beside each other; more of them leave no kernel of a GPU more room


def side_by_side(tasks: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Run tasks that write nothing in common: one after the other, on a CUDA device on several streams.

    Kernels too small for a whole GPU then run at the same time. What follows on the current stream waits for all.
    """
    if device.type != "cuda" or len(tasks) < 2:
        for task in tasks:
            task()
        return
    here = torch.cuda.current_stream(device)
    streams = _streams(device)[: len(tasks)]
    for stream in streams:
        stream.wait_stream(here)
    for place, task in enumerate(tasks):
        with torch.cuda.stream(streams[place % len(streams)]):
            task()
    for stream in streams:
        here.wait_stream(stream)


@cache
def _streams(device: torch.device) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(_MOST)]  # type: ignore[no-untyped-call]


class SideStream:
    """Starts where a forward pass of the model begins and is waited for where its results are used.

    Under the interpretation brn, in a network that does not clip, W~ - W~* and its product with the curvature depend on
    parameters and on the population statistics before the forward pass alone; those of units whose BN is fixed, or that
    have none, always depend on parameters alone. `gather` copies these into one tensor and returns it with the
    statistics [2, C] by unit; it is called at the start, since the forward pass changes them. If parameters change
    before the result is used, the side stream is not used. In a CUDA graph the work becomes parallel to the forward
    pass; on other devices there is no stream, and it runs in its turn.
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
        self._started: Any = None
        self._statistics: Any = None
        self._end: Any = None
        self._names: set[str] = set()
        self._open = False
        self._unread: dict[str, Tensor] = {}
        self._read: dict[str, Tensor] = {}
        self.vectors: Tensor

    @torch.no_grad()
    def start(self, module: nn.Module) -> None:
        """Copy what the work depends on: the forward pass of the model is about to begin."""
        self._unread, self._read, self._open = {}, {}, module.training
        if not self._open:
            return
        self.vectors, self._unread = self._gather()
        self._names = set(self._unread)
        self._versions = [parameter._version for parameter in self._parameters]
        if self._stream is not None:
            self._started = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._started.record()

    def population(self, name: str) -> Tensor | None:
        """Return the statistics [2, C] of a unit's BN at the start, or None if it has run since."""
        statistics = self._unread.pop(name, None)
        if statistics is not None:
            self._read[name] = statistics
        return statistics

    def covers(self, readings: Mapping[str, Reading]) -> bool:
        """Whether the readings are those of all BN in the forward pass since the start."""
        read = self._read
        same = all(
            name in read and name in readings and readings[name].population is read[name] for name in self._names
        )
        return self._open and same and self._versions == [parameter._version for parameter in self._parameters]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run on the side stream what is inside, which must not depend on anything after the start."""
        self._read, self._open = {}, False
        if self._stream is None:
            yield
            return
        self._main = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(self._started)
        with torch.cuda.stream(self._stream):
            yield
        self._end = self._stream.record_event()

    def catch_up(self, tensor: Tensor) -> None:
        """Let what follows depend on all of the forward pass too; a tensor of it will be used."""
        if self._stream is not None:
            self._stream.wait_stream(self._main)
            tensor.record_stream(self._stream)

    def give_statistics(self, gradient: Tensor) -> None:
        """Give the gradient in the statistics to the backward pass, while the side stream goes on."""
        if self._stream is not None:
            gradient.record_stream(self._main)
            self._statistics = self._stream.record_event()

    def wait_for_statistics(self) -> None:
        """Have the current stream wait for what `give_statistics` gave."""
        if self._statistics is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._statistics)

    def wait(self, results: list[Tensor]) -> None:
        """Have the current stream wait for the end of the work, whose results it will use."""
        if self._end is None:
            return
        here = torch.cuda.current_stream(self._stream.device)
        here.wait_event(self._end)
        for tensor in results:
            # It was made on one stream and is used on another: its memory must outlive that use.
            tensor.record_stream(here)
        # An event of a step must not be waited for in another, which may be one that is captured.
        self._statistics = self._end = None
