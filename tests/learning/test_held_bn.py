"""Fixed BN stands still, also where DistributedDataParallel waits for its gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("method", ["fixed-bn", "fixed-affine"])
@pytest.mark.parametrize("as_view", [False, True])
def test_it_learns_the_same_under_ddp(method, as_view):
    net = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    net[1].weight.data.uniform_(0.5, 2)
    data = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(4)]
    memory = xkfac.consolidate(net, data, method)
    found = {}
    for wrapped in (False, True):
        inner = copy.deepcopy(net)
        model = nn.parallel.DistributedDataParallel(inner, gradient_as_bucket_view=as_view) if wrapped else inner
        learner = xkfac.Learner(model, memory, penalty_every=1)
        learner.begin(data)
        assert {id(one) for one in learner.protected} == {
            id(one) for one in (*inner[0].parameters(), *inner[3].parameters())
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
            assert inner[1].weight.grad is None
        learner.close()
        assert all(one.requires_grad and not one._backward_hooks for one in inner.parameters())
        assert torch.equal(inner[1].weight, net[1].weight)
        found[wrapped] = inner.state_dict()
    torch.testing.assert_close(found[True], found[False], rtol=1e-6, atol=1e-7)
