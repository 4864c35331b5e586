"""Networks with many heads: the same function as the library's model, weights that fit, a memory of the trunk alone."""

import json
import pickle
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torchvision import models

import xkfac
from xkfac.experiments.networks import weights
from xkfac.experiments.networks.backbones import ManyHeaded, make_backbone
from xkfac.experiments.networks.library import BackboneError
from xkfac.experiments.networks.weights import WeightsError, load_source, save_source


def library_model(name, classes):
    if name.startswith("timm:"):
        return timm.create_model(name.removeprefix("timm:"), num_classes=classes).eval()
    return models.get_model(name, num_classes=classes).eval()


def same_state(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def small_net(seed=0):
    trunk = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return ManyHeaded(trunk, 4, {"birds": 3, "cars": 5}, seed=seed)


@pytest.mark.parametrize(
    "name",
    ["resnet18", "resnet50", "densenet121", "mnasnet0_5", "mobilenet_v3_small", "timm:resnet18d", "timm:convnext_atto"],
)
def test_loaded_weights_give_the_function_of_the_library_model(name, tmp_path):
    model = library_model(name, 7)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 2)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    net = make_backbone(name, {"source": 7, "target": 2}, seed=3).eval()
    load_source(net, tmp_path / "weights.pth", "source")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(net(x), model(x))
        net.enter("target")
        assert net(x).shape == (2, 2)


@pytest.mark.parametrize("name", ["resnet18", "timm:resnet18d"])
def test_saved_weights_load_strictly_into_the_library_model(name, tmp_path):
    net = make_backbone(name, {"other": 3, "source": 7}, seed=3).to(memory_format=torch.channels_last).eval()
    path = tmp_path / "new" / "weights.safetensors"
    save_source(net, path, "source", {"seed": 3, "accuracy": 62.5})
    model = library_model(name, 7)
    model.load_state_dict(safetensors.torch.load_file(path), strict=True)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), net.using("source"):
        assert torch.allclose(net(x), model(x), atol=1e-5)
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    known = {"model": name, "stem": "standard", "task": "source", "classes": 7}
    assert facts == {"seed": 3, "accuracy": 62.5, **known}
    again = make_backbone(name, {"other": 3, "source": 7}, seed=4)
    assert load_source(again, path, "source") == facts
    assert same_state(again.trunk.state_dict(), net.trunk.state_dict())
    assert same_state(again.heads["source"].state_dict(), net.heads["source"].state_dict())
    assert not same_state(again.heads["other"].state_dict(), net.heads["other"].state_dict())
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def test_a_small_stem_leaves_out_the_pooling_alone():
    model = library_model("resnet18", 5)
    net = make_backbone("resnet18", {"source": 5}, stem="small", seed=0).eval()
    for name, tensor in net.trunk.state_dict().items():
        model.state_dict()[name].copy_(tensor)
    model.fc, model.maxpool = nn.Identity(), nn.Identity()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(net.trunk(x), model(x))
    with pytest.raises(BackboneError, match=r"'mobilenet_v2' has no 'maxpool'.*stem='standard'"):
        make_backbone("mobilenet_v2", {"source": 5}, stem="small", seed=0)


