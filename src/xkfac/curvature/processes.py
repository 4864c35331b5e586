"""The processes that share a curvature pass: what they agree on, and what they add up.

A model that DistributedDataParallel wraps is the request to share, and says with whom. All that is sent lies on the
model's device, symmetric matrices as triangles; nothing needs more of a backend than all_gather, all_reduce and
broadcast, which Gloo and NCCL have.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from xkfac.curvature.gram import symmetric, triangle
from xkfac.errors import XkfacError
from xkfac.model.passes import device_of, parallel_of, unwrap


class Processes:
    """The processes of one DistributedDataParallel model, numbered from 0 within their group."""

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self.group: Any = parallel.process_group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = device_of(parallel)

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Return the tensor of each process, all of one shape."""
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.group)
        return every

    def exchanged(self, value: Any) -> list[Any]:
        """Return the small value that each process gives, as JSON has it: what were tuples are lists."""
        own = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=self.device)
        sizes = [int(size) for size in self._gathered(torch.tensor([own.numel()], device=self.device))]
        padded = own.new_zeros(max(sizes))
        padded[: own.numel()] = own
        every = zip(self._gathered(padded), sizes, strict=True)
        return [json.loads(bytes(one[:size].tolist())) for one, size in every]

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

    def raise_first(self, errors: Iterable[str | None]) -> None:
        """Raise XkfacError for the first process that has an error."""
        for rank, error in enumerate(errors):
            if error is not None:
                raise XkfacError(f"process {rank} of the shared pass failed: {error}")

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def total_of_symmetric(self, matrices: Tensor) -> Tensor:
        """Return the sum of symmetric matrices [groups, F, F] over all processes; their lower triangles travel."""
        return symmetric(self.total(triangle(matrices)))

    def copy_of(self, tensor: Tensor, owner: int = 0) -> Tensor:
        """Return a copy of the owner's tensor; on other processes `tensor` gives its shape and dtype."""
        copy = tensor.detach().contiguous().clone()
        dist.broadcast(copy, dist.get_global_rank(self.group, owner), group=self.group)
        return copy


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
        for buffer in (buffer for name, buffer in own.named_buffers() if name not in ignored):
            buffer.data.copy_(processes.copy_of(buffer))
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
