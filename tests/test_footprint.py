"""What memories and curvature passes hold: bytes, counted tensor by tensor, not as the process's size."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import xkfac
from tests.helpers.memories import make


def bytes_of(memory):
    tensors = [*memory.anchor.values(), *(tensor for _, tensor in memory.curvature.tensors())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("net", ["mlp", "conv"])
def test_a_memory_of_fifty_tasks_is_as_large_as_that_of_one(net, tmp_path):
    model, first, second = make(net)
    memory = xkfac.consolidate(model, first[:1], "xkfac", draws=1)
    size = bytes_of(memory)
    memory.save(tmp_path / "one")
    for _ in range(49):
        learner = xkfac.Learner(model, memory)
        learner.begin(recentre=False)
        learner.penalty()
        memory = learner.finish(second[:1], keep="average")
        assert bytes_of(memory) == size
    assert memory.tasks == 50
    memory.save(tmp_path / "fifty")
    # The description says the number of tasks and examples: a few digits more.
    assert abs((tmp_path / "fifty").stat().st_size - (tmp_path / "one").stat().st_size) <= 16


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that operations have made and that are still there, and their peak."""

    def __init__(self):
        super().__init__()
        self.held, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in known:
                self._see(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _see(self, storage):
        if storage._cdata not in self.held:
            self.held[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key):
        self.now -= self.held.pop(key)


def convolutions():
    layers, inputs = [], 3
    for outputs, stride in ((32, 1), (32, 1), (64, 2), (64, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize("options", [{}, {"grouping": "pooled"}, {"kind": "kfac"}])
def test_a_curvature_pass_holds_little_more_than_a_plain_pass_and_the_factors(options):
    torch.manual_seed(0)
    net, x = convolutions(), torch.randn(24, 3, 32, 32)
    with Live() as plain:
        F.cross_entropy(net(x), torch.randint(10, (24,))).backward()
    with Live() as ours:
        found = xkfac.estimate(net, [x, x], draws=1, **options)
    factors = sum(tensor.numel() * tensor.element_size() for _, tensor in found.curvature.tensors())
    assert ours.now >= factors  # the count sees what is still there
    assert plain.peak < ours.peak <= 1.5 * plain.peak + factors


def test_live_storages_are_counted_once_and_forgotten():
    with Live() as live:
        a = torch.zeros(1000)
        b = a[10:].view(-1)
        c = a + 1
        assert live.now == 8000
        del a, c
        assert live.now == 4000
        del b
    assert (live.now, live.peak) == (0, 8000)
