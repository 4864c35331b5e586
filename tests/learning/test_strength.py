"""A calibrated penalty is 64 times as strong in a task's first steps, falls to its strength, and stays if need be."""

import copy
import io
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.setups import data, mlp, target
from xkfac import Learner, XkfacError, XkfacWarning, calibrate, consolidate
from xkfac.calibration import Calibration
from xkfac.learning.strength import Annealing
from xkfac.learning.trust_region import TrustRegion

LR, MOMENTUM, SCALE, START = 0.5, 0.9, 2.0, 64.0


def calibrated(method="fixed-bn", radius=1e6, **options):
    torch.manual_seed(0)
    model = mlp().train()
    memory = consolidate(model, data(), method, **options)
    return model, replace(memory, calibration=Calibration(SCALE, radius, (), 10))


def begun(model, memory, batches, **options):
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    learner = Learner(model, memory, **options)
    learner.begin(batches, optimizer)
    return learner, optimizer


def step(model, learner, optimizer, batch):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    objective = learner.objective(loss)
    objective.backward()
    optimizer.step()
    return loss.item(), objective.item()


def factors(model, learner, optimizer, batches):
    """Return how many times its strength the penalty has had in each step, from values of the objective alone."""
    ls, lt = learner.importance
    found = []
    for batch in batches:
        loss, objective = step(model, learner, optimizer, batch)
        found.append((objective - lt * loss) / (ls * SCALE * learner.last_penalty.item()))
    return found


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (6, [64] * 2 + [16] * 2 + [4] * 2 + [1] * 4),
        (7, [64] * 3 + [16] * 2 + [4] * 2 + [1] * 3),
        (2, [64, 16] + [1] * 8),
        (1, [64] + [1] * 9),
        (1000, [64] * 22 + [16] * 21 + [4] * 21 + [1] * 2),
    ],
)
def test_the_penalty_falls_in_three_parts_within_one_pass_over_the_loader_or_64_steps(count, expected):
    model, memory = calibrated()
    batches = target(count=len(expected))
    with torch.no_grad():
        model[0].weight[0].add_(0.1)  # a penalty that can be divided by, from the first step on

    class Loader(list):
        def __len__(self):
            return count

    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    learner = Learner(model, memory, penalty_every=1)
    learner.begin(Loader(batches), optimizer, tolerance=1.0)
    assert factors(model, learner, optimizer, batches) == pytest.approx(expected, rel=1e-3)
    assert learner.strength == SCALE


def test_a_loader_that_does_not_say_its_length_counts_as_a_long_one():
    model, memory = calibrated()
    learner, _ = begun(model, memory, iter(target(count=3)))
    assert learner._strength.state_dict() == {"steps": 64, "done": 0, "factor": START}


def test_first_steps_are_those_of_a_strength_that_is_given_so_large():
    """Values, gradients and implicit steps: to the last bit."""
    ends = []
    for options in ({}, {"strength": START * SCALE}):
        model, memory = calibrated()
        batches = target(count=30)
        learner, optimizer = begun(model, memory, batches, **options)
        for batch in batches[:10]:
            step(model, learner, optimizer, batch)
        ends.append([one.detach().clone() for one in model.parameters()])
    assert all(map(torch.equal, *ends))


