"""The penalty of a training step, gradients at once, against the same penalty by autograd and by differences."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import xkfac
from tests.helpers.penalties import CURVATURES, DAMPING, Problem, assert_same_gradients, central_difference, gradients
from tests.helpers.setups import (
    Alike,
    Everything,
    Skipping,
    data,
    leave_side_stream,
    mlp,
    move,
    randomise,
    started,
    target,
)
from xkfac import Balance, Learner, estimate
from xkfac.curvature.blocks import Diagonal, KhatriRao, Kronecker, Term, eigenbasis
from xkfac.curvature.operator import Curvature
from xkfac.model.merged_weight import INTERPRETATIONS, anchor_of, batch_statistics, bind
from xkfac.model.passes import norms_of
from xkfac.model.renorm import BatchRenorm1d, to_renorm
from xkfac.model.units import find_units
from xkfac.penalty.fused import FusedPenalty
from xkfac.penalty.layout import ROW
from xkfac.penalty.quadratic import Penalty
from xkfac.penalty.step import accumulate


@pytest.mark.parametrize("row", [1, 8])
@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_value_and_all_gradients_are_those_of_autograd(curvature, interpretation, row, monkeypatch):
    monkeypatch.setitem(ROW, "cpu", row)
    problem = Problem(curvature, interpretation)
    fused = FusedPenalty(problem.penalty, problem.bound)
    value, wanted_value = fused(problem.readings()), problem.penalty(problem.weights(problem.readings()))
    assert value > 0.1
    torch.testing.assert_close(value, wanted_value, rtol=1e-11, atol=0)
    # An upstream gradient of its own, negative too, must reach every one of them.
    found, wanted = gradients(-3 * value, problem.leaves), gradients(-3 * wanted_value, problem.leaves)
    assert_same_gradients(found, wanted, 1e-10)
    assert sum(gradient.abs().max() > 1e-3 for gradient in found.values()) >= len(found) - 3


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("curvature", ["mean", "cross-layer"])
def test_gradients_are_central_differences(curvature, interpretation):
    problem = Problem(curvature, interpretation)
    found = gradients(FusedPenalty(problem.penalty, problem.bound)(problem.readings()), problem.leaves)
    for name, leaf in problem.leaves.items():
        direction = torch.randn_like(leaf)
        difference = central_difference(problem, leaf, direction)
        slope = (found[name] * direction).sum()
        torch.testing.assert_close(difference, slope, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("clipped", [True, False])
def test_a_net_that_clips_r_and_d(clipped):
    problem = Problem("mean", "brn")
    limits = {"r_max": 1.1, "d_max": 0.1} if clipped else {"r_max": 1e3, "d_max": 1e3}
    net = to_renorm(problem.net, **limits, warmup=0, r_steps=1, d_steps=1).double()
    for norm in norms_of(net).values():
        norm.num_batches_tracked.fill_(5)
        norm.running_mean += 0.5
    problem.bound = bind(net, [one.unit for one in problem.bound.values()])
    readings = problem.readings()
    assert any((reading.r == 1.1).any() for reading in readings.values()) == clipped
    fused = FusedPenalty(problem.penalty, problem.bound)
    value, wanted = fused(readings), problem.penalty(problem.weights(readings))
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=0)
    found = torch.autograd.grad(value, list(problem.leaves.values()), retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(wanted, list(problem.leaves.values())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


LAYERS = st.lists(
    st.tuples(
        st.sampled_from(["linear", "conv", "grouped", "none"]),
        st.booleans(),
        st.sampled_from(["bn", "bn without affine", "none"]),
        st.sampled_from([1e-5, 0.1]),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


class Drawn(nn.Module):
    """A drawn row of layers over [N, 4, 3]; a BN of it may be in evaluation mode while the others train."""

    def __init__(self, layers):
        super().__init__()
        self.parts = nn.ModuleList()
        self.still = []
        for layer, bias, norm, eps, still in layers:
            if layer == "linear":
                self.parts.append(nn.Linear(3, 3, bias=bias))
            elif layer != "none":
                self.parts.append(nn.Conv1d(4, 4, 1, bias=bias, groups=2 if layer == "grouped" else 1))
            # A BN over the second axis cannot be merged with a linear map of the last: it is one by itself.
            affine = norm == "bn" or layer in ("linear", "none")
            if norm != "none":
                self.parts.append(nn.BatchNorm1d(4, eps=eps, affine=affine))
                self.still += [self.parts[-1]] if still else []
            self.parts.append(nn.Tanh())
        self.parts.append(nn.Conv1d(4, 2, 3))

    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x.mean(2)


@settings(deadline=None, max_examples=40)
@given(layers=LAYERS, seed=st.integers(0, 2**31), interpretation=st.sampled_from(INTERPRETATIONS), frozen=st.booleans())
def test_any_row_of_layers(layers, seed, interpretation, frozen):
    torch.manual_seed(seed)
    net = randomise(Drawn(layers)).double()
    made = estimate(net, [(x.double(), y) for x, y in data(2, 5, (4, 3), classes=2)])
    penalty = Penalty(made.curvature, anchor_of(net, made.coverage.units), DAMPING)
    bound = bind(net, made.coverage.units)
    move(net)
    x = torch.randn(5, 4, 3, dtype=torch.float64, requires_grad=True)
    readings = {}
    if interpretation != "eval":
        for name, one in bound.items():
            if one.norm is not None and one.norm not in net.still:

                def read(module, inputs, name=name, one=one):
                    readings[name] = one.observe(inputs[0], interpretation)

                one.norm.register_forward_pre_hook(read)
    next(net.parameters()).requires_grad_(not frozen)
    net.train()(x)
    leaves = [x, *(p for p in net.parameters() if p.requires_grad)]
    value = FusedPenalty(penalty, bound)(readings)
    wanted = penalty({name: one.merged_weight(readings.get(name)) for name, one in bound.items()})
    torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-14)
    found = torch.autograd.grad(value, leaves, retain_graph=True, allow_unused=True)
    for a, b in zip(found, torch.autograd.grad(wanted, leaves, allow_unused=True), strict=True):
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        torch.testing.assert_close(*torch.broadcast_tensors(a.double(), b.double()), rtol=1e-8, atol=1e-9)


def random_blocks():
    def psd(size):
        root = torch.randn(2, size, size, dtype=torch.float64)
        return root.mT @ root

    low = torch.randn(2, 1, 4, dtype=torch.float64)
    scales = torch.rand(2, 3, 4, dtype=torch.float64)
    yield Kronecker((Term(psd(4), psd(3)), Term(low, psd(3), low_rank=True)))
    yield Diagonal(scales)
    yield eigenbasis(psd(4), psd(3))


@pytest.mark.parametrize("block", list(random_blocks()), ids=lambda block: type(block).__name__)
def test_adding_a_product_is_the_product_added(block):
    start, v = torch.randn(2, 2, 3, 4, dtype=torch.float64)
    out = start.clone()
    block.add_product(v, out)
    torch.testing.assert_close(out, start + block.product(v), rtol=1e-12, atol=1e-12)
    by_dense = (block.dense() @ v.mT.flatten(1)[:, :, None]).reshape(2, 4, 3).mT
    torch.testing.assert_close(out - start, by_dense, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kinds", ["dense", "root", "dense root", "dense root dense root", "dense dense dense"])
def test_adding_products_across_layers_is_the_dense_product_added(kinds):
    terms = []
    for kind in kinds.split():
        left, right = (torch.randn(1, 3, size, dtype=torch.float64) for size in (7, 5))
        terms.append(Term(left if kind == "root" else left.mT @ left, right.mT @ right, kind == "root"))
    joint = KhatriRao(tuple(terms), (2, 3), (4, 3))
    v = [torch.randn(1, c, d, dtype=torch.float64) for c, d in zip((2, 3), (4, 3), strict=True)]
    start = [torch.randn_like(one) for one in v]
    out = [one.clone() for one in start]
    joint.add_product(v, out)
    dense = joint.dense() @ torch.cat([one.mT.flatten() for one in v])
    found = torch.cat([(a - b).mT.flatten() for a, b in zip(out, start, strict=True)])
    torch.testing.assert_close(found, dense, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(7, 3), (4, 3, 5), (3, 2, 4, 5)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_statistics_and_their_gradient(shape, layout):
    if layout is torch.channels_last and len(shape) != 4:
        shape = (2, 3, 4, 5)
    h = torch.randn(shape, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    axes = [axis for axis in range(len(shape)) if axis != 1]
    mean, var = batch_statistics(h)
    torch.testing.assert_close(mean, h.mean(axes))
    torch.testing.assert_close(var, h.var(axes, correction=0))
    assert torch.autograd.gradcheck(batch_statistics, (h,))


def test_statistics_of_half_precision_are_read_in_single():
    h = (torch.randn(64, 3) + 5).bfloat16().requires_grad_()
    mean, var = batch_statistics(h)
    assert mean.dtype == var.dtype == torch.float32
    torch.testing.assert_close(var, h.float().var(0, correction=0), rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad((mean + var).sum(), h)
    assert gradient.dtype == torch.bfloat16
    wide = h.detach().float().requires_grad_()
    (wanted,) = torch.autograd.grad((wide.mean(0) + wide.var(0, correction=0)).sum(), wide)
    torch.testing.assert_close(gradient.float(), wanted, rtol=1e-2, atol=1e-3)


def test_the_transforms_of_torch_func_pass_through_a_watched_model():
    model, learner = started()
    x, y = target()[0]
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return F.cross_entropy(torch.func.functional_call(model, {**values, **buffers}, (x,)), y)

    found = torch.func.grad(loss)(parameters)
    learner.close()
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(found["0.weight"], model[0].weight.grad)


def test_a_later_call_does_not_change_the_gradients_of_an_earlier_one():
    model, learner = started()
    x = target()[0][0]
    model(x)
    first = learner.penalty()
    wanted = torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
    with torch.no_grad():
        model[6].bias.add_(1)
    model(x)
    learner.penalty()
    for _ in range(2):
        found = torch.autograd.grad(first, list(model.parameters()), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_population_statistics_are_those_of_before_the_forward_pass():
    model, learner = started(mlp(), damping=0.1)
    reference = {name: one.merged_weight() for name, one in learner._step.bound.items()}
    wanted = learner._step.quadratic(reference).detach()
    before = model[1].running_mean.clone()
    model(target()[0][0])
    assert not torch.equal(model[1].running_mean, before)
    torch.testing.assert_close(learner.penalty().detach(), wanted)


def test_never_negative_in_the_null_space():
    model, learner = started(made={"kind": "kfac"}, damping=0.0)
    for block in learner._step.quadratic.curvature.blocks.values():
        for term in block.terms:
            term.right.zero_()
            term.right.diagonal(dim1=1, dim2=2).fill_(-1e-9)
    model(target()[0][0])
    assert learner.penalty() == 0


def test_the_value_of_millions_of_numbers_keeps_its_digits():
    net = nn.Linear(1500, 1000, bias=False)
    units = find_units(net, torch.randn(2, 1500)).units
    ((name, anchor),) = anchor_of(net, units).items()
    curvature = Curvature({name: Diagonal(torch.rand_like(anchor))})
    move(net)
    value = FusedPenalty(Penalty(curvature, {name: anchor}), bind(net, units))({})
    moved = net.weight.detach().double() - anchor[0]
    wanted = (curvature.blocks[name].values[0].double() * moved**2).sum() / 2
    assert abs(value.double() / wanted - 1) < 1e-6


class Operations(TorchDispatchMode):
    """Counts the operations that compute something."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        views = ("view", "as_strided", "split", "unbind", "slice", "select", "expand", "detach", "empty", "t.", "alias")
        self.count += not func.is_view and not any(word in str(func) for word in views)
        return func(*args, **(kwargs or {}))