def test_weights_are_fixed_by_the_seed_alone():
    before = torch.get_rng_state()
    first = make_backbone("resnet18", {"a": 3, "b": 4}, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.randn(5)
    second = make_backbone("resnet18", {"b": 4, "c": 9, "a": 3}, seed=1, stem="small")
    assert same_state(first.trunk.state_dict(), second.trunk.state_dict())
    for task in ("a", "b"):
        assert same_state(first.heads[task].state_dict(), second.heads[task].state_dict())
    third = make_backbone("resnet18", {"a": 3, "b": 4}, seed=2)
    assert not torch.equal(first.trunk.conv1.weight, third.trunk.conv1.weight)
    assert not torch.equal(first.heads["a"].weight, third.heads["a"].weight)
    assert not torch.equal(first.heads["a"].weight, first.heads["b"].weight[:3])


def test_only_the_trunk_and_the_active_head_learn():
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    x, y = torch.randn(6, 3, 8, 8), torch.randint(3, (6,))
    for task in ("birds", "cars"):
        net.enter(task)
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        moved = {name for name, p in net.named_parameters() if not torch.equal(before[name], p)}
        assert moved == {name for name in before if name in dict(net.named_parameters())} - {
            f"heads.{other}.{part}" for other in {"birds", "cars"} - {task} for part in ("weight", "bias")
        }
    assert list(before) == list(small_net().state_dict())


def test_using_a_head_changes_nothing_else():
    net = small_net()
    net.trunk[1].weight.requires_grad_(False)
    flags = [p.requires_grad for p in net.parameters()]
    x = torch.randn(2, 3, 8, 8)
    with net.using("cars"):
        assert net(x).shape == (2, 5)
    with pytest.raises(RuntimeError), net.using("cars"):
        net(x[:, :1])
    assert net.active == "birds"
    assert net(x).shape == (2, 3)
    assert [p.requires_grad for p in net.parameters()] == flags
    with pytest.raises(BackboneError, match=r"no head for task 'car' \(did you mean 'cars'\?\)"):
        net.enter("car")


def trunk_units(net):
    """Return every convolution of the trunk with the parameters that its unit must hold."""
    return {f"trunk.{name}": module for name, module in net.trunk.named_modules() if isinstance(module, nn.Conv2d)}


@pytest.mark.parametrize("method", ["xkfac", "kfac", "ewc"])
def test_a_memory_covers_exactly_the_trunk_through_a_sequence(method):
    net = make_backbone("timm:test_resnet", {"birds": 3, "cars": 5}, seed=0)
    x = torch.randn(8, 3, 32, 32)
    birds, cars = [(x, torch.randint(3, (8,)))], [(x.flip(0), torch.randint(5, (8,)))]
    memory = xkfac.consolidate(net, birds, method=method, exclude=["heads.*"])
    heads = {task: [p.clone() for p in net.heads[task].parameters()] for task in net.tasks}
    net.enter("cars")
    with xkfac.Learner(net, memory) as learner:
        learner.begin(cars)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.05)
        net.train()
        for _ in range(2):
            optimizer.zero_grad()
            learner.objective(F.cross_entropy(net(cars[0][0]), cars[0][1])).backward()
            optimizer.step()
        assert learner.last_penalty > 0
        longer = learner.finish(cars)
    names = dict(net.named_parameters())
    for one in (memory, longer):
        covered = {row.parameter for row in one.coverage.rows if row.kind != "excluded" and row.parameter in names}
        assert covered == {name for name in names if name.startswith("trunk.")}
        if method == "xkfac":
            assert {unit.name for unit in one.units} == set(trunk_units(net))
            assert all(unit.norm is not None for unit in one.units)
    assert (memory.tasks, longer.tasks) == (1, 2)
    assert all(torch.equal(a, b) for a, b in zip(net.heads["birds"].parameters(), heads["birds"], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(net.heads["cars"].parameters(), heads["cars"], strict=True))


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model", "net", "module", "half", "uncounted"])
def test_files_of_any_usual_form_are_read(wrap, tmp_path):
    model = library_model("resnet18", 4)
    state = dict(model.state_dict())
    if wrap == "module":
        stored = {"state_dict": {f"module.{name}": tensor for name, tensor in state.items()}, "epoch": 3}
    elif wrap == "half":
        stored = state = {name: t.half() if t.is_floating_point() else t for name, t in state.items()}
    elif wrap == "uncounted":
        stored = {name: tensor for name, tensor in state.items() if "num_batches" not in name}
    else:
        stored = state if wrap == "plain" else {wrap: state, "epoch": 3}
    torch.save(stored, tmp_path / "weights.pt")
    net = make_backbone("resnet18", {"source": 4}, seed=0)
    load_source(net, tmp_path / "weights.pt", "source")
    loaded = net.trunk.state_dict()
    assert all(torch.equal(loaded[name].to(state[name].dtype), state[name]) for name in loaded)
    assert torch.equal(net.heads["source"].weight.to(state["fc.weight"].dtype), state["fc.weight"])


def test_names_that_torchvision_changes_when_loading_are_changed_here_too(tmp_path):
    model = library_model("densenet121", 4)
    old = {
        name.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): t for name, t in model.state_dict().items()
    }
    assert old.keys() != model.state_dict().keys()
    torch.save(old, tmp_path / "old.pth")
    net = make_backbone("densenet121", {"source": 4}, seed=0)
    load_source(net, tmp_path / "old.pth", "source")
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("classifier.")}
    assert same_state(net.trunk.state_dict(), state)