def test_steps_are_implicit_in_the_penalty_that_they_have():
    model, memory = calibrated()
    batches = target(count=9)
    learner, optimizer = begun(model, memory, batches)
    gradients = [torch.ones_like(one) for one in model.parameters()]
    seen = []
    for place in range(10):
        found = learner._implicit_steps.implicit(list(model.parameters()), gradients)
        weight = LR / (1 - MOMENTUM) * learner.importance[0] * SCALE * START ** (1 - min(place // 3, 3) / 3)
        expected = learner._step.implicit(weight, MOMENTUM, 128)(list(model.parameters()), gradients)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        seen.append(torch.cat([one.flatten() for one in found]).norm().item())
        step(model, learner, optimizer, batches[place % 9])
    assert seen[0] < seen[3] < seen[6] < seen[9]  # steps of a stronger penalty are shorter


@pytest.mark.parametrize(
    ("method", "made", "options"),
    [
        ("fixed-bn", {}, {"strength": SCALE}),
        ("xkfac", {}, {}),  # whose penalty reads the statistics of batches: strong ones diverge
        ("fixed-bn", {"kind": "corrected", "grouping": "paper"}, {}),  # whose steps cannot be made implicit
    ],
)
def test_a_strength_that_is_given_or_that_steps_cannot_bear_is_not_annealed(method, made, options):
    model, memory = calibrated(method, **made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XkfacWarning)  # of steps that are not implicit
        learner, _ = begun(model, memory, target(count=6), **options)
    assert learner._strength.now == learner.strength == SCALE
    assert learner.state_dict()["annealing"] is None


def test_without_a_calibration_or_an_optimizer_nothing_is_annealed():
    model, memory = calibrated()
    learner = Learner(model, memory)
    learner.begin(target(count=6))
    assert learner._strength.now == SCALE
    learner, _ = begun(model, replace(memory, calibration=None), target(count=6))
    assert learner._strength.now == 1


def test_methods_that_read_no_batch_are_annealed():
    for method in ("fixed-bn", "own-bn", "ewc", "fixed-statistics"):
        model, memory = calibrated(method)
        learner, _ = begun(model, memory, target(count=6))
        assert learner._strength.now == START * SCALE, method


@pytest.mark.parametrize("stop", [2, 5, 8])
def test_a_task_resumed_while_the_penalty_falls_goes_on_as_an_unbroken_one(stop):
    model, memory = calibrated()
    batches = target(count=9)
    learner, optimizer = begun(model, memory, batches)
    for batch in batches[:stop]:
        step(model, learner, optimizer, batch)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), learner.state_dict()], file)
    for batch in batches[stop:] * 2:
        step(model, learner, optimizer, batch)
    end = [one.detach().clone() for one in model.parameters()]
    learner.close()

    file.seek(0)
    of_model, of_optimizer, of_learner = torch.load(file)
    model = mlp().train()
    model.load_state_dict(of_model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    optimizer.load_state_dict(of_optimizer)
    learner = Learner(model, memory)
    learner.load_state_dict(of_learner, optimizer)
    for batch in batches[stop:] * 2:
        step(model, learner, optimizer, batch)
    assert all(map(torch.equal, model.parameters(), end))


def test_a_task_saved_before_penalties_were_annealed_goes_on_without():
    model, memory = calibrated()
    learner, _ = begun(model, memory, target(count=6), strength=SCALE)
    state = learner.state_dict()
    del state["annealing"]
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    learner = Learner(model, memory)
    learner.load_state_dict(state, optimizer)
    assert learner._strength.now == SCALE


def test_a_network_that_goes_far_under_the_strong_penalty_keeps_it():
    """Far is half the radius under 64 times the strength, once the radius under 16 times, and twice under 4 times."""
    parameter = torch.zeros(1, requires_grad=True)
    for factor, limit in ((64.0, 0.5), (16.0, 1.0), (4.0, 2.0), (1.0, 4.0)):
        for distance, grown in ((0.99 * limit, []), (1.01 * limit, [factor if factor > 1 else 4.0])):
            optimizer = torch.optim.SGD([parameter], LR)
            found = []
            far = iter([distance] + [0.0] * 99)
            region = TrustRegion(parameter, optimizer, far.__next__, found.append, lambda factor=factor: factor)
            parameter.grad = torch.ones(1)
            optimizer.step()
            assert found == grown
            region.remove()


def test_a_strength_that_is_kept_falls_no_more():
    model, memory = calibrated(radius=1e-12)
    batches = target(count=9)
    learner, optimizer = begun(model, memory, batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, learner, optimizer, batches[0])
    assert learner.strength == learner._strength.now == START * SCALE
    (warning,) = [one for one in caught if one.category is XkfacWarning]
    assert "64 times its calibrated strength" in str(warning.message)
    learner._guard._radius = 1e6
    for batch in batches:
        step(model, learner, optimizer, batch)
    assert learner._strength.now == START * SCALE


def test_steps_are_watched_one_by_one_again_when_the_penalty_has_fallen():
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], LR)
    factor, watched = 64.0, []
    region = TrustRegion(parameter, optimizer, lambda: watched.append(place) or 0.0, lambda _: None, lambda: factor)
    for place in range(100):
        factor = 64.0 if place < 40 else 16.0
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert watched == [*range(16), 31, *range(40, 56), 71, 87]
    assert region.grown == 1


