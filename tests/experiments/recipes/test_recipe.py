"""Recipes: what is written is what is run; whatever cannot be is one sentence that names the place and the remedy."""

import dataclasses
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkfac import METHODS
from xkfac.experiments.recipes.parsing import load_recipe, named_recipes, parse_recipe
from xkfac.experiments.recipes.recipe import (
    JOINT,
    Data,
    Figure,
    Images,
    Line,
    Recipe,
    RecipeError,
    Task,
    without_effect,
)

ONE = "[lines.one]\n"


def refused(text, *parts, changes=()):
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "mine.toml", changes)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def line(text, **others):
    return parse_recipe(ONE + text, "mine.toml", **others).lines["one"]


def test_every_default_is_that_of_the_class_and_the_label_is_the_name():
    made = parse_recipe(ONE, "folder/mine.toml")
    assert made.lines == {"one": Line(label="one")}
    assert (made.name, made.data, made.repeats, made.seeds) == ("mine", Data(), 1, range(1))
    assert made.figures == {"accuracy": Figure("Average accuracy", lines=("one",))}


FOR_IMAGES = ("head_epochs", "own")


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(Line) if field.name not in FOR_IMAGES])
def test_each_key_of_a_line_refuses_a_value_of_another_type(key):
    wrong = '"text"' if key in ("curvature", "widths", "at") else "[{ a = 1 }]"
    method = {"at": f'method = "{JOINT}"\n', "balance_every": "balance = true\n"}.get(key, "")
    refused(f"{ONE}{method}{key} = {wrong}", "lines.one", key, "must be")
    refused(f"{ONE}[defaults]\n{key} = {wrong}", "defaults", key, "must be")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("epoch = 3", ["lines.one", "'epoch'", "did you mean 'epochs'?"]),
        ('method = "joint"\nown = ["6"]', ["lines.one", "'own' has no effect on method 'joint'"]),
        ("head_epochs = 1", ["lines.one", "'head_epochs' has no effect on tasks that share one head"]),
        ('norm = "batch"', ["lines.one: norm", "bn, brn, none"]),
        ('norm = "BN"', ["norm is 'BN'"]),
        ('method = "xkfak"', ["lines.one", "did you mean 'xkfac'?"]),
        ("epochs = 2.5", ["epochs is 2.5", "a whole number"]),
        ("epochs = true", ["epochs is True", "a whole number"]),
        ("lr = true", ["lr is True", "a number"]),
        ("early_stopping = 1", ["early_stopping is 1", "true or false"]),
        ("widths = 16", ["widths is 16", "a list"]),
        ("widths = [16, 2.5]", ["widths", "2.5", "a whole number"]),
        ("widths = [16, 0]", ["widths must be up to 100 numbers, each at least 1 and at most 65,536, not [16, 0]"]),
        ("tasks = 0", ["tasks must be at least 1"]),
        ("epochs = 0", ["epochs must be at least 1"]),
        ("batch = 1", ["batch must be at least 2"]),
        ("lr = -0.1", ["lr must be a finite number of at least 0"]),
        ("lr = nan", ["lr must be a finite number of at least 0"]),
        ("damping = inf", ["damping must be a finite number of at least 0"]),
        ("lr_factor = nan", ["lr_factor must be a number of at least 1"]),
        ("lr_factor = 0.5", ["lr_factor must be a number of at least 1"]),
        ("lr_every = 0", ["lr_every must be at least 1"]),
        ("label_smoothing = 2", ["lines.one: label_smoothing must be a number of at least 0 and below 1, not 2.0"]),
        ("label_smoothing = -0.1", ["label_smoothing must be a number of at least 0 and below 1"]),
        ("momentum = 1", ["momentum must be a number of at least 0 and below 1, not 1.0"]),
        ('own = ["6"]\nhead_epochs = -1', ["lines.one: head_epochs must be at least 0", "not -1"]),
        ("tasks = 1000000000000", ["tasks must be at least 1 and at most 10,000, not 1000000000000"]),
        ("epochs = 1000000000000", ["epochs must be at least 1 and at most 1,000,000"]),
        ("widths = [1000000000]", ["each at least 1 and at most 65,536, not [1000000000]"]),
        (f"widths = {[1] * 101}", ["widths must be up to 100 numbers"]),
        ("batch = 1000000000000", ["batch must be at least 2 and at most 1,000,000,000"]),
        ("curvature = { draws = 1000000000 }", ["lines.one: curvature.draws must be at most 1,000,000"]),
        (f"lr = {10**400}", ["'mine.toml' holds a whole number of more than 64 bits; give a smaller one"]),
        (f"epochs = {hex(16**5000)}", ["'mine.toml' holds a whole number of more than 64 bits"]),
        (f"epochs = {'1' * 5000}", ["'mine.toml' is not valid TOML"]),
        (f"lr = {'[' * 30}{']' * 30}", ["'mine.toml' is nested too deeply"]),
        (f"lr = {'[' * 100_000}", ["'mine.toml' is nested too deeply: a recipe needs no more than 16 levels"]),
        (f"lr = {'{ a = ' * 100_000}", ["'mine.toml' is nested too deeply"]),
        (f"note = {[1] * 9999}", ["note is [1, 1, ", "…", "it must be a text"]),
        ("average = 2", ["early_stopping", "average=2", "choose one"]),
        ("early_stopping = false\nepochs = 3\naverage = 4", ["average=4 is more than the 3 epochs"]),
        ("average = -1\nearly_stopping = false", ["average must be at least 0"]),
        ("at = [2]", ["'at' has no effect on method 'xkfac'", "'joint'"]),
        ('method = "joint"\ntasks = 3\nat = [4]', ["'at' must be growing numbers of tasks from 1 to 3"]),
        ('method = "joint"\ntasks = 3\nat = [3, 1]', ["'at' must be growing"]),
        ('method = "joint"\ntasks = 3\nat = [2, 2]', ["'at' must be growing"]),
        ('curvature = { forms = "mean" }', ["lines.one: curvature", "'forms'", "did you mean 'form'?"]),
        ('curvature = { method = "kfac" }', ["lines.one: curvature", "'method'"]),
        ("curvature = { recentre = true }\nrecentre = true", ["lines.one: curvature", "'recentre'"]),
        ('curvature = { form = "other" }', ["lines.one: form is 'other'"]),
        ('method = "kfac"\ncurvature = { form = "paper" }', ["lines.one: form='paper' has no effect on kind 'kfac'"]),
        ('interpretation = "BN"', ["lines.one: interpretation is 'BN'"]),
        ('method = "fixed-bn"\nrecentre = true', ["'recentre' has no effect", "keeps BN as it is"]),
        ('method = "ewc"\nrecentre = true', ["'recentre' has no effect", "every parameter by itself"]),
        ('method = "ewc"\ninterpretation = "bn"', ["'interpretation' has no effect"]),
        ('norm = "none"\nrecentre = true', ["'recentre' has no effect on a network without BN"]),
        ('norm = "none"\nfixed_bn = true', ["'fixed_bn' has no effect on a network without BN"]),
        ("fixed_bn = true\nrecentre = true", ["'recentre' has no effect", "fixed_bn keeps BN as it is"]),
        ('method = "fixed-bn"\nfixed_bn = true', ["'fixed_bn' has no effect on method 'fixed-bn'"]),
        ('method = "joint"\nfixed_bn = true', ["'fixed_bn' has no effect on method 'joint'"]),
        ('method = "joint"\ntarget_lr = 0.1', ["'target_lr' has no effect on method 'joint'"]),
        ("target_lr = -1", ["target_lr must be a finite number of at least 0"]),
        *(
            (f'method = "{method}"\n{key} = {value}', [f"'{key}' has no effect on method '{method}'", "no penalty"])
            for method in ("fine-tuning", JOINT)
            for key, value in [
                ("damping", 0.1), ("strength", 1), ("interpretation", '"bn"'), ("recentre", "true"),
                ("curvature", "{ draws = 1 }"), ("consolidate", '"train"'), ("keep", '"all"'),
            ]
        ),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_run_as_written_is_refused_in_one_sentence(text, parts):
    refused(ONE + text, *parts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["'mine.toml' has no [lines.NAME] table"]),
        ("lines = 3", ["'lines' is 3; it must be a table"]),
        ("[lines]\none = 3", ["'lines.one' is 3; it must be a table"]),
        ("[lines.One]", ["the line name 'One'"]),
        ('[lines."a/b"]', ["the line name 'a/b'"]),
        ('[lines.".."]', ["the line name '..'"]),
        (f'{ONE}[figures."a/b"]', ["the figure name 'a/b'"]),
        (f'name = "../x"\n{ONE}', ["the recipe name '../x'"]),
        (f"repeat = 3\n{ONE}", ["mine.toml", "'repeat'", "did you mean 'repeats'?"]),
        (f"repeats = 0\n{ONE}", ["repeats must be at least 1"]),
        (f"repeats = true\n{ONE}", ["repeats is True", "a whole number"]),
        (f"seed = -1\n{ONE}", ["seed must be at least 0"]),
        (f"threads = 0\n{ONE}", ["threads must be at least 1"]),
        (f"threads = 100000\n{ONE}", ["threads must be at least 1 and at most 1,024, not 100000"]),
        (f"repeats = 10001\n{ONE}", ["repeats must be at least 1 and at most 10,000"]),
        (f"seed = {2**60}\n{ONE}", ["seed must be at least 0 and at most 9,007,199,254,740,992"]),
        (f"{ONE}[defaults]\nhead_epochs = -1", ["defaults: head_epochs must be at least 0", "not -1"]),
        (f"{ONE}[defaults]\nlabel_smoothing = 2", ["defaults: label_smoothing must be", "below 1, not 2.0"]),
        (f"{ONE}method = 'fine-tuning'\n[defaults]\nbn_momentum = 7", ["defaults: bn_momentum must be above 0"]),
        (f"{ONE}[figures.{'f' * 300}]", ["the figure name 'fff", "has 300 characters", "must have at most 100"]),
        (f"[lines.{'l' * 101}]", ["the line name 'lll", "has 101 characters"]),
        (f'name = "{"n" * 101}"\n{ONE}', ["the recipe name 'nnn", "has 101 characters"]),
        (f"{ONE}[data]\ntrain = {10**12}", ["data: train must be at least 0 and at most 1,000,000,000"]),
        (f'{ONE}[data]\nset = "minst"', ["data: set is 'minst'", "did you mean 'mnist'?"]),
        (f"{ONE}[data]\nsets = 1", ["data", "'sets'", "did you mean 'set'?"]),
        (
            f'{ONE}early_stopping = false\n[data]\nmeasure = "validation"\nvalidation = 0',
            ["data.measure is 'validation'"],
        ),
        (f"{ONE}[data]\ntrain = -1", ["data: train must be at least 0"]),
        (
            f"{ONE}[data]\nvalidation = 0",
            ["lines.one: early_stopping needs a validation split", "data.validation is 0"],
        ),
        (
            f'{ONE}early_stopping = false\nconsolidate = "validation"\n[data]\nvalidation = 0',
            ["lines.one: consolidate needs a validation split"],
        ),
        (f'{ONE}[figures.f]\nlines = ["two", "one"]', ["figures.f: there is no line 'two'"]),
        (f'{ONE}[figures.f]\nlines = ["ones"]', ["did you mean 'one'?"]),
        (f"{ONE}[figures.f]\nline = 1", ["figures.f", "did you mean 'lines'?"]),
        (f"{ONE}x = ", ["'mine.toml' is not valid TOML"]),
        (f"{ONE}[defaults]\nepoch = 1", ["defaults", "did you mean 'epochs'?"]),
    ],
)
def test_a_recipe_that_cannot_be_run_as_written_is_refused_in_one_sentence(text, parts):
    refused(text, *parts)


