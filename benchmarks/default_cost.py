"""What the library costs as it comes: the default method, a learner begun with SGD, and the peak memory of both.

    python benchmarks/default_cost.py [--output results/default-cost-cpu]
    python benchmarks/default_cost.py --method xkfac --steps-alone --output results/default-cost-cpu-xkfac
    python benchmarks/default_cost.py --device cuda --nets resnet50-64px --pixels 224 --batch 32 --output FOLDER

The networks are those of `peers`, with random weights and images. Plain steps and penalised ones, optimizer included,
take turns in one process; so do passes of one batch and of several, which tell a batch from what a pass does once.
Medians over the turns, as ratios to a plain step, or to a plain forward and backward pass. Peak memory is what a plain
step, a curvature pass of two batches, and steps with a learner need beyond network and batch, momentum included, each
in a process of its own. --method: another than the default one, of everything. --pixels and --batch replace those of
the ResNets.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

import torch
from common import keep, provenance
from nets import Case, build, resnet
from resident import _field, _rest
from torch.nn import functional as F
from turns import in_turns, plain_pass

import xkfac

NETS = ("mlp", "resnet18-64px", "resnet50-64px")
LR, MOMENTUM = 1e-3, 0.9
PEAKS = ("a plain step", "a curvature pass", "steps with a learner")


def case_of(name: str, options: argparse.Namespace) -> Case:
    torch.manual_seed(0)
    case = build(name)
    if name != "mlp" and (options.pixels or options.batch):
        depth = int(name[6:8])
        case = resnet(depth, options.pixels or 64, options.batch or len(case.inputs))
    case.net.to(options.device)
    return Case(case.net, case.inputs.to(options.device), case.labels.to(options.device))


def now(device: str) -> float:
    """Return seconds: of the processor alone on a CPU, so that other work on the machine is not counted."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def clocked(device: str, work: Callable[[], Any]) -> float:
    start = now(device)
    work()
    return now(device) - start


def sgd(case: Case) -> torch.optim.SGD:
    return torch.optim.SGD(case.net.parameters(), LR, momentum=MOMENTUM)


def step(case: Case, optimizer: torch.optim.Optimizer, learner: xkfac.Learner | None = None) -> None:
    loss = F.cross_entropy(case.net(case.inputs), case.labels)
    optimizer.zero_grad()
    if learner is None:
        loss.backward()
    else:
        learner.backward(loss)
    optimizer.step()


def learning(case: Case, method: str) -> tuple[torch.optim.SGD, xkfac.Learner]:
    """Return a learner with a memory of two batches that has begun, and its optimizer."""
    batch = (case.inputs, case.labels)
    learner = xkfac.Learner(case.net, xkfac.consolidate(case.net, [batch, batch], method, draws=1))
    optimizer = sgd(case)
    learner.begin([batch], optimizer)
    return optimizer, learner


def steps(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds of a plain step, and the ratios of those that evaluate the penalty, of others, of all."""
    plain, case = case_of(name, options), case_of(name, options)
    usual = sgd(plain)
    batch = (case.inputs, case.labels)
    memory = xkfac.consolidate(case.net, [batch, batch], options.method, draws=1)
    learner, optimizer = xkfac.Learner(case.net, memory), sgd(case)
    start = now(options.device)
    learner.begin([batch], optimizer)
    begin = now(options.device) - start
    every = learner._step.interval.every
    times: dict[str, list[float]] = {"plain": [], "evaluates": [], "other": []}
    for turn in range(-1, options.turns):
        for place in range(every):
            starts = now(options.device)
            step(plain, usual)
            middle = now(options.device)
            step(case, optimizer, learner)
            if turn >= 0:
                times["plain"].append(middle - starts)
                times["other" if place else "evaluates"].append(now(options.device) - middle)
    one = {kind: statistics.median(own) if own else 0.0 for kind, own in times.items()}
    mean = (one["evaluates"] + (every - 1) * one["other"]) / every
    ratios = {"step": mean, "evaluates": one["evaluates"], "other": one["other"], "begin": begin}
    return {"seconds": one["plain"], "every": every, **{kind: value / one["plain"] for kind, value in ratios.items()}}


def passes(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the ratios of one more batch in a pass to a plain pass, with one draw of labels and with eight."""
    case = case_of(name, options)
    batch, more = (case.inputs, case.labels), 16 if name == "mlp" else 2
    works: dict[str, Callable[[], Any]] = {
        f"{draws} {count}": partial(xkfac.consolidate, case.net, [batch] * count, options.method, draws=draws)
        for draws in (1, 8)
        for count in (1, 1 + more)
    }
    for work in works.values():
        work()
    ratios, _ = in_turns(works, partial(plain_pass, case), options.turns, partial(clocked, options.device))
    return {f"draws {k}": (ratios[f"{k} {1 + more}"] - ratios[f"{k} 1"]) / more for k in (1, 8)}


def peak(kind: str, name: str, options: argparse.Namespace) -> float:
    """Return the MB that one kind of work needs beyond network and batch."""
    torch.set_num_threads(1)
    case, device = case_of(name, options), options.device
    batch = (case.inputs, case.labels)
    if device == "cuda":
        before = torch.cuda.memory_allocated() / 1e6
    else:
        step(case_of("mlp", options), sgd(case_of("mlp", options)))  # what a process needs for its first step
        _rest()
        before = _field("VmRSS")
    if kind == PEAKS[0]:
        optimizer = sgd(case)
        for _ in range(2):
            step(case, optimizer)
    elif kind == PEAKS[1]:
        xkfac.consolidate(case.net, [batch, batch], options.method, draws=1)
    else:
        optimizer, learner = learning(case, options.method)
        if device != "cuda":
            _rest()
        else:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step(case, optimizer, learner)
    return (torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else _field("VmHWM")) - before


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    if options.steps_alone:
        return steps(name, options)
    found = {**steps(name, options), **passes(name, options)}
    for kind in PEAKS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found[kind] = pool.submit(peak, kind, name, options).result()
    return found


def table(results: dict[str, dict[str, float]]) -> str:
    header = [
        *("net", "plain step, ms", "penalty every", "penalised step", "that evaluates", "that does not", "`begin`"),
        *("curvature batch, 1 draw", "8 draws", *(f"peak of {kind}, MB" for kind in PEAKS)),
    ]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for name, row in results.items():
        cells = [name, f"{1000 * row['seconds']:.1f}", f"{row['every']:.0f}"]
        cells += [f"{row[key]:.2f}" for key in ("step", "evaluates", "other")] + [f"{row['begin']:.1f}"]
        cells += [f"{row[key]:.2f}" if key in row else "" for key in ("draws 1", "draws 8")]
        cells += [f"{row[kind]:.0f}" if kind in row else "" for kind in PEAKS]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("results/default-cost-cpu"))
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=["mlp", "resnet18-32px", *NETS[1:]])
    parser.add_argument("--pixels", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--method", default="fixed-bn", help="a name of xkfac.METHODS")
    parser.add_argument("--steps-alone", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = {**provenance(), "load before": os.getloadavg()[0]}
    results = {name: measure(name, options) for name in options.nets}
    keep(options.output, {**record, "load after": os.getloadavg()[0]}, results, table(results))


if __name__ == "__main__":
    main()
