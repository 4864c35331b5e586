"""A network that is not made of the memory's units is noticed when a task begins, on one batch, with the remedy."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.setups import data, gradients, mlp, randomise, target
from xkfac import Learner, Memory, consolidate, estimate
from xkfac.errors import MismatchError, UnitError

IMAGES = {"shape": (3, 8, 8)}


class Convolutions(nn.Module):
    """Two convolutions, a BN behind the first, and a head; what runs can be changed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.spare = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)
        self.norms = {"first": self.norm}

    def forward(self, x):
        for name in ("first", "second"):
            x = getattr(self, name)(x)
            x = self.norms[name](x) if name in self.norms else x
            x = x.relu()
        return self.head(x.mean((2, 3)))


def begun(model, change, *, source=None, aim=None):
    """Consolidate a network, change it, and begin a task."""
    memory = consolidate(model, source or data(**IMAGES), "xkfac")
    change(model)
    learner = Learner(model, memory)
    learner.begin(aim or target(**IMAGES))


def convolutions():
    return randomise(Convolutions()).train()


def extra(model):
    model.norms["second"] = model.spare


def rewired(model):
    model.norms = {"second": model.norm}


def gone(model):
    model.norms = {}


CHANGES = {
    "an extra BN": (extra, "unit 'second' is merged with 'spare' now and was without a BN behind it in the memory"),
    "a rewired BN": (rewired, "unit 'first' is without a BN behind it now and was merged with 'norm' in the memory"),
    "a BN that is gone": (gone, "unit 'first' is without a BN behind it now and was merged with 'norm'"),
    "a stride": (
        lambda model: setattr(model.second, "stride", (1, 1)),
        "unit 'second' is a convolution with stride 1x1 now and with 2x2 in the memory",
    ),
    "a dilation": (
        lambda model: setattr(model.first, "dilation", (2, 2)),
        "unit 'first' is a convolution with dilation 2x2 now and with 1x1 in the memory",
    ),
    "a padding": (
        lambda model: setattr(model.first, "padding", (0, 1)),
        "unit 'first' is a convolution with padding 0x1 now and with 1x1 in the memory",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_network_is_refused_when_the_task_begins(change):
    model = convolutions()
    apply, message = CHANGES[change]
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MismatchError, match=f"{message}.*restore the network"):
        begun(model, apply)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_same_network_begins_also_with_layers_that_are_new():
    begun(convolutions(), lambda model: None)

    def wider(model):
        model.more = nn.Linear(3, 3)
        model.head = nn.Sequential(model.head)
        model.forward = lambda x, run=model.forward: model.more(run(x))

    model = convolutions()
    memory = consolidate(model, data(**IMAGES), "xkfac", exclude="head")
    wider(model)
    Learner(model, memory).begin(target(**IMAGES))


@pytest.mark.parametrize("change", ["a stride", "a rewired BN"])
def test_finish_notices_it_where_begin_had_no_data(change):
    model = convolutions()
    learner = Learner(model, consolidate(model, data(**IMAGES), "xkfac"))
    learner.begin(recentre=False)
    CHANGES[change][0](model)
    gradients(model, learner, target(**IMAGES)[0])
    with pytest.raises(MismatchError, match=CHANGES[change][1]):
        learner.finish(target(**IMAGES))


class SequenceFirst(nn.Module):
    """A layer that takes [length, batch, features], and a BN on the mean over the length."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.inner(x.transpose(0, 1)).tanh().mean(0)))


def sequences(size, length):
    return data(2, size, (length, 4))


def test_a_batch_as_large_as_a_sequence_is_long_is_named():
    with pytest.raises(
        MismatchError,
        match=r"'inner.weight' is a free parameter in the memory and the weight of a layer now, since its input has 7 "
        "rows, as many as the batch has examples; use batches of another size",
    ):
        begun(randomise(SequenceFirst()), lambda model: None, source=sequences(5, 7), aim=sequences(7, 7))
    with pytest.raises(
        MismatchError,
        match=r"unit 'inner' is a layer in the memory and a free parameter now, since its input has 7 rows for a batch "
        "of 5 examples; give inputs of the size .* or make the memory again with batches of another size",
    ):
        begun(randomise(SequenceFirst()), lambda model: None, source=sequences(7, 7), aim=sequences(5, 7))
    begun(randomise(SequenceFirst()), lambda model: None, source=sequences(5, 7), aim=sequences(6, 7))


class Windows(nn.Module):
    """A layer that takes windows of 4x4 positions, [batch * windows, 16, channels], as Swin's attention does."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(3, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        windows = x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 4, 5, 1).reshape(-1, 16, 3)
        mixed = self.mix(windows).tanh().mean(1)
        return self.head(mixed.reshape(x.shape[0], -1, 5).mean(1))


def test_another_resolution_that_changes_the_units_is_named():
    small, large = data(2, 6, (3, 4, 4)), data(2, 6, (3, 8, 8))
    with pytest.raises(
        MismatchError, match=r"unit 'mix' .* input has 24 rows for a batch of 6 examples; give inputs of"
    ):
        begun(Windows(), lambda model: None, source=small, aim=large)
    model = Windows()
    memory = consolidate(model, large, "xkfac")
    assert "mix.weight" in {unit.name for unit in memory.units}
    with pytest.raises(
        MismatchError, match=r"'mix.weight' is a free parameter in the memory and the weight of a layer"
    ):
        Learner(model, memory).begin(small)


class Heads(nn.Module):
    """A trunk with a head for each task."""

    def __init__(self, tasks):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU())
        self.heads = nn.ModuleDict({task: nn.Linear(5, 3) for task in tasks})
        self.task = tasks[0]

    def forward(self, x):
        return self.heads[self.task](self.trunk(x))


