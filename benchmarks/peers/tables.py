"""What was measured, as tables in Markdown and as a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from adapters import PEERS
from conduct import CASES, DEFINITION, Conduct
from growth import Point
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator
from nets import NETS
from resident import PLAIN
from turns import Row

from xkfac.experiments.report.drawing import PALETTE, SOFT, looks, rendered

Cost = dict[str, dict[str, Row]]
Memory = dict[str, dict[str, tuple[float, float | None]]]
TRACES = ("running statistics", "gradients", "training flags", "random state", "attributes and hooks")
LABELS = {"batch": "batch size", "width": "width", "pixels": "resolution", "draws": "label draws", "tasks": "tasks"}


class Notes:
    """Sentences that cells refer to by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, text: str) -> str:
        """Return the mark of a sentence."""
        text = text.replace("<", "&lt;")
        if text not in self.texts:
            self.texts.append(text)
        return f"<sup>{self.texts.index(text) + 1}</sup>"

    def cell(self, value: float | str, form: str = ".2f") -> str:
        """Return a number, or for a sentence its mark."""
        if isinstance(value, float):
            return f"{value:{form}}"
        return "" if not value else value if value == "no Fisher" else f"none{self.number(value)}"

    def unresolved(self, short: float) -> str:
        """Return the cell of a difference that came out as zero or less."""
        return "not resolved" + self.number(
            f"a pass of one batch took {short:.1f} and a longer one no more: this run's noise exceeds a batch"
        )

    def listed(self) -> str:
        """Return the sentences as a list."""
        return "\n".join(f"{number}. {text}" for number, text in enumerate(self.texts, 1))


def name_of(key: str) -> str:
    """Return the two cells that name a row."""
    return f"{PEERS[key].package} | {PEERS[key].row}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [" | ".join(header), "|".join(["---"] * len(" | ".join(header).split("|"))), *(" | ".join(r) for r in rows)]
    return "\n".join(f"| {line} |" if line[0] != "-" else f"|{line}|" for line in lines)


def times(cost: Cost, field: str, notes: Notes) -> str:
    """Return one kind of time for all networks; a refusal of BN in training mode is a note."""

    def one(row: Row) -> str:
        value = getattr(row, field)
        text = notes.cell(value)
        if field == "curvature" and isinstance(value, float) and isinstance(row.fixed, float):
            if value <= 0:  # the two passes differ by less than the machine's noise
                return notes.unresolved(value + row.fixed)
            text += f" (+ {max(row.fixed, 0.0):.1f})"
        if row.mode == "eval" and isinstance(value, float) and field == "curvature":
            return text + notes.number(f"BN in evaluation mode; in training mode: {row.refusal}")
        return text

    keys = list(next(iter(cost.values())))
    rows = [[name_of(key), *(one(cost[net][key]) for net in cost)] for key in keys]
    return markdown(["library | what", *(NETS[net][0] for net in cost)], rows)


def losses(cost: Cost) -> str:
    """Return where another library is better than this one, the worst first: tuned K-FAC rows against our tuned one.

    Defaults are compared with defaults.
    """
    ours = {"xkfac": "one draw", "xkfac-fixed": "one draw", "xkfac-default": "default"}
    found = []
    for net, rows in cost.items():
        for own, word in ours.items():
            peers = [key for key in rows if not key.startswith("xkfac") and PEERS[key].row.startswith("K-FAC")]
            for field in ("curvature", "step", "save", "load", "megabytes") if own in rows else ():
                value = getattr(rows[own], field)
                theirs = {key: getattr(rows[key], field) for key in peers if word in PEERS[key].row}
                numbers = {key: one for key, one in theirs.items() if isinstance(one, float) and one > 0}
                best = min(numbers, key=numbers.__getitem__, default=None)
                if best is not None and isinstance(value, float) and value > numbers[best]:
                    cells = [field, f"{value:.2f}", f"{numbers[best]:.2f}", PEERS[best].package, PEERS[best].row]
                    found.append((value / numbers[best], [NETS[net][0], PEERS[own].row, *cells]))
    rows = [[f"{ratio:.2f}", *cells] for ratio, cells in sorted(found, reverse=True)]
    return markdown(["ours over theirs", "network", "our row", "what", "ours", "theirs", "library", "its row"], rows)


def peaks(memory: Memory, notes: Notes) -> str:
    """Return peak memory over that of a plain pass, of a curvature batch and of a penalised step."""
    keys = [key for key in PEERS if any(key in found for found in memory.values())]

    def one(net: str, key: str) -> str:
        first, step = memory[net].get(key, (None, None))
        plain = memory[net][PLAIN][0]
        return " / ".join("-" if value is None else f"{value / plain:.1f}" for value in (first, step))

    rows = [[name_of(key), *(one(net, key) for net in memory)] for key in keys]
    plains = ["torch | plain pass, MB", *(f"{found[PLAIN][0]:.0f}" for found in memory.values())]
    return markdown(["library | what", *(NETS[net][0] for net in memory)], [plains, *rows])


def saving(cost: Cost, net: str, notes: Notes) -> str:
    """Return the times of saving and loading, and the size, for one network."""
    rows = []
    for key, row in cost[net].items():
        if isinstance(row.curvature, float):
            rows.append([name_of(key), *(notes.cell(getattr(row, field)) for field in ("save", "load"))])
            rows[-1].append(notes.cell(row.megabytes, ".1f"))
    return markdown(["library | what", "save", "load", "MB"], rows)


