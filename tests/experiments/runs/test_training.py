"""Training steps: an epoch is what a plain loop by hand gives, to the last digits of double precision."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from xkfac import Learner, consolidate
from xkfac.experiments.data.digits import Part, PermutedExamples, permutation
from xkfac.experiments.networks.perceptron import perceptron
from xkfac.experiments.recipes.recipe import Line
from xkfac.experiments.runs.training import Stepper, accuracy, make_optimizer

LR = 0.125  # a power of two, as the learning rate is kept in single precision


@pytest.fixture
def part():
    torch.manual_seed(1)
    return Part(torch.rand(24, 6, dtype=torch.float64), torch.randint(4, (24,)))


def network(norm="bn"):
    return perceptron(6, 4, Line(widths=(5,), norm=norm), 0).double()


def plain_epoch(model, examples, order, lr, momentum, velocity, learner=None):
    """One epoch of SGD, v <- m v + g and w <- w - lr v, written out."""
    model.train()
    losses, penalties = [], []
    for index in order:
        x, y = examples.take(index)
        loss = F.cross_entropy(model(x), y)
        objective = loss if learner is None else learner.objective(loss)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(objective, list(named.values()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
                velocity[name] = momentum * velocity.get(name, 0.0) + gradient
                parameter -= lr * velocity[name]
        losses.append(loss.item())
        penalties.append(0.0 if learner is None else learner.last_penalty.item())
    return sum(losses) / len(losses), sum(penalties) / len(penalties)


def assert_close(model, other):
    for (name, tensor), expected in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("norm", ["bn", "brn", "none"])
def test_epochs_are_those_of_a_loop_by_hand(part, norm, momentum):
    model, other = network(norm), network(norm)
    examples = PermutedExamples(part, [permutation(6, 0, 1)])
    stepper = Stepper(model, examples, make_optimizer(model, momentum), None)
    velocity = {}
    for lr in (LR, LR / 4):
        order = torch.randperm(24).view(4, 6)
        found = stepper.epoch(order, lr)
        assert found == pytest.approx(plain_epoch(other, examples, order, lr, momentum, velocity), rel=1e-6)
        assert found[1] == 0
        assert_close(model, other)
        assert model.training


@pytest.mark.parametrize("method", ["xkfac", "ewc", "fixed-bn"])
def test_epochs_with_a_penalty_are_those_of_a_loop_by_hand(part, method):
    model = network()
    batches = list(zip(part.x.split(8), part.y.split(8), strict=True))
    model.train()
    for x, _ in batches:
        model(x)
    memory = consolidate(model, batches, method, draws=4)
    other = copy.deepcopy(model)
    examples = PermutedExamples(part, [permutation(6, 0, 1)])
    target = [examples.take(index) for index in torch.arange(24).view(3, 8)]
    order = torch.randperm(24).view(3, 8)
    with Learner(model, memory, damping=0.1, strength=3) as learner:
        learner.begin(target)
        found = Stepper(model, examples, make_optimizer(model, 0.9), learner).epoch(order, LR)
    with Learner(other, memory, damping=0.1, strength=3) as learner:
        learner.begin(target)
        expected = plain_epoch(other, examples, order, LR, 0.9, {}, learner)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found[1] > 0
    assert_close(model, other)


def test_a_learning_rate_of_0_changes_running_statistics_alone(part):
    model, before = network(), network()
    Stepper(model, PermutedExamples(part, [permutation(6, 0, 0)]), make_optimizer(model, 0.9), None).epoch(
        torch.arange(24).view(4, 6), 0.0
    )
    for (name, tensor), old in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(tensor, old) == ("running" not in name and "tracked" not in name), name


def test_a_pool_of_several_permutations_has_each_example_under_each(part):
    columns = [permutation(6, 0, task) for task in range(3)]
    examples = PermutedExamples(part, columns)
    assert len(examples) == 72
    x, y = examples.take(torch.arange(72))
    for task in range(3):
        assert torch.equal(x[24 * task : 24 * (task + 1)], part.x[:, columns[task]])
        assert torch.equal(y[24 * task : 24 * (task + 1)], part.y)
    mixed = torch.tensor([70, 3, 30])
    assert torch.equal(examples.take(mixed)[0], x[mixed])


def test_a_pool_of_one_permutation_is_a_copy(part):
    columns = permutation(6, 0, 1)
    examples = PermutedExamples(part, [columns])
    x, y = examples.take(torch.tensor([5, 0]))
    assert torch.equal(x, part.x[[5, 0]][:, columns])
    assert torch.equal(y, part.y[[5, 0]])
    examples.part.x.fill_(0)
    assert part.x.any()


def test_accuracy_is_the_percentage_of_right_answers_in_evaluation_mode(part):
    model = network().train()
    model(part.x)
    state = copy.deepcopy(model.state_dict())
    columns = permutation(6, 0, 2)
    right = 0
    reference = copy.deepcopy(model).eval()
    for x, y in zip(part.x, part.y, strict=True):
        right += int(reference(x[columns][None]).argmax() == y)
    for chunk in (1, 7, 24, 100):
        batches = zip(part.x[:, columns].split(chunk), part.y.split(chunk), strict=True)
        assert accuracy(model, batches) == 100 * right / 24
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert accuracy(nn.Identity(), [(torch.eye(3), torch.tensor([0, 1, 1]))]) == pytest.approx(200 / 3)
    assert accuracy(nn.Identity(), [(torch.eye(3)[:0], torch.tensor([]))]) == 0


@pytest.mark.parametrize(("activation", "function"), [("relu", F.relu), ("gelu", F.gelu)])
def test_a_perceptron_has_the_activation_of_its_line(activation, function):
    line = Line(widths=(5,), norm="none", activation=activation)
    network = perceptron(6, 4, line, 0)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(network(x), network[-1](function(network[0](x))))
    assert torch.equal(network[0].weight, perceptron(6, 4, Line(widths=(5,), norm="none"), 0)[0].weight)
