"""Peak memory: what a process of its own holds at most, beyond what it held before. Linux alone can tell."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

PLAIN = "plain"
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _field(name: str) -> float:
    """Return a field of the process's status, in MB."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024 / 1e6


def _rest() -> None:
    """Give freed memory back, and forget the peak so far."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    CLEAR.write_text("5")


def peaks(key: str, name: str, mode: str) -> tuple[float, float | None]:
    """Return the MB that a curvature batch and a penalised step need beyond network and batch.

    A step's include the curvature that is kept. For `plain` the first is that of a forward and backward pass.
    """
    from adapters import PEERS
    from nets import Batches, build, perceptron
    from turns import plain_pass, warm_up

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    case = build(name)
    case.net.train(mode == "train")
    data = Batches((case.inputs, case.labels))
    plain_pass(perceptron(batch=4, width=4))
    if key != PLAIN:
        warm_up(key, mode)
        PEERS[key].prepare(case.net)
    _rest()
    before = _field("VmRSS")
    if key == PLAIN:
        plain_pass(case)
        return _field("VmHWM") - before, None
    state = PEERS[key].curvature(case.net, data)
    first = _field("VmHWM") - before
    try:
        case.net.zero_grad()
        step = PEERS[key].stepper(case.net.train(), state)
        _rest()
        step(case.inputs, case.labels)
    except Exception:  # the table of times says which and why
        return first, None
    return first, _field("VmHWM") - before


def measure(name: str, modes: dict[str, str]) -> dict[str, tuple[float, float | None]]:
    """Return the peaks of the plain pass and of each peer, in processes that begin alike."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["adapters", "torch", "xkfac", "curvlinops", "nngeometry", "asdl", "backpack"])
    found = {}
    for key, mode in {PLAIN: "train", **modes}.items():
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            found[key] = pool.submit(peaks, key, name, mode).result()
    return found
