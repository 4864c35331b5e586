"""The report of an experiment: one page that needs nothing but itself, and the files of its figures beside it."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xkfac.errors import XkfacError
from xkfac.experiments.files import check_path, write_file
from xkfac.experiments.recipes.recipe import JOINT, SINGLE, Recipe
from xkfac.experiments.recipes.toml_tables import write_value
from xkfac.experiments.report.choices import read_tuned
from xkfac.experiments.report.comparison import compare, comparison_table
from xkfac.experiments.report.figures import draw_all
from xkfac.experiments.report.image_tables import image_tables, inference_table, tables_csv
from xkfac.experiments.report.lines import ReportLine, ReportRun, furthest, report_runs, started
from xkfac.experiments.report.summary import columns, summary, summary_csv
from xkfac.experiments.report.tables import counted, render
from xkfac.experiments.report.tradeoff_tables import tradeoff_table, tradeoffs, tradeoffs_csv
from xkfac.experiments.runs.results import RunResults

_FIGURES = "figures"


def write_report(runs: Sequence[RunResults], folder: Path) -> tuple[Path, list[Path]]:
    """Write `report.html` and the folder `figures` of one or several runs, finished or not.

    Returns the paths of the page and of the figures as PNG.
    """
    figures = folder / _FIGURES
    check_path(figures / "accuracies.csv")
    reported = report_runs(runs)
    lines = [line for run in reported for line in run.lines]
    if not any(line.results.jobs for line in lines):
        what = ", ".join(f"'{run.name}'" for run in reported) or "no run at all"
        raise XkfacError(f"there is nothing to report on yet ({what}); wait until the first task is learnt")
    tuned = {run.name: of for run in reported if (of := read_tuned(run.results)) is not None}
    images = {run.name: tables for run in reported if (tables := image_tables(run)) is not None}
    curves = [*filter(None, map(tradeoffs, reported))]
    compared = compare(reported)
    plots = draw_all(reported, figures, curves, {name: of.points for name, of in tuned.items()})
    write_file(figures / "summary.csv", summary_csv(lines).encode())
    if images:
        write_file(figures / "accuracies.csv", tables_csv(images.values()).encode())
    if curves:
        write_file(figures / "areas.csv", tradeoffs_csv(curves).encode())
    methods = {line.line.method for line in lines if line.reference}
    own = "a network of its own for each task"
    page = render(
        "report.html",
        title=" and ".join(dict.fromkeys(run.recipe.title or run.recipe.name for run in runs)),
        described=dict.fromkeys(run.recipe.description for run in runs if run.recipe.description),
        top=_headline(lines),
        runs=[_facts(run) for run in reported],
        tradeoffs=[{"run": found.run, "table": tradeoff_table(found)} for found in curves],
        images={name: tables.shown() for name, tables in images.items()},
        summary=summary(lines),
        columns=[column for column in columns(lines) if "after" not in column.title],
        inferred=inference_table(lines),
        choices=tuned,
        compared=comparison_table(compared) if compared else None,
        hollow=own if methods == {SINGLE} else "joint training, where it was measured",
        plots=plots,
        figures=_FIGURES,
        **_settings(reported),
    )
    write_file(folder / "report.html", page.encode())
    return folder / "report.html", [figures / f"{plot.key}.png" for plot in plots]


def _headline(lines: Sequence[ReportLine]) -> dict[str, Any] | None:
    """Return what the first sentence says: which line keeps most after the most tasks, beside a reference."""
    most = furthest(lines)
    rivals = [line for line in lines if line.final and line.reached == most and line.competes]
    if not rivals:
        return None
    top = max(rivals, key=lambda line: line.averages[most].mean)
    so_far = "So far, after" if most < top.line.tasks or top.notes else "After"
    first = next((line for line in lines if line.reference and most in line.averages), None)
    reference = None
    if first is not None:
        who = "training on all tasks at once" if first.line.method == JOINT else "a network of its own for each"
        reference = who, first.averages[most]
    when = f"{so_far} {most} tasks" if most > 1 else f"{so_far} one task"
    return {"line": top, "when": when, "rivals": len(rivals), "reference": reference}


def _facts(run: ReportRun) -> dict[str, Any]:
    """Return what a run is, how far it is, and where its numbers come from."""
    planned = [line.jobs for line in run.results.lines.values()]
    jobs = [job for of in planned for job in of]
    done = sum(job.done or job.diverged is not None for job in jobs)
    going = sum(started(job) and not job.done and job.diverged is None for job in jobs)
    counts = sorted({*map(len, planned)}) or [0]
    repeats = counted(counts[0], "repeat") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats"
    world = f"{_world(run.recipe)}, {counted(len(run.recipe.lines), 'line')}, {repeats}"
    measure = (run.recipe.images or run.recipe.data).measure
    to_come = f"{going} begun, {len(jobs) - done - going} to come"
    seeds = run.recipe.seeds
    said_seeds = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0])
    return {
        "name": run.name,
        "world": world if measure == "test" else f"{world}, measured on the {measure} split",
        "progress": f"in progress: {done} of {counted(len(jobs), 'job')} done, {to_come}" if done < len(jobs) else "",
        "facts": {"run": run.name, "seeds": said_seeds, **run.results.provenance},
        "recipe": run.recipe.to_toml(),
    }


def _world(recipe: Recipe) -> str:
    """Return what is learnt, in words."""
    if recipe.images is None:
        return recipe.data.set
    source, *targets = recipe.tasks
    orders = len(set(recipe.images.orders))
    how = f", in {orders} orders" if orders > 1 else ""
    return f"{recipe.images.model} at {recipe.images.pixels} pixels, from {source} to {', '.join(targets)}{how}"


def _settings(runs: Iterable[ReportRun]) -> dict[str, Any]:
    """Return the settings that are the same in all lines that have them, if these are several, and those of each."""
    # The recipe's text has the keys that have an effect on a line, and no others.
    tables = [of for run in runs for of in tomllib.loads(run.recipe.to_toml())["lines"].values()]
    apart = ("label", "note")  # these stand above the others
    settings = [{k: write_value(v) for k, v in of.items() if k not in apart and v not in ({}, [])} for of in tables]
    keys = dict.fromkeys(key for of in settings for key in of)
    values = {key: [of[key] for of in settings if key in of] for key in keys}
    common = {key: v[0] for key, v in values.items() if len(set(v)) == 1 and (len(v) > 1 or len(settings) == 1)}
    own = [{key: value for key, value in of.items() if key not in common} for of in settings]
    lines = (line for run in runs for line in run.lines)
    each = [(line, {"name": line.name, **of}) for line, of in zip(lines, own, strict=True)]
    return {"common": common, "lines": each}
