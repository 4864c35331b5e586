"""The same three lines in the loops that people write: compiled, autocast, accumulated, checkpointed, distributed."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import xkfac
from tests.helpers.processes import in_processes
from tests.helpers.setups import (
    Skipping,
    bare,
    data,
    gradients,
    leave_side_stream,
    mlp,
    move,
    randomise,
    started,
    target,
)
from xkfac import Balance, Learner, consolidate
from xkfac.errors import XkfacError
from xkfac.model.merged_weight import INTERPRETATIONS

METHODS = ["xkfac", "unmerged", "fixed-bn", "ewc"]


def twin(model, learner, **options):
    """Return a copy of model and learner in the same state, the copy without hooks but its own."""
    other = bare(copy.deepcopy(model))
    new = Learner(other, learner.memory, **{"penalty_every": 1, **options})
    new.load_state_dict({"begun": True, "balance": None})
    return other, new


def assert_same(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_model(method):
    torch._dynamo.reset()
    model, learner = started(method=method)
    other, eager = twin(model, learner)
    compiled = torch.compile(model, backend="aot_eager")
    for batch in target():
        model.train()
        value, found = gradients(model, learner, batch, compiled)
        wanted_value, wanted = gradients(other, eager, batch)
        assert learner.last_penalty > 1e-4
        torch.testing.assert_close(value, wanted_value)
        assert_same(found, wanted)
    assert_same(dict(model.named_buffers()), dict(other.named_buffers()))
    assert len(compiled.state_dict()) == len(other.state_dict())


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
def test_a_compiled_step(interpretation):
    """It evaluates the penalty every time, also where the interval could be longer."""
    torch._dynamo.reset()
    model, learner = started(interpretation=interpretation, penalty_every=None)
    other, eager = twin(model, learner, interpretation=interpretation)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def objective(x, y):
        return learner.objective(F.cross_entropy(model(x), y))

    assert not learner.state_dict()["stepped"]
    for x, y in target(count=6):
        model.zero_grad()
        value = objective(x, y)
        value.backward()
        assert learner.state_dict()["stepped"]
        wanted_value, wanted = gradients(other, eager, (x, y))
        torch.testing.assert_close(value.detach(), wanted_value)
        assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, wanted)


def test_inductor():
    """Of a whole step, the tapped BN and the penalty in one graph; parts of it are compiled by aot_eager above."""
    torch._dynamo.reset()
    net = randomise(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    model, learner = started(net)
    other, eager = twin(model, learner)

    def objective(x, y):
        return learner.objective(F.cross_entropy(model(x), y))

    x, y = target()[0]
    torch.compile(objective, backend="inductor", fullgraph=True)(x, y).backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same(found, gradients(other, eager)[1])


class Derived(nn.BatchNorm1d):
    """A BN that is not torch's own, so that a hook reads it."""


