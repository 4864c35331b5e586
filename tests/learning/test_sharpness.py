"""Sharpness-aware losses: the gradient at moved weights, the penalty at those that the step starts from."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import xkfac


def network(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7), *([nn.BatchNorm1d(7)] if norm else []), nn.GELU(), nn.Linear(7, 3)]
    return nn.Sequential(*layers).double()


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (16,), generator=generator)


def gradient_at(model: nn.Module, batch: tuple[Tensor, Tensor], move: list[Tensor] | None = None) -> list[Tensor]:
    """Return the gradients of a copy of a model whose parameters are moved."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, by in zip(other.parameters(), move or [], strict=False):
            parameter += by
    learning = [one for one in other.parameters() if one.requires_grad]
    return list(torch.autograd.grad(F.cross_entropy(other(batch[0]), batch[1]), learning))


def moved_by(model: nn.Module, batch: tuple[Tensor, Tensor], rho: float) -> list[Tensor]:
    gradients = gradient_at(model, batch)
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    return [rho / norm * gradient for gradient in gradients]


def test_the_gradient_is_that_of_moved_weights_and_nothing_else_changes() -> None:
    model, batch = network(), data(1)
    once = copy.deepcopy(model)
    once(batch[0])
    expected = gradient_at(model, batch, moved_by(model, batch, 0.3))
    loss = F.cross_entropy(model(batch[0]), batch[1])
    sharp = xkfac.sharpened(model, loss, lambda: F.cross_entropy(model(batch[0]), batch[1]), 0.3)
    assert sharp.item() == loss.item()
    sharp.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    for (name, now), then in zip(model.state_dict().items(), once.state_dict().values(), strict=True):
        assert torch.equal(now, then), name  # weights bit by bit, and statistics that have seen one pass


@pytest.mark.parametrize("method", ["fixed-bn", "xkfac", "kfac", "own-bn"])
@pytest.mark.parametrize("way", ["backward", "objective"])
def test_the_penalty_is_that_of_the_first_pass(method: str, way: str) -> None:
    """With any method, active BN included: lt times the gradient at moved weights, and the penalty's as without."""
    model, batch = network(), data(1)
    with torch.no_grad():
        for seed in range(20):
            model(data(seed)[0])
    memory = xkfac.consolidate(model, [data(seed) for seed in range(4)], method)
    model.train()
    learner = xkfac.Learner(model, memory, strength=2.0, penalty_every=1)
    learner.begin([batch])
    with torch.no_grad():
        model[0].weight += 0.1 * torch.randn_like(model[0].weight)
    target = learner.importance[1]
    learning = [one for one in model.parameters() if one.requires_grad]
    state = copy.deepcopy(model.state_dict())
    learner.objective(F.cross_entropy(model(batch[0]), batch[1])).backward()
    whole = [one.grad.clone() for one in learning]
    here = [one.clone() for one in torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), learning)]
    penalty = [both - target * one for both, one in zip(whole, here, strict=True)]
    assert max(one.abs().max() for one in penalty) > 1e-4
    model.load_state_dict(state)
    norm = torch.cat([one.flatten() for one in here]).norm()
    with torch.no_grad():
        for parameter, gradient in zip(learning, here, strict=True):
            parameter += 0.3 / norm * gradient
    there = [one.clone() for one in torch.autograd.grad(F.cross_entropy(model(batch[0]), batch[1]), learning)]
    model.load_state_dict(state)
    learner._step.readings.clear()
    model.zero_grad()

    def loss() -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    sharp = xkfac.sharpened(model, loss(), loss, 0.3)
    learner.backward(sharp) if way == "backward" else learner.objective(sharp).backward()
    for parameter, one, other in zip(learning, there, penalty, strict=True):
        torch.testing.assert_close(parameter.grad, target * one + other)
    learner.close()


def test_a_layer_that_the_loss_does_not_reach_takes_no_gradient() -> None:
    model, batch = network(norm=False), data(1)
    model.spare = nn.Linear(2, 2).double()

    def loss() -> Tensor:
        return F.cross_entropy(model[2](model[1](model[0](batch[0]))), batch[1])

    xkfac.sharpened(model, loss(), loss, 0.1).backward()
    assert model.spare.weight.grad is None
    assert model[0].weight.grad.abs().max() > 0


def test_weights_come_back_when_the_second_pass_fails() -> None:
    model, batch = network(), data(1)
    before = copy.deepcopy(model.state_dict())

    def fails() -> Tensor:
        raise ValueError("no second pass")

    with pytest.raises(ValueError, match="no second pass"):
        xkfac.sharpened(model, F.cross_entropy(model(batch[0]), batch[1]), fails, 0.1)
    assert torch.equal(model[0].weight, before["0.weight"])
    assert model[1].momentum == 0.1


@pytest.mark.parametrize("rho", [0.0, -1.0, float("nan"), float("inf")])
def test_a_distance_must_be_above_zero(rho: float) -> None:
    model = network()
    with pytest.raises(xkfac.XkfacError, match="rho of a sharpened loss must be a number above 0"):
        xkfac.sharpened(model, model(data(0)[0]).mean(), lambda: model(data(0)[0]).mean(), rho)
