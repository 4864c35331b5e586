"""A source network in the making: what a step does, and that an interruption changes no bit."""

import copy
import json
import math
import random

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torchvision import models

from xkfac import files
from xkfac.experiments.data.digits import Part, Parts
from xkfac.experiments.networks import pretrainer
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.networks.pretrainer import Pretraining, PretrainingError, accuracy
from xkfac.experiments.networks.pretraining import pretrain
from xkfac.experiments.networks.weights import load_source

SMALL = {"model": "timm:test_resnet", "pixels": 32, "epochs": 3, "batch": 8, "lr": 0.1, "warmup": 0.2}


def made_up(count, seed):
    """Return images of three classes, each of a colour of its own under noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.randint(0, 100, (count, 3, 32, 32), generator=generator)
    x[torch.arange(count), y] += 120
    return Part(x.to(torch.uint8), y)


@pytest.fixture(scope="module")
def parts():
    return Parts(made_up(44, 0), made_up(12, 1), made_up(15, 2), ("red", "green", "blue"))


def trainer(settings, pictures, trunk=None):
    net = make_backbone(settings.model, {"source": 3}, seed=0)
    if trunk is not None:
        net = ManyHeaded(trunk, 4, {"source": 3}, seed=0).to(pictures.x.device)
    return pretrainer.Trainer(net, pictures, settings)


def small_trunk():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def mixed_by_hand(settings, x, y, mix):
    """Return inputs and target distributions [N, 3] of a mixed batch, image by image."""
    labels = F.one_hot(y, 3).float()
    out_x, out_y = x.clone(), labels.clone()
    for i in range(len(x)):
        other = len(x) - 1 - i
        share, top, bottom, left, right = mix.tolist()
        if settings.cutmix:
            rows, columns = slice(int(top), int(bottom)), slice(int(left), int(right))
            out_x[i, :, rows, columns] = x[other, :, rows, columns]
            share = 1 - (bottom - top) * (right - left) / settings.pixels**2
        else:
            share = 1.0
        out_y[i] = share * labels[i] + (1 - share) * labels[other]
    return out_x, out_y


def steps_by_hand(settings, net, pictures, draws):
    """Train by the definitions, one parameter at a time; return the mean loss."""
    momentum = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    losses = []
    net.train()
    for step in range(len(draws["order"])):
        index = draws["order"][step]
        x = settings.augmentation.augmented(pictures.x[index], draws["crops"][step])
        x, target = mixed_by_hand(settings, x, pictures.y[index], draws["mixes"][step])
        target = target * (1 - settings.smoothing) + settings.smoothing / 3
        loss = -(target * net(x).log_softmax(1)).sum(1).mean()
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        with torch.no_grad():
            for (name, p), g in zip(net.named_parameters(), gradients, strict=True):
                plain = name.endswith("bias") or "trunk.1" in name
                g = g + (0 if plain else settings.decay) * p
                momentum[name] = settings.momentum * momentum[name] + g
                p -= draws["rates"][step] * (g + settings.momentum * momentum[name])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("options", [{}, {"cutmix": 1.0}])
def test_an_epoch_is_what_its_definitions_say(options, parts):
    settings = Pretraining(**{**SMALL, **options}, decay=0.05, momentum=0.8)
    made = trainer(settings, parts.train, small_trunk())
    by_hand = copy.deepcopy(made.net)
    draws = made._drawn(0)
    loss = made.epoch(0)
    expected = steps_by_hand(settings, by_hand, parts.train, draws)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, tensor in made.net.state_dict().items():
        assert torch.allclose(tensor, by_hand.state_dict()[name], rtol=1e-4, atol=1e-6), name


def test_the_learning_rate_rises_in_a_line_and_falls_along_a_cosine():
    rates = Pretraining(**{**SMALL, "epochs": 10, "lr": 2.0, "warmup": 0.2}).rates(5)
    assert rates.shape == (10, 5)
    flat = rates.flatten()
    assert torch.allclose(flat[:10], 0.2 * torch.arange(1.0, 11))
    assert torch.allclose(flat[10:], 1 + torch.cos(math.pi * torch.arange(40) / 40))
    assert 0 < flat[-1] < 0.01


def test_mixes_follow_their_distribution():
    state = torch.get_rng_state()
    cutmix = pretrainer.mixes(Pretraining(cutmix=1.0), 5_000, 1)
    assert torch.equal(torch.get_rng_state(), state)
    share, top, bottom, left, right = cutmix.T
    assert torch.allclose(share, 1 - (bottom - top) * (right - left) / 64**2)
    assert cutmix.min() >= 0
    assert cutmix.max() <= 64
    inside = (top > 0) & (bottom < 64) & (left > 0) & (right < 64)
    assert torch.all((bottom - top - right + left).abs()[inside] <= 2)  # a square, up to rounding


def test_every_epoch_has_draws_of_its_own_fixed_by_the_seed(parts):
    made = trainer(Pretraining(**SMALL, cutmix=1.0), parts.train, small_trunk())
    first, again, later = made._drawn(0), made._drawn(0), made._drawn(1)
    other = trainer(Pretraining(**SMALL, cutmix=1.0, seed=1), parts.train, small_trunk())._drawn(0)
    assert sorted(first["order"].flatten().tolist()) != list(range(40))
    assert first["order"].unique().numel() == first["order"].numel() == 40
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if name in ("order", "crops", "mixes"):
            assert not torch.equal(tensor, later[name])
            assert not torch.equal(tensor, other[name])


def without_times(path):
    told = json.loads(path.read_text())
    told.pop("seconds")
    for entry in told["history"]:
        entry.pop("seconds")
    return told


@pytest.fixture(scope="module")
def options():
    return {"cutmix": 1.0, **SMALL}


@pytest.fixture(scope="module")
def unbroken(parts, options, tmp_path_factory):
    path = tmp_path_factory.mktemp("unbroken") / "weights.safetensors"
    return pretrain(parts, path, Pretraining(**options), device="cpu")


class Stop(BaseException):
    """A process that is killed."""


@pytest.mark.parametrize("seed", range(4))
def test_a_run_interrupted_at_any_moment_ends_in_the_same_bits(seed, parts, options, unbroken, tmp_path, monkeypatch):
    chance = random.Random(seed)
    path = tmp_path / "weights.safetensors"
    real, calls = pretrainer.Trainer._step, 0
    stops = sorted(chance.sample(range(1, 20), 2))

    def step(self):
        nonlocal calls
        calls += 1
        real(self)
        if stops and calls >= stops[0]:
            stops.pop(0)
            raise Stop

    monkeypatch.setattr(pretrainer.Trainer, "_step", step)
    for _ in range(2):
        torch.manual_seed(chance.randrange(1000))
        with pytest.raises(Stop):
            pretrain(parts, path, Pretraining(**options), device="cpu")
        assert not path.exists()
    again = pretrain(parts, path, Pretraining(**options), device="cpu")
    assert path.read_bytes() == unbroken.weights.read_bytes()
    assert without_times(path.with_suffix(".json")) == without_times(unbroken.weights.with_suffix(".json"))
    assert (again.test, again.validation) == (unbroken.test, unbroken.validation)
    assert {one.name for one in tmp_path.iterdir()} == {"weights.safetensors", "weights.json"}


def test_a_checkpoint_that_is_cut_off_leaves_the_one_before(parts, options, unbroken, tmp_path, monkeypatch):
    path, real, writes = tmp_path / "weights.safetensors", files.save_file, []

    def cut_off(tensors, target, metadata):
        writes.append(target)
        real(tensors, target, metadata)
        if len(writes) == 2:
            target.write_bytes(target.read_bytes()[:1000])
            raise Stop

    monkeypatch.setattr(files, "save_file", cut_off)
    with pytest.raises(Stop):
        pretrain(parts, path, Pretraining(**options), device="cpu")
    seen = []
    pretrain(parts, path, Pretraining(**options), device="cpu", progress=lambda epoch: seen.append(epoch.epoch))
    assert seen == [2, 3]
    assert path.read_bytes() == unbroken.weights.read_bytes()


def test_dropout_is_fixed_by_the_epoch(parts):
    settings = Pretraining(**SMALL)
    runs = []
    for noise in (1, 2):
        torch.manual_seed(0)
        made = trainer(settings, parts.train, nn.Sequential(*small_trunk(), nn.Dropout(0.5)))
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        made.epoch(0)
        made.epoch(1)
        assert torch.equal(torch.get_rng_state(), before)
        runs.append(made.net.state_dict())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"cutmix": 1.0}])
def test_replayed_steps_are_those_of_a_plain_loop(options, parts):
    settings = Pretraining(**{**SMALL, **options, "lr": 0.02})
    made = [trainer(settings, parts.train.to("cuda"), small_trunk().cuda()) for _ in range(2)]
    for one in made:
        one.net.load_state_dict(made[0].net.state_dict())
    losses = [[], []]
    for number in range(2):
        losses[0].append(made[0].epoch(number))
        made[1]._graph = type("Plain", (), {"replay": staticmethod(made[1]._step)})()
        losses[1].append(made[1].epoch(number))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    for name, tensor in made[0].net.state_dict().items():
        assert torch.allclose(tensor, made[1].net.state_dict()[name], rtol=1e-2, atol=1e-3), name


def test_the_result_is_measured_told_and_loads_into_the_library_model(parts, tmp_path):
    settings = Pretraining(model="resnet18", stem="small", pixels=16, epochs=2, batch=16, lr=0.02, warmup=0)
    path = tmp_path / "new" / "source.safetensors"
    epochs = []
    made = pretrain(parts, path, settings, task="colours", device="cpu", progress=epochs.append)
    model = models.resnet18(num_classes=3)
    model.load_state_dict(safetensors.torch.load_file(path), strict=True)
    model.maxpool = nn.Identity()
    model.eval()
    with torch.no_grad():
        right = model(settings.augmentation.plain(parts.test.x)).argmax(1) == parts.test.y
    assert made.test == pytest.approx(100 * right.float().mean().item())
    net = make_backbone("resnet18", {"target": 5, "colours": 3}, stem="small", seed=9)
    facts = load_source(net, path, "colours")
    told = json.loads(path.with_suffix(".json").read_text())
    for known in (facts, told):
        assert known["test"] == made.test
        assert known["settings"]["seed"] == 0
        assert {"command", "commit", "torch", "device"} <= set(known)
    assert told["classes"] == ["red", "green", "blue"]
    assert [entry["epoch"] for entry in told["history"]] == [1, 2]
    assert tuple(epochs) == made.history
    with net.using("colours"):
        assert accuracy(net, parts.test, settings.augmentation) == made.test


def test_it_learns(parts, tmp_path):
    settings = Pretraining(**{**SMALL, "epochs": 8})
    made = pretrain(parts, tmp_path / "w.safetensors", settings, device="cpu")
    assert made.history[-1].loss < made.history[0].loss
    assert made.test >= 80


def test_a_tree_is_read_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "cache"))
    image = pytest.importorskip("PIL.Image")
    for part, count in (("train", 6), ("test", 2)):
        for label, colour in enumerate(((200, 0, 0), (0, 200, 0))):
            folder = tmp_path / "data" / "shapes" / part / str(label)
            folder.mkdir(parents=True)
            for i in range(count):
                image.new("RGB", (40, 32), colour).save(folder / f"{i}.png")
    settings = Pretraining(**{**SMALL, "epochs": 1, "batch": 4}, validation=0.34)
    arguments = {"folder": tmp_path / "data", "device": "cpu"}
    made = pretrain("shapes", tmp_path / "w.safetensors", settings, **arguments)
    assert made.classes == ("0", "1")
    told = json.loads((tmp_path / "w.json").read_text())
    assert told["data"] == "shapes"


def test_a_checkpoint_of_other_settings_or_data_is_refused(parts, tmp_path):
    path = tmp_path / "w.safetensors"

    def stop(epoch):
        raise Stop

    with pytest.raises(Stop):
        pretrain(parts, path, Pretraining(**SMALL), device="cpu", progress=stop)
    with pytest.raises(PretrainingError, match=r"w.checkpoint.safetensors' is of lr 0.1, not 0.3; .* to start anew"):
        pretrain(parts, path, Pretraining(**{**SMALL, "lr": 0.3}), device="cpu")
    swapped = Parts(Part(parts.train.x.flip(0), parts.train.y), parts.validation, parts.test, parts.classes)
    with pytest.raises(PretrainingError, match="is of pictures"):
        pretrain(swapped, path, Pretraining(**SMALL), device="cpu")
    (tmp_path / "w.checkpoint.safetensors").write_bytes(b"damaged")
    with pytest.raises(PretrainingError, match="the checkpoint cannot be resumed"):
        pretrain(parts, path, Pretraining(**SMALL), device="cpu")


def test_what_makes_no_sense_is_an_error(parts, tmp_path):
    for options, message in (
        ({"epochs": 0}, "epochs must be at least 1 and at most 100,000, not 0"),
        ({"batch": 1}, "batch must be at least 2"),
        ({"warmup": 1}, "warmup must be a number of at least 0 and below 1, not 1.0"),
        ({"momentum": 1.0}, "momentum must be"),
        ({"scale": (0.5, 0.2)}, "scale must be two growing numbers above 0 and up to 1"),
        ({"lr": math.nan}, "lr must be a finite number of at least 0, not nan"),
    ):
        with pytest.raises(PretrainingError, match=message):
            Pretraining(**{**SMALL, **options})
    path = tmp_path / "w.safetensors"
    with pytest.raises(PretrainingError, match="batch is 100, but there are 44 training images"):
        pretrain(parts, path, Pretraining(**{**SMALL, "batch": 100}), device="cpu")
    empty = Parts(parts.train, parts.validation, Part(parts.test.x[:0], parts.test.y[:0]), parts.classes)
    with pytest.raises(PretrainingError, match="no test images"):
        pretrain(empty, path, Pretraining(**SMALL), device="cpu")
    with pytest.raises(PretrainingError, match=r"must end in \.safetensors"):
        pretrain(parts, tmp_path / "w.pth", Pretraining(**SMALL), device="cpu")
    with pytest.raises(PretrainingError, match=r"the loss is nan in epoch \d; lower lr"):
        pretrain(parts, path, Pretraining(**{**SMALL, "lr": 1e20}), device="cpu")
    path.write_bytes(b"")
    with pytest.raises(PretrainingError, match="exist already"):
        pretrain(parts, path, Pretraining(**SMALL), device="cpu")
