"""A branch beside the forward pass: what of the penalty needs no activation runs on a side stream of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.merging import BoundUnit, Reading


class Branch:
    """Forks where a forward pass of the model begins and joins where `run` returns.

    Under the interpretation brn, in a net that does not clip, W~ - W~* and its product with the curvature depend on
    parameters and on the population's statistics of before the forward pass alone. A copy of these is taken at the
    fork, all in one tensor, since the forward pass changes them. A forward pass must leave the parameters alone, as all
    but very unusual ones do. Captured as a CUDA graph, the work becomes a branch parallel to the forward pass; on
    other devices it runs in its turn.
    """

    def __init__(self, units: Iterable[BoundUnit], device: torch.device) -> None:
        self._norms = {one.unit.name: one.norm for one in units if one.norm is not None}
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._event: Any = None
        self._fresh: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}

    @torch.no_grad()
    def begin(self, module: nn.Module) -> None:
        """Fork: the forward pass of the model is about to begin."""
        self._given = {}
        if torch.compiler.is_compiling() or not module.training:
            self._fresh = {}
            return
        norms = self._norms.values()
        copied = torch.cat([*(norm.running_mean for norm in norms), *(norm.running_var for norm in norms)])
        both = copied.to(torch.promote_types(copied.dtype, torch.float32)).view(2, -1)
        self._fresh = dict(zip(self._norms, both.split([norm.num_features for norm in norms], 1), strict=True))  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def population(self, name: str) -> Tensor | None:
        """Return the statistics [2, C] of a unit's BN at the fork, or None if it has run since."""
        found = self._fresh.pop(name, None)
        if found is not None:
            self._given[name] = found
        return found

    def covers(self, readings: Mapping[str, Reading]) -> bool:
        """Whether the readings are those of the forward pass since the fork, and of all BN."""
        given = self._given
        return bool(given) and all(
            name in given and name in readings and readings[name].population is given[name] for name in self._norms
        )

    def run(self, work: Callable[[], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
        """Return what `work` returns; it must depend on nothing that came after the fork."""
        self._given = {}
        if self._stream is None:
            return work()
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(self._event)
        with torch.cuda.stream(self._stream):
            results = work()
        here.wait_stream(self._stream)
        for tensor in results:
            if tensor is not None:
                # It was made on one stream and is used on another: its memory must outlive that use.
                tensor.record_stream(here)
        return results
