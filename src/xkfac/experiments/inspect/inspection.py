"""What a memory file holds, in numbers that a person can judge."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from xkfac.calibration import Calibration
from xkfac.curvature.blocks import Block, KhatriRao, Kronecker
from xkfac.curvature.operator import Settings
from xkfac.experiments.inspect.entries import MeanEntry, approximations, derivable, mean_absolute, over_blocks
from xkfac.experiments.inspect.spectra import effective_rank, largest_eigenvalue, spectra, trace
from xkfac.memory import Memory
from xkfac.model.units import Unit
from xkfac.plain_values import from_plain

NAMES = {"kfac": "K-FAC", "xkfac": "XK-FAC", "difference": "difference"}
_NOTHING = "-"

Show = Callable[[int, int, str], None]


def inspect_memory(path: Path, *, batch: int | None = None, seed: int = 0, show: Show | None = None) -> dict[str, Any]:
    """Return the facts of a memory file as plain values: of the memory, of each unit, and of its calibration.

    The `trace` of a unit is that of its curvature block: the sum of the Fisher information of all its numbers.
    `between` is the share of the trace in the last terms of all tasks: what the gradients of a mini-batch have in
    common. `spectra.py` explains `largest`, `effective rank` and `spectra`; `entries.py` explains `entries`.

    batch: the size of the mini-batches that the factors were estimated with; the paper's form needs it for K-FAC.
    seed: of the entries that are drawn. show: called with how many units are done, how many there are, and the next.
    """
    memory = Memory.load(path)
    settings, averaged = memory.method.settings, _is_averaged(memory)
    note = derivable(settings, batch, averaged=averaged) if memory.units else ""
    generator = torch.Generator().manual_seed(seed)
    units = []
    means: dict[str, list[MeanEntry]] = {name: [] for name in NAMES}
    for place, unit in enumerate(memory.units):
        if show is not None:
            show(place, len(memory.units), unit.name)
        block = memory.curvature.block(unit.name)
        assert block is not None
        sums = approximations(block, settings, batch, averaged=averaged) if isinstance(block, Kronecker) else {}
        own = {name: mean_absolute(terms, generator) for name, terms in sums.items()}
        for name, mean in own.items():
            means[name].append(mean)
        entries = {name: asdict(mean) for name, mean in own.items()} or None
        units.append({**_unit_facts(memory, unit, block), "entries": entries})
    over_units = {name: over_blocks(of) for name, of in means.items()}
    found = {
        "file": str(path),
        "megabytes": round(path.stat().st_size / 1e6, 2),
        "tasks": memory.tasks,
        "examples": memory.examples,
        "method": memory.method.name,
        "settings": asdict(settings),
        "likelihood": memory.likelihood.name,
        "calibration": None if memory.calibration is None else asdict(memory.calibration),
        "entries": {**{name: mean and asdict(mean) for name, mean in over_units.items()}, "note": note},
        "units": units,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))  # tuples become lists
    return plain


def _unit_facts(memory: Memory, unit: Unit, block: Block) -> dict[str, Any]:
    levels = len(memory.method.settings.levels)
    total, share = trace(block), None
    if isinstance(block, Kronecker) and levels > 1 and total:
        share = trace(Kronecker(block.terms[levels - 1 :: levels])) / total
    found = spectra(block)
    largest, distance = (found[0].largest, 0.0) if len(found) == 1 else largest_eigenvalue(block)
    return {
        "unit": unit.name,
        "kind": unit.kind,
        "norm": unit.norm,
        "shape": "x".join(map(str, unit.shape)),
        "curvature": "joint" if unit.name in memory.curvature.joint_units else type(block).__name__.lower(),
        "trace": total,
        "between": share,
        "largest": largest,
        "largest within": distance,
        "effective rank": effective_rank(block),
        "spectra": [{**asdict(each), "sparkline": each.sparkline} for each in found],
        "anchor norm": float(memory.anchor[unit.name].norm()),
    }


def _is_averaged(memory: Memory) -> bool:
    """Whether the terms of a memory are averages over several tasks."""
    sums = [block for block in (*memory.curvature.blocks.values(), memory.curvature.joint) if block is not None]
    terms = [len(block.terms) for block in sums if isinstance(block, (Kronecker, KhatriRao))]
    return max(terms, default=0) < memory.tasks * len(memory.method.settings.levels)


def facts(found: Mapping[str, Any]) -> dict[str, str]:
    """Return what was found of a memory as a whole, as a terminal shows it."""
    plain = ("file", "megabytes", "tasks", "examples", "method", "likelihood")
    shown = {name: str(found[name]) for name in plain}
    shown["settings"] = ", ".join(f"{key} {value}" for key, value in found["settings"].items() if value is not None)
    means = [f"{label} {_mean(found['entries'][name])}" for name, label in NAMES.items() if found["entries"][name]]
    if means:
        shown["mean absolute entry of all blocks"] = ", ".join(means)
    if found["entries"]["note"]:
        shown["note"] = found["entries"]["note"]
    if found["calibration"]:
        shown["calibration"] = str(from_plain(Calibration, found["calibration"], "the calibration"))
    return shown


def unit_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return a row for each unit below a header; the spectra are those of the last task's terms, joined by +."""
    levels = len(Settings(**found["settings"]).levels)
    names = ("unit", "kind", "norm", "shape", "curvature", "trace", "between", "largest", "effective rank")
    rows = [[*names, "90% of trace in", "spectrum", "anchor norm", *NAMES.values()]]
    for unit in found["units"]:
        every = unit["spectra"]
        shown = every[-levels:]
        more = "… + " if len(shown) < len(every) else ""
        rows.append(
            [
                *(_number(unit[name]) for name in names),
                more + " + ".join(f"{each['ninety']}/{each['size']}" for each in shown),
                more + " + ".join(each["sparkline"] for each in shown),
                _number(unit["anchor norm"]),
                *(_mean((unit["entries"] or {}).get(name)) for name in NAMES),
            ]
        )
    return rows


def calibration_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the measured curve of a memory's calibration, a row a point below a header; nothing if it has none.

    `scaled` is the predicted penalty times the scale, which should be the real rise of the loss.
    """
    if not found["calibration"]:
        return []
    scale, radius = found["calibration"]["scale"], found["calibration"]["radius"]
    rows = [["predicted", "scaled", "real", "trusted"]]
    for point in found["calibration"]["curve"]:
        predicted = point["predicted"]
        numbers = (_number(value) for value in (predicted, scale * predicted, point["real"]))
        rows.append([*numbers, "yes" if predicted <= radius else "no"])
    return rows


def _number(value: Any) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _mean(mean: Mapping[str, Any] | None) -> str:
    if mean is None:
        return _NOTHING
    return f"{mean['mean']:.3g}" + (f" ± {mean['error']:.1g}" if mean["error"] else "")
