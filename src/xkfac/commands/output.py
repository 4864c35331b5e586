"""What commands write: tables, JSON, progress, and the report that ends a run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from xkfac.experiments.runs.results import RunResults


def print_json(value: Any) -> None:
    """Write a value to standard output as JSON, null in place of numbers that are not finite."""
    print(json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None)))


def console() -> Console:
    """Return the console of results; what goes elsewhere than to a terminal is not fitted into its width."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 500)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write a table to standard output, below a line of heads."""
    table = Table(*map(escape, head), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    console().print(table)


def tell(quiet: bool, text: str) -> None:
    """Say something beside the results, unless asked to be quiet."""
    if not quiet:
        Console(stderr=True, soft_wrap=True).print(escape(text))


@contextmanager
def progress(folder: Path, quiet: bool, *, tuning: bool = False) -> Iterator[Any]:
    """Yield what shows how far the work on a run is, None if quiet; an interrupt says how to go on."""
    from xkfac.experiments.runs.progress import Display
    from xkfac.experiments.tuning.tuning import TuningDisplay

    kind = TuningDisplay if tuning else Display
    try:
        with kind(Console(stderr=True, quiet=quiet)) as display:
            yield None if quiet else display.show
    except KeyboardInterrupt:
        if (folder / "run.json").exists():
            tell(False, f"interrupted; go on with: xkfac resume {shlex.quote(str(folder))}")
        raise


def finish(folders: list[Path], output: Path, as_json: bool) -> None:
    """Write the report of runs and show the table and where things are."""
    from xkfac.experiments import results
    from xkfac.experiments.report.page import write_report
    from xkfac.experiments.runs.results import pooled

    runs = pooled([results(folder) for folder in folders])
    page, files = write_report(runs, output)
    figures = [str(path) for path in files]
    if as_json:
        jobs = {
            f"{run.recipe.name}/{name}": [asdict(job) for job in line.jobs]
            for run in runs
            for name, line in run.lines.items()
        }
        print_json({"report": str(page), "figures": figures, "jobs": jobs})
        return
    _print_results(runs)
    lines = ["", "accuracy in %, mean ± standard deviation over repeats"]
    lines += [f"figure: {figure}" for figure in figures[:1]]
    print("\n".join((*lines, f"report: {page}")))


def _print_results(runs: Sequence[RunResults]) -> None:
    """Show accuracies task by task of runs of images, the course over tasks of the others, and trade-offs."""
    from xkfac.experiments.report.image_tables import image_tables
    from xkfac.experiments.report.lines import report_runs
    from xkfac.experiments.report.summary import summary
    from xkfac.experiments.report.tradeoff_tables import tradeoff_table, tradeoffs

    reported, others = report_runs(runs), []
    for run in reported:
        tables = image_tables(run)
        if tables is None:
            others.append(run.results)
            continue
        if len(runs) > 1:
            print(f"{run.name}\n")
        for table in tables.shown():
            print_table(*table.texts())
            print()
    if others:
        print_table(*summary([line for run in report_runs(others) for line in run.lines]).texts())
    for found in filter(None, map(tradeoffs, reported)):
        print(f"\n{found.run}" if len(runs) > 1 else "")
        print_table(*tradeoff_table(found).texts())