def test_defaults_that_a_line_has_no_use_for_are_left_out_of_it():
    text = """
    [data]
    validation = 0
    [defaults]
    tasks = 4
    early_stopping = false
    damping = 3
    interpretation = "bn"
    curvature = { form = "paper", draws = 1 }
    at = [2]
    [lines.plain]
    method = "fine-tuning"
    [lines.joint]
    method = "joint"
    [lines.xkfac]
    [lines.ewc]
    method = "ewc"
    curvature = { draws = 2 }
    [lines.fixed]
    method = "fixed-bn"
    curvature = {}
    [lines.none]
    norm = "none"
    """
    lines = parse_recipe(text).lines
    bare = Line(tasks=4, early_stopping=False)
    assert lines["plain"] == dataclasses.replace(bare, label="plain", method="fine-tuning")
    assert lines["joint"] == dataclasses.replace(bare, label="joint", method="joint", at=(2,))
    assert lines["xkfac"].damping == lines["ewc"].damping == 3
    assert lines["xkfac"].resolved_method().interpretation == "bn"
    assert lines["xkfac"].resolved_method().settings.form == "paper"
    assert lines["ewc"].resolved_method().interpretation == METHODS["ewc"].interpretation
    assert lines["fixed"].resolved_method() == METHODS["fixed-bn"]
    assert lines["none"].interpretation is None


