"""Processes that work together as one group and leave their results."""

import os
import sys

import torch
import torch.distributed as dist


def in_processes(work, ranks, folder, backend="gloo"):
    """Return what `work(rank, ranks, folder)` gives in each of so many processes, with one thread each.

    `work` is a function of a module; its results go through files in `folder`, which is a new one.
    """
    torch.multiprocessing.spawn(_one, (work, ranks, backend, folder), nprocs=ranks)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(ranks)]


def _one(rank, work, ranks, backend, folder):
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(work(rank, ranks, folder), folder / str(rank))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of gloo that lets go of a Python object while the interpreter ends aborts the process ("terminate
    # called without an active exception"). A forked process leaves like this too.
    os._exit(0)
