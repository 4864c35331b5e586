"""The processes that share a curvature pass: what they agree on, and how tensors travel between them.

A model that DistributedDataParallel wraps is the request to share, and says with whom. All that is sent lies on the
model's device, in few flat buffers, symmetric matrices as triangles; nothing needs more of a backend than all_gather,
all_reduce, reduce and broadcast, which Gloo and NCCL have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from xkfac.curvature.gram import symmetric, triangle
from xkfac.errors import XkfacError
from xkfac.model.passes import device_of, parallel_of, unwrap

BUFFER_BYTES = 2**26


@dataclass(frozen=True)
class Layout:
    """The shape and dtype of a tensor that travels; symmetric matrices [groups, F, F] travel as triangles."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    symmetric: bool = False

    @classmethod
    def of(cls, tensor: Tensor, *, symmetric: bool = False) -> Layout:
        """Return the layout of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, symmetric)

    def described(self) -> list[Any]:
        """Return the layout as JSON holds it."""
        return [list(self.shape), str(self.dtype).removeprefix("torch."), self.symmetric]

    @classmethod
    def read(cls, described: Sequence[Any]) -> Layout:
        """Return the layout that `described` has described."""
        shape, dtype, symmetric = described
        return cls(tuple(shape), getattr(torch, dtype), symmetric)

    @property
    def elements(self) -> int:
        """How many numbers travel."""
        if self.symmetric:
            return self.shape[0] * self.shape[1] * (self.shape[1] + 1) // 2
        return math.prod(self.shape)

    def packed(self, tensor: Tensor) -> Tensor:
        """Return the numbers that travel, in one dimension."""
        return (triangle(tensor) if self.symmetric else tensor).reshape(-1)

    def unpacked(self, flat: Tensor) -> Tensor:
        """Return the tensor of numbers that arrived, a copy."""
        if self.symmetric:
            return symmetric(flat.view(self.shape[0], -1))
        return flat.view(self.shape).clone()


class Processes:
    """The processes of one DistributedDataParallel model, numbered from 0 within their group."""

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self.group: Any = parallel.process_group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = device_of(parallel)

    def gathered(self, number: int) -> list[int]:
        """Return the number that each process gives."""
        own = torch.tensor([number], device=self.device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        return [int(one) for one in every]

    def exchanged(self, value: Any) -> list[Any]:
        """Return the small value that each process gives, as JSON has it: what were tuples are lists."""
        own = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        sizes = self.gathered(own.numel())
        padded = own.new_zeros(max(sizes))
        padded[: own.numel()] = own
        every = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(every, padded, group=self.group)
        return [json.loads(bytes(one[:size].tolist())) for one, size in zip(every, sizes, strict=True)]

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Raise XkfacError, on every process, for the first setting that two processes have differently."""
        every = self.exchanged({name: repr(value) for name, value in settings.items()})
        for rank, theirs in enumerate(every):
            for name, value in every[0].items():
                if theirs[name] != value:
                    raise XkfacError(
                        f"process {rank} has {name}={theirs[name]} where process 0 has {name}={value}; give all "
                        "processes of a shared pass the same arguments"
                    )

    def total_(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all processes, in place."""
        dist.all_reduce(tensor, group=self.group)
        return tensor

    def totals(self, layouts: Sequence[Layout], tensors: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the sums over all processes; a process without tensors counts zero."""
        return self._through(layouts, tensors, self.total_)

    def sums_at(self, owner: int, layouts: Sequence[Layout], tensors: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the sums over all processes at `owner`, nothing elsewhere; one without tensors counts zero."""
        root = dist.get_global_rank(self.group, owner)
        sums = self._through(
            layouts, tensors, lambda flat: dist.reduce(flat, root, group=self.group), keep=self.rank == owner
        )
        return sums if self.rank == owner else []

    def copies_of(self, owner: int, layouts: Sequence[Layout], tensors: Sequence[Tensor] | None) -> list[Tensor]:
        """Return the owner's tensors, as they arrive everywhere; only the owner gives any."""
        root = dist.get_global_rank(self.group, owner)
        return self._through(layouts, tensors, lambda flat: dist.broadcast(flat, root, group=self.group))

    def _through(
        self,
        layouts: Sequence[Layout],
        tensors: Sequence[Tensor] | None,
        collective: Callable[[Tensor], Any],
        *,
        keep: bool = True,
    ) -> list[Tensor]:
        """Send tensors through a collective operation in flat buffers."""
        arrived = []
        for part in _buffers(layouts):
            dtype = layouts[part[0]].dtype
            if tensors is None:
                flat = torch.zeros(sum(layouts[i].elements for i in part), dtype=dtype, device=self.device)
            else:
                flat = torch.cat([layouts[i].packed(tensors[i].to(self.device, dtype)) for i in part])
            collective(flat)
            if keep:
                pieces = torch.split(flat, [layouts[i].elements for i in part])
                arrived += [layouts[i].unpacked(piece) for i, piece in zip(part, pieces, strict=True)]
        return arrived


def _buffers(layouts: Sequence[Layout]) -> Iterator[list[int]]:
    """Yield runs of places that share a buffer: one dtype, at most `BUFFER_BYTES` unless a single one is larger."""
    run: list[int] = []
    filled = 0
    for place, layout in enumerate(layouts):
        size = layout.elements * layout.dtype.itemsize
        if run and (filled + size > BUFFER_BYTES or layout.dtype != layouts[run[0]].dtype):
            yield run
            run, filled = [], 0
        run.append(place)
        filled += size
    if run:
        yield run


def shared_out(costs: Mapping[str, int], processes: int) -> dict[str, int]:
    """Return the owner of each thing such that the processes' costs are balanced: the largest first."""
    loads = [0] * processes
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners


def processes_of(model: nn.Module) -> Processes | None:
    """Return the processes of a model that DistributedDataParallel wraps, or None; they then hold the same network.

    Where DistributedDataParallel broadcasts buffers, which it does with its next forward pass, process 0's are taken
    over now: the running statistics of a BN that each process has for itself differ since the last step.

    Raises XkfacError, on every process, when parameters or buffers differ between processes.
    """
    parallel = parallel_of(model)
    if parallel is None:
        return None
    processes = Processes(parallel)
    own = unwrap(parallel)
    ignored = {name.removeprefix("module.") for name in parallel.parameters_to_ignore}
    if parallel.broadcast_buffers:
        buffers = [buffer for name, buffer in own.named_buffers() if name not in ignored]
        with torch.no_grad():
            copies = processes.copies_of(0, [Layout.of(buffer) for buffer in buffers], buffers)
            for buffer, copy in zip(buffers, copies, strict=True):
                buffer.copy_(copy)
    named = {name: tensor for name, tensor in (*own.named_parameters(), *own.named_buffers()) if name not in ignored}
    _check_same(processes, named)
    return processes


def _check_same(processes: Processes, named: Mapping[str, Tensor]) -> None:
    prints = {name: (tuple(tensor.shape), _fingerprint(tensor)) for name, tensor in named.items()}
    every = processes.exchanged(prints)
    for rank, theirs in enumerate(every):
        names = [*every[0], *(name for name in theirs if name not in every[0])]
        odd = next((name for name in names if theirs.get(name) != every[0].get(name)), None)
        if odd is not None:
            raise XkfacError(
                f"'{odd}' of process {rank} is not that of process 0; a shared pass needs the same network everywhere, "
                "so load the same state into all processes, or broadcast process 0's"
            )


def _fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Return numbers that tell tensors apart by their bits, in whatever order a device adds them up."""
    if nn.parameter.is_lazy(tensor):
        return 0, 0
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.contiguous().reshape(-1).view(integers[flat.element_size()])
    return int(bits.sum(dtype=torch.int64)), int(bits[::2].sum(dtype=torch.int64))
