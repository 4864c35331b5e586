"""The balance against a state machine written from the paper's words."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.setups import gradients, started, target
from xkfac import Balance, Learner
from xkfac.errors import XkfacError


class Reference:
    """alpha_s and alpha_t as the section on hyperparameter selection describes them."""

    def __init__(self, floor, interval):
        self.floor, self.interval = floor, interval
        self.alpha_s = self.alpha_t = 1
        self.penalties, self.losses = [], []

    def update(self, penalty, loss, importance):
        self.penalties.append(importance[0] * penalty)
        self.losses.append(importance[1] * (loss - self.floor))
        if len(self.penalties) < self.interval:
            return
        source, target = sum(self.penalties) / self.interval, sum(self.losses) / self.interval
        self.penalties, self.losses = [], []
        if self.alpha_t > 1:
            self.alpha_t = self.alpha_t + 1 if source > target else 1
        elif self.alpha_s > 1:
            self.alpha_s = self.alpha_s + 1 if target > source else 1
        elif source > target:
            self.alpha_t += 1
        elif target > source:
            self.alpha_s += 1


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=60),
    interval=st.integers(1, 5),
    floor=st.sampled_from([0.0, 0.5, 2.0]),
    importance=st.sampled_from([(0.5, 0.5), (0.75, 0.25), (3.0, 1.0)]),
)
def test_alphas_follow_the_papers_words(steps, interval, floor, importance):
    balance, reference = Balance(floor, interval), Reference(floor, interval)
    for penalty, loss in steps:
        balance.update(torch.tensor(float(penalty)), torch.tensor(float(loss)), importance)
        reference.update(penalty, loss, importance)
        assert (balance.alpha_s, balance.alpha_t) == (reference.alpha_s, reference.alpha_t)
        assert min(reference.alpha_s, reference.alpha_t) == 1


def run(balance, pairs):
    alphas = []
    for penalty, loss in pairs:
        balance.update(torch.tensor(penalty), torch.tensor(loss), (1.0, 1.0))
        alphas.append((balance.alpha_s.item(), balance.alpha_t.item()))
    return alphas


def test_growth_and_return_by_hand():
    pairs = [(2.0, 1.0)] * 3 + [(1.0, 2.0)] * 3 + [(2.0, 1.0)] * 2
    assert run(Balance(interval=1), pairs) == [(1, 2), (1, 3), (1, 4), (1, 1), (2, 1), (3, 1), (1, 1), (1, 2)]


def test_the_mean_over_the_interval_decides():
    assert run(Balance(interval=3), [(9.0, 1.0), (0.0, 4.0), (0.0, 3.0)]) == [(1, 1), (1, 1), (1, 2)]


def test_the_floor_is_taken_from_the_loss():
    assert run(Balance(floor=0.0, interval=1), [(1.0, 1.5)]) == [(2, 1)]
    assert run(Balance(floor=1.0, interval=1), [(1.0, 1.5)]) == [(1, 2)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_step_that_overflows_does_not_poison_the_balance(value):
    balance = Balance(interval=2)
    assert run(balance, [(2.0, value), (2.0, 1.0), (1.0, 2.0), (1.0, 2.0)])[1::2] == [(1, 2), (1, 1)]
    assert balance.state_dict()["_excess"] == 0


def test_the_objective_is_divided_by_the_alphas_of_before_the_step():
    model, learner = started(balance=Balance(interval=1, floor=-100.0))
    learner.close()
    state = copy.deepcopy(model.state_dict())
    for alpha in (1, 2, 3):
        results = []
        for options in ({"balance": learner.balance}, {"importance": (0.5 / alpha, 0.5)}):
            model.load_state_dict(state)
            with Learner(model, learner.memory, **options) as one:
                one.load_state_dict({"begun": True, "balance": learner.balance.state_dict() if one.balance else None})
                results.append(gradients(model, one))
        assert (learner.balance.alpha_s, learner.balance.alpha_t) == (alpha + 1, 1)
        torch.testing.assert_close(results[0], results[1])


def test_it_drives_training_with_backward_passes_in_between():
    model, learner = started(balance=Balance(interval=2))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    seen = set()
    for batch in target(count=12):
        gradients(model, learner, batch)
        optimizer.step()
        seen.add((learner.balance.alpha_s.item(), learner.balance.alpha_t.item()))
    assert len(seen) > 2


def test_an_interval_must_be_a_step_at_least():
    with pytest.raises(XkfacError, match="at least 1 step, not 0"):
        Balance(interval=0)