def test_settings_change_keys_of_every_depth_and_defaults_override_what_lines_say():
    text = """
    [lines.a]
    epochs = 3
    curvature = { form = "paper" }
    [lines."b-0.1"]
    """
    changes = [
        "defaults.epochs=2", "repeats=3", "data.set=digits", "data.validation = 10", "lines.b-0.1.lr=0.5",
        "defaults.curvature.draws=4", "lines.a.note=two words", "lines.a.widths=[4, 5]", 'title="a = b"',
    ]  # fmt: skip
    made = parse_recipe(text, "mine.toml", changes)
    assert made.lines["a"] == Line("a", "two words", epochs=2, widths=(4, 5), curvature={"form": "paper", "draws": 4})
    assert made.lines["b-0.1"] == Line("b-0.1", epochs=2, lr=0.5, curvature={"draws": 4})
    assert (made.repeats, made.data, made.title) == (3, Data("digits", 10), "a = b")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("epochs", ["the setting 'epochs' must have the form key=value"]),
        ("=2", ["must have the form key=value"]),
        ("defaults.=2", ["must have the form key=value"]),
        ("lines.two.lr=1", ["'lines.two.lr=1' names no line"]),
        ("lines.ome.lr=1", ["names no line", "did you mean 'one'?"]),
        ("lines.one.lrs=1", ["lines.one", "did you mean 'lr'?"]),
        ("defaults.epochs=two", ["defaults: epochs is 'two'", "a whole number"]),
        ("defaults.epochs.x=2", ["'epochs' is 3; it must be a table"]),
        ("lines=3", ["'lines' is 3; it must be a table"]),
        ("defaults=3", ["'defaults' is 3; it must be a table"]),
        ("dat.set=digits", ["'dat'", "did you mean 'data'?"]),
        ("defaults.head_epochs=-1", ["defaults: head_epochs must be at least 0", "not -1"]),
        ("defaults.label_smoothing=2", ["label_smoothing must be a number of at least 0 and below 1, not 2.0"]),
        ("threads=100000", ["threads must be at least 1 and at most 1,024, not 100000"]),
        (f"defaults.lr={'[' * 100_000}", ["'[[[[", "…", "is nested too deeply"]),
        (f"defaults.lr={hex(16**5000)}", ["holds a whole number of more than 64 bits"]),
        (f"x{'.x' * 5000}=1", ["'mine.toml' is nested too deeply"]),
        (f"lines.one.note{'.x' * 50_000}=1", ["'mine.toml' is nested too deeply"]),
    ],
)
def test_a_setting_that_cannot_be_made_is_refused(change, parts):
    refused(f"{ONE}[defaults]\nepochs = 3", *parts, changes=[change])


