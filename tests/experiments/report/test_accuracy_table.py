# ruff: noqa: RUF001, the letters and dashes that readers of the paper expect
"""The table of methods by tasks, against the paper's own numbers and against rows worked out by hand."""

import math
import re
from html.parser import HTMLParser
from statistics import fmean

import pytest

from xkfac.errors import XkfacError
from xkfac.experiments.report.accuracy_table import AccuracyRow, as_html, as_text
from xkfac.experiments.runs.results import spread

TASKS = ("ImageNet", "Birds", "Cars", "Flowers")
# Table 1 of the paper: method, active BN, valid curvature, adaptive alpha, accuracies.
PAPER = [
    ("XK-FAC", True, True, True, (66.57, 80.30, 88.07, 92.56)),
    ("Fixed BN", False, True, False, (29.21, 67.05, 74.24, 74.20)),
    ("K-FAC", True, False, False, (50.37, 70.49, 85.98, 88.45)),
    ("XK-FAC", True, True, False, (61.15, 78.97, 85.91, 91.84)),
    ("Fixed BN", False, True, True, (49.57, 76.24, 84.94, 81.30)),
    ("K-FAC", True, False, True, (65.31, 80.09, 87.35, 92.14)),
]


def paper_rows():
    return [
        row(method, active_bn=active, valid_curvature=valid, balanced=alpha, **dict(zip(TASKS, of, strict=True)))
        for method, active, valid, alpha, of in PAPER
    ]


def row(method="a", *, active_bn=True, valid_curvature=True, balanced=False, reference=False, diverged=0, **accuracies):
    found = {task: spread([value]) for task, value in accuracies.items()}
    average = spread([fmean(accuracies.values())]) if accuracies else None
    return AccuracyRow(method, active_bn, valid_curvature, balanced, found, average, reference, diverged)


def cells(*rows):
    """The cells of a table by its lines, as a terminal shows them; all columns are wider than the space between."""
    head, *lines = as_text(rows).splitlines()
    starts = [match.start() for match in re.finditer(r"(?<=  )\S|^\S", head)]
    ends = [*starts[1:], 1000]
    return [[line[i:j].strip() for i, j in zip(starts, ends, strict=True)] for line in (head, *lines)]


def test_the_paper_s_table_comes_out_as_it_is_printed():
    lines = cells(*paper_rows())
    assert lines[0] == ["method", "active BN", "valid curvature", "adaptive α", *TASKS, "average"]
    body = lines[1:4] + lines[5:]
    assert [line[0] for line in body] == ["Fixed BN", "K-FAC", "XK-FAC", "XK-FAC", "Fixed BN", "K-FAC"]
    assert body[2] == ["XK-FAC", "✓", "✓", "", "61.15 *", "78.97 *", "85.91", "91.84 *", "79.47 *"]
    assert body[1] == ["K-FAC", "✓", "", "", "50.37", "70.49", "85.98 *", "88.45", "73.82"]
    assert body[0][1:4] == ["", "✓", ""]
    # The block with alpha has marks of its own, all of them XK-FAC's.
    assert body[3] == ["XK-FAC", "✓", "✓", "✓", "66.57 *", "80.30 *", "88.07 *", "92.56 *", "81.88 *"]
    assert all("*" not in cell for line in body[4:] for cell in line)


def test_deviations_are_shown_where_there_are_several_repeats():
    repeats = AccuracyRow("m", True, True, False, {"x": spread([70.0, 72.0])}, spread([75.0, 75.0]))
    assert "71.00 ± 1.41" in as_text([repeats])
    assert "71.0 ± 1.4 " in as_text([repeats], digits=1)
    assert "±" not in as_text([row(x=70.0)])


def test_diverged_repeats_are_named_and_do_not_compete():
    lines = cells(row("lost", x=99.0, diverged=1), row("b", x=70.0), row("c", x=60.0))
    assert lines[1] == ["lost (1 diverged)", "✓", "✓", "", "99.00", "99.00"]
    assert lines[2][4] == "70.00 *"
    assert cells(row("b", x=70.0), row("gone"))[2][4:] == ["–", "–"]
    assert cells(row("b", x=70.0), row("gone", x=math.inf))[2][4:] == ["–", "–"]


def test_references_do_not_compete_and_equals_share_the_mark():
    text = as_text([row("joint", x=90.0, reference=True), row("a", x=70.001), row("b", x=70.004), row("c", x=1.0)])
    assert text.count("70.00 *") == 4  # two rows, task and average
    assert "90.00 *" not in text
    assert "*" not in as_text([row("a", x=70.001), row("b", x=70.004)])  # nothing to be better than
    assert "*" not in as_text([row("a", x=70.0)])


def test_tasks_that_a_method_did_not_learn_are_empty():
    lines = cells(row("a", x=70.0), row("b", y=60.0))
    assert lines[0][4:] == ["x", "y", "average"]
    assert (lines[1][4:6], lines[2][4:6]) == (["70.00", "–"], ["–", "60.00"])


def test_text_has_its_columns_in_line_and_a_star_at_the_best():
    lines = as_text(paper_rows()).splitlines()
    assert len(lines) == 1 + 3 + 1 + 3
    assert lines[4] == ""
    start = lines[0].index("Cars")
    assert lines[2][start:].startswith("85.98 *")
    assert lines[3][start:].startswith("85.91  ")
    assert sum(line.count("*") for line in lines) == 5 + 5


class Cells(HTMLParser):
    """Reads the bodies of a table: for each row its cells' texts, and which are bold."""

    def __init__(self, text):
        super().__init__()
        self.bodies, self.open, self.bold = [], [], set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        if tag == "tbody":
            self.bodies.append([])
        elif tag == "tr" and self.bodies:
            self.bodies[-1].append([])
        elif tag in ("td", "th") and self.bodies:
            self.bodies[-1][-1].append("")
        elif tag == "b":
            place = self.bodies[-1][-1]
            self.bold.add((len(self.bodies) - 1, len(self.bodies[-1]) - 1, len(place) - 1))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.bodies and "tr" in self.open:
            self.bodies[-1][-1][-1] += data


def test_html_has_a_body_a_block_and_the_same_marks():
    read = Cells(as_html(paper_rows()))
    assert read.open == []
    assert [len(body) for body in read.bodies] == [3, 3]
    assert read.bodies[0][2][:4] == ["XK-FAC", "✓ yes", "✓ yes", "no"]
    assert read.bodies[0][1][6] == "85.98 (best)"
    assert read.bold == {(0, 1, 6), *((0, 2, k) for k in (4, 5, 7, 8)), *((1, 0, k) for k in range(4, 9))}


def test_names_are_no_markup():
    odd = row("a|b <i>\nc", **{"x|<y>": 50.0})
    assert as_text([odd]).startswith("method ")
    assert as_text([odd]).splitlines()[1].startswith("a|b <i> c ")
    read = Cells(as_html([odd]))
    assert read.bodies[0][0][0] == "a|b <i> c"
    assert "<y>" not in as_html([odd])


def test_what_is_no_table_is_refused():
    for view in (as_text, as_html):
        with pytest.raises(XkfacError, match="at least one row"):
            view([])
