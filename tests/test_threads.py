"""Passes in several threads: over one model the second is refused, over copies of it both leave no trace."""

import copy
import random
import threading

import pytest
import torch
from torch import nn

import xkfac
from tests.helpers.setups import data, mlp, target
from xkfac.model import passes
from xkfac.model.recentre import recentre

REFUSED = (
    "another thread is running a pass over this model and has changed its flags until it is done; wait for it, or give "
    "each thread a deep copy of the model"
)


class Held:
    """Batches the second of which waits until it is let go; `inside` is set once the pass has begun."""

    def __init__(self, count=2):
        self.batches = data(count)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        yield self.batches[0]
        self.inside.set()
        assert self.go_on.wait(30)
        yield from self.batches[1:]


@pytest.fixture
def held():
    """Return a function that starts a pass over a model in another thread, where it waits."""
    started = []

    def start(model, **options):
        loader, found = Held(), []
        thread = threading.Thread(
            target=lambda: found.append(xkfac.consolidate(model, loader, "xkfac", draws=1, **options))
        )
        thread.start()
        assert loader.inside.wait(30)

        def end():
            loader.go_on.set()
            thread.join(30)
            return found[0]

        started.append(end)
        return end

    yield start
    for end in started:
        end()


def state(model):
    flags = [(module.training, getattr(module, "track_running_stats", None)) for module in model.modules()]
    return flags, [p.requires_grad for p in model.parameters()], [b.clone().tolist() for b in model.buffers()]


@pytest.mark.parametrize("part", ["whole", "layer"])
@pytest.mark.parametrize("call", ["consolidate", "find_units", "recentre", "begin", "calibrate"])
def test_a_second_thread_is_refused(held, call, part):
    model = mlp().train()
    memory = xkfac.consolidate(model, data(), "xkfac", draws=1)
    learner = xkfac.Learner(model, memory)
    shares = model if part == "whole" else nn.Sequential(*model)  # another model of the same layers
    before = state(model)
    end = held(model)
    work = {
        "consolidate": lambda: xkfac.consolidate(shares, data(), "xkfac"),
        "find_units": lambda: xkfac.find_units(shares, data()[0]),
        "recentre": lambda: recentre(shares, target()),
        "begin": lambda: learner.begin(target()),
        "calibrate": lambda: xkfac.calibrate(shares, memory, data()),
    }[call]
    with pytest.raises(xkfac.XkfacError) as refused:
        work()
    assert str(refused.value) == REFUSED
    found = end()
    learner.close()
    assert state(model) == before
    expected = xkfac.consolidate(model, data(2), "xkfac", draws=1)  # and now nobody is inside
    for (_, one), (_, other) in zip(found.curvature.tensors(), expected.curvature.tensors(), strict=True):
        assert torch.equal(one, other)


def test_a_thread_may_enter_again():
    model = mlp().train()
    with passes.untouched(model), passes.untouched(model):
        model.eval()
    assert model.training
    assert not passes._changing


def test_a_failed_pass_lets_others_in():
    model = mlp()
    with pytest.raises(xkfac.XkfacError):
        xkfac.consolidate(model, [], "xkfac")
    assert not passes._changing
    thread = threading.Thread(target=lambda: xkfac.consolidate(model, data(1), "xkfac", draws=1))
    thread.start()
    thread.join(30)
    assert not passes._changing


def test_a_copy_of_a_model_in_a_pass_is_free(held):
    model = mlp()
    held(model)
    xkfac.find_units(copy.deepcopy(model), data()[0])


def test_threads_on_copies_leave_what_a_process_shares(held):
    model = mlp()
    import torch._dynamo  # the compiler, whose stance is a setting of the process

    stance = torch._dynamo.eval_frame._stance

    def drawing(network, batch):
        torch.rand(1), random.random()
        return network(batch[0])

    before = torch.get_rng_state(), random.getstate()
    end = held(model, forward=drawing)
    twin = copy.deepcopy(model)
    second = held(twin, forward=drawing)
    end()
    second()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch._dynamo.eval_frame._stance == stance
    assert not passes._changing
