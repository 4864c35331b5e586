"""Factors of which several processes have parts, and mini-batches that several processes have parts of.

The sums of `Moments` add up over processes, but for one thing: in the mean form a process takes inputs from an origin
of its own, and its scatter is that from its own mean. So the roots of the population's M = mu mu^T are added up first,
and every process adds the scatter of its mean from the common one; no difference of large numbers is taken on the way.

Under SyncBatchNorm the mini-batch is that of all processes: N is the number of its examples, and where a factor squares
a sum over examples (A' and H'' of the paper's form, H'' of the mean form, the gradient of a whole batch), the sum runs
over those of all processes. Each process then counts the square by its share of the examples, so that sums over
processes have it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xkfac.curvature.blocks import Term
from xkfac.curvature.input_moments import Level
from xkfac.curvature.moments import ONE, Draw, Form, Moments, level_sums
from xkfac.curvature.patches import Patches
from xkfac.curvature.processes import Layout, Processes
from xkfac.errors import XkfacError


class Coupling:
    """The mini-batch at hand, of which each process has a part."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.sizes: list[int] = [1] * processes.size

    @property
    def examples(self) -> int:
        """The number N of examples of the whole mini-batch."""
        return sum(self.sizes)

    @property
    def share(self) -> float:
        """The part of them that this process has."""
        return self.sizes[self.processes.rank] / self.examples

    def steps(self, batches: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Yield (number of examples, batch) of this process, all processes one mini-batch after the other.

        Raises XkfacError, on every process, when one has no batch while another has one.
        """
        for step in _counted(batches, self):
            if 0 in self.sizes:
                raise XkfacError(
                    f"process {self.sizes.index(0)} has no batch where process {_first(self.sizes)} has one of "
                    f"{max(self.sizes)} examples; a mini-batch under SyncBatchNorm needs a part from every process, so "
                    "give all the same number of batches"
                )
            assert step is not None
            yield step

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        return self.processes.total_(tensor.contiguous().clone())

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the rows of all processes, [N, ...], from those of this one."""
        most = tensor.new_zeros(max(self.sizes), *tensor.shape[1:])
        most[: tensor.shape[0]] = tensor
        every = [torch.empty_like(most) for _ in self.sizes]
        dist.all_gather(every, most, group=self.processes.group)
        return torch.cat([one[:size] for one, size in zip(every, self.sizes, strict=True)])

    def own(self, rows: Tensor) -> Tensor:
        """Return the rows of this process from those of all."""
        return torch.split(rows, self.sizes)[self.processes.rank]


def _first(sizes: list[int]) -> int:
    return next(rank for rank, size in enumerate(sizes) if size > 0)


def _counted(batches: Iterator[tuple[int, Any]], coupling: Coupling) -> Iterator[tuple[int, Any] | None]:
    """Yield steps, having told all processes how many examples each has, until none has any."""
    processes = coupling.processes
    while True:
        try:
            step = next(batches, None)
        except Exception:
            processes.gathered(-1)
            raise
        coupling.sizes = processes.gathered(0 if step is None else step[0])
        if -1 in coupling.sizes:
            raise XkfacError(f"process {coupling.sizes.index(-1)} failed to get its next batch; its own error says why")
        if not any(coupling.sizes):
            return
        yield step


def coupling_of(model: nn.Module, processes: Processes | None) -> Coupling | None:
    """Return the coupling by the SyncBatchNorm layers of a model, None without any.

    Raises XkfacError when they span other processes than those of the pass.
    """
    norms = {path: module for path, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
    for path, norm in norms.items():
        if not dist.is_available() or not dist.is_initialized():
            return None  # the layer is an ordinary BN then
        group = norm.process_group or dist.group.WORLD
        spanned = dist.get_process_group_ranks(group)
        if processes is None and len(spanned) > 1:
            raise XkfacError(
                f"'{path}' is a SyncBatchNorm over {len(spanned)} processes; give the pass the DistributedDataParallel "
                "model, so that they share it, or use per-process BatchNorm layers"
            )
        if processes is not None and spanned != dist.get_process_group_ranks(processes.group):
            raise XkfacError(
                f"'{path}' is a SyncBatchNorm over processes {spanned}, which are not those that share the pass; use "
                "one process group for both"
            )
    return Coupling(processes) if norms and processes is not None else None


class SharedMoments(Moments):
    """Moments of which every process has a part; with a coupling its mini-batches are parts of larger ones."""

    def __init__(
        self, name: str, levels: tuple[Level, ...], form: Form, coupling: Coupling | None, *, coupled: bool = True
    ) -> None:
        super().__init__(name, levels, form, coupled=coupled)
        self.coupling = coupling
        self._sums: list[Tensor] | None = None
        self._root: Tensor | None = None

    def add_inputs(self, x: Tensor) -> None:
        """Take the inputs x [groups, n, S, D] of this process's part of a batch."""
        if self.coupling is None or self.population:
            super().add_inputs(x)
            return
        # In the paper's form the means are those of the whole mini-batch.
        means = [self._mean(x, level) for level in self.levels[1:]]
        coarse = self._add_means(means, x.shape[1], x.shape[2])
        self._left[0].add(x - coarse[0] if coarse else x)

    def images(self, patches: Patches) -> Callable[[Tensor], None]:
        """Return what takes images, as `Moments` does; means of a whole mini-batch need their patches written out."""
        if self.coupling is None or self.population or len(self.levels) == 1:
            return super().images(patches)
        return lambda image: self.add_inputs(patches.unrolled(image))

    def _mean(self, x: Tensor, level: Level) -> Tensor:
        if 1 not in level:
            return x.mean(level, keepdim=True)
        assert self.coupling is not None
        return self.coupling.total(x.mean(level, keepdim=True) * self.coupling.share)

    def add_gradients(self, g: Tensor, draw: Draw = ONE) -> None:
        """Take gradients as `Moments` does; with a coupling, sums over examples run over the whole mini-batch."""
        if self.coupling is None:
            super().add_gradients(g, draw)
            return
        across = [1 in level for level in self.levels]
        own = zip(level_sums(g, self.levels), across, strict=True)
        sums = [self.coupling.total(part) if one else part for part, one in own]
        blocks = [self._blocks(g, level) for level in self.levels]
        counts = [1 if self.population else fine // coarse for fine, coarse in pairwise(blocks)]
        self._add_squares(sums, [*counts, 1], draw, [self.coupling.share if one else 1.0 for one in across])

    def _blocks(self, g: Tensor, level: Level) -> int:
        """Return the number of blocks that a level has in the whole mini-batch."""
        assert self.coupling is not None
        return (1 if 1 in level else self.coupling.examples) * (1 if 2 in level else g.shape[2])

    def layouts(self, shape: tuple[int, int, int], dtype: torch.dtype) -> list[Layout]:
        """Return the layouts of the sums for a merged weight of `shape` [groups, C, D]: input, then gradient factors.

        In the mean form there is no sum of the last input factor, which is known by its root.
        """
        groups, rows, columns = shape
        left, right = (Layout((groups, size, size), dtype, symmetric=True) for size in (columns, rows))
        return [left] * (len(self.levels) - self.population) + [right] * len(self.levels)

    def root(self, examples: int) -> Tensor | None:
        """Return the root R [groups, r, D] of M = R^T R from this process's examples; None but in the mean form."""
        return self._root_of_means(examples)

    def sums(self, rows: int, examples: int, root: Tensor | None) -> list[Tensor]:
        """Return this process's sums over its examples; inputs are taken from the means of all, `root`, if given."""
        left, own = self._left_factors(examples)
        for average in left:
            average *= examples
        if root is not None and own is not None:
            moved = own - root
            left[-1].baddbmm_(moved.mT, moved, alpha=examples)  # only one triangle of it travels
        none = left[0].new_zeros(left[0].shape[0], rows, rows)
        return [*left, *(none if factor is None else factor for factor in self._gradient_factors())]

    def take(self, sums: list[Tensor], root: Tensor | None) -> None:
        """Take the sums of all processes in place of this one's."""
        self._sums, self._root = sums, root

    def terms(self, rows: int, examples: int) -> tuple[Term, ...]:
        """Return the terms, as `Moments` does, from what was taken, resting on so many examples."""
        if self._sums is None:
            return super().terms(rows, examples)
        right = [factor / examples for factor in self._sums[-len(self.levels) :]]
        left = [factor / examples for factor in self._sums[: -len(self.levels)]]
        return self._terms(left, right, self._root)
