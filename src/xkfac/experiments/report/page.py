"""The report of an experiment: one page that needs nothing but itself, and the files of its figures beside it."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from xkfac.errors import XkfacError
from xkfac.experiments.files import check_path
from xkfac.experiments.recipes.recipe import JOINT, SINGLE, Recipe
from xkfac.experiments.report.choices import choices_html, read_tuned
from xkfac.experiments.report.comparison import Comparison, compare
from xkfac.experiments.report.drawing import Drawn, Key, Panel, Scale, write_file
from xkfac.experiments.report.figures import draw_all
from xkfac.experiments.report.image_tables import ImageTables, image_tables, inference_html, tables_csv, tables_html
from xkfac.experiments.report.markup import column_heads, counted, marked, spread_text, table, table_row, text
from xkfac.experiments.report.styles import style_of, swatch
from xkfac.experiments.report.tables import (
    NOTHING,
    Column,
    ReportLine,
    SummaryRow,
    best,
    columns,
    notes,
    run_names,
    started,
    summary,
    summary_csv,
)
from xkfac.experiments.report.tradeoff_tables import Tradeoffs, tradeoffs, tradeoffs_csv, tradeoffs_html
from xkfac.experiments.runs.results import RunResults

_FIGURES = "figures"
_SHOWN_APART = ("label", "note")  # settings of a line that stand above the others


def write_report(runs: Sequence[RunResults], folder: Path) -> Path:
    """Write `report.html` and the folder `figures` of one or several runs, finished or not; return the page's path.

    Raises XkfacError when there are no runs, none has measured anything, or the folder cannot be written.
    """
    check_path(folder / _FIGURES / "accuracies.csv")
    rows = summary(runs)
    if not any(row.reached or row.entry.results.jobs for row in rows):
        what = ", ".join(f"'{name}'" for name in run_names(runs)) or "no run at all"
        raise XkfacError(f"there is nothing to report on yet ({what}); wait until the first task is learnt")
    tuned = {name: of for run, name in zip(runs, run_names(runs), strict=True) if (of := read_tuned(run)) is not None}
    drawn = draw_all(runs, folder / _FIGURES, {name: of.points for name, of in tuned.items()})
    write_file(folder / _FIGURES / "summary.csv", summary_csv(rows).encode())
    images = {name: of for name, of in zip(run_names(runs), image_tables(runs), strict=True) if of is not None}
    if images:
        write_file(folder / _FIGURES / "accuracies.csv", tables_csv(images.values()).encode())
    curves = tradeoffs(runs)
    if curves:
        write_file(folder / _FIGURES / "areas.csv", tradeoffs_csv(curves).encode())
    title = _title(runs)
    body = [
        _header(title, runs, rows, bool(tuned)),
        _results(rows, images, curves),
        choices_html(tuned),
        _side_by_side(runs),
        _figures(drawn, rows),
        _lines(runs, rows),
        *(_origin(position, runs[position], name, len(runs) > 1) for position, name in enumerate(run_names(runs))),
        "</main>",
    ]
    template = Template(resources.files("xkfac.experiments.report").joinpath("report.html").read_text(encoding="utf-8"))
    page = template.substitute(title=text(title), hover=_hover(len(rows)), body="\n".join(filter(None, body)))
    write_file(folder / "report.html", page.encode())
    return folder / "report.html"


def _hover(count: int) -> str:
    """Return rules by which a name in a legend, pointed at, makes the other lines of its figure step back."""
    return "\n".join(
        f".plot:has(.key-{i}:hover) :is(.series, .band):not(.series-{i}, .band-{i}) {{ opacity: 0.12; }}"
        for i in range(count)
    )


def _title(runs: Sequence[RunResults]) -> str:
    return " and ".join(dict.fromkeys(run.recipe.title or run.recipe.name for run in runs))


def _header(title: str, runs: Sequence[RunResults], rows: Sequence[SummaryRow], tuned: bool) -> str:
    described = dict.fromkeys(run.recipe.description for run in runs if run.recipe.description)
    links = {"results": "Results", **({"choices": "What was chosen"} if tuned else {})}
    links |= {"figures": "Figures", "lines": "The lines", "origin": "Where it comes from"}
    parts = [
        f"<header>\n<h1>{text(title)}</h1>",
        *(f"<p>{text(said)}</p>" for said in described),
        _headline(rows),
        _state(runs),
        "<nav aria-label='Contents'>" + "".join(f'<a href="#{to}">{said}</a>' for to, said in links.items()) + "</nav>",
        "</header>\n<main>",
    ]
    return "\n".join(filter(None, parts))


def _headline(rows: Sequence[SummaryRow]) -> str:
    """Return the result in one sentence: which line keeps most after the most tasks."""
    most = max((row.reached for row in rows), default=0)
    rivals = [r for r in rows if r.final and r.reached == most and not r.entry.reference and not r.entry.diverged]
    if not rivals:
        return ""
    top = max(rivals, key=lambda row: row.final.mean if row.final else -math.inf)
    tasks = f"{most} tasks" if most > 1 else "one task"
    so_far = "So far, after" if most < top.tasks or top.notes else "After"
    said = f"{so_far} {tasks}, <b>{text(top.label)}</b> is at {spread_text(top.final)}% on average"
    if len(rivals) > 1:
        said += f", the best of {len(rivals)} lines"
    references = [row for row in rows if row.entry.reference and most in dict(row.at) | {row.reached: row.final}]
    if references:
        first = references[0]
        who = "training on all tasks at once" if first.entry.line.method == JOINT else "a network of its own for each"
        said += f"; {who} reaches {spread_text(first.final if first.reached == most else first.at[most])}%"
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


def _results(rows: Sequence[SummaryRow], images: Mapping[str, ImageTables], curves: Sequence[Tradeoffs]) -> str:
    """Return the section of results: trade-offs of sweeps, accuracies of tasks by name, the course over tasks."""
    parts = ['<section id="results">\n<h2>Results</h2>']
    for found in curves:
        parts += [f"<h3>{text(found.run)}</h3>"] if len(curves) > 1 else []
        parts.append(tradeoffs_html(found))
    if curves:
        parts.append(f'<p class="files"><a href="{_FIGURES}/areas.csv">Trade-offs as CSV</a></p>')
    for name, tables in images.items():
        parts += [f"<h3>{text(name)}</h3>"] if len(images) > 1 else []
        parts.append(tables_html(tables))
    if images:
        parts.append(f'<p class="files"><a href="{_FIGURES}/accuracies.csv">These tables as CSV</a></p>')
        parts.append("<h3>Over the tasks</h3>")
    return "\n".join((*parts, _summary(rows), inference_html([row.entry for row in rows]), "</section>"))


def _summary(rows: Sequence[SummaryRow]) -> str:
    shown = columns(rows)
    marks = [best(column, rows) for column in shown]
    most = max((row.reached for row in rows), default=0)
    head = "".join(f'<th scope="col" title="{text(c.hint)}">{text(c.title)}</th>' for c in shown)
    body = (_result_row(position, row, shown, marks, most) for position, row in enumerate(rows))
    caption = (
        "Average accuracy in % on the tasks learnt so far, after so many tasks, and how it comes about; mean ± one "
        "standard deviation over repeats. The best of a column is bold; references, lines that diverged and lines "
        "with fewer tasks do not take part."
    )
    meanings = "".join(f"<dt>{text(c.title)}</dt><dd>{text(c.hint)}.</dd>" for c in shown if "after" not in c.title)
    return (
        table("Table of results", caption, f'<th scope="col">line</th>{head}', body)
        + f'\n<details><summary>What the columns mean</summary><dl class="meanings soft">{meanings}</dl></details>\n'
        f'<p class="files"><a href="{_FIGURES}/summary.csv">The table as CSV</a></p>'
    )


def _result_row(position: int, row: SummaryRow, shown: Sequence[Column], marks: Sequence[set[int]], most: int) -> str:
    cells = []
    for column, won in zip(shown, marks, strict=True):
        cell = marked(spread_text(column.value(row), column.digits), position in won)
        if column.title == f"after {most}" and 0 < row.reached < most:
            cell += f'<br><span class="soft">after {row.reached}</span>'
        cells.append(cell)
    return table_row(text(row.label), cells, row.notes, reference=row.entry.reference)


def _side_by_side(runs: Sequence[RunResults]) -> str:
    compared = compare(runs)
    if not compared:
        return ""
    names = ("line", "tasks", "first run", "second run", "difference", "standard error", "95% interval")
    caption = (
        "Average accuracy in % of the lines that several runs have, after as many tasks as both reached; differences "
        "in points, second less first, with Welch's confidence interval. Those whose interval excludes zero are bold."
    )
    shown = table("Table of differences", caption, column_heads(names), map(_comparison_row, compared))
    return f'<section id="compared">\n<h2>Side by side</h2>\n{shown}\n</section>'


def _comparison_row(row: Comparison) -> str:
    def signed(value: float) -> str:
        return NOTHING if math.isnan(value) else f"{value:+.2f}".replace("-", "−")  # noqa: RUF001

    clear = row.low > 0 or row.high < 0
    difference = f"<b>{signed(row.difference)}</b>" if clear else signed(row.difference)
    error = NOTHING if math.isnan(row.error) else f"{row.error:.2f}"
    interval = NOTHING if math.isnan(row.low) else f"{signed(row.low)} to {signed(row.high)}"
    runs = f'<span class="soft">{text(row.runs[1])} against {text(row.runs[0])}</span>'
    cells = (str(row.tasks), spread_text(row.first), spread_text(row.second), difference, error, interval)
    return table_row(text(row.label) + runs, cells)


def _figures(drawn: Sequence[Drawn], rows: Sequence[SummaryRow]) -> str:
    methods = {row.entry.line.method for row in rows if row.entry.reference}
    hollow = "a network of its own for each task" if methods == {SINGLE} else "joint training, where it was measured"
    said = (
        "Means over repeats, with bands of one standard deviation. Solid lines: XK-FAC; dashed: K-FAC; dotted: a "
        f"diagonal; dash-dotted: no penalty; hollow markers: {hollow}. A cross is where a repeat diverged; from there "
        "on the mean is of those left. Numbers beside a name are where its line ends; point at a name to see its line "
        "alone."
    )
    return (
        f'<section id="figures">\n<h2>Figures</h2>\n<p class="soft">{said}</p>\n'
        + "\n".join(map(_figure, drawn))
        + "\n</section>"
    )


def _figure(figure: Drawn) -> str:
    note = f"<p>{text(figure.note)}</p>" if figure.note else ""
    inner = _curves(figure) if figure.kind == "curves" else _multiples(figure)
    links = " · ".join(
        f'<a href="{_FIGURES}/{path.name}">{path.suffix[1:].upper()}</a>'
        for path in (figure.png, figure.svg, figure.csv)
    )
    kind = "curves" if figure.kind == "curves" else "multi"
    return (
        f'<figure id="figure-{figure.key}" class="{kind}">\n'
        f"<figcaption><h3>{text(figure.title)}</h3>{note}</figcaption>\n{inner}\n"
        f'<p class="files">This figure as {links}</p>\n</figure>'
    )


def _curves(figure: Drawn) -> str:
    panels = "\n".join(map(_panel, figure.panels))
    return f'<div class="plot"><div>\n{panels}\n</div>{_legend(figure.legend)}</div>'


def _panel(panel: Panel) -> str:
    title = f"<h4>{text(panel.title)}</h4>" if panel.title else ""
    wide, narrow = f'<div class="wide">{panel.wide}</div>', f'<div class="narrow">{panel.narrow}</div>'
    return f'<div class="panel">{title}{wide}\n{narrow}</div>'


def _legend(keys: Iterable[Key], kind: str = "legend") -> str:
    items = []
    for key in keys:
        note = f'<span class="warn">{text(key.note)}</span>' if key.note else ""
        value = f'<span class="value">{text(key.value)}</span>' if key.value else ""
        name = f' class="key-{key.series.rpartition("-")[2]}"' if key.series else ""
        items.append(f'<li{name}>{key.swatch}<span class="name">{text(key.label)}</span>{value}{note}</li>')
    return f'<ul class="{kind}">\n' + "\n".join(items) + "\n</ul>"


def _multiples(figure: Drawn) -> str:
    few = len(figure.panels) <= 3
    least = ("min(42%, 15rem)" if few else "9.5rem") if figure.kind == "matrices" else "min(100%, 20rem)"
    panels = "\n".join(f"<div><h4>{text(panel.title)}</h4>{panel.wide}</div>" for panel in figure.panels)
    legend = _legend(figure.legend, "legend row") if figure.legend else ""
    if figure.scale is not None:
        legend += _scale(figure.scale)
    return f'{legend}<div class="multiples" style="--least: {least}">\n{panels}\n</div>'


def _scale(scale: Scale) -> str:
    ticks = "".join(f'<span style="left: {100 * at:.1f}%">{tick:g}%</span>' for tick, at in scale.ticks.items())
    bar = f'<i style="background: linear-gradient(to right, {", ".join(scale.colours)})"></i>'
    return f'<div class="scale" role="img" aria-label="Colour scale of accuracy">{bar}{ticks}</div>'


def _lines(runs: Sequence[RunResults], rows: Sequence[SummaryRow]) -> str:
    """Return what each line is: what all have in common once, then what sets each apart."""
    # The recipe's text has the keys that have an effect on a line, and no others.
    settings = [_settings(of) for run in runs for of in tomllib.loads(run.recipe.to_toml())["lines"].values()]
    common = _common(settings)
    items = "\n".join(_line(row.entry, of, common) for row, of in zip(rows, settings, strict=True))
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
    remarks = "".join(f'<p><span class="warn">{text(said)}</span></p>' for said in notes(entry))
    own = {key: value for key, value in settings.items() if key not in common}
    sample = swatch(style_of(entry.index, entry.hue, entry.line))
    return (
        f"<li><h3>{sample}<span>{text(entry.label)}</span></h3>{note}{remarks}"
        f"{_definitions({'name': entry.name, **own})}</li>"
    )


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
