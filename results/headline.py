"""Every number that README.md and docs/index.md show, read from its record: python results/headline.py writes them.

headline.toml names the numbers and says where each is read. This script reads them, writes headline.json, and puts them
into the pages: a table below `<!-- table NAME -->`, and a number in front of `<!-- NAME -->`. The name of a number in a
table is TABLE/ROW/COLUMN. A number has these keys, some from its row, some from its column, some from the record that
the column names by `of`:

    run = FOLDER or FOLDERS, line     the folder of a run, read by the code of `xkfac report`; with it one of these
                                      (the line "ceiling" is the best one of the method `single` on validation images)
        task = NAME                   accuracy on a task after the last one
        before = NAME                 accuracy of the source network
        kept = NAME, share = NAME     of the source's accuracy before, of a target's ceiling; in %
        average = true                over all tasks; average = N: after N tasks, of the line `also` too, where given
        at = 0.9 or area = true       of the curve of the sweep `line`: share of the ceilings in % at 90% kept, or area
    csv = FILE, line, column          a table that `xkfac report` wrote, of runs that were not kept
    json = FILE, at = PATH            keys joined by /, * for all repeats, {line} for another key
        over = PATH                   medians of times: divided by that one
    digits = N, plain = true          behind the point, 1 unless given; without the deviation
"""

import csv
import functools
import json
import math
import re
import tomllib
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import median

from xkfac.experiments.report.image_tables import ceilings, image_tables
from xkfac.experiments.report.lines import report_runs
from xkfac.experiments.report.tradeoff_tables import in_percent, tradeoffs
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.results import Spread, pooled, spread

RESULTS = Path(__file__).parent
PAGES = [
    RESULTS.parent / "README.md",
    RESULTS.parent / "docs" / "index.md",
    RESULTS.parent / "docs" / "fine-grained.md",
]
READ = ("line", "task", "before", "kept", "share", "average", "at", "area", "column", "over")  # how, beside where
MARK = r"(\d[\d.]*(?: ± [\d.]+)?)(?=<!-- ([\w./-]+) -->)"
TABLE = r"(<!-- table ([\w.-]+) -->\n)\n(?:\|.*\n)*\n*"


@functools.cache
def runs_of(*folders):
    """Return the runs in some folders, those of one recipe as one, as a report has them."""
    return pooled([RunFolder.open(RESULTS / folder).results() for folder in folders])


def from_run(spec):
    """Return mean, deviation and count of a number of a run, and its seeds."""
    folders = [spec["run"]] if isinstance(spec["run"], str) else spec["run"]
    runs = runs_of(*folders)
    if spec.get("average", True) is not True:
        return _after(spec["average"], [run.lines[name].jobs for run in runs for name in _lines(spec) & {*run.lines}])
    for run in runs:
        if "at" in spec or "area" in spec:
            found = tradeoffs(*report_runs([run]))
            curves = {curve.name: curve for curve in found.curves} if found else {}
            if (curve := curves.get(spec["line"])) is not None:
                seeds = sorted({seed for point in curve.points for seed in point.by_seed})
                value = curve.at(spec["at"]) if "at" in spec else curve.area
                return (in_percent(value) if value is not None and "at" in spec else value), seeds
        elif spec["line"] == "ceiling":
            if (top := ceilings(report_runs([run])[0].lines, [spec["task"]]).get(spec["task"])) is not None:
                return spread(list(top.accuracies.values())), sorted(top.accuracies)
        elif spec["line"] in run.lines:
            return _of_line(spec, run), [job.seed for job in run.lines[spec["line"]].jobs if job.accuracy]
    if spec["line"] == "ceiling":  # the source has none
        return None, []
    raise SystemExit(
        f"no run of {folders} has the line '{spec['line']}'; they have {[sorted(run.lines) for run in runs]}"
    )


def _lines(spec):
    return {spec["line"], spec.get("also", spec["line"])}


def _after(tasks, found):
    """Return the spread of averages after so many tasks over jobs that got so far, and their seeds."""
    jobs = [job for jobs in found for job in jobs if len(job.accuracy) >= tasks]
    return spread([job.average_accuracy()[tasks - 1] for job in jobs]), sorted(job.seed for job in jobs)


