"""BN layers of a task's own: what is common then is the layers' weights, and BN is put away and taken out again."""

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from xkfac.errors import XkfacError
from xkfac.learning.calibrator import _path, _ProxyTask, _Source
from xkfac.model.batches import default_forward
from xkfac.model.passes import norms_of
from xkfac.task_layers import TaskLayer, task_layers_of


class Net(nn.Module):
    """Convolutions with a bias and without one, a linear layer, BN behind each, and a head."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.second, self.again = nn.Conv2d(4, 5, 3, bias=False), nn.BatchNorm2d(5)
        self.third, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = F.relu(self.again(self.second(F.relu(self.norm(self.first(x))))))
        return self.head(F.relu(self.last(self.third(x.mean((2, 3))))))


def data(count=4, size=16, seed=0, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 2, 7, 7, generator=generator) + shift, torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def trained(net, batches, steps=30, learner=None, lr=0.05):
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr, momentum=0.9)
    net.train()
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        (loss if learner is None else learner.objective(loss)).backward()
        optimizer.step()
    return net.eval()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return trained(Net(), data())


def test_the_units_are_the_layers_alone_in_the_coordinates_of_their_own_weights(net):
    memory = xkfac.consolidate(net, data(), "own-bn", exclude=["head"])
    assert {unit.name: (unit.norm, unit.weight) for unit in memory.units} == {
        name: (None, f"{name}.weight") for name in ("first", "second", "third")
    }
    for name in ("first", "second", "third"):
        weight, bias = net.get_parameter(f"{name}.weight"), getattr(net.get_submodule(name), "bias", None)
        rows = torch.cat([weight.flatten(1), *([] if bias is None else [bias[:, None]])], 1)
        torch.testing.assert_close(memory.anchor[name][0], rows.detach())
    excluded = {row.parameter for row in memory.coverage.rows if row.kind == "excluded"}
    assert excluded == {f"{m}.{p}" for m in ("norm", "again", "last", "head") for p in ("weight", "bias")}


def test_the_curvature_is_the_fisher_of_the_network_as_its_past_tasks_use_it(net):
    """The Fisher of a linear layer by its definition, every example and every label, BN as it stands."""
    net = net.double()
    batches = [(x.double(), y) for x, y in data()]
    memory = xkfac.consolidate(net, batches, "own-bn", exclude=["head"], labels="exact")
    x = torch.cat([x for x, _ in batches])
    inputs, gradients = [], []
    hook = net.third.register_forward_hook(lambda module, args, out: inputs.append((args[0], out)))
    output = net(x)
    hook.remove()
    a = torch.cat([inputs[0][0].detach(), torch.ones(len(x), 1, dtype=x.dtype)], 1)
    for label in range(3):
        rise = F.cross_entropy(output, torch.full((len(x),), label), reduction="sum")
        (gradient,) = torch.autograd.grad(rise, inputs[0][1], retain_graph=True)
        gradients.append(gradient * output.detach().softmax(1)[:, label : label + 1].sqrt())
    fisher = sum(g.T @ g for g in gradients) / len(x)  # of each example; they do not touch each other
    covariance, mean = torch.cov(a.T, correction=0), a.mean(0)
    expected = torch.kron(covariance, fisher) + torch.kron(torch.outer(mean, mean), fisher)
    torch.testing.assert_close(memory.curvature.blocks["third"].dense()[0], expected, rtol=1e-8, atol=1e-12)


def test_a_strong_penalty_keeps_the_past_and_leaves_bn_to_the_target(net):
    source, target = data(), data(seed=1, shift=2.0)
    x = data(seed=9)[0][0]
    before, kept = net(x).detach(), copy.deepcopy(norms_of(net))
    memory = xkfac.consolidate(net, source, "own-bn", exclude=["head"])
    start = copy.deepcopy(net)
    rises = {}
    for strength in (0.0, 30.0):
        net = copy.deepcopy(start)
        net.head.requires_grad_(False)
        with xkfac.Learner(net, memory, strength=strength) as learner:
            learner.begin()
            trained(net, target, 200, learner, 0.5 * min(0.05, learner.stable_lr(0.9)))
            assert len(learner.protected) == 5
        assert all(not torch.equal(net.get_parameter(f"{n}.weight"), start.get_parameter(f"{n}.weight")) for n in NORMS)
        assert F.cross_entropy(net(target[0][0]), target[0][1]) < F.cross_entropy(start(target[0][0]), target[0][1])
        for path, norm in kept.items():
            net.get_submodule(path).load_state_dict(norm.state_dict())
        divergence = F.kl_div(net(x).log_softmax(1), before.log_softmax(1), reduction="batchmean", log_target=True)
        rises[strength] = divergence.item()
    assert rises[30.0] < 0.3 * rises[0.0]


NORMS = ("norm", "again", "last")


def test_calibration_measures_with_the_norms_of_the_source_and_lets_the_proxy_have_its_own(net):
    memory = xkfac.consolidate(net, data(), "own-bn", exclude=["head"])
    forward = default_forward
    source = _Source(net, memory, forward, data(seed=5), seed=0)
    moved = copy.deepcopy(net)
    with torch.no_grad():
        for norm in (moved.norm, moved.again, moved.last):
            norm.weight.mul_(1.5)
            norm.running_mean.add_(1.0)
    assert (source.point(moved).predicted, source.point(moved).real) == (0, 0)
    task = _ProxyTask(net, memory.likelihood, forward, data(seed=6), 0)
    *_, (_, network) = _path(net, memory, task, 0.05)
    changed = {name for name, p in network.named_parameters() if not torch.equal(p, net.get_parameter(name))}
    assert {f"{name}.weight" for name in NORMS} < changed
    assert not changed & {"head.weight", "head.bias"}
    point = source.point(network)
    assert point.real > 0
    assert point.predicted > 0


def test_calibration_finds_the_penalty_nearly_right_where_bn_does_not_move():
    """Nothing but the coupling of units and higher orders is left out, so a short path needs no large scale."""
    torch.manual_seed(1)
    net = trained(Net(), data(8, 32), 100)
    memory = xkfac.consolidate(net, data(8, 32), "own-bn", exclude=["head"], draws=32)
    found = xkfac.calibrate(net, memory, data(8, 32, seed=3), tasks=1).calibration
    assert 0.4 < found.scale < 2.5


def test_a_memory_goes_on_over_tasks_and_through_a_file(net, tmp_path):
    memory = xkfac.consolidate(net, data(), "own-bn", exclude=["head"])
    memory.save(tmp_path / "memory.safetensors")
    memory = xkfac.Memory.load(tmp_path / "memory.safetensors", net)
    assert memory.method == xkfac.METHODS["own-bn"]
    assert memory.exclude == ("head",)
    learner = xkfac.Learner(net, memory)
    learner.begin()
    trained(net, data(seed=1, shift=2.0), 10, learner)
    extended = learner.finish(data(seed=1, shift=2.0))
    assert extended.tasks == 2
    assert {unit.name for unit in extended.units} == {"first", "second", "third"}


def test_task_norms_hold_one_bn_a_task_and_the_active_one_alone_learns(net):
    x, before = data()[0][0], net(data()[0][0]).detach()
    xkfac.give_task_norms(net, ["old", "new"])
    layers = list(task_layers_of(net).values())
    assert len(layers) == 3
    assert torch.equal(net(x), before)
    xkfac.enter_task(net, "new")
    trained(net, data(seed=1, shift=2.0), 5)
    for layer in layers:
        assert [p.requires_grad for task in ("old", "new") for p in layer.of[task].parameters()] == [False] * 2 + [
            True
        ] * 2
        assert not torch.equal(layer.of["old"].running_mean, layer.of["new"].running_mean)
        assert not torch.equal(layer.of["old"].weight, layer.of["new"].weight)
        layer.enter("old")
        assert all(parameter.grad is None for parameter in layer.of["new"].parameters())
    assert not torch.equal(net(x), before)  # the layers' weights have moved


class Deep(Net):
    """The same network, its first layers in a block."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2))

    def forward(self, x):
        return super().forward(self.block(x))


