"""The tables of a run of images: accuracies task by task (table 1 of the paper), and what is kept and reached by them.

Both are of the repeats that have learnt all tasks, whatever the order in which they met them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from xkfac.experiments.recipes.recipe import SINGLE, Line
from xkfac.experiments.report.accuracy_table import AccuracyRow, as_html, as_text
from xkfac.experiments.report.markup import column_heads, spread_text, table, table_row, text
from xkfac.experiments.report.tables import ReportLine, csv_text, entries, notes, number, spread_cells
from xkfac.experiments.runs.results import JobResult, RunResults, Spread, spread

_Finals = dict[int, dict[str, float]]  # by seed and task
_FACTS = ("active_bn", "valid_curvature", "balanced")


@dataclass(frozen=True)
class ShareRow:
    """What a line has of what it could have, in %.

    kept: its accuracy on the source after all tasks over that of the source network. shares: by target, its accuracy
    over that of a network of its own for this task and seed.
    """

    label: str
    kept: Spread | None
    shares: Mapping[str, Spread | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Ceiling:
    """What a network of its own reaches on a task: accuracies by seed, of the line with this label."""

    label: str
    accuracies: Mapping[int, float]


@dataclass(frozen=True)
class ImageTables:
    """The tables of one run: its lines with a row of accuracies each, and the shares of those that compete."""

    source: str
    entries: Sequence[ReportLine]
    accuracies: Sequence[AccuracyRow]
    shares: Sequence[ShareRow]


def image_tables(runs: Sequence[RunResults]) -> list[ImageTables | None]:
    """Return the tables of each run; None for one that has no images, or no repeat that has learnt all its tasks."""
    found: list[ImageTables | None] = []
    rest = entries(runs)
    for run in runs:
        mine, rest = rest[: len(run.recipe.lines)], rest[len(run.recipe.lines) :]
        whole = any(_finals(entry) for entry in mine)
        found.append(_tables(run, mine) if run.recipe.images is not None and whole else None)
    return found


def _tables(run: RunResults, mine: Sequence[ReportLine]) -> ImageTables:
    source, *targets = run.recipe.tasks
    rows = [_accuracy_row(entry, [source, *targets]) for entry in mine]
    tops = ceilings(mine, targets)
    learnt = [entry for entry in mine if not entry.reference and _finals(entry)]
    return ImageTables(source, mine, rows, [_share_row(entry, source, targets, tops) for entry in learnt])


def ceilings(mine: Sequence[ReportLine], targets: Sequence[str]) -> dict[str, Ceiling]:
    """Return the ceiling of each target: of lines of the method `single` the best on its validation images.

    So its learning rate is chosen as that of any other line may be, and test images decide nothing.
    """
    singles = [entry for entry in mine if entry.line.method == SINGLE and _finals(entry)]
    found = {}
    for task in targets:
        ends = {
            entry.label: {seed: end[task] for seed, end in _finals(entry).items() if task in end} for entry in singles
        }
        there = [entry for entry in singles if ends[entry.label]]
        if there:
            best = max(there, key=lambda entry: fmean(_validations(entry, task) or [-1.0]))
            found[task] = Ceiling(best.label, ends[best.label])
    return found


def _validations(entry: ReportLine, task: str) -> list[float]:
    """Return the accuracy of the weights that each repeat kept on the validation images of a task."""
    found = []
    for job in entry.results.jobs:
        place = list(job.tasks).index(task) if task in job.tasks and job.final() else len(job.kept)
        kept = job.kept[place] if place < len(job.kept) else None
        epochs = [epoch for epoch in job.epochs if (epoch["task"], epoch["epoch"]) == (place, kept)]
        found += [epoch["validation"] for epoch in epochs if epoch.get("validation") is not None]
    return found


def _finals(entry: ReportLine) -> _Finals:
    """Return the accuracies of each repeat that has learnt all tasks, by its seed."""
    ends = {job.seed: job.final() for job in entry.results.jobs}
    return {seed: end for seed, end in ends.items() if end is not None}


def _accuracy_row(entry: ReportLine, tasks: Sequence[str]) -> AccuracyRow:
    ends = list(_finals(entry).values())
    shown = [task for task in tasks if any(task in end for end in ends)]
    # Of a line that leaves tasks out, repeats in other orders have others, whose averages are not of the same thing.
    alike = all(end.keys() == ends[0].keys() for end in ends)
    return AccuracyRow(
        entry.label,
        *facts_of(entry.line),
        {task: spread([end.get(task) for end in ends]) for task in shown},
        spread([fmean(end.values()) for end in ends]) if alike else None,
        entry.reference,
        len(entry.diverged),
        "; ".join(notes(entry)),
    )


def facts_of(line: Line) -> tuple[bool, bool, bool]:
    """Return whether BN is active, whether the curvature is valid for it, and whether alpha_s and alpha_t adapt.

    K-FAC leaves out the inter-example terms of an active BN, as does any curvature with population statistics; fixed
    BN has none, and the past has none where each task has its own BN. A line without a penalty has no curvature.
    """
    method = line.resolved_method()
    alone = method.fixed_bn or method.own_bn
    with_terms = method.settings.kind != "kfac" and method.settings.statistics == "batch"
    return not method.fixed_bn, method.penalised and (alone or with_terms), line.balance


def _share_row(entry: ReportLine, source: str, targets: Sequence[str], tops: Mapping[str, Ceiling]) -> ShareRow:
    finals = _finals(entry)
    first = {job.seed: row[0] for job in entry.results.jobs if job.accuracy and (row := job.accuracy[0]) is not None}
    kept = [_percent(end[source], first[seed]) for seed, end in finals.items() if source in end]
    shares: dict[str, Spread | None] = {}
    for task in targets if tops else ():
        own = tops[task].accuracies if task in tops else {}
        shares[task] = spread([_percent(end[task], own.get(seed)) for seed, end in finals.items() if task in end])
    return ShareRow(entry.label, spread(kept), shares)


def _percent(part: float, whole: float | None) -> float | None:
    return 100 * part / whole if whole else None


def tables_html(tables: ImageTables) -> str:
    """Return both tables as elements of a report's page."""
    caption = (
        f"What is kept of the source network's accuracy on {text(tables.source)} after all tasks"
        + (", and what each target reaches of the accuracy of a network of its own" if _targets(tables.shares) else "")
        + "; in %, mean ± one standard deviation over repeats."
    )
    targets = _targets(tables.shares)
    body = (
        table_row(text(row.label), (spread_text(value, 1) for value in (row.kept, *map(row.shares.get, targets))))
        for row in tables.shares
    )
    head = column_heads(["line", *_share_titles(tables)])
    shares = table("Table of shares", caption, head, body) if tables.shares else ""
    return as_html(tables.accuracies) + "\n" + shares


