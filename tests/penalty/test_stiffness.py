"""The stiffest direction of a penalty, and the learning rate it bears."""

import math

import pytest
import torch

import xkfac
from tests.helpers.setups import data, mlp, randomise, started, target
from xkfac.penalty.stiffness import stiffness


def test_the_stiffness_of_a_quadratic_is_its_largest_eigenvalue_and_nothing_moves():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(7, 7, generator=generator, dtype=torch.float64)
    hessian = root @ root.T
    one, two = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (3, 4))
    before = one.clone(), two.clone()

    def gradients():
        found = hessian @ torch.cat([one, two]) + 3
        return [(one, found[:3]), (two, found[3:])]

    assert stiffness(gradients, 200) == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-6)
    assert torch.equal(one, before[0])
    assert torch.equal(two, before[1])


def test_without_curvature_or_parameters_it_is_zero():
    parameter = torch.randn(3)
    assert stiffness(lambda: [(parameter, torch.zeros(3))], 8) == 0
    assert stiffness(list, 8) == 0
    assert parameter.isfinite().all()


def test_gamma_and_beta_of_unmerged_bn_are_protected_and_set_the_learning_rate_where_they_are_stiff():
    net = randomise(torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3)))
    with torch.no_grad():
        net[0].weight.mul_(30)
        net[0].bias.zero_()
        net[1].running_var.mul_(900)
    net[2].requires_grad_(False)
    memory = xkfac.consolidate(net.double(), [(x.double(), y) for x, y in data()], "unmerged")
    learner = xkfac.Learner(net, memory, damping=0.0)
    learner.begin(recentre=False)
    assert {id(one) for one in learner.protected} == {id(one) for one in (*net[0].parameters(), *net[1].parameters())}
    values = memory.curvature.blocks["1"].values[..., :2]  # of gamma and beta: their Hessian is diagonal
    assert values.max() > 10 * torch.linalg.eigvalsh(memory.curvature.blocks["0"].dense()).max()
    limit = 2 / (learner.importance[0] * float(values.max()))
    assert learner.stable_lr(iterations=100) == pytest.approx(limit, rel=1e-3)


def begun(strength):
    torch.manual_seed(0)
    model = randomise(mlp()).double()
    batches = [(x.double(), y) for x, y in data()]
    memory = xkfac.consolidate(model, batches, "xkfac")
    learner = xkfac.Learner(model, memory, damping=0.01, strength=strength)
    learner.begin([(x.double(), y) for x, y in target()])
    return model, learner


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_on_the_penalty_alone_is_stable_below_that_learning_rate_and_not_above(momentum):
    for factor, stable in ((0.9, True), (1.2, False)):
        model, learner = begun(5.0)
        limit = learner.stable_lr(momentum, iterations=200)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(parameters, factor * limit, momentum=momentum)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in parameters:
                p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype), alpha=1e-6)
        model.eval()  # BN is read with its population statistics
        values = []
        for _ in range(30):  # more, and an unstable one is thrown to where the penalty is flat
            penalty = learner.penalty()
            optimizer.zero_grad()
            (learner.importance[0] * learner.strength * penalty).backward()
            optimizer.step()
            values.append(penalty.item())
        assert (values[-1] < values[0]) == stable, (factor, values[0], values[-1])


def test_it_is_inverse_to_the_strength_and_infinite_without_a_penalty():
    limits = [begun(strength)[1].stable_lr(0.9) for strength in (1.0, 4.0)]
    assert limits[0] == pytest.approx(4 * limits[1])
    assert begun(0.0)[1].stable_lr() == math.inf
    assert started(method="fine-tuning")[1].stable_lr() == math.inf
