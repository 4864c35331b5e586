"""The trade-off curves of a run's sweeps: their points over repeats, and the numbers that sum them up.

Curves are made repeat by repeat, and their numbers averaged.

A curve is the chain of straight lines through the points of a sweep, in the order of the swept value. A point is
(kept, share): the source accuracy after all tasks over that of the source network, and the target accuracy over its
ceiling, on average over targets. Both are numbers near 0 to 1.

    reach(x) = the largest share on the curve at points that keep at least x
    area     = the integral of reach over x from 0 to 1

So reach never grows with x, and needs no curve that falls by itself. Nothing is extrapolated: beyond the point that
keeps most, nothing is reached, and the area gains nothing; left of the point that keeps least, reach is the largest
share there is, as all points keep more than asked for.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

from xkfac.experiments.report.image_tables import Ceiling, ceilings
from xkfac.experiments.report.lines import ReportLine, ReportRun
from xkfac.experiments.report.tables import Cell, Row, Table, csv_text, number, spread_cells
from xkfac.experiments.runs.results import JobResult, Spread, spread

LEVELS = (0.9, 0.97)

Point = tuple[float, float]


def reach(curve: Sequence[Point], kept: float) -> float | None:
    """Return the largest share on a curve at points that keep at least `kept`; None where no point does."""
    shares = [share for x, share in curve if x >= kept]
    shares += [_height(*pair, kept) for pair in pairwise(curve) if min(pair)[0] < kept < max(pair)[0]]
    return max(shares, default=None)


def area(curve: Sequence[Point]) -> float:
    """Return the area under the reach of a curve over what is kept from 0 to 1; exact up to rounding."""
    ends = sorted({0.0, *(min(max(x, 0.0), 1.0) for x, _ in curve)})
    return math.fsum(_strip(curve, low, high) for low, high in pairwise(ends))


def _strip(curve: Sequence[Point], low: float, high: float) -> float:
    """Return the area between neighbouring points: that below a constant and straight lines, whichever is highest."""
    level = reach(curve, high)
    assert level is not None  # some point keeps at least `high`
    across = [pair for pair in pairwise(curve) if min(pair)[0] <= low and high <= max(pair)[0]]
    lines = [(level, level), *((_height(*pair, low), _height(*pair, high)) for pair in across)]
    # Lines are pairs of heights at both ends; where two cross, the higher one changes.
    crossings = [0.0, 1.0]
    for (a, b), (c, d) in combinations(lines, 2):
        if (a - c) * (b - d) < 0:
            crossings.append((a - c) / ((a - c) - (b - d)))
    crossings.sort()
    tops = [max(a + (b - a) * place for a, b in lines) for place in crossings]
    shares = (
        (right - left) * (one + other) / 2
        for (left, one), (right, other) in pairwise(zip(crossings, tops, strict=True))
    )
    return (high - low) * sum(shares)


def _height(one: Point, other: Point, kept: float) -> float:
    """Return the share where the line between two points keeps `kept`."""
    (x, low), (z, high) = sorted((one, other))
    place = (kept - x) / (z - x)
    return low * (1 - place) + high * place


@dataclass(frozen=True)
class SweepPoint:
    """One line of a sweep: its value, and by seed what is kept of the source and the share of the targets' ceilings."""

    entry: ReportLine
    value: float | None
    by_seed: Mapping[int, Point]

    @property
    def kept(self) -> Spread | None:
        """What is kept over repeats."""
        return spread([kept for kept, _ in self.by_seed.values()])

    @property
    def share(self) -> Spread | None:
        """The share of the ceilings over repeats."""
        return spread([share for _, share in self.by_seed.values()])


@dataclass(frozen=True)
class Tradeoff:
    """The curve of one sweep. key: what is swept; empty for a line by itself, which is one point and has no curve."""

    name: str
    label: str
    key: str
    points: Sequence[SweepPoint]

    def curves(self) -> list[list[Point]]:
        """Return the curve of each repeat in the order of the swept values, as far as they are measured."""
        seeds = sorted({seed for point in self.points for seed in point.by_seed})
        return [[point.by_seed[seed] for point in self.points if seed in point.by_seed] for seed in seeds]

    @property
    def area(self) -> Spread | None:
        """The area under the curve, over repeats."""
        return spread([area(curve) for curve in self.curves()])

    def at(self, level: float) -> Spread | None:
        """Return the share of the ceilings at a level of what is kept, over the repeats that reach it."""
        return spread([reach(curve, level) for curve in self.curves()])

    @property
    def notes(self) -> tuple[str, ...]:
        """What keeps the curve from being a plain result: points that diverged, or are not there yet."""
        jobs = sum(point.entry.repeats for point in self.points)
        lost = sum(len(point.entry.diverged) for point in self.points)
        missing = jobs - lost - sum(len(point.by_seed) for point in self.points)
        said = (f"{lost} of {jobs} jobs diverged", lost), (f"{missing} of {jobs} jobs have no result yet", missing)
        return tuple(words for words, count in said if count)


