"""The command: what it prints, its exit codes, and runs that are interrupted and killed by every means there is."""

import functools
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import small_runs as small
from xkfac.experiments.report import page
from xkfac.experiments.runs.folder import RunFolder

COMMANDS = ["demo", "run", "pretrain", "tune", "resume", "status", "report", "compare", "inspect", "card", "recipe"]


@pytest.fixture
def no_report(monkeypatch):
    """Reports take seconds; where they do not matter an empty page will do."""

    def written(runs, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.html").write_text("")
        return folder / "report.html", []

    monkeypatch.setattr(page, "write_report", written)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs that are complete, made without the command."""
    folder = tmp_path_factory.mktemp("runs")
    runs = []
    for name, repeats in (("first", 2), ("second", 2)):
        made = small.recipe(f"repeats={repeats}", f"seed={len(runs)}").only(["xkfac", "plain", "joint"])
        run = small.finish(small.make(folder / name, made))
        run.collect()
        os.utime(run.path / "run.json", (1000 + len(runs),) * 2)
        runs.append(run)
    return runs


@pytest.fixture
def recipe_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(small.TEXT)
    return path


def assert_complains(result, code, *parts):
    """Check that a command failed with one sentence and nothing else."""
    assert result[0] == code, result
    assert result[1] == ""
    assert "Traceback" not in result[2]
    assert result[2].startswith("error: ")
    assert len(result[2].strip().splitlines()) == 1
    for part in parts:
        assert part in result[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(xkfac, command):
    for flag in ("--help", "-h"):
        code, out, err = xkfac(command, flag)
        assert (code, err) == (0, "")
        assert "Usage: xkfac" in out
        assert command in out


def test_help_lists_the_commands_and_the_version_is_shown(xkfac):
    code, out, _ = xkfac("--help")
    assert code == 0
    assert all(command in out for command in COMMANDS)
    assert "Exit codes" in out
    assert xkfac("--version") == (0, "xkfac 0.2.0\n", "")


def test_what_is_no_command_or_option_ends_with_2(xkfac):
    for arguments in (
        ["rum"],
        ["run"],
        ["run", "demo", "--job", "x"],
        ["run", "demo", "-j", "0"],
        ["inspect", "m", "--seed", "9" * 20],
    ):
        code, out, err = xkfac(*arguments)
        assert (code, out) == (2, "")
        assert "Traceback" not in err


def test_recipes_are_listed_and_printed(xkfac, recipe_file):
    code, out, err = xkfac("recipe")
    assert (code, err) == (0, "")
    assert "demo" in out
    assert xkfac("recipe", "demo")[1].startswith('name = "demo"')
    assert xkfac("recipe", recipe_file)[1] == small.TEXT
    assert_complains(xkfac("recipe", "dmo"), 2, "there is no recipe 'dmo'", "did you mean 'demo'?")


def test_what_cannot_be_run_is_said_in_one_sentence(xkfac, recipe_file, tmp_path, monkeypatch):
    monkeypatch.delenv("XKFAC_DATA", raising=False)
    run = ["run", recipe_file, "-o", tmp_path / "run"]
    assert_complains(xkfac("run", "dmo"), 2, "did you mean 'demo'?")
    assert_complains(xkfac(*run, "--set", "defaults.epoch=2"), 2, "did you mean 'epochs'?")
    assert_complains(xkfac(*run, "--line", "xkfak"), 2, "did you mean 'xkfac'?")
    assert_complains(xkfac(*run, "--device", "gpu"), 2, "auto, cpu or cuda")
    assert_complains(xkfac(*run, "--set", "data.set=mnist"), 2, "mnist needs a folder", "--data", "--download")
    assert_complains(xkfac(*run, "-s", "data.set=mnist", "--data", tmp_path / "no"), 2, "does not exist")
    assert_complains(xkfac(*run, "-s", "data.set=mnist", "--data", tmp_path), 2, "train-images-idx3-ubyte")
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("")
    assert_complains(xkfac(*run), 2, "exists already; empty it, or choose another folder")
    assert_complains(xkfac("run", recipe_file, "-o", "/proc/xkfac"), 2, "the folder '/proc/xkfac' cannot be made")
    assert_complains(xkfac("resume", tmp_path), 2, "is not the folder of a run")
    assert_complains(xkfac("report", tmp_path), 2, "is not the folder of a run")


def test_a_run_in_use_is_refused(xkfac, tmp_path):
    run = small.make(tmp_path / "run")
    with run.locked():
        assert_complains(xkfac("resume", run.path), 2, f"is in use by process {os.getpid()}")
        assert xkfac("status", run.path, "--json")[1].count('"running"') == 1


def test_status_shows_runs_of_every_state(xkfac, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert xkfac("status") == (0, "no runs in 'runs'; 'xkfac run RECIPE' starts one\n", "")
    folder = finished[0].path.parent
    code, out, err = xkfac("status", folder)
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["run", "recipe", "state", "jobs", "epochs", "average", "accuracy"]
    assert [row.split()[0] for row in rows] == [str(run.path) for run in finished]  # never cut off
    for run, row in zip(finished, json.loads(xkfac("status", folder, "--json")[1]), strict=True):
        assert (row["run"], row["state"], row["jobs_done"], row["jobs"]) == (str(run.path), "complete", 6, 6)
    small.make(tmp_path / "runs" / "begun")
    small.make(tmp_path / "runs" / "bad")
    (tmp_path / "runs" / "bad" / "recipe.toml").write_text("?")
    states = {Path(row["run"]).name: row["state"] for row in json.loads(xkfac("status", "--json")[1])}
    assert states == {"begun": "interrupted", "bad": "damaged"}


def test_a_report_is_written_for_runs(xkfac, finished, tmp_path):
    code, out, err = xkfac("report", finished[0].path, finished[1].path, "-o", tmp_path / "both", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert Path(told["report"]).is_file()
    assert all(Path(figure).is_file() for figure in told["figures"])
    assert len(told["figures"]) > 0


def test_a_report_is_summed_up_in_a_table(xkfac, finished, tmp_path, no_report):
    code, out, err = xkfac("report", finished[0].path, "-o", tmp_path / "one")
    assert (code, err) == (0, "")
    assert f"report: {tmp_path / 'one' / 'report.html'}" in out
    assert "mean ± standard deviation over repeats" in out
    average = finished[0].results().lines["plain"].curve(lambda job: job.average_accuracy())[-1]
    assert str(average) in next(line for line in out.splitlines() if line.startswith("plain"))


def test_runs_are_compared_line_by_line(xkfac, finished, tmp_path):
    first, second = finished
    code, out, err = xkfac("compare", first.path, second.path)
    assert (code, err) == (0, "")
    assert {line.split()[0] for line in out.splitlines()[1:4]} == {"xkfac", "plain", "joint"}
    rows = {row["label"]: row for row in json.loads(xkfac("compare", first.path, second.path, "--json")[1])}
    means = [run.results().lines["xkfac"].curve(lambda job: job.average_accuracy())[-1].mean for run in finished]
    assert rows["xkfac"]["difference"] == pytest.approx(means[1] - means[0], abs=1e-6) or rows["xkfac"][
        "difference"
    ] == pytest.approx(means[0] - means[1], abs=1e-6)
    assert_complains(xkfac("compare", first.path), 2, "at least two runs")
    empty = small.make(tmp_path / "empty", small.recipe().only(["ewc"]))
    assert_complains(xkfac("compare", first.path, empty.path), 2, "no line of the same name")


def test_a_memory_file_is_shown_and_what_is_none_is_refused(xkfac, finished, tmp_path):
    job = finished[0].job("xkfac", 0).path
    code, out, err = xkfac("inspect", job / "memory-2.safetensors")
    assert (code, err) == (0, "")
    assert "method: xkfac" in out
    assert "1x8x65" in out
    shown = json.loads(xkfac("inspect", job / "memory-2.safetensors", "--json")[1])
    assert (shown["tasks"], len(shown["units"])) == (2, 3)
    checkpoint = next(job.glob("checkpoint-*.safetensors"))
    assert xkfac("inspect", job / "memory-2.safetensors", "--plot", tmp_path / "m.svg")[0] == 0
    assert "H''" in (tmp_path / "m.svg").read_text()
    assert_complains(xkfac("inspect", job / "memory-2.safetensors", "--plot", tmp_path / "m.doc"), 2, "ends in .png")
    assert xkfac("card", job / "memory-2.safetensors")[1].startswith("---\nlibrary_name: xkfac\n")
    assert_complains(xkfac("inspect", checkpoint), 2, "is a safetensors file but no xkfac memory")
    (tmp_path / "text").write_text("hello")
    assert_complains(xkfac("inspect", tmp_path / "text"), 2, "no safetensors file")
    assert_complains(xkfac("inspect", tmp_path / "none"), 2, "does not exist")
    assert_complains(xkfac("inspect", tmp_path), 2, "is a folder")


def test_a_run_that_diverges_is_complete_and_says_so(xkfac, tmp_path, no_report):
    made = small.recipe("lines.plain.lr=1e38", "lines.plain.norm=none").only(["plain"])
    run = small.finish(small.make(tmp_path / "run", made)).path
    code, out, err = xkfac("resume", run)
    assert (code, err) == (0, "")
    assert "plain" in out
    status = json.loads(xkfac("status", run, "--json")[1])[0]
    assert (status["state"], status["diverged"]) == ("complete", 1)
    assert "1/1, 1 diverged" in xkfac("status", run)[1]
    job = json.loads(xkfac("report", run, "--json")[1])["jobs"]["small/plain"][0]
    assert (job["diverged"], job["accuracy"], job["epochs"][-1]["loss"]) == (0, [], None)


def test_a_full_disk_ends_a_run_that_can_be_gone_on_with(xkfac, recipe_file, tmp_path, monkeypatch):
    monkeypatch.setenv("XKFAC_CHECKPOINT_SECONDS", "0")
    run = tmp_path / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))  # files can be no larger; processes inherit it
    try:
        result = xkfac("run", recipe_file, "-o", run, "-l", "xkfac", "-j", "1", "-q")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_complains(result, 1, "1 of 1 jobs failed", "checkpoint-1.safetensors' could not be written (File too large)")
    assert "'xkfac resume' goes on" in result[2]
    gone_on, alone = small.finish(RunFolder.open(run)), small.finish(small.make(tmp_path / "alone"), "xkfac")
    small.assert_same(gone_on.job("xkfac", 0), alone.job("xkfac", 0))


def test_the_demo_is_gone_on_with_and_shown_again(xkfac, tmp_path, no_report):
    run = small.finish(small.make(tmp_path / "demo" / "run", small.recipe().only(["plain"])))
    code, out, err = xkfac("demo", "--output", tmp_path / "demo")
    assert (code, "plain" in out, "is there already" in err) == (0, True, True)
    assert xkfac("demo", "--output", tmp_path / "demo", "--quiet")[2] == ""
    assert json.loads(xkfac("demo", "--output", tmp_path / "demo", "--json")[1])["jobs"]["small/plain"][0]["done"]
    assert run.path.is_dir()


@pytest.mark.parametrize("words", ["recipe dem", "run dem"])
def test_names_are_completed(xkfac, monkeypatch, words):
    monkeypatch.setenv("_XKFAC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"xkfac {words}")
    monkeypatch.setenv("COMP_CWORD", "2")
    code, out, _ = xkfac()
    assert (code, out.split()) == (0, ["demo"])


def test_the_script_for_completion_is_shown(xkfac, monkeypatch):
    monkeypatch.setenv("_XKFAC_COMPLETE", "source_bash")
    code, out, _ = xkfac()
    assert (code, "complete" in out, "_XKFAC_COMPLETE" in out) == (0, True, True)


def test_without_the_packages_of_the_command_there_is_one_sentence():
    block = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("typer", "rich"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Blocked())
import xkfac
import xkfac.experiments
from xkfac.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "the xkfac command needs more packages (No module named 'typer'): pip install 'xkfac[experiments]'\n"
    )


class Process:
    """The command in processes of its own, a group by themselves, on the run that is killed again and again."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "xkfac.cli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # whatever started the tests
            env={**os.environ, "XKFAC_CHECKPOINT_SECONDS": "0"},
        )

    def workers(self):
        """Return the processes that the command has started."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(child) for child in path.read_text().split()]

    def wait_for(self, run, growth, moments):
        """Wait until the events of a run have grown by so many, and then for a random moment more."""

        def events():
            return sum(path.read_bytes().count(b"\n") for path in run.glob("jobs/*/*/events.jsonl"))

        before, end = events(), time.monotonic() + 120
        while events() < before + growth:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))

    def ended(self):
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def test_a_run_survives_whatever_ends_its_processes(xkfac, tmp_path, recipe_file, no_report):
    """An interrupt, kill -9 of all, of the first process, and of a worker; the numbers are those of an unbroken run."""
    moments = random.Random(11)
    path = tmp_path / "a run"
    run = RunFolder(path, small.recipe(), small.FACTS)

    interrupted = Process("run", recipe_file, "-o", path, "-j", "1")
    interrupted.wait_for(path, moments.randint(5, 20), moments)
    os.killpg(interrupted.process.pid, signal.SIGINT)
    code, out, err = interrupted.ended()
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == f"interrupted; go on with: xkfac resume {shlex.quote(str(path))}"
    assert "Traceback" not in err
    assert not run.in_use()

    killed = Process("resume", path, "-j", "2")
    killed.wait_for(path, moments.randint(5, 20), moments)
    os.killpg(killed.process.pid, signal.SIGKILL)
    assert killed.ended()[0] == -signal.SIGKILL

    orphaned = Process("resume", path, "-j", "1")
    orphaned.wait_for(path, moments.randint(5, 20), moments)
    (worker,) = orphaned.workers()
    os.kill(orphaned.process.pid, signal.SIGKILL)
    orphaned.process.wait()
    end = time.monotonic() + 120
    while run.in_use() or Path(f"/proc/{worker}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    orphaned.ended()

    starved = Process("resume", path, "-j", "1")
    starved.wait_for(path, moments.randint(1, 5), moments)
    os.kill(starved.workers()[0], signal.SIGKILL)
    code, out, err = starved.ended()
    assert (code, out) == (1, "")
    assert "jobs failed; the first, '" in err
    assert "its process was killed by signal 9; is memory short?" in err

    code, out, err = xkfac("resume", path, "-j", "1", "--quiet", "--json")
    assert (code, err) == (0, "")
    assert {name: jobs[0]["done"] for name, jobs in json.loads(out)["jobs"].items()} == {
        f"small/{name}": True for name in run.recipe.lines
    }
    unbroken = small.finish(small.make(tmp_path / "unbroken"))
    for name in run.recipe.lines:
        small.assert_same(run.job(name, 0), unbroken.job(name, 0))
    assert all(job["done"] for job in json.loads((path / "results.json").read_text())["jobs"])


@pytest.mark.parametrize("setting", ["defaults.label_smoothing=2", "defaults.head_epochs=-1", "threads=100000"])
def test_numbers_that_mean_nothing_are_refused_before_anything_is_written(xkfac, recipe_file, tmp_path, setting):
    key, _, value = setting.rpartition(".")[2].partition("=")
    assert_complains(xkfac("run", recipe_file, "-o", tmp_path / "run", "-s", setting), 2, f"{key} must be ", value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("path", ["a" * 5000, "/".join(["a" * 200] * 25)])
def test_a_path_that_is_too_long_is_said_in_one_sentence(xkfac, recipe_file, tmp_path, monkeypatch, finished, path):
    monkeypatch.chdir(tmp_path)
    commands = ["run", "recipe", "resume", "status", "report", "inspect"]
    for arguments in (
        *([command, path] for command in commands),
        ["compare", path, path],
        ["run", recipe_file, "-o", path],
        ["run", recipe_file, "--data", path],
        ["tune", recipe_file, "-l", "xkfac", "-o", path],
        ["demo", "--output", path],
        ["report", finished[0].path, "-o", path],
        ["pretrain", path, "w.safetensors", "--data", tmp_path],
        ["pretrain", "insects", f"{path}.safetensors", "--data", tmp_path],
    ):
        assert_complains(xkfac(*arguments), 2, "cannot be used (File name too long); give a shorter one")
    assert [each.name for each in tmp_path.iterdir()] == [recipe_file.name]


def test_toml_that_is_nested_too_deeply_is_said_in_one_sentence(xkfac, recipe_file, tmp_path):
    recipe_file.write_text("x = " + "[" * 100_000)
    assert_complains(xkfac("run", recipe_file, "-o", tmp_path / "run"), 2, "small.toml' is nested too deeply")
    assert_complains(xkfac("pretrain", "a", "b.safetensors", "-s", "x=" + "[" * 100_000), 2, "is nested too deeply")


def test_a_figure_name_that_is_too_long_is_refused_before_anything_is_written(xkfac, recipe_file, tmp_path):
    recipe_file.write_text(f'{small.TEXT}[figures.{"z" * 300}]\nlines = ["plain"]\n')
    result = xkfac("run", recipe_file, "-o", tmp_path / "run")
    assert_complains(result, 2, "the figure name 'zzz", "has 300 characters", "it must have at most 100")
    assert not (tmp_path / "run").exists()


def test_a_file_that_fails_where_nobody_expected_it_is_one_sentence(xkfac, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied", "/some/where")

    monkeypatch.setattr("xkfac.experiments.runs.folder.find_runs", fail)
    assert_complains(xkfac("status"), 2, "'/some/where': Permission denied")


def test_settings_of_a_source_network_that_mean_nothing_are_refused(xkfac, tmp_path):
    for setting, message in (
        ("smoothing=2", "smoothing must be a number of at least 0 and below 1, not 2.0"),
        ("epochs=1000000000000", "epochs must be at least 1 and at most 100,000, not 1000000000000"),
        ("pixels=0", "pixels must be at least 1"),
        ("scale=[2, 3]", "scale must be two growing numbers above 0 and up to 1"),
        ("validation=1", "validation must be a number of at least 0 and below 1, not 1.0"),
        ("seed=-1", "seed must be at least 0"),
    ):
        result = xkfac("pretrain", "insects", tmp_path / "w.safetensors", "--data", tmp_path, "-s", setting)
        assert_complains(result, 2, message)
    result = xkfac("pretrain", "insects", tmp_path / "w.safetensors", "--data", tmp_path, "--device", "quantum")
    assert_complains(result, 2, "device is 'quantum'; it must be auto, cpu or cuda")
    assert not list(tmp_path.iterdir())
