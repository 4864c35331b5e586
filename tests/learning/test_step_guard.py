"""What would go wrong without a word in a user's training loop is said: by an error, or by a warning once."""

import copy
import io
import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.setups import data, gradients, leave_side_stream, mlp, move, started, target
from xkfac import Balance, Calibration, Learner, consolidate, estimate
from xkfac.errors import MismatchError, NotFiniteError, XkfacError, XkfacWarning
from xkfac.learning.step_guard import INTERVAL


def undamped_penalty(learner):
    """L_s without damping where the network is, under population statistics."""
    at = {name: one.merged_weight().detach() for name, one in learner._step.bound.items()}
    moves = {name: weight - learner.memory.anchor[name] for name, weight in at.items()}
    return learner.memory.curvature.quadratic(moves).item()


def test_finish_refuses_a_task_without_objective():
    model, learner = started()
    with pytest.raises(
        XkfacError, match=r"objective was never called, .* call objective\(loss\) in every training step"
    ):
        learner.finish(target())
    gradients(model, learner)
    assert learner.finish(target()).tasks == 2


def test_what_a_refused_finish_names_instead_extends_the_memory():
    model, learner = started(method="fixed-bn")
    with pytest.raises(
        XkfacError, match=r"memory.extend\(model, xkfac.estimate\(model, loader, memory.method.settings\)"
    ):
        learner.finish(target())
    new = estimate(model, target(), learner.memory.method.settings)
    assert learner.memory.extend(model, new, weights=(0.5, 0.5)).tasks == 2


@pytest.mark.parametrize("call", ["backward", "penalty", "load_state_dict", "an older state"])
def test_what_counts_as_a_step(call):
    model, learner = started()
    x, y = target()[0]
    if call == "backward":
        learner.backward(F.cross_entropy(model(x), y))
    elif call == "penalty":
        learner.penalty()
    else:
        gradients(model, learner)
        state = learner.state_dict() if call == "load_state_dict" else {"begun": True, "balance": None}
        memory = learner.memory
        learner.close()
        learner = Learner(model, memory)
        learner.load_state_dict(state)
    assert learner.finish(target()).tasks == 2


def test_a_state_from_before_the_first_step_does_not_count():
    model, learner = started()
    memory, state = learner.memory, learner.state_dict()
    learner.close()
    learner = Learner(model, memory)
    learner.load_state_dict(state)
    with pytest.raises(XkfacError, match="objective was never called"):
        learner.finish(target())


def test_fine_tuning_has_nothing_to_protect():
    model = mlp()
    learner = Learner(model, consolidate(model, data(), "fine-tuning"))
    learner.begin()
    assert learner.finish(target()).tasks == 2


REPLACED = r"layer of unit '{}' was replaced after the Learner was made, .* memory.without\('{}'\)"


def test_a_replaced_head_is_noticed_by_begin_by_the_first_objective_and_by_finish():
    model = mlp()
    memory = consolidate(model, data(), "xkfac")
    learner = Learner(model, memory)
    old, model[6] = model[6], copy.deepcopy(model[6])
    with pytest.raises(MismatchError, match=REPLACED.format(6, 6)):
        learner.begin(target())
    model[6] = old
    learner.begin(target())
    model[6] = nn.Linear(4, 3)
    x, y = target()[0]
    with pytest.raises(MismatchError, match=REPLACED.format(6, 6)):
        learner.objective(F.cross_entropy(model(x), y))
    model[6] = old
    gradients(model, learner)
    model[4] = copy.deepcopy(model[4])
    with pytest.raises(MismatchError, match=REPLACED.format(3, 3)):
        learner.finish(target())


def test_a_head_that_is_left_out_may_be_replaced():
    model = mlp()
    learner = Learner(model, consolidate(model, data(), "xkfac", exclude="6"))
    model[6] = nn.Linear(4, 5)
    learner.begin(target())
    gradients(model, learner)
    assert learner.finish(target()).tasks == 2


@pytest.mark.parametrize("call", ["objective", "backward"])
def test_a_loss_that_is_not_one_number_is_refused(call):
    model, learner = started()
    x, y = target()[0]
    for loss, message in (
        (F.cross_entropy(model(x), y, reduction="none"), r"shape \[8\] and must be one number, .* call .mean\(\)"),
        (F.cross_entropy(model(x), y)[None], r"shape \[1\]"),
        (F.cross_entropy(model(x), y).item(), "the loss is a float"),
    ):
        with pytest.raises(XkfacError, match=message):
            getattr(learner, call)(loss)
        learner._step.readings.clear()
    model(x)
    learner.objective(F.cross_entropy(model(x), y))