def bad_file(kind, path):
    state = dict(library_model("resnet18", 4).state_dict())
    if kind == "classes":
        torch.save(library_model("resnet18", 6).state_dict(), path)
    elif kind == "other model":
        torch.save(models.resnet34().state_dict(), path)
    elif kind == "lacking":
        del state["layer2.0.conv1.weight"]
        torch.save(state, path)
    elif kind == "foreign":
        torch.save({**state, "extra": torch.ones(2)}, path)
    elif kind == "code":
        path.write_bytes(pickle.dumps(Path("x")))
    elif kind == "text":
        path.write_text("no weights")
    elif kind == "list":
        torch.save([torch.ones(2)], path)
    elif kind == "folder":
        path.mkdir()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "does not exist; name a file, or 'download'"),
        ("folder", "is a folder; name a file"),
        ("classes", "has a classifier of 6 classes, and task 'source' has 4"),
        ("other model", r"is not of 'resnet18': it has '.*'.*; name matching weights or model"),
        ("lacking", r"lacks 'layer2.0.conv1.weight'; name matching weights"),
        ("foreign", r"has 'extra', which the model has not"),
        ("code", "is no weights file, or is damaged"),
        ("text", "is no weights file, or is damaged"),
        ("list", "holds no state dict"),
    ],
)
def test_a_file_that_does_not_fit_is_named_and_changes_nothing(kind, message, tmp_path):
    path = tmp_path / "weights.pth"
    bad_file(kind, path)
    net = make_backbone("resnet18", {"source": 4}, seed=0)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(WeightsError, match=message) as caught:
        load_source(net, path, "source")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert same_state(net.state_dict(), before)


def test_weights_of_another_stem_are_refused(tmp_path):
    small = make_backbone("resnet18", {"source": 4}, stem="small", seed=0)
    save_source(small, tmp_path / "small.safetensors", "source", {})
    net = make_backbone("resnet18", {"source": 4}, seed=0)
    with pytest.raises(
        WeightsError, match=r"the stem 'small', and the network has 'standard'; make it with stem='small'"
    ):
        load_source(net, tmp_path / "small.safetensors", "source")


def test_a_damaged_safetensors_file_is_refused(tmp_path):
    net = make_backbone("resnet18", {"source": 4}, seed=0)
    path = tmp_path / "weights.safetensors"
    save_source(net, path, "source", {})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="damaged"):
        load_source(net, path, "source")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    net = make_backbone("resnet18", {"source": 4}, seed=0)
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.files, "save_file", full)
    with pytest.raises(WeightsError, match=r"could not be written and is as it was before \(.*No space left"):
        save_source(net, path, "source", {})
    assert path.read_bytes() == b"old"
    with pytest.raises(WeightsError, match=r"must end in \.safetensors"):
        save_source(net, tmp_path / "weights.pth", "source", {})


def test_downloaded_weights_are_the_library_s_own(monkeypatch):
    asked = []

    def get_model(name, **options):
        asked.append((name, options))
        return models.resnet18(num_classes=4)

    net = make_backbone("resnet18", {"source": 4}, seed=0)
    monkeypatch.setattr(models, "get_model", get_model)
    assert load_source(net, "download", "source") == {}
    assert asked == [("resnet18", {"weights": "DEFAULT"})]

    def offline(name, **options):
        raise OSError("no network")

    monkeypatch.setattr(models, "get_model", offline)
    with pytest.raises(WeightsError, match=r"pretrained weights of 'resnet18' cannot be had \(no network\)"):
        load_source(net, "download", "source")


@pytest.mark.parametrize(
    ("model", "tasks", "message"),
    [
        ("resnet81", {"a": 2}, "did you mean 'resnet18'"),
        ("timm:resnt18", {"a": 2}, "did you mean 'timm:resnet18'"),
        ("squeezenet1_1", {"a": 2}, r"the classifier 'classifier.1' of 'squeezenet1_1' is a Conv2d"),
        ("timm:deit_tiny_distilled_patch16_224", {"a": 2}, "has not one classifier"),
        ("resnet18", {"a.b": 2}, "cannot be named 'a.b'"),
        ("resnet18", {"train": 2}, "cannot be named 'train'"),
    ],
)
def test_what_cannot_be_made_is_an_error(model, tasks, message):
    with pytest.raises(BackboneError, match=message):
        make_backbone(model, tasks, seed=0)


def test_a_trunk_of_one_s_own_has_no_library_weights(tmp_path):
    with pytest.raises(BackboneError, match="make_backbone"):
        save_source(small_net(), tmp_path / "weights.safetensors", "birds", {})
