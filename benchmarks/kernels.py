"""Where a penalised step and a curvature batch spend the time of a GPU: its kernels, and whether the host ever waits.

    python benchmarks/kernels.py [--model resnet50] [--pixels 224] [--batch 32] [--output FOLDER]

Runs under torch's profiler: an epoch of training steps replayed as a CUDA graph, plain and penalised, and the batches
of a curvature pass, as the difference of a long pass and a short one. For each: microseconds of every kernel for one
step or batch, summed over streams, and the calls with which the host waited for the device, of which an epoch has those
around it and a batch must have none.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import keep, provenance
from curvature_time import curvature_pass
from step_time import METHODS, stepper
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from xkfac.experiments.data.digits import Part, batches, stream
from xkfac.experiments.networks.backbones import make_backbone

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
SHORT, LONG = 8, 16
Profile = dict[str, tuple[float, float]]


def profiled(run: Callable[[], None]) -> tuple[Profile, Profile]:
    """Return kernels by name, each with microseconds and count, and the calls with which the host waited."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
    events = seen.key_averages()
    kernels = {
        e.key: (float(e.self_device_time_total), float(e.count))
        for e in events
        if e.device_type == DeviceType.CUDA and e.self_device_time_total > 0
    }
    return kernels, {e.key: (0.0, float(e.count)) for e in events if e.key in WAITS}


def less(long: Profile, short: Profile, over: int) -> Profile:
    """Return the difference of two profiles, for one of `over` batches."""
    zero = (0.0, 0.0)
    names = dict.fromkeys([*long, *short])
    found = {
        name: [(a - b) / over for a, b in zip(long.get(name, zero), short.get(name, zero), strict=True)]
        for name in names
    }
    return {name: (time, count) for name, (time, count) in found.items() if time or count}


def shortened(name: str) -> str:
    """Return a kernel's name without template arguments and the return type."""
    name = re.sub(r"^void ", "", name)
    kept, depth = "", 0
    for letter in name:
        depth += letter == "<"
        kept += letter if not depth else ""
        depth -= letter == ">"
    inner = (
        re.search(r"(\w+Functor\w*|\w+_kernel_cuda|\w+Op)\b", name)
        if "elementwise" in kept or "reduce" in kept
        else None
    )
    return (kept.split("(")[0] + (f" {inner[0]}" if inner else ""))[:80]


def merged(kernels: Profile) -> Profile:
    total: Profile = {}
    for name, (time, count) in kernels.items():
        before = total.get(shortened(name), (0.0, 0.0))
        total[shortened(name)] = (before[0] + time, before[1] + count)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/kernels"))
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--stem", default="standard", choices=["standard", "small"])
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--precision", default="tf32", choices=["float32", "tf32", "bfloat16"], help="of a step")
    parser.add_argument(
        "--method", default="XK-FAC", choices=[name for name in METHODS if name != "plain"], metavar="NAME"
    )
    parser.add_argument("--top", type=int, default=25, help="kernels that are listed")
    options = parser.parse_args()
    options.device, steps = "cuda", 16
    torch.backends.cudnn.allow_tf32 = options.precision != "float32"
    record = {**provenance(), "options": {key: str(value) for key, value in vars(options).items() if key != "output"}}
    found: dict[str, tuple[Profile, Profile]] = {}

    torch.set_float32_matmul_precision({"float32": "highest", "tf32": "high", "bfloat16": "medium"}[options.precision])
    count, generator = steps * options.batch, stream("step time")
    pictures = Part(
        torch.randint(0, 256, (count, 3, options.pixels, options.pixels), dtype=torch.uint8, generator=generator),
        torch.randint(0, 100, (count,), generator=generator),
    ).to("cuda")
    order = batches(count, options.batch, seed=0, task=0, epoch=0)
    for name in ("plain", options.method):
        step = stepper(options, pictures, METHODS[name])
        for _ in range(2):
            step.epoch(order, 1e-4)
        kernels, waits = profiled(lambda step=step: step.epoch(order, 1e-4) and None)
        found[f"{name}, a step"] = {key: (t / steps, c / steps) for key, (t, c) in kernels.items()}, waits
        del step

    torch.set_float32_matmul_precision("medium")  # Gram matrices of bfloat16
    net = make_backbone(options.model, {"source": 1000}, stem=options.stem, seed=0).cuda()
    net.to(memory_format=torch.channels_last)
    net.enter("source")
    x = torch.randn(options.batch, 3, options.pixels, options.pixels, device="cuda").to(
        memory_format=torch.channels_last
    )
    batch = x, torch.randint(0, 1000, (options.batch,), device="cuda")
    run = curvature_pass(net, batch, "cuda", {**(METHODS[options.method] or {}), "draws": 1})
    run(SHORT)
    short, long = (profiled(lambda count=count: run(count)) for count in (SHORT, LONG))
    found[f"{options.method}, a curvature batch"] = tuple(
        less(b, a, LONG - SHORT) for a, b in zip(short, long, strict=True)
    )  # type: ignore[assignment]

    lines = []
    for name, (kernels, waits) in found.items():
        listed = sorted(merged(kernels).items(), key=lambda item: -item[1][0])
        total = sum(time for _, (time, _) in listed)
        launched = sum(count for _, (_, count) in listed)
        waited = ", ".join(f"{call} {count:g}" for call, (_, count) in waits.items()) or "none"
        unit = "in an epoch" if name.endswith("step") else "in a batch"
        lines += [f"## {name}: {total:.0f} us in {launched:.0f} kernels; waits {unit}: {waited}", ""]
        lines += ["| us | kernels | name |", "|---:|---:|---|"]
        lines += [f"| {time:.1f} | {count:.1f} | {key} |" for key, (time, count) in listed[: options.top]]
        lines.append("")
    as_lists: dict[str, Any] = {name: {"kernels": merged(k), "waits": w} for name, (k, w) in found.items()}
    keep(options.output, record, as_lists, "\n".join(lines))


if __name__ == "__main__":
    main()
