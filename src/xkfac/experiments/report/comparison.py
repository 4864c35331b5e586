"""Lines that several runs have, side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xkfac.experiments.report.lines import ReportLine, ReportRun
from xkfac.experiments.report.tables import NOTHING, Cell, Row, Table, decimal, printable
from xkfac.experiments.runs.results import Spread

CAPTION = (
    "Average accuracy in % of the lines that several runs have, after as many tasks as both reached; differences "
    "in points, second less first, with Welch's confidence interval. Those whose interval excludes zero are bold."
)


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


def compare(runs: Sequence[ReportRun]) -> list[Comparison]:
    """Return how lines that several runs have differ: each later run against the first that has the line."""
    by_name: dict[str, list[ReportLine]] = {}
    for entry in (entry for run in runs for entry in run.lines):
        by_name.setdefault(entry.name, []).append(entry)
    compared = []
    for first, second in ((same[0], other) for same in by_name.values() for other in same[1:]):
        common = first.averages.keys() & second.averages.keys()
        if common:
            tasks = max(common)
            a, b = first.averages[tasks], second.averages[tasks]
            error, margin = welch(a, b)
            gap, label = b.mean - a.mean, printable(first.line.label or first.name)
            names = (first.name, label, (first.run, second.run))
            compared.append(Comparison(*names, tasks, a, b, gap, error, gap - margin, gap + margin))
    return compared


def welch(a: Spread, b: Spread) -> tuple[float, float]:
    """Return the standard error of a difference of means and half of Welch's 95% confidence interval."""
    from scipy.special import stdtrit  # type: ignore[import-untyped]  # here: the rest of the module needs no scipy

    parts = [value.deviation**2 / value.count for value in (a, b)]
    error = math.sqrt(sum(parts))
    if math.isnan(error) or error == 0:
        return error, error
    freedom = sum(parts) ** 2 / sum(part**2 / (v.count - 1) for part, v in zip(parts, (a, b), strict=True))
    return error, error * float(stdtrit(freedom, 0.975))


def comparison_table(compared: Sequence[Comparison]) -> Table:
    """Return the differences as a table."""
    rows = []
    for each in compared:
        difference, low, high = (decimal(value, "+.2f") for value in (each.difference, each.low, each.high))
        interval = NOTHING if math.isnan(each.low) else f"{low} to {high}"
        clear = each.low > 0 or each.high < 0
        cells = [Cell(str(each.tasks)), Cell(each.first), Cell(each.second), Cell(difference, best=clear)]
        cells += [Cell(decimal(each.error)), Cell(interval)]
        rows.append(Row(each.label, cells, below=f"{each.runs[1]} against {each.runs[0]}"))
    heads = ("line", "tasks", "first run", "second run", "difference", "standard error", "95% interval")
    return Table("Table of differences", CAPTION, heads, [rows])