def test_a_weight_that_is_transformed_now_is_named():
    def transform(model):
        model.forward = lambda x: F.linear(model.trunk(x), 2 * model.heads["source"].weight)

    with pytest.raises(
        MismatchError, match=r"unit 'heads.source' .* free parameter now, since its weight is transformed"
    ):
        begun(randomise(Heads(["source"])), transform, source=data(), aim=target())


@pytest.mark.parametrize("known", [True, False])
def test_several_heads_without_exclude_are_named_when_the_task_begins(known):
    model = randomise(Heads(["source", "target"] if known else ["source"]))
    memory = consolidate(model, data(), "xkfac")
    if not known:
        model.heads["target"] = nn.Linear(5, 3)
    model.task = "target"
    learner = Learner(model, memory)
    with pytest.raises(
        MismatchError,
        match=r"'heads.(source|target)' .* if every task has a head of its own, leave heads out of the memory, with "
        r"memory.without\('heads.(source|target)'\) or consolidate\(..., exclude=",
    ):
        learner.begin(target())
    learner.close()
    with Learner(model, memory.without("heads")) as learner:
        learner.begin(target())
        gradients(model, learner)
        extended = learner.finish(target())
    assert {unit.name for unit in extended.units} == {"trunk.0"}
    assert extended.exclude == ("heads",)


def test_a_head_of_another_size_names_the_remedy():
    model = mlp()
    memory = consolidate(model, data(), "xkfac")
    model[6] = nn.Linear(4, 7)
    with pytest.raises(MismatchError, match=r"unit '6'.*memory.without\('6'\)"):
        Learner(model, memory)
    Learner(model, memory.without("6")).begin(target())


@pytest.mark.parametrize("made", [{}, {"cross_layer": True}, {"cross_layer": True, "form": "paper"}, {"kind": "kfac"}])
def test_a_memory_without_a_unit_has_the_penalty_of_the_others(made, tmp_path):
    model = mlp().double()
    memory = consolidate(model, [(x.double(), y) for x, y in data()], **{"method": "xkfac", **made})
    less = memory.without("3", "4")
    torch.manual_seed(1)
    displaced = {name: torch.randn_like(anchor) for name, anchor in memory.anchor.items()}
    displaced["3"].zero_()
    others = {name: tensor for name, tensor in displaced.items() if name != "3"}
    assert set(less.anchor) == set(others) == {"0", "6"}
    torch.testing.assert_close(less.curvature.quadratic(others), memory.curvature.quadratic(displaced))
    assert [row.unit for row in less.coverage.rows] == ["0", "0", "0", "-", "-", "-", "-", "6", "6"]
    assert less.exclude == ("3", "4")
    less.save(tmp_path / "less")
    again = Memory.load(tmp_path / "less", model)
    torch.testing.assert_close(again.curvature.quadratic(others), less.curvature.quadratic(others))


def test_a_memory_cannot_do_without_a_part_of_a_unit_or_what_it_does_not_have():
    memory = consolidate(mlp(), data(), "xkfac")
    with pytest.raises(UnitError, match=r"'3.weight' is in unit '3' with what is left out; leave it out too"):
        memory.without("4")
    with pytest.raises(UnitError, match="'head' matches no parameter that the memory covers"):
        memory.without("head")


def states(model):
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_an_iterator_loses_no_batch():
    found = []
    for loader in (target(), iter(target()), (batch for batch in target())):
        torch.manual_seed(0)
        model = mlp()
        Learner(model, consolidate(model, data(), "xkfac")).begin(loader)
        found.append(states(model))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


class Counted(DataLoader):
    """A loader that counts how often it is iterated."""

    count = 0

    def __iter__(self):
        self.count += 1
        return super().__iter__()


def test_a_loader_is_iterated_once_and_the_random_state_stays():
    model = mlp()
    x = torch.randn(20, 6)
    loader = Counted(TensorDataset(x, torch.zeros(20)), batch_size=5, shuffle=True)
    learner = Learner(model, consolidate(model, data(), "xkfac"))
    states = torch.get_rng_state(), random.getstate()
    bars = []

    def progress(batches):
        bars.append(len(batches))
        return batches

    learner.begin(loader, progress=progress)
    assert loader.count == 1
    assert bars == [4]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    torch.testing.assert_close(model[1].running_mean, (x @ model[0].weight.T).mean(0))


def test_a_loader_of_a_method_that_does_not_recentre_is_looked_at():
    model = convolutions()
    learner = Learner(model, consolidate(model, data(**IMAGES), "fixed-bn"))
    model.second.stride = (1, 1)
    with pytest.raises(MismatchError, match="stride"):
        learner.begin(target(**IMAGES))
    model.second.stride = (2, 2)
    before = states(model)
    learner.begin(iter(target(**IMAGES)))
    assert all(torch.equal(one, two) for one, two in zip(before, states(model), strict=True))


def test_what_the_memory_leaves_out_and_is_gone_is_named_when_the_task_begins():
    model = mlp()
    memory = consolidate(model, data(), "xkfac", exclude="6")
    del model[6]
    with pytest.raises(UnitError, match="exclude: '6' matches no parameter"):
        Learner(model, memory).begin(target())
    learner = Learner(model, memory, exclude=())
    learner.begin(target())
    gradients(model, learner, (target()[0][0], target()[0][1]))
    assert learner.finish(target()).exclude == ()


def test_extend_compares_convolutions_too():
    model = convolutions()
    memory = consolidate(model, data(**IMAGES), "xkfac")
    model.second.stride = (1, 1)
    with pytest.raises(MismatchError, match="stride 1x1 now and with 2x2"):
        memory.extend(model, estimate(model, data(**IMAGES)), weights=(0.5, 0.5))
