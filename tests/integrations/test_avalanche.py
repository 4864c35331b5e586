"""The plugin for Avalanche: what it learns and remembers is what the bare loop does, resumed or not."""

import copy
import functools
import pickle
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from tests.helpers.setups import data, mlp

pytest.importorskip("avalanche", reason="needs the extra 'avalanche'")

from avalanche.benchmarks import benchmark_from_datasets, nc_benchmark
from avalanche.benchmarks.utils import _make_taskaware_classification_dataset as as_dataset
from avalanche.core import Agent
from avalanche.models import MultiHeadClassifier, MultiTaskModule
from avalanche.training.plugins import ReplayPlugin
from avalanche.training.supervised import Naive
from torch.utils.data import TensorDataset

from xkfac.integrations import task_sequence
from xkfac.integrations.avalanche import XKFACPlugin, XKFACRegularization, _loaders

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "avalanche.md"
SIZE, EPOCHS = 8, 2
FEW = {"tasks": 1}


class Data(TensorDataset):
    """Examples of one experience."""

    @property
    def targets(self):
        return self.tensors[1].tolist()


def examples(task, count=48):
    ((x, y),) = data(1, count, shift=0.5 * task, scale=1 + task, seed=task)
    return x, y


def benchmark(tasks=3):
    """Return a benchmark of task labels 0, 1, ..., each experience with a shift and a scale of its own."""
    sets = [as_dataset(Data(*examples(task))) for task in range(tasks)]
    options = {"class_ids_from_zero_in_each_exp": True, "one_dataset_per_exp": True, "shuffle": False}
    return nc_benchmark(sets, sets, n_experiences=tasks, task_labels=True, **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.002)


def naive(model, plugins, epochs=EPOCHS, make=sgd, **options):
    return Naive(
        model=model,
        optimizer=make(model.parameters()),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=SIZE,
        train_epochs=epochs,
        eval_mb_size=16,
        plugins=plugins,
        evaluator=None,
        **options,
    )


class Recorder:
    """Keeps the batches that a strategy learns from."""

    supports_distributed = True

    def __init__(self):
        self.batches = []

    def before_training_exp(self, strategy, **kwargs):
        self.batches.append([])

    def before_forward(self, strategy, **kwargs):
        self.batches[-1].append((strategy.mb_x.clone(), strategy.mb_y.clone()))


def by_hand(model, batches, loaders, make=sgd, implicit=True, **options):
    """Return the memory after the same batches in a bare loop."""
    optimizer = make(model.parameters())
    memory = None
    for own, loader in zip(batches, loaders, strict=True):
        learner = None if memory is None else xkfac.Learner(model, memory)
        if learner is not None:
            learner.begin(loader(), optimizer if implicit else None)
        model.train()
        for x, y in own:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            (loss if learner is None else learner.objective(loss)).backward()
            optimizer.step()
        if learner is None:
            first = loader()
            memory = xkfac.calibrate(model, xkfac.consolidate(model, first, **options), first, **FEW)
        else:
            memory = learner.finish(loader())
    return memory


def same(one, other, tolerance=0.0):
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def same_memory(one, other, tolerance=0.0):
    assert (one.tasks, one.calibration) == (other.tasks, other.calibration)
    for (unit, a), (name, b) in zip(one.curvature.tensors(), other.curvature.tensors(), strict=True):
        assert unit == name
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("eval_every", "method", "make", "implicit"),
    [(-1, "fixed-bn", sgd, True), (1, "xkfac", sgd, True), (-1, "fixed-bn", sgd, False), (-1, "fixed-bn", adam, True)],
)
def test_the_plugin_does_what_the_bare_loop_does(eval_every, method, make, implicit):
    model, stream = mlp(), benchmark().train_stream
    bare = copy.deepcopy(model)
    recorder, plugin = Recorder(), XKFACPlugin(method=method, draws=2, calibrate=FEW, implicit=implicit)
    strategy = naive(model, [recorder, plugin], make=make, eval_every=eval_every)
    strategy.train(stream)
    loaders = [lambda e=e: _loaders(e.dataset.train(), SIZE)[0] for e in stream]
    options = {"method": method, "draws": 2, "forward": lambda net, batch: net(batch[0])}
    memory = by_hand(bare, recorder.batches, loaders, make, implicit and make is sgd, **options)
    assert memory.tasks == 3
    assert memory.calibration.scale > 0
    same(model, bare, 1e-5)
    torch.testing.assert_close(dict(plugin.memory.anchor), dict(memory.anchor), rtol=1e-4, atol=1e-4)


