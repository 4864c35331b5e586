"""One job: killed at any moment it gives the same numbers, and it looks at nothing that it must not look at."""

import dataclasses
import json
import pickle
import random

import pytest
import torch
from safetensors import safe_open

from tests.helpers import small_runs as small
from xkfac.experiments.data.digits import DataError, Part, Parts, permutation
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.recipes.recipe import Line
from xkfac.experiments.runs import tasks
from xkfac.experiments.runs.run_data import load_run_data

LINES = small.recipe().lines


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run whose jobs were never interrupted."""
    return small.finish(small.make(tmp_path_factory.mktemp("unbroken") / "run"))


def learn(folder, line, **options):
    """Return a job of a line after it was learnt."""
    run = small.make(folder, dataclasses.replace(small.recipe(), lines={"line": line}, figures={}))
    small.job_run(run.job("line", 0), line, **options).run()
    return run.job("line", 0)


def model_of(job):
    tensors = small.weights(job)
    return {key.partition("/")[2]: tensor for key, tensor in tensors.items() if key.startswith("model/")}


def single(**changes):
    """A line of one task."""
    return dataclasses.replace(LINES["plain"], **{"tasks": 1, "momentum": 0.9, "early_stopping": False, **changes})


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("name", LINES)
def test_a_job_that_is_killed_again_and_again_gives_the_numbers_of_an_unbroken_one(unbroken, tmp_path, name):
    moments = random.Random(name)
    run = small.make(tmp_path / "run")
    kills = 0
    while small.learn_and_die(run, name, moments.randint(1, 40)):
        kills += 1
        assert kills < 50
    assert kills > 3
    small.assert_same(run.job(name, 0), unbroken.job(name, 0))
    assert not list(run.path.rglob("*.part"))


def test_jobs_killed_at_random_moments_give_the_bits_of_unbroken_ones(tmp_path):
    """A handful of what benchmarks/kills.py does; the width is one whose products round by the address of a memory."""
    made = small.recipe(
        "defaults.widths=[8, 128]", "defaults.epochs=12"
    )  # long beside the moments, on a fast machine too
    moments = random.Random(5)
    unbroken, run = small.make(tmp_path / "unbroken", made), small.make(tmp_path / "run", made)
    for name in ("xkfac", "balanced"):
        small.finish(unbroken, name)
        kills = sum(small.learn_and_be_killed(run, name, moments) for _ in range(4))
        assert kills > 1
        small.finish(run, name)
        small.assert_same(run.job(name, 0), unbroken.job(name, 0))


def test_the_numbers_of_a_job_do_not_depend_on_jobs_before_it_nor_on_global_randomness(unbroken, tmp_path):
    run = small.make(tmp_path / "run")
    for name in reversed(LINES):
        torch.manual_seed(len(name))
        torch.rand(7)
        small.finish(run, name)
    for name in LINES:
        small.assert_same(run.job(name, 0), unbroken.job(name, 0))


def test_checkpoints_now_and_then_or_never_change_no_number(unbroken, tmp_path):
    for seconds in (0.02, 1e9):
        run = small.make(tmp_path / str(seconds))
        for name in ("xkfac", "average"):
            small.job_run(run.job(name, 0), LINES[name], seconds=seconds).run()
            small.assert_same(run.job(name, 0), unbroken.job(name, 0))


def test_a_job_draws_no_global_random_number(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    learn(tmp_path / "run", LINES["xkfac"])
    assert torch.equal(torch.rand(3), expected)


def test_seeds_differ_in_permutations_weights_and_order(tmp_path):
    first, second = (learn(tmp_path / str(seed), LINES["plain"], seed=seed) for seed in (0, 1))
    for ours, theirs in zip(small.told(first), small.told(second), strict=True):
        if ours["event"] == "epoch":
            assert ours["loss"] != theirs["loss"]


def test_a_folder_has_events_line_by_line_and_tensors_without_pickle(unbroken):
    for name, line in LINES.items():
        job = unbroken.job(name, 0)
        text = (job.path / "events.jsonl").read_text()
        events = [json.loads(each) for each in text.splitlines()]
        assert text.endswith("\n")
        kinds = [event["event"] for event in events]
        stages = len(line.at) or line.tasks
        one = ["epoch"] * line.epochs + ["task"]
        assert kinds == ["start", *one * stages, "end"]
        checkpoints = list(job.path.glob("checkpoint-*.safetensors"))
        assert len(checkpoints) == 2
        remembers = line.method not in ("joint", "single", "fine-tuning")
        assert sorted(p.name for p in job.path.glob("memory-*")) == [
            f"memory-{n}.safetensors" for n in (1, 2) if remembers
        ]
        for path in job.path.glob("*.safetensors"):
            with safe_open(str(path), "pt") as file:
                assert file.keys()
            with pytest.raises((pickle.UnpicklingError, ValueError, EOFError, KeyError, IndexError)):
                pickle.loads(path.read_bytes())


def test_a_result_is_what_the_events_say(unbroken):
    job = unbroken.job("xkfac", 0)
    result, told = job.result(), small.told(job)
    assert result.accuracy == [event["accuracy"] for event in told if event["event"] == "task"]
    assert [len(row) for row in result.accuracy] == [1, 2, 3]
    assert len(result.before) == len(result.untrained) == len(result.seconds) == 3
    assert [(e["task"], e["epoch"]) for e in result.epochs] == [(t, e) for t in range(3) for e in range(3)]
    assert [e["lr"] for e in result.epochs] == [0.1, 0.05, 0.025] * 3
    assert all(e["penalty"] == 0 for e in result.epochs[:3])
    assert all(e["penalty"] > 0 for e in result.epochs[3:])
    assert (result.done, result.diverged) == (True, None)
    joint = unbroken.job("joint", 0).result()
    assert [row and len(row) for row in joint.accuracy] == [1, None, 3]
    assert joint.before == []


def test_early_stopping_keeps_the_latest_of_the_best_epochs_of_each_task(unbroken):
    result = unbroken.job("xkfac", 0).result()
    for task in range(3):
        values = [epoch["validation"] for epoch in result.epochs if epoch["task"] == task]
        assert result.kept[task] == max(range(3), key=lambda epoch: (values[epoch], epoch))


@pytest.mark.parametrize(("values", "kept"), [([50, 70, 70, 60], 2), ([9, 8, 7, 6], 0), ([0, 0, 0, 0], 3)])
def test_early_stopping_keeps_the_weights_of_that_epoch(tmp_path, monkeypatch, values, kept):
    script, asked = iter(values), []
    real = tasks.PermutedTasks.accuracy

    def scripted(sequence, model, task, part):
        if part != "validation":
            return real(sequence, model, task, part)
        asked.append(task)
        return float(next(script))

    shorter = learn(tmp_path / "shorter", single(epochs=kept + 1))
    monkeypatch.setattr(tasks.PermutedTasks, "accuracy", scripted)
    job = learn(tmp_path / "job", single(epochs=4, early_stopping=True))
    assert job.result().kept == [kept]
    assert_equal(model_of(job), model_of(shorter))
    assert len(asked) == 4


def test_choices_look_at_the_validation_split_of_the_current_target_alone(tmp_path, monkeypatch):
    asked = []
    real = tasks.PermutedTasks._batches

    def watched(sequence, part, task, size=10_000):
        if part is sequence.parts.validation:
            asked.append(task)
        return real(sequence, part, task, size)

    monkeypatch.setattr(tasks.PermutedTasks, "_batches", watched)
    learn(tmp_path / "run", LINES["xkfac"])
    assert asked == [task for task in range(3) for _ in range(3)]


def test_the_average_is_the_mean_of_the_weights_at_the_ends_of_the_last_epochs(tmp_path):
    averaged = model_of(learn(tmp_path / "averaged", single(epochs=4, average=3)))
    ends = [model_of(learn(tmp_path / str(epochs), single(epochs=epochs))) for epochs in (2, 3, 4)]
    for name, tensor in averaged.items():
        if tensor.is_floating_point():
            mean = sum(end[name].double() for end in ends) / 3
            torch.testing.assert_close(tensor.double(), mean, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(tensor, ends[-1][name])


def test_a_learning_rate_of_0_moves_running_statistics_alone(tmp_path):
    line = single(lr=0.0, norm="bn")
    after = model_of(learn(tmp_path / "run", line))
    for name, tensor in perceptron(64, 10, line, 0).state_dict().items():
        assert torch.equal(tensor, after[name]) == ("running" not in name and "tracked" not in name), name


def test_a_target_learning_rate_of_0_keeps_the_weights_of_the_first_task(tmp_path):
    one = model_of(learn(tmp_path / "one", single()))
    two = model_of(learn(tmp_path / "two", single(tasks=2, target_lr=0.0)))
    for name in one:
        assert torch.equal(one[name], two[name]) == ("running" not in name and "tracked" not in name), name


def test_initial_weights_are_fixed_by_the_seed_alone():
    state = torch.get_rng_state()
    first = perceptron(64, 10, Line(widths=(8, 6)), 3).state_dict()
    for line in LINES.values():
        torch.rand(1)
        linear = [m for m in perceptron(64, 10, line, 3) if isinstance(m, torch.nn.Linear)]
        reference = [first[key] for key in first if first[key].dim() == 2]
        assert all(torch.equal(m.weight, w) for m, w in zip(linear, reference, strict=True))
    torch.set_rng_state(state)
    perceptron(64, 10, Line(), 0)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(perceptron(64, 10, Line(widths=(8, 6)), 4)[0].weight, first["0.weight"])


@pytest.mark.parametrize("name", ["xkfac", "average", "joint", "fixed-bn", "own-bn"])
def test_test_data_has_no_part_in_any_choice(unbroken, tmp_path, name):
    parts = small.parts()
    garbage = torch.arange(len(parts.test)) * 7 % 10
    poisoned = Parts(parts.train, parts.validation, Part(torch.full_like(parts.test.x, torch.nan), garbage))
    job, clean = learn(tmp_path / "run", LINES[name], data=poisoned), unbroken.job(name, 0)
    assert_equal(small.weights(job), small.weights(clean))
    epochs, expected = ([e for e in small.told(each) if e["event"] == "epoch"] for each in (job, clean))
    assert epochs == expected
    assert job.result().accuracy != clean.result().accuracy


@pytest.mark.parametrize("name", ["xkfac", "ewc", "fixed-bn", "own-bn", "own-layers", "validation", "plain"])
def test_the_examples_of_earlier_tasks_are_not_looked_at_again(unbroken, tmp_path, monkeypatch, name):
    real, pools, old_tasks = tasks.PermutedExamples, [], []

    def watched(part, permutations):
        (columns,) = permutations
        task = next(t for t in range(3) if torch.equal(columns, permutation(64, 0, t)))
        for old, used in zip(old_tasks, pools, strict=True):
            if old < task:
                used.part.x.fill_(torch.nan)
        made = real(part, permutations)
        old_tasks.append(task)
        pools.append(made)
        return made

    monkeypatch.setattr(tasks, "PermutedExamples", watched)
    job = learn(tmp_path / "run", LINES[name])
    assert old_tasks == sorted(old_tasks)
    assert set(old_tasks) == {0, 1, 2}
    assert pools[0].part.x.isnan().all()
    assert_equal(small.weights(job), small.weights(unbroken.job(name, 0)))


def constant(sequence, answers):
    """Return the network of a sequence whose tasks with heads of their own always answer these classes."""
    model = sequence.network()
    for task, answer in zip(sequence.tasks, answers, strict=True):
        head = model[6].of[task]
        torch.nn.init.zeros_(head.weight)
        head.bias.data = torch.nn.functional.one_hot(torch.tensor(answer), 10).float()
    return model


def test_a_test_image_is_answered_by_the_layers_of_the_task_that_it_looks_like():
    sequence = tasks.PermutedTasks(dataclasses.replace(LINES["own-bn"], tasks=2), 0, small.parts())
    model, test = constant(sequence, [3, 5]), small.parts().test
    for task in range(2):
        sequence.enter(model, task)
    threes, fives = (100 * (test.y == digit).float().mean().item() for digit in (3, 5))
    assert sequence.accuracy(model, 0, "test") == pytest.approx(threes, abs=1)
    assert sequence.accuracy(model, 1, "test") == pytest.approx(fives, abs=1)
    for task, (found, answer) in enumerate(zip(sequence.inference(model), (threes, fives), strict=True)):
        assert found["given"] == pytest.approx(answer)
        assert found["inferred"] == sequence.accuracy(model, task, "test")
        assert found["taken"][task] > 98
        assert sum(found["taken"]) == pytest.approx(100)
    held_out = small.parts().validation.y
    assert sequence.accuracy(model, 0, "validation") == 100 * (held_out == 3).float().mean().item()  # of the task given
    assert model[6].active == sequence.tasks[1]  # what is learnt is what was entered


def test_layers_that_a_perceptron_does_not_have_are_told_of_before_anything_runs():
    made = small.recipe('lines.own-bn.own=["7"]')
    with pytest.raises(DataError, match=r"^lines\.own-bn: no shared layer with parameters matches '7'"):
        load_run_data(made, None, torch.device("cpu"))


@pytest.mark.parametrize("lr", [1e4, 1e12, 1e25, 1e38])
@pytest.mark.parametrize("name", ["xkfac", "plain", "average"])
def test_a_job_whose_numbers_cease_to_be_finite_ends_and_says_when(tmp_path, name, lr):
    job = learn(tmp_path / "run", dataclasses.replace(LINES[name], lr=lr, norm="none", epochs=3))
    result = job.result()
    assert result.done
    if result.diverged is not None:
        assert len(result.accuracy) == result.diverged
        assert result.epochs[-1]["loss"] is None
    else:
        assert len(result.accuracy) == 3
    if lr == 1e38:
        assert result.diverged == 0
