"""Runs: jobs in processes of their own, with the same numbers whatever runs beside them, and clear ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import xkfac
from tests.helpers import small_runs as small
from xkfac.experiments import JobsFailed, RunError, load_recipe, results, resume, start
from xkfac.experiments.data.digits import DataError
from xkfac.experiments.provenance import provenance
from xkfac.experiments.recipes.recipe import RecipeError
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job_folder import NotWritten
from xkfac.experiments.runs.progress import RunStatus
from xkfac.experiments.runs.run_data import load_run_data
from xkfac.experiments.runs.running import Worker, hand_out
from xkfac.experiments.runs.worker import CHECKPOINT_SECONDS, checkpoint_seconds

NAMES = ["xkfac", "brn", "joint", "average", "wild"]
WILD = 'lines.wild={ method = "fine-tuning", norm = "none", lr = 1e38 }'


def test_jobs_side_by_side_give_the_numbers_of_jobs_one_after_the_other(tmp_path, monkeypatch):
    """The current folder has modules that workers import by name, and random numbers were drawn in this process."""
    for name in ("queue", "torch", "xkfac"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    torch.rand(3)
    seen = []
    made = small.recipe("repeats=2", "seed=4", WILD).only(NAMES)
    found = start(made, "side", jobs=2, device="cpu", show=lambda run, jobs: seen.append((run.path.name, len(jobs))))
    alone = small.finish(small.make(tmp_path / "alone", made))
    side = RunFolder.open(tmp_path / "side")
    for job in side.jobs():
        small.assert_same(job, alone.job(job.line, job.seed))
    assert found == results("side")
    assert found.lines == side.results().lines
    assert ("side", 2) in seen
    assert max(seen) == ("side", 2)
    collected = json.loads((tmp_path / "side" / "results.json").read_text())
    assert [(job["done"], job["diverged"]) for job in collected["jobs"]] == [*[(True, None)] * 4, (True, 0)] * 2
    assert not side.in_use()
    before = (tmp_path / "side" / "results.json").read_bytes()
    assert resume("side") == found  # no job, no process
    assert (tmp_path / "side" / "results.json").read_bytes() == before


def test_where_numbers_come_from_is_kept_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/where/xkfac", "run", "a b"])
    monkeypatch.setenv("GIT_COMMIT", "abc123")
    monkeypatch.setattr("xkfac.experiments.runs.running.hand_out", lambda *arguments: iter(()))
    start(small.recipe(), tmp_path / "run", device="cpu")
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (facts["command"], facts["commit"], facts["place"], facts["data"]) == (
        "xkfac run 'a b'",
        "abc123",
        "cpu",
        None,
    )
    assert (facts["xkfac"], facts["torch"]) == (xkfac.__version__, torch.__version__)
    assert {"started", "python", "system", "device", "cores", "threads", "safetensors"} <= set(facts)
    monkeypatch.delenv("GIT_COMMIT")
    assert provenance(torch.device("cpu"), 1)["commit"]


def test_a_run_that_cannot_be_made_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.delenv("XKFAC_DATA", raising=False)
    made, path = small.recipe(), tmp_path / "run"
    for error, match, recipe, options in (
        (RunError, "settings go with the name or path", made, {"settings": ["repeats=2"]}),
        (RunError, "device is 'gpu'; it must be auto, cpu or cuda", made, {"device": "gpu"}),
        (RecipeError, "no line of recipe 'small' matches 'xkfak'", made, {"lines": ["xkfak"]}),
        (RunError, "lines.xkfac: batch is 97, but there are 96 training", small.recipe("lines.xkfac.batch=97"), {}),
        (DataError, "validation=9000", small.recipe("data.validation=9000"), {}),
        (DataError, "mnist needs a folder", small.recipe("data.set=mnist"), {}),
        (DataError, "does not exist", small.recipe("data.set=mnist"), {"data": tmp_path / "nowhere"}),
    ):
        with pytest.raises(error, match=match):
            start(recipe, path, **options)
        assert not path.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_of_a_gpu_is_not_gone_on_with_without_one(tmp_path):
    with pytest.raises(RunError, match="torch sees no GPU"):
        start(small.recipe(), tmp_path / "run", device="cuda")
    RunFolder.create(tmp_path / "run", small.recipe(), {"place": "cuda", "data": None})
    with pytest.raises(RunError, match="was started on a GPU and there is none here"):
        resume(tmp_path / "run")


def test_a_number_of_jobs_below_1_is_refused(tmp_path):
    run = small.make(tmp_path / "run")
    with pytest.raises(RunError, match="jobs must be at least 1, not 0"):
        resume(run.path, jobs=0)


def test_every_job_that_fails_counts_and_the_others_are_run(tmp_path):
    run = small.make(tmp_path / "run", small.recipe().only(["plain", "joint"]))
    job = run.job("plain", 0)
    job.path.mkdir(parents=True)
    (job.path / "checkpoint-1.safetensors").write_bytes(b"")
    with pytest.raises(JobsFailed, match="1 of 2 jobs failed; the first, 'plain' with seed 0: no checkpoint") as caught:
        resume(run.path, jobs=1)
    assert str(job.path) in str(caught.value)
    assert run.job("joint", 0).result().done
    assert [each["done"] for each in json.loads((run.path / "results.json").read_text())["jobs"]] == [True, False]


def test_a_process_that_cannot_start_is_told_of(tmp_path, monkeypatch):
    run = small.make(tmp_path / "run", small.recipe().only(["plain", "joint"]))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(JobsFailed, match=r"2 of 2 jobs failed; .*: its process ended with exit code 1"):
        resume(run.path, jobs=1)
    assert not run.in_use()


def test_a_run_in_use_is_left_alone(tmp_path):
    run = small.make(tmp_path / "run")
    with run.locked():
        before = {path: path.read_bytes() for path in run.path.iterdir()}
        with pytest.raises(RunError, match=f"is in use by process {os.getpid()}"):
            resume(run.path)
        assert {path: path.read_bytes() for path in run.path.iterdir()} == before


def test_a_run_on_a_disk_that_can_only_be_read_is_shown_and_not_gone_on_with(tmp_path):
    run = small.make(tmp_path / "run")
    with small.Disk(run.path, 1, small.read_only).faulty():
        assert RunStatus.of(run.path).state == "interrupted"
        with pytest.raises(NotWritten, match=r"lock' could not be written \(Read-only file system\)"):
            resume(run.path)
    assert {path.name for path in run.path.iterdir()} == {"recipe.toml", "run.json"}


def test_an_interrupt_does_not_reach_a_process_that_is_just_starting(tmp_path, capfd):
    run = small.make(tmp_path / "run")
    with run.locked() as lock:
        worker = Worker.start(lock, 1)
        time.sleep(0.3)
        worker.process.send_signal(signal.SIGINT)
        worker.process.stdin.close()
        assert worker.process.wait(60) == 1  # because there is no more to do
        worker.stop()
    assert capfd.readouterr() == ("", "")


def test_accuracies_are_measured_on_the_part_that_the_recipe_says():
    test, validation = (
        load_run_data(recipe, None, torch.device("cpu")).parts
        for recipe in (small.recipe(), small.recipe("data.measure=validation"))
    )
    assert torch.equal(test.test.x, small.parts().test.x)
    assert torch.equal(validation.test.x, small.parts().validation.x)
    assert torch.equal(validation.train.x, test.train.x)


def test_how_often_states_are_written_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("XKFAC_CHECKPOINT_SECONDS", raising=False)
    assert checkpoint_seconds() == CHECKPOINT_SECONDS
    monkeypatch.setenv("XKFAC_CHECKPOINT_SECONDS", "0.5")
    assert checkpoint_seconds() == 0.5
    monkeypatch.setenv("XKFAC_CHECKPOINT_SECONDS", "often")
    with pytest.raises(xkfac.XkfacError, match="XKFAC_CHECKPOINT_SECONDS is 'often'"):
        checkpoint_seconds()


def test_the_demo_is_ready_to_run():
    assert load_recipe("demo").data.set == "digits"


def test_what_finds_no_room_on_a_gpu_waits_for_others_and_the_number_of_processes_falls(tmp_path):
    """Stand-ins for jobs of which two at a time fit: a third beside them runs out of memory."""
    code = f"""
import json, os, sys, time
from pathlib import Path
folder = Path({str(tmp_path)!r})
for line in sys.stdin:
    name = json.loads(line)["line"]
    mark = folder / f"running-{{name}}"
    if len(list(folder.glob("running-*"))) >= 2 or name == "huge":
        time.sleep(0.2)
        print(json.dumps({{"error": "torch.OutOfMemoryError: no room"}}), flush=True)
        continue
    mark.touch()
    time.sleep(1.0)
    mark.rename(folder / f"done-{{name}}")
    print(json.dumps({{}}), flush=True)
"""

    def employ():
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        return Worker(subprocess.Popen([sys.executable, "-c", code], **pipes))

    most = []
    failures = list(
        hand_out([{"line": name} for name in ("a", "b", "c", "huge")], 3, employ, lambda on: most.append(len(on)))
    )
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-a", "done-b", "done-c"]
    assert [message["line"] for message, _ in failures] == ["huge"]  # alone, and still no room
    assert most[-1] <= 2
