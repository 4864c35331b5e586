"""How far a run is: as a row of a table, and as lines that a person watches."""

import io

import pytest
from rich.console import Console

from tests.helpers import made_up
from tests.helpers import small_runs as small
from xkfac.experiments.runs.progress import Display, RunStatus, _duration, epochs_of

RECIPE = small.recipe().only(["plain", "joint"])


@pytest.fixture
def run(tmp_path):
    return small.make(tmp_path / "run", RECIPE)


def begin(job, epochs):
    """Write the events of a job that has begun, if it has not, and has passed some epochs more."""
    passed = len(job.result().epochs)
    if not job.events():
        job.note("start", line=job.line, seed=job.seed, untrained=[10.0] * 3)
    for place in range(passed, passed + epochs):
        job.note("epoch", task=place // 3, epoch=place % 3, lr=0.1, loss=1.0, penalty=0.0, validation=50.0)


def test_epochs_of_a_job_are_those_of_its_stages():
    assert epochs_of(RECIPE, "plain") == 3 * 3
    assert epochs_of(RECIPE, "joint") == 2 * 3
    images = made_up.images().recipe
    assert epochs_of(images, "xkfac") == epochs_of(images, "single") == 3 * 3  # the source is known


def test_a_run_is_interrupted_then_running_then_complete(run):
    standing = RunStatus.of(run.path)
    assert (standing.state, standing.jobs_done, standing.jobs) == ("interrupted", 0, 2)
    assert (standing.epochs_done, standing.epochs, standing.accuracy) == (0, 15, None)
    begin(run.job("plain", 0), 2)
    with run.locked():
        standing = RunStatus.of(run.path)
    assert (standing.state, standing.epochs_done) == ("running", 2)
    assert RunStatus.of(run.path).cells()[2:] == ["interrupted", "0/2", "2/15", "-"]
    small.finish(run, "joint")
    (run.job("plain", 0).path / "events.jsonl").unlink()
    small.finish(run)
    standing = RunStatus.of(run.path)
    jobs = [run.job(name, 0).result().average_accuracy()[-1] for name in RECIPE.lines]
    assert (standing.state, standing.epochs_done) == ("complete", 15)
    assert standing.accuracy == pytest.approx(sum(jobs) / 2)
    assert standing.cells() == [
        str(run.path), "small", "complete", "2/2", "15/15", f"{standing.accuracy:.2f}"
    ]  # fmt: skip


def test_jobs_that_diverged_are_told(run):
    begin(run.job("plain", 0), 1)
    run.job("plain", 0).note("end", diverged=0)
    small.finish(run, "joint")
    standing = RunStatus.of(run.path)
    assert (standing.state, standing.diverged) == ("complete", 1)
    assert standing.cells()[3] == "2/2, 1 diverged"


@pytest.mark.parametrize(
    ("name", "text"), [("run.json", "{"), ("recipe.toml", "[lines.A]"), ("jobs/plain/0/events.jsonl", "x\n")]
)
def test_a_damaged_run_is_said_to_be_so(run, name, text):
    begin(run.job("plain", 0), 1)
    (run.path / name).write_text(text)
    assert RunStatus.of(run.path).state == "damaged"


def test_asking_leaves_no_trace_in_a_run(run):
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    RunStatus.of(run.path)
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


def test_a_file_gets_a_line_now_and_then_with_the_time_left(run):
    text, now = io.StringIO(), [0.0]
    with Display(Console(file=text), clock=lambda: now[0]) as display:
        for second, epochs in ((0, 0), (10, 1), (31, 0), (40, 1), (62, 2)):
            now[0] = second
            if epochs:
                begin(run.job("plain", 0), epochs)
            display.show(run, run.jobs()[:1])
    assert text.getvalue().splitlines() == [
        "small: 0/2 jobs, 1/15 epochs",
        "small: 0/2 jobs, 4/15 epochs, 3 min 47 s left",
    ]


def test_a_terminal_shows_the_jobs_that_run(run):
    text = io.StringIO()
    begin(run.job("plain", 0), 2)
    console = Console(file=text, force_terminal=True, width=120, color_system=None)
    with Display(console) as display:
        display.show(run, run.jobs())
        display._live.refresh()
    shown = text.getvalue()
    for part in ("small: 0/2 jobs, 2/15 epochs", "plain, seed 0", "1/3", "2/3", "50.00", "joint, seed 0"):
        assert part in shown


def test_a_quiet_console_shows_nothing(run):
    text = io.StringIO()
    with Display(Console(file=text, force_terminal=True, quiet=True)) as display:
        display.show(run, run.jobs())
        display._live.refresh()
    assert text.getvalue() == ""


def test_durations_are_read_at_a_glance():
    assert [_duration(s) for s in (0.4, 59, 61, 3599, 7325)] == ["0 s", "59 s", "1 min 1 s", "59 min 59 s", "2 h 2 min"]
