# ruff: noqa: RUF001, the letters and dashes that readers of the paper expect
"""The tables of runs of images against numbers that are worked out by hand.

In `made_up.images` the ceilings are 60, 50, 80 and 40 plus the seed. A line is 4 points below them on a target when it
has learnt it, and loses `loss` points on every task with each that comes after. Birds are first and flowers last in the
repeat of seed 0, the other way round in that of seed 1.
"""

import csv
import io
import math
import sys
from dataclasses import replace

import pytest

from tests.helpers import made_up
from xkfac import cli
from xkfac.experiments.recipes.recipe import Line, Task
from xkfac.experiments.report import figures, image_tables, multiples
from xkfac.experiments.report.drawing import Plot
from xkfac.experiments.report.lines import report_runs
from xkfac.experiments.report.summary import columns
from xkfac.experiments.runs.results import JobResult, Spread, pooled

ROOT2 = math.sqrt(2)


def found(*jobs, **options):
    return tables_of(made_up.images(*jobs, **options))


def tables_of(run):
    return image_tables.image_tables(*report_runs([run]))


def spread(one, other):
    return Spread((one + other) / 2, pytest.approx(abs(one - other) / ROOT2), 2)


def by_label(made):
    return {of.entry.label: of for of in made.lines}


# ---------------------------------------------------------------- accuracies


def test_final_accuracies_stand_under_the_names_of_their_tasks_whatever_the_order():
    row = by_label(found())["K-FAC"]
    assert list(row.accuracies) == ["tiny", "birds", "cars", "flowers"]
    # 5 points a task. tiny: 60 - 15, 61 - 15; birds: 46 - 10, then last of all, 47; flowers the other way round.
    assert row.accuracies["tiny"] == spread(45, 46)
    assert row.accuracies["birds"] == spread(36, 47)
    assert row.accuracies["cars"] == spread(71, 72)
    assert row.accuracies["flowers"] == spread(36, 27)
    assert row.average == spread((45 + 36 + 71 + 36) / 4, (46 + 47 + 72 + 27) / 4)


def test_what_lines_do_to_bn_curvature_and_alpha():
    rows = by_label(found())
    facts = {name: image_tables.facts_of(row.entry.line) for name, row in rows.items()}
    assert facts == {
        "a network of its own": (True, False, False),
        "fine-tuning": (True, False, False),
        "fixed BN": (False, True, False),
        "K-FAC": (True, False, False),
        "XK-FAC": (True, True, False),
        "XK-FAC, alpha": (True, True, True),
    }
    assert [name for name, row in rows.items() if row.entry.reference] == ["a network of its own"]


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        (Line(method="kfac", fixed_bn=True), (False, True, False)),
        (Line(method="xkfac", fixed_bn=True, balance=True), (False, True, True)),
        (Line(method="xkfac", curvature={"statistics": "population"}), (True, False, False)),
        (Line(method="ewc"), (True, True, False)),
        (Line(method="corrected"), (True, True, False)),
        (Line(method="fine-tuning", fixed_bn=True), (False, False, False)),
    ],
)
def test_facts_of_other_lines(line, facts):
    assert image_tables.facts_of(line) == facts


def test_repeats_that_are_not_at_the_end_do_not_count_and_are_named():
    jobs = [made_up.image_job("xkfac", 0), made_up.image_job("xkfac", 1, tasks=2, done=False)]
    lost = replace(made_up.image_job("kfac", 1, tasks=3), diverged=3)
    made = found(*jobs, made_up.image_job("kfac", 0), lost)
    rows = by_label(made)
    assert rows["XK-FAC"].accuracies["tiny"].count == rows["K-FAC"].accuracies["tiny"].count == 1
    assert rows["XK-FAC"].entry.notes == ("2 of 4 tasks so far",)
    assert rows["K-FAC"].entry.notes == ("diverged at task 4 (1 of 2 repeats)",)
    assert (rows["fixed BN"].average, rows["fixed BN"].entry.notes) == (None, ("not started",))
    assert [of.entry.label for of in made.learnt] == ["K-FAC", "XK-FAC"]
    _, texts = image_tables.accuracy_table(made).texts()
    assert next(line for line in texts if line and line[0] == "fixed BN")[-1] == "not started"
    assert image_tables.share_table(made).heads == ["line", "tiny kept"]  # no ceilings yet
    assert "diverged at task 4" in image_tables.accuracy_table(made).html()