def operations(depth, at_once, bn=nn.BatchNorm1d):
    """Return how many operations more a step of a network of `depth` units with BN takes with the penalty."""
    layers = [part for _ in range(depth) for part in (nn.Linear(6, 6), bn(6), nn.ReLU())]
    model, learner = started(randomise(nn.Sequential(*layers, nn.Linear(6, 3))))
    x, y = target()[0]
    counts = []
    learner.objective(F.cross_entropy(model(x), y))  # the first step prepares what the others need
    for penalised in (True, False):
        model.zero_grad()
        if not penalised:
            learner.close()
        with Operations() as mode:
            loss = F.cross_entropy(model(x), y)
            if penalised and at_once:
                learner.backward(loss)
            else:
                (learner.objective(loss) if penalised else loss).backward()
        counts.append(mode.count)
    return counts[0] - counts[1]


def test_one_unit_more_costs_few_operations():
    few, many = operations(2, False), operations(6, False)
    assert many - few <= 4 * 10
    assert few <= 60
    few, many = operations(2, True), operations(6, True)
    assert many - few <= 4 * 5
    assert few <= 45


def test_a_renormalized_net_and_mixed_eps_agree_with_autograd_in_single_precision():
    model, learner = started(mlp(lambda size: BatchRenorm1d(size, eps=1e-5 * size, warmup=0, r_steps=1, d_steps=1)))
    x = target()[0][0]
    model(x)
    readings = dict(learner._step.readings.readings)
    wanted = learner._step.quadratic({n: one.merged_weight(readings.get(n)) for n, one in learner._step.bound.items()})
    torch.testing.assert_close(learner.penalty(), wanted)


