"""Sweeps: one line at several strengths or learning rates is one line per value, and jobs know nothing of it."""

import pytest

from tests.helpers import made_up_images, small_runs
from xkfac.experiments.recipes.parsing import load_recipe, parse_recipe
from xkfac.experiments.recipes.recipe import RecipeError
from xkfac.experiments.runs.folder import RunFolder

TEXT = """
[defaults]
sweep = [0.1, 3]
grid = { lr = [0.1, 0.2], damping = [1e-4] }
[lines.kfac]
label = "K-FAC"
method = "kfac"
[lines.ewc]
method = "ewc"
sweep = { strength = [10, 1e6] }
[lines.plain]
method = "fine-tuning"
sweep = { lr = [0.5, 1e-5] }
[lines.once]
sweep = []
[lines.single]
method = "single"
grid = {}
[figures.all]
lines = ["kfac", "once"]
"""


def test_each_value_is_a_line_with_its_name_its_label_and_what_it_is_a_point_of():
    made = parse_recipe(TEXT, "mine.toml").lines
    values = {name: (line.label, line.strength, line.lr, line.swept) for name, line in made.items()}
    assert values == {
        "kfac-x0.1": ("K-FAC x0.1", 0.1, 0.1, 0.1),
        "kfac-x3": ("K-FAC x3", 3.0, 0.1, 3.0),
        "ewc-x10": ("ewc x10", 10.0, 0.1, 10.0),
        "ewc-x1e06": ("ewc x1e+06", 1e6, 0.1, 1e6),
        "plain-lr0.5": ("plain lr 0.5", 1.0, 0.5, 0.5),
        "plain-lr1e-05": ("plain lr 1e-05", 1.0, 1e-5, 1e-5),
        "once": ("once", 1.0, 0.1, None),
        "single": ("single", 1.0, 0.1, None),
    }
    assert made["kfac-x3"].sweep == {"line": "kfac", "label": "K-FAC", "key": "strength"}
    assert made["plain-lr0.5"].sweep == {"line": "plain", "label": "plain", "key": "lr"}
    assert made["kfac-x3"].grid == {"lr": [0.1, 0.2], "damping": [1e-4]}
    assert made["plain-lr0.5"].grid == {}, "a learning rate that is swept is not chosen"


def test_the_name_of_a_sweep_stands_for_its_lines():
    made = parse_recipe(TEXT, "mine.toml")
    assert made.figures["all"].lines == ("kfac-x0.1", "kfac-x3", "once")
    assert list(made.only(["plain", "kfac-x3"]).lines) == ["kfac-x3", "plain-lr0.5", "plain-lr1e-05"]


def test_what_a_run_keeps_of_sweeps_is_the_recipe():
    made = parse_recipe(TEXT, "mine.toml")
    assert parse_recipe(made.to_toml(), "other.toml") == made


def test_settings_for_all_lines_change_sweeps_of_the_same_key_alone():
    made = parse_recipe(TEXT, "mine.toml", ["defaults.sweep=[1]", "lines.plain.sweep={ lr = [0.3] }"])
    assert list(made.lines) == ["kfac-x1", "ewc-x1", "plain-lr0.3", "once", "single"]
    without = list(parse_recipe(TEXT, "mine.toml", ["defaults.sweep=[]"]).lines)
    assert without == ["kfac", "ewc", "plain-lr0.5", "plain-lr1e-05", "once", "single"]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("sweep = 3", ["lines.one: sweep is 3", "must be a list of strengths"]),
        ("sweep = { lr = [1], strength = [2] }", ["lines.one: sweep is", "one key with its values"]),
        ("sweep = { lrr = [1] }", ["lines.one: sweep: the key 'lrr' is not known (did you mean 'lr'?)"]),
        ("sweep = { lr = [] }", ["lines.one: sweep must be different numbers of at least 0, not []"]),
        ("sweep = [1, 1]", ["different numbers", "[1.0, 1.0]"]),
        ("sweep = [-1]", ["different numbers of at least 0, not [-1.0]"]),
        ('sweep = ["a"]', ["lines.one: sweep is 'a'; it must be a finite number"]),
        ("sweep = [1]\nstrength = 2", ["gives the values of 'strength', which the line has too; leave one out"]),
        ("sweep = { lr = [1] }\ntarget_lr = 2", ["does not act on targets beside target_lr"]),
        ("sweep = { lr = [1] }\ngrid = { lr = [1] }", ["so does grid.lr; leave one out"]),
        ('sweep = [1]\nmethod = "fine-tuning"', ["lines.one-x1: 'strength' has no effect on method 'fine-tuning'"]),
        ("sweep = [1]\n[lines.one-x1]", ["makes a line 'one-x1', which there is already"]),
        (
            'sweep = { line = "a", label = "A" }',
            ["lines.one: sweep must be the line, label and key of a sweep", "'label': 'A'}"],
        ),
        (
            'sweep = { line = "a", label = "A", key = "batch" }',
            ["lines.one: sweep must be the line", "the key one of strength, lr, not", "'batch'"],
        ),
    ],
)
def test_a_sweep_that_cannot_be_run_as_written_is_refused_in_one_sentence(text, parts):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(f"[lines.one]\n{text}", "mine.toml")
    for part in parts:
        assert part in str(caught.value)


def test_a_point_of_a_sweep_gives_the_numbers_of_a_line_with_that_value(tmp_path):
    short = ("lines.kfac.tasks=2", "lines.kfac.epochs=1")
    made = small_runs.recipe("lines.kfac.sweep=[1, 30]", *short).only(["kfac"])
    plain = small_runs.recipe("lines.kfac.strength=30", *short).only(["kfac"])
    found = {}
    for folder, recipe in (("swept", made), ("plain", plain)):
        run = RunFolder.create(tmp_path / folder, recipe, small_runs.FACTS)
        for name in recipe.lines:
            small_runs.finish(run, name)
            found[folder, name] = run.job(name, 0).result().accuracy
    assert found["swept", "kfac-x30"] == found["plain", "kfac"]
    assert found["swept", "kfac-x1"] != found["plain", "kfac"]


def test_targets_that_no_order_names_are_left_out():
    made = made_up_images.recipe('images.orders=[["cars"]]')
    assert list(made.tasks) == ["old", "cars"]
    assert made.order(made.seed) == made.order(made.seed + 1) == ("old", "cars")
    assert {line.tasks for line in made.lines.values()} == {2}


def test_the_recipe_at_128_pixels_has_every_method_at_five_strengths():
    made = load_recipe("imagenet-to-fine-grained-128")
    sweeps = {}
    for line in made.lines.values():
        if line.sweep:
            sweeps.setdefault(line.sweep["line"], []).append(line.swept)
    assert len(sweeps) >= 12
    assert all(len(set(values)) >= 5 for values in sweeps.values())
    assert made.order(0) == ("imagenet", "cars")