@pytest.mark.parametrize("noticed", [False, True])
def test_a_learner_that_a_compiled_model_does_not_notice_is_reported(noticed):
    torch._dynamo.reset()
    model = mlp(nn.BatchNorm1d if noticed else Derived).eval()
    memory = consolidate(model, data(), "xkfac")
    compiled = torch.compile(model, backend="aot_eager")
    start = copy.deepcopy(model.state_dict())
    model.train()
    compiled(data()[0][0])
    model.load_state_dict(start)
    learner = Learner(compiled, memory, bn_momentum=None)  # another momentum has the model compiled anew
    learner.begin(target())
    start = copy.deepcopy(model.state_dict())
    loss = compiled(target()[0][0]).sum()
    if noticed:
        value = learner.objective(loss)
        model.load_state_dict(start)
        torch.testing.assert_close(value, learner.objective(model(target()[0][0]).sum()))
        return
    with pytest.raises(XkfacError, match="make the learner before the first call of a compiled model"):
        learner.objective(loss)


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    model, learner = started()
    x, y = target()[0]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        assert output.dtype == torch.bfloat16
        loss = F.cross_entropy(output.float(), y)
        objective = learner.objective(loss) if inside else None
    objective = objective if inside else learner.objective(loss)
    objective.backward()
    penalty = learner.last_penalty
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(population_penalty(model, learner, inside=True), population_penalty(model, learner))
    other, eager = twin(model, learner)
    gradients(other, eager)
    assert objective.dtype == penalty.dtype == torch.float32
    torch.testing.assert_close(penalty, eager.last_penalty, rtol=0.1, atol=1e-3)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def population_penalty(model, learner, *, inside=False):
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=inside):
        value = learner.penalty()
    model.train()
    return value


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("at_once", [True, False])
def test_gradient_accumulation(interpretation, at_once):
    model, learner = started(interpretation=interpretation)
    other, eager = twin(model, learner, interpretation=interpretation)
    micro = target()[:2]
    model.zero_grad()
    objectives = []
    for x, y in micro:
        objectives.append(learner.objective(F.cross_entropy(model(x), y)) / 2)
        if not at_once:
            objectives[-1].backward()
    if at_once:
        sum(objectives).backward()
    parts = [gradients(other, eager, batch)[1] for batch in micro]
    wanted = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, wanted, 1e-6)