def _of_line(spec, run):
    line = run.lines[spec["line"]]
    if "before" in spec:
        return spread([job.accuracy[list(job.tasks).index(spec["before"])][0] for job in line.jobs])
    tables = image_tables(*report_runs([run]))
    (own,) = (own for own in tables.lines if own.entry.name == spec["line"])
    if "task" in spec or "average" in spec:
        return own.average if "average" in spec else own.accuracies.get(spec["task"])
    return own.kept if "kept" in spec else own.shares.get(spec["share"])


def from_csv(spec):
    """Return a number of a report's table; nothing for a line that did not learn so many tasks."""
    with (RESULTS / spec["csv"]).open() as file:
        (row,) = (row for row in csv.DictReader(file) if row["line"] == spec["line"])
    number = spec["column"].removeprefix("after_")
    if number.isdecimal() and int(row["tasks"]) < int(number):
        return None
    return Spread(float(row[spec["column"]]), float(row[f"{spec['column']}_deviation"] or "nan"), int(row["repeats"]))


def from_json(spec):
    """Return the spread over what a pointer finds, in times of the median of what another finds."""
    content = json.loads((RESULTS / spec["json"]).read_text())
    found = _values(content, spec["at"].split("/"))
    if "over" in spec:  # as benchmarks compare times: by medians
        return Spread(median(found) / median(_values(content, spec["over"].split("/"))), math.nan, len(found))
    return spread(found)


def _values(content, path):
    if not path:
        return [content]
    if path[0] == "*":
        return [value for one in content for value in _values(one, path[1:])]
    return _values(content[int(path[0]) if isinstance(content, list) else path[0]], path[1:])


def read(spec):
    """Return what headline.json says of a number, or None where there is none."""
    seeds = None
    spec = {key: value.format(**spec) if key == "at" and "json" in spec else value for key, value in spec.items()}
    if "run" in spec:
        value, seeds = from_run(spec)
    else:
        value = from_csv(spec) if "csv" in spec else from_json(spec)
    if value is None:
        return None
    where = next(key for key in ("run", "csv", "json") if key in spec)
    folders = [spec[where]] if isinstance(spec[where], str) else spec[where]
    shown = decimal(value.mean, spec)
    alone = math.isnan(value.deviation)
    return {
        "shown": shown if alone or spec.get("plain") else f"{shown} ± {decimal(value.deviation, spec)}",
        "mean": value.mean,
        "deviation": None if alone else value.deviation,
        "repeats": value.count,
        "seeds": seeds,
        "record": [f"results/{one}" for one in folders],
        "read": {key: spec[key] for key in READ if key in spec},
    }


def decimal(value, spec):
    """Return a number with so many digits, halves rounded up as by hand: 55.15 is 55.2."""
    return str(Decimal(f"{value:.9f}").quantize(Decimal(10) ** -spec.get("digits", 1), ROUND_HALF_UP))


def collect():
    """Return all numbers by name, and the tables by theirs."""
    contents = tomllib.loads((RESULTS / "headline.toml").read_text())
    numbers = {name: read(spec) for name, spec in contents.pop("numbers").items()}
    tables = {}
    for name, table in contents.items():
        columns = table["columns"]
        lines = [["", *(column["title"] for column in columns.values())], ["---"] * (len(columns) + 1)]
        for row, own in table["rows"].items():
            cells = {}
            for key, column in columns.items():
                of = column.get("of", "line")
                if of in own:  # otherwise the row has nothing in this column
                    cells[key] = read({**table["records"][of], **column, **own, "line": own[of]})
            numbers |= {f"{name}/{row}/{key}": value for key, value in cells.items() if value is not None}
            shown = ((cells.get(key) or {"shown": ""})["shown"] for key in columns)
            lines.append([own["label"], *shown])
        tables[name] = "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("|  |", "| |")
    return numbers, tables


def as_text(numbers):
    """Return headline.json: one number per line."""
    lines = (f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in numbers.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def filled(text, numbers, tables):
    """Return a page with its tables and marked numbers as they are read."""
    text = re.sub(TABLE, lambda found: f"{found[1]}\n{tables[found[2]]}\n", text)
    return re.sub(MARK, lambda found: numbers[found[2]]["shown"], text)


def main():
    """Write headline.json and the pages."""
    numbers, tables = collect()
    (RESULTS / "headline.json").write_text(as_text(numbers))
    for page in PAGES:
        page.write_text(filled(page.read_text(), numbers, tables))


if __name__ == "__main__":
    main()