def test_a_task_resumed_right_after_the_penalty_has_fallen_watches_the_next_steps_one_by_one():
    parameter = torch.zeros(1, requires_grad=True)
    factor, watched, state = 64.0, [], None
    for places in (range(40), range(40, 80)):
        optimizer = torch.optim.SGD([parameter], LR)
        region = TrustRegion(
            parameter, optimizer, lambda: watched.append(place) or 0.0, lambda _: None, lambda: factor, state
        )
        for place in places:  # noqa: B007 -- what is watched
            parameter.grad = torch.ones(1)
            optimizer.step()
        factor = 16.0  # it falls after the last step before the state is kept
        state = region.state_dict()
        region.remove()
    assert watched == [*range(16), 31, *range(40, 56), 71]


def test_captured_steps_have_the_strength_itself(monkeypatch):
    model, memory = calibrated()
    batches = target(count=9)
    learner, _ = begun(model, memory, batches, penalty_every=1)
    before = learner._implicit_steps.implicit
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(XkfacError, match=r"learner.captures\(steps\)"):
        learner.objective(F.cross_entropy(model(batches[0][0]), batches[0][1]))
    learner.captures(1)
    learner.objective(F.cross_entropy(model(batches[0][0]), batches[0][1]))
    assert learner._strength.now == SCALE
    assert learner._implicit_steps.implicit is not before


def test_the_optimizer_is_free_again_when_the_task_is_over():
    model, memory = calibrated()
    learner, optimizer = begun(model, memory, target(count=9))
    annealing = learner._strength._annealing
    learner.close()
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    optimizer.step()
    assert isinstance(annealing, Annealing)
    assert annealing.state_dict()["done"] == 0


def test_a_task_that_pulls_hard_is_forgotten_less_and_learnt_as_well():
    """What it is for: inputs far from those of the past, the same outputs, a penalty that has been calibrated."""
    torch.manual_seed(0)
    x = torch.randn(512, 6)
    y = (x[:, :3] + 0.5 * x[:, 3:]).argmax(1)
    far, other = 4 * torch.randn(512, 6) + 3, torch.randint(0, 3, (512,))
    net = mlp().train()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(20):
        for one, label in zip(x.split(32), y.split(32), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(one), label).backward()
            optimizer.step()
    held_out = list(zip(x.split(32), y.split(32), strict=True))
    memory = calibrate(net, consolidate(net, held_out), held_out)
    batches = list(zip(far.split(32), other.split(32), strict=True))
    kept = {}
    for strength in (None, memory.calibration.scale):
        twin = copy.deepcopy(net)
        memory_of = replace(memory, calibration=replace(memory.calibration, radius=1e6))  # no trust region
        optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
        learner = Learner(twin, memory_of, strength=strength)
        learner.begin(batches, optimizer)
        for batch in batches * 4:
            step(twin, learner, optimizer, batch)
        learner.close()
        twin.eval()
        with torch.no_grad():
            kept[strength is None] = F.cross_entropy(twin(x), y).item(), F.cross_entropy(twin(far), other).item()
    assert kept[True][0] < 0.9 * kept[False][0]
    assert kept[True][1] < 1.02 * kept[False][1]