class Checkpointed(nn.Module):
    """A network whose middle may run under a checkpoint."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.middle = nn.Sequential(
            nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)
        )
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if self.reentrant is None or not self.training:
            x = self.middle(x)
        else:
            x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(self.norm(x))


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
def test_checkpointing(interpretation):
    model, learner = started(randomise(Checkpointed(False)), interpretation=interpretation)
    other, eager = twin(model, learner, interpretation=interpretation)
    other.reentrant = None
    for batch in target():
        other.load_state_dict(model.state_dict())
        value, found = gradients(model, learner, batch)
        wanted_value, wanted = gradients(other, eager, batch)
        assert learner.last_penalty > 1e-3
        torch.testing.assert_close(value, wanted_value)
        assert_same(found, wanted, 1e-6)


@pytest.mark.parametrize(("frozen", "unit"), [("middle.2", "middle.0"), ("middle.0", "middle.2")])
@pytest.mark.parametrize("interpretation", ["bn", "brn"])
def test_reentrant_checkpointing_is_refused_where_the_gradient_through_statistics_is_lost(interpretation, frozen, unit):
    model, learner = started(randomise(Checkpointed(True)), interpretation=interpretation)
    for place in (frozen, "middle.3"):
        model.get_submodule(place).requires_grad_(place == "middle.3" and frozen == "middle.0")
    x, y = target()[0]
    loss = F.cross_entropy(model(x), y)
    with pytest.raises(XkfacError, match=f"unit '{unit}' .* use_reentrant=False"):
        learner.objective(loss)


@pytest.mark.parametrize("interpretation", ["bn", "brn"])
def test_reentrant_checkpointing_of_frozen_units_is_refused_when_gradients_pass_through_them(interpretation):
    model, learner = started(randomise(Checkpointed(True)), interpretation=interpretation)
    model.requires_grad_(False)
    model.middle[5].requires_grad_(True)
    x, y = target()[0]
    x.requires_grad_()
    objective = learner.objective(F.cross_entropy(model(x), y))
    with pytest.raises(XkfacError, match=r"unit '(middle.0|middle.2)' .* use_reentrant=False"):
        objective.backward()


@pytest.mark.parametrize("interpretation", ["const", "eval"])
def test_reentrant_checkpointing_is_right_where_statistics_count_as_constant(interpretation):
    model, learner = started(randomise(Checkpointed(True)), interpretation=interpretation)
    other, eager = twin(model, learner, interpretation=interpretation)
    other.reentrant = None
    wanted = gradients(other, eager)[1]
    assert_same(gradients(model, learner)[1], wanted, 1e-6)


def test_a_forward_pass_without_gradients_is_refused_only_if_it_is_the_one_that_counts():
    model, learner = started()
    x, y = target()[0]
    with torch.no_grad():
        model(x)
        learner.objective(F.cross_entropy(model(x), y))
        model(x)
    gradients(model, learner)
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y)
    with pytest.raises(XkfacError, match="gradients disabled"):
        learner.objective(loss)


def test_frozen_layers():
    model, learner = started()
    other, eager = twin(model, learner)
    for parameter in (*model[0].parameters(), *model[1].parameters(), model[4].bias):
        parameter.requires_grad_(False)
    value, found = gradients(model, learner)
    wanted_value, wanted = gradients(other, eager)
    torch.testing.assert_close(value, wanted_value)
    assert set(wanted) - set(found) == {"0.weight", "1.weight", "1.bias", "4.bias"}
    assert_same(found, {name: wanted[name] for name in found})
    model.requires_grad_(False)
    x, y = target()[0]
    assert not learner.objective(F.cross_entropy(model(x), y)).requires_grad


def test_bn_that_the_user_puts_in_evaluation_mode_is_read_with_its_population_statistics():
    model, learner = started()
    other, eager = twin(model, learner, interpretation="eval")
    for net in (model, other):
        for place in (1, 4):
            net[place].eval()
    value, found = gradients(model, learner)
    wanted_value, wanted = gradients(other, eager)
    torch.testing.assert_close(value, wanted_value)
    assert_same(found, wanted)
    model[4].train()
    gradients(model, learner)
    assert not model[1].training


def test_a_block_that_is_skipped_is_penalised_with_its_population_statistics():
    model, learner = started(randomise(Skipping()))
    gradients(model, learner)
    model.skip = True
    _, found = gradients(model, learner)
    scale = model.block[1].weight / torch.sqrt(model.block[1].running_var + model.block[1].eps)
    anchor = learner.memory.anchor["block.0"]
    bound = learner._step.bound["block.0"]
    displacement = bound.merged_weight().detach() - anchor
    product = learner.memory.curvature.blocks["block.0"].product(displacement) + 1e-4 * displacement
    wanted = learner.importance[0] * product[0, :, :-1] * scale[:, None]
    torch.testing.assert_close(found["block.0.weight"], wanted.detach())
    assert found["first.0.weight"].abs().max() > 0


def test_scaled_gradients():
    model, learner = started()
    other, eager = twin(model, learner)
    x, y = target()[0]
    (learner.objective(F.cross_entropy(model(x), y)) * torch.tensor(2.0**16)).backward()
    wanted = gradients(other, eager)[1]
    found = {name: parameter.grad / 2.0**16 for name, parameter in model.named_parameters()}
    assert_same(found, wanted, 1e-6)


class NoScalars(TorchDispatchMode):
    """Fails on item() and bool()."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read from the device"
        return func(*args, **(kwargs or {}))


class NoCopies(TorchFunctionMode):
    """Fails on what copies a tensor to Python without a scalar read."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu), "a tensor was read"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [torch.Tensor.item, bool, torch.Tensor.tolist])
def test_a_read_is_noticed(read):
    with NoScalars(), NoCopies(), pytest.raises(AssertionError, match="was read"):
        read(torch.ones(()))


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("made", [{}, {"form": "mean"}, {"kind": "corrected"}, {"cross_layer": True}])
def test_a_step_reads_no_value_from_the_device(interpretation, made):
    model = mlp(lambda size: xkfac.BatchRenorm1d(size, warmup=0, r_steps=1, d_steps=1))
    model, learner = started(model, made=made, interpretation=interpretation, balance=Balance(interval=1))
    with NoScalars(), NoCopies():
        gradients(model, learner)
    assert learner.last_penalty > 0


def distributed_step(rank, ranks, folder):
    """Begin and take one step on this process's share of the data; return the state in between, value and gradients."""
    torch.manual_seed(0)
    model = mlp()
    memory = consolidate(model, data(), "xkfac")
    parallel = nn.parallel.DistributedDataParallel(model)
    learner = Learner(parallel, memory, balance=Balance())
    learner.begin(share(rank))
    state = copy.deepcopy(model.state_dict())
    move(model)
    value, found = gradients(model.train(), learner, share(rank)[0], parallel)
    return state, value, found