def trained(beside, steps):
    """Return which steps used the side stream, and the state of a network after some steps with it or without."""
    torch.manual_seed(0)
    model, learner = started(randomise(Skipping()))
    leave_side_stream(learner, beside)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    covered = []
    for place, (x, y) in enumerate(target(count=steps)):
        model.skip = place == 1
        if place == 2:
            model(x)
        loss = F.cross_entropy(model.head(model.first(x)) if place == 3 else model(x), y)
        covered.append(learner._step._side.covers(learner._step.readings.readings))
        optimizer.zero_grad()
        learner.objective(loss).backward()
        optimizer.step()
    return covered, model.state_dict()


def test_a_side_stream_changes_no_number_and_is_left_where_a_bn_was_not_read_since_its_start():
    covered, found = trained(True, 6)
    nothing, wanted = trained(False, 6)
    assert covered == [True, False, True, False, True, True]
    assert not any(nothing)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("method", "options", "net"),
    [
        ("xkfac", {"interpretation": "bn"}, mlp),
        ("unmerged", {}, mlp),
        ("xkfac", {"interpretation": "eval"}, mlp),
        ("xkfac", {}, lambda: mlp(BatchRenorm1d)),
    ],
)
def test_there_is_no_side_stream_where_the_penalty_needs_activations(method, options, net):
    assert started(net(), method, **options)[1]._step._side is None
    assert started()[1]._step._side is not None


