"""Tasks are told apart by the likelihood of an input under independent normal distributions of its features."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch.distributions import Normal

from xkfac import MismatchError, XkfacError
from xkfac.experiments.runs.task_inference import TaskInference


def inferred(inference, x):
    """Return the task of each of the inputs."""
    return [inference.tasks[index] for index in inference.scores(x).argmax(1).tolist()]


def taught(*tasks, floor=0.1):
    """Return a teller of tasks 0, 1, ... that has seen these inputs of each."""
    teller = TaskInference(floor)
    for name, x in enumerate(tasks):
        teller.learn(str(name), [(x, None)])
    return teller


def test_scores_are_log_likelihoods_up_to_one_constant():
    torch.manual_seed(0)
    tasks = [torch.randn(50, 2, 3) * (1 + task) + task for task in range(4)]
    x = torch.randn(7, 2, 3) * 2 + 1
    expected = []
    for task in tasks:
        rows = task.double().flatten(1)
        var = rows.var(0, correction=0)
        likelihood = Normal(rows.mean(0), (var + 0.3 * var.mean()).sqrt()).log_prob(x.double().flatten(1)).sum(1)
        expected.append(likelihood)
    difference = taught(*tasks, floor=0.3).scores(x) - torch.stack(expected, 1)
    torch.testing.assert_close(difference, difference[:1, :1].expand_as(difference), rtol=0, atol=1e-4)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), far=st.sampled_from([0.0, 1e3]))
def test_what_is_learnt_does_not_depend_on_the_batches(sizes, far):
    torch.manual_seed(sum(sizes))
    x = torch.randn(sum(sizes), 4) + far
    teller = TaskInference()
    teller.learn("task", torch.split(x, sizes))
    state = teller.state_dict()
    torch.testing.assert_close(state["mean/task"], x.double().mean(0).float())
    torch.testing.assert_close(state["var/task"], x.double().var(0, correction=0).float(), rtol=1e-5, atol=1e-9)


def test_permuted_digits_are_told_apart_one_by_one():
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    orders = [torch.randperm(64) for _ in range(5)]
    teller = taught(*(images[:1000, order] for order in orders))
    for task, order in enumerate(orders):
        seen = images[1000:, order]
        right = [name == str(task) for name in inferred(teller, seen)]
        assert sum(right) > 0.99 * len(right)


def test_tasks_that_differ_in_their_spread_alone_are_told_apart():
    torch.manual_seed(0)
    teller = taught(torch.randn(200, 30), 4 * torch.randn(200, 30))
    assert inferred(teller, torch.randn(20, 30)) == ["0"] * 20
    assert inferred(teller, 4 * torch.randn(20, 30)) == ["1"] * 20


def test_a_feature_that_never_varied_does_not_decide_alone():
    torch.manual_seed(0)
    constant = torch.zeros(50, 40)
    constant[:, 1:] = torch.randn(50, 39)
    x = torch.randn(10, 40)
    x[:, 0] = 0.5
    teller = taught(constant, constant + 3 * torch.ones(40))
    assert teller.scores(x).isfinite().all()
    assert inferred(teller, x) == ["0"] * 10
    assert inferred(taught(torch.zeros(3, 2), torch.ones(3, 2)), torch.ones(1, 2)) == ["1"]


def test_a_state_gives_the_same_scores_and_a_task_can_be_learnt_again():
    torch.manual_seed(0)
    teller, other, x = taught(torch.randn(9, 3), torch.randn(9, 3) + 1), TaskInference(), torch.randn(4, 3)
    other.load_state_dict(teller.state_dict())
    assert other.tasks == teller.tasks == ["0", "1"]
    assert torch.equal(other.scores(x), teller.scores(x))
    other.learn("0", [x])
    assert other.tasks == ["0", "1"]
    torch.testing.assert_close(other.state_dict()["mean/0"], x.mean(0))


def test_what_cannot_be_told_is_refused_and_nothing_is_changed():
    with pytest.raises(XkfacError, match="no task is known yet"):
        TaskInference().scores(torch.zeros(1, 2))
    for floor in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(XkfacError, match="floor must be a positive number"):
            TaskInference(floor)
    teller = taught(torch.randn(9, 3))
    before = teller.scores(torch.ones(1, 3))
    with pytest.raises(XkfacError, match="the loader of task 'b' gave no inputs"):
        teller.learn("b", [])
    with pytest.raises(MismatchError, match="inputs of 'b' have 4 features and those of task '0' 3"):
        teller.learn("b", [torch.zeros(2, 4)])
    with pytest.raises(MismatchError, match="inputs of 'x' have 2 features"):
        inferred(teller, torch.zeros(2, 2))
    with pytest.raises(XkfacError, match="one tensor"):
        teller.learn("b", [{"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}])
    with pytest.raises(MismatchError, match="not that of a TaskInference"):
        teller.load_state_dict({"mean/a": torch.zeros(3)})
    assert teller.tasks == ["0"]
    assert torch.equal(teller.scores(torch.ones(1, 3)), before)
