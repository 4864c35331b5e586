"""The folder of a run: whole at every moment, on a full disk, with damaged files, and held by one process at a time."""

import dataclasses
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.helpers import small_runs as small
from xkfac import files
from xkfac.experiments.runs.folder import RunFolder, find_runs
from xkfac.experiments.runs.job import JobRun
from xkfac.experiments.runs.job_folder import JobFolder, NotWritten, RunError, write_text
from xkfac.experiments.runs.tasks import PermutedTasks

_SMALLER = ("tasks=2", "epochs=1", "widths=[4]", "batch=48", "average=0", "at=[2]")
TINY = small.recipe(*(f"defaults.{setting}" for setting in _SMALLER)).only(["kfac"])
THREE = small.recipe().only(["xkfac", "average"])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    return small.finish(small.make(folder / "tiny", TINY)), small.finish(small.make(folder / "three", THREE))


class Stop(Exception):
    """Ends a job in the middle of it."""


def stopped(job, line, stage, epoch):
    """Learn a job up to an epoch of a stage, which is not begun."""

    class Stopping(JobRun):
        def _epoch(self, *arguments):
            if (self.state.stage, self.state.epoch) == (stage, epoch):
                raise Stop
            super()._epoch(*arguments)

    with pytest.raises(Stop):
        Stopping(line, job.seed, PermutedTasks(line, job.seed, small.parts()), job, checkpoint_seconds=0).run()
    return job


def count_operations(run):
    with small.Disk(run.path, 0).faulty() as disk:
        small.finish(run)
    return disk.count


def test_a_disk_that_is_full_at_any_moment_costs_nothing_but_time(unbroken, tmp_path):
    expected = unbroken[0].job("kfac", 0)
    total = count_operations(small.make(tmp_path / "run", TINY))
    assert total > 40
    for k in range(1, total + 1):
        run = small.make(tmp_path / str(k), TINY)
        with small.Disk(run.path, k).faulty() as disk, pytest.raises(NotWritten) as caught:
            small.finish(run)
        message = str(caught.value)
        assert "No space left on device" in message
        assert "'xkfac resume' goes on" in message
        named = Path(message.split("'")[1])
        assert named.parent == run.job("kfac", 0).path
        assert ".part" in disk.path or named.name in disk.path or named.name.startswith("checkpoint")
        small.finish(run)
        small.assert_same(run.job("kfac", 0), expected)
        shutil.rmtree(run.path)


def test_a_folder_that_cannot_be_made_is_not_left_half_made(tmp_path):
    with small.Disk(tmp_path, 0).faulty() as disk:
        small.make(tmp_path / "run")
    for k in range(1, disk.count + 1):
        path = tmp_path / f"run-{k}"
        with small.Disk(path, k).faulty(), pytest.raises(RunError, match="cannot be made") as caught:
            small.make(path)
        assert not isinstance(caught.value, NotWritten)
        assert "No space left" in str(caught.value)
        assert not path.exists()
        small.make(path)


def test_results_are_replaced_only_once_the_new_ones_are_on_disk(unbroken, tmp_path):
    run = RunFolder.open(shutil.copytree(unbroken[0].path, tmp_path / "run"))
    run.collect()
    text = (run.path / "results.json").read_text()
    with small.Disk(run.path, 0).faulty() as disk:
        run.collect()
    assert disk.count > 3
    for k in range(1, disk.count + 1):
        with small.Disk(run.path, k).faulty(), pytest.raises(NotWritten, match=r"results\.json"):
            run.collect()
        assert (run.path / "results.json").read_text() == text
        assert not list(run.path.glob(".*"))


def test_a_run_has_its_recipe_facts_jobs_and_results(unbroken):
    run = unbroken[1]
    run.collect()
    top = {path.name for path in run.path.iterdir()}
    assert top == {"recipe.toml", "run.json", "jobs", "results.json"}
    opened = RunFolder.open(run.path)
    digest = hashlib.sha256((run.path / "recipe.toml").read_bytes()).hexdigest()
    assert (opened.recipe, opened.facts) == (run.recipe, {**small.FACTS, "recipe_sha256": digest})
    collected = json.loads((run.path / "results.json").read_text())
    assert [(job["line"], job["seed"], job["done"]) for job in collected["jobs"]] == [
        ("xkfac", 0, True), ("average", 0, True)
    ]  # fmt: skip
    assert collected["jobs"][0] == json.loads(json.dumps(asdict(run.job("xkfac", 0).result())))
    assert run.results().lines["average"].jobs[0] == run.job("average", 0).result()


