"""begin(loader, optimizer) makes the steps of SGD implicit in the penalty until the task ends."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.setups import data, mlp, randomise, target
from xkfac import Learner, XkfacError, XkfacWarning, consolidate
from xkfac.learning.implicit_steps import sgd_among

STRENGTH = 3e4


def started(method="fixed-bn", lr=0.1, **options):
    torch.manual_seed(0)
    model = randomise(mlp())
    memory = consolidate(model, data(), method=method)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, **options)
    return model, memory, optimizer


def steps(model, learner, optimizer, batches, before=None):
    for x, y in batches:
        optimizer.zero_grad()
        learner.objective(F.cross_entropy(model(x), y)).backward()
        if before is not None:
            before()
        optimizer.step()


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_with_a_closure_is_the_same(by_name):
    ends = []
    for with_closure in (False, True):
        model, memory, optimizer = started()
        learner = Learner(model, memory, strength=STRENGTH)
        learner.begin(target(), optimizer)
        for x, y in target():

            def closure():
                optimizer.zero_grad()
                loss = learner.objective(F.cross_entropy(model(x), y))
                loss.backward()
                return loss

            if not with_closure:
                closure()
                optimizer.step()
            else:
                assert (optimizer.step(closure=closure) if by_name else optimizer.step(closure)) > 0
        ends.append(weights(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("method", ["fixed-bn", "xkfac", "ewc"])
def test_steps_are_those_with_the_gradients_of_implicit(method):
    ends = []
    for by_hand in (False, True):
        model, memory, optimizer = started(method)
        learner = Learner(model, memory, strength=STRENGTH)
        learner.begin(target(), None if by_hand else optimizer)
        implicit = learner.implicit(0.1, 0.9) if by_hand else None
        steps(model, learner, optimizer, target(), implicit.step if by_hand else None)
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_a_strong_penalty_bears_a_learning_rate_that_diverges_without_the_optimizer():
    model, memory, optimizer = started()
    learner = Learner(model, memory, strength=STRENGTH)
    learner.begin(target())
    assert learner.stable_lr(0.9) < 0.01
    learner.close()
    learner = Learner(model, memory, strength=STRENGTH, damping=1e-6)
    learner.begin(target(), optimizer)
    assert learner.stable_lr(0.9) > 0.1
    steps(model, learner, optimizer, target() * 20)
    assert float(learner.last_penalty) < 1e-3


@pytest.mark.parametrize("method", ["fixed-bn", "xkfac"])
def test_a_resumed_task_goes_on_as_an_unbroken_one(method):
    model, memory, optimizer = started(method)
    learner = Learner(model, memory, strength=STRENGTH)
    learner.begin(target(), optimizer)
    steps(model, learner, optimizer, target())
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), learner.state_dict()], file)
    steps(model, learner, optimizer, target())
    learner.close()
    end = weights(model)

    file.seek(0)
    of_model, of_optimizer, of_learner = torch.load(file)
    model = mlp()
    model.load_state_dict(of_model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    optimizer.load_state_dict(of_optimizer)
    learner = Learner(model, memory, strength=STRENGTH)
    with pytest.raises(XkfacError, match=r"begun with an optimizer; call load_state_dict\(state, optimizer\)"):
        learner.load_state_dict(of_learner)
    learner.load_state_dict(of_learner, optimizer)
    steps(model, learner, optimizer, target())
    assert torch.equal(weights(model), end)


def test_the_optimizer_steps_by_itself_again_when_the_task_is_over():
    model, memory, optimizer = started()
    twin = copy.deepcopy(model)
    learner = Learner(model, memory, strength=STRENGTH)
    learner.begin(target(), optimizer)
    learner.close()
    plain = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    for net, of in ((model, optimizer), (twin, plain)):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        of.step()
    assert torch.equal(weights(model), weights(twin))


@pytest.mark.parametrize("schedule", ["warm-up", "one cycle"])
def test_the_learning_rate_is_the_largest_that_a_scheduler_names(schedule):
    model, memory, optimizer = started()
    if schedule == "warm-up":
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.01)
    else:
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)
    assert optimizer.param_groups[0]["lr"] < 0.01
    learner = Learner(model, memory, strength=STRENGTH)
    learner.begin(target(), optimizer)
    assert learner._implicit_steps.lr == 0.1


def test_of_several_groups_the_one_with_the_longest_steps_counts():
    model, memory, _ = started()
    groups = [
        {"params": model[0].parameters(), "lr": 0.3},
        {"params": model[3].parameters(), "lr": 0.1, "momentum": 0.9},
        {"params": model[6].parameters(), "lr": 0.01, "momentum": 0.95},
    ]
    learner = Learner(model, memory)
    learner.begin(target(), torch.optim.SGD(groups, 0.1))
    assert (learner._implicit_steps.lr, learner._implicit_steps.momentum) == (0.1, 0.9)


def test_a_learning_rate_that_grows_beyond_is_said_once():
    model, memory, optimizer = started()
    learner = Learner(model, memory, strength=STRENGTH)
    learner.begin(target(), optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    with pytest.warns(XkfacWarning, match=r"grown to 0\.2 from 0\.1.*make the scheduler before begin") as said:
        steps(model, learner, optimizer, target())
    assert len(said) == 1


def test_a_task_that_begins_again_has_the_steps_of_its_new_optimizer():
    ends = []
    for again in (False, True):
        model, memory, optimizer = started(lr=0.3)
        learner = Learner(model, memory, strength=STRENGTH)
        if again:
            learner.begin(target(), torch.optim.SGD(model.parameters(), 0.1))
        learner.begin(target(), optimizer)
        steps(model, learner, optimizer, target())
        ends.append(weights(model))
    assert torch.equal(*ends)


def test_layers_that_are_frozen_while_a_head_learns_have_implicit_steps_later():
    ends = []
    for frozen in (False, True):
        model, memory, optimizer = started(lr=0.3)
        model.requires_grad_(not frozen)
        learner = Learner(model, memory, strength=STRENGTH)
        learner.begin(target(), optimizer)
        for place in (0, 3, 6):
            model[place].requires_grad_(True)
        steps(model, learner, optimizer, target())
        ends.append(weights(model))
    assert torch.equal(*ends)
    model.requires_grad_(False)
    model[6] = torch.nn.Linear(4, 2)
    learner = Learner(model, consolidate(model, data(classes=2), exclude=["6"]))
    learner.begin(target(classes=2), torch.optim.SGD(model[6].parameters(), 0.1))  # nothing that is protected learns


def test_steps_of_another_optimizer_than_that_of_begin_are_noticed():
    model, memory, optimizer = started()
    learner = Learner(model, memory)
    learner.begin(target(), optimizer)
    learner.stable_lr()  # displaces the weights for a while
    with pytest.warns(XkfacWarning, match="not by steps of the optimizer that begin got") as said:
        steps(model, learner, torch.optim.SGD(model.parameters(), 0.01), target(count=5))
    assert len(said) == 1


def test_gradients_that_are_accumulated_before_the_first_step_are_no_other_optimizer():
    model, memory, optimizer = started()
    learner = Learner(model, memory)
    learner.begin(target(), optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in target():
            learner.objective(F.cross_entropy(model(x), y), share=1 / 3).backward()
        optimizer.step()
        steps(model, learner, optimizer, target())


def test_an_optimizer_from_before_a_head_was_replaced_is_noticed():
    model, memory, optimizer = started()
    model[6] = torch.nn.Linear(4, 3)
    learner = Learner(model, memory.without("6"))
    with pytest.warns(XkfacWarning, match=r"lacks '6.weight' .* make the optimizer after all changes to the model"):
        learner.begin(target(), optimizer)
    rest = [*model[:6].parameters()]
    elsewhere = torch.nn.Parameter(torch.ones(1))  # of a loss
    for parameters in ([*model.parameters(), elsewhere], [*model.parameters()], rest):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            learner.begin(target(), torch.optim.SGD(parameters, 0.1))


@pytest.mark.parametrize("method", ["fixed-bn", "xkfac"])
def test_an_optimizer_that_cannot_be_made_implicit_is_named_before_anything_changes(method):
    model, memory, _ = started(method)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(XkfacError, match="cannot do so for AdamW, which scales its steps by itself; leave the opt"):
        Learner(model, memory).begin(target(), torch.optim.AdamW(model.parameters()))
    wrapper = torch.optim.Adam(model.parameters())
    wrapper.optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(XkfacError, match=r"for Adam; give begin the SGD inside of it, optimizer.optimizer"):
        Learner(model, memory).begin(target(), wrapper)
    stranger = torch.optim.SGD(mlp().parameters(), 0.1)
    with pytest.raises(XkfacError, match="none of the parameters that the penalty protects"):
        Learner(model, memory).begin(target(), stranger)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_the_optimizer_of_a_framework_is_taken_where_it_can_be_implicit():
    model, memory, optimizer = started()
    protected = Learner(model, memory).protected
    stranger = torch.optim.SGD(mlp().parameters(), 0.1)
    assert sgd_among([None, stranger, optimizer], protected) is optimizer
    assert sgd_among([torch.optim.Adam(model.parameters()), stranger], protected) is None
    assert sgd_among([optimizer, torch.optim.SGD(model.parameters(), 0.1)], protected) is None


def test_without_a_penalty_there_is_nothing_to_do():
    model, memory, optimizer = started("fine-tuning")
    learner = Learner(model, memory)
    learner.begin(target(), optimizer)
    steps(model, learner, optimizer, target())
    assert learner.state_dict()["implicit"] is None


@pytest.mark.parametrize(("method", "explicit"), [("corrected", 9), ("unmerged", 4)])
def test_parameters_whose_steps_stay_explicit_are_told(method, explicit):
    model, memory, optimizer = started(method)
    learner = Learner(model, memory)
    with pytest.warns(XkfacWarning, match=f"steps of {explicit} of 9 protected parameters do not become") as caught:
        learner.begin(target(), optimizer)
    assert caught[0].filename == __file__
    implicit = {id(one) for one in learner._implicit_steps.implicit.parameters}
    assert sum(id(one) not in implicit for one in learner.protected) == explicit


@pytest.mark.parametrize("method", ["fixed-bn", "own-bn", "paper", "xkfac", "kfac", "ewc", "fixed-statistics"])
def test_other_methods_have_none(method):
    model, memory, optimizer = started(method)
    slow = {"bn_momentum": 0.01} if method in ("paper", "xkfac", "kfac") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Learner(model, memory, **slow).begin(target(), optimizer)


def quick_bn_warnings(method, optimizer=True, of_learner=None, momentum=0.1):
    model, memory, _ = started(method)
    for norm in model.modules():
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.momentum = momentum
    sgd = torch.optim.SGD(model.parameters(), 0.1) if optimizer else None
    with Learner(model, memory, **(of_learner or {})) as learner, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.begin(target(), sgd)
    return [str(one.message) for one in caught if "follow the target with momentum" in str(one.message)]


@pytest.mark.parametrize("method", ["xkfac", "kfac", "paper"])
def test_implicit_steps_beside_statistics_that_follow_quickly_are_told(method):
    assert "'1' follow the target with momentum 0.1" in quick_bn_warnings(method)[0]
    assert not quick_bn_warnings(method, optimizer=False)
    assert not quick_bn_warnings(method, of_learner={"bn_momentum": 0.01})
    assert not quick_bn_warnings(method, of_learner={"interpretation": "eval"})
    assert not quick_bn_warnings(method, momentum=0.02)
    assert not quick_bn_warnings(method, momentum=None)
    assert quick_bn_warnings(method, momentum=None, of_learner={"bn_momentum": 0.1})


@pytest.mark.parametrize("method", ["fixed-bn", "fixed-statistics", "ewc", "corrected", "unmerged"])
def test_where_no_such_step_is_implicit_nothing_is_said_of_bn(method):
    assert not quick_bn_warnings(method)
