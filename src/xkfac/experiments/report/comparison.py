"""Lines that several runs have, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xkfac.experiments.report.tables import ReportLine, entries, printable
from xkfac.experiments.runs.results import JobResult, RunResults, Spread


@dataclass(frozen=True)
class Comparison:
    """Average accuracy of one line in two runs after as many tasks as both reached.

    difference: second less first. error: its standard error. low, high: Welch's 95% confidence interval; not a number
    where a run has a single repeat.
    """

    name: str
    label: str
    runs: tuple[str, str]
    tasks: int
    first: Spread
    second: Spread
    difference: float
    error: float
    low: float
    high: float


def compare(runs: Sequence[RunResults]) -> list[Comparison]:
    """Return how lines that several runs have differ: each later run against the first that has the line."""
    by_name: dict[str, list[ReportLine]] = {}
    for entry in entries(runs):
        by_name.setdefault(entry.name, []).append(entry)
    pairs = [(same[0], other) for same in by_name.values() for other in same[1:]]
    found = (_comparison(first, second) for first, second in pairs)
    return [comparison for comparison in found if comparison is not None]


def _comparison(first: ReportLine, second: ReportLine) -> Comparison | None:
    one, two = (dict(entry.curve(JobResult.average_accuracy)) for entry in (first, second))
    common = max(one.keys() & two.keys(), default=0)
    if not common:
        return None
    a, b = one[common], two[common]
    error, margin = welch(a, b)
    difference = b.mean - a.mean
    return Comparison(
        name=first.name,
        label=printable(first.line.label or first.name),
        runs=(first.run, second.run),
        tasks=common,
        first=a,
        second=b,
        difference=difference,
        error=error,
        low=difference - margin,
        high=difference + margin,
    )


def welch(a: Spread, b: Spread, level: float = 0.95) -> tuple[float, float]:
    """Return the standard error of a difference of means and half of Welch's confidence interval."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # here: the rest of the module needs no scipy

    parts = [value.deviation**2 / value.count for value in (a, b)]
    error = math.sqrt(sum(parts))
    if math.isnan(error) or error == 0:
        return error, error
    freedom = sum(parts) ** 2 / sum(part**2 / (v.count - 1) for part, v in zip(parts, (a, b), strict=True))
    return error, error * float(stdtrit(freedom, (1 + level) / 2))