def test_layers_of_a_task_are_free_and_the_past_has_them_back_as_they_were():
    torch.manual_seed(0)
    net = trained(Deep(), data())
    x, before = data()[0][0], net(data()[0][0]).detach()
    xkfac.give_task_layers(net, ["old", "new"], ["blo*", "block.0", "second"])
    xkfac.give_task_norms(net, ["old", "new"])
    assert set(task_layers_of(net)) == {"block", "second", "norm", "again", "last"}  # none inside another
    assert torch.equal(net(x), before)
    with pytest.raises(
        XkfacError, match=r"^no shared layer with parameters matches 'block\*'; those on top are first, thi"
    ):
        xkfac.give_task_layers(net, ["old", "new"], ["block*"])  # the tasks have it
    xkfac.enter_task(net, "old")
    memory = xkfac.consolidate(net, data(), "own-bn", exclude=["head"])
    assert {unit.name for unit in memory.units} == {"first", "third"}
    xkfac.enter_task(net, "new")
    net.head.requires_grad_(False)
    with xkfac.Learner(net, memory) as learner:
        learner.begin()
        for parameter in learner.protected:  # stand still, as under a penalty without end
            parameter.requires_grad_(False)
        trained(net, data(seed=1, shift=2.0), 20, learner)
        extended = learner.finish(data(seed=1, shift=2.0))
    assert {unit.name for unit in extended.units} == {"first", "third"}
    for name in ("block", "second"):
        layers = task_layers_of(net)[name].of
        pairs = zip(layers["old"].parameters(), layers["new"].parameters(), strict=True)
        assert all(not torch.equal(old, new) for old, new in pairs)
    assert not torch.equal(net(x), before)
    xkfac.enter_task(net, "old")
    assert torch.equal(net(x), before)


