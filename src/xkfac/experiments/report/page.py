"""The report of an experiment: one page that needs nothing but itself, and the files of its figures beside it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from xkfac.errors import XkfacError
from xkfac.experiments.files import check_path
from xkfac.experiments.recipes.recipe import JOINT, SINGLE, Recipe
from xkfac.experiments.report.choices import choices_html, read_tuned
from xkfac.experiments.report.comparison import compare, comparison_table
from xkfac.experiments.report.drawing import Plot, write_file
from xkfac.experiments.report.figures import draw_all
from xkfac.experiments.report.image_tables import (
    ImageTables,
    accuracy_table,
    image_tables,
    inference_table,
    share_table,
    tables_csv,
)
from xkfac.experiments.report.markup import counted, spread_text, text
from xkfac.experiments.report.summary import summary
from xkfac.experiments.report.tables import ReportLine, columns, entries, furthest, run_names, started, summary_csv
from xkfac.experiments.report.tradeoff_tables import Tradeoffs, tradeoff_table, tradeoffs, tradeoffs_csv
from xkfac.experiments.runs.results import RunResults

_FIGURES = "figures"
_SHOWN_APART = ("label", "note")  # settings of a line that stand above the others


def write_report(runs: Sequence[RunResults], folder: Path) -> tuple[Path, list[Path]]:
    """Write `report.html` and the folder `figures` of one or several runs, finished or not.

    Returns the paths of the page and of the figures as PNG.

    Raises XkfacError when there are no runs, none has measured anything, or the folder cannot be written.
    """
    check_path(folder / _FIGURES / "accuracies.csv")
    lines = entries(runs)
    if not any(line.results.jobs for line in lines):
        what = ", ".join(f"'{name}'" for name in run_names(runs)) or "no run at all"
        raise XkfacError(f"there is nothing to report on yet ({what}); wait until the first task is learnt")
    names = run_names(runs)
    tuned = {name: of for run, name in zip(runs, names, strict=True) if (of := read_tuned(run)) is not None}
    drawn = draw_all(runs, folder / _FIGURES, {name: of.points for name, of in tuned.items()})
    write_file(folder / _FIGURES / "summary.csv", summary_csv(lines).encode())
    images = {name: of for name, of in zip(names, image_tables(runs), strict=True) if of is not None}
    if images:
        write_file(folder / _FIGURES / "accuracies.csv", tables_csv(images.values()).encode())
    curves = tradeoffs(runs)
    if curves:
        write_file(folder / _FIGURES / "areas.csv", tradeoffs_csv(curves).encode())
    title = _title(runs)
    body = [
        _header(title, runs, lines, bool(tuned)),
        _results(lines, images, curves),
        choices_html(tuned),
        _side_by_side(runs),
        _figures(drawn, lines),
        _lines(runs, lines),
        *(_origin(position, runs[position], name, len(runs) > 1) for position, name in enumerate(names)),
        "</main>",
    ]
    template = Template(resources.files("xkfac.experiments.report").joinpath("report.html").read_text(encoding="utf-8"))
    page = template.substitute(title=text(title), body="\n".join(filter(None, body)))
    write_file(folder / "report.html", page.encode())
    return folder / "report.html", [folder / _FIGURES / f"{plot.key}.png" for plot in drawn]


def _title(runs: Sequence[RunResults]) -> str:
    return " and ".join(dict.fromkeys(run.recipe.title or run.recipe.name for run in runs))


def _header(title: str, runs: Sequence[RunResults], lines: Sequence[ReportLine], tuned: bool) -> str:
    described = dict.fromkeys(run.recipe.description for run in runs if run.recipe.description)
    links = {"results": "Results", **({"choices": "What was chosen"} if tuned else {})}
    links |= {"figures": "Figures", "lines": "The lines", "origin": "Where it comes from"}
    parts = [
        f"<header>\n<h1>{text(title)}</h1>",
        *(f"<p>{text(said)}</p>" for said in described),
        _headline(lines),
        _state(runs),
        "<nav aria-label='Contents'>" + "".join(f'<a href="#{to}">{said}</a>' for to, said in links.items()) + "</nav>",
        "</header>\n<main>",
    ]
    return "\n".join(filter(None, parts))


def _headline(lines: Sequence[ReportLine]) -> str:
    """Return the result in one sentence: which line keeps most after the most tasks."""
    most = furthest(lines)
    rivals = [e for e in lines if e.final and e.reached == most and not e.reference and not e.diverged]
    if not rivals:
        return ""
    top = max(rivals, key=lambda line: line.averages[most].mean)
    tasks = f"{most} tasks" if most > 1 else "one task"
    so_far = "So far, after" if most < top.line.tasks or top.notes else "After"
    said = f"{so_far} {tasks}, <b>{text(top.label)}</b> is at {spread_text(top.final)}% on average"
    if len(rivals) > 1:
        said += f", the best of {len(rivals)} lines"
    first = next((line for line in lines if line.reference and most in line.averages), None)
    if first is not None:
        who = "training on all tasks at once" if first.line.method == JOINT else "a network of its own for each"
        said += f"; {who} reaches {spread_text(first.averages[most])}%"
    return f'<p class="lead">{said}.</p>'


def _state(runs: Sequence[RunResults]) -> str:
    """Return how far the runs are, as a list of facts."""
    items = []
    for run, name in zip(runs, run_names(runs), strict=True):
        jobs = [job for line in run.lines.values() for job in line.jobs]
        total = len(jobs)
        done = sum(job.done or job.diverged is not None for job in jobs)
        going = sum(started(job) and not job.done and job.diverged is None for job in jobs)
        before = f"{text(name)}: " if len(runs) > 1 else ""
        counts = sorted({len(line.jobs) for line in run.lines.values()}) or [0]
        repeats = counted(counts[0], "repeat") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats"
        data = f"{text(_world(run.recipe))}, {counted(len(run.recipe.lines), 'line')}, {repeats}"
        measure = (run.recipe.images or run.recipe.data).measure
        if measure != "test":
            data += f", measured on the {measure} split"
        items.append(f"<li>{before}{data}</li>")
        if done < total:
            waiting = total - done - going
            items.append(
                f'<li><span class="warn">{before}in progress: {done} of {counted(total, "job")} done, {going} begun, '
                f"{waiting} to come</span></li>"
            )
    return '<ul class="facts">' + "".join(items) + "</ul>"


def _world(recipe: Recipe) -> str:
    """Return what is learnt, in words."""
    if recipe.images is None:
        return recipe.data.set
    source, *targets = recipe.tasks
    orders = len(set(recipe.images.orders))
    how = f", in {orders} orders" if orders > 1 else ""
    return f"{recipe.images.model} at {recipe.images.pixels} pixels, from {source} to {', '.join(targets)}{how}"


def _results(lines: Sequence[ReportLine], images: Mapping[str, ImageTables], curves: Sequence[Tradeoffs]) -> str:
    """Return the section of results: trade-offs of sweeps, accuracies of tasks by name, the course over tasks."""
    parts = ['<section id="results">\n<h2>Results</h2>']
    for found in curves:
        parts += [f"<h3>{text(found.run)}</h3>"] if len(curves) > 1 else []
        parts.append(tradeoff_table(found).html())
    if curves:
        parts.append(_csv("areas", "Trade-offs as CSV"))
    for name, tables in images.items():
        parts += [f"<h3>{text(name)}</h3>"] if len(images) > 1 else []
        parts.append(accuracy_table(tables).html())
        parts += [share_table(tables).html()] if tables.learnt else []
    if images:
        parts += [_csv("accuracies", "These tables as CSV"), "<h3>Over the tasks</h3>"]
    shown = [column for column in columns(lines) if "after" not in column.title]
    meanings = "".join(f"<dt>{text(column.title)}</dt><dd>{text(column.hint)}.</dd>" for column in shown)
    parts += [
        summary(lines).html(),
        f'<details><summary>What the columns mean</summary><dl class="meanings soft">{meanings}</dl></details>',
        _csv("summary", "The table as CSV"),
    ]
    inferred = inference_table(lines)
    return "\n".join((*parts, inferred.html() if inferred.blocks[0] else "", "</section>"))


def _csv(name: str, said: str) -> str:
    return f'<p class="files"><a href="{_FIGURES}/{name}.csv">{said}</a></p>'


def _side_by_side(runs: Sequence[RunResults]) -> str:
    compared = compare(runs)
    if not compared:
        return ""
    return f'<section id="compared">\n<h2>Side by side</h2>\n{comparison_table(compared).html()}\n</section>'


def _figures(drawn: Sequence[Plot], lines: Sequence[ReportLine]) -> str:
    methods = {line.line.method for line in lines if line.reference}
    hollow = "a network of its own for each task" if methods == {SINGLE} else "joint training, where it was measured"
    said = (
        "Means over repeats, with bands of one standard deviation. Solid lines: XK-FAC; dashed: K-FAC; dotted: a "
        f"diagonal; dash-dotted: no penalty; hollow markers: {hollow}. A cross is where a repeat diverged; from there "
        "on the mean is of those left. Numbers beside a name are where its line ends."
    )
    return (
        f'<section id="figures">\n<h2>Figures</h2>\n<p class="soft">{said}</p>\n'
        + "\n".join(map(_figure, drawn))
        + "\n</section>"
    )


def _figure(plot: Plot) -> str:
    note = f"<p>{text(plot.note)}</p>" if plot.note else ""
    links = " · ".join(f'<a href="{_FIGURES}/{plot.key}.{kind}">{kind.upper()}</a>' for kind in ("png", "svg", "csv"))
    return (
        f'<figure id="figure-{plot.key}">\n<figcaption><h3>{text(plot.title)}</h3>{note}</figcaption>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="Figure">{plot.element}</div>\n'
        f'<p class="files">This figure as {links}</p>\n</figure>'
    )


def _lines(runs: Sequence[RunResults], lines: Sequence[ReportLine]) -> str:
    """Return what each line is: what all have in common once, then what sets each apart."""
    # The recipe's text has the keys that have an effect on a line, and no others.
    settings = [_settings(of) for run in runs for of in tomllib.loads(run.recipe.to_toml())["lines"].values()]
    common = _common(settings)
    items = "\n".join(_line(line, of, common) for line, of in zip(lines, settings, strict=True))
    return (
        '<section id="lines">\n<h2>The lines</h2>\n<p class="soft">All have in common, where it applies:</p>\n'
        f'{_definitions(common)}\n<p class="soft" style="margin-top: 1.5rem">What sets each apart:</p>\n'
        f'<ul class="lines">\n{items}\n</ul>\n</section>'
    )


def _settings(line: Mapping[str, Any]) -> dict[str, str]:
    return {key: _plain(value) for key, value in line.items() if key not in _SHOWN_APART and value not in ({}, [])}


def _common(settings: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the settings that are the same in all lines that have them, if these are several."""
    keys = dict.fromkeys(key for of in settings for key in of)
    values = {key: [of[key] for of in settings if key in of] for key in keys}
    return {key: v[0] for key, v in values.items() if len(set(v)) == 1 and (len(v) > 1 or len(settings) == 1)}


