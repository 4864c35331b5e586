"""The penalty every k-th step with k-fold weight: which steps, what weight, how k follows from the steps."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.setups import bare, data, mlp, move, randomise, target
from xkfac import Balance, Learner, XkfacError, consolidate
from xkfac.penalty.interval import IMPLICIT, LONGEST, Interval


def begun(method="xkfac", **options):
    """Return a network in float64 with a learner that has begun, away from the anchor, and batches of the target."""
    torch.manual_seed(0)
    model = randomise(mlp()).double()
    memory = consolidate(model, [(x.double(), y) for x, y in data()], method)
    batches = [(x.double(), y) for x, y in target(count=8)]
    learner = Learner(model, memory, **options)
    learner.begin(batches)
    move(model.train())
    return model, learner, batches


def step(model, learner, batch, way, share=None):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    if way == "backward":
        learner.backward(loss, share)
    elif way == "objective":
        learner.objective(loss, share).backward()
    else:
        loss = loss if share is None else loss * share
        learner.objective_(loss, share)
        loss.backward()


def grads(model):
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def wanted(model, learner, batch, weight, share=1.0):
    """Return share * (lt * dL_t + weight * ls * dL_s), by autograd."""
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    source, aim = learner.importance
    total = share * (aim * loss + weight * source * learner.strength * learner.penalty())
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, list(model.parameters()))])


@pytest.mark.parametrize("way", ["objective", "objective_", "backward"])
@pytest.mark.parametrize("share", [None, 0.5])
def test_every_third_call_has_three_times_the_penalty_and_the_others_none(way, share):
    model, learner, batches = begun(penalty_every=3, strength=2.0)
    other = bare(copy.deepcopy(model))
    reference = Learner(other, learner.memory, strength=2.0)
    for place, batch in enumerate(batches):
        model.zero_grad()
        step(model, learner, batch, way, share)
        truth = wanted(other, reference, batch, 0.0 if place % 3 else 3.0, share or 1.0)
        torch.testing.assert_close(grads(model), truth, rtol=1e-10, atol=1e-13)
        if place % 3 == 0:
            penalty = learner.last_penalty
            assert penalty > 1e-4
        assert learner.last_penalty is penalty
        move(model, seed=place)
        other.load_state_dict(model.state_dict())


@pytest.mark.parametrize("method", ["xkfac", "fixed-bn"])
def test_an_objective_without_gradients_is_right_and_no_step(method):
    """Whoever logs the objective of a validation loses no penalty of a step."""
    model, learner, batches = begun(method, penalty_every=3, strength=2.0, balance=Balance(interval=1))
    other = bare(copy.deepcopy(model))
    reference = Learner(other, learner.memory, strength=2.0, penalty_every=3, balance=Balance(interval=1))
    reference.begin(recentre=False, tolerance=10.0)
    for batch in batches:
        for one in (model, other):
            one.zero_grad()
        step(model, learner, batch, "objective")
        step(other, reference, batch, "objective")
        assert torch.equal(grads(model), grads(other))
        with torch.no_grad():
            x, y = batch
            loss = F.cross_entropy(model(x), y)
            found = learner.objective(loss)
        alphas = (learner.balance.alpha_s, learner.balance.alpha_t)
        assert alphas == (reference.balance.alpha_s, reference.balance.alpha_t)
        parts = [importance / alpha for importance, alpha in zip(learner.importance, alphas, strict=True)]
        torch.testing.assert_close(found, parts[0] * 2.0 * learner.last_penalty + parts[1] * loss)
        move(model, seed=1)
        other.load_state_dict(model.state_dict())


def test_a_balance_compares_with_the_last_penalty_and_scales_that_of_its_step():
    model, learner, batches = begun(penalty_every=2, balance=Balance(interval=1), strength=1e4)
    for place, batch in enumerate(batches[:4]):
        alphas = float(learner.balance.alpha_s), float(learner.balance.alpha_t)
        other = bare(copy.deepcopy(model))
        reference = Learner(other, learner.memory, strength=1e4 / alphas[0], penalty_every=1)
        reference.importance = (learner.importance[0], learner.importance[1] / alphas[1])
        model.zero_grad()
        step(model, learner, batch, "objective")
        truth = wanted(other, reference, batch, 2.0 * (place % 2 == 0))
        torch.testing.assert_close(grads(model), truth, rtol=1e-6, atol=1e-9)
    assert alphas[1] > 2  # the penalty of before counts in steps without one


@pytest.mark.parametrize("every", [None, 3])
def test_training_that_is_resumed_goes_on_to_the_same_bits(every, tmp_path):
    ends = []
    for stop in (None, 4):
        model, learner, batches = begun(penalty_every=every)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for place, batch in enumerate(batches + batches):
            if place == stop:
                torch.save({"learner": learner.state_dict(), "model": model.state_dict()}, tmp_path / "state.pt")
                state = torch.load(tmp_path / "state.pt", weights_only=True)
                learner.close()
                model = bare(copy.deepcopy(model))
                model.load_state_dict(state["model"])
                learner = Learner(model, learner.memory, penalty_every=every)
                learner.load_state_dict(state["learner"])
                optimizer = torch.optim.SGD(model.parameters(), 0.01)
            optimizer.zero_grad()
            step(model, learner, batch, "backward")
            optimizer.step()
        ends.append((learner._step.interval.every, torch.cat([p.flatten() for p in model.parameters()])))
    assert ends[0][0] == ends[1][0] > 1
    assert torch.equal(ends[0][1], ends[1][1])


def trained(every, strength, lr, momentum, steps):
    """Return the learner after some steps, the largest penalty of their second half, and the longest interval."""
    model, learner, batches = begun(penalty_every=every, strength=strength)
    lr = lr(learner) if callable(lr) else lr
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum or 0.0)
    if momentum is None:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
    longest, values = 1, []
    for place in range(steps):
        optimizer.zero_grad()
        step(model, learner, batches[place % 8], "backward")
        optimizer.step()
        longest = max(longest, learner._step.interval.every)
        values.append(float(learner.last_penalty))
    return learner, max(values[steps // 2 :]), longest


@pytest.mark.parametrize("momentum", [0.0, 0.9, None])  # None: Adam
def test_under_a_stiff_penalty_the_interval_that_adapts_is_short_and_does_not_diverge(momentum):
    def lr(learner):
        k = learner._step.interval.every
        return 0.15 * learner.stable_lr(momentum or 0.0) * (1 if k == 1 else _ratio(momentum or 0.0))

    always, fixed, adapted = (trained(every, 300.0, lr, momentum, 60) for every in (1, LONGEST, None))
    assert adapted[1] < 2 * always[1]
    assert adapted[2] < LONGEST
    assert not fixed[1] < (2 if momentum is None else 20) * always[1]


def test_under_a_weak_penalty_the_interval_grows_to_its_longest():
    assert trained(None, 1e-3, 0.01, 0.9, 40)[0]._step.interval.every == LONGEST


def _ratio(momentum, k=LONGEST):
    """Return the stable learning rate at interval 1 over that at k."""
    return (1 + momentum) * k * sum(momentum**i for i in range(k)) / (1 + momentum**k)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_stable_learning_rate_is_where_k_steps_stop_to_contract(momentum, every):
    _, learner, _ = begun(penalty_every=every)
    _, single, _ = begun(penalty_every=1)
    eigenvalue = 2 / single.stable_lr(0.0)  # of the weighted penalty
    for factor, stable in ((0.999, True), (1.001, False)):
        lr = factor * learner.stable_lr(momentum)
        both = torch.eye(2, dtype=torch.float64)  # displacement and velocity, by their values at the start
        for place in range(every):
            velocity = momentum * both[1] + (eigenvalue * every * both[0] if place == 0 else 0)
            both = torch.stack([both[0] - lr * velocity, velocity])
        assert (torch.linalg.eigvals(both).abs().max() < 1) == stable


@pytest.mark.parametrize(("method", "every"), [("xkfac", 1), ("fixed-bn", IMPLICIT)])
def test_implicit_steps_take_the_weight_of_the_interval_and_end_one_that_adapts(method, every):
    model, learner, _ = begun(penalty_every=4, strength=1e4, method=method)
    _, single, _ = begun(penalty_every=1, strength=4e4, method=method)
    _, adapting, _ = begun(strength=4e4 / every, method=method)
    found, truth, same = learner.implicit(0.1), single.implicit(0.1), adapting.implicit(0.1)
    gradients = [torch.randn_like(p) for p in model[0].parameters()]
    for one in (found, same):
        own = [p for p in one.parameters if p.shape == (5, 6)]
        (result,) = one(own, gradients)
        (expected,) = truth([p for p in truth.parameters if p.shape == (5, 6)], gradients)
        torch.testing.assert_close(result, expected)
    assert not adapting._step.interval.adapts
    assert adapting._step.interval.every == every


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "auto"])
def test_an_interval_is_a_whole_number_of_steps(every):
    with pytest.raises(XkfacError, match="penalty_every must be a whole number of steps of at least 1, or None"):
        begun(penalty_every=every)


def test_a_state_of_another_interval_is_refused():
    _, learner, _ = begun(penalty_every=4)
    _, other, _ = begun(penalty_every=2)
    with pytest.raises(XkfacError, match="penalty_every=4, and this one has 2"):
        other.load_state_dict(learner.state_dict())


def test_captured_steps_are_whole_intervals_and_begin_with_an_evaluation():
    interval = Interval(4)
    assert not interval.skips()
    interval.weight(torch.ones(1))
    assert interval.skips()
    interval.captures(8)  # in the middle of an interval
    evaluates = []
    for _ in range(8):
        evaluates.append(not interval.skips())
        if evaluates[-1]:
            assert interval.weight(torch.ones(1)) == 4
    assert evaluates == 2 * [True, False, False, False]
    with pytest.raises(XkfacError, match="6 captured steps do not go with penalty_every=4"):
        interval.captures(6)
    with pytest.raises(XkfacError, match="4 captured steps do not go with an interval that adapts"):
        Interval(None).captures(4)
