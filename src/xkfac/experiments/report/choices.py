"""What a tuning chose, as its folder holds it: the choices with their reasons, and what every setting reached."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xkfac.errors import XkfacError
from xkfac.experiments.files import LARGEST_RECORD, read_json, reason
from xkfac.experiments.report.tables import Cell, Row, Table
from xkfac.experiments.runs.results import RunResults
from xkfac.experiments.tuning.trials import CHOICE_COLUMNS, ChoiceEntry, Point
from xkfac.plain_values import from_plain


@dataclass(frozen=True)
class Tuned:
    """What the tuning of a run left: rows of choices under `CHOICE_COLUMNS`, and test accuracies of all settings."""

    rows: Sequence[Sequence[str]]
    points: Sequence[Point]

    def table(self) -> Table:
        """Return what was chosen as a table."""
        caption = "The setting that was chosen, its accuracy, that of the next best, and the reason."
        rows = [Row(label, [Cell(cell) for cell in cells]) for label, *cells in self.rows]
        return Table("Table of choices", caption, CHOICE_COLUMNS, [rows], words=("task", "runner-up", "why"))


def read_tuned(run: RunResults) -> Tuned | None:
    """Return what the tunings of a run, and of those pooled with it, have chosen; None where nothing is chosen yet."""
    if "tuning" not in run.provenance:
        return None
    rows: list[list[str]] = []
    points: list[Point] = []
    for folder in map(Path, (run.folder, *run.others)):
        for entry in _entries(folder / "choices.json", ChoiceEntry):
            name, *cells = entry.cells()
            line = run.recipe.lines.get(name)
            rows.append([line.label if line is not None and line.label else name, *cells])
        points += _entries(folder / "points.json", Point)
    order = {label: place for place, label in enumerate(dict.fromkeys(row[0] for row in rows))}
    rows.sort(key=lambda row: (order[row[0]], int(row[1])))
    return Tuned(rows, points) if rows else None


def _entries(path: Path, kind: Any) -> list[Any]:
    try:
        found = from_plain(list[Any], read_json(path, LARGEST_RECORD), "it")
        return [from_plain(kind, entry, f"entry {number}") for number, entry in enumerate(found, 1)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        why = reason(error)
        raise XkfacError(f"'{path}' cannot be read ({why}); 'xkfac resume {path.parent}' writes it anew") from None
