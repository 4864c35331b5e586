"""The tables of a run of images: accuracies task by task (table 1 of the paper), and what is kept and reached by them.

Both are of the repeats that have learnt all tasks, whatever the order in which they met them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from xkfac.experiments.recipes.recipe import SINGLE, Line
from xkfac.experiments.report.lines import ReportLine, ReportRun
from xkfac.experiments.report.tables import Cell, Row, Table, best_places, csv_text, printable, spread_cells
from xkfac.experiments.runs.results import JobResult, Spread, spread

MOST_SHOWN = 12  # tasks up to which a table says what images of each are taken for
_FACTS = {"active_bn": "active BN", "valid_curvature": "valid curvature", "balanced": "adaptive α"}  # noqa: RUF001


@dataclass(frozen=True)
class Ceiling:
    """What a network of its own reaches on a task: accuracies by seed, of the line with this label."""

    label: str
    accuracies: Mapping[int, float]

    def of(self, seed: int) -> float:
        """Return the ceiling of a repeat; of one whose seed has none, the mean over those there are."""
        return self.accuracies.get(seed, fmean(self.accuracies.values()))


@dataclass(frozen=True)
class LineNumbers:
    """What a line of images has reached, in %.

    accuracies: by task, and their average; None where it cannot be said. kept: the accuracy on the source after all
    tasks over that of the source network. shares: by target, the accuracy over its ceiling.
    """

    entry: ReportLine
    accuracies: Mapping[str, Spread | None]
    average: Spread | None
    kept: Spread | None
    shares: Mapping[str, Spread | None]


@dataclass(frozen=True)
class ImageTables:
    """The numbers of one run, line by line, and its source."""

    source: str
    lines: Sequence[LineNumbers]

    @property
    def learnt(self) -> list[LineNumbers]:
        """Those of the lines that compete and have a result."""
        return [of for of in self.lines if not of.entry.reference and of.accuracies]

    def shown(self) -> list[Table]:
        """Return the tables of accuracies and, where there is something to share out, of shares."""
        return [accuracy_table(self), *([share_table(self)] if self.learnt else [])]


def image_tables(run: ReportRun) -> ImageTables | None:
    """Return the tables of a run; None for one that has no images, or no repeat that has learnt all its tasks."""
    if run.recipe.images is None or not any(entry.ends for entry in run.lines):
        return None
    source, *targets = run.recipe.tasks
    tops = ceilings(run.lines, targets)
    return ImageTables(source, [_numbers(entry, source, targets, tops) for entry in run.lines])


def ceilings(mine: Sequence[ReportLine], targets: Sequence[str]) -> dict[str, Ceiling]:
    """Return the ceiling of each target: of lines of the method `single` the best on its validation images.

    So its learning rate is chosen as that of any other line may be, and test images decide nothing.
    """
    found = {}
    for task in targets:
        singles = [entry for entry in mine if entry.line.method == SINGLE and task in entry.ends]
        if singles:
            best = max(singles, key=lambda entry: fmean(_validations(entry, task) or [-1.0]))
            found[task] = Ceiling(best.label, best.ends[task])
    return found


def _validations(entry: ReportLine, task: str) -> list[float]:
    """Return the accuracy of the weights that each repeat kept on the validation images of a task."""
    found = []
    for job in entry.results.jobs:
        if job.seed in entry.ends.get(task, ()):
            place = list(job.tasks).index(task)
            kept = (place, job.kept[place])
            found += [epoch["validation"] for epoch in job.epochs if (epoch["task"], epoch["epoch"]) == kept]
    return found


def _numbers(entry: ReportLine, source: str, targets: Sequence[str], tops: Mapping[str, Ceiling]) -> LineNumbers:
    ends = entry.ends
    accuracies = {task: spread([*ends[task].values()]) for task in (source, *targets) if task in ends}
    # Of a line that leaves tasks out, repeats in other orders have others, whose averages are not of the same thing.
    seeds = {tuple(of) for of in ends.values()}
    average = spread([fmean(of[seed] for of in ends.values()) for seed in seeds.pop()]) if len(seeds) == 1 else None
    if entry.reference:
        return LineNumbers(entry, accuracies, average, None, {})
    first = {job.seed: row[0] for job in entry.results.jobs if job.accuracy and (row := job.accuracy[0]) is not None}
    kept = spread([_percent(accuracy, first[seed]) for seed, accuracy in ends.get(source, {}).items()])
    shares: dict[str, Spread | None] = {}
    for task in targets if tops and ends else ():
        top = tops[task].of if task in tops else lambda _: None
        shares[task] = spread([_percent(accuracy, top(seed)) for seed, accuracy in ends.get(task, {}).items()])
    return LineNumbers(entry, accuracies, average, kept, shares)


def _percent(part: float, whole: float | None) -> float | None:
    return 100 * part / whole if whole else None


def facts_of(line: Line) -> tuple[bool, bool, bool]:
    """Return whether BN is active, whether the curvature is valid for it, and whether alpha_s and alpha_t adapt.

    K-FAC leaves out the inter-example terms of an active BN, as does any curvature with population statistics; fixed
    BN has none, and the past has none where each task has its own BN. A line without a penalty has no curvature.
    """
    method = line.resolved_method()
    alone = method.fixed_bn or method.own_bn
    with_terms = method.settings.kind != "kfac" and method.settings.statistics == "batch"
    return not method.fixed_bn, method.penalised and (alone or with_terms), line.balance


def accuracy_table(tables: ImageTables) -> Table:
    """Return accuracies task by task: lines without adaptive alpha, then those with, as the paper has them."""
    tasks = list(dict.fromkeys(task for of in tables.lines for task in of.accuracies))
    blocks = ([of for of in tables.lines if of.entry.line.balance is balanced] for balanced in (False, True))
    caption = (
        "Top-1 accuracy in %, mean ± one standard deviation over repeats. The best of a column in each block is bold; "
        "references and methods with repeats that diverged do not take part."
    )
    heads = ["method", *_FACTS.values(), *map(printable, tasks), "average"]
    return Table("Table of accuracies", caption, heads, [_block(block, tasks) for block in blocks if block])


def _block(block: Sequence[LineNumbers], tasks: Sequence[str]) -> list[Row]:
    values = [[*map(of.accuracies.get, tasks), of.average] for of in block]
    rivals = [mine if of.entry.competes else [None] * len(mine) for of, mine in zip(block, values, strict=True)]
    best = [best_places(column, 2) for column in zip(*rivals, strict=True)]
    rows = []
    for place, (of, mine) in enumerate(zip(block, values, strict=True)):
        cells = [Cell("✓" if there else "") for there in facts_of(of.entry.line)]
        cells += [Cell(value, best=place in won) for value, won in zip(mine, best, strict=True)]
        rows.append(Row(of.entry.label, cells, of.entry.notes, of.entry.reference))
    return rows


def share_table(tables: ImageTables) -> Table:
    """Return what lines keep of the source, and what they reach of the ceilings of the targets."""
    targets = list(dict.fromkeys(task for of in tables.learnt for task in of.shares))
    caption = (
        f"What is kept of the source network's accuracy on {tables.source} after all tasks"
        + (", and what each target reaches of the accuracy of a network of its own" if targets else "")
        + "; in %, mean ± one standard deviation over repeats."
    )
    rows = [
        Row(of.entry.label, [Cell(value, 1) for value in (of.kept, *map(of.shares.get, targets))])
        for of in tables.learnt
    ]
    heads = ["line", f"{tables.source} kept", *(f"{task}, share of its ceiling" for task in targets)]
    return Table("Table of shares", caption, heads, [rows])


def inference_table(found: Sequence[ReportLine]) -> Table:
    """Return how well tasks are inferred, of lines with task-specific layers; without rows if there are none.

    Up to `MOST_SHOWN` tasks it has a row per line and task, with the confusion matrix; beyond, a row per line.
    """
    measured = {entry.label: [_inferred(job) for job in entry.results.jobs if job.inference] for entry in found}
    names = list(dict.fromkeys(task for jobs in measured.values() for job in jobs for task in job))
    short = len(names) <= MOST_SHOWN
    taken = [f"taken for {name}" for name in names] if short else ["task inferred right"]
    heads = ["task given", "task inferred", *taken]
    rows = []
    for label, jobs in measured.items():
        for tasks in ([[name] for name in names] if short else [names]) if jobs else ():
            there = [[job[task] for task in tasks if task in job] for job in jobs]
            means = ([fmean(of.get(head, 0.0) for of in job) for job in there if job] for head in heads)
            rows.append(Row(f"{label}: {tasks[0]}" if short else label, [Cell(spread(of), 1) for of in means]))
    caption = (
        "Accuracy in % after all tasks where the task of a test image is given, and where it is inferred from the "
        "image alone, and what share of the images of a task is taken for those of each task."
    )
    return Table("Table of inferred tasks", caption, ["line", *heads], [rows])


def _inferred(job: JobResult) -> dict[str, dict[str, float]]:
    """Return the numbers of a repeat by task, then by the heads of the table."""
    found = {}
    for task, one in zip(job.tasks, job.inference, strict=True):
        taken = dict(zip(job.tasks, one["taken"], strict=True))
        found[task] = {"task given": one["given"], "task inferred": one["inferred"], "task inferred right": taken[task]}
        found[task] |= {f"taken for {other}": share for other, share in taken.items()}
    return found


def tables_csv(found: Iterable[ImageTables]) -> str:
    """Return all numbers in full as CSV, one per row."""
    rows: list[list[Any]] = []
    for tables in found:
        for of in tables.lines:
            values = [("accuracy", task, value) for task, value in of.accuracies.items()]
            values += [("average accuracy", "", of.average), ("kept", tables.source, of.kept)]
            values += [("share of the ceiling", task, value) for task, value in of.shares.items()]
            entry = of.entry
            start = [entry.run, entry.name, entry.label, *map(int, facts_of(entry.line))]
            rows += [[*start, what, task, *spread_cells(value)] for what, task, value in values if value is not None]
    return csv_text(["run", "line", "label", *_FACTS, "what", "task", "mean", "deviation", "repeats"], rows)
