"""Fixed BN stands still, also where DistributedDataParallel waits for its gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac


@pytest.mark.parametrize(("method", "follows"), [("xkfac", True), ("fixed-affine", True), ("own-bn", False)])
def test_a_momentum_is_that_of_bn_that_follows_the_target_until_the_task_ends(method, follows):
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 3))
    data = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(2)]
    learner = xkfac.Learner(net, xkfac.consolidate(net, data, method, draws=1), bn_momentum=0.03)
    assert net[1].momentum is None
    learner.begin(data)
    assert net[1].momentum == (0.03 if follows else None)
    learner.close()
    assert net[1].momentum is None


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("method", ["fixed-bn", "fixed-affine"])
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("image", [False, True])
def test_it_learns_the_same_under_ddp(method, as_view, image):
    layers = [nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)]
    if image:  # which a fixed BN maps without keeping it
        layers = [nn.Unflatten(1, (5, 1)), nn.Conv1d(5, 6, 1), *layers[1:3], nn.Flatten(), layers[3]]
    net = nn.Sequential(*layers)
    place = 2 if image else 1
    net[place].weight.data.uniform_(0.5, 2)
    data = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(4)]
    memory = xkfac.consolidate(net, data, method)
    found = {}
    for wrapped in (False, True):
        inner = copy.deepcopy(net)
        model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=as_view) if wrapped else inner
        learner = xkfac.Learner(model, memory, penalty_every=1)
        learner.begin(data)
        assert {id(one) for one in learner.protected} == {
            id(one) for one in (*inner[place - 1].parameters(), *inner[-1].parameters())
        }
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        model.train()
        for x, y in data:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = learner.objective(F.cross_entropy(model(x), y))
                loss.backward()
                return loss

            optimizer.step(closure)
            assert inner[place].weight.grad is None
        learner.close()
        assert all(one.requires_grad and not one._backward_hooks for one in inner.parameters())
        assert torch.equal(inner[place].weight, net[place].weight)
        found[wrapped] = inner.state_dict()
    torch.testing.assert_close(found[True], found[False], rtol=1e-6, atol=1e-7)
