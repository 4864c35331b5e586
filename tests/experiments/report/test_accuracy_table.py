# ruff: noqa: RUF001, the letters and dashes that readers of the paper expect
"""The table of methods by tasks, against the paper's own numbers and against rows worked out by hand."""

from dataclasses import replace
from html.parser import HTMLParser
from statistics import fmean

from xkfac.experiments.recipes.recipe import Line
from xkfac.experiments.report.image_tables import ImageTables, LineNumbers, accuracy_table
from xkfac.experiments.report.lines import ReportLine
from xkfac.experiments.runs.results import JobResult, LineResults, spread

TASKS = ("ImageNet", "Birds", "Cars", "Flowers")
# Table 1 of the paper: method, adaptive alpha, accuracies.
PAPER = [
    ("XK-FAC", True, (66.57, 80.30, 88.07, 92.56)),
    ("Fixed BN", False, (29.21, 67.05, 74.24, 74.20)),
    ("K-FAC", False, (50.37, 70.49, 85.98, 88.45)),
    ("XK-FAC", False, (61.15, 78.97, 85.91, 91.84)),
    ("Fixed BN", True, (49.57, 76.24, 84.94, 81.30)),
    ("K-FAC", True, (65.31, 80.09, 87.35, 92.14)),
]
METHODS = {"XK-FAC": "xkfac", "Fixed BN": "fixed-bn", "K-FAC": "kfac", "joint": "single"}


def paper_rows():
    return [row(method, balance=alpha, **dict(zip(TASKS, of, strict=True))) for method, alpha, of in PAPER]


def row(label="a", *, balance=False, diverged=0, **accuracies):
    """A line of which each task has one accuracy; some of its repeats diverged at their second task."""
    jobs = [JobResult(label, seed, accuracy=[[1.0]], diverged=1, done=True) for seed in range(diverged)]
    jobs += [JobResult(label, 9, accuracy=[[1.0]], done=True)]
    line = Line(method=METHODS.get(label, "xkfac"), balance=balance)
    entry = ReportLine(0, "run", label, label, line, LineResults(label, jobs), len(jobs), images=True)
    average = spread([fmean(accuracies.values())]) if accuracies else None
    return LineNumbers(entry, {task: spread([value]) for task, value in accuracies.items()}, average, None, {})


def table(*rows):
    return accuracy_table(ImageTables("source", rows))


def cells(*rows):
    """The heads and the cells of a table, as a terminal shows them."""
    heads, lines = table(*rows).texts()
    return [heads, *lines]


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
    repeats = replace(row(x=1.0), accuracies={"x": spread([70.0, 72.0])}, average=spread([75.0, 75.0]))
    assert cells(repeats)[1][4:] == ["71.00 ± 1.41", "75.00 ± 0.00"]
    assert cells(row(x=70.0))[1][4:] == ["70.00", "70.00"]


def test_diverged_repeats_are_named_and_do_not_compete():
    lines = cells(row("lost", x=99.0, diverged=1), row("b", x=70.0), row("c", x=60.0))
    assert lines[0][-1] == "notes"
    assert lines[1] == ["lost", "✓", "✓", "", "99.00", "99.00", "diverged at task 2 (1 of 2 repeats)"]
    assert lines[2][4] == "70.00 *"
    assert cells(row("b", x=70.0), row("gone"))[2][4:] == ["–", "–"]


def test_references_do_not_compete_and_equals_share_the_mark():
    lines = cells(row("joint", x=90.0), row("a", x=70.001), row("b", x=70.004), row("c", x=1.0))
    assert [line[4:] for line in lines[1:]] == [["90.00"] * 2, ["70.00 *"] * 2, ["70.00 *"] * 2, ["1.00"] * 2]
    assert cells(row("a", x=70.001), row("b", x=70.004))[1][4:] == ["70.00"] * 2  # nothing to be better than
    assert cells(row("a", x=70.0))[1][4:] == ["70.00"] * 2


def test_tasks_that_a_method_did_not_learn_are_empty():
    lines = cells(row("a", x=70.0), row("b", y=60.0))
    assert lines[0][4:] == ["x", "y", "average"]
    assert (lines[1][4:6], lines[2][4:6]) == (["70.00", "–"], ["–", "60.00"])


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
    read = Cells(table(*paper_rows()).html())
    assert read.open == []
    assert [len(body) for body in read.bodies] == [3, 3]
    assert read.bodies[0][2][:4] == ["XK-FAC", "✓", "✓", ""]
    assert read.bodies[0][1][6] == "85.98 (best)"
    assert read.bold == {(0, 1, 6), *((0, 2, k) for k in (4, 5, 7, 8)), *((1, 0, k) for k in range(4, 9))}


def test_names_are_no_markup():
    odd = table(row("a|b <i> c", **{"x|<y>\nz": 50.0}))
    assert odd.texts()[0][4] == "x|<y> z"
    assert Cells(odd.html()).bodies[0][0][0] == "a|b <i> c"
    assert "<y>" not in odd.html()
