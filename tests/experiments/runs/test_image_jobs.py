"""Runs of images: what moves and what stands still, in which order, what is seen of an image, what a kill changes."""

import json
import multiprocessing
from dataclasses import replace
from itertools import pairwise

import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.helpers import made_up_images as small
from tests.helpers.small_runs import assert_same, told, weights
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.networks.backbones import ManyHeaded
from xkfac.experiments.runs import task_inference
from xkfac.experiments.runs.job import JobRun
from xkfac.experiments.runs.job_folder import RunError
from xkfac.experiments.runs.running import _in_turn
from xkfac.experiments.runs.tasks import ImageTasks
from xkfac.experiments.runs.training import Stepper
from xkfac.experiments.runs.worker import run_job
from xkfac.routing.router import Router

LINES = small.recipe().lines
_SERVER = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data folder, and a cache of its own for the images in it."""
    folder = tmp_path_factory.mktemp("pictures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XKFAC_CACHE", str(folder / "cache"))
        yield small.make_data(folder / "data")


@pytest.fixture(scope="module")
def loaded(data):
    return small.materials(small.recipe(), data)


@pytest.fixture(scope="module")
def unbroken(data, tmp_path_factory):
    """A run whose jobs were never interrupted."""
    torch.set_num_threads(1)
    return small.finish(small.make_run(tmp_path_factory.mktemp("unbroken") / "run", data))


# Killed at any moment


@pytest.fixture(scope="module")
def killed(data, tmp_path_factory):
    """A run whose jobs were killed again and again, and how often each of them was."""
    run = small.make_run(tmp_path_factory.mktemp("killed") / "run", data)
    process = _SERVER.Process(target=small.kill_and_go_on, args=(run.path, str(data.parent / "cache")))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return run, json.loads((run.path.parent / "kills.json").read_text())


@pytest.mark.parametrize("name", LINES)
def test_a_job_that_is_killed_again_and_again_gives_the_numbers_of_an_unbroken_one(unbroken, killed, name):
    run, kills = killed
    assert kills[name] > 2
    assert_same(run.job(name, small.SEED), unbroken.job(name, small.SEED))
    assert not list(run.path.rglob("*.part"))


# What moves


@pytest.fixture(scope="module")
def stages(data, loaded, tmp_path_factory):
    """For each line the network and the memory at the end of each stage, the network at its start coming first."""
    run, found = small.make_run(tmp_path_factory.mktemp("stages") / "run", data), {}
    real = JobRun.measure

    def watched(self, task):
        state = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        found[self.folder.line].append((state, self.memory))
        return real(self, task)

    with pytest.MonkeyPatch.context() as patch, small.short_calibrations():
        patch.setattr(JobRun, "measure", watched)
        for name in sorted(LINES, key=lambda name: name != "single"):
            found[name] = [(loaded.sequence(LINES[name], small.SEED).network().state_dict(), None)]
            run_job(run, name, small.SEED, loaded, 1e9)
    return found


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("name", LINES)
def test_only_the_trunk_and_the_head_of_the_task_move(stages, loaded, name):
    """Of fixed BN only the weights that are not of a BN; of BN that each task has for itself, that of the task.

    A network of its own begins with the source each time.
    """
    (initial, _), *after = stages[name]
    model = loaded.sequence(LINES[name], small.SEED).network()
    norms = {f"{path}." for path, module in model.named_modules() if isinstance(module, torch.nn.BatchNorm2d)}
    assert len(norms) > 5
    trunk = {key for key in initial if key.startswith("trunk.")}
    if name == "fixed-bn":
        trunk = {key for key in trunk if not key.startswith(tuple(norms))}
    states = [initial, *(state for state, _ in after)]
    assert changed(initial, states[1]) == set()
    for task, (before, state) in enumerate(pairwise(states[1:]), start=1):
        own = ("old", "birds", "cars")[task]
        head = {f"heads.{own}.{key}" for key in ("weight", "bias")}
        moving = {key for key in trunk if ".of." not in key or f".of.{own}." in key}
        assert (len(moving) < len(trunk)) == (name == "own-bn")
        assert changed(initial if name == "single" else before, state) == moving | head


def test_the_head_learns_alone_at_first_and_protected_parameters_at_a_steady_rate_afterwards(data, loaded, tmp_path):
    """The head takes the learning rate of the line all along; a stiff penalty slows down the trunk alone."""
    lines = {"slow": replace(LINES["xkfac"], strength=1e6, steady=True, head_epochs=1, epochs=3, early_stopping=False)}
    run = small.make_run(tmp_path / "run", data, replace(small.recipe(), lines=lines, figures={}))
    rates, moved, real = [], [], Stepper.epoch

    def watched(self, order, lr, protected_lr=None):
        before = {name: tensor.clone() for name, tensor in self.model.named_parameters()}
        told = real(self, order, lr, protected_lr)
        rates.append((lr, protected_lr))
        moved.append(
            {name.split(".")[0] for name, p in self.model.named_parameters() if not torch.equal(p, before[name])}
        )
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "epoch", watched)
        run_job(run, "slow", small.SEED, loaded, 1e9)
    line = lines["slow"]
    assert [lr for lr, _ in rates] == [line.learning_rate(1, epoch) for epoch in (0, 1, 2)] * 2
    assert moved == [{"heads"}, {"heads", "trunk"}, {"heads", "trunk"}] * 2
    assert all(protected == 0 for _, protected in rates[::3])
    assert all(0 < protected < 0.01 * lr for lr, protected in (*rates[1:3], *rates[4:]))


@pytest.mark.parametrize("name", [name for name in LINES if name != "single"])
def test_a_memory_covers_the_trunk_exactly_and_counts_tasks(stages, name):
    parameters = set(dict(stages_model(stages[name]).named_parameters()))
    first, second, last = (memory for _, memory in stages[name][1:])
    for tasks, memory in ((1, first), (2, second)):
        rows = {row.parameter: row.kind for row in memory.coverage.rows if row.parameter in parameters}
        covered = {parameter for parameter, kind in rows.items() if kind != "excluded"}
        trunk = {parameter for parameter in parameters if parameter.startswith("trunk.")}
        assert covered == {parameter for parameter in trunk if ".of." not in parameter}
        assert memory.tasks == tasks
    assert last is second  # nothing comes after the last task
    assert (first.calibration is not None) == LINES[name].calibrated


def stages_model(found):
    network = small.make_backbone("timm:test_resnet", small.SIZES, seed=0)
    if any(".of." in key for key in found[0][0]):
        network.give_layers(LINES["own-bn"].own)
    network.load_state_dict(found[0][0])
    return network


def test_the_source_network_is_the_weights_file_and_is_measured_untouched(stages, unbroken, data):
    file = load_file(data / "source.safetensors")
    for name in LINES:
        state, _ = stages[name][1]
        state = {key.replace(".of.old.", "."): tensor for key, tensor in state.items()}
        known = {key.removeprefix("trunk."): tensor for key, tensor in state.items() if key.startswith("trunk.")}
        known = {key: tensor for key, tensor in known.items() if ".of." not in key}
        known |= {f"fc.{key}": state[f"heads.old.{key}"] for key in ("weight", "bias")}
        assert known.keys() == file.keys()
        assert changed(known, file) == set()
        result = unbroken.job(name, small.SEED).result()
        assert result.accuracy[0] == [accuracy(file, data, "old")]
        assert (result.kept[0], result.untrained) == (-1, [])
        assert [epoch["task"] for epoch in result.epochs] == [1, 1, 2, 2]


# Orders


def accuracy(state, data, task):
    """The percentage of test images that timm's own model with these weights gets right."""
    settings = small.recipe().tasks[task]
    parts = load_pictures(data / settings.tree, pixels=16, resize=settings.resize, validation=0.4)
    border = (parts.test.x.shape[-1] - 16) // 2
    x = parts.test.x[..., border : border + 16, border : border + 16].double() / 255
    mean, std = (torch.tensor(value)[:, None, None] for value in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    model = timm.create_model("test_resnet", num_classes=small.SIZES[task])
    model.load_state_dict(state)
    with torch.no_grad():
        right = model.eval()(((x - mean) / std).float()).argmax(1) == parts.test.y
    return 100 * right.double().mean().item()


def test_repeat_r_learns_order_r_modulo_their_number_and_rows_are_in_that_order(data, tmp_path):
    run = small.finish(small.make_run(tmp_path / "run", data), "xkfac", seeds=(4, 5, 6))
    for seed, targets in ((4, ["birds", "cars"]), (5, ["cars", "birds"]), (6, ["birds", "cars"])):
        result, state = run.job("xkfac", seed).result(), weights(run.job("xkfac", seed))
        assert result.tasks == ["old", *targets]
        expected = []
        for task in result.tasks:
            own = {f"fc.{key}": state[f"model/heads.{task}.{key}"] for key in ("weight", "bias")}
            trunk = {key[len("model/trunk.") :]: one for key, one in state.items() if key.startswith("model/trunk.")}
            expected.append(accuracy({**trunk, **own}, data, task))
        assert result.accuracy[-1] == pytest.approx(expected)
        assert [len(row) for row in result.accuracy] == [1, 2, 3]
    first, third = (run.job("xkfac", seed).result() for seed in (4, 6))
    assert first.epochs[0]["loss"] != third.epochs[0]["loss"]  # the same order, other heads and batches


def test_without_orders_targets_are_learnt_as_they_are_listed():
    made = small.recipe("images.orders=[]")
    assert [made.order(seed) for seed in made.seeds] == [("old", "birds", "cars")] * 3


# C_t


def test_losses_are_balanced_by_the_last_training_loss_of_the_single_network_of_the_seed(data, loaded, tmp_path):
    run, line = small.finish(small.make_run(tmp_path / "run", data), "single", seeds=(4, 5)), LINES["balanced"]
    floors = {}
    for seed in (4, 5):
        last = [event for event in told(run.job("single", seed)) if event.get("epoch") == 1]
        floors[seed] = {run.recipe.order(seed)[event["task"]]: event["loss"] for event in last}
        assert floors[seed].keys() == {"birds", "cars"}
        assert run.floors(seed) == floors[seed]
    balanced = small.finish(run, "balanced", seeds=(5,)).job("balanced", 5)
    for name, other, same in (("own", floors[5], True), ("high", dict.fromkeys(floors[5], 1e3), False)):
        folder = small.make_run(tmp_path / name, data).job("balanced", 5)
        JobRun(line, 5, loaded.sequence(line, 5), folder, 1e9, floors=other).run()
        assert (told(folder) == told(balanced)) == same
    assert floors[4] != floors[5]


def test_without_the_single_network_a_balanced_line_does_not_begin(data, loaded, tmp_path):
    run = small.make_run(tmp_path / "run", data)
    with pytest.raises(RunError, match="those of 'single', whose job with seed 4 has not ended; run that line first"):
        run_job(run, "balanced", 4, loaded, 1e9)
    note = run.job("single", 4).note
    epoch = {"task": 1, "lr": 0.1, "penalty": None, "validation": 50.0}
    note("start", line="single", seed=4, untrained=[], tasks=["old", "birds", "cars"])
    note("task", task=0, accuracy=[50.0], before=None, kept=-1, seconds=0.0)
    note("epoch", epoch=0, loss=0.5, **epoch)  # killed there: a loss, but not the last
    with pytest.raises(RunError, match="has not ended"):
        run_job(run, "balanced", 4, loaded, 1e9)
    note("epoch", epoch=1, loss=None, **epoch)
    note("end", diverged=1)
    with pytest.raises(RunError, match="needs C_t of task 'birds', which no job of the method 'single' with seed 4"):
        run_job(run, "balanced", 4, loaded, 1e9)


def test_single_networks_are_run_before_those_that_wait_for_their_losses(data, tmp_path):
    run = small.make_run(tmp_path / "run", data)
    first, second = _in_turn(run, run.jobs())
    assert [(job.line, job.seed) for job in first] == [("single", seed) for seed in (4, 5, 6)]
    assert {job.line for job in second} == set(LINES) - {"single"}
    assert len(first) + len(second) == len(run.jobs())
    alone = small.make_run(tmp_path / "alone", data, small.recipe().only(["xkfac", "single"]))
    assert _in_turn(alone, alone.jobs()) == [alone.jobs()]


# What is seen of an image


@pytest.fixture(scope="module")
def seen(data, loaded, tmp_path_factory):
    """For each line the inputs of its network, as (what for, task) and images, in their order."""
    run, found, moment = small.make_run(tmp_path_factory.mktemp("seen") / "run", data), {}, ["begin", 0]

    def during(owner, name, tag):
        real = getattr(owner, name)

        def call(self, *arguments, **options):
            before, moment[:] = list(moment), tag(self, *arguments)
            try:
                return real(self, *arguments, **options)
            finally:
                moment[:] = before

        return call

    def watched(sequence):
        network = sequence.network()
        network.register_forward_pre_hook(lambda model, inputs: log.append((tuple(moment), inputs[0].clone())))
        return network

    def epoch(stepper, order, *rates):
        return "training", list(small.SIZES).index(stepper.model.active)

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, tag in (
            (Stepper, "epoch", epoch),
            (JobRun, "remember", lambda self, task: ("curvature", task)),
            (ImageTasks, "accuracy", lambda self, model, task, part: (part, task)),
        ):
            patch.setattr(owner, name, during(owner, name, tag))
        for name in ("single", "xkfac"):
            log = found[name] = []
            sequence = loaded.sequence(LINES[name], small.SEED)
            patch.setattr(sequence, "network", lambda: watched(replace(sequence)))
            JobRun(LINES[name], small.SEED, sequence, run.job(name, small.SEED), 1e9).run()
    return found


def inputs(log, what, task):
    """The images [n, 3, 16, 16] that a network met for a purpose on a task."""
    return torch.cat([x for (purpose, of), x in log if (purpose, of) == (what, task)])


def plain(loaded, task, part):
    """The images of a part as evaluation sees them."""
    parts = loaded.parts[list(small.SIZES)[task]]
    x = getattr(parts, part).x.float() / 255
    border = (x.shape[-1] - 16) // 2
    x = x[..., border : border + 16, border : border + 16]
    mean, std = (torch.tensor(value)[:, None, None] for value in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (x - mean) / std


def found_in(x, known):
    """For each image whether it is one of the known ones."""
    return ((x[:, None] - known[None]).abs().amax((2, 3, 4)) < 1e-5).any(1)


def test_evaluation_and_curvature_see_images_as_they_are(seen, loaded):
    for name, log in seen.items():
        for task in range(3):
            assert found_in(inputs(log, "test", task), plain(loaded, task, "test")).all()
        for task in (1, 2):
            assert found_in(inputs(log, "validation", task), plain(loaded, task, "validation")).all()
        for task in (0, 1) if name == "xkfac" else ():
            curvature = inputs(log, "curvature", task)
            assert len(curvature.unique(dim=0)) == 10  # two batches of five
            assert found_in(curvature, plain(loaded, task, "train")).all()


def test_training_sees_other_crops_in_each_epoch_and_the_same_in_each_line(seen, loaded):
    for task, count in ((1, 15), (2, 10)):
        x = inputs(seen["xkfac"], "training", task)
        assert len(x) == 2 * count
        assert torch.equal(x, inputs(seen["single"], "training", task))  # the same seed, task and epoch
        first, second = x[:count], x[count:]
        if task == 1:
            assert not found_in(x, plain(loaded, task, "train")).any()
            assert not found_in(first, second).any()
        else:  # no crops, only mirrored at random
            both = torch.cat((known := plain(loaded, task, "train"), known.flip(3)))
            assert found_in(x, both).all()
            mirrored = ~found_in(x, known)
            assert 0 < mirrored.sum() < len(x)


def test_statistics_are_recentred_on_images_as_training_draws_them(seen, loaded):
    begin = torch.cat([x for (purpose, _), x in seen["xkfac"] if purpose == "begin"])
    count = len(loaded.parts["birds"].train)
    # All images are one batch, which also shows whether the network is the memory's.
    assert len(begin) == 2 * (count + len(loaded.parts["cars"].train))
    birds = begin[:count]
    assert torch.equal(birds, begin[count : 2 * count])
    assert not found_in(birds, plain(loaded, 1, "train")).any()
    assert not found_in(birds, inputs(seen["xkfac"], "training", 1)).any()
    assert not [x for (purpose, _), x in seen["single"] if purpose == "begin"]


def test_crops_depend_on_seed_task_and_epoch_alone(loaded):
    pools = [loaded.sequence(LINES["xkfac"], 4).train(range(1, 2)) for _ in range(2)]
    index = torch.arange(6)

    def crops(pool, *key):
        pool.redraw(*key)
        return pool.take(index)[0]

    crops(pools[1], 9, 9, 9)  # what was drawn before does not matter
    expected = crops(pools[0], 4, 1, 0)
    torch.manual_seed(3)
    assert torch.equal(crops(pools[1], 4, 1, 0), expected)
    for key in ((5, 1, 0), (4, 2, 0), (4, 1, 1)):
        assert not torch.equal(crops(pools[1], *key), expected)


# What is loaded


def test_of_a_source_that_is_not_held_out_from_no_validation_part_is_read(data):
    made = small.recipe()
    for lines, sizes in ((["xkfac", "single"], (20, 0, 10)), (["calibrated"], (20, 10, 10))):
        parts = small.materials(made.only(lines), data).parts["old"]
        assert (len(parts.train), len(parts.validation), len(parts.test)) == sizes
    parts = small.materials(small.recipe("images.measure=validation").only(["xkfac"]), data).parts["old"]
    assert torch.equal(parts.test.x, parts.validation.x)
    assert len(parts.test) == 10


# Inferred tasks


def test_the_tasks_of_test_images_are_inferred_for_shared_bn_and_by_all_kinds_of_features(data, tmp_path, monkeypatch):
    monkeypatch.setattr(task_inference, "TOGETHER", 4)
    settings = ["images.infer_tasks=true", "lines.fixed-bn.method=fine-tuning", "lines.fixed-bn.epochs=1"]
    made = small.recipe(*settings)
    run = small.finish(small.make_run(tmp_path / "run", data, made), "fixed-bn")
    job = run.job("fixed-bn", small.SEED)
    sequence = small.materials(made, data).sequence(made.lines["fixed-bn"], small.SEED)
    model = sequence.network()
    model.load_state_dict({name.removeprefix("model/"): tensor for name, tensor in weights(job).items()})
    result = job.result()
    assert [one["given"] for one in result.inference] == result.accuracy[-1]
    for by in ("source", "early"):
        router = Router(sequence.network(), by, using=ManyHeaded.using)
        for task, name in enumerate(sequence.tasks):
            router.add_task(name, sequence.fixed(task, "train").chunks())
        router.model = model.eval()
        for task, one in enumerate(result.inference):
            found = one if by == "source" else one["others"][by]
            ((x, y),) = sequence._examples(task, "test").chunks()
            answer = router(x)
            right = (answer.outputs.argmax(1) == y) & (answer.tasks == task)
            assert found["inferred"] == pytest.approx(100 * right.float().mean().item())
            assert found["taken"] == pytest.approx((100 * answer.tasks.bincount(minlength=3) / len(y)).tolist())
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
            batches = [router(x[part], together=True).tasks[0].item() for part in order.split(4) if len(part) == 4]
            assert found["together"] == [100 * batches.count(place) / len(batches) for place in range(3)]
    assert all(one["others"].keys() == {"early", "last"} for one in result.inference)
    assert sum(result.inference[0]["others"]["last"]["taken"]) == pytest.approx(100)