def test_only_takes_names_and_patterns_in_the_order_of_the_recipe_and_trims_figures():
    text = "".join(f"[lines.{name}]\n" for name in ("kfac-1", "kfac-2", "xkfac", "ewc"))
    made = parse_recipe(text + '[figures.a]\nlines = ["ewc", "kfac-1"]\n[figures.b]\nlines = ["xkfac"]')
    assert list(made.only(["ewc", "kfac-*"]).lines) == ["kfac-1", "kfac-2", "ewc"]
    assert made.only(["*"]) == made
    some = made.only(["kfac-?"])
    assert some.figures == {"a": Figure(lines=("kfac-1",))}
    with pytest.raises(RecipeError, match=r"no line of recipe 'recipe' matches 'kfac' \(did you mean 'xkfac'\?\)"):
        made.only(["ewc", "kfac"])


def test_a_recipe_is_found_by_name_or_path_and_a_wrong_one_is_named(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(ONE)
    assert load_recipe(path) == load_recipe(str(path)) == parse_recipe(ONE, "mine.toml")
    with pytest.raises(RecipeError, match=r"there is no recipe 'dmo' \(did you mean 'demo'\?\)"):
        load_recipe("dmo")
    with pytest.raises(RecipeError, match="there is no recipe"):
        load_recipe(tmp_path)
    path.write_bytes(b"title = '\xff'")
    with pytest.raises(RecipeError, match=r"mine\.toml' cannot be read as a recipe"):
        load_recipe(path)


@pytest.mark.parametrize("name", list(named_recipes()))
def test_each_recipe_of_the_package_loads_and_is_written_out_whole(name):
    made = load_recipe(name)
    assert made.name == name
    assert made.title
    assert parse_recipe(made.to_toml(), name) == made
    shown = {line for figure in made.figures.values() for line in figure.lines}
    assert shown | {key for key, line in made.lines.items() if line.sweep} == set(made.lines)


def test_the_learning_rate_is_divided_every_so_many_epochs():
    made = line("lr = 0.8\nlr_every = 2\nlr_factor = 2")
    assert [made.learning_rate(0, epoch) for epoch in range(6)] == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]
    assert [made.learning_rate(1, epoch) for epoch in range(6)] == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]
    other = line("lr = 0.8\ntarget_lr = 0\nlr_every = 1\nlr_factor = 2")
    assert [other.learning_rate(task, 1) for task in range(3)] == [0.4, 0, 0]
    assert line("lr_every = 1").learning_rate(0, 5000) == 0.0


