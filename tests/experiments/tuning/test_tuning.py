"""Tuning: choices as brute force makes them, the same whatever is killed or runs beside, and no source data in them."""

import json
import math
import multiprocessing
import random
import shutil
import signal
import statistics
from dataclasses import asdict, replace

import pytest
import torch

from tests.helpers import small_runs as small
from tests.helpers.made_up_images import make_tree
from tests.helpers.small_runs import Disk, die
from xkfac import cli
from xkfac.experiments import RunError, resume
from xkfac.experiments.data.digits import DataError
from xkfac.experiments.networks.backbones import make_backbone
from xkfac.experiments.networks.weights import save_source
from xkfac.experiments.recipes.parsing import parse_recipe
from xkfac.experiments.records import Trial
from xkfac.experiments.runs.folder import RunFolder
from xkfac.experiments.runs.job import JobRun
from xkfac.experiments.runs.progress import RunStatus
from xkfac.experiments.runs.run_data import load_run_data
from xkfac.experiments.runs.tasks import ImageTasks, PermutedTasks, Refused
from xkfac.experiments.runs.worker import run_job
from xkfac.experiments.tuning.trials import Choice, TunedJob, grid_of, ranked, tuned_jobs, with_setting
from xkfac.experiments.tuning.tuner import PHASES, Tuner, phase_done
from xkfac.experiments.tuning.tuning import chosen, go_on, tune, tuning_status

TEXT = """
name = "tuned"
[data]
set = "digits"
validation = 48
train = 96
[defaults]
tasks = 3
epochs = 2
batch = 16
widths = [8]
curvature = { draws = 1 }
grid = { lr = [0.3, 0.05, 1e6], damping = [1e-4, 0.1] }
[lines.xkfac]
[lines.balanced]
balance = true
balance_every = 2
[lines.single]
method = "single"
grid = { lr = [0.01, 0.3] }
[lines.plain]
method = "fine-tuning"
grid = { lr = [0.3, 0.05] }
"""


def facts(**changes):
    return {"place": "cpu", "data": None, "tuning": {"scatter": True, **changes}}


def made(path, *names, text=TEXT, settings=(), **tuning):
    """The folder of a tuning that nothing has been done of."""
    recipe = parse_recipe(text, "tuned", settings)
    return RunFolder.create(path, recipe.only(names) if names else recipe, facts(**tuning))


def work(run, *phases, seconds=0.0):
    """Work on phases in this process, to their end."""
    for phase in phases or PHASES:
        tuner = Tuner(run, phase, seconds)
        tuner.work()
        assert tuner.failures == {}
    return run


def job(run, line):
    return TunedJob(run, run.job(line, run.recipe.seed))


