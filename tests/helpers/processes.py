"""Processes that work together as one group and leave their results."""

import os
import socket
import sys

import torch
import torch.distributed as dist


def in_processes(work, ranks, folder, backend="gloo"):
    """Return what `work(rank, ranks, folder)` gives in each of so many processes, with one thread each.

    `work` is a function of a module; its results go through files in `folder`.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_one, (work, ranks, port, backend, folder), nprocs=ranks)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(ranks)]


def _one(rank, work, ranks, port, backend, folder):
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    torch.save(work(rank, ranks, folder), folder / str(rank))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo that lets go of a Python object while the interpreter ends aborts the process ("terminate
    # called without an active exception"). A forked process leaves like this too.
    os._exit(0)