MOST_SHOWN = 12  # tasks up to which a table says what images of each are taken for


def inference_html(found: Sequence[ReportLine]) -> str:
    """Return a table of how well tasks are inferred, of lines with task-specific layers; nothing without any.

    Up to `MOST_SHOWN` tasks it has a row per line and task, with the confusion matrix; beyond, a row per line.
    """
    # By line, repeat and task: accuracies with the task given and inferred, and the share taken for each task.
    measured = {entry.label: [_inferred(job) for job in entry.results.jobs if job.inference] for entry in found}
    names = list(dict.fromkeys(task for jobs in measured.values() for job in jobs for task in job))
    each = [(label, [task], jobs) for label, jobs in measured.items() for task in names if jobs]
    if short := len(names) <= MOST_SHOWN:
        titles = {f"taken for {name}": name for name in names}
    else:
        each, titles = [(label, names, jobs) for label, jobs in measured.items() if jobs], {"task inferred right": ""}
    rows = []
    for label, tasks, jobs in each:
        there = [job for job in jobs if job.keys() & set(tasks)]
        cells = (
            spread([fmean(job[task].get(key or task, 0.0) for task in tasks if task in job) for job in there])
            for key in ("task given", "task inferred", *titles.values())
        )
        name = f"{text(label)}: {text(tasks[0])}" if short else text(label)
        rows.append(table_row(name, (spread_text(cell, 1) for cell in cells)))
    caption = (
        "Accuracy in % after all tasks where the task of a test image is given, and where it is inferred from the "
        "image alone, and what share of the images of a task is taken for those of each task."
    )
    heads = column_heads(["line", "task given", "task inferred", *titles])
    return table("Table of inferred tasks", caption, heads, rows) if rows else ""


def _inferred(job: JobResult) -> dict[str, dict[str, float]]:
    return {
        task: {
            "task given": one["given"],
            "task inferred": one["inferred"],
            **dict(zip(job.tasks, one["taken"], strict=True)),
        }
        for task, one in zip(job.tasks, job.inference, strict=True)
    }


def tables_text(tables: ImageTables) -> tuple[str, list[list[str]]]:
    """Return the accuracies as a terminal shows them, and the rows of the shares, their header first."""
    targets = _targets(tables.shares)
    rows = [
        [row.label, *(number(value, 1) for value in (row.kept, *map(row.shares.get, targets)))] for row in tables.shares
    ]
    return as_text(tables.accuracies), [["line", *_share_titles(tables)], *rows] if rows else []


def _targets(rows: Iterable[ShareRow]) -> list[str]:
    return list(dict.fromkeys(task for row in rows for task in row.shares))


def _share_titles(tables: ImageTables) -> list[str]:
    targets = _targets(tables.shares)
    return [f"{tables.source} kept", *(f"{task}, share of its ceiling" for task in targets)]


def tables_csv(found: Iterable[ImageTables]) -> str:
    """Return all numbers in full as CSV, one a row."""
    rows: list[list[Any]] = []
    for tables in found:
        shares = {row.label: row for row in tables.shares}
        for entry, row in zip(tables.entries, tables.accuracies, strict=True):
            share = shares.get(row.method, ShareRow(row.method, None))
            values = [("accuracy", task, value) for task, value in row.accuracies.items()]
            values += [("average accuracy", "", row.average), ("kept", tables.source, share.kept)]
            values += [("share of the ceiling", task, value) for task, value in share.shares.items()]
            start = [entry.run, entry.name, row.method, *(int(getattr(row, fact)) for fact in _FACTS)]
            rows += [[*start, what, task, *spread_cells(value)] for what, task, value in values if value is not None]
    return csv_text(["run", "line", "label", *_FACTS, "what", "task", "mean", "deviation", "repeats"], rows)
