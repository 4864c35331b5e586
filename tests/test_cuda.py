"""On a GPU: a whole training step as a CUDA graph, and without a synchronisation."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.setups import Everything, bare, data, leave_side_stream, randomise
from xkfac import METHODS, Balance, Calibration, Learner, Router, consolidate, give_task_norms
from xkfac.errors import NotFiniteError, XkfacError, XkfacWarning
from xkfac.learning.step_guard import INTERVAL
from xkfac.penalty.layout import Rounded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Step:
    """A training step with everything that a user may switch on: balance, momentum, weight decay."""

    def __init__(self, model, memory):
        self.model = model.train()
        self.learner = Learner(model, memory, damping=1e-3, balance=Balance(interval=2))
        self.optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)

    def __call__(self, x, y):
        self.optimizer.zero_grad()
        objective = self.learner.objective(F.cross_entropy(self.model(x), y))
        objective.backward()
        self.optimizer.step()
        return objective.detach()

    def tensors(self):
        return {**self.model.state_dict(), **self.learner.balance.state_dict()}


def batches(count, **options):
    return [(x.cuda(), y.cuda()) for x, y in data(count, 8, (2, 7, 7), **options)]


def pair(method="xkfac", **made):
    """Return two steps at the same state on the GPU."""
    model = randomise(Everything()).cuda()
    memory = consolidate(model, batches(2), method, **made)
    first = Step(model, memory)
    first.learner.begin(batches(2, shift=1.0, seed=1))
    second = Step(bare(copy.deepcopy(model)), memory)
    second.learner.load_state_dict(first.learner.state_dict())
    return first, second


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "made", [{}, {"form": "mean"}, {"kind": "corrected"}, {"cross_layer": True}, {"method": "own-bn"}]
)
def test_replays_of_a_captured_step_are_eager_steps(made, beside):
    eager, captured = pair(**made)
    leave_side_stream(captured.learner, beside)
    x, y = (tensor.clone() for tensor in batches(1, seed=2)[0])
    start = {name: tensor.clone() for name, tensor in captured.tensors().items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            captured(x, y)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        objective = captured(x, y)
    for name, tensor in captured.tensors().items():
        tensor.copy_(start[name])
    for state in captured.optimizer.state.values():
        state["momentum_buffer"].zero_()
    alphas = set()
    for new_x, new_y in batches(8, shift=1.0, seed=3):
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        torch.testing.assert_close(objective, eager(new_x, new_y), rtol=1e-4, atol=1e-5)
        for name, tensor in eager.tensors().items():
            torch.testing.assert_close(captured.tensors()[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
        alphas.add((eager.learner.balance.alpha_s.item(), eager.learner.balance.alpha_t.item()))
    assert len(alphas) > 1
    assert captured.learner.last_penalty > 0


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "made",
    [{}, {"form": "paper"}, {"kind": "corrected"}, {"kind": "diagonal"}, {"cross_layer": True}, {"method": "own-bn"}],
)
def test_fused_gradients_are_those_of_autograd(made, beside):
    step, _ = pair(**made)
    for x, y in batches(4, seed=2):
        step(x, y)
    model, learner = step.model.double(), step.learner
    learner.close()
    learner = Learner(model, learner.memory, damping=1e-3)
    leave_side_stream(learner, beside)
    learner.load_state_dict({"begun": True, "balance": None})
    for x, _ in batches(3, seed=4):
        model(x.double())
        readings = dict(learner._step.readings.readings)
        fused = learner.penalty()
        weights = {name: one.merged_weight(readings.get(name)) for name, one in learner._step.bound.items()}
        reference = learner._step.quadratic(weights)
        assert reference > 0
        torch.testing.assert_close(fused, reference, rtol=1e-9, atol=1e-12)
        parameters = list(model.parameters())
        found = torch.autograd.grad(fused, parameters, retain_graph=True, allow_unused=True)
        for one, two in zip(found, torch.autograd.grad(reference, parameters, allow_unused=True), strict=True):
            assert (one is None) == (two is None)
            if one is not None:
                torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-10)


def test_a_side_stream_whose_backward_pass_comes_after_the_next_start():
    """Memory of a side stream must not be used again while the main stream reads it."""
    results = []
    for beside in (False, True):
        torch.manual_seed(0)
        step, _ = pair()
        leave_side_stream(step.learner, beside)
        (x, y), (z, w) = batches(2, seed=2)
        for _ in range(20):
            first = step.learner.objective(F.cross_entropy(step.model(x), y))
            loss = F.cross_entropy(step.model(z), w)
            first.backward()
            step.learner.objective(loss).backward()
        results.append([parameter.grad.clone() for parameter in step.model.parameters()])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_a_step_does_not_synchronise(method):
    step, _ = pair(method)
    (x, y), *_ = batches(1, seed=2)
    step(x, y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(tensor.isfinite().all() for tensor in step.tensors().values())


@pytest.mark.parametrize("beside", [False, True])
def test_a_look_at_the_penalty_does_not_synchronise_and_finds_what_is_not_finite(beside):
    model = randomise(Everything()).cuda()
    memory = replace(consolidate(model, batches(2), "xkfac"), calibration=Calibration(1.0, 0.0, (), 1))
    step = Step(model, memory)
    leave_side_stream(step.learner, beside)
    step.learner.begin(batches(2, shift=1.0, seed=1))
    (x, y), *_ = batches(1, seed=2)
    step(x, y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.warns(XkfacWarning, match="beyond the radius 0"):
            many(step, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.no_grad():
        model.head.weight.fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="the steps are too long for the penalty"):
        many(step, x, y)


def many(step, x, y):
    """Take steps over several looks at the penalty."""
    for _ in range(6 * INTERVAL):
        step(x, y)


def test_the_value_on_the_gpu_is_that_on_the_cpu():
    step, _ = pair()
    other = copy.deepcopy(step.model).cpu()
    step.learner.close()
    with torch.no_grad():
        for one, two in zip(step.model.parameters(), other.parameters(), strict=True):
            two.add_(0.05 * torch.randn_like(two))
            one.copy_(two)
    values = []
    for model in (step.model, other):
        learner = Learner(bare(model), step.learner.memory)
        learner.load_state_dict({"begun": True, "balance": None})
        x, y = (tensor.to(next(model.parameters()).device) for tensor in batches(1, seed=2)[0])
        learner.objective(F.cross_entropy(model(x), y))
        values.append(learner.last_penalty.cpu())
    torch.testing.assert_close(values[0], values[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "kind", [{"method": "kfac"}, {"form": "mean"}, {"form": "paper"}, {"grouping": "hierarchical"}]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_factors_of_bfloat16_products_are_near_those_of_float32(kind, layout, graph):
    model = randomise(Everything()).cuda().to(memory_format=layout)
    before, found = torch.get_float32_matmul_precision(), []
    try:
        for coarse in (False, True):
            torch.set_float32_matmul_precision("medium" if coarse else "highest")
            options = {"labels": "empirical", "graph": graph, **kind}
            large = [(x.repeat(40, 1, 1, 1).to(memory_format=layout), y.repeat(40)) for x, y in batches(3)]
            found.append(consolidate(model, large, **{"method": "xkfac", **options}).curvature)
    finally:
        torch.set_float32_matmul_precision(before)
    different = False
    for (name, one), (_, other) in zip(*(curvature.tensors() for curvature in found), strict=True):
        assert other.dtype == torch.float32
        assert (one - other).norm() <= 0.01 * one.norm(), name
        different |= not torch.equal(one, other)
    assert different


@pytest.mark.parametrize("made", [{"form": "paper"}, {"grouping": "hierarchical"}, {"method": "kfac"}])
def test_products_of_bfloat16_are_near_those_of_float32(made):
    model = randomise(Everything()).cuda()
    memory = consolidate(model, batches(2), **{"method": "xkfac", **made})
    x, y = batches(1, seed=2)[0]
    before, found = torch.get_float32_matmul_precision(), []
    start = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    moves = [0.05 * torch.randn_like(parameter) for parameter in model.parameters()]
    try:
        for precision in ("highest", "medium"):
            model.load_state_dict(start)
            torch.set_float32_matmul_precision(precision)
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), moves)
            learner = Learner(model.train(), memory)
            learner.load_state_dict({"begun": True, "balance": None})
            assert any(isinstance(block, Rounded) for block, _ in learner._step._fused._products._parts) == (
                precision == "medium"
            )
            model.zero_grad()
            learner.backward(0 * F.cross_entropy(model(x), y))
            found.append((learner.last_penalty, torch.cat([p.grad.flatten() for p in model.parameters()])))
            learner.close()
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0.02, atol=0)
    assert (found[1][1] - found[0][1]).norm() < 0.02 * found[0][1].norm()


def test_an_interval_of_several_steps_cannot_be_captured():
    model = randomise(Everything()).cuda().train()
    learner = Learner(model, consolidate(model, batches(2)), penalty_every=2)
    learner.load_state_dict({"begun": True, "balance": None})
    (x, y), *_ = batches(1)
    loss = F.cross_entropy(model(x), y)
    with (
        pytest.raises(XkfacError, match="make the Learner with penalty_every=1"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        learner.objective(loss)
    assert Learner(model, learner.memory)._step.interval.every == 1


def test_a_router_waits_for_the_device_once_per_call():
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    net = torch.nn.Sequential(*layers).cuda().eval()
    give_task_norms(net, ["low", "high"])
    router, x = Router(net), torch.randn(64, 6, device="cuda")
    router.add_task("low", [x])
    router.add_task("high", [x + 9])
    mixed = torch.cat([x, x + 9])
    with torch.no_grad():
        router(mixed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            found = router(mixed, unknown=0.01)
            torch.cuda.set_sync_debug_mode("default")
    assert sum("synchroniz" in str(one.message) for one in caught) <= 1
    assert found.outputs.shape == (128, 3)