def _line(entry: ReportLine, settings: Mapping[str, str], common: Mapping[str, str]) -> str:
    note = f"<p>{text(entry.line.note)}</p>" if entry.line.note else ""
    remarks = "".join(f'<p><span class="warn">{text(said)}</span></p>' for said in entry.notes)
    own = {key: value for key, value in settings.items() if key not in common}
    return f"<li><h3>{text(entry.label)}</h3>{note}{remarks}{_definitions({'name': entry.name, **own})}</li>"


def _definitions(settings: Mapping[str, str]) -> str:
    pairs = (f"<div><dt>{text(key)}</dt><dd>{text(value)}</dd></div>" for key, value in settings.items())
    return '<dl class="settings">' + "".join(pairs) + "</dl>"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {_plain(item)}" for key, item in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(_plain, value))
    return str(value)


def _origin(position: int, run: RunResults, name: str, several: bool) -> str:
    """Return where a run's numbers come from: its provenance and its recipe."""
    seeds = run.recipe.seeds
    facts: dict[str, Any] = {
        "run": name,
        "seeds": f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0]),
        **run.provenance,
    }
    rows = "\n".join(
        f'<tr><th scope="row">{text(key)}</th><td>{_fact(value)}</td></tr>' for key, value in facts.items()
    )
    title = f"Where it comes from: {text(name)}" if several else "Where it comes from"
    return (
        f'<section id="origin{"-" + str(position) if position else ""}">\n'
        f'<h2>{title}</h2>\n<table class="facts-table"><caption>As the run noted it</caption><tbody>\n'
        f"{rows}\n</tbody></table>\n"
        f"<details><summary>The recipe, every key written out</summary>\n<pre>{text(run.recipe.to_toml())}</pre>"
        "</details>\n</section>"
    )


def _fact(value: Any) -> str:
    if isinstance(value, Mapping | list | tuple):
        return f"<code>{text(json.dumps(value, indent=1, ensure_ascii=False, default=str))}</code>"
    return text(value)