def traces(conduct: dict[str, Conduct], notes: Notes) -> str:
    """Return what each library says of BN, and what it changes."""
    rows = []
    for key, found in conduct.items():
        if key == DEFINITION:
            continue
        says = found.notices if found.notices == "runs" else f"{said(found.notices)}{notes.number(found.notices)}"
        changed = ["changed" if found.traces.get(trace) else "kept" for trace in TRACES]
        rows.append([name_of(key), says, *(changed if found.traces else [""] * len(TRACES))])
    return markdown(["library | what", "BN in training mode", *TRACES], rows)


def said(notice: str) -> str:
    """Return whether a notice is a warning or a refusal."""
    return "warns" if notice.startswith("warns") else "refuses"


def errors(conduct: dict[str, Conduct], notes: Notes) -> str:
    """Return how far each curvature is from the exact Fisher of a layer, and from K-FAC by its definition."""
    rows = []
    for key, found in conduct.items():
        cells = []
        for name in CASES:
            text = notes.cell(found.error[name])
            drifts = key != DEFINITION and name != "bn" and PEERS[key].row.startswith("K-FAC") and name in found.drift
            cells.append(f"{text} ({found.drift[name]:.2f})" if drifts else text)
        bias = notes.cell(found.bias if isinstance(found.bias, str) else found.bias * 100, ".1f")
        rows.append(["brute force | K-FAC by its definition" if key == DEFINITION else name_of(key), *cells, bias])
    return markdown(["library | what", *(label for label, _ in CASES.values()), "bias in front of a BN, %"], rows)


def growing(points: list[Point]) -> str:
    """Return how the cost of this library grows."""
    header = ["what grows", "to", "plain pass, ms", "curvature batch", "penalised step", "memory file, MB"]
    rows = [
        [
            LABELS[one.what],
            str(one.value),
            f"{one.plain:.1f}",
            f"{one.curvature:.2f}",
            f"{one.step:.2f}",
            f"{one.megabytes:.1f}",
        ]
        for one in points
    ]
    return markdown(header, rows)


def all_tables(results: dict[str, Any]) -> dict[str, str]:
    """Return every table by name, each with the notes that its cells refer to."""
    makers: dict[str, Callable[[Notes], str]] = {}
    if cost := results.get("cost"):
        makers["losses"] = lambda notes: losses(cost)
        makers["curvature"] = lambda notes: times(cost, "curvature", notes)
        makers["step"] = lambda notes: times(cost, "step", notes)
        for net in cost:
            makers[f"file-{net}"] = lambda notes, net=net: saving(cost, net, notes)  # type: ignore[misc]
    if memory := results.get("memory"):
        makers["memory"] = lambda notes: peaks(memory, notes)
    if conduct := results.get("conduct"):
        makers["traces"] = lambda notes: traces(conduct, notes)
        makers["errors"] = lambda notes: errors(conduct, notes)
    if points := results.get("growth"):
        makers["growth"] = lambda notes: growing(points)
    made = {}
    for name, make in makers.items():
        notes = Notes()
        table = make(notes)
        made[name] = f"{table}\n\n{notes.listed()}" if notes.texts else table
    return made


def figure(cost: Cost) -> dict[str, bytes]:
    """Return the times of curvature batches and penalised steps as the files of a figure."""
    keys = list(next(iter(cost.values())))
    parts = (("curvature", "curvature batch"), ("step", "penalised step"))
    with looks(8):
        canvas = Figure(figsize=(3.2 * len(cost) + 2, 7.5), layout="constrained")
        grid = canvas.subplots(len(parts), len(cost), sharey=True, squeeze=False)
        for line, (field, title) in zip(grid, parts, strict=True):
            for axes, net in zip(line, cost, strict=True):
                _bars(axes, {key: getattr(cost[net][key], field) for key in keys})
                axes.set_title(f"{title}\n{NETS[net][0]}")
            labels = [f"{PEERS[key].package}: {PEERS[key].row}" for key in keys]
            line[0].set_yticks(range(len(keys)), labels)
        grid[0][0].invert_yaxis()  # of all plots, which share it
        canvas.supxlabel("times one plain forward and backward pass", color=SOFT)
        return {kind: rendered(canvas, kind) for kind in ("png", "svg")}


def _bars(axes: Axes, values: dict[str, float | str]) -> None:
    """Draw a bar for each number, this library's in colour."""
    axes.set_xscale("log")
    for place, (key, value) in enumerate(values.items()):
        if isinstance(value, float) and value > 0:
            colour = PALETTE[0] if key.startswith("xkfac") else "#b6bec7"
            axes.barh(place, value, color=colour, height=0.72)
            axes.text(value * 1.06, place, f"{value:.1f}" if value < 10 else f"{value:.0f}", va="center", fontsize=7)
        elif value:
            axes.text(1.06, place, "none", va="center", fontsize=7, color=SOFT)
    axes.axvline(1, color=SOFT, linewidth=0.8)
    axes.set_xlim(0.8, 2.2 * max((value for value in values.values() if isinstance(value, float)), default=2.0))
    axes.xaxis.set_major_locator(FixedLocator([1, 2, 5, 10, 20, 50, 100]))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(axis="x")
