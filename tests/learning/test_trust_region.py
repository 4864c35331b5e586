"""A calibrated network stays near the radius of its calibration: steps are shortened, and the strength is raised."""

import copy
import io
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.processes import in_processes
from tests.helpers.setups import data, mlp, target
from xkfac import Learner, NotFiniteError, XkfacWarning, consolidate
from xkfac.calibration import Calibration
from xkfac.learning.trust_region import INTERVAL, TrustRegion

LR, MOMENTUM, SCALE = 0.5, 0.9, 2.0
TOO_FAR, DRIFTED, FACTOR = 4.0, 16.0, 4.0


def started(radius, method="fixed-bn", annealed=False, **options):
    """Return a network, its learner begun with SGD, and that optimizer, for a calibration of such a radius.

    annealed: whether the penalty is stronger in the first steps, as it is by default.
    """
    torch.manual_seed(0)
    model = mlp().train()
    memory = replace(consolidate(model, data(), method), calibration=Calibration(SCALE, radius, (), 10))
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    learner = Learner(model, memory, **options)
    learner.begin(target(), optimizer)
    if not annealed:
        learner._strength.settle()
    return model, learner, optimizer


def step(model, learner, optimizer, batch):
    optimizer.zero_grad()
    learner.objective(F.cross_entropy(model(batch[0]), batch[1])).backward()
    optimizer.step()


def train(model, learner, optimizer, batches):
    for batch in batches:
        step(model, learner, optimizer, batch)


def state_of(model, optimizer):
    """Return the parameters and their momenta."""
    parameters = [one.detach().clone() for one in model.parameters()]
    return parameters, [optimizer.state[one].get("momentum_buffer") for one in model.parameters()]


def test_a_step_that_would_go_too_far_is_halved_until_it_does_not_with_its_momentum_and_the_strength_raised():
    model, learner, optimizer = started(radius=2.5e-5)
    kept = 0
    for batch in target(count=INTERVAL):
        twin, strength = copy.deepcopy([one.detach() for one in model.parameters()]), learner.strength
        was = learner.over_radius
        optimizer.zero_grad()
        learner.objective(F.cross_entropy(model(batch[0]), batch[1])).backward()
        changed = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in model.parameters()]
        changed = learner._implicit_steps.implicit(list(model.parameters()), changed)
        before = [optimizer.state[one].get("momentum_buffer") for one in model.parameters()]
        velocities = [g if v is None else MOMENTUM * v + g for v, g in zip(before, changed, strict=True)]
        optimizer.step()
        share = 1.0
        while share > 1e-6:  # the plain step, halved by hand until it is short enough
            with torch.no_grad():
                by_hand = [w - share * LR * v for w, v in zip(twin, velocities, strict=True)]
            if distance_at(model, learner, by_hand) <= max(TOO_FAR, was):
                break
            share /= 2
        kept += share == 1.0
        assert learner.strength == strength * (1 if share == 1.0 else FACTOR)
        after, momenta = state_of(model, optimizer)
        for one, other in zip(after, by_hand, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        for momentum, velocity in zip(momenta, velocities, strict=True):
            if momentum is not None:
                torch.testing.assert_close(momentum, share * velocity, rtol=1e-4, atol=1e-6)
        assert learner.over_radius <= max(TOO_FAR, was) * (1 + 1e-5)
    assert 1 < kept < INTERVAL - 1
    assert learner.strength == SCALE * FACTOR ** (INTERVAL - kept)


def distance_at(model, learner, parameters):
    now = [one.detach().clone() for one in model.parameters()]
    with torch.no_grad():
        for own, other in zip(model.parameters(), parameters, strict=True):
            own.copy_(other)
        distance = learner.over_radius
        for own, other in zip(model.parameters(), now, strict=True):
            own.copy_(other)
    return distance


@pytest.mark.parametrize("method", ["fixed-bn", "xkfac", "ewc", "own-bn"])
def test_within_the_radius_nothing_changes(method):
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XkfacWarning)  # of an own-bn without BN of its own
        for strength in (None, SCALE):
            model, learner, optimizer = started(1e6, method, strength=strength)
            train(model, learner, optimizer, target(count=3 * INTERVAL))
            assert learner.strength == SCALE
            ends.append(state_of(model, optimizer)[0])
    assert all(map(torch.equal, *ends))


@pytest.mark.parametrize(("radius", "options"), [(1e-4, {"strength": SCALE}), (0.0, {})])
def test_a_strength_that_is_given_stands_and_so_does_one_without_a_radius(radius, options):
    model, learner, optimizer = started(radius, **options)
    with pytest.warns(XkfacWarning, match="the radius"):
        train(model, learner, optimizer, target(count=INTERVAL))
    assert learner.strength == SCALE
    assert learner.over_radius > 1


def test_without_an_optimizer_of_its_own_the_strength_stands():
    model, learner, optimizer = started(2.5e-5)
    learner.close()
    learner = Learner(model, learner.memory)
    learner.begin(target(), tolerance=1.0)
    with pytest.warns(XkfacWarning, match="the radius"):
        train(model, learner, optimizer, target(count=INTERVAL))
    assert learner.strength == SCALE


def test_later_every_sixteenth_step_is_watched_and_raises_the_strength_without_being_shortened():
    model, learner, optimizer = started(1e6)
    batches = target(count=4 * INTERVAL)
    train(model, learner, optimizer, batches[:INTERVAL])
    region = learner._guard.trust_region
    learner._guard._radius = 1e-9  # from here on every network is beyond it
    strengths = []
    for batch in batches[INTERVAL : 2 * INTERVAL]:
        before = state_of(model, optimizer)[0]
        step(model, learner, optimizer, batch)
        strengths.append(learner.strength)
    assert strengths == [SCALE] * (INTERVAL - 1) + [FACTOR * SCALE]
    momenta = state_of(model, optimizer)[1]
    for one, start, momentum in zip(model.parameters(), before, momenta, strict=True):
        if momentum is not None:
            torch.testing.assert_close(one.detach(), start - LR * momentum)  # a whole step
    assert region.last == learner.over_radius > TOO_FAR
    assert learner.history.over_radius[-1] == pytest.approx(0, abs=1e-3)  # as seen before that step