SUMS = {
    "cross_entropy": lambda o, y: F.cross_entropy(o, y, reduction="sum"),
    "none and sum": lambda o, y: F.cross_entropy(o, y, reduction="none").sum(),
    "bce": lambda o, y: F.binary_cross_entropy_with_logits(o, F.one_hot(y, 3).float(), reduction="sum"),
    "mse": lambda o, y: F.mse_loss(o, F.one_hot(y, 3).float(), reduction="sum"),
}


@pytest.mark.parametrize("call", ["objective", "backward"])
@pytest.mark.parametrize("loss", SUMS)
def test_a_sum_over_the_batch_is_refused_and_its_mean_is_not(loss, call):
    model, learner = started()
    x, y = target()[0]
    with pytest.raises(XkfacError, match="sum over the batch and the penalty is per example; use reduction='mean'"):
        getattr(learner, call)(SUMS[loss](model(x), y))
    getattr(learner, call)(SUMS[loss](model(x), y) / len(x))
    value = learner.objective(F.cross_entropy(model(x), y, label_smoothing=0.1))
    assert value.isfinite()


def softmax_head():
    return nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))


PROBABILITIES = (
    "outputs of the network are probabilities, and the categorical likelihood takes logits; leave the softmax"
)


def test_probabilities_are_refused_by_consolidate_begin_and_finish():
    model = mlp()
    good, model[6] = model[6], softmax_head()
    with pytest.raises(XkfacError, match=PROBABILITIES):
        consolidate(model, data(), "xkfac")
    consolidate(model, data(), "xkfac", likelihood="gaussian")
    model[6] = good
    memory = consolidate(model, data(), "xkfac", exclude="6")
    model[6] = softmax_head()
    with pytest.raises(XkfacError, match=PROBABILITIES):
        Learner(model, memory).begin(target())
    model[6] = good
    learner = Learner(model, memory)
    learner.begin(target())
    gradients(model, learner)
    model[6] = softmax_head()
    with pytest.raises(XkfacError, match=PROBABILITIES):
        learner.finish(target())
    model[6] = nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))
    consolidate(model, data(), "xkfac")


def accumulated(way, share, batches):
    """Return the gradients of one step of several batches."""
    model, learner = started(interpretation="eval", balance=Balance() if way == "balanced" else None)
    for norm in (model[1], model[4]):
        norm.momentum = 0.0  # statistics that move would change the penalty from one batch to the next
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            if way == "backward":
                learner.backward(loss, share)
            else:
                learner.objective(loss, share).backward()
    penalty = learner.penalty()
    losses = sum(F.cross_entropy(model(x), y) for x, y in batches)
    return model, learner, penalty, losses, [one for one in caught if one.category is XkfacWarning]


@pytest.mark.parametrize("way", ["objective", "backward", "balanced"])
def test_shares_of_a_step_add_up_to_one_penalty(way):
    batches = target(count=4)
    model, learner, penalty, losses, caught = accumulated(way, 0.25, batches)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    source, rest = learner.importance
    model.zero_grad()
    (source * penalty + rest * losses / 4).backward()
    for one, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-6)
    assert not caught


@pytest.mark.parametrize("way", ["objective", "backward"])
def test_gradients_that_add_up_without_a_share_are_told_once(way):
    *_, caught = accumulated(way, None, target(count=4))
    (warning,) = caught
    assert "call objective(loss, share=1/k) for each of k batches per optimizer step, with the loss not divided" in str(
        warning.message
    )
    *_, caught = accumulated(way, 1.0, target(count=4))
    assert not caught


def test_gradients_that_add_up_are_noticed_where_few_steps_evaluate_the_penalty():
    """The gradients of a pair of passes add up, and the penalty is never in the second."""
    model, learner = started(method="fixed-bn", penalty_every=8)
    (x, y), (other, labels) = target(count=2)
    learner.objective(F.cross_entropy(model(x), y) / 2).backward()
    with pytest.warns(XkfacWarning, match="gradients of several objectives add up"):
        learner.objective(F.cross_entropy(model(other), labels) / 2).backward()


def plain(model, learner, optimizer, loss):
    optimizer.zero_grad()
    learner.objective(loss()).backward()
    optimizer.step()


def late(model, learner, optimizer, loss):
    objective = learner.objective(loss())
    optimizer.zero_grad()
    objective.backward()
    optimizer.step()


def zeros(model, learner, optimizer, loss):
    optimizer.zero_grad(set_to_none=False)
    learner.objective(loss()).backward()
    optimizer.step()


def late_zeros(model, learner, optimizer, loss):
    objective = learner.objective(loss())
    optimizer.zero_grad(set_to_none=False)
    objective.backward()
    optimizer.step()


