"""begin, objective, finish: values, errors, what they change and what they leave alone."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from tests.helpers.setups import Everything, data, gradients, mlp, move, randomise, started, target
from xkfac import Learner, consolidate
from xkfac.errors import MismatchError, XkfacError
from xkfac.model.merged_weight import INTERPRETATIONS, anchor_of, bind
from xkfac.model.passes import norms_of
from xkfac.model.renorm import BatchRenorm1d


def hooks(model):
    found = [len(m._forward_pre_hooks) + len(m._forward_hooks) + ("forward" in vars(m)) for m in model.modules()]
    return sum(found)


def test_importance_is_that_of_equal_tasks_or_the_users():
    model = mlp()
    memory = consolidate(model, data(), "xkfac")
    assert Learner(model, memory).importance == (1 / 2, 1 / 2)
    for tasks in (2, 3, 4):
        with Learner(model, memory) as learner:
            learner.begin(target())
            gradients(model, learner)
            memory = learner.finish(target())
        assert memory.tasks == tasks
        assert Learner(model, memory).importance == (tasks / (tasks + 1), 1 / (tasks + 1))
    assert Learner(model, memory, importance=(0.9, 0.4)).importance == (0.9, 0.4)
    assert Learner(model, memory, importance=(0.0, 0.0)).importance == (0.0, 0.0)


@pytest.mark.parametrize(
    "bad",
    [{"damping": -1.0}, {"strength": float("nan")}, {"importance": (-0.1, 1.0)}, {"importance": (1.0, float("inf"))}],
)
def test_numbers_that_make_no_sense_are_refused(bad):
    model = mlp()
    with pytest.raises(XkfacError, match=f"{next(iter(bad))} must be a number of at least 0"):
        Learner(model, consolidate(model, data(), "xkfac"), **bad)


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
def test_objective_is_the_weighted_sum_of_penalty_and_loss(interpretation):
    model, learner = started(interpretation=interpretation, importance=(0.7, 0.2), strength=3.0, damping=0.01)
    x, y = target()[0]
    twin = copy.deepcopy(model)
    loss = F.cross_entropy(model(x), y)
    objective = learner.objective(loss)
    memory, bound = learner.memory, bind(twin, learner.memory.units)
    readings, z = {}, x
    with torch.no_grad():
        for place, module in enumerate(twin):
            if isinstance(module, nn.BatchNorm1d) and interpretation != "eval":
                name = str(place - 1)
                readings[name] = bound[name].read(z, interpretation)
            z = module(z)
        weights = {name: one.merged_weight(readings.get(name)) for name, one in bound.items()}
        moves = {name: weights[name] - memory.anchor[name] for name in weights}
        penalty = memory.curvature.quadratic(moves) + 0.005 * sum((one**2).sum() for one in moves.values())
    assert penalty > 1e-3
    torch.testing.assert_close(learner.last_penalty, penalty)
    torch.testing.assert_close(objective, 3.0 * 0.7 * penalty + 0.2 * loss)


def test_begin_recentres_so_that_the_first_penalty_is_zero():
    model = mlp().train()
    memory = consolidate(model, data(), "xkfac")
    learner = Learner(model, memory, damping=1.0)
    learner.begin(target())
    for x, y in target():
        statistics = copy.deepcopy(model.state_dict())
        learner.objective(F.cross_entropy(model(x), y))
        model.load_state_dict(statistics)
        assert learner.last_penalty < 1e-10


@pytest.mark.parametrize(("recentre", "zero"), [(True, True), (False, False)])
def test_without_recentring_mini_batch_statistics_are_far_from_the_anchor(recentre, zero):
    model = mlp().train()
    learner = Learner(model, consolidate(model, data(), "xkfac"), interpretation="bn", damping=1.0)
    learner.begin(target(), recentre=recentre)
    whole = torch.cat([x for x, _ in target()])
    learner.objective(model(whole).sum())
    assert learner.last_penalty < 1e-10 if zero else learner.last_penalty > 0.1


def test_begin_passes_its_options_on():
    model = mlp()
    learner = Learner(model, consolidate(model, data(), "xkfac"))
    seen = []

    def forward(net, batch):
        seen.append(batch["image"])
        return net(batch["image"])

    learner.begin([{"image": x} for x, _ in target()], forward=forward, max_batches=2)
    assert len(seen) == 3  # one to compare the network with the memory, two to re-centre
    assert torch.equal(seen[0], seen[1])


def test_begin_refuses_a_network_that_is_not_at_the_anchor():
    model = mlp()
    memory = consolidate(model, data(), "xkfac")
    learner = Learner(model, memory)
    with torch.no_grad():
        model[3].weight.mul_(1.1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(MismatchError, match=r"unit '3' are .* away from those .*run it in evaluation mode until then"):
        learner.begin(target())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        model[3].weight.div_(1.1)
        model[6].weight.mul_(1.1)
    with pytest.raises(MismatchError, match=r"unit '6' are .*leave a head that is new out, with memory.without\('6'\)"):
        learner.begin(target())
    with torch.no_grad():
        model[3].weight.fill_(float("nan"))
    with pytest.raises(MismatchError, match="unit '3'"):
        learner.begin(target())


def test_what_cancels_in_a_merged_weight_may_be_off_by_its_own_rounding():
    model = mlp()
    with torch.no_grad():
        model[4].running_mean.fill_(1e4)
        model[3].bias.fill_(1e4)
    with Learner(model, consolidate(model, data(), "kfac", statistics="population")) as learner:
        model[4].running_mean.mul_(1 + 5e-7)  # the last column of W~, which is small, changes by 1e-2
        learner.begin(target())
        model[4].running_mean.mul_(1 + 1e-3)
        with pytest.raises(MismatchError, match="unit '3'"):
            learner.begin(target())


def test_order_of_calls_is_checked():
    model = mlp().train()
    learner = Learner(model, consolidate(model, data(), "xkfac"))
    x, y = target()[0]
    loss = torch.ones(())
    with pytest.raises(XkfacError, match="call begin"):
        learner.objective(loss)
    with pytest.raises(XkfacError, match="begin needs its loader"):
        learner.begin()
    learner.begin(target())
    learner.objective(F.cross_entropy(model(x), y))
    with pytest.raises(XkfacError, match="no batch has passed '1' in training mode"):
        learner.objective(loss)
    learner.close()
    for late in (lambda: learner.begin(target()), lambda: learner.objective(loss)):
        with pytest.raises(XkfacError, match="learner is closed"):
            late()


def test_a_failed_begin_leaves_model_and_learner_as_they_were():
    model = mlp()
    learner = Learner(model, consolidate(model, data(), "xkfac"))
    before = copy.deepcopy(model.state_dict())
    broken = target()
    broken[1][0][0, 0] = float("inf")
    with pytest.raises(XkfacError, match="not finite"):
        learner.begin(broken)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(XkfacError, match="call begin"):
        learner.objective(torch.zeros(()))
    learner.begin(target())


def test_a_refused_optimizer_leaves_the_model_as_it_was():
    for method in ("xkfac", "fixed-bn"):
        model = mlp()
        learner = Learner(model, consolidate(model, data(), method))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(XkfacError, match="cannot do so for AdamW"):
            learner.begin(target(), torch.optim.AdamW(model.parameters()))
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_new_learner_closes_the_one_before():
    """As where a cell of a notebook runs again: steps are those of one learner, and BN gets back what it had."""
    model = mlp()
    memory = consolidate(model, data(), "fixed-bn")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    former = Learner(model, memory)
    former.begin(target(), optimizer)
    learner = Learner(model, memory)
    learner.begin(target(), optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    with pytest.raises(XkfacError, match="learner is closed"):
        former.objective(torch.zeros(()))
    former.close()
    model(target()[0][0])
    Learner(copy.deepcopy(model), memory)
    assert not learner._closed
    Learner(model, memory).close()
    assert learner._closed
    assert hooks(model) == 0
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("keep", ["average", "all"])
def test_finish_extends_the_memory_and_removes_all_hooks(keep):
    layers = nn.BatchNorm1d(6), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)
    model, learner = started(randomise(nn.Sequential(*layers)))
    gradients(model, learner)
    assert hooks(model) > 0
    before = learner.memory
    new = learner.finish(target(), keep=keep, seed=5)
    assert hooks(model) == 0
    assert (before.tasks, new.tasks) == (1, 2)
    wanted = anchor_of(model, new.units)
    assert all(torch.equal(new.anchor[name], anchor) for name, anchor in wanted.items())
    assert any(not torch.allclose(new.anchor[name], anchor) for name, anchor in before.anchor.items())
    fresh = xkfac.estimate(model, target(), seed=5).curvature
    v = {name: torch.randn_like(anchor) for name, anchor in wanted.items()}
    got = new.curvature.quadratic(v)
    if keep == "all":
        torch.testing.assert_close(got, (before.curvature.quadratic(v) + fresh.quadratic(v)) / 2)
    homogeneous = {unit.name for unit in new.units if unit.homogeneous}
    averaged = before.curvature.extend(fresh, 0.5, 0.5, homogeneous=homogeneous, keep_all=keep == "all").quadratic(v)
    torch.testing.assert_close(got, averaged)
    for wrong in ("some", 4):
        with pytest.raises(XkfacError, match="it must be 'average' or 'all'"):
            learner.finish(target(), keep=wrong)


def test_finish_leaves_the_model_as_it_is():
    model, learner = started()
    gradients(model, learner)
    before = copy.deepcopy(model.state_dict())
    learner.finish(target())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())


def test_close_and_the_context_manager_remove_hooks():
    model = mlp()
    memory = consolidate(model, data(), "xkfac")
    learner = Learner(model, memory)
    assert hooks(model) == 3
    learner.close()
    learner.close()
    assert hooks(model) == 0
    with pytest.raises(XkfacError, match="call begin"), Learner(model, memory) as learner:
        learner.objective(torch.zeros(()))
    assert hooks(model) == 0


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_fixed_bn_is_fixed_bit_by_bit(decay):
    model = mlp().train()
    model[4].bias.requires_grad_(False)
    clean = copy.deepcopy(model.state_dict())
    memory = consolidate(model, data(), "fixed-bn")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=decay)
    F.cross_entropy(model(data()[0][0]), data()[0][1]).backward()
    optimizer.step()
    model.load_state_dict(clean)
    learner = Learner(model, memory)
    learner.begin()
    for x, y in target() * 3:
        model.train()
        objective = learner.objective(F.cross_entropy(model(x), y))
        optimizer.zero_grad(set_to_none=False)
        objective.backward()
        optimizer.step()
        assert all(module.training for module in model.modules())
    for path in ("1", "4"):
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
            assert torch.equal(model.state_dict()[f"{path}.{name}"], clean[f"{path}.{name}"]), (path, name)
    assert not torch.allclose(model[0].weight, clean["0.weight"])
    model.eval()
    learner.finish(target())
    assert not any(module.training for module in model.modules())
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert flags == {name: name != "4.bias" for name in flags}


def test_fixed_affine_keeps_gamma_and_beta_and_lets_statistics_follow():
    model = randomise(mlp())
    learner = Learner(model, consolidate(model, data(), "fixed-affine"))
    learner.begin()
    kept = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() == 1 and not p.requires_grad}
    mean = model[1].running_mean.clone()
    assert {"1.weight", "1.bias"} <= set(kept)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    for x, y in target():
        optimizer.zero_grad()
        learner.objective(F.cross_entropy(model(x), y)).backward()
        optimizer.step()
    assert all(torch.equal(model.get_parameter(name), value) for name, value in kept.items())
    assert not torch.equal(model[1].running_mean, mean)
    learner.close()
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(XkfacError, match="method 'fixed-affine' keeps gamma and beta, which re-centring moves"):
        Learner(model, consolidate(model, data(), "fixed-affine")).begin(target(), recentre=True)


def test_fixed_statistics_are_those_of_the_target_while_gamma_and_beta_learn():
    model = randomise(mlp())
    learner = Learner(model, consolidate(model, data(), "fixed-statistics"))
    x = target()[0][0]
    before = model.eval()(x)
    learner.begin(target())
    torch.testing.assert_close(model(x), before, atol=1e-4, rtol=1e-4)
    hidden = torch.cat([model[0](x) for x, _ in target()])
    torch.testing.assert_close(model[1].running_mean, hidden.mean(0), atol=1e-5, rtol=1e-4)
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gamma = model[1].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in target():
        model.train()
        output = model(x)
        optimizer.zero_grad()
        learner.objective(F.cross_entropy(output, y)).backward()
        torch.testing.assert_close(model.eval()(x), output)  # BN runs as in evaluation
        optimizer.step()
    assert all(torch.equal(buffer, kept[name]) for name, buffer in model.named_buffers())
    assert not torch.equal(model[1].weight, gamma)
    learner.close()


def test_fixed_bn_runs_as_in_evaluation_and_gives_flags_back_when_taken_up_twice():
    model = mlp().train()
    learner = Learner(model, consolidate(model, data(), "fixed-bn"))
    learner.begin()
    learner.load_state_dict(learner.state_dict())
    x, y = target()[0]
    output = model(x)
    assert torch.equal(output, copy.deepcopy(model).eval()(x))
    assert not model[1].weight.requires_grad
    learner.objective(F.cross_entropy(output, y))
    learner.close()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not torch.equal(model(x), output)


def test_fine_tuning_is_the_plain_loss():
    model = mlp().train()
    learner = Learner(model, consolidate(model, data(), "fine-tuning"))
    learner.begin()
    x, y = target()[0]
    loss = F.cross_entropy(model(x), y)
    assert torch.equal(learner.objective(loss), loss)
    assert learner.last_penalty == 0
    assert hooks(model) == 0
    memory = learner.finish(target())
    assert memory.tasks == 2
    assert Learner(model, memory).importance == (0.0, 1.0)


def test_ewc_penalises_parameters_by_themselves():
    model, learner = started(method="ewc", damping=0.0)
    assert {unit.kind for unit in learner.memory.units} == {"free"}
    x, y = target()[0]
    learner.objective(F.cross_entropy(model(x), y))
    value = 0.0
    for name, parameter in model.named_parameters():
        fisher = learner.memory.curvature.blocks[name].values.reshape(parameter.shape)
        value += (fisher * (parameter - learner.memory.anchor[name].reshape(parameter.shape)) ** 2).sum() / 2
    assert value > 1e-4
    torch.testing.assert_close(learner.last_penalty, value)


@pytest.mark.parametrize("method", ["ewc", "fixed-bn"])
def test_methods_that_keep_gamma_and_beta_refuse_to_recentre_them_and_to_read_them_otherwise(method):
    model = mlp()
    memory = consolidate(model, data(), method)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(XkfacError, match="pass recentre=False"):
        Learner(model, memory).begin(target(), recentre=True)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(XkfacError, match=r"leave interpretation out|interpretation='eval'"):
        Learner(model, memory, interpretation="brn")
    Learner(model, memory, interpretation="eval")


def test_interpretation_can_be_chosen_anew():
    model, learner = started(interpretation="const")
    assert (learner.method.interpretation, learner.memory.method.interpretation) == ("const", "brn")
    x = target()[0][0].requires_grad_()
    model(x)
    (through,) = torch.autograd.grad(learner.penalty(), x, allow_unused=True)
    assert through is None
    with pytest.raises(XkfacError, match="must be one of bn, brn, const, eval"):
        Learner(model, learner.memory, interpretation="population")


def test_another_networks_memory_is_refused():
    with pytest.raises(MismatchError, match="unit '0'"):
        Learner(nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7)), consolidate(mlp(), data(), "xkfac"))


@pytest.mark.parametrize(("model_dtype", "memory_dtype"), [("float64", "float32"), ("float32", "float64")])
def test_a_memory_of_another_precision_than_the_model(model_dtype, memory_dtype):
    model_dtype, memory_dtype = getattr(torch, model_dtype), getattr(torch, memory_dtype)
    model = mlp().to(model_dtype).train()
    batches = [(x.to(model_dtype), y) for x, y in data()]
    memory = consolidate(model, batches, "xkfac").to(dtype=memory_dtype)
    learner = Learner(model, memory)
    learner.begin(batches)
    move(model)
    _, found = gradients(model, learner, batches[0])
    assert all(gradient.dtype == model_dtype and gradient.isfinite().all() for gradient in found.values())
    assert learner.last_penalty.dtype == model_dtype
    assert next(iter(learner.finish(batches).curvature.tensors()))[1].dtype == torch.float64


def test_a_renormalized_network():
    model, learner = started(mlp(lambda size: BatchRenorm1d(size, warmup=0, r_steps=1, d_steps=1)))
    norms = norms_of(model)
    _, found = gradients(model, learner)
    assert learner.last_penalty > 0
    assert all(found[f"{path}.weight"].abs().max() > 0 for path in norms)
    assert learner.finish(target()).tasks == 2


def train(model, learner, optimizer, batches):
    for x, y in batches:
        objective = learner.objective(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()


@pytest.mark.parametrize("method", ["xkfac", "fixed-bn"])
def test_a_task_taken_up_in_its_middle_ends_at_the_same_weights(method):
    model = mlp().train()
    memory = consolidate(model, data(), method)

    def made(net):
        balance = xkfac.Balance(interval=2)
        return Learner(net, memory, balance=balance), torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)

    learner, optimizer = made(model)
    learner.begin(target())
    train(model, learner, optimizer, target(count=5))
    file = io.BytesIO()
    torch.save([one.state_dict() for one in (model, learner, optimizer)], file)
    train(model, learner, optimizer, target(count=6, seed=3))
    resumed = mlp().train()
    other, again = made(resumed)
    file.seek(0)
    for one, state in zip((resumed, other, again), torch.load(file, weights_only=True), strict=True):
        one.load_state_dict(state)
    train(resumed, other, again, target(count=6, seed=3))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
    for name, tensor in learner.balance.state_dict().items():
        assert torch.equal(tensor, other.balance.state_dict()[name]), name
    assert max(learner.balance.alpha_s, learner.balance.alpha_t) > 1
    with pytest.raises(XkfacError, match="state is of a learner with a balance"):
        Learner(resumed, memory).load_state_dict(learner.state_dict())


def test_every_kind_of_unit_learns():
    model = randomise(Everything()).train()
    batches, new = data(2, 8, (2, 7, 7)), data(2, 8, (2, 7, 7), shift=1.0, seed=1)
    learner = Learner(model, consolidate(model, batches, "xkfac"), balance=xkfac.Balance())
    learner.begin(new)
    start = copy.deepcopy(model.state_dict())
    train(model, learner, torch.optim.SGD(model.parameters(), 0.05), new * 3)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, start[name])}
    assert moved >= {name for name, _ in model.named_parameters()} - {"grouped.bias", "linear.bias"}
    assert learner.last_penalty > 0
