"""How many labels are drawn per batch: as many as the user says, or as go with the number of batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from xkfac.curvature.operator import ENOUGH_DRAWS, Settings
from xkfac.curvature.processes import Processes
from xkfac.curvature.shared_moments import Coupling
from xkfac.errors import XkfacError, XkfacWarning
from xkfac.model.streams import counted


class Draws:
    """The number of draws `per_batch` in one pass, the same on all processes that share it.

    Where the settings leave it open, it goes by the number of batches of all processes. A loader that does not say its
    length is read ahead to count them, so that a stream gives what a list of the same batches gives.
    """

    def __init__(self, settings: Settings, processes: Processes | None, coupling: Coupling | None) -> None:
        self.settings, self.processes, self.coupling = settings, processes, coupling
        self.per_batch = settings.draws_over(0)
        self._counted = True

    def decide(self, loader: Iterable[Any], max_batches: int | None) -> Iterable[Any]:
        """Decide on the number, and return the loader to iterate, of which batches may have been read ahead.

        Where the loader of another process has failed, there is nothing to iterate.
        """
        if not self.settings.draws_are_open:
            return loader
        most = ENOUGH_DRAWS if max_batches is None else min(max_batches, ENOUGH_DRAWS)
        count, error = None, None
        try:
            loader, count = counted(loader, most)
        except Exception as caught:
            if self.processes is None:
                raise
            error = caught
        own = (most if count is None else count, count is not None, error is not None)
        every = [own] if self.processes is None else self.processes.exchanged(own)
        if error is not None:
            raise error
        failed = [rank for rank, (_, _, failed) in enumerate(every) if failed]
        if failed and self.coupling is not None:
            raise XkfacError(f"process {failed[0]} failed to get its batches; its own error says why")
        self._counted = all(known for _, known, _ in every)
        self.per_batch = self.settings.draws_over(self._together([number for number, _, _ in every]))
        return () if failed else loader

    def _together(self, batches: Sequence[int]) -> int:
        """Return the batches of the pass from those of its processes; coupled ones have parts of the same batches."""
        return sum(batches) if self.coupling is None else max(batches)

    def check(self, batches: Sequence[int]) -> None:
        """Make sure that the number goes with the batches that came, by process.

        Raises XkfacError for a stream that was too large to be counted, and had fewer batches than was assumed.
        """
        count = self._together(batches)
        right = self.settings.draws_over(count)
        if right == self.per_batch:
            return
        if not self._counted:
            raise XkfacError(
                f"the loader gave {count} batches, for which draws=None means {right} draws per batch, but this was "
                "known too late: it does not say its length, and its batches are too large to be read ahead; pass "
                f"draws={right}"
            )
        if self.processes is None or self.processes.rank == 0:
            warnings.warn(
                f"the loader gave {count} batches, which is not the length that it said, so labels were drawn "
                f"{self.per_batch} times per batch and not {right} times; correct its length, or pass draws={right}",
                XkfacWarning,
                stacklevel=2,
            )
