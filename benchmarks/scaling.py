"""One curvature pass shared by several processes: its time, the bytes that travel, and what a cost model says of both.

    python benchmarks/scaling.py [--output results/scaling-cpu] [--processes 1 2 4] [--batches 8] [--turns 3]
    python benchmarks/scaling.py --large --output results/scaling-h200

A ResNet-18 at 32 pixels, mini-batches of 32, one draw each, one thread a process. Every number of processes shares the
same mini-batches out; they take turns, and the median over the turns is kept. The model is

    t_start + ceil(batches / P) * t_batch + t_finish + t_pack * sent + (P - 1) / P * sent / bandwidth + calls * latency

with t_start, t_batch and t_finish from one process, t_pack from two, bandwidth and latency from all_reduce alone among
P processes, and `sent` what a process gives to collective operations: what is reduced and what is broadcast, each once.
The terms that compute are in CPU seconds, which other work on the machine disturbs least; where processes are more than
cores, they take so much longer.

With --large a single process measures what the model needs of a ResNet-50 at 224 pixels on a GPU: a batch of 32, with
and without a graph, finishing, and a plain step.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import keep, provenance
from cost import DEVICE, medians, now, plain_step, resnet18, seconds
from torch import Tensor, nn

import xkfac
from xkfac.curvature import estimate as estimation
from xkfac.curvature.patches import Patches

BATCH = 32
COLLECTIVES = ("all_reduce", "broadcast", "all_gather")


class Timed:
    """Adds up the seconds, calls and bytes of collective operations, and the seconds in which a pass is finished."""

    def __init__(self) -> None:
        self.seconds = self.finishing = self.busy = 0.0
        self.bytes = self.calls = 0

    def install(self) -> None:
        """Put the clocks in place."""
        for name in COLLECTIVES:
            # An all_reduce adds numbers up and hands them out: they travel twice.
            setattr(dist, name, self._timed(getattr(dist, name), 2 if name == "all_reduce" else 1))
        finished = estimation.finished

        def timed(*args: Any, **kwargs: Any) -> Any:
            if dist.is_initialized():
                dist.barrier()  # so that waiting for the slowest process is no part of it
            start, busy = time.perf_counter(), time.process_time()
            result = finished(*args, **kwargs)
            self.finishing += time.perf_counter() - start
            self.busy += time.process_time() - busy
            return result

        estimation.finished = timed

    def _timed(self, function: Any, times: int) -> Any:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = first if isinstance(first, list) else [first]
            start = time.perf_counter()
            result = function(first, *args, **kwargs)
            self.seconds += time.perf_counter() - start
            self.calls += 1
            self.bytes += times * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return result

        return call


class Stamped:
    """A loader that notes when it is asked for a batch."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.batches = batches
        self.stamps: list[float] = []

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the batches."""
        for batch in self.batches:
            self.stamps.append(now())
            yield batch
        self.stamps.append(now())

    def seconds(self) -> float:
        """Return the time of a batch, those left out that prepare the pass: the first, and two more where there are."""
        first = 3 if len(self.batches) > 4 else 1
        return (self.stamps[-1] - self.stamps[first]) / (len(self.stamps) - 1 - first)


def all_reduce_seconds(numbers: int, times: int) -> float:
    """Return the time of one all_reduce of so many float32."""
    tensor = torch.zeros(numbers)
    dist.all_reduce(tensor)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(times):
        dist.all_reduce(tensor)
    return (time.perf_counter() - start) / times


def process(rank: int, ranks: int, port: int, batches: int, output: str) -> None:
    """Run one pass as one of `ranks` processes; process 0 leaves what it measured in a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, _ = resnet18(32)
    generator = torch.Generator().manual_seed(1)
    data = [torch.randn(BATCH, 3, 32, 32, generator=generator) for _ in range(batches)]
    model: nn.Module = net
    measured: dict[str, float] = {}
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks)
        large = 2**22
        # An all_reduce sends 2 (P - 1) / P of its bytes, which is the bandwidth's own unit here.
        measured["bandwidth"] = 2 * (ranks - 1) / ranks * large * 4 / all_reduce_seconds(large, 4)
        measured["latency"] = all_reduce_seconds(1, 100)
        model = nn.parallel.DistributedDataParallel(net)
    timed = Timed()
    timed.install()
    loader = Stamped(data[rank::ranks])
    start, busy = time.perf_counter(), time.process_time()
    made = xkfac.estimate(model, loader, draws=1)
    measured |= {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - busy,
        "cpu_finish": timed.busy,
        "batch": loader.seconds() if len(loader) > 1 else math.nan,
        "finish": timed.finishing,
        "collectives": timed.seconds,
        "calls": timed.calls,
        "bytes": timed.bytes,
        "examples": made.examples,
        "trace": float(sum(tensor.double().abs().sum() for _, tensor in made.curvature.tensors())),
    }
    if rank == 0:
        torch.save(measured, output)
    if ranks > 1:
        dist.destroy_process_group()