def test_by_share_every_target_is_learnt_with_steps_as_long_as_those_of_the_first():
    made = line("lr = 0.1\ntarget_lr = 0.2\nlr_by_share = true")
    shares = [1 / (task + 1) for task in range(1, 5)]  # lt for T known tasks
    steps = [made.learning_rate(task, 0) * share for task, share in enumerate(shares, 1)]
    assert steps == pytest.approx([0.2 / 2] * 4)
    assert made.learning_rate(0, 0) == 0.1


NAMES = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
NUMBERS = st.floats(0, 1e30)


@st.composite
def lines(draw):
    free = [
        name
        for name, method in METHODS.items()
        if not (method.own_bn or method.fixed_affine or method.fixed_statistics)
    ]
    method = draw(st.sampled_from([*free, JOINT]))
    norm = draw(st.sampled_from(["bn", "brn", "none"]))
    made = {
        "label": draw(TEXTS), "note": draw(TEXTS), "method": method, "norm": norm,
        "tasks": draw(st.integers(1, 100)), "widths": tuple(draw(st.lists(st.integers(1, 500), max_size=3))),
        "epochs": draw(st.integers(2, 50)), "batch": draw(st.integers(2, 500)), "lr": draw(NUMBERS),
        "lr_every": draw(st.integers(1, 10)), "lr_factor": draw(st.floats(1, 1e6)),
        "momentum": draw(st.floats(0, 1, exclude_max=True)),
    }  # fmt: skip
    made |= draw(st.sampled_from([{}, {"early_stopping": False}, {"early_stopping": False, "average": 2}]))
    if method == JOINT:
        made["at"] = tuple(sorted(draw(st.sets(st.integers(1, made["tasks"])))))
    else:
        made["target_lr"] = draw(st.none() | NUMBERS)
    if method not in (JOINT, "fixed-bn") and norm != "none":
        made["fixed_bn"] = draw(st.booleans())
    if method != JOINT and METHODS[method].penalised:
        made |= {"damping": draw(NUMBERS), "strength": draw(NUMBERS)}
        made["curvature"] = draw(st.sampled_from([{}, {"draws": 3}, {"labels": "exact"}, {"statistics": "batch"}]))
        made |= {"consolidate": draw(st.sampled_from(["train", "validation"])), "keep": draw(st.sampled_from(["all"]))}
        if not (METHODS[method].per_parameter or METHODS[method].fixed_bn or made.get("fixed_bn") or norm == "none"):
            made |= draw(st.sampled_from([{}, {"interpretation": "bn"}, {"recentre": False, "interpretation": "brn"}]))
    useless = without_effect(made)
    return Line(**{key: value for key, value in made.items() if key not in useless})


