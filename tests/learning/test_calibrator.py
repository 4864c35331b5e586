"""Calibration: the scale it finds against known ones, the real rise against the divergence, files, traces, errors."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import xkfac
from tests.helpers.setups import Everything, data, gradients, mlp, move, randomise, target
from xkfac import Learner, Memory, calibrate, consolidate, files
from xkfac.calibration import RISE, Calibration, CurvePoint, radius_of, scale_of
from xkfac.curvature.operator import Curvature
from xkfac.errors import MemoryFileError, MismatchError, XkfacError
from xkfac.learning import calibrator
from xkfac.learning.calibrator import _path, _ProxyTask, _Source
from xkfac.model.batches import default_forward
from xkfac.model.merged_weight import bind

CALIBRATION = Calibration(20.0, 0.03, (CurvePoint(0.01, 0.15), CurvePoint(0.03, 0.7)), 256, (16.0, 25.0))


@pytest.fixture
def quick(monkeypatch):
    """Have paths short enough for a test."""
    monkeypatch.setattr(calibrator, "LONGEST", 8)


def points(*pairs):
    return [CurvePoint(*pair) for pair in pairs]


def weaker(memory, factor):
    """Return a memory whose curvature is `factor` times too small."""
    blocks = {name: block.scale(1 / factor) for name, block in memory.curvature.blocks.items()}
    return replace(memory, curvature=Curvature(blocks))


def everything_about(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flags = [(m.training, getattr(m, "track_running_stats", None), len(m._forward_pre_hooks)) for m in model.modules()]
    grads = [(p.requires_grad, p.grad) for p in model.parameters()]
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}, flags, grads, torch.get_rng_state()


def test_scale_is_the_ratio_at_a_stated_rise():
    assert scale_of(points((0.1, 0.2), (0.3, 0.6))) == pytest.approx(2)
    # Ratios 1 and 16 at half and at four times the rise, a third of the way in logarithms: 16 ** (1 / 3).
    assert scale_of(points((RISE / 2, RISE / 2), (RISE / 4, 4 * RISE))) == pytest.approx(16 ** (1 / 3))
    # Points beyond the two that are next to the rise, or without a ratio, do not count.
    far = points((1e-9, RISE / 8), (RISE, 90 * RISE), (1.0, -1.0), (0.0, 1.0))
    assert scale_of([*far, *points((RISE / 6, RISE / 2), (RISE / 2, 2 * RISE))]) == pytest.approx(12**0.5)
    assert scale_of(points((RISE / 30, RISE / 10), (RISE / 50, RISE / 100))) == pytest.approx(3)
    assert math.isnan(scale_of(points((1.0, -1.0))))


def test_the_scale_of_several_tasks_is_their_geometric_mean_and_the_spread_is_shown():
    found = Calibration.of([points((0.1, 0.2)), points((0.05, 0.4))], 1200)
    assert (found.scale, found.scales) == (pytest.approx(4), (pytest.approx(2), pytest.approx(8)))
    assert found.curve == tuple(points((0.05, 0.4), (0.1, 0.2)))
    assert str(found) == "scale 4 (2 to 8 over 2 made-up tasks), radius 0.1, measured on 1,200 examples"


def test_radius_ends_before_the_first_point_that_is_underrated():
    curve = points((0.4, 100.0), (0.1, 0.15), (0.2, 0.2), (0.3, 0.05))
    assert radius_of(curve, 1.0) == 0.3
    assert radius_of(curve, 1000.0) == 0.4
    assert radius_of(curve, 0.7) == 0.0
    assert radius_of(points((0.1, 0.1), (0.2, 0.5), (0.3, 0.3)), 1.0) == 0.1


@pytest.mark.parametrize("factor", [1.0, 9.0, 0.2])
def test_a_penalty_that_is_exact_but_for_a_factor_is_scaled_by_it(factor):
    # One linear layer and a Gaussian: the divergence is quadratic, and A (x) H' is its exact curvature.
    model = nn.Linear(6, 3)
    batches = data(6, 40)
    options = {"likelihood": xkfac.Gaussian(0.5), "labels": "exact"}
    memory = weaker(consolidate(model, batches, "kfac", **options), factor)
    held_out = [batch for batch in batches for _ in range(2)]  # measures on what the curvature was made from
    found = calibrate(model, memory, held_out).calibration
    assert found.scales == pytest.approx((factor,) * 3, rel=1e-3)
    assert found.radius == max(point.predicted for point in found.curve)
    assert found.examples == 240


def test_real_is_the_divergence_of_what_the_network_said_before():
    model = randomise(Everything()).eval()
    batches = data(8, 50, (2, 9, 9))
    memory = consolidate(model, batches[:2], "xkfac", draws=1)
    source = _Source(model, memory, default_forward, batches, seed=0)
    moved = copy.deepcopy(model)
    move(moved)
    with torch.no_grad():
        x = torch.cat([x for x, _ in batches])
        before, now = model(x).log_softmax(1), moved.eval()(x).log_softmax(1)
    divergence = F.kl_div(now, before, reduction="batchmean", log_target=True).item()
    point = source.point(moved)
    assert divergence > 1e-3
    assert point.real == pytest.approx(divergence, rel=1e-4)
    displacement = {n: b.merged_weight() - memory.anchor[n] for n, b in bind(moved, memory.units).items()}
    assert point.predicted == pytest.approx(memory.curvature.quadratic(displacement).item(), rel=1e-4)
    assert source.point(model).real == 0


def test_real_is_the_divergence_per_prediction_where_an_example_has_several():
    model = randomise(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 3, 1))).eval()
    batches = data(2, 6, (2, 5, 5))
    source = _Source(model, consolidate(model, batches, draws=1), default_forward, batches, seed=0)
    moved = copy.deepcopy(model)
    move(moved)
    with torch.no_grad():
        before, now = (net(torch.cat([x for x, _ in batches])).log_softmax(1) for net in (model, moved))
    divergence = F.kl_div(now, before, reduction="none", log_target=True).sum(1).mean()
    assert source.point(moved).real == pytest.approx(divergence.item(), rel=1e-4)


def test_the_readout_is_linear_in_standardised_outputs_and_on_their_scale():
    model, batches = nn.Linear(6, 3).double(), [(x.double(), y) for x, y in data(2)]
    with torch.no_grad():
        model.weight.mul_(torch.tensor([[1.0], [10.0], [100.0]]))
        task = _ProxyTask(model, xkfac.Gaussian(), default_forward, batches, 0)
        outputs = torch.cat([model(x) for x, _ in batches])
        std, mean = torch.std_mean(outputs, 0, correction=0)
        readout = torch.randn(3, 4).double()
        answers = ((outputs - mean) / std @ readout[:, :3].T + readout[:, 3]) * std + mean
        expected = (answers[8:] - task.labels[1]).square().sum(1).mean() / 2
        torch.testing.assert_close(task.loss(model, readout, 1), expected)


def test_the_path_descends_the_proxy_s_objective_and_leaves_what_is_not_covered():
    model = mlp().eval()
    memory = consolidate(model, data(), "xkfac", exclude=["6"])
    task = _ProxyTask(model, memory.likelihood, default_forward, data(4, 16), 0)
    *_, (_, network) = _path(model, memory, task, 0.5)
    changed = {name for name, p in network.named_parameters() if (p - model.get_parameter(name)).abs().max() > 1e-6}
    # All but the head, and a bias in front of a BN, which nothing moves.
    assert changed == {name for name, _ in model.named_parameters() if not name.startswith("6.") and name != "3.bias"}
    # Read by the best readout, the answers are nearer than where learning began.
    readout = task.readout()
    with torch.no_grad():
        start = sum(task.loss(model, readout, index) for index in range(4)).item() / 4
    optimizer = torch.optim.LBFGS([readout], max_iter=100)
    network.eval().requires_grad_(False)

    def closure():
        optimizer.zero_grad()
        loss = sum(task.loss(network, readout, index) for index in range(4)) / 4
        loss.backward()
        return loss

    optimizer.step(closure)
    assert closure().item() < start - 0.02


@pytest.mark.parametrize(
    ("model", "batches", "options"),
    [
        (Everything, data(4, 6, (2, 9, 9)), {}),
        (mlp, data(4), {"method": "ewc"}),
        (mlp, data(4), {"method": "fixed-bn"}),
        (mlp, data(4), {"method": "unmerged"}),
        (mlp, data(4), {"likelihood": "bernoulli"}),
        (lambda: nn.Sequential(mlp(), nn.Flatten(0), nn.Unflatten(0, (-1, 3))).double(), None, {}),
        (lambda: nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), data(4), {"likelihood": "gaussian"}),
        (lambda: nn.Conv1d(6, 3, 1), data(4, shape=(6, 5)), {}),
    ],
    ids=["everything", "ewc", "fixed-bn", "unmerged", "bernoulli", "float64", "one number", "positions"],
)
def test_any_network_method_and_likelihood_leaves_no_trace(model, batches, options, quick):
    model = model().train()
    batches = batches or [(x.double(), y) for x, y in data(4)]
    memory = consolidate(model, batches, **{"method": "xkfac", **options})
    before = everything_about(model)
    found = calibrate(model, memory, iter(batches), tasks=1).calibration
    after = everything_about(model)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1:3] == after[1:3]
    assert torch.equal(before[3], after[3])
    assert 0 < found.scale < math.inf
    assert found == calibrate(model, memory, batches, tasks=1).calibration
    assert found != calibrate(model, memory, batches, tasks=1, seed=1).calibration


def test_proxy_is_learnt_from_in_place_of_held_out_batches(quick):
    model = mlp()
    memory = consolidate(model, data(), "xkfac")
    own = calibrate(model, memory, data(5), tasks=1).calibration
    assert own.examples == 3 * 8
    given = calibrate(model, memory, data(5), proxy=target(), tasks=1).calibration
    assert given.examples == 5 * 8
    far = calibrate(model, memory, data(5), proxy=target(shift=3.0), tasks=1).calibration
    assert given.curve != far.curve
    assert calibrate(model, memory, data(5), proxy=target(), max_batches=2, tasks=1).calibration.examples == 2 * 8


def test_a_loader_may_write_each_batch_where_the_last_one_was(quick):
    model, batches = mlp(), data(4)
    memory = consolidate(model, batches)

    def reusing():
        place = torch.empty_like(batches[0][0])
        for x, y in batches:
            yield place.copy_(x), y

    scales = [calibrate(model, memory, loader, tasks=1).calibration.scale for loader in (batches, reusing())]
    assert scales[0] == scales[1]


def test_steps_that_are_too_long_are_shortened(monkeypatch):
    model = mlp()
    memory = consolidate(model, data(8, 16), "xkfac")
    monkeypatch.setattr(calibrator, "LR", 1e3)
    found = calibrate(model, memory, data(8, 16), tasks=1).calibration
    assert all(math.isfinite(point.real) and point.real < 1 for point in found.curve)
    monkeypatch.setattr(calibrator, "LR", 1e30)
    with pytest.raises(XkfacError, match="diverges even at a learning rate of"):
        calibrate(model, memory, data(8, 16), tasks=1)


def test_the_scale_does_not_depend_on_learning_rate_and_number_of_steps(monkeypatch):
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    x, y = (torch.tensor(x, dtype=torch.float32) - 8) / 8, torch.tensor(y)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for rows in torch.randperm(1000).repeat(10).split(50):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    held_out = list(zip(x[1000:].split(64), y[1000:].split(64), strict=True))
    memory = consolidate(model, held_out)
    scales = []
    for lr, shortest, seed in ((0.2, 8, 0), (0.05, 32, 0), (0.2, 8, 9)):
        monkeypatch.setattr(calibrator, "LR", lr)
        monkeypatch.setattr(calibrator, "SHORTEST", shortest)
        scales.append(calibrate(model, memory, held_out, seed=seed).calibration.scale)
    assert max(scales) < 1.15 * min(scales)


def test_strength_left_out_is_the_scale_of_the_memory():
    model = mlp()
    memory = replace(consolidate(model, data(), "xkfac"), calibration=CALIBRATION)
    found = []
    for strength in (None, 20.0):
        copied = copy.deepcopy(model)
        with Learner(copied, memory, strength=strength) as learner:
            learner.begin(target())
            move(copied)
            found.append(gradients(copied.train(), learner))
            assert learner.strength == 20.0
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_calibration_is_kept_by_finish_and_files(tmp_path):
    model = mlp()
    memory = replace(consolidate(model, data(), "xkfac"), calibration=CALIBRATION)
    memory.save(tmp_path / "m", torch.bfloat16)
    assert Memory.load(tmp_path / "m").calibration == CALIBRATION
    assert "scale 20 (16 to 25 over 2 made-up tasks)" in repr(memory)
    with Learner(model, memory) as learner:
        learner.begin(target())
        learner.penalty()
        assert learner.finish(target()).calibration == CALIBRATION
    consolidate(mlp(), data(), "xkfac").save(tmp_path / "none")
    assert Memory.load(tmp_path / "none").calibration is None


def rewritten(path, change):
    description, tensors = files.read(path)
    description = json.loads(json.dumps(description))
    change(description)
    files.write(path, description, tensors)


def test_a_file_with_a_damaged_calibration_is_refused(tmp_path):
    path = tmp_path / "m"
    replace(consolidate(mlp(), data(), "xkfac"), calibration=CALIBRATION).save(path)
    for change in (
        {"scale": -1.0},
        {"scales": [0.0]},
        {"scales": 3.0},
        {"scale": math.inf},
        {"radius": math.nan},
        {"curve": [{}]},
        {"examples": None},
    ):
        rewritten(path, lambda found, change=change: found["calibration"].update(change))
        with pytest.raises(MemoryFileError, match="damaged"):
            Memory.load(path)
        rewritten(path, lambda found: found.update(calibration=json.loads(json.dumps(_entry()))))
    assert Memory.load(path).calibration == CALIBRATION


def _entry():
    curve = [{"predicted": point.predicted, "real": point.real} for point in CALIBRATION.curve]
    return {**vars(CALIBRATION), "curve": curve}


def test_errors_name_the_remedy():
    model = mlp()
    memory = consolidate(model, data(), "xkfac")
    with pytest.raises(XkfacError, match="strength must be a number of at least 0, not 'calibrated'"):
        Learner(model, memory, strength="calibrated")
    with pytest.raises(XkfacError, match="'fine-tuning' has no penalty"):
        calibrate(model, consolidate(model, data(), "fine-tuning"), data())
    with pytest.raises(XkfacError, match="gave a single one"):
        calibrate(model, memory, data(1))
    with pytest.raises(XkfacError, match="more than one example"):
        calibrate(model, memory, data(4, 1))
    with pytest.raises(XkfacError, match="tasks of a calibration"):
        calibrate(model, memory, data(), tasks=0)
    move(model)
    before = everything_about(model)
    with pytest.raises(MismatchError, match="away from those that the memory was made from"):
        calibrate(model, memory, data())
    after = everything_about(model)
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1] == after[1]


def test_inside_autocast_copies_learn_from_their_own_weights():
    """Autocast keeps the weights it has rounded, and a copy that has taken a step would not be seen to move."""
    model, batches = mlp(), data(count=4, size=16)
    memory = consolidate(model, batches)
    plain = calibrate(model, memory, batches).calibration.scale
    with torch.autocast("cpu", torch.bfloat16):
        assert calibrate(model, memory, batches).calibration.scale == pytest.approx(plain, rel=0.2)