def test_before_the_first_repeat_is_at_its_end_there_are_no_tables():
    waiting = made_up.images(made_up.image_job("xkfac", 0, tasks=3, done=False))
    assert [*map(image_tables.image_tables, report_runs([waiting, made_up.small()]))] == [None, None]


def test_a_line_that_leaves_tasks_out_has_no_average_where_repeats_left_out_others():
    text = made_up.IMAGES.replace("[lines.xkfac]", "[lines.xkfac]\ntasks = 2")
    jobs = [made_up.image_job("xkfac", seed, order=made_up.ORDERS[seed][:2], tasks=2) for seed in (0, 1)]
    singles = [made_up.image_job("single", seed, loss=0.0) for seed in (0, 1)]
    made = found(*jobs, *singles, text=text)
    row = by_label(made)["XK-FAC"]
    means = {task: value.mean for task, value in row.accuracies.items()}
    assert means == {"tiny": 59.5, "birds": 50.0, "flowers": 41.0}
    assert row.accuracies["birds"].count == 1
    assert row.average is None
    assert made.learnt[0].shares["cars"] is None
    assert made.learnt[0].shares["flowers"].mean == 100


# ---------------------------------------------------------------- shares


def test_shares_are_of_the_source_network_and_of_the_ceilings_with_the_same_seed():
    rows = {row.entry.label: row for row in found().learnt}
    assert list(rows) == ["fine-tuning", "fixed BN", "K-FAC", "XK-FAC", "XK-FAC, alpha"]
    row = rows["K-FAC"]
    assert row.kept.mean == pytest.approx((100 * 45 / 60 + 100 * 46 / 61) / 2)
    assert row.kept.deviation == pytest.approx((100 * 46 / 61 - 100 * 45 / 60) / ROOT2)
    assert row.shares["birds"].mean == pytest.approx((100 * 36 / 50 + 100 * 47 / 51) / 2)
    assert row.shares["flowers"].mean == pytest.approx((100 * 36 / 40 + 100 * 27 / 41) / 2)
    assert row.shares["birds"].deviation == pytest.approx((100 * 47 / 51 - 100 * 36 / 50) / ROOT2)


def test_a_repeat_without_a_ceiling_of_its_seed_has_the_share_of_the_mean_ceiling_as_in_the_trade_off():
    jobs = [made_up.image_job("xkfac", seed, below=5.0) for seed in (0, 1)]
    row = found(*jobs, made_up.image_job("single", 0, loss=0.0)).learnt[0]
    assert row.kept.count == row.shares["cars"].count == 2
    assert row.shares["cars"].mean == pytest.approx((100 * 74 / 80 + 100 * 75 / 80) / 2)


def test_the_csv_has_every_number_in_full():
    rows = list(csv.DictReader(io.StringIO(image_tables.tables_csv([found()]))))
    xkfac = {(row["what"], row["task"]): row for row in rows if row["line"] == "xkfac"}
    assert len(xkfac) == 4 + 1 + 1 + 3
    kept = xkfac["kept", "tiny"]
    assert float(kept["mean"]) == pytest.approx((100 * 54 / 60 + 100 * 55 / 61) / 2)
    assert (kept["run"], kept["label"], kept["repeats"]) == ("images", "XK-FAC", "2")
    assert (kept["active_bn"], kept["valid_curvature"], kept["balanced"]) == ("1", "1", "0")
    assert float(xkfac["average accuracy", ""]["mean"]) == 52
    assert {row["what"] for row in rows if row["line"] == "single"} == {"accuracy", "average accuracy"}


# ---------------------------------------------------------------- the other tables and figures


def test_a_network_of_its_own_is_a_reference_everywhere():
    lines = {line.name: line for line in report_runs([made_up.images()])[0].lines}
    shown = {column.title: column.value for column in columns(list(lines.values()))}
    assert lines["single"].reference
    assert lines["single"].final == spread(57.5, 58.5)
    assert {shown[name](lines["single"]) for name in ("forgetting", "backward transfer", "as learnt")} == {None}
    assert shown["forgetting"](lines["kfac"]).mean == 10
    assert "forward transfer" not in shown  # untrained heads say nothing of what is known before a task is learnt


