# ruff: noqa: RUF001, the letters and dashes that readers of the paper expect
"""The table of methods by tasks, against the paper's own numbers and against rows worked out by hand."""

import math
from html.parser import HTMLParser

import pytest

from xkfac.errors import XkfacError
from xkfac.experiments.report.accuracy_table import AccuracyRow, as_html, as_markdown, as_text
from xkfac.experiments.runs.results import Spread

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
FACTS = {"active_bn": True, "valid_curvature": True, "balanced": False}


def paper_rows():
    return [
        AccuracyRow.of(
            method, [dict(zip(TASKS, of, strict=True))], active_bn=active, valid_curvature=valid, balanced=alpha
        )
        for method, active, valid, alpha, of in PAPER
    ]


def row(method="a", **accuracies):
    return AccuracyRow.of(method, [accuracies], **FACTS)


def markdown_cells(text):
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]


def test_the_paper_s_table_comes_out_as_it_is_printed():
    lines = markdown_cells(as_markdown(paper_rows()))
    assert lines[0] == ["method", "active BN", "valid curvature", "adaptive α", *TASKS, "average"]
    body = lines[2:5] + lines[6:]
    assert [line[0] for line in body] == ["Fixed BN", "K-FAC", "XK-FAC", "XK-FAC", "Fixed BN", "K-FAC"]
    assert body[2] == ["XK-FAC", "✓", "✓", "", "**61.15**", "**78.97**", "85.91", "**91.84**", "**79.47**"]
    assert body[1] == ["K-FAC", "✓", "", "", "50.37", "70.49", "**85.98**", "88.45", "73.82"]
    assert body[0][1:4] == ["", "✓", ""]
    # The block with alpha has marks of its own, all of them XK-FAC's.
    assert body[3] == ["XK-FAC", "✓", "✓", "✓", "**66.57**", "**80.30**", "**88.07**", "**92.56**", "**81.88**"]
    assert all("**" not in cell for line in body[4:] for cell in line)
    assert {len(line) for line in lines} == {9}


def test_mean_and_deviation_are_those_of_the_repeats_and_the_average_that_of_each_repeat():
    # The averages of the repeats are 75 and 75: the deviations of the tasks cancel.
    made = AccuracyRow.of("m", [{"x": 70.0, "y": 80.0}, {"x": 72.0, "y": 78.0}], **FACTS)
    assert made.accuracies["x"] == Spread(71.0, pytest.approx(math.sqrt(2)), 2)
    assert made.average == Spread(75.0, 0.0, 2)
    assert "71.00 ± 1.41" in as_markdown([made])
    assert "71.0 ± 1.4 " in as_text([made], digits=1)
    single = row(x=70.0)
    assert math.isnan(single.average.deviation)
    assert "±" not in as_text([single])


def test_diverged_repeats_are_named_and_do_not_compete():
    lost = AccuracyRow.of("lost", [{"x": 99.0}, {"x": math.nan}], **FACTS)
    assert (lost.diverged, lost.accuracies["x"].mean, lost.average.count) == (1, 99.0, 1)
    text = as_markdown([lost, row("b", x=70.0), row("c", x=60.0)])
    assert "| lost (1 diverged) | ✓ | ✓ |  | 99.00 | 99.00 |" in text
    assert "**70.00**" in text
    nothing = AccuracyRow.of("gone", [{"x": math.inf}], **FACTS)
    assert markdown_cells(as_markdown([row("b", x=70.0), nothing]))[3][4:] == ["–", "–"]


def test_references_do_not_compete_and_equals_share_the_mark():
    joint = AccuracyRow.of("joint", [{"x": 90.0}], **FACTS, reference=True)
    text = as_markdown([joint, row("a", x=70.001), row("b", x=70.004), row("c", x=1.0)])
    assert text.count("**70.00**") == 4  # two rows, task and average
    assert "**90" not in text
    assert "**" not in as_markdown([row("a", x=70.001), row("b", x=70.004)])  # nothing to be better than
    assert "**" not in as_markdown([row("a", x=70.0)])


def test_tasks_that_a_method_did_not_learn_are_empty():
    lines = markdown_cells(as_markdown([row("a", x=70.0), row("b", y=60.0)]))
    assert lines[0][4:] == ["x", "y", "average"]
    assert (lines[2][4:6], lines[3][4:6]) == (["70.00", "–"], ["–", "60.00"])


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
    assert "a\\|b <i> c" in as_markdown([odd])
    assert as_markdown([odd]).count("\n") == 3
    read = Cells(as_html([odd]))
    assert read.bodies[0][0][0] == "a|b <i> c"
    assert "<y>" not in as_html([odd])


def test_what_is_no_table_is_refused():
    for view in (as_markdown, as_text, as_html):
        with pytest.raises(XkfacError, match="at least one row"):
            view([])
    with pytest.raises(XkfacError, match="repeats of 'm' have different tasks"):
        AccuracyRow.of("m", [{"x": 1.0}, {"y": 1.0}], **FACTS)