def measure(ranks: int, batches: int) -> dict[str, float]:
    """Return what one pass by so many processes takes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "measured")
        torch.multiprocessing.spawn(process, (ranks, port, batches, output), nprocs=ranks)
        measured: dict[str, float] = torch.load(output)
    return measured


def computing(row: dict[str, float], one: dict[str, float], two: dict[str, float] | None, batches: int) -> float:
    """Return the CPU seconds of a process by the cost model; `one` and `two` are the rows of so many processes."""
    own = one["start"] + math.ceil(batches / row["processes"]) * one["batch"]
    share = own / (one["start"] + batches * one["batch"])
    pack = 0.0 if two is None else (two["cpu_finish"] - one["cpu_finish"]) / two["bytes"]
    return share * (one["cpu"] - one["cpu_finish"]) + one["cpu_finish"] + pack * row["bytes"]


def travelling(row: dict[str, float]) -> float:
    """Return the seconds in collective operations by the cost model."""
    if row["processes"] == 1:
        return 0.0
    ranks = row["processes"]
    return (ranks - 1) / ranks * row["bytes"] / row["bandwidth"] + row["calls"] * row["latency"]


def tabled(rows: list[dict[str, Any]], batches: int, cores: int) -> str:
    """Return the table of all numbers of processes, having added to their rows what the model says."""
    one, two = (next((row for row in rows if row["processes"] == ranks), None) for ranks in (1, 2))
    assert one is not None
    one["start"] = one["seconds"] - batches * one["batch"] - one["finish"]
    lines = [
        "| processes | CPU of a process, s | by the model | of it finishing, s | sent, MB | in collectives, s | "
        "by the model | pass, s | by the model on idle cores |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        row["computing"], row["travelling"] = computing(row, one, two, batches), travelling(row)
        row["predicted"] = row["computing"] * max(1, row["processes"] / cores) + row["travelling"]
        lines.append(
            f"| {row['processes']} | {row['cpu']:.1f} | {row['computing']:.1f} | {row['cpu_finish']:.1f} | "
            f"{row['bytes'] / 1e6:.0f} | {row['collectives']:.1f} | {row['travelling']:.1f} | {row['seconds']:.1f} | "
            f"{row['predicted']:.1f} |"
        )
    return "\n".join(lines)


def volumes(net: nn.Module, x: Tensor) -> dict[str, float]:
    """Return the sizes, in numbers, of what travels in a pass over a network, mean form, the paper's grouping."""
    units = xkfac.find_units(net, x).units
    shapes: dict[str, torch.Size] = {}
    handles = [
        net.get_submodule(unit.name).register_forward_pre_hook(
            lambda module, inputs, name=unit.name: shapes.__setitem__(name, inputs[0].shape)
        )
        for unit in units
    ]
    with torch.no_grad():
        net.eval()(x)
    for handle in handles:
        handle.remove()
    total = {"triangles": 0, "full": 0, "roots": 0}
    for unit in units:
        groups, rows, columns = unit.shape
        image = torch.empty(shapes[unit.name], device="meta")
        positions = Patches(unit).positions(Patches(unit).image([image], torch.float32))
        total["triangles"] += groups * (columns * (columns + 1) // 2 + rows * (rows + 1))
        total["full"] += groups * (columns**2 + 2 * rows**2)
        total["roots"] += groups * positions * columns
    return {name: float(value) for name, value in total.items()}


def resnet50() -> nn.Module:
    """Return torchvision's network with random weights."""
    if torch.version.cuda is None:  # torchvision's compiled operators do not load beside a CPU build of torch
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    net: nn.Module = torchvision.models.resnet50()
    return net


def large(output: Path, batches: int, turns: int) -> None:
    """Measure a ResNet-50 at 224 pixels on this device."""
    record = {**provenance(), "seed": 0, "batch": BATCH, "batches": batches}
    torch.manual_seed(0)
    net = resnet50().to(DEVICE)
    data = [torch.randn(BATCH, 3, 224, 224, device=DEVICE) for _ in range(batches)]
    labels = torch.zeros(BATCH, dtype=torch.long, device=DEVICE)
    finishing = []

    def batch_seconds(graph: bool) -> float:
        loader = Stamped(data)
        xkfac.estimate(net, loader, draws=1, graph=graph)
        finishing.append(now() - loader.stamps[-1])
        return loader.seconds()

    timers = {
        "plain step": lambda: seconds(lambda: plain_step(net, data[0], labels)),
        "curvature batch": lambda: batch_seconds(False),
        "curvature batch, graph": lambda: batch_seconds(True),
    }
    found = {**medians(timers, turns), "finishing": statistics.median(finishing)}
    lines = ["| what | ms |", "|---|---|", *(f"| {name} | {1000 * value:.1f} |" for name, value in found.items())]
    keep(output, record, found, "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("results/scaling-cpu"))
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--large", action="store_true", help="measure a ResNet-50 on this device alone")
    options = parser.parse_args()
    if options.large:
        large(options.output, options.batches, options.turns)
        return
    torch.set_num_threads(1)
    record = {**provenance(), "seed": 0, "cores": os.cpu_count(), "batch": BATCH, "batches": options.batches}
    turns: dict[int, list[dict[str, float]]] = {ranks: [] for ranks in options.processes}
    for _ in range(options.turns):
        for ranks in options.processes:
            turns[ranks].append(measure(ranks, options.batches))
    rows = []
    for ranks, measured in turns.items():
        row = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
        rows.append({"processes": ranks, **row, "all_seconds": [one["seconds"] for one in measured]})
    volume = volumes(resnet50(), torch.zeros(1, 3, 224, 224))
    small = volumes(resnet18(32)[0], torch.zeros(2, 3, 32, 32))
    table = tabled(rows, options.batches, os.cpu_count() or 1)
    keep(options.output, record, {"rows": rows, "resnet18-32px": small, "resnet50-224px": volume}, table)


if __name__ == "__main__":
    main()