def at_once(model, learner, optimizer, loss):
    optimizer.zero_grad(set_to_none=False)
    learner.backward(loss())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def skipped(model, learner, optimizer, loss):
    """Make no step, as a gradient scaler does."""
    objective = learner.objective(loss())
    optimizer.zero_grad()
    objective.backward()


def closures(model, learner, optimizer, loss):
    """Evaluate several times a step, as LBFGS does."""
    for _ in range(2):
        optimizer.zero_grad()
        learner.objective(loss()).backward()
    optimizer.step()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("loop", [plain, late, zeros, late_zeros, at_once, skipped, closures])
def test_loops_that_do_not_add_gradients_up_are_not_told_so(loop, every, fused):
    model, learner = started(penalty_every=every)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in target(count=6):
            loop(model, learner, optimizer, lambda x=x, y=y: F.cross_entropy(model(x), y))


def run(step, count):
    """Take so many steps."""
    for x, y in target(count=count):
        step(x, y)


def diverging(lr=3.0, strength=1e4, call="objective", **options):
    model, learner = started(strength=strength, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr)

    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if call == "objective":
            learner.objective(loss).backward()
        else:
            learner.backward(loss)
        optimizer.step()

    return model, learner, step


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("call", ["objective", "backward"])
def test_training_that_diverges_is_told_with_the_learning_rate_that_is_stable(call, beside):
    model, learner, step = diverging(call=call)
    leave_side_stream(learner, beside)
    limit = learner.stable_lr()
    start = copy.deepcopy(model.state_dict())
    message = f"the steps are too long for the penalty, since SGD diverges above a learning rate of {limit:.2g} "
    with pytest.raises(NotFiniteError, match=message):
        run(step, 200)
    assert not model[0].weight.isfinite().all()
    with pytest.raises(NotFiniteError, match=message):
        learner.finish(target())
    model.load_state_dict(start)
    for x, y in target(count=INTERVAL - 1):
        model.zero_grad()
        learner.objective(F.cross_entropy(model(x), y)).backward()
    assert learner.finish(target()).tasks == 2


def test_training_that_diverges_is_told_soon_and_without_reading_every_step():
    model, learner = started()
    reads = []

    class Reads(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__float__, torch.Tensor.__bool__):
                reads.append(func)
            return func(*args, **(kwargs or {}))

    def objective(x, y):
        learner.objective(F.cross_entropy(model(x), y))

    with Reads():
        run(objective, 4 * INTERVAL)
    assert len(reads) == 4
    with torch.no_grad():
        model[3].weight[0, 0] = math.nan
    with pytest.raises(NotFiniteError):
        run(objective, INTERVAL)