def test_a_first_experience_is_learnt_as_without_the_plugin():
    states = []
    for plugins in ([], [XKFACPlugin(draws=1, calibrate=False)]):
        torch.manual_seed(1)
        model = mlp()
        naive(model, plugins).train(benchmark(1).train_stream)
        states.append((model, torch.get_rng_state()))
    same(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


class Snapshot(Recorder):
    """Keeps a checkpoint in the middle of the second experience, as a user would write it."""

    def __init__(self, plugin, pickled):
        super().__init__()
        self.plugin, self.pickled, self.kept = plugin, pickled, None

    def after_training_epoch(self, strategy, **kwargs):
        if len(self.batches) == 2 and strategy.clock.train_exp_epochs == 0:
            own = pickle.dumps(self.plugin) if self.pickled else copy.deepcopy(self.plugin.state_dict())
            states = copy.deepcopy((strategy.model.state_dict(), strategy.optimizer.state_dict()))
            self.kept = (*states, own, torch.get_rng_state())


@pytest.mark.parametrize("pickled", [False, True])
def test_an_experience_that_is_resumed_in_the_middle_ends_as_an_unbroken_one(pickled):
    stream = benchmark().train_stream
    plugin = XKFACPlugin(method="xkfac", draws=2, strength=3.0)
    snapshot = Snapshot(plugin, pickled)
    model = mlp()
    naive(model, [snapshot, plugin]).train(stream[:2])

    weights, optimizer, own, random = snapshot.kept
    resumed = pickle.loads(own) if pickled else XKFACPlugin(method="xkfac", draws=2, strength=3.0)
    if not pickled:
        resumed.load_state_dict(own)
    again = mlp()
    again.load_state_dict(weights)
    strategy = naive(again, [resumed], epochs=EPOCHS - 1)
    strategy.check_model_and_optimizer = lambda **kwargs: None  # the optimizer keeps the momentum that it is given
    strategy.optimizer.load_state_dict(optimizer)
    torch.set_rng_state(random)
    strategy.train(stream[1])
    same(model, again)
    same_memory(plugin.memory, resumed.memory)


class Heads(MultiTaskModule):
    """A trunk with BN and one head per task."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU())
        self.heads = MultiHeadClassifier(8, initial_out_features=3)

    def forward(self, x, task_labels):
        return self.heads(self.trunk(x), task_labels)


@pytest.mark.parametrize("options", [{}, {"exclude": ["heads*"]}])
def test_a_model_of_several_heads_keeps_its_first_task(options):
    distances = []
    stream = benchmark().train_stream
    for plugins in ([], [XKFACPlugin(draws=2, strength=100.0, **options)]):
        torch.manual_seed(0)
        model = Heads()
        strategy = naive(model, plugins, epochs=4)
        strategy.train(stream[0])
        model.eval()
        x, _ = examples(0)
        before = model(x, torch.zeros(len(x), dtype=torch.long)).detach()
        strategy.train(stream[1:], eval_streams=[stream])
        model.eval()
        after = model(x, torch.zeros(len(x), dtype=torch.long)).detach()
        distances.append(F.mse_loss(after, before).item())
    assert distances[1] < 0.5 * distances[0]
    assert plugins[0].memory.tasks == 3


def test_examples_of_a_replay_buffer_do_not_enter_the_memory():
    plugin = XKFACPlugin(draws=1, strength=1.0)
    naive(mlp(), [ReplayPlugin(mem_size=20), plugin]).train(benchmark(2).train_stream)
    assert plugin.memory.examples == 2 * 48


def test_held_out_examples_make_the_memory_in_place_of_the_experiences_own():
    sizes = [48, 16]
    sets = {
        name: [as_dataset(Data(*examples(t, size)), task_labels=t) for t in range(2)]
        for name, size in zip(("train", "valid"), sizes, strict=True)
    }
    streams = benchmark_from_datasets(**sets).streams
    plugin = XKFACPlugin(draws=1, strength=1.0, held_out=streams["valid"])
    naive(mlp(), [plugin]).train(streams["train"])
    assert (plugin.memory.tasks, plugin.memory.examples) == (2, 2 * 16)


def test_processes_share_the_examples_and_one_calibration(one_process):
    found = []
    for wrap in (nn.parallel.DistributedDataParallel, lambda net: net):
        torch.manual_seed(0)
        plugin = XKFACPlugin(draws=1, damping=1e-3, calibrate=FEW)
        assert plugin.supports_distributed
        naive(wrap(mlp()), [plugin]).train(benchmark(2).train_stream)
        found.append(plugin.memory)
    assert [memory.examples for memory in found] == [2 * 48] * 2
    assert found[0].calibration == found[1].calibration


def test_an_agent_learns_as_the_bare_loop_does():
    model, stream = mlp(), benchmark(2).train_stream
    bare = copy.deepcopy(model)
    agent, batches = Agent(), []
    agent.model = model
    agent.opt = sgd(model.parameters())
    agent.reg = XKFACRegularization(batch_size=SIZE, draws=2, calibrate=FEW)
    for experience in stream:
        agent.pre_adapt(experience)
        batches.append([(x, y) for x, y, _ in _loaders(experience.dataset, SIZE)[0]])
        model.train()
        for x, y in batches[-1]:
            agent.opt.zero_grad()
            agent.reg(F.cross_entropy(model(x), y)).backward()
            agent.opt.step()
        agent.post_adapt(experience)
    loaders = [lambda e=e: _loaders(e.dataset.train(), SIZE)[0] for e in stream]
    memory = by_hand(bare, batches, loaders, draws=2, forward=lambda net, batch: net(batch[0]))
    same(model, bare, 1e-6)
    same_memory(agent.reg.memory, memory, 1e-6)


def test_the_lines_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(task_sequence, "calibrated", functools.partial(xkfac.calibrate, **FEW))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(block, {"model": model, "optimizer": optimizer, "benchmark": benchmark(2)})
    assert xkfac.Memory.load("memory.safetensors", model).tasks == 2