def told(run, *lines):
    """All events of lines of a run, and what was chosen, beside times."""
    lines = lines or tuple(run.recipe.lines)
    choices = [each for each in chosen(run) if each.line in lines]
    choices = [replace(each, runner_up=each.runner_up and replace(each.runner_up, seconds=0.0)) for each in choices]
    return [small.told(each.folder) for each in tuned_jobs(run) if each.folder.line in lines], choices


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A tuning of all lines by one process that nothing disturbs."""
    torch.set_num_threads(1)
    return work(made(tmp_path_factory.mktemp("tuning") / "run"))


# What is chosen


def brute_force(line, folder, floors=None):
    """Choose task by task with sequences in memory alone; yield point, validation and last loss of each task."""
    sequence = PermutedTasks(line, 0, small.parts())
    weights, memory = None, None
    for task in range(line.tasks):
        found = []
        for number, point in enumerate(grid_of(line) if task else [Trial(0, line.lr, line.damping, None)]):
            place = replace(folder, path=folder.path / f"{task}-{number}")
            learner = JobRun(with_setting(line, point), 0, sequence, place, 1e9, floors=floors or {}, memory=memory)
            learner.state.stage = task
            if weights is not None and line.method != "single":
                learner.model.load_state_dict(weights)
            if learner.learn(task, {}):
                right = sequence.accuracy(learner.model, task, "validation")
                found.append((right, -point.lr, point.damping, place.events()[-1]["loss"], learner))
        right, lr, damping, loss, best = max(found, key=lambda each: each[:3])
        best.line = line
        if line.method != "single":
            best.remember(task)
        weights, memory = best.model.state_dict(), best.memory
        yield (-lr, damping, right), loss


def test_choices_are_those_of_brute_force_and_c_t_is_that_of_the_chosen_single_network(unbroken, tmp_path):
    lines, floors = unbroken.recipe.lines, {}
    for name in ("single", "xkfac", "plain", "balanced"):
        steps = list(brute_force(lines[name], replace(unbroken.job(name, 0), path=tmp_path / name), floors))
        choices = job(unbroken, name).choices()
        expected = [step if lines[name].penalised else (step[0], None, step[2]) for step, _ in steps]
        assert [(c.chosen.lr, c.chosen.damping, c.chosen.validation) for c in choices][1:] == expected[1:]
        if name == "single":
            floors = {f"permutation {task}": loss for task, (_, loss) in enumerate(steps)}
            assert unbroken.floors(0) == floors
            rejected = [job(unbroken, name).stage(1).trial(n).events()[-1]["loss"] for n in range(2)]
            assert len(set(rejected)) == 2  # another choice would have had another C_t
            assert {choice.chosen.number for choice in choices[1:]} == {1}


def test_a_point_that_diverges_loses(unbroken):
    for choice in job(unbroken, "xkfac").choices()[1:]:
        assert (choice.trials, choice.lost) == (6, 2)
        assert choice.chosen.lr < 1e6
        assert choice.why.endswith("; 2 diverged")


def test_a_grid_of_one_point_gives_a_plain_run(tmp_path):
    lines = ["xkfac", "kfac", "ewc", "fixed-bn", "brn", "single", "balanced", "average", "plain", "calibrated"]
    calibrated = "lines.calibrated={ calibrated = true, epochs = 30, tasks = 2 }"
    recipe = small.recipe("defaults.epochs=2", calibrated).only(lines)
    plain = small.make(tmp_path / "plain", recipe)
    materials = load_run_data(recipe, None, torch.device("cpu"))
    for name in sorted(lines, key=lambda name: name != "single"):
        run_job(plain, name, 0, materials, 1e9)
    run = work(RunFolder.create(tmp_path / "tuned", recipe, facts()), seconds=1e9)
    for name in lines:
        events = [event for event in small.told(run.job(name, 0)) if event["event"] != "choice"]
        assert events == small.told(plain.job(name, 0)), name


def test_a_job_whose_trials_all_diverge_ends_there_and_what_it_should_have_said_is_missed(tmp_path):
    run = made(tmp_path / "run", "single", "balanced", settings=["lines.single.grid={ lr = [1e6, 1e7] }"])
    work(run, "prepare")
    tuner = Tuner(run, "choose", 0.0)
    tuner.work()
    assert list(tuner.failures) == ["balanced/0"]
    assert "needs C_t of task 'permutation 1'" in tuner.failures["balanced/0"]
    assert job(run, "single").choices()[1].why == "all 2 trials diverged"
    alone = work(made(tmp_path / "alone", "single", settings=["lines.single.grid={ lr = [1e6, 1e7] }"]))
    result = alone.job("single", 0).result()
    assert (result.done, result.diverged, len(result.accuracy)) == (True, 1, 1)


def test_of_equals_a_smaller_lr_then_a_larger_damping_is_chosen():
    tried = [(0.1, 1e-3, 90.0), (0.05, 1e-4, 90.0), (0.05, 1e-3, 90.0), (0.01, 1e-3, 89.0), (0.001, 1.0, None)]
    order = ranked([Trial(number, *each) for number, each in enumerate(tried)])
    assert [each.number for each in order] == [2, 1, 0, 3]
    assert Choice("t", order[0], order[1], 5, 1).why == "as good as the next of 5, with the larger damping; 1 diverged"
    assert Choice("t", order[0], order[2], 5).why == "as good as the next of 5, with the smaller lr"
    assert Choice("t", order[2], order[3], 5).why == "best of 5, by 1.00 points"
    assert Choice("t", order[0], None, 1).why == "the only one"


def test_a_grid_is_every_pair_once_and_replaces_the_rate_of_targets():
    recipe = parse_recipe(TEXT, "tuned", ["lines.xkfac.grid={ lr = [0.1, 0.2, 0.1] }", "lines.xkfac.target_lr=0.7"])
    line = recipe.lines["xkfac"]
    assert grid_of(line) == [Trial(0, 0.1, line.damping, None), Trial(1, 0.2, line.damping, None)]
    assert with_setting(line, Trial(0, 0.2, 0.5, None)).learning_rate(1, 0) == 0.2
    assert with_setting(line, Trial(0, 0.2, 0.5, None)).damping == 0.5
    assert grid_of(replace(line, grid={})) == [Trial(0, 0.7, line.damping, None)]
    assert grid_of(recipe.lines["plain"]) == [Trial(0, 0.3, None, None), Trial(1, 0.05, None, None)]


# What may be read


def test_nothing_but_training_and_validation_data_of_the_task_is_read_while_choosing(tmp_path, monkeypatch):
    run = work(made(tmp_path / "run"), "prepare")
    read = []

    def watched(name, parts):
        real = getattr(PermutedTasks, name)

        def call(self, *arguments):
            tasks, part = parts(*arguments)
            read.append((tuple(tasks), part))
            return real(self, *arguments)

        monkeypatch.setattr(PermutedTasks, name, call)

    watched("train", lambda tasks: (tasks, "train"))
    watched("fixed", lambda task, part: ([task], part))
    watched("accuracy", lambda model, task, part: ([task], part))
    work(run, "choose")
    assert set(read) == {((task,), part) for task in (1, 2) for part in ("train", "validation")}


def test_tasks_restricted_to_one_refuse_all_others(unbroken):
    sequence = PermutedTasks(unbroken.recipe.lines["xkfac"], 0, small.parts()).restricted(1)
    model = sequence.network()
    refused = [
        lambda: sequence.train(range(1)),
        lambda: sequence.train(range(2)),
        lambda: sequence.fixed(0, "train"),
        lambda: sequence.fixed(2, "validation"),
        lambda: sequence.accuracy(model, 0, "validation"),
        lambda: sequence.accuracy(model, 1, "test"),
    ]
    for call in refused:
        with pytest.raises(Refused, match="must not depend on"):
            call()
    assert sequence.accuracy(model, 1, "validation") >= 0


IMAGES = """
name = "pictures"
[images]
model = "shufflenet_v2_x0_5"
weights = "source.safetensors"
pixels = 16
validation = 0.34
[tasks.old]
tree = "old"
[tasks.new]
tree = "new"
[defaults]
epochs = 1
batch = 4
early_stopping = false
curvature = { draws = 1 }
[lines.xkfac]
batches = 2
grid = { lr = [0.01, 0.001] }
[lines.single]
method = "single"
grid = { lr = [0.01] }
"""


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """A tuning of images whose source is prepared, and the folder of its data."""
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    make_tree(data / "old", seed=1)
    make_tree(data / "new", seed=2)
    network = make_backbone("shufflenet_v2_x0_5", {"old": 3, "new": 3}, seed=0)
    save_source(network, data / "source.safetensors", "old", {})
    known = {**facts(), "data": str(data), "classes": {"old": 3, "new": 3}}
    return work(RunFolder.create(tmp_path / "run", parse_recipe(IMAGES, "pictures"), known), "prepare"), data


def test_choices_are_made_where_source_and_test_pictures_are_gone(pictures, tmp_path, monkeypatch):
    run, data = pictures
    (data / "old").rename(tmp_path / "away")
    shutil.rmtree(tmp_path / "cache")
    hidden = {path: path.read_bytes() for path in (data / "new" / "test").rglob("*.png")}
    for path in hidden:
        path.write_bytes(b"no image")
    with pytest.raises(DataError):
        Tuner(run, "prepare")
    with pytest.raises(DataError):
        Tuner(run, "measure")
    real = ImageTasks._examples

    def examples(self, task, part, **options):
        assert self.tasks[task] == "new"
        assert part != "test"
        return real(self, task, part, **options)

    with monkeypatch.context() as only:
        only.setattr(ImageTasks, "_examples", examples)
        work(run, "choose")
    for path, content in hidden.items():
        path.write_bytes(content)
    (tmp_path / "away").rename(data / "old")
    work(run, "measure")
    result = run.job("xkfac", 0).result()
    assert result.done
    assert [len(row) for row in result.accuracy] == [1, 2]
    assert result.tasks == ["old", "new"]
    assert run.floors(0).keys() == {"new"}
    assert not list(run.path.glob("jobs/*/*/stages/1/memory*"))


# What is measured


def test_measured_are_the_chosen_networks_and_every_trial(unbroken):
    sequence = PermutedTasks(unbroken.recipe.lines["xkfac"], 0, small.parts())
    model, xkfac = sequence.network(), job(unbroken, "xkfac")
    result = unbroken.job("xkfac", 0).result()
    assert result.untrained == [sequence.accuracy(model, task, "test") for task in range(3)]
    for task in range(3):
        if task:
            assert result.before[task] == sequence.accuracy(model, task, "test")
        xkfac.stage(task).load(model)
        assert result.accuracy[task] == [sequence.accuracy(model, known, "test") for known in range(task + 1)]
        if task:
            best, trials = xkfac.choices()[task].chosen, xkfac.stage(task).measured().trials
            row = {"target": result.accuracy[task][-1], "average": statistics.fmean(result.accuracy[task])}
            assert trials[str(best.number)] == row
            assert sorted(trials) == ["0", "1", "2", "3"]  # two diverged
    weights = sorted(path.parent.name for path in xkfac.stage(1).path.rglob("weights.safetensors"))
    assert weights == [str(xkfac.choices()[1].chosen.number)]


def test_without_a_scatter_weights_go_when_a_choice_is_made_and_choices_are_the_same(unbroken, tmp_path):
    run = work(made(tmp_path / "run", "xkfac", scatter=False), "prepare", "choose")
    assert len(list(run.path.rglob("stages/1/trials/*/weights.safetensors"))) == 1
    assert not list(run.path.rglob("checkpoint-*"))
    work(run, "measure")
    assert small.told(run.job("xkfac", 0)) == small.told(unbroken.job("xkfac", 0))
    assert not job(run, "xkfac").stage(1).measured().trials


# Processes


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["pytest", "tests.helpers.warm_up"])


def mortal(path, at):
    """Tune in this process, which dies at the operation on its files of that number, 0 for never."""
    torch.set_num_threads(1)
    run = RunFolder.open(path)
    with Disk(path, at, die).faulty():
        work(run)


def start(run, at=0):
    process = _SERVER.Process(target=mortal, args=(run.path, at))
    process.start()
    return process


def test_killed_again_and_again_the_choices_are_the_same(unbroken, tmp_path):
    run, moments, kills = made(tmp_path / "run", "single", "balanced"), random.Random(0), 0
    while True:
        process = start(run, moments.randrange(10, 160))
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            break
        kills += 1
    assert kills > 5
    assert told(run) == told(unbroken, "single", "balanced")
    paths = [path for each in tuned_jobs(run) for path in each.folder.path.glob("stages/[12]/trials/*/outcome.json")]
    assert len(paths) == 2 * (6 + 2)
    assert not [path for path in run.path.rglob("*") if path.suffix == ".part" or path.name.startswith("checkpoint")]


def test_processes_side_by_side_share_the_work_and_one_that_is_killed_is_replaced(unbroken, tmp_path):
    run = made(tmp_path / "run")
    victim, others = start(run, 150), [start(run), start(run)]
    for process in (victim, *others):
        process.join(60)
    assert [process.exitcode for process in others] == [0, 0]
    assert told(run) == told(unbroken)
    for each in tuned_jobs(run):
        for path in each.folder.path.glob("stages/*/trials/*"):
            epochs = [event["epoch"] for event in replace(each.folder, path=path).events()]
            assert epochs == sorted(set(epochs))  # no two processes learnt one trial


# The command


def test_the_command_says_what_it_chose_and_leaves_a_run(unbroken, tmp_path, monkeypatch, capsys):
    """Processes of their own, the scatter, the table; then nothing is left to be done."""
    recipe, folder = tmp_path / "tuned.toml", tmp_path / "run"
    recipe.write_text(TEXT)
    command = ["xkfac", "tune", str(recipe), "-o", str(folder), "--line", "xkfac", "--device", "cpu", "-j", "1"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    best = job(unbroken, "xkfac").choices()[1]
    assert best.why in out
    assert "report.html" in out
    run = RunFolder.open(folder)
    assert small.told(run.job("xkfac", 0)) == small.told(unbroken.job("xkfac", 0))
    choices = json.loads((folder / "choices.json").read_text())
    assert [(each["task"], each["lr"], each["damping"]) for each in choices] == [
        (c.task, c.chosen.lr, c.chosen.damping) for c in job(unbroken, "xkfac").choices()[1:]
    ]
    points = json.loads((folder / "points.json").read_text())
    assert len(points) == 12
    assert sum(point["chosen"] for point in points) == 2
    assert sum(point["target"] is None for point in points) == 4
    assert (folder / "report" / "figures" / "scatter.png").is_file()
    standing = RunStatus.of(folder)
    assert (standing.state, standing.epochs_done, standing.epochs) == ("complete", 6, 6)
    monkeypatch.setattr("xkfac.experiments.tuning.tuning.Worker.start", None)  # no process is needed any more
    assert [asdict(choice) for choice in go_on(run)] == choices
    with pytest.raises(RunError, match="is a tuning"):
        resume(folder)


def test_what_cannot_be_tuned_is_said_before_anything_runs(tmp_path):
    recipe = small.recipe()
    with pytest.raises(RunError, match="line 'joint' learns all tasks at once"):
        tune(recipe, tmp_path / "run", device="cpu")
    with pytest.raises(RunError, match="settings go with the name or path of a recipe"):
        tune(recipe, tmp_path / "run", settings=["repeats=2"], device="cpu")
    blind = small.recipe("data.validation=0", "defaults.early_stopping=false", "lines.validation.consolidate=train")
    with pytest.raises(RunError, match=r"data\.validation is 0"):
        tune(blind.only(["plain"]), tmp_path / "run", device="cpu")
    small.make(tmp_path / "run", recipe)
    with pytest.raises(RunError, match="not the tuning of this recipe"):
        tune(recipe.only(["plain"]), tmp_path / "run", device="cpu")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(RunError, match="exists already"):
        tune(recipe.only(["plain"]), tmp_path / "full", device="cpu")
    assert not list(tmp_path.glob(".xkfac-*"))


def test_how_far_it_is(tmp_path):
    run = work(made(tmp_path / "run", "plain", "xkfac"), "prepare")
    tuner = Tuner(run, "choose", 0.0)
    assert tuner._choose(job(run, "plain"))
    head, _, rows = tuning_status(run, "choose")
    assert head == "tuned: choosing, 0/2 jobs, 1/16 trials"
    outcome = job(run, "plain").stage(1).trial(0).outcome()
    assert rows[1] == ["plain, seed 0", "2/3", "1/2", f"{outcome.validation:.2f} (lr 0.3)"]
    assert rows[0] == ["xkfac, seed 0", "2/3", "0/6", "-"]
    assert not phase_done(job(run, "plain"), "choose")
    assert math.isfinite(outcome.seconds)
    with run.locked(shared=True), run.locked(shared=True):
        assert RunStatus.of(run.path).state == "running"
    assert RunStatus.of(run.path).state == "interrupted"
