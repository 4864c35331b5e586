"""One table of methods that get no task label at test: runs with task-specific or shared BN, joint training, baselines.

    python benchmarks/routing_table.py [--runs RUN...] [--records results/routing/resnet50/joint ...] [--output FOLDER]

RUN: folders of `xkfac run imagenet-to-fine-grained-128 -s images.infer_tasks=true` with three targets; means over their
repeats. Records: folders that `benchmarks/routing.py photographs` and `joint` wrote, with the same network.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from common import keep, provenance

from routing import TREES, routing_table
from xkfac.experiments.runs.results import JobResult
from xkfac.experiments.runs.running import results


def of_job(job: JobResult, by: str) -> dict[str, dict[str, Any]]:
    """Return by task what a job found by features of a kind, tasks in the order of `TREES`; empty if it has none."""
    places = [job.tasks.index(task) for task in TREES]
    found = {}
    for task, place in zip(TREES, places, strict=True):
        entry = job.inference[place]
        of = entry if by == "source" else entry.get("others", {}).get(by)
        if of is None:
            return {}
        ordered = {key: [of[key][one] for one in places] for key in ("taken", "together")}
        found[task] = {"given": entry["given"], "inferred": of["inferred"], **ordered}
    return found


def mean_of(rows: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return the mean over repeats, number by number."""
    found: dict[str, dict[str, Any]] = {}
    for task in TREES:
        several = [row[task] for row in rows]
        found[task] = {key: statistics.fmean(one[key] for one in several) for key in ("given", "inferred")}
        for key in ("taken", "together"):
            found[task][key] = [statistics.fmean(shares) for shares in zip(*(one[key] for one in several), strict=True)]
    return found


def rows_of(run: Path) -> dict[str, Any]:
    """Return by line and kind of features what the jobs of a run found."""
    rows = {}
    for line, of in results(run).lines.items():
        jobs = [job for job in of.jobs if len(job.inference) == len(TREES)]
        for by in ("source", "last", "early"):
            found = [of for job in jobs if (of := of_job(job, by))]
            if found:
                rows[f"{line}, router by {by}"] = mean_of(found)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--records", type=Path, nargs="*", default=[])
    parser.add_argument("--output", type=Path, default=Path("results/routing/table"))
    options = parser.parse_args()
    rows: dict[str, Any] = {}
    for run in options.runs:
        rows |= rows_of(run)
    for record in options.records:
        found = json.loads((record / "results.json").read_text())["results"]
        rows |= {f"{record.name}: {name}": row for name, row in found.get("routing", found).items()}
    keep(options.output, provenance(), rows, routing_table(rows))


if __name__ == "__main__":
    main()