@pytest.mark.parametrize("damping", [0.0, 1.0])
@pytest.mark.parametrize("distance", [0.5, 3.0])
def test_a_penalty_that_says_that_the_past_is_lost_is_told_once(distance, damping):
    model, learner = started(interpretation="eval", strength=0.1, damping=damping)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(distance)
    for norm in (model[1], model[4]):
        norm.momentum = 0.0
    undamped = undamped_penalty(learner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(lambda x, y: learner.objective(F.cross_entropy(model(x), y)), 3 * INTERVAL)
    found = [one for one in caught if one.category is XkfacWarning]
    assert len(found) == (undamped > 2) == (distance > 1)
    for one in found:
        assert f"after 16 steps the penalty is {undamped:.2g}, the nats by which it predicts" in str(one.message)
        assert one.filename == __file__


def test_inputs_that_are_not_finite_are_not_blamed_on_the_steps():
    model, learner = started()
    bad = torch.full((8, 6), math.inf)
    learner.objective(F.cross_entropy(model(bad), torch.zeros(8, dtype=torch.long)))
    with pytest.raises(
        NotFiniteError, match="statistics of '1' are not finite although all weights are; check the inp"
    ):
        run(lambda x, y: learner.objective(F.cross_entropy(model(x), y)), INTERVAL)


def calibrated(model, radius):
    return replace(consolidate(model, data(), "xkfac"), calibration=Calibration(2.0, radius, (), 10))


@pytest.mark.parametrize("radius", [1e-4, 0.0])
def test_a_penalty_beyond_the_radius_is_told_once_per_task_and_can_be_read(radius):
    model = mlp().train()
    learner = Learner(model, calibrated(model, radius), damping=10.0)
    learner.begin(target())
    assert learner.over_radius < 1e-3 or radius == 0
    move(model)
    model[1].momentum = model[4].momentum = 0.0
    undamped = undamped_penalty(learner)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(lambda x, y: learner.objective(F.cross_entropy(model(x), y)), 3 * INTERVAL)
        assert learner.over_radius == pytest.approx(undamped / radius if radius else math.inf, rel=1e-4)
        learner.finish(target())
    (warning,) = [one for one in caught if one.category is XkfacWarning]
    assert warning.filename == __file__
    times = f"{undamped / radius:.2g} times" if radius else "beyond"
    assert f"without damping is {undamped:.2g}, {times} the radius {radius:.2g} up to" in str(warning.message)
    assert "a larger strength, or" in str(warning.message)
    assert undamped > 1e-3


def test_a_short_task_beyond_the_radius_is_told_by_finish():
    model = mlp().train()
    learner = Learner(model, calibrated(model, 1e-4))
    learner.begin(target())
    move(model)
    gradients(model, learner)
    with pytest.warns(XkfacWarning, match="times the radius") as caught:
        learner.finish(target())
    assert caught[0].filename == __file__


def test_a_penalty_within_the_radius_is_not_told():
    model = mlp().train()
    learner = Learner(model, calibrated(model, 1e3), damping=1e5)
    learner.begin(target())
    move(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in target(count=2 * INTERVAL):
            learner.objective(F.cross_entropy(model(x), y), 1.0)
        learner.finish(target())
    assert Learner(model, consolidate(model, data(), "xkfac")).over_radius is None


def test_statistics_that_have_moved_a_little_are_refused():
    model = mlp().train()
    learner = Learner(model, consolidate(model, data(), "xkfac"))
    model[1].momentum = model[4].momentum = 0.002
    with torch.no_grad():
        model(data()[0][0])
    with pytest.raises(
        MismatchError, match=r"BN statistics of unit '[03]' are \d.\de-0[34] \(relative\) away from .* tolerance"
    ):
        learner.begin(target())
    learner.begin(target(), tolerance=1e-2)


def test_weights_that_have_moved_a_little_are_refused():
    model = mlp()
    learner = Learner(model, consolidate(model, data(), "xkfac"))
    with torch.no_grad():
        model[6].weight.mul_(1 + 1e-3)
    with pytest.raises(MismatchError, match=r"unit '6' are \d.\de-04 \(relative\) away"):
        learner.begin(target())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rounding_is_not_taken_for_a_move(dtype, tmp_path):
    model = mlp()
    model[1].running_mean.add_(300.0)  # cancels in beta - gamma mu / sigma, whose rounding is large
    memory = consolidate(model, data(), "xkfac")
    memory.save(tmp_path / "m", dtype)
    loaded = type(memory).load(tmp_path / "m", model)
    for net, one in ((model, loaded), (copy.deepcopy(model).to(dtype), memory), (model, memory.to(dtype=dtype))):
        Learner(copy.deepcopy(net), one).begin(recentre=False)
    learner = Learner(model, loaded)
    learner.begin(target())
    learner.begin(target(shift=50.0, seed=5))
    learner.begin(target())


def as_dicts(batches):
    return [{"image": x, "weight": torch.ones(len(x))} for x, _ in batches]


def forward(model, batch):
    return model(batch["image"])


def learnt(learner):
    for x, y in target(count=2):
        learner.objective(F.cross_entropy(learner.model(x), y)).backward()


def test_forward_is_given_once(tmp_path):
    model = mlp()
    memory = consolidate(model, as_dicts(data()), "xkfac", forward=forward)
    assert "with a forward function of its own" in repr(memory)
    learner = Learner(model, memory)
    learner.begin(as_dicts(target()))
    learnt(learner)
    memory = learner.finish(as_dicts(target()))
    assert memory.forward is forward
    memory.save(tmp_path / "m")
    loaded = type(memory).load(tmp_path / "m", model)
    assert repr(loaded) == repr(memory)
    with pytest.raises(XkfacError, match=r"a forward function, which its file cannot hold; pass forward=\.\.\. again"):
        Learner(model, loaded).begin(as_dicts(target()))
    learner = Learner(model, loaded, forward=forward)
    learner.begin(as_dicts(target()))
    learnt(learner)
    assert learner.finish(as_dicts(target())).forward is forward
    assert "forward" not in repr(consolidate(model, data(), "xkfac"))


def test_forward_of_begin_or_finish_goes_before_the_memorys():
    model = mlp()
    learner = Learner(model, consolidate(model, as_dicts(data()), "xkfac", forward=forward))
    learner.begin(target(), forward=lambda net, batch: net(batch[0]))
    learnt(learner)
    assert learner.finish(as_dicts(target()), forward=forward).tasks == 2


def test_a_learner_that_is_stored_says_that_it_has_stepped():
    model, learner = started()
    gradients(model, learner)
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["stepped"] is True
