"""Times: what is compared takes turns within one process, as a ratio to one plain forward and backward pass."""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from adapters import PEERS
from interface import AbsentError, Peer
from nets import Batches, Case, Timed, build, perceptron
from torch import Tensor
from torch.nn import functional as F

# Passes of so many batches take so many turns. One that puts work off has at least so many.
LONG = 9
BATCHES = {"mlp": 17, "resnet18-32px": 4, "resnet18-64px": 4, "resnet50-64px": 4}
TURNS = {"mlp": 16, "resnet18-32px": 2, "resnet18-64px": 2, "resnet50-64px": 2}
LARGE = ("resnet18-64px", "resnet50-64px")
WEIGHT_NOISE = 1e-4


@dataclass
class Row:
    """What was measured of a peer on a network; a time is a ratio, or a sentence that says why there is none.

    curvature: of a batch more in a pass. fixed: of a pass, whatever its batches; not told apart where it is empty.
    """

    mode: str = "train"
    refusal: str = ""
    curvature: float | str = ""
    fixed: float | str = ""
    step: float | str = ""
    save: float | str = ""
    load: float | str = ""
    megabytes: float | str = ""


@dataclass
class Stand:
    """A peer at work on its own copy of a network."""

    peer: Peer
    case: Case
    state: Any = None
    first: float = 0.0
    row: Row = field(default_factory=Row)


def described(error: Exception) -> str:
    """Return an error as one short line."""
    if isinstance(error, AbsentError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 160 else text[:159] + '…'}"


def clocked(work: Callable[[], Any]) -> float:
    """Return the seconds that a call takes of the processor, whatever else runs on the machine."""
    start = time.process_time()
    work()
    return time.process_time() - start