@pytest.mark.parametrize("method", ["xkfac", "kfac", "corrected", "ewc", "unmerged", "fixed-bn"])
def test_a_memory_of_shared_bn_leaves_layers_of_a_task_out_and_goes_on_with_the_next(net, method):
    xkfac.give_task_layers(net, ["old", "new"], ["third"])
    xkfac.enter_task(net, "old")
    memory = xkfac.consolidate(net, data(), method, exclude=["head"])
    covered = {row.parameter for row in memory.coverage.rows if row.unit != "-"} - set(dict(net.named_buffers()))
    assert covered == {name for name, _ in net.named_parameters() if not name.startswith(("third", "head"))}
    xkfac.enter_task(net, "new")
    kept = {name: tensor.clone() for name, tensor in net.state_dict().items() if "of.old" in name}
    with xkfac.Learner(net, memory) as learner:
        learner.begin(data(seed=1))
        trained(net, data(seed=1), 3, learner)
        extended = learner.finish(data(seed=1))
    assert extended.tasks == 2
    assert [row.parameter for row in extended.coverage.rows] == [row.parameter for row in memory.coverage.rows]
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in kept.items())


def test_a_task_is_used_for_a_while_and_what_learns_stays_as_it_is(net):
    xkfac.give_task_layers(net, ["old", "new"], ["third"])
    xkfac.enter_task(net, "new")
    with torch.no_grad():
        task_layers_of(net)["third"].of["old"].weight.zero_()
    x, learning = data()[0][0], {name: p.requires_grad for name, p in net.named_parameters()}
    new = net(x).detach()
    with xkfac.using_task(net, "old"):
        assert not torch.equal(net(x), new)
        assert {name: p.requires_grad for name, p in net.named_parameters()} == learning
    assert torch.equal(net(x), new)
    with contextlib.suppress(KeyboardInterrupt), xkfac.using_task(net, "old"):
        raise KeyboardInterrupt
    with (
        pytest.raises(XkfacError, match="there is no layer for task 'odd'; name one of old, new"),
        xkfac.using_task(net, "odd"),
    ):
        pass
    assert torch.equal(net(x), new)


def test_a_layer_that_is_not_there_is_refused_and_nothing_is_changed(net):
    with pytest.raises(
        XkfacError, match=r"^no shared layer with parameters matches 'fisrt'; those on top are first, norm, sec"
    ):
        xkfac.give_task_layers(net, ["old", "new"], ["second", "fisrt"])
    with pytest.raises(XkfacError, match="needs the name of at least one task"):
        xkfac.give_task_layers(net, [], ["first", "second"])
    assert not task_layers_of(net)


def test_what_does_not_fit_is_refused_and_nothing_is_changed(net):
    with pytest.raises(XkfacError, match="needs the name of at least one task"):
        TaskLayer(nn.BatchNorm1d(3), [])
    xkfac.give_task_norms(net, ["old", "new"])
    with pytest.raises(XkfacError, match=r"^there is no layer for task 'nwe'; name one of old, new$"):
        xkfac.enter_task(net, "nwe")
    net = Net()
    for changes in ({"fixed_bn": True}, {"recentre": True}, {"interpretation": "brn"}):
        with pytest.raises(
            XkfacError, match=r"own_bn=True leaves every BN to its task, so there is none|fixed_bn=True"
        ):
            xkfac.consolidate(net, data(), "own-bn", exclude=["head"], **changes)


def test_for_layers_of_one_position_task_specific_bn_has_one_term_which_is_that_of_kfac():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    batches = [torch.randn(8, 6).double() + 1 for _ in range(3)]
    net(torch.cat(batches))
    memory = xkfac.consolidate(net, batches, "own-bn", draws=3)
    kfac = xkfac.estimate(net, batches, kind="kfac", statistics="population", exclude=["1"], draws=3)
    for name, block in memory.curvature.blocks.items():
        (term,) = block.terms
        torch.testing.assert_close(block.dense(), kfac.curvature.blocks[name].dense())
        assert not term.low_rank


def test_shared_bn_that_no_method_protects_is_told_once(net):
    """The word own-bn alone gives no task its own BN."""
    memory = xkfac.consolidate(net, data(), "own-bn", draws=1)
    learner = xkfac.Learner(net, memory)
    learner.begin(data(seed=1))
    with pytest.warns(xkfac.XkfacWarning, match=r"'norm' is shared by all tasks.*give_task_norms") as said:
        trained(net, data(seed=1), 2, learner)
    assert len(said) == 1


def test_task_specific_bn_is_not_taken_for_shared(net):
    xkfac.give_task_norms(net, ["old", "new"])
    memory = xkfac.consolidate(net, data(), "own-bn", draws=1)
    xkfac.enter_task(net, "new")
    learner = xkfac.Learner(net, memory)
    learner.begin(data(seed=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(net, data(seed=1), 2, learner)


def test_names_that_no_task_can_have_are_refused_before_anything_is_changed(net):
    before = dict(net.named_modules())
    with pytest.raises(XkfacError, match=r"the single name 'old'; give a list of all names, such as \['old'\]"):
        xkfac.give_task_norms(net, "old")
    with pytest.raises(XkfacError, match=r"a task cannot have this name .*imagenet.v1.*; choose another one"):
        xkfac.give_task_layers(net, ["imagenet.v1", "new"], ["head"])
    assert dict(net.named_modules()) == before