def test_jobs_come_repeat_by_repeat(tmp_path):
    run = small.make(tmp_path / "run", dataclasses.replace(THREE, repeats=2, seed=5))
    assert [(job.line, job.seed) for job in run.jobs()] == [
        ("xkfac", 5), ("average", 5), ("xkfac", 6), ("average", 6)
    ]  # fmt: skip


DAMAGES = {
    "first byte": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "header": lambda data: data[:40] + bytes([data[40] ^ 4]) + data[41:],
    "middle": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 16]) + data[len(data) // 2 + 1 :],
    "last byte": lambda data: data[:-1] + bytes([data[-1] ^ 128]),
    "truncated": lambda data: data[:-7],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
}


def damage(path, how):
    path.write_bytes(DAMAGES[how](path.read_bytes()))


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(unbroken, tmp_path, how):
    run = small.make(tmp_path / "run", THREE)
    for name, stage, epoch in (("xkfac", 1, 2), ("average", 2, 0)):
        job = stopped(run.job(name, 0), THREE.lines[name], stage, epoch)
        newest = job._checkpoints()[-1][1]
        damage(newest, how)
        small.finish(run, name)
        warnings = [event for event in job.events() if event["event"] == "warning"]
        assert len(warnings) == 1
        assert newest.name in warnings[0]["text"]
        assert newest.with_suffix(".damaged").exists()
        small.assert_same(job, unbroken[1].job(name, 0))


@pytest.mark.parametrize("how", ["middle", "empty", "missing"])
def test_a_damaged_memory_is_passed_over_with_the_checkpoint_that_needs_it(unbroken, tmp_path, how):
    run = small.make(tmp_path / "run", THREE)
    job = stopped(run.job("xkfac", 0), THREE.lines["xkfac"], 2, 0)
    memory = job.path / "memory-2.safetensors"
    assert {path.name for path in job.path.glob("memory-*")} == {"memory-1.safetensors", memory.name}
    memory.unlink() if how == "missing" else damage(memory, how)
    small.finish(run, "xkfac")
    warnings = [event["text"] for event in job.events() if event["event"] == "warning"]
    assert len(warnings) == 1
    assert memory.name in warnings[0]
    small.assert_same(job, unbroken[1].job("xkfac", 0))


def test_without_any_checkpoint_that_can_be_read_the_folder_to_remove_is_named(unbroken, tmp_path):
    run = small.make(tmp_path / "run", THREE)
    for victims in ("checkpoint-*.safetensors", "memory-*.safetensors"):
        job = stopped(run.job("xkfac", 0), THREE.lines["xkfac"], 2, 1)
        before = (job.path / "events.jsonl").read_bytes()
        for path in job.path.glob(victims):
            damage(path, "middle")
        with pytest.raises(RunError, match="no checkpoint of job 'xkfac', seed 0, can be read") as caught:
            small.finish(run, "xkfac")
        assert str(job.path) in str(caught.value)
        assert (job.path / "events.jsonl").read_bytes() == before
        shutil.rmtree(job.path)
    small.finish(run, "xkfac")
    small.assert_same(run.job("xkfac", 0), unbroken[1].job("xkfac", 0))


def test_memories_that_no_kept_checkpoint_goes_on_with_do_not_push_out_one_that_does(tmp_path):
    job = JobFolder(tmp_path, "line", 0)

    def remember(number):
        files.write(tmp_path / f"memory-{number}.safetensors", {}, {"x": torch.ones(1)})
        return f"memory-{number}.safetensors"

    job.save({"memory": remember(1)}, {})
    job.save({"memory": remember(2)}, {})
    remember(3)  # and killed before its checkpoint
    damage(job._checkpoints()[-1][1], "half")
    for _ in range(3):
        state, _ = job.restore()
        assert state["memory"] == "memory-1.safetensors"
        job.save({"memory": "memory-1.safetensors"}, {})
    assert [path.name for path in tmp_path.glob("memory-*")] == ["memory-1.safetensors"]


def test_checkpoints_and_memories_do_not_pile_up(tmp_path):
    job = JobFolder(tmp_path, "line", 0)
    for number in range(1, 6):
        files.write(tmp_path / f"memory-{number}.safetensors", {}, {"x": torch.ones(1)})
        job.save({"memory": f"memory-{number}.safetensors"}, {"a": torch.tensor([number])})
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{kind}-{number}.safetensors" for kind in ("checkpoint", "memory") for number in (4, 5)
    }
    state, tensors = job.restore()
    assert (state["memory"], tensors["a"].item()) == ("memory-5.safetensors", 5)


