"""Run folders that were edited or forged: one sentence that names the file and the remedy, never a traceback."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.helpers import made_up
from tests.helpers import small_runs as small
from xkfac.experiments import RunError
from xkfac.experiments.recipes.parsing import load_recipe
from xkfac.experiments.recipes.recipe import Plan
from xkfac.experiments.report.choices import read_tuned
from xkfac.experiments.runs.events import EventsError, job_result, parse_events
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job import JobRun
from xkfac.experiments.runs.progress import RunStatus
from xkfac.experiments.runs.tasks import PermutedTasks
from xkfac.experiments.tuning.trials import StageFolder

RESULTS = Path(__file__).parents[3] / "results"
ONE = small.recipe().only(["xkfac"])
SHORT = small.recipe("defaults.tasks=2", "defaults.epochs=1", "defaults.average=0", "defaults.at=[2]").only(["plain"])


def begun(path, *, tasks=2, made=ONE):
    """A run with one job, of which so many of three tasks are measured, without having trained anything."""
    run = small.make(path, made)
    job = run.job("xkfac", 0)
    names = [f"permutation {task}" for task in range(3)]
    job.note("start", line="xkfac", seed=0, untrained=[10.0] * 3, tasks=names)
    for task in range(tasks):
        for epoch in range(3):
            place = {"task": task, "epoch": epoch}
            job.note("epoch", **place, lr=0.1, loss=1.0, penalty=0.0, validation=50.0, time=1.0)
        job.note("task", task=task, accuracy=[60.0] * (task + 1), before=10.0, kept=2, seconds=1.0, time=1.0)
    return run


def append(run, *lines):
    """Append lines to the events of the job; return where they are."""
    path = run.job("xkfac", 0).path / "events.jsonl"
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


# The end of a job


@pytest.mark.parametrize(
    ("tasks", "end", "done", "diverged"),
    [
        (2, '{"event": "end"}', False, None),
        (2, '{"event": "end", "diverged": null}', False, None),
        (2, '{"event": "end", "diverged": 1}', False, None),
        (2, '{"event": "end", "diverged": 2}', True, 2),
        (0, '{"event": "end", "diverged": null}', False, None),
        (3, '{"event": "end", "diverged": null}', True, None),
        (3, '{"event": "end", "diverged": 2}', False, None),
    ],
)
def test_an_end_counts_only_where_all_is_there_that_comes_before_it(tmp_path, tasks, end, done, diverged):
    run = begun(tmp_path / "run", tasks=tasks)
    append(run, end)
    found = run.job("xkfac", 0).result()
    assert (found.done, found.diverged, len(found.accuracy)) == (done, diverged, tasks)
    standing = RunStatus.of(run.path)
    assert (standing.state, standing.jobs_done) == (("complete", 1) if done else ("interrupted", 0))


def test_an_end_that_was_appended_to_joint_training_does_not_count(tmp_path):
    run = small.make(tmp_path / "run", small.recipe().only(["joint"]))
    job = run.job("joint", 0)
    job.note("start", line="joint", seed=0, untrained=[], tasks=[])
    job.note("task", task=0, accuracy=[90.0], before=None, kept=2, seconds=1.0)
    job.note("end", diverged=None)
    assert not job.result().done
    events = job.events()[:-1]
    (job.path / "events.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    job.note("task", task=2, accuracy=[90.0] * 3, before=None, kept=2, seconds=1.0)
    job.note("end", diverged=None)
    assert job.result().done
    assert job.result().accuracy == [[90.0], None, [90.0] * 3]


class Stopped(Exception):
    """Ends a job in the middle of it."""


class Stopping(JobRun):
    """A job that ends before its second task."""

    def _stage(self, carried):
        if self.state.stage:
            raise Stopped
        return super()._stage(carried)


def test_a_job_whose_end_was_forged_is_learnt_to_its_end(tmp_path):
    whole, cut = (small.make(tmp_path / name, SHORT) for name in ("whole", "cut"))
    small.finish(whole)
    job = cut.job("plain", 0)

    sequence = Stopping(SHORT.lines["plain"], 0, PermutedTasks(SHORT.lines["plain"], 0, small.parts()), job, 0.0)
    with pytest.raises(Stopped):
        sequence.run()
    job.note("end", diverged=None)
    assert not job.result().done
    small.finish(cut)
    small.assert_same(job, whole.job("plain", 0))


# The recipe


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lr = 0.1\n", "lr = 0.2\n"),
        ("epochs = 3\n", "epochs = 2\n"),
        ("tasks = 3\n", "tasks = 2\n"),
        ("widths = [8, 6]", "widths = [8, 7]"),
        ('title = "Small"', 'title = "Other"'),
    ],
)
def test_a_recipe_that_was_edited_is_refused_by_name(tmp_path, xkfac, old, new):
    run = begun(tmp_path / "run")
    path = run.path / "recipe.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(RunError, match=r"recipe.toml' was changed since the run began.*restore it .*start a new run"):
        RunFolder.open(run.path)
    told(xkfac, run.path, f"'{path}' was changed since the run began")
    path.write_text(text)
    assert RunFolder.open(run.path).recipe == run.recipe


def told(xkfac, run, *parts):
    """Check that all commands that look at a run say what is wrong with it in one sentence."""
    for arguments in (["report", run], ["resume", run, "-q"], ["compare", run, run]):
        code, out, err = xkfac(*arguments)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1
        assert all(part in err for part in parts), err
    code, out, err = xkfac("status", run)
    assert (code, err) == (0, "")
    assert "damaged" in out
    assert all(part in out for part in parts), out
    (row,) = json.loads(xkfac("status", run, "--json")[1])
    assert (row["state"], row["reason"].count("\n")) == ("damaged", 0)


def test_a_run_of_an_earlier_version_has_no_digest_and_is_read_without_one(tmp_path):
    run = begun(tmp_path / "run")
    facts = json.loads((run.path / "run.json").read_text())
    del facts["recipe_sha256"]
    (run.path / "run.json").write_text(json.dumps(facts))
    assert RunFolder.open(run.path).results().lines["xkfac"].jobs[0].accuracy == [[60.0], [60.0, 60.0]]
    recipe = run.path / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("tasks = 3\n", "tasks = 2\n"))
    with pytest.raises(
        RunError, match=r"its tasks are permutation 0, .* and recipe.toml has 2 tasks; restore recipe.toml, or remove"
    ):
        RunFolder.open(run.path).results()


def test_a_checkpoint_of_another_network_is_one_sentence(tmp_path):
    run = small.make(tmp_path / "run", SHORT)
    job = run.job("plain", 0)
    sequence = small.job_run(job, SHORT.lines["plain"])
    job.path.mkdir(parents=True)
    sequence._save({}, force=True)
    other = small.recipe("defaults.widths=[9, 6]").only(["plain"]).lines["plain"]
    with pytest.raises(RunError, match=r"'plain', seed 0, is not of the network that recipe.toml describes") as caught:
        small.job_run(job, other).run()
    assert f"remove the folder '{job.path}'" in str(caught.value)


def test_the_recipes_of_all_recorded_runs_are_read():
    found = [RunFolder.open(path.parent) for path in RESULTS.glob("**/run.json")]
    assert len(found) > 30
    # Keys with default values may have lost their effect on a method since they were written out.
    assert any("fixed_bn = false" in (run.path / "recipe.toml").read_text() for run in found)


@pytest.mark.parametrize(
    "name", ["permuted-mnist/choosing/7", "permuted-mnist/choosing/12", "fine-grained/weak", "fine-grained/tune"]
)
def test_recorded_runs_are_read(name):
    found = RunFolder.open(RESULTS / name).results()
    jobs = [job for line in found.lines.values() for job in line.jobs if job.accuracy]
    assert jobs
    assert all(0 <= value <= 100 for job in jobs for value in job.average_accuracy() if value is not None)
    assert ("tuning" in found.provenance) == (read_tuned(found) is not None)


# Events

EPOCH = {"event": "epoch", "task": 2, "epoch": 0, "lr": 0.1, "loss": 1.0, "penalty": 0.0, "validation": 50.0, "time": 1}
TASK = {"event": "task", "task": 2, "accuracy": [1, 2, 3], "before": None, "kept": 1, "seconds": 1.0}
START = {"event": "start", "line": "xkfac", "seed": 0, "untrained": [], "tasks": []}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"event": "start"}', "line 10 is an event 'start', and it has no 'line'"),
        (json.dumps(START), "it must have one start, as its first event"),
        ('{"event": "stop"}', "line 10 is an event 'stop', which is not known"),
        ('{"event": 3}', "line 10 is no event"),
        ("[" * 100_000, "line 10 is no JSON"),
        ('{"event": "epoch"}', "line 10 is an event 'epoch', and it has no 'task'"),
        (json.dumps({**EPOCH, "task": "2"}), "its 'task' is '2'; it must be a whole number of at least 0"),
        (json.dumps({**EPOCH, "task": True}), "its 'task' is True; it must be a whole number of at least 0"),
        (json.dumps({**EPOCH, "task": 3}), "it has an epoch 0 of task 3, which recipe.toml does not have"),
        (json.dumps({**EPOCH, "epoch": 3}), "it has an epoch 3 of task 2, which recipe.toml does not have"),
        (json.dumps({**EPOCH, "task": 1}), "epoch 0 of task 1 comes after epoch 2 of task 1"),
        (json.dumps({**EPOCH, "epoch": 10**30}), "it must be a whole number of at least 0"),
        (json.dumps({**EPOCH, "loss": float("nan")}), "its 'loss' is nan; it must be a finite number"),
        (json.dumps({**EPOCH, "lr": "fast"}), "its 'lr' is 'fast'; it must be a number"),
        (json.dumps({**EPOCH, "lr": -1}), "its 'lr' must be a finite number of at least 0, not -1.0"),
        (json.dumps({**EPOCH, "validation": 101}), "its 'validation' must be a number from 0 to 100, not 101.0"),
        (json.dumps({**EPOCH, "more": 1}), "it has the unknown field 'more'"),
        (json.dumps({**TASK, "accuracy": 3}), "its 'accuracy' is 3; it must be a list"),
        (json.dumps({**TASK, "accuracy": [1, 2, None]}), "its 'accuracy' is None; it must be a number"),
        (json.dumps({**TASK, "accuracy": [1, 2]}), "2 accuracies stand after task 2"),
        (json.dumps({**TASK, "task": 1, "accuracy": [1, 2]}), "after 1, 2, 2 tasks, and recipe.toml has 1, 2, 3"),
        (json.dumps({**TASK, "task": 3, "accuracy": [1, 2, 3, 4]}), "after 1, 2, 4 tasks, and recipe.toml has 1, 2, 3"),
        (json.dumps({**TASK, "kept": 1.5}), "its 'kept' is 1.5; it must be a whole number"),
        (json.dumps({**TASK, "seconds": -1}), "its 'seconds' must be a finite number of at least 0"),
        ('{"event": "end", "diverged": "no"}', "its 'diverged' is 'no'; it must be a whole number of at least 0"),
        ('{"event": "warning"}', "it has no 'text'"),
    ],
)
def test_every_line_of_events_is_checked_by_its_fields(tmp_path, line, message):
    run = begun(tmp_path / "run")
    path = append(run, line)
    with pytest.raises(RunError) as caught:
        run.job("xkfac", 0).result()
    said = str(caught.value)
    assert message in said
    assert said.startswith(f"'{path}' is damaged: ")
    restore = "restore recipe.toml, or " if "recipe.toml" in message else ""
    assert said.endswith(f"; {restore}remove the folder '{path.parent}' to run this job again from its start")
    assert len(said) < 1000


def test_damaged_events_are_told_by_every_command(tmp_path, xkfac):
    run = begun(tmp_path / "run")
    path = append(run, '{"event": "start"}')
    told(
        xkfac, run.path, f"'{path}' is damaged: line 10 is an event 'start', and it has no 'line'", "remove the folder"
    )


def test_events_of_another_job_are_not_taken_for_its_own(tmp_path):
    run = begun(tmp_path / "run")
    other = run.job("xkfac", 0).path.parent / "1"
    shutil.move(run.job("xkfac", 0).path, other)
    with pytest.raises(RunError, match="it is of line 'xkfac' with seed 0"):
        run.job("xkfac", 1).result()


def test_events_that_are_no_regular_file_are_not_waited_for(tmp_path):
    run = begun(tmp_path / "run", tasks=0)
    path = run.job("xkfac", 0).path / "events.jsonl"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunError, match=r"events.jsonl' cannot be read \(it is no regular file\); remove the folder"):
        run.job("xkfac", 0).result()


def test_events_that_were_edited_behind_a_checkpoint_are_not_gone_on_with(tmp_path):
    run = begun(tmp_path / "run")
    job = run.job("xkfac", 0)
    job.save({}, {})
    path = append(run, json.dumps(EPOCH))
    good = path.read_bytes()
    path.write_bytes(good.replace(b"60.0", b"99.0", 1))
    with pytest.raises(
        RunError, match=r"events.jsonl' was changed since its checkpoint was written; remove the folder"
    ):
        job.restore()
    path.write_bytes(good)
    assert job.restore() is not None
    assert path.read_bytes() == good[: good.rindex(b"\n", 0, -1) + 1]


def test_a_checkpoint_leads_to_no_memory_outside_its_folder(tmp_path):
    run = begun(tmp_path / "run")
    job = run.job("xkfac", 0)
    job.save({"memory": "../../memory-1.safetensors"}, {})
    with pytest.raises(RunError, match=r"'memory' of the damaged '.*' must be the name of a memory file, not '../"):
        job.restore()


def test_events_are_checked_against_the_plan():
    assert parse_events(b'{"event": "end"}\n{"event": "en') == [{"event": "end"}]
    events = [START, {**EPOCH, "task": 7}, {**TASK, "task": 1, "accuracy": [1, 2]}, {"event": "end"}]
    assert job_result(events, "xkfac", 0, Plan((2, 8), 1, 8)).accuracy == [None, [1, 2]]
    assert not job_result(events, "xkfac", 0, Plan((2, 8), 1, 8)).done
    with pytest.raises(EventsError, match=r"an epoch 0 of task 7, which recipe.toml does not have"):
        job_result(events, "xkfac", 0, Plan((2,), 1, 2))
    assert not job_result([], "xkfac", 0, Plan((2,), 1, 2)).done


# run.json


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"place": "quantum"}, "its 'place' must be 'cpu' or 'cuda', not 'quantum'"),
        ({"place": ["cpu"]}, "its 'place' is ['cpu']; it must be a text"),
        ({"data": 3}, "its 'data' is 3; it must be a text"),
        ({"classes": {"birds": "many"}}, "its 'classes' is 'many'; it must be a whole number of at least 0"),
        ({"tuning": True}, "its 'tuning' is True; it must be a table"),
        ({"recipe_sha256": 3}, "its 'recipe_sha256' is 3; it must be a text"),
    ],
)
def test_what_run_json_says_is_checked_by_its_fields(tmp_path, xkfac, change, message):
    run = begun(tmp_path / "run")
    path = run.path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(RunError, match=r"run.json' is damaged: .*; restore it, or start a new run") as caught:
        RunFolder.open(run.path)
    assert message in str(caught.value)
    if change == {"place": "quantum"}:
        told(xkfac, run.path, f"'{path}' is damaged: {message}")


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b"1" * 5000, b"null"])
def test_a_run_json_that_cannot_be_read_is_one_sentence(tmp_path, xkfac, content):
    run = begun(tmp_path / "run")
    (run.path / "run.json").write_bytes(content)
    told(xkfac, run.path, "is damaged", "start a new run")


# What tuning leaves


def test_records_of_a_tuning_are_checked_by_their_fields(tmp_path):
    stage = StageFolder(tmp_path / "stages" / "1", "xkfac", 0)
    trial = stage.trial(0)
    good = {"number": 0, "lr": 0.1, "damping": None, "validation": 50.0, "kept": 1, "seconds": 1.0}
    choice = {"task": "a", "chosen": good, "runner_up": None, "trials": 1, "lost": 0, "diverged": False}
    measured = {"before": None, "accuracy": [1.0, 2.0], "trials": {"0": {"target": 1.0, "average": 2.0}}}
    trial.path.mkdir(parents=True)
    for path, read, whole, wrong in (
        (trial.path / "outcome.json", trial.outcome, good, [[], {}, {**good, "lr": "x"}, {**good, "more": 1}]),
        (stage.path / "choice.json", stage.choice, choice, [{**choice, "chosen": {}}, {**choice, "diverged": 3}]),
        (stage.path / "measured.json", stage.measured, measured, [{**measured, "accuracy": []}, {"trials": 3}]),
    ):
        assert read() is None
        for entry in wrong:
            path.write_text(json.dumps(entry))
            with pytest.raises(RunError, match=rf"{path.name}' is damaged: .*; remove it to have it made again"):
                read()
        path.write_text("[" * 100_000)
        with pytest.raises(RunError, match=rf"{path.name}' cannot be read \(its values are nested too deeply\)"):
            read()
        path.write_text(json.dumps(whole))
        assert read() is not None


@pytest.mark.parametrize("name", ["choices.json", "points.json"])
def test_choices_and_points_are_checked_by_their_fields(tmp_path, name):
    run = made_up.tuned(tmp_path / "run")
    path = tmp_path / "run" / name
    entries = json.loads(path.read_text())
    for wrong in ({}, {**entries[0], "lr": "x"}, {**entries[0], "more": 1}, 3):
        path.write_text(json.dumps([entries[0], wrong]))
        with pytest.raises(ValueError, match=rf"{name}' cannot be read \(.*entry 2 .*'xkfac resume .*' writes it anew"):
            read_tuned(run)


def test_a_recipe_that_was_made_in_python_is_checked_like_a_file(tmp_path):
    from dataclasses import replace

    from xkfac.experiments import RecipeError, start

    made = load_recipe("demo").only(["xkfac"])
    for change, message in (
        ({"label_smoothing": 2.0}, "label_smoothing must be a number of at least 0 and below 1, not 2.0"),
        ({"method": "xkfak"}, "did you mean 'xkfac'"),
    ):
        wrong = replace(made, lines={"xkfac": replace(made.lines["xkfac"], **change)})
        with pytest.raises(RecipeError, match=message):
            start(wrong, tmp_path / "run", device="cpu")
        assert not (tmp_path / "run").exists()