@pytest.mark.parametrize("method", ["own-bn", "ewc", "fixed-bn", "fixed-statistics"])
def test_a_side_stream_of_parameters_alone_is_left_where_they_changed_since_its_start(method):
    results = []
    for beside in (False, True):
        torch.manual_seed(0)
        model, learner = started(mlp(), method)
        leave_side_stream(learner, beside)
        x, y = target()[0]
        covered = []
        for change in (False, True, False):
            loss = F.cross_entropy(model(x), y)
            if change:
                move(model)
            covered.append(learner._step._side.covers(learner._step.readings.readings))
            learner.backward(loss.detach().requires_grad_() if change else loss)
            move(model)
        assert covered == [beside, False, beside]
        assert not learner._step._side.covers({})  # used up
        results.append((learner.last_penalty, [parameter.grad for parameter in model.parameters()]))
    assert results[0][0] > 0
    torch.testing.assert_close(*results, rtol=0, atol=0)


def step_of(build, method, options, beside):
    """Return the gradients of two steps in a row by `backward`, by `objective`, and by the penalty in its own words."""
    batches = [(x.double(), y) for x, y in target(count=2)]
    results = []
    for way in ("backward", "objective", "reference"):
        torch.manual_seed(0)
        balance = Balance(interval=1) if "balance" in options else None
        model = randomise(build()).double()
        made = {name: value for name, value in options.items() if name != "balance"}
        memory = xkfac.consolidate(model, [(x.double(), y) for x, y in data()], method)
        learner = Learner(model, memory, damping=0.1, importance=(0.7, 0.4), strength=2.0, balance=balance, **made)
        leave_side_stream(learner, beside)
        learner.begin(recentre=False)
        move(model.train())
        values = []
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            if way == "backward":
                learner.backward(loss)
            elif way == "objective":
                learner.objective(loss).backward()
            else:
                read = learner._step.readings.take()
                weights = {name: one.merged_weight(read.get(name)) for name, one in learner._step.bound.items()}
                learner.last_penalty = learner._step.quadratic(weights)
                source, aim = learner._factors(None)
                (source * learner.last_penalty + aim * loss).backward()
                learner.last_penalty = learner.last_penalty.detach()
                if balance is not None:
                    learner._rebalance(loss)
            values.append(learner.last_penalty)
        results.append((values, {name: p.grad for name, p in model.named_parameters()}))
    return results


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("build", "method", "options"),
    [
        (Alike, "xkfac", {}),
        (Alike, "xkfac", {"interpretation": "bn"}),
        (Alike, "xkfac", {"interpretation": "const"}),
        (Alike, "xkfac", {"interpretation": "eval"}),
        (Alike, "xkfac", {"balance": True}),
        (Alike, "ewc", {}),
        (Alike, "own-bn", {}),
        (Alike, "corrected", {}),
        (Alike, "unmerged", {}),
        (lambda: mlp(BatchRenorm1d), "xkfac", {}),
        (mlp, "kfac", {}),
    ],
)
def test_a_backward_pass_at_once_is_that_of_the_objective(build, method, options, beside):
    found, objective, reference = step_of(build, method, options, beside)
    assert all(value > 1e-3 for value in found[0])
    for other in (objective, reference):
        torch.testing.assert_close(found[0], other[0], rtol=1e-10, atol=1e-12)
        for name, gradient in other[1].items():
            assert (gradient is None) == (found[1][name] is None), name
            if gradient is not None:
                torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-11, msg=name)