def test_half_written_events_do_not_count_and_are_written_again(unbroken, tmp_path):
    run = small.make(tmp_path / "run", THREE)
    job = stopped(run.job("xkfac", 0), THREE.lines["xkfac"], 1, 1)
    events = job.events()
    with (job.path / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "epoch", "tas')
    assert job.events() == events
    assert not job.result().done
    small.finish(run, "xkfac")
    small.assert_same(job, unbroken[1].job("xkfac", 0))


@pytest.mark.parametrize("text", ["not json\n", "3\n", '{"time": 1}\n', "\xff\n"])
def test_a_damaged_line_of_events_is_an_error_that_names_the_job(tmp_path, text):
    run = small.make(tmp_path / "run", THREE)
    job = stopped(run.job("xkfac", 0), THREE.lines["xkfac"], 0, 1)
    with (job.path / "events.jsonl").open("a", encoding="latin-1") as file:
        file.write(text)
    with pytest.raises(RunError, match=r"events.jsonl' is damaged: line 3 is no (event|JSON); remove") as caught:
        job.result()
    assert f"remove the folder '{job.path}'" in str(caught.value)


@pytest.mark.parametrize("lost", ["all", "some"])
def test_events_that_were_lost_are_not_passed_over(tmp_path, lost):
    run = small.make(tmp_path / "run", THREE)
    job = stopped(run.job("xkfac", 0), THREE.lines["xkfac"], 0, 2)
    events = job.path / "events.jsonl"
    events.unlink() if lost == "all" else os.truncate(events, 30)
    with pytest.raises(RunError, match="shorter than its checkpoint says") as caught:
        small.finish(run, "xkfac")
    assert f"remove the folder '{job.path}'" in str(caught.value)


def test_half_files_of_killed_processes_are_removed(tmp_path):
    job = JobFolder(tmp_path, "line", 0)
    (tmp_path / ".xkfac-00ff.part").write_bytes(b"half")
    assert job.restore() is None
    job.save({}, {})
    (tmp_path / ".xkfac-00ff.part").write_bytes(b"half")
    assert job.restore() is not None
    assert not list(tmp_path.glob(".*"))


def test_a_run_is_held_by_one_process_and_asking_changes_nothing(tmp_path):
    run = small.make(tmp_path / "run", TINY)
    assert not run.in_use()
    assert not (run.path / "lock").exists()
    with run.locked():
        held = (run.path / "lock").read_bytes()
        assert run.in_use()
        with pytest.raises(RunError, match=f"is in use by process {os.getpid()} on") as caught, run.locked():
            pass
        assert not isinstance(caught.value, NotWritten)
        assert (run.path / "lock").read_bytes() == held
    assert not run.in_use()
    with run.locked():
        pass


def test_a_folder_that_is_there_already_is_left_alone(tmp_path):
    run = small.make(tmp_path / "run", TINY)
    with pytest.raises(RunError, match="exists already; go on with it by 'xkfac resume"):
        small.make(run.path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("mine")
    with pytest.raises(RunError, match="exists already; empty it, or choose another folder"):
        small.make(tmp_path / "other")
    with pytest.raises(RunError, match="exists already"):
        small.make(tmp_path / "other" / "file")
    (tmp_path / "empty").mkdir()
    small.make(tmp_path / "empty")


def test_a_folder_that_is_no_run_or_a_damaged_one_is_refused(tmp_path):
    with pytest.raises(RunError, match="is not the folder of a run"):
        RunFolder.open(tmp_path)
    run = small.make(tmp_path / "run", TINY)
    for name, text in (
        ("run.json", "{"), ("run.json", "[]"), ("run.json", "{}"), ("recipe.toml", "x"), ("recipe.toml", "[lines.A]"),
    ):  # fmt: skip
        good = (run.path / name).read_text()
        (run.path / name).write_text(text)
        with pytest.raises(RunError, match=r"is damaged|was changed since the run began"):
            RunFolder.open(run.path)
        (run.path / name).write_text(good)
    RunFolder.open(run.path)


def test_runs_are_found_in_a_folder_and_as_it_oldest_first(tmp_path):
    for name, when in (("b", 1000), ("a", 2000)):
        os.utime(small.make(tmp_path / name, TINY).path / "run.json", (when, when))
    (tmp_path / "c").mkdir()
    assert find_runs(tmp_path) == [tmp_path / "b", tmp_path / "a"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert find_runs(tmp_path / "nowhere") == []


def test_a_text_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "text"
    write_text(path, "old")
    with small.Disk(tmp_path, 2).faulty(), pytest.raises(NotWritten, match="text' could not be written"):
        write_text(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("text", "old")]