def test_what_was_known_from_the_start_is_not_read_as_learnt():
    job = JobResult("l", 0, accuracy=[[60.0], [55.0, 40.0]], before=[7.0], untrained=[60.0, 2.0, 3.0])
    assert (job.known, job.forward_transfer()) == (1, 5.0)
    assert JobResult("l", 0, accuracy=[[60.0]], untrained=[60.0, 2.0]).forward_transfer() is None


def test_final_is_by_name_and_there_at_the_end_alone():
    assert made_up.image_job("l", 1, loss=0.0).final() == {"tiny": 61, "flowers": 41, "cars": 81, "birds": 51}
    assert made_up.image_job("l", tasks=3).final() is None
    assert replace(made_up.image_job("l"), diverged=3).final() is None
    assert JobResult("l", 0, accuracy=[[1.0]]).final() is None


def matrix_axes(run, monkeypatch, tmp_path):
    kept = []
    saved = multiples.multiples.__globals__["save"]
    monkeypatch.setitem(
        multiples.multiples.__globals__, "save", lambda canvas, *rest: kept.append(canvas) or saved(canvas, *rest)
    )
    lines = [entry for entry in report_runs([run])[0].lines if entry.reached and not entry.reference]
    drawn = multiples.draw_matrices("matrices", lines, tmp_path)
    return drawn, kept[0].axes[0]


def ticks(axes):
    return [label.get_text() for label in axes.get_xticklabels()]


def test_heat_maps_name_tasks_where_all_repeats_have_one_order(tmp_path, monkeypatch):
    jobs = [made_up.image_job("xkfac", seed, order=made_up.ORDERS[0]) for seed in (0, 1)]
    drawn, axes = matrix_axes(made_up.images(*jobs), monkeypatch, tmp_path)
    assert ticks(axes) == [label.get_text() for label in axes.get_yticklabels()] == list(made_up.ORDERS[0])
    assert "places in the order" not in drawn.note
    with (tmp_path / "matrices.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["after_task"], row["task"], row["name"]) for row in rows[:3]] == [
        ("1", "1", "tiny"),
        ("2", "1", "tiny"),
        ("2", "2", "birds"),
    ]


def test_heat_maps_of_several_orders_have_places(tmp_path, monkeypatch):
    drawn, axes = matrix_axes(made_up.images(), monkeypatch, tmp_path)
    assert ticks(axes) == ["1", "2", "3", "4"]
    assert "places in the order" in drawn.note
    assert "name" not in drawn.header


def test_permutations_keep_their_numbers():
    run = made_up.small()
    lines = {
        name: replace(line, jobs=[replace(job, tasks=[f"permutation {i}" for i in range(10)]) for job in line.jobs])
        for name, line in run.lines.items()
    }
    assert all(entry.order is None for entry in report_runs([replace(run, lines=lines)])[0].lines)


def test_ceilings_forget_nothing_in_figures(tmp_path, monkeypatch):
    for other in ("draw_matrices", "draw_training"):  # which other tests draw
        monkeypatch.setattr(figures, other, lambda key, *_: Plot(key, "", "", "", (), ()))
    drawn = {figure.key: figure for figure in figures.draw_all(report_runs([made_up.images()]), tmp_path)}
    labels = {key: {row[1] for row in drawn[key].rows} for key in ("accuracy", "accuracy-forgetting")}
    assert labels["accuracy"] - labels["accuracy-forgetting"] == {"a network of its own"}


# ---------------------------------------------------------------- pooling


def other_seeds():
    return made_up.images(
        *(made_up.image_job("xkfac", seed) for seed in (2, 3)),
        text=made_up.IMAGES.replace("repeats = 2", "repeats = 2\nseed = 2"),
        folder="runs/others",
    )


def test_runs_of_the_same_images_with_other_seeds_are_pooled():
    (one,) = pooled([made_up.images(), other_seeds()])
    assert [job.seed for job in one.lines["xkfac"].jobs] == [0, 1, 2, 3]
    assert (one.folder, one.others) == ("runs/images", ("runs/others",))
    row = by_label(tables_of(one))["XK-FAC"]
    assert row.accuracies["tiny"].mean == (54 + 55 + 59 + 60) / 4


