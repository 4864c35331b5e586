"""Nothing merged: w, gamma, beta, mu and sigma penalised one by one, against definitions written with loops."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from tests.helpers.memories import assert_equal
from tests.helpers.setups import Everything, data, mlp, move, randomise, target
from xkfac.curvature.blocks import Diagonal
from xkfac.model.merged_weight import INTERPRETATIONS, bind
from xkfac.model.passes import norms_of
from xkfac.model.recentre import recentre
from xkfac.model.renorm import _BatchRenorm
from xkfac.model.units import Unit

DOUBLE = torch.float64


def perceptron(norm=nn.BatchNorm1d, **options):
    return nn.Sequential(
        nn.Linear(3, 4), norm(4, **options), nn.Tanh(), nn.Linear(4, 3, bias=False), norm(3, **options), nn.Tanh(),
        nn.Linear(3, 3),
    )  # fmt: skip


def renormalised(**limits):
    """Return a perceptron with batch renormalization at the end of its schedule."""
    net = perceptron(xkfac.BatchRenorm1d, warmup=0, r_steps=1, d_steps=1, **limits)
    for norm in norms_of(net).values():
        norm.num_batches_tracked.fill_(7)
    return net


def convolutional():
    return nn.Sequential(
        nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 4, 2, groups=2), nn.BatchNorm2d(4, eps=0.1), nn.Tanh(),
        nn.Conv2d(4, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


NETS = {
    "linear": (perceptron, (3,)),
    "conv": (convolutional, (2, 3, 3)),
    "no affine": (lambda: perceptron(affine=False), (3,)),
    "renorm": (lambda: renormalised(r_max=1e6, d_max=1e6), (3,)),
    "clipped renorm": (lambda: renormalised(r_max=1.05, d_max=0.05), (3,)),
}


def build(name, sizes=(4, 3)):
    """Return a net in float64 and batches."""
    make, shape = NETS[name]
    return randomise(make()).double(), [torch.randn(size, *shape, dtype=DOUBLE) * 1.5 + 0.4 for size in sizes]


def statistics(h):
    """Return mean and variance of every channel, one channel after the other."""
    values = [h[:, channel].flatten() for channel in range(h.shape[1])]
    means = [one.sum() / len(one) for one in values]
    return torch.stack(means), torch.stack(
        [((one - m) ** 2).sum() / len(one) for one, m in zip(values, means, strict=True)]
    )


def correction(norm, mean, var, clipped):
    """Return r and d of batch renormalization."""
    sigma = torch.sqrt(norm.running_var + norm.eps)
    r, d = torch.sqrt(var + norm.eps) / sigma, (mean - norm.running_mean) / sigma
    return (r.clamp(1 / norm.r_max, norm.r_max), d.clamp(-norm.d_max, norm.d_max)) if clipped else (r, d)


def affine(norm):
    gamma = torch.ones_like(norm.running_mean) if norm.weight is None else norm.weight
    return gamma, torch.zeros_like(norm.running_mean) if norm.bias is None else norm.bias


def applied(norm, h, of_batch=True):
    """Return mu and sigma of y = gamma (h - mu) / sigma + beta as a BN or BRN applies it to h."""
    if not of_batch:
        return norm.running_mean, torch.sqrt(norm.running_var + norm.eps)
    mean, var = statistics(h)
    sigma = torch.sqrt(var + norm.eps)
    if isinstance(norm, _BatchRenorm):
        r, d = correction(norm, mean, var, clipped=True)
        sigma = sigma / r
        mean = mean - d * sigma
    return mean, sigma


def with_leaves(net, x, place, of_batch):
    """Return the output of a net whose BN at `place` is written out, and its gamma, beta, mu and sigma as leaves."""
    net = copy.deepcopy(net).train(of_batch)
    h = net[:place](x)
    leaves = [t.detach().clone().requires_grad_() for t in (*affine(net[place]), *applied(net[place], h, of_batch))]
    gamma, beta, mu, sigma = (leaf.view(-1, *[1] * (h.dim() - 2)) for leaf in leaves)
    return net[place + 1 :](gamma * (h - mu) / sigma + beta), leaves


def brute_force(net, batches, place, of_batch=True):
    """Return the Fisher's diagonal [C, 1, 4]: the mean of squared gradients over examples and the model's labels."""
    total, examples = 0, sum(x.shape[0] for x in batches)
    for x in batches:
        output, leaves = with_leaves(net, x, place, of_batch)
        plain = copy.deepcopy(net).train(of_batch)(x)
        torch.testing.assert_close(output, plain, rtol=1e-10, atol=1e-10)
        log_p = output.log_softmax(1)
        for n in range(x.shape[0]):
            for label in range(log_p.shape[1]):
                gradients = torch.autograd.grad(-log_p[n, label], leaves, retain_graph=True)
                total = total + log_p[n, label].exp().detach() * torch.stack(gradients, 1).square() / examples
    return total[:, None, :]


@pytest.mark.parametrize("source", ["batch", "population"])
@pytest.mark.parametrize("kind", ["xkfac", "corrected", "diagonal"])
@pytest.mark.parametrize("name", NETS)
def test_the_fisher_of_the_four_numbers_is_that_of_the_definition(name, kind, source):
    net, batches = build(name)
    found = xkfac.estimate(net, batches, kind, labels="exact", statistics=source, merge=False)
    places = [place for place, module in enumerate(net) if str(place) in norms_of(net)]
    assert [unit.norm for unit in found.coverage.units if unit.kind == "unmerged"] == [str(place) for place in places]
    for place in places:
        want = brute_force(net, batches, place, source == "batch")
        block = found.curvature.blocks[str(place)]
        assert isinstance(block, Diagonal)
        assert want.min() > 1e-8
        torch.testing.assert_close(block.values, want, rtol=1e-9, atol=1e-12)


def test_a_batch_of_one_example_counts_with_the_population_statistics():
    net, (pair, single) = build("linear", (2, 1))
    found = xkfac.estimate(net, [pair, single], labels="exact", merge=False).curvature.blocks["4"].values
    want = brute_force(net, [pair], 4) * 2 / 3 + brute_force(net, [single], 4, of_batch=False) / 3
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)


def test_labels_drawn_from_the_model_give_the_same_on_average():
    net, (x,) = build("linear", (4,))
    found = xkfac.estimate(net, [x], merge=False, draws=3000).curvature.blocks
    for place in (1, 4):
        torch.testing.assert_close(found[str(place)].values, brute_force(net, [x], place), rtol=0.2, atol=0)


def test_the_layer_in_front_keeps_the_factors_that_it_has_without_its_bn():
    net, batches = build("linear")
    options = {"labels": "exact", "accumulation_dtype": DOUBLE}
    unmerged = xkfac.estimate(net, batches, merge=False, **options)
    lone = xkfac.estimate(net, batches, exclude=["1", "4"], **options)
    assert [unit.name for unit in unmerged.coverage.units] == ["0", "1", "3", "4", "6"]
    for name in ("0", "3", "6"):
        torch.testing.assert_close(unmerged.curvature.blocks[name].dense(), lone.curvature.blocks[name].dense())


def numbers(norm, h, interpretation, fixed):
    """Return gamma, beta, mu and sigma [C, 1, 4] of a BN in front of which there is h, with gradient where it belongs.

    `fixed` holds what an interpretation regards as constant, for the same BN at the point of departure.
    """
    if interpretation == "eval":
        mu, sigma = norm.running_mean, torch.sqrt(norm.running_var + norm.eps)
    elif interpretation == "const":
        mu, sigma = fixed["mean"], torch.sqrt(fixed["var"] + norm.eps)
    else:
        mu, var = statistics(h)
        sigma = torch.sqrt(var + norm.eps)
        if interpretation == "brn":
            sigma = sigma / fixed["r"]
            mu = mu - fixed["d"] * sigma
    return torch.stack([*affine(norm), mu, sigma], 1)[:, None, :]


def constants(net, x):
    """Return the statistics, r and d of every BN at the point of departure, by place."""
    net, fixed = copy.deepcopy(net).train(), {}
    with torch.no_grad():
        for place, module in enumerate(net):
            if str(place) in norms_of(net):
                mean, var = statistics(x)
                r, d = correction(module, mean, var, clipped=isinstance(module, _BatchRenorm))
                fixed[place] = {"mean": mean, "var": var, "r": r, "d": d}
            x = module(x)
    return fixed


def by_hand(net, memory, x, interpretation, fixed, damping):
    """Return the penalty of a sequential net on a batch: the sum over its units, one number after the other."""
    net, total = copy.deepcopy(net).train(), 0.0
    with torch.no_grad():
        for place, module in enumerate(net):
            name = str(place)
            if name in memory.anchor:
                if name in norms_of(net):
                    move = numbers(module, x, interpretation, fixed.get(place)) - memory.anchor[name]
                    weights = memory.curvature.blocks[name].values
                    for weight, one in zip(weights.flatten(), move.flatten(), strict=True):
                        total += (weight + damping) * one**2 / 2
                else:
                    rows = module.weight.flatten(1)
                    rows = rows if module.bias is None else torch.cat([rows, module.bias[:, None]], 1)
                    move = rows.reshape(memory.anchor[name].shape) - memory.anchor[name]
                    dense = memory.curvature.blocks[name].dense()
                    for matrix, one in zip(dense, move.mT.flatten(1), strict=True):
                        total += one @ matrix @ one / 2 + damping * one @ one / 2
            x = renormalise(module, x, **fixed[place]) if isinstance(module, _BatchRenorm) else module(x)
    return total


def renormalise(norm, h, r, d, **_):
    """Return the output of batch renormalization with constant r and d."""
    mean, var = statistics(h)
    gamma, beta = affine(norm)
    return gamma * ((h - mean) / torch.sqrt(var + norm.eps) * r + d) + beta


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("name", NETS)
def test_value_and_gradient_of_the_penalty_are_those_of_finite_differences(name, interpretation):
    net, (x, *batches) = build(name, (5, 5, 4))
    memory = xkfac.consolidate(net, batches, "unmerged", interpretation=interpretation)
    learner = xkfac.Learner(net, memory, damping=0.03)
    learner.begin()
    move(net)
    for norm in norms_of(net).values():  # else mu and sigma would be at their anchor in the BRN reading
        norm.running_mean += 0.2 * torch.randn_like(norm.running_mean)
        norm.running_var *= 1.3
    before, fixed = copy.deepcopy(net), constants(net, x)
    net.train()(x)
    value = learner.penalty()
    if interpretation == "eval":  # reads the population's statistics as they are now
        before.load_state_dict({**before.state_dict(), **dict(net.named_buffers())})
    want = by_hand(before, memory, x, interpretation, fixed, 0.03)
    assert value > 1e-3
    torch.testing.assert_close(value, want, rtol=1e-9, atol=0)
    value.backward()
    step = 1e-5
    for (key, parameter), twin in zip(net.named_parameters(), before.parameters(), strict=True):
        got = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for index in range(parameter.numel()):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    twin.view(-1)[index] += sign * step
                    ends.append(by_hand(before, memory, x, interpretation, fixed, 0.03))
                    twin.view(-1)[index] -= sign * step
            slope = (ends[0] - ends[1]) / (2 * step)
            torch.testing.assert_close(
                got.flatten()[index], slope, rtol=1e-5, atol=1e-7, msg=lambda m, k=key: f"{k}: {m}"
            )


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
def test_statistics_alone_pull_at_the_weights_before_them_where_the_gradient_flows_through(interpretation):
    net, (x, *batches) = build("no affine", (5, 5))
    memory = xkfac.consolidate(net, batches, "unmerged", exclude=["0", "3", "6"])
    assert [unit.name for unit in memory.units] == ["1", "4"]
    learner = xkfac.Learner(net, memory, interpretation=interpretation, bn_momentum=None)
    learner.begin()
    net.train()
    net(x)  # the population's statistics have to leave the anchor first
    objective = learner.objective(net(x).sum() * 0)
    assert learner.last_penalty > 1e-4
    gradients = torch.autograd.grad(objective, [net[0].weight, net[3].weight])
    flows = interpretation in ("bn", "brn")
    assert all(bool((gradient.abs().max() > 1e-4) if flows else (gradient == 0).all()) for gradient in gradients)


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("name", NETS)
def test_the_four_numbers_are_the_merged_affine_map_taken_apart(name, interpretation):
    net, (x,) = build(name, (5,))
    for place in map(int, norms_of(net)):
        h = copy.deepcopy(net).train()[:place](x)
        units = [Unit(name, kind, (h.shape[1], 1, size), norm=str(place))
                 for name, kind, size in (("map", "norm", 2), ("numbers", "unmerged", 4))]  # fmt: skip
        bound = bind(net, units)
        reading = None if interpretation == "eval" else bound["map"].read(h, interpretation)
        gamma, beta, mu, sigma = bound["numbers"].merged_weight(reading)[:, 0].unbind(1)
        wanted = torch.stack([gamma / sigma, beta - gamma * mu / sigma], 1)[:, None]
        torch.testing.assert_close(bound["map"].merged_weight(reading), wanted)


def train(net, learner, batches, rate=0.1):
    optimizer = torch.optim.SGD(net.parameters(), rate)
    penalties = []
    net.train()
    for x, y in batches:
        optimizer.zero_grad()
        learner.objective(F.cross_entropy(net(x), y)).backward()
        optimizer.step()
        penalties.append(float(learner.last_penalty))
    return penalties


@pytest.mark.parametrize("keep", ["average", "all"])
@pytest.mark.parametrize("name", ["perceptron", "everything"])
def test_two_tasks(name, keep):
    shape = (6,) if name == "perceptron" else (2, 7, 7)
    net = mlp() if name == "perceptron" else randomise(Everything())
    memory = xkfac.consolidate(net, data(shape=shape), "unmerged")
    for task in (1, 2):
        learner = xkfac.Learner(net, memory)
        learner.begin(target(shape=shape))
        penalties = train(net, learner, target(shape=shape))
        assert penalties[0] < 1e-9
        assert penalties[-1] > 1e-4
        extended = learner.finish(target(shape=shape), keep=keep, seed=task)
        new = xkfac.estimate(net, target(shape=shape), merge=False, seed=task)
        own, others = task / (task + 1), 1 / (task + 1)
        norms = [unit for unit in extended.units if unit.kind == "unmerged"]
        assert len(norms) == len(norms_of(net))
        for unit in norms:
            norm = net.get_submodule(unit.norm)
            std = (norm.running_var + norm.eps).sqrt()
            parts = (norm.weight, norm.bias, norm.running_mean, std)
            torch.testing.assert_close(extended.anchor[unit.name][:, 0], torch.stack(parts, 1))
            sides = [side.blocks[unit.name].values for side in (memory.curvature, new.curvature)]
            wanted = own * sides[0] + others * sides[1]
            torch.testing.assert_close(extended.curvature.blocks[unit.name].values, wanted)
        memory = extended
    assert memory.tasks == 3


def state(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def test_begin_leaves_every_number_at_its_anchor_and_the_data_moves_mu_and_sigma_alone():
    net = mlp()
    before = state(net)
    memory = xkfac.consolidate(net, data(), "unmerged", interpretation="bn")
    learner = xkfac.Learner(net, memory, damping=1.0)
    learner.begin(target())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    x, y = target()[0]
    learner.objective(F.cross_entropy(net.train()(x), y))
    assert learner.last_penalty > 0.1


def test_recentring_keeps_the_function_and_moves_all_four_numbers_from_their_anchor():
    net = mlp()
    memory = xkfac.consolidate(net, data(), "unmerged")
    x, y = target()[0]
    output = copy.deepcopy(net).eval()(x)
    twin = copy.deepcopy(net)
    learner = xkfac.Learner(net, memory, damping=0.1)
    learner.begin(target(), recentre=True)
    torch.testing.assert_close(copy.deepcopy(net).eval()(x), output, rtol=1e-4, atol=1e-5)
    recentre(twin, target())
    moves = {name: bound.merged_weight() - memory.anchor[name] for name, bound in bind(twin, memory.units).items()}
    for name in ("1", "4"):
        assert bool((moves[name].abs().amax((0, 1)) > 1e-2).all())
    want = memory.curvature.quadratic(moves) + 0.05 * sum(move.square().sum() for move in moves.values())
    learner.objective(F.cross_entropy(net.train()(x), y))
    torch.testing.assert_close(learner.last_penalty, want.detach(), rtol=1e-4, atol=1e-5)


def test_begin_refuses_statistics_that_are_not_those_of_the_anchor():
    net = mlp()
    learner = xkfac.Learner(net, xkfac.consolidate(net, data(), "unmerged"))
    net[4].running_mean += 1
    with pytest.raises(xkfac.MismatchError, match=r"unit '4' are .* away from those that the memory was made from"):
        learner.begin()


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_memory_from_a_file_goes_on_as_the_one_in_process(tmp_path, dtype):
    net = nn.Sequential(*mlp(), nn.BatchNorm1d(3, affine=False)).to(dtype)
    first, second = ([(x.to(dtype), y) for x, y in task] for task in (data(), target()))
    memory = xkfac.consolidate(net, first, "unmerged")
    assert {tensor.dtype for tensor in memory.anchor.values()} == {dtype}
    memory.save(tmp_path / "memory.safetensors")
    loaded = xkfac.Memory.load(tmp_path / "memory.safetensors", net)
    assert_equal(loaded, memory)
    assert loaded.anchor["7"].shape == (3, 1, 4)
    ends = []
    for one in (memory, loaded):
        twin = copy.deepcopy(net)
        learner = xkfac.Learner(twin, one)
        learner.begin()
        penalties = train(twin, learner, second)
        assert penalties[-1] > 0
        ends.append((penalties, learner.finish(second)))
    assert ends[0][0] == ends[1][0]
    assert_equal(ends[0][1], ends[1][1])


def test_the_summary_lists_the_statistics_beside_the_parameters():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False))
    lines = str(xkfac.find_units(net, torch.randn(5, 4), merge=False)).splitlines()
    assert [line.split(maxsplit=4) for line in lines[1:]] == [
        ["0.weight", "0", "linear", "12"],
        ["0.bias", "0", "linear", "3"],
        ["1.weight", "1", "unmerged", "3"],
        ["1.bias", "1", "unmerged", "3"],
        ["1.running_mean", "1", "unmerged", "3", "mu, a statistic"],
        ["1.running_var", "1", "unmerged", "3", "sigma, a statistic"],
        ["2.running_mean", "2", "unmerged", "3", "mu, a statistic"],
        ["2.running_var", "2", "unmerged", "3", "sigma, a statistic"],
        ["3", "units,", "8", "parameters,", "33 numbers"],
    ]


def test_a_bn_without_running_statistics_is_refused_by_name():
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False, track_running_stats=False))
    with pytest.raises(xkfac.UnitError, match="'1' has no running statistics, so it has no anchor; build it"):
        xkfac.consolidate(net, data(shape=(3,)), "unmerged")
    assert [unit.name for unit in xkfac.find_units(net, torch.randn(4, 3), merge=False, exclude="1").units] == ["0"]


def test_a_memory_does_not_go_with_another_network_or_with_merged_curvature():
    net = mlp()
    memory = xkfac.consolidate(net, data(), "unmerged", exclude=["0", "3"])
    other = nn.Sequential(nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), *list(mlp())[3:])
    with pytest.raises(xkfac.MismatchError, match="unit '1': the memory's merged weight is 5x1x4, the model's 7x1x4"):
        memory.check(other)
    with pytest.raises(xkfac.MismatchError, match=r"unit '1' is norm \[5, 1, 2\] .* now and was unmerged \[5, 1, 4\]"):
        memory.extend(net, xkfac.estimate(net, data(), exclude=["0", "3"]), weights=(0.5, 0.5))


LINES = {
    "K-FAC, const stats": ("kfac", {"interpretation": "const"}),
    "K-FAC, eval": ("kfac", {"interpretation": "eval", "statistics": "population"}),
    "EWC, fixed BN": ("ewc", {"interpretation": "eval", "statistics": "population", "fixed_bn": True}),
}


@pytest.mark.parametrize(("method", "changes"), LINES.values(), ids=LINES)
def test_the_other_lines_of_the_papers_figure_can_be_said(method, changes):
    net = mlp()
    memory = xkfac.consolidate(net, data(), method, **changes)
    for tasks in (2, 3):
        learner = xkfac.Learner(net, memory, damping=0.0)
        learner.begin(target())
        before = state(net)
        train(net, learner, target())
        x, y = target()[0]
        bound = bind(net, memory.units)
        with torch.no_grad():
            h = {"1": net[0](x)}
            h["4"] = net[3](net[2](copy.deepcopy(net)[1](h["1"])))
        loss = F.cross_entropy(net(x), y)
        if changes["interpretation"] == "const":
            readings = {name: bound[name].read(h[one.unit.norm], "bn") for name, one in bound.items() if one.norm}
        else:  # as they are after the forward pass
            readings = {}
        moves = {name: one.merged_weight(readings.get(name)) - memory.anchor[name] for name, one in bound.items()}
        want = memory.curvature.quadratic(moves).detach()
        assert want > 1e-5
        learner.objective(loss)
        torch.testing.assert_close(learner.last_penalty, want)
        moved = {name for name, tensor in net.state_dict().items() if not torch.equal(tensor, before[name])}
        fixed = {name for name in before if name[0] in "14"} if "fixed_bn" in changes else set()
        assert moved == set(before) - fixed
        memory = learner.finish(target())
        assert memory.tasks == tasks
        assert all(parameter.requires_grad for parameter in net.parameters())
