"""Metrics of continual learning, against values worked out by hand and against their definitions, written as loops."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkfac.experiments.recipes.recipe import Figure, Line, Recipe
from xkfac.experiments.runs.results import JobResult, LineResults, RunResults, Spread, pooled, spread

BY_HAND = JobResult(
    "line",
    0,
    accuracy=[[90.0], [70.0, 80.0], [75.0, 60.0, 85.0]],
    before=[10.0, 30.0, 14.0],
    untrained=[8.0, 12.0, 10.0],
)


def test_metrics_have_the_values_worked_out_by_hand():
    assert BY_HAND.average_accuracy() == [90, 75, pytest.approx(220 / 3)]
    assert BY_HAND.forgetting() == [None, 20, (15 + 20) / 2]
    assert BY_HAND.backward_transfer() == (75 - 90 + 60 - 80) / 2
    assert BY_HAND.forward_transfer() == ((30 - 12) + (14 - 10)) / 2
    assert BY_HAND.learning_accuracy() == (90 + 80 + 85) / 3


def test_forgetting_counts_from_the_best_so_far_not_from_the_first():
    job = JobResult("line", 0, accuracy=[[50.0], [80.0, 50.0], [60.0, 55.0, 50.0]])
    assert job.forgetting() == [None, -30, (20 - 5) / 2]


def test_nothing_measured_gives_no_metric():
    job = JobResult("line", 0)
    assert (job.average_accuracy(), job.forgetting()) == ([], [])
    assert job.backward_transfer() is job.forward_transfer() is job.learning_accuracy() is None
    one = JobResult("line", 0, accuracy=[[50.0]], before=[10.0], untrained=[10.0, 10.0])
    assert (one.forgetting(), one.backward_transfer(), one.forward_transfer()) == ([None], None, None)
    assert one.learning_accuracy() == 50


def test_joint_training_has_averages_where_it_was_measured_and_no_forgetting():
    job = JobResult("joint", 0, accuracy=[None, [90.0, 80.0], None, [70.0, 80.0, 90.0, 100.0]], untrained=[10.0] * 4)
    assert job.average_accuracy() == [None, 85, None, 85]
    assert job.forgetting() == [None] * 4
    assert job.backward_transfer() is job.forward_transfer() is job.learning_accuracy() is None


PERCENT = st.floats(0, 100)


@st.composite
def jobs(draw):
    tasks = draw(st.integers(1, 5))
    rows = [draw(st.lists(PERCENT, min_size=t + 1, max_size=t + 1)) for t in range(tasks)]
    before, untrained = (draw(st.lists(PERCENT, min_size=tasks, max_size=tasks)) for _ in range(2))
    return JobResult("line", 0, accuracy=rows, before=before, untrained=untrained)


def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


@settings(max_examples=100, deadline=None)
@given(jobs())
def test_metrics_are_those_of_their_definitions(job):
    a, tasks = job.accuracy, len(job.accuracy)
    close = {"rel": 1e-9, "abs": 1e-9}
    for t in range(tasks):
        assert job.average_accuracy()[t] == pytest.approx(mean([a[t][i] for i in range(t + 1)]), **close)
        if t == 0:
            assert job.forgetting()[t] is None
            continue
        lost = []
        for i in range(t):
            best = a[i][i]
            for past in range(i, t):
                best = max(best, a[past][i])
            lost.append(best - a[t][i])
        assert job.forgetting()[t] == pytest.approx(mean(lost), **close)
    assert job.learning_accuracy() == pytest.approx(mean([a[t][t] for t in range(tasks)]), **close)
    if tasks == 1:
        assert job.backward_transfer() is job.forward_transfer() is None
        return
    backward = mean([a[tasks - 1][i] - a[i][i] for i in range(tasks - 1)])
    forward = mean([job.before[i] - job.untrained[i] for i in range(1, tasks)])
    assert job.backward_transfer() == pytest.approx(backward, **close)
    assert job.forward_transfer() == pytest.approx(forward, **close)


def test_a_spread_is_mean_and_sample_deviation_of_what_is_there():
    assert spread([]) is spread([None, None]) is None
    assert spread([1.0, None, 3.0]) == Spread(2.0, math.sqrt(2), 2)
    one = spread([None, 4.0])
    assert (one.mean, one.count, math.isnan(one.deviation)) == (4.0, 1, True)
    assert (str(one), str(spread([1.0, 3.0]))) == ("4.00", "2.00 ± 1.41")


def test_repeats_are_put_together_task_by_task():
    other = JobResult("line", 1, accuracy=[[94.0], [76.0, 84.0]])
    line = LineResults("line", [BY_HAND, other, JobResult("line", 2)])
    first, second, third = line.curve(JobResult.average_accuracy)
    assert (first.mean, first.count, first.deviation) == (92, 2, pytest.approx(math.sqrt(8)))
    assert (second.mean, third.count, third.mean) == (77.5, 1, pytest.approx(220 / 3))
    assert line.curve(JobResult.forgetting)[0] is None
    assert line.scalar(JobResult.backward_transfer) == Spread((-17.5 + -18) / 2, pytest.approx(math.sqrt(0.125)), 2)
    assert LineResults("line").curve(JobResult.forgetting) == []
    assert LineResults("line").scalar(JobResult.backward_transfer) is None


def run_results(lines, seeds, name="recipe", figures=None, **facts):
    made = {key: Line(label=key, **settings) for key, settings in lines.items()}
    recipe = Recipe(
        name, made, repeats=len(seeds), seed=seeds[0], figures=figures or {"f": Figure("F", lines=(*made,))}
    )
    results = {
        key: LineResults(key, [JobResult(key, seed, accuracy=[[90.0 + seed]], done=True) for seed in seeds])
        for key in made
    }
    return RunResults(f"runs/{seeds[0]}", recipe, facts, results)


def test_runs_of_one_recipe_with_other_seeds_are_pooled():
    first = run_results({"a": {}, "b": {"damping": 0.5}}, [0, 1], device="GPU", commit="c")
    second = run_results({"b": {"damping": 0.5}}, [2], device="CPU", commit="c")
    (run,) = pooled([first, second])
    assert [job.seed for job in run.lines["a"].jobs] == [0, 1]
    assert [job.seed for job in run.lines["b"].jobs] == [0, 1, 2]
    assert run.lines["b"].curve(JobResult.average_accuracy)[0] == spread([90.0, 91.0, 92.0])
    assert run.provenance == {"device": "GPU; CPU", "commit": "c"}


def test_lines_of_pooled_runs_share_their_figures():
    first = run_results({"a": {}, "b": {}}, [0])
    second = run_results({"c": {}, "b": {}}, [1])
    (run,) = pooled([first, second])
    assert run.recipe.figures["f"].lines == ("a", "b", "c")
    assert set(run.recipe.lines) == {"a", "b", "c"}


@pytest.mark.parametrize(
    "other",
    [
        run_results({"a": {}}, [1]),  # a seed in common
        run_results({"a": {"damping": 0.5}}, [2]),  # other settings
        run_results({"a": {}}, [2], name="other"),
    ],
)
def test_runs_that_do_not_belong_together_stay_apart(other):
    assert len(pooled([run_results({"a": {}}, [0, 1]), other])) == 2