def share(rank):
    """Return a process's batches; the two differ in number, size and statistics."""
    return target(count=2 + rank, size=6 + 2 * rank, shift=1.0 + rank, seed=10 + rank)


def test_distributed_data_parallel(tmp_path):
    results = in_processes(distributed_step, 2, tmp_path)
    torch.manual_seed(0)
    model = mlp()
    learner = Learner(model, consolidate(model, data(), "xkfac"))
    learner.begin([*share(0), *share(1)])
    for name, tensor in model.state_dict().items():
        assert torch.equal(results[0][0][name], results[1][0][name]), name
        torch.testing.assert_close(results[0][0][name], tensor)
    move(model)
    state = copy.deepcopy(model.state_dict())
    parts = []
    for rank in range(2):
        model.load_state_dict(state)
        value, found = gradients(model.train(), learner, share(rank)[0])
        torch.testing.assert_close(results[rank][1], value)
        parts.append(found)
    assert not torch.allclose(parts[0]["0.weight"], parts[1]["0.weight"])
    for rank in range(2):
        assert_same(results[rank][2], {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}, 1e-6)


def two_passes(model, first, second):
    """Return the losses of two batches, their forward passes one after the other."""
    return [F.cross_entropy(model(x), y) for x, y in (first, second)]


@pytest.mark.parametrize("interpretation", ["bn", "brn"])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("bn", [nn.BatchNorm1d, xkfac.BatchRenorm1d])
def test_a_loss_of_two_forward_passes_is_refused(interpretation, at_once, bn):
    model, learner = started(mlp(bn), interpretation=interpretation)
    losses = two_passes(model, *target()[:2])
    with pytest.raises(XkfacError, match=r"several forward passes through '4' .* call objective after each pass"):
        learner.objective(sum(losses) if at_once else losses[0])
    gradients(model, learner)


def test_a_loss_of_two_forward_passes_is_fine_where_no_statistics_are_read():
    model, learner = started(interpretation="eval")
    other, eager = twin(model, learner, interpretation="eval")
    learner.objective(sum(two_passes(model, *target()[:2]))).backward()
    source, rest = eager.importance
    (rest * sum(two_passes(other, *target()[:2])) + source * eager.penalty()).backward()
    found, wanted = ({name: p.grad for name, p in net.named_parameters()} for net in (model, other))
    assert_same(found, wanted, 1e-6)


@pytest.mark.parametrize("alive", [True, False])
def test_a_forward_pass_that_the_loss_does_not_depend_on_does_not_count(alive):
    model, learner = started()
    other, eager = twin(model, learner)
    skipped = [net(target()[1][0]) for net in (model, other)]
    eager._step.readings.clear()
    if not alive:
        skipped.clear()
    assert_same(gradients(model, learner)[1], gradients(other, eager)[1], 1e-7)


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("beside", [True, False])
def test_passes_without_gradients_do_not_count_beside_the_one_with(interpretation, after, beside):
    model, learner = started(interpretation=interpretation)
    leave_side_stream(learner, beside)
    other, eager = twin(model, learner, interpretation=interpretation)
    (x, y), (z, _), *_ = target()
    if not after:
        with torch.no_grad():
            model(z)
    other.load_state_dict(model.state_dict())
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if after and interpretation != "eval":  # read with the statistics of the moment, which this pass moves
        with torch.no_grad():
            model(z)
    learner.objective(loss).backward()
    wanted = gradients(other, eager)[1]
    assert_same({name: parameter.grad for name, parameter in model.named_parameters()}, wanted, 1e-6)