@pytest.mark.parametrize(("late", "raises"), [(1.01 * TOO_FAR, 1), (0.99 * DRIFTED, 1), (1.01 * DRIFTED, 2)])
def test_a_network_may_drift_further_than_a_watched_step_may_go(late, raises):
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], LR)
    number, grown = 0, []
    far = {3: 1.01 * TOO_FAR, 3 + 2 * INTERVAL: late}  # a watched step, and one that is looked at long after it
    TrustRegion(parameter, optimizer, lambda: far.get(number, 0.5), lambda _: grown.append(number), lambda: 1.0)
    for number in range(4 * INTERVAL):  # noqa: B007 -- what the distance goes by
        parameter.grad = torch.ones(1)
        optimizer.step()
    assert grown == [3, 3 + 2 * INTERVAL][:raises]


def test_steps_become_implicit_in_the_raised_penalty():
    model, learner, optimizer = started(2.5e-5)
    before = learner._implicit_steps.implicit
    for batch in target(count=INTERVAL):
        step(model, learner, optimizer, batch)
        now = learner._implicit_steps.implicit
        if now is not before:
            break
    gradients = [torch.ones_like(one) for one in model.parameters()]
    expected = learner.implicit(LR, MOMENTUM)(list(model.parameters()), gradients)
    found = now(list(model.parameters()), gradients)
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, found, before(list(model.parameters()), gradients)))


def test_a_network_that_comes_back_is_left_to_do_so():
    model, learner, optimizer = started(2.5e-5)
    region = learner._guard.trust_region
    region.last = learner._guard.trust_region._distance() + 50.0
    with torch.no_grad():
        model[6].weight[0].add_(0.05)
    assert TOO_FAR < learner.over_radius < region.last
    optimizer.zero_grad()
    optimizer.step()
    assert learner.strength == SCALE
    assert region.last == learner.over_radius


def test_a_task_resumed_beyond_the_radius_goes_on_as_an_unbroken_one():
    batches = target(count=3 * INTERVAL)
    model, learner, optimizer = started(2.5e-5)
    train(model, learner, optimizer, batches[:7])
    assert learner.strength > SCALE
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), learner.state_dict()], file)
    train(model, learner, optimizer, batches[7:])
    end = state_of(model, optimizer)[0], learner.strength
    memory = learner.memory
    learner.close()

    file.seek(0)
    of_model, of_optimizer, of_learner = torch.load(file)
    model = mlp().train()
    model.load_state_dict(of_model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    optimizer.load_state_dict(of_optimizer)
    learner = Learner(model, memory)
    learner.load_state_dict(of_learner, optimizer)
    train(model, learner, optimizer, batches[7:])
    assert all(map(torch.equal, state_of(model, optimizer)[0], end[0]))
    assert learner.strength == end[1]


def test_a_task_that_is_begun_anew_starts_with_the_calibrated_strength():
    model, learner, optimizer = started(2.5e-5)
    start = copy.deepcopy(model.state_dict())
    train(model, learner, optimizer, target(count=INTERVAL))
    assert learner.strength > SCALE
    model.load_state_dict(start)
    learner.begin(target(), optimizer)
    assert learner.strength == SCALE
    assert learner._guard.trust_region.grown == 1


def test_a_target_of_another_kind_is_told_once():
    model, learner, optimizer = started(1e-7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, learner, optimizer, target(count=2 * INTERVAL))
    (warning,) = [one for one in caught if one.category is XkfacWarning]
    assert "the penalty needs 16 times its calibrated strength" in str(warning.message)
    assert "task-specific BN" in str(warning.message)
    assert warning.filename == __file__
    assert learner.strength > 16 * SCALE


@pytest.mark.parametrize("method", ["fixed-bn", "xkfac"])
def test_gradients_that_are_not_finite_are_not_hidden(method):
    model, learner, optimizer = started(1e6, method)
    batches = target(count=2 * INTERVAL)
    batches[2][0].fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="not finite"):
        train(model, learner, optimizer, batches)
    assert learner.strength == SCALE


def test_the_optimizer_is_free_again_when_the_task_is_over():
    model, learner, optimizer = started(1e-9)
    learner.close()
    before = state_of(model, optimizer)[0]
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    for one, start in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(one.detach(), start - LR)


def beyond_on_one_rank(rank, ranks, folder):
    torch.manual_seed(0)
    model = mlp().train()
    memory = replace(consolidate(model, data(), "fixed-bn"), calibration=Calibration(SCALE, 2.5e-5, (), 10))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM)
    learner = Learner(parallel, memory)
    learner.begin(target(), optimizer)
    learner._strength.settle()
    if rank == 0:  # which alone would never notice
        learner._guard._radius = 1e6
    for x, y in target(count=INTERVAL):
        optimizer.zero_grad()
        learner.objective(F.cross_entropy(parallel(x[rank::ranks]), y[rank::ranks])).backward()
        optimizer.step()
    return learner.strength, [one.detach() for one in model.parameters()]


def test_processes_decide_alike(tmp_path):
    (one, own), (two, other) = in_processes(beyond_on_one_rank, 2, tmp_path)
    assert one == two > SCALE
    assert all(map(torch.equal, own, other))