@dataclass(frozen=True)
class Tradeoffs:
    """All curves of one run, and the points of lines that are in no sweep. tops: by target, empty without ceilings."""

    run: str
    source: str
    targets: Sequence[str]
    curves: Sequence[Tradeoff]
    alone: Sequence[Tradeoff]
    tops: Mapping[str, Ceiling]

    @property
    def what(self) -> str:
        """What the targets' axis shows."""
        targets = self.targets[0] if len(self.targets) == 1 else "targets"
        whose = "its ceiling" if len(self.targets) == 1 else "their ceilings"
        return f"{targets}, share of {whose}" if self.tops else f"{targets}, accuracy"


def tradeoffs(run: ReportRun) -> Tradeoffs | None:
    """Return the trade-off curves of a run; None for one that has no sweeps of which something is measured."""
    competing = [entry for entry in run.lines if not entry.reference]
    done = [job for entry in competing for job in entry.results.jobs if job.final() and len(job.tasks) > 1]
    if not done:
        return None
    source = done[0].tasks[0]
    targets = list(dict.fromkeys(task for job in done for task in job.tasks[1:]))
    tops = ceilings(run.lines, targets)
    tops = tops if len(tops) == len(targets) else {}
    groups: dict[str, list[SweepPoint]] = {}
    for entry in competing:
        name = entry.line.sweep.get("line", entry.name)
        groups.setdefault(name, []).append(SweepPoint(entry, entry.line.swept, _by_seed(entry.results.jobs, tops)))
    sweeps = []
    for name, points in groups.items():
        first = points[0].entry
        ordered = sorted(points, key=lambda point: point.value or 0.0)
        sweep = first.line.sweep
        sweeps.append(Tradeoff(name, sweep.get("label", first.label), sweep.get("key", ""), ordered))
    curves = [each for each in sweeps if each.key and any(point.by_seed for point in each.points)]
    if not curves:
        return None
    alone = [each for each in sweeps if not each.key and each.points[0].by_seed]
    return Tradeoffs(run.name, source, targets, curves, alone, tops)


def _by_seed(jobs: Iterable[JobResult], tops: Mapping[str, Ceiling]) -> dict[int, Point]:
    """Return what is kept of the source and the mean share of the ceilings, of each repeat that learnt all tasks."""
    found = {}
    for job in jobs:
        end = job.final()
        if end is None or not (first := job.accuracy[0]) or not first[0] or len(job.tasks) < 2:
            continue
        shares = (end[task] / (tops[task].of(job.seed) if tops else 100.0) for task in job.tasks[1:])
        found[job.seed] = end[job.tasks[0]] / first[0], fmean(shares)
    return found


def in_percent(value: Spread) -> Spread:
    """Return a share in %."""
    return Spread(100 * value.mean, 100 * value.deviation, value.count)


def tradeoff_table(found: Tradeoffs) -> Table:
    """Return the numbers of all curves as a table."""
    tops = "; ".join(
        f"{task} {number(spread(list(top.accuracies.values())), 1)}% ({top.label})" for task, top in found.tops.items()
    )
    caption = (
        f"Trade-off of each method: at least so much of the accuracy on {found.source} is kept, and what is then "
        "reached at best along the curve through its points, mean ± one standard deviation over repeats. The area is "
        "that below this, over 0 to 100% kept, 1 where the ceilings are reached throughout; nothing is extrapolated."
        + (f" Ceilings: {tops}, chosen on validation images." if tops else "")
    )
    levels = [f"{found.what}, at {100 * level:.0f}% of {found.source} kept" for level in LEVELS]
    rows = []
    for curve in found.curves:
        values = ", ".join(f"{point.value:g}" for point in curve.points if point.value is not None)
        swept = Cell(("lr " if curve.key == "lr" else "x") + values)
        cells = [Cell(curve.area, 3), *(_cell(curve, level) for level in LEVELS), swept]
        rows.append(Row(curve.label, cells, curve.notes))
    return Table("Table of trade-offs", caption, ["method", "area under the curve", *levels, "values"], [rows])


def _cell(curve: Tradeoff, level: float) -> Cell:
    """Return a number at a level, with how many repeats reach it where not all do."""
    value, repeats = curve.at(level), len(curve.curves())
    if value is None:
        return Cell("not reached")
    note = "" if value.count == repeats else f"{value.count} of {repeats} repeats reach it"
    return Cell(in_percent(value), 1, note=note)


def tradeoffs_csv(found: Iterable[Tradeoffs]) -> str:
    """Return the numbers of all curves in full as CSV, one per row; a level that is not reached has no mean."""
    rows: list[list[Any]] = []
    for each in found:
        for curve in each.curves:
            start = [each.run, curve.name, curve.label]
            rows.append([*start, "area", "", *spread_cells(curve.area)])
            rows += [[*start, "share at", level, *spread_cells(curve.at(level))] for level in LEVELS]
    return csv_text(["run", "sweep", "label", "what", "kept", "mean", "deviation", "repeats"], rows)