def test_a_parameter_that_the_loss_does_not_reach_gets_the_gradient_of_the_penalty():
    model, learner = started(damping=0.1)
    x, y = target()[0]
    hidden = model[:6](x)
    learner.backward(F.cross_entropy(hidden[:, :3], y))
    assert model[6].weight.grad.abs().max() > 1e-4
    before = model[6].weight.grad.clone()
    learner.backward(F.cross_entropy(model[:6](x)[:, :3], y))
    assert not torch.equal(model[6].weight.grad, before)


def test_gradients_of_a_parameter_of_several_units_add_up():
    one, two, three, sparse = (nn.Parameter(torch.zeros(3)) for _ in range(4))
    one.grad, three.grad, sparse.grad = torch.full((3,), 0.5), torch.ones(3), torch.ones(3).to_sparse()
    parts = [torch.full((3,), float(2**place)) for place in range(6)]
    accumulate(
        [(one, parts[0]), (two, parts[1]), (one, parts[2]), (two, parts[3]), (one, parts[4]), (sparse, parts[5])]
    )
    assert one.grad.tolist() == [21.5] * 3
    assert two.grad.tolist() == [10.0] * 3
    assert three.grad.tolist() == [1.0] * 3
    assert sparse.grad.tolist() == [33.0] * 3


class Images(nn.Module):
    """Convolutions with BN, one alone with a bias, one with neither, grouped ones, and 1x1."""

    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.three = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Tanh())
        self.grouped = nn.Sequential(nn.Conv2d(4, 6, (3, 1), groups=2), nn.BatchNorm2d(6), nn.Tanh())
        self.plain = nn.Conv2d(6, 5, 2)
        self.bare = nn.Conv2d(5, 4, 2, bias=False)
        self.last = nn.Sequential(nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3))

    def forward(self, x):
        x = self.bare(torch.tanh(self.plain(self.grouped(self.three(self.two(self.one(x)))))))
        return self.last(torch.tanh(x)).mean((2, 3))


@pytest.mark.parametrize("row", [1, 8])
@pytest.mark.parametrize("curvature", [name for name in CURVATURES if name != "cross-layer"])
def test_where_channels_lie_last_in_memory_numbers_are_the_same_and_no_weight_is_copied(curvature, row, monkeypatch):
    monkeypatch.setitem(ROW, "cpu", row)
    torch.manual_seed(0)
    net = randomise(Images()).double()
    batches = [(x.double(), y) for x, y in data(3, 8, (3, 6, 6))]
    made = estimate(net, batches, **CURVATURES[curvature])
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        other = copy.deepcopy(net).to(memory_format=layout)
        penalty = Penalty(made.curvature, anchor_of(net, made.coverage.units), 0.1)
        move(other)
        fused = FusedPenalty(penalty, bind(other, made.coverage.units))
        value, found = fused.value_and_gradients({}, 0.5)
        results.append((value, {id(p): g for p, g in found}, other))
        for parameter, gradient in found:
            if parameter.dim() == 4 and layout is torch.channels_last and parameter is not other.bare.weight:
                assert gradient.stride() == parameter.stride() or 1 in parameter.shape[1:]
    (value, plain, one), (same, last, two) = results
    torch.testing.assert_close(same, value, rtol=1e-12, atol=0)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        if id(a) in plain:
            torch.testing.assert_close(last[id(b)], plain[id(a)], rtol=1e-10, atol=1e-14)
        else:
            assert id(b) not in last


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("beside", [True, False])
def test_a_backward_pass_at_once_on_a_gpu_is_that_on_the_cpu(beside):
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = randomise(Everything()).double()
        memory = xkfac.consolidate(model, [(x.double(), y) for x, y in data(2, 8, (2, 7, 7))], "xkfac")
        move(model.train())
        model.to(device)
        learner = Learner(model, memory, damping=0.1, penalty_every=1)
        leave_side_stream(learner, beside)
        learner.load_state_dict({"begun": True, "balance": None})
        for x, y in target(count=3, shape=(2, 7, 7)):
            learner.backward(F.cross_entropy(model(x.double().to(device)), y.to(device)))
        results.append((learner.last_penalty.cpu(), [p.grad.cpu() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-8, atol=1e-10)


def test_a_learner_that_refuses_a_network_leaves_no_hook_on_it():
    model = mlp()
    memory = xkfac.consolidate(model, data(), "xkfac")
    model[4] = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model[4])
    with pytest.raises(xkfac.XkfacError, match="is a SyncBatchNorm, whose statistics one process cannot read"):
        Learner(model, memory)
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert "forward" not in vars(module)
