"""`objective_`, which turns a loss into the objective in place, gives the gradients of `objective`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from tests.helpers.setups import Everything, bare, data, mlp, move, randomise, target
from xkfac import Balance, Learner, XkfacError, consolidate


class Repeated(nn.Module):
    """A network that uses one linear layer twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(torch.tanh(self.first(x))))))


def task_norms():
    net = mlp()
    xkfac.give_task_norms(net, ["past", "new"])
    return net


IMAGES = {"shape": (2, 7, 7)}
CASES = {
    "perceptron": (mlp, {}, "xkfac", {}),
    "mini-batch statistics": (mlp, {}, "xkfac", {"interpretation": "bn"}),
    "every kind of unit": (Everything, IMAGES, "xkfac", {}),
    "layer used twice": (Repeated, {}, "ewc", {}),
    "task-specific BN": (task_norms, {}, "own-bn", {}),
    "balance": (mlp, {}, "xkfac", {"balance": (0.1, 1)}),
}


def learners(case):
    """Return two equal networks away from the anchor, each with its learner, and batches of the target."""
    make, shape, method, options = CASES[case]
    torch.manual_seed(0)
    source = [(x.double(), y) for x, y in data(**shape)]
    new = [(x.double(), y) for x, y in target(**shape)]
    model = randomise(make()).double()
    memory = consolidate(model, source, method)
    pairs = []
    for net in (model, bare(copy.deepcopy(model))):
        xkfac.enter_task(net, "new")
        balance = Balance(*options["balance"]) if "balance" in options else None
        learner = Learner(net, memory, importance=(0.7, 0.3), **{**options, "balance": balance})
        learner.begin(new, tolerance=1.0)
        move(net)
        pairs.append((net.train(), learner))
    return *pairs, new


def grads(net):
    return {name: parameter.grad for name, parameter in net.named_parameters() if parameter.grad is not None}


def assert_same(found, wanted, rtol=1e-12):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=rtol, atol=rtol / 100, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("case", CASES)
def test_the_gradients_of_accumulated_steps_are_those_of_objective(case):
    (net, learner), (other, wanted), batches = learners(case)
    rtol = 1e-6 if case == "balance" else 1e-12  # alphas are of float32
    for _ in range(2):  # the balance of a step follows from the step before
        net.zero_grad()
        other.zero_grad()
        for x, y in batches:
            loss = F.cross_entropy(net(x), y) * (8.0 / 3)
            assert learner.objective_(loss, scale=torch.tensor(8.0 / 3, dtype=torch.float64)) is loss
            loss.backward()
            value = wanted.objective(F.cross_entropy(other(x), y), share=1 / 3)
            value.backward()
            torch.testing.assert_close(loss.detach(), 8 * value.detach(), rtol=rtol, atol=0)
            assert learner.last_penalty > 1e-4
        assert_same({name: gradient / 8 for name, gradient in grads(net).items()}, grads(other), rtol)


def test_a_gradient_scaler_sees_the_objective():
    (net, learner), (other, wanted), batches = learners("perceptron")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = batches[0]
    loss = scaler.scale(F.cross_entropy(net(x), y))
    learner.objective_(loss, scaler.get_scale())
    loss.backward()
    scaler.unscale_(optimizer)
    wanted.objective(F.cross_entropy(other(x), y)).backward()
    assert_same(grads(net), grads(other))


def test_the_gradients_are_the_weighted_sum_of_loss_and_penalty():
    (net, learner), (other, wanted), batches = learners("every kind of unit")
    x, y = batches[0]
    loss = F.cross_entropy(net(x), y)
    learner.objective_(loss)
    loss.backward()
    loss = F.cross_entropy(other(x), y)
    names, parameters = zip(*other.named_parameters(), strict=True)
    of_penalty = torch.autograd.grad(wanted.penalty(), parameters, retain_graph=True)
    of_loss = torch.autograd.grad(loss, parameters)
    sums = [0.7 * a + 0.3 * b for a, b in zip(of_penalty, of_loss, strict=True)]
    assert_same(grads(net), dict(zip(names, sums, strict=True)))


def test_it_makes_the_checks_of_objective():
    (net, learner), _, batches = learners("perceptron")
    x, y = batches[0]
    with pytest.raises(XkfacError, match="sum over the batch"):
        learner.objective_(F.cross_entropy(net(x), y, reduction="sum"))
    learner.objective_(F.cross_entropy(net(x), y))
    with pytest.raises(XkfacError, match="no batch has passed"):
        learner.objective_(torch.ones(()))