@st.composite
def recipes(draw):
    made = draw(st.dictionaries(NAMES, lines(), min_size=1, max_size=3))
    names = st.lists(st.sampled_from(sorted(made)), max_size=4).map(tuple)
    figures = draw(st.dictionaries(NAMES, st.builds(Figure, TEXTS, TEXTS, names), min_size=1, max_size=2))
    data = draw(
        st.builds(
            Data,
            st.sampled_from(["mnist", "digits"]),
            st.integers(1, 9999),
            st.integers(0, 9999),
            st.sampled_from(["test", "validation"]),
        )
    )
    repeats, seed, threads = (draw(st.integers(1, most)) for most in (10_000, 2**53, 1024))
    return Recipe(draw(NAMES), made, draw(TEXTS), draw(TEXTS), data, repeats, seed, threads, figures)


@settings(max_examples=25, deadline=None)
@given(recipes())
def test_what_a_run_keeps_of_a_recipe_is_the_recipe(recipe):
    assert parse_recipe(recipe.to_toml(), "other.toml") == recipe


def test_texts_keep_every_character_that_toml_can_hold():
    text = "".join(map(chr, range(0x20, 0x100))) + string.whitespace + "\u2028'''\"\"\"\\"
    recipe = Recipe("a", {"b": Line(text)}, figures={"c": Figure(text)})
    assert parse_recipe(recipe.to_toml()) == recipe


def test_what_tasks_own_in_a_perceptron_is_checked():
    text = 'name = "x"\n[lines.a]\nmethod = "own-bn"\n'
    assert parse_recipe(text).lines["a"].own == ()
    assert parse_recipe(text + 'own = ["6"]\nhead_epochs = 2\n').lines["a"].head_epochs == 2
    with pytest.raises(RecipeError, match=r"'head_epochs' has no effect on tasks that share one head"):
        parse_recipe(text + "head_epochs = 2\n")
    with pytest.raises(RecipeError, match=r"^lines\.a: a network without BN leaves nothing to each task; name layers"):
        parse_recipe(text + 'norm = "none"\n')
    assert parse_recipe(text + 'norm = "none"\nown = ["4"]\n').lines["a"].norm == "none"
    assert parse_recipe('name = "x"\n[lines.a]\nown = ["6"]\n').lines["a"].own == ("6",)
    with pytest.raises(RecipeError, match=r"'own' has no effect on method 'joint', which has no second task"):
        parse_recipe('name = "x"\n[lines.a]\nmethod = "joint"\nown = ["6"]\n')


VALUES = st.sampled_from(
    [
        *("true", "0", "-1", "1", "2", "1e308", "nan", "inf", "-inf", "0.5", "9223372036854775807", "0x" + "f" * 5000),
        *("[]", "[[]]", "[1, 2]", "[0.5, 0.2]", '["a"]', '[["a"]]', "{}", "{ lr = [1] }", "{ lr = 1 }", "07:32:00"),
        *("{ draws = -1 }", "{ draws = true }", "{ form = [1] }", "{ cross_layer = 1 }", "{ draws = 1.5 }"),
        *('""', '"x"', '"joint"', '"single"', '"ewc"', '"own-bn"', '"none"', '"validation"', '"\\u0000"'),
        *(f'"{"z" * 5000}"', "[" * 300 + "]" * 300, "1979-05-27", "1" * 5000),
    ]
)
PARTS = {
    "": Recipe, "data": Data, "images": Images, "tasks.a": Task, "defaults": Line, "lines.one": Line,
    "figures.f": Figure,
}  # fmt: skip
KEYS = [(part, field.name) for part, made in PARTS.items() for field in dataclasses.fields(made)]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4), st.booleans())
def test_whatever_stands_in_a_recipe_it_is_taken_as_it_is_or_refused_in_one_sentence(given, images):
    tables = {"lines.one": [], **({"tasks.a": ['tree = "a"'], "tasks.b": ['tree = "b"']} if images else {})}
    for (part, key), value in given.items():
        if (part, key) != ("tasks.a", "tree"):
            tables.setdefault(part, []).append(f"{key} = {value}")
    text = "".join(f"[{part}]\n" * bool(part) + "".join(f"{row}\n" for row in tables[part]) for part in sorted(tables))
    try:
        made = parse_recipe(text, "mine.toml")
    except RecipeError:
        return  # any other error would be a traceback
    assert parse_recipe(made.to_toml(), "other.toml") == made