def waited(work: Callable[[], Any]) -> float:
    """Return the seconds until a call returns, waiting for a disk included."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(
    works: dict[str, Callable[[], Any]],
    plain: Callable[[], None],
    turns: int,
    clock: Callable[[Callable[[], Any]], float] | None = None,
) -> tuple[dict[str, float], float]:
    """Return the median time of each work over that of the plain pass, and the latter in seconds.

    The plain pass runs again before every second of them. Every other turn goes backwards: what runs first after
    others pays for memory that they gave back, and a difference of two neighbours must not have that in it.
    """
    clock = clock or clocked
    times: dict[str, list[float]] = {name: [] for name in works}
    plains: list[float] = []
    for turn in range(turns):
        for place, (name, work) in enumerate(list(works.items())[:: -1 if turn % 2 else 1]):
            if place % 2 == 0:
                plains.append(clock(plain))
            times[name].append(clock(work))
    one = statistics.median(plains) if plains else 0.0
    return {name: statistics.median(own) / one for name, own in times.items()}, one


def plain_pass(case: Case) -> None:
    """Run one plain forward and backward pass."""
    case.net.zero_grad()
    F.cross_entropy(case.net(case.inputs), case.labels).backward()


def warm_up(key: str, mode: str) -> None:
    """Let a peer work on a tiny network, so that what it imports on the way is not counted."""
    case = perceptron(batch=4, width=4)
    plain_pass(case)
    peer, net = PEERS[key], case.net.train(mode == "train")
    with contextlib.suppress(Exception):  # the real network will tell
        peer.prepare(net)
        state = peer.curvature(net, Batches((case.inputs, case.labels)))
        peer.stepper(net.train(), state)(case.inputs, case.labels)


def started(key: str, case: Case) -> Stand:
    """Return a peer that has made a curvature of one batch, BN in training mode, or in evaluation mode if it must.

    This is its warm-up as well. A peer that does neither has its error as the row's curvature.
    """
    data = Batches((case.inputs, case.labels))
    stand = Stand(PEERS[key], case)
    warm_up(key, "train")
    for mode in ("train", "eval"):
        own = copy.deepcopy(case.net).train(mode == "train")
        stand.case = Case(own, case.inputs, case.labels)
        stand.row.mode = mode
        try:
            stand.peer.prepare(own)
            start = time.process_time()
            stand.state = stand.peer.curvature(own, data)
            stand.first = time.process_time() - start
        except Exception as error:  # whatever a library raises is its answer
            stand.row.refusal = stand.row.refusal or described(error)
            continue
        return stand
    stand.row.curvature = stand.row.refusal
    return stand


def passes(stands: dict[str, Stand], case: Case, name: str, turns: int) -> None:
    """Measure a batch in a pass, and what a pass costs beside its batches."""
    batch, count = (case.inputs, case.labels), BATCHES[name]
    quick = {key: stand for key, stand in stands.items() if name == "mlp" or not stand.peer.once}
    seconds: dict[str, list[tuple[float, float]]] = {key: [] for key in quick}

    counts = {key: max(count, LONG) if stand.peer.delays else count for key, stand in quick.items()}

    def pass_of(key: str) -> None:
        seconds[key].append(seconds_of(quick[key], batch, counts[key], inside=name != "mlp"))

    plain = in_turns({key: partial(pass_of, key) for key in quick}, partial(plain_pass, case), turns)[1]
    for key, stand in stands.items():
        if key in quick:
            each, whole = (statistics.median(column) / plain for column in zip(*seconds[key], strict=True))
            stand.row.curvature, stand.row.fixed = each, whole - counts[key] * each
        else:
            stand.row.curvature = stand.first / plain


def seconds_of(stand: Stand, batch: tuple[Tensor, Tensor], count: int, *, inside: bool) -> tuple[float, float]:
    """Return the seconds of a batch in a pass, and those of the pass.

    inside: whether the former are taken from one batch that is asked for to the next, where that is all that a batch
    costs. Otherwise, and where all batches are asked for first, a pass of one batch beside tells it, with more noise.
    """
    data = Timed(batch, count)
    between = inside and not (stand.peer.ahead or stand.peer.delays)
    if not between:
        # What others gave back of the memory is taken again here, as in the first batch of those timed in between.
        stand.peer.curvature(stand.case.net, Batches(batch))
    whole = clocked(partial(stand.peer.curvature, stand.case.net, data))
    if between:
        return data.seconds(), whole
    single = clocked(partial(stand.peer.curvature, stand.case.net, Batches(batch)))
    return (whole - single) / (count - 1), whole


def steps(stands: dict[str, Stand], case: Case, turns: int) -> None:
    """Measure a penalised training step, the network in training mode and a little away from the anchor."""
    works: dict[str, Callable[[], None]] = {}
    for key, stand in stands.items():
        net = stand.case.net.train()
        try:
            step = stand.peer.stepper(net, stand.state)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=WEIGHT_NOISE)
            repeated(step, case, stand.peer.warm_up)
        except Exception as error:  # as above
            stand.row.step = described(error)
            continue
        works[key] = partial(repeated, step, case, stand.peer.cycle)
    for key, ratio in in_turns(works, partial(plain_pass, case), turns)[0].items():
        stands[key].row.step = ratio / stands[key].peer.cycle


def repeated(step: Callable[..., None], case: Case, times: int) -> None:
    """Run a training step so many times."""
    for _ in range(times):
        step(case.inputs, case.labels)


def files(stands: dict[str, Stand], case: Case, turns: int) -> None:
    """Measure saving and loading, and the size on disk."""
    data = Batches((case.inputs, case.labels))
    works: dict[str, Callable[[], Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for key, stand in stands.items():
            own = Path(folder) / key
            own.mkdir()
            path = own / "memory"
            try:
                stand.peer.save(stand.state, stand.case.net, path)
                stand.peer.load(stand.case.net, data, path)
            except Exception as error:  # as above
                stand.row.save = stand.row.load = stand.row.megabytes = described(error)
                continue
            stand.row.megabytes = sum(file.stat().st_size for file in own.rglob("*") if file.is_file()) / 1e6
            works[f"save {key}"] = partial(stand.peer.save, stand.state, stand.case.net, path)
            works[f"load {key}"] = partial(stand.peer.load, stand.case.net, data, path)
        for name, ratio in in_turns(works, partial(plain_pass, case), turns, waited)[0].items():
            what, _, key = name.partition(" ")
            setattr(stands[key].row, what, ratio)


def measure(name: str, keys: list[str], turns: int | None = None) -> dict[str, Row]:
    """Return what was measured of each peer on a network."""
    case = build(name)
    turns = turns or TURNS[name]
    plain_pass(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        skipped = [key for key in keys if name in LARGE and PEERS[key].once]
        stands = {key: started(key, case) for key in keys if key not in skipped}
        able = {key: stand for key, stand in stands.items() if not stand.row.curvature}
        passes(able, case, name, turns)
        files(able, case, max(1, turns // 2))
        steps(able, case, 10 * turns if name == "mlp" else turns + 1)
    gc.collect()
    left_out = Row(curvature="measured on the smaller networks alone")
    return {key: left_out if key in skipped else stands[key].row for key in keys}