@pytest.mark.parametrize("what", ["images", "tasks", "tuning"])
def test_runs_of_other_images_or_tasks_or_tuned_ones_are_not(what):
    other = other_seeds()
    recipe = other.recipe
    if what == "images":
        other = replace(other, recipe=replace(recipe, images=replace(recipe.images, pixels=32)))
    elif what == "tasks":
        other = replace(other, recipe=replace(recipe, tasks={**recipe.tasks, "cars": Task("other.zip")}))
    else:
        other = replace(other, provenance={**other.provenance, "tuning": {}})
    assert len(pooled([made_up.images(), other])) == 2


# ---------------------------------------------------------------- the command


def test_the_command_shows_the_table_of_a_run_of_images(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("xkfac.experiments.report.page.draw_all", lambda *_: [])
    run = made_up.write(made_up.images(), tmp_path / "run")
    assert run.results().lines["kfac"].jobs[1].final() == made_up.image_job("kfac", 1, loss=5.0, below=4.0).final()
    monkeypatch.setattr(sys, "argv", ["xkfac", "report", str(run.path), "-o", str(tmp_path / "report")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "method active BN valid curvature adaptive α tiny birds cars flowers average"
    kfac = next(line for line in lines if line.startswith("K-FAC"))
    assert kfac.split()[:2] == ["K-FAC", "✓"]
    assert "45.50 ± 0.71" in kfac
    best = next(line for line in lines if line.startswith("XK-FAC ") and "*" in line)
    assert best.count("*") == 5
    assert "line" in next(line for line in lines if "tiny kept" in line)
    assert (
        f"{(100 * 54 / 60 + 100 * 55 / 61) / 2:.1f} ± 0.1" in lines[[line[:7] for line in lines].index("XK-FAC ", 10)]
    )
    assert lines[-1] == f"report: {tmp_path / 'report' / 'report.html'}"


# ---------------------------------------------------------------- inferred tasks


def with_inference(line, seed):
    """A job of images whose tasks are inferred right in 90, 91, ... % of the images, by the name of the task."""
    job = made_up.image_job(line, seed)
    names = sorted(job.tasks)
    inference = []
    for task in job.tasks:
        right = 90.0 + names.index(task) + seed
        taken = [right if other == task else (100 - right) / 3 for other in job.tasks]
        inference.append({"given": 50.0 + seed, "inferred": 40.0, "taken": taken})
    return replace(job, inference=inference)


def test_inferred_tasks_stand_under_their_names_whatever_the_order():
    run = made_up.images(*(with_inference("kfac", seed) for seed in (0, 1)), made_up.image_job("xkfac", 0))
    html = image_tables.inference_table(report_runs([run])[0].lines).html()
    rows = html.split("<tr>")
    assert len(rows) == 2 + 4  # the heads, and the tasks of the one line that has task-specific layers
    (cars,) = (row for row in rows if "K-FAC: cars" in row)
    cells = [cell.partition("&nbsp;")[0] for cell in cars.split("<td>")[1:]]
    heads = rows[1].split('<th scope="col">')[4:]
    assert [head.partition("<")[0] for head in heads] == [f"taken for {name}" for name in made_up.ORDERS[0]]
    assert [cell.partition("<")[0] for cell in cells] == ["50.5", "40.0", "2.8", "2.8", "91.5", "2.8"]


def test_many_tasks_are_inferred_in_one_row_per_line_and_none_without_task_specific_layers():
    assert image_tables.inference_table(report_runs([made_up.images()])[0].lines).blocks == [[]]
    job = with_inference("kfac", 0)
    many = [f"task {place}" for place in range(13)]
    taken = [[100.0 if row == column else 0.0 for column in range(13)] for row in range(13)]
    taken[0][0] = 87.0
    inference = [{"given": 90.0, "inferred": 80.0, "taken": row} for row in taken]
    run = made_up.images(replace(job, tasks=many, inference=inference))
    html = image_tables.inference_table(report_runs([run])[0].lines).html()
    assert html.count("<tr>") == 2
    assert "task inferred right" in html
    assert "<td>99.0" in html
