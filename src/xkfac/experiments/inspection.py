"""What a memory file holds, in numbers that a person can judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xkfac.kronecker import Kronecker
from xkfac.memory import Memory


def inspect_memory(path: Path) -> dict[str, Any]:
    """Return the facts of a memory file, and of each unit its shape, curvature, trace, and how far that is in H''.

    `trace` is that of the unit's curvature block: the sum of the Fisher information of all its numbers. `between` is
    the share of it in the last term of each task's: what the gradients of a mini-batch have in common.
    """
    memory = Memory.load(path)
    levels = len(memory.method.settings.levels)
    units = []
    for unit in memory.units:
        block = memory.curvature.blocks.get(unit.name)
        trace = None if block is None else float(block.diagonal().sum())
        share = None
        if isinstance(block, Kronecker) and levels > 1 and trace:
            share = float(Kronecker(block.terms[levels - 1 :: levels]).diagonal().sum()) / trace
        units.append(
            {
                "unit": unit.name,
                "kind": unit.kind,
                "norm": unit.norm or "-",
                "shape": "x".join(map(str, unit.shape)),
                "curvature": "joint" if block is None else type(block).__name__.lower(),
                "trace": "-" if trace is None else trace,
                "between": "-" if share is None else share,
                "anchor norm": float(memory.anchor[unit.name].norm()),
            }
        )
    return {
        "file": str(path),
        "megabytes": round(path.stat().st_size / 1e6, 2),
        "tasks": memory.tasks,
        "examples": memory.examples,
        "method": memory.method.name,
        "settings": str(memory.method.settings),
        "likelihood": memory.likelihood.name,
        "units": units,
    }
