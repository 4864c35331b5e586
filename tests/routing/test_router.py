"""Tasks are inferred from features of inputs, and the network answers with the layers of each input's task."""

import contextlib
import copy
import math

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import xkfac
from xkfac import MemoryFileError, MismatchError, NotFiniteError, Router, TaskLayer, XkfacError, batch_statistics
from xkfac.routing import router as routing
from xkfac.routing.density import NU, Moments, fit
from xkfac.routing.probe import EPSILON, Probe, make_probe

TASKS = ("grey", "red", "loud")


def convnet(tasks=TASKS):
    """Return a network of images [N, 3, 8, 8] with BN and a head of its own size for each task, in evaluation mode."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    xkfac.give_task_norms(net, tasks)
    net[-1] = TaskLayer({task: nn.Linear(8, 4 + place) for place, task in enumerate(tasks)})
    for norm in (module for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.normal_(norm.weight, 1, 0.2)
        nn.init.normal_(norm.running_mean, 0, 0.2)
    return net.eval()


def images(task, count, seed=0):
    """Return images of a task: all of them noise, red ones with an offset in a channel, loud ones with more of it."""
    generator = torch.Generator().manual_seed(hash_of(task) + seed)
    x = torch.randn(count, 3, 8, 8, generator=generator)
    x = x + 0.3 * torch.randn(count, 3, 1, 1, generator=generator)
    offset = torch.tensor([4.0, 0, 0] if task == "red" else [0.0, 0, 0]).view(3, 1, 1)
    return x * (3 if task == "loud" else 1) + offset


def hash_of(task):
    return sum(map(ord, task))


def routed(by="early", **options):
    router = Router(convnet(), by=by, **options)
    for task in TASKS:
        router.add_task(task, [(x, None) for x in images(task, 300).split(50)])
    return router


@pytest.mark.parametrize(("rank", "shrinkage"), [(1, 0.0), (3, 0.0), (6, 0.0), (9, 0.4)])
def test_log_densities_are_those_of_the_distribution_written_out(rank, shrinkage):
    torch.manual_seed(0)
    rows, z = torch.randn(200, 6).double() @ torch.randn(6, 6).double() + 3, torch.randn(5, 6) * 3
    unit = torch.rand(6).double() + 0.5
    moments = Moments()
    for part in rows.split(33):
        moments.add(part)
    found = fit(moments, unit, rank, shrinkage, 0.1).log_density(z)[:, 0]
    covariance = torch.cov((rows / unit).T, correction=0)
    values, vectors = torch.linalg.eigh(covariance)
    matrix = 0.1 * torch.eye(6).double()
    for place in range(max(6 - rank, 0), 6):
        matrix += (1 - shrinkage) * values[place] * torch.outer(vectors[:, place], vectors[:, place])
    matrix += (covariance - matrix + 0.1 * torch.eye(6)).diagonal().clamp(min=0).diag()
    # A t distribution is a Gaussian whose precision is multiplied by a gamma variable: integrate over it.
    grid = torch.linspace(1e-4, 12, 20001).double()
    gamma = torch.distributions.Gamma(NU / 2, NU / 2).log_prob(grid)
    expected = []
    for row in z.double():
        centred = row - (rows / unit).mean(0)
        distance = centred @ torch.linalg.inv(matrix) @ centred
        normal = 0.5 * (6 * grid.log() - grid * distance - torch.logdet(matrix) - 6 * math.log(2 * math.pi))
        expected.append(torch.trapezoid((normal + gamma).exp(), grid).log())
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_log_densities_of_a_task_do_not_depend_on_other_tasks():
    torch.manual_seed(0)
    alone, z = [], torch.randn(5, 6) * 3 + 20
    for mean in (0.0, 20.0, 3000.0):
        moments = Moments()
        moments.add(torch.randn(200, 6).double() + mean)
        alone.append(fit(moments, torch.ones(6).double(), 3))
    together = alone[0].joined(alone[1]).joined(alone[2])
    for offset in (0.0, -20.0, 2980.0):
        found = together.log_density(z + offset)
        torch.testing.assert_close(
            found, torch.cat([one.log_density(z + offset) for one in alone], 1), rtol=1e-3, atol=1e-3
        )
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(together.log_density(z + offset), found)


def test_moments_do_not_depend_on_the_batches():
    torch.manual_seed(0)
    x = torch.randn(50, 4) + 1e3
    moments = Moments()
    for part in x.split([1, 9, 40]):
        moments.add(part)
    torch.testing.assert_close(moments.mean, x.double().mean(0))
    torch.testing.assert_close(moments.covariance, torch.cov(x.double().T, correction=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("by", ["early", "last", "source"])
def test_examples_of_several_tasks_are_answered_each_by_its_own_layers(by):
    router = routed(by)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    x = torch.cat([images(task, 20, seed=1) for task in TASKS])[order]
    truth = torch.arange(3).repeat_interleave(20)[order]
    with torch.no_grad():
        answer = router(x)
        assert (answer.tasks == truth).float().mean() >= (1.0 if by == "early" else 0.9)
        torch.testing.assert_close(answer.probabilities.sum(1), torch.ones(60))
        assert torch.equal(answer.probabilities.argmax(1), answer.tasks)
        for place, task in enumerate(TASKS):
            mine = answer.tasks == place
            with xkfac.using_task(router.model, task):
                expected = router.model(x[mine])
            torch.testing.assert_close(answer.outputs[mine][:, : 4 + place], expected)
            assert (answer.outputs[mine][:, 4 + place :] == -math.inf).all()
            given = router(x[mine], task=task)
            assert torch.equal(given.outputs, expected)
            assert (given.tasks == place).all()
            assert (given.probabilities[:, place] == 1).all()


def test_a_batch_of_one_task_is_inferred_from_all_of_its_examples():
    router = routed()
    x = torch.cat([images("grey", 9, seed=2), images("red", 1, seed=2)])
    assert router(x).tasks.tolist() == [0] * 9 + [1]
    weak = (x + 0.5 * images("red", 10, seed=3)) / 1.5  # each alone is hard to tell
    scores = router.scores(weak)
    assert router(weak, together=True).tasks.tolist() == [int(scores.sum(0).argmax())] * 10


def test_the_unknown_share_is_that_of_the_tasks_own_images_and_other_images_are_unknown():
    router = routed()
    router.add_task("red", [images("red", 1500)])
    own = images("red", 2000, seed=4)
    for share in (0.05, 0.3):
        assert abs((router(own, unknown=share).tasks == -1).float().mean() - share) < 0.06
    answer = router(images("grey", 20) * 10 - 7, unknown=0.01)
    assert (answer.tasks == -1).all()
    assert answer.outputs.isfinite().any(1).all()
    assert (router(images("grey", 20) * 10 - 7).tasks >= 0).all()
    router.quantiles = torch.arange(101.0).square()[None]
    torch.testing.assert_close(router._level(0.042), torch.tensor([17.8]))  # 16, and a fifth of the way to 25


def test_probabilities_are_as_sure_as_they_are_right(monkeypatch):
    monkeypatch.setattr(routing, "VECTOR_RANK", 1)
    monkeypatch.setitem(routing.SHRINKAGE, "early", 0.0)
    torch.manual_seed(0)
    router = Router(nn.Sequential(nn.Identity()), using=lambda *_: contextlib.nullcontext())
    mixing = torch.randn(10, 40)  # ten factors in forty features, of which a rank of one sees one

    def rows(task, count):
        return (torch.randn(count, 10) + 0.8 * task) @ mixing + 0.1 * torch.randn(count, 40)

    for task in range(2):
        router.add_task(f"task {task}", rows(task, 3000).split(500))
    x, truth = torch.cat([rows(0, 2000), rows(1, 2000)]), torch.arange(2).repeat_interleave(2000)
    found = router(x)
    right = (found.tasks == truth).float().mean()
    assert abs(found.probabilities.max(1).values.mean() - right) < 0.03
    assert torch.softmax(router.scores(x), 1).max(1).values.mean() - right > 0.05  # without the temperature


def test_tasks_are_as_likely_as_they_have_classes():
    router = Router(nn.Sequential(nn.Identity()), using=lambda *_: contextlib.nullcontext())
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    router.add_task("many", [(x, torch.arange(300) % 30)])
    router.add_task("few", [(x, torch.arange(300) % 10)])
    torch.testing.assert_close(router(x).probabilities, torch.tensor([0.75, 0.25]).expand(300, 2))


@pytest.mark.parametrize("by", ["last", "source"])
def test_last_features_count_with_a_share_of_the_early_ones(by):
    router, early, x = routed(by), routed(), images("loud", 6, seed=8)
    with xkfac.using_task(router.model, "grey"), torch.no_grad():
        features = router.model[:-1](x)
    density = routing.Densities(*(getattr(router, f"last_{name}") for name in routing.DENSITY))
    expected = density.log_density(features / router.last_unit) + 0.25 * early.scores(x)
    torch.testing.assert_close(router.scores(x), expected)


def test_inputs_without_early_features_are_told_apart_by_the_last():
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(8, 3), nn.Linear(3, 2))
    router = Router(net, "last", using=lambda *_: contextlib.nullcontext())
    low, high = torch.randint(0, 4, (40, 20)), torch.randint(4, 8, (40, 20))
    router.add_task("low", [low])
    router.add_task("high", [high])
    assert router(torch.cat([low, high])).tasks.tolist() == [0] * 40 + [1] * 40


def test_early_features_stay_as_they_are_while_the_network_learns():
    router = routed()
    x = images("grey", 5)
    before = router.scores(x)
    with torch.no_grad():
        for parameter in router.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    assert torch.equal(router.scores(x), before)
    kept = {name for name, _ in router.probe.named_parameters()}
    assert kept == {"layers.0.weight", "layers.0.bias"}  # what runs before the first BN
    assert not any(parameter.requires_grad for parameter in router.probe.parameters())


def in_cells(x, cells):
    """Return mean and log variance of x [N, C, H, W] in each of cells x cells parts, which overlap if they have to."""
    bounds = [[(math.floor(k * n / cells), math.ceil((k + 1) * n / cells)) for k in range(cells)] for n in x.shape[2:]]
    parts = [x[:, :, a:b, c:d].flatten(2) for a, b in bounds[0] for c, d in bounds[1]]
    mean = torch.stack([part.mean(2) for part in parts], 2)
    variance = torch.stack([part.var(2, correction=0) for part in parts], 2)
    return mean.flatten(1), (variance + EPSILON).log().flatten(1)


@pytest.mark.parametrize("conv", [nn.Conv2d(3, 4, 7, 2, 3), nn.Conv2d(3, 4, 3, 1, 0)])
def test_early_features_of_large_maps_are_of_one_position_out_of_several(conv):
    model = nn.Sequential(conv, nn.BatchNorm2d(4), nn.ReLU()).eval()
    x = torch.randn(2, 3, 128, 160) * 3 + 1
    probe = make_probe(copy.deepcopy(model), x)
    every = 2 if conv.stride == (2, 2) else 3
    assert probe.description()["every"] == every
    reached = conv(x)[:, :, ::every, ::every]
    expected = [in_cells(x, 8)[0], in_cells(x, 1)[1], *in_cells(reached, 4)]
    torch.testing.assert_close(probe(x), torch.cat(expected, 1))
    again = Probe(copy.deepcopy(model), **probe.description())
    assert torch.equal(again(x), probe(x))


def test_early_features_of_vectors_are_their_entries():
    net = nn.Sequential(nn.Linear(40, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    router = Router(net.eval(), using=lambda *_: contextlib.nullcontext())
    x = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    for task in ("first", "second"):
        router.add_task(task, [x])
    assert torch.equal(router.probe(x), x)
    assert not router.probe.state_dict()  # no layer is copied
    assert router.early_factor.shape == (2, 40, routing.VECTOR_RANK)


def test_a_task_can_be_added_again_and_replaces_what_was_known():
    router, x = routed(), images("red", 7, seed=5)
    router.add_task("red", [images("red", 300)])
    assert router.tasks == list(TASKS)
    assert router(x).tasks.tolist() == [1] * 7
    features = 3 * (8 * 8 + 1) + 6 * (4 * 4 + 4 * 4)  # means and log variances of channels in cells
    kept = [tensor for name in routing.STATISTICS if (tensor := getattr(router, name)) is not None]
    assert sum(tensor[0].numel() for tensor in kept if len(tensor) == 3) == features * (2 + 64) + 1 + 101 + 2


@pytest.mark.parametrize("by", ["early", "last", "source"])
@pytest.mark.parametrize("task", ["grey", "red"])
def test_a_task_that_is_added_again_unchanged_changes_nothing(by, task, tmp_path):
    """Last features are those of the layers of the first task, which stays the first."""
    router, x = routed(by), torch.cat([images(task, 5, seed=6) for task in TASKS])
    with torch.no_grad():
        before, scores = router(x), router.scores(x)
        router.add_task(task, [(x, None) for x in images(task, 300).split(50)])
        torch.testing.assert_close(router.scores(x), scores)
        torch.testing.assert_close(router(x).probabilities, before.probabilities)
    router.save(tmp_path / "router.safetensors")
    assert torch.equal(Router.load(tmp_path / "router.safetensors", convnet()).scores(x), router.scores(x))


@pytest.mark.parametrize("by", ["early", "last", "source"])
def test_a_file_holds_model_layers_heads_and_statistics_bit_by_bit(by, tmp_path):
    router, x = routed(by), torch.cat([images(task, 5, seed=6) for task in TASKS])
    router.save(tmp_path / "router.safetensors")
    fresh = nn.Sequential(*(copy.deepcopy(module) for module in _plain_convnet()))
    loaded = Router.load(tmp_path / "router.safetensors", fresh)
    with torch.no_grad():
        expected, found = router(x), loaded(x)
    assert (loaded.tasks, loaded.by) == (router.tasks, by)
    for name in ("outputs", "tasks", "probabilities"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert torch.equal(loaded.scores(x), router.scores(x))
    assert loaded.state_dict().keys() == router.state_dict().keys()
    with pytest.raises(MismatchError, match="is of another model"):
        Router.load(tmp_path / "router.safetensors", nn.Sequential(nn.Linear(3, 3)))
    (tmp_path / "router.safetensors").write_bytes(b"x")
    with pytest.raises(MemoryFileError):
        Router.load(tmp_path / "router.safetensors", fresh)


def _plain_convnet():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    ).eval()  # fmt: skip


def test_a_compiled_router_answers_alike():
    router, x = routed(), torch.cat([images(task, 4, seed=7) for task in TASKS])
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(router, backend=backend)
    with torch.no_grad():
        expected, found = router(x), compiled(x)
    torch.testing.assert_close(found.outputs, expected.outputs)
    assert torch.equal(found.tasks, expected.tasks)
    assert len(graphs) >= len(TASKS)  # the network of each task


def test_the_network_of_one_task_can_be_exported():
    router, x = routed(), images("red", 4)
    network = router.network("red")
    with torch.no_grad():
        expected = router(x, task="red").outputs
        assert torch.equal(network(x), expected)
        exported = torch.export.export(network, (x,))
    torch.testing.assert_close(exported.module()(x), expected)
    assert not any("TaskLayer" in type(module).__name__ for module in network.modules())


def test_permuted_digits_are_told_apart_one_by_one():
    pixels = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    torch.manual_seed(0)
    tasks = [f"permutation {place}" for place in range(5)]
    net = nn.Sequential(nn.Linear(64, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 10)).eval()
    xkfac.give_task_norms(net, tasks)
    router = Router(net)
    orders = [torch.randperm(64) for _ in tasks]
    for task, order in zip(tasks, orders, strict=True):
        router.add_task(task, pixels[:1000, order].split(200))
    for place, order in enumerate(orders):
        assert (router(pixels[1000:, order]).tasks == place).float().mean() > 0.99
        assert (router(pixels[1000:1010, order], together=True).tasks == place).all()


def test_finish_adds_the_active_task_to_a_router():
    net = convnet(("old", "new"))
    xkfac.enter_task(net, "old")
    old, new = images("grey", 64), images("red", 64)
    router = Router(net)
    router.add_task("old", old.split(16))
    memory = xkfac.consolidate(net, list(old.split(16)), "own-bn", exclude=["8*"])
    xkfac.enter_task(net, "new")
    learner = xkfac.Learner(net, memory)
    learner.begin(list(new.split(16)))
    learner.objective(net(new[:16]).square().mean()).backward()
    learner.finish(list(new.split(16)), router=router)
    assert router.tasks == ["old", "new"]
    assert router(new).tasks.tolist() == [1] * 64


@pytest.mark.parametrize("window", [1, 20, 80])
def test_batch_statistics_follow_a_window_and_leave_no_trace(window):
    torch.manual_seed(0)
    net, x = _plain_convnet(), images("red", 20)
    norm, before = net[1], copy.deepcopy(net.state_dict())
    with torch.no_grad(), batch_statistics(net, window):
        first = net[:2](x)
        z, share = net[0](x), min(1, 20 / window)
        mean = share * z.mean((0, 2, 3))
        var = (1 - share) * (1 + mean**2) + share * (z.var((0, 2, 3), correction=0) + (z.mean((0, 2, 3)) - mean) ** 2)
        torch.testing.assert_close(norm.running_var, var)
        expected = (z - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + norm.eps).sqrt()
        torch.testing.assert_close(first, expected)
        if window <= 20:
            torch.testing.assert_close(norm(input=z), expected)  # given by keyword
    if window <= 20:
        torch.testing.assert_close(first, copy.deepcopy(net[:2]).train()(x).detach())
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert not norm._forward_pre_hooks


def test_a_model_in_training_mode_is_refused_and_stays_as_it_is():
    router = routed()
    router.train()
    before = copy.deepcopy(router.model.state_dict())
    for task in (None, "red"):
        with pytest.raises(XkfacError, match=r"call router.eval\(\) before the router answers"):
            router(images("red", 4), task)
    assert all(torch.equal(before[name], tensor) for name, tensor in router.model.state_dict().items())


def test_an_image_that_is_not_finite_is_unknown():
    router, x = routed(), images("grey", 4)
    x[1] = math.nan
    assert (router(x, unknown=0.01).tasks == -1).tolist()[1]


def test_statistics_keep_their_precision_in_a_model_of_another():
    router, x = routed(), images("loud", 20, seed=3)
    kept = router.early_mean.clone()
    expected = router(x).tasks
    found = router.to(torch.bfloat16)(x.bfloat16()).tasks
    assert torch.equal(router.early_mean, kept)
    assert router.model[0].weight.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_what_cannot_be_is_refused():
    router = Router(convnet())
    with pytest.raises(XkfacError, match="knows no task yet"):
        router(images("red", 2))
    with pytest.raises(XkfacError, match="no layer for task 'blue'"):
        router.add_task("blue", [images("red", 9)])
    with pytest.raises(XkfacError, match="gave 1 examples"):
        router.add_task("red", [images("red", 1)])
    with pytest.raises(XkfacError, match="inputs in a dict, and a router takes one tensor"):
        router.add_task("red", [{"image": images("red", 9)}])
    with pytest.raises(NotFiniteError, match="features of task 'red' are not finite"):
        router.add_task("red", [images("red", 9) * math.nan])
    with pytest.raises(XkfacError, match="use by='last'"):
        Router(nn.Embedding(5, 3), using=lambda *_: contextlib.nullcontext()).add_task("a", [torch.arange(5)])
    with pytest.raises(XkfacError, match="it must be 'early', 'last' or 'source'"):
        Router(convnet(), by="middle")
    router.add_task("red", [images("red", 9)])
    with pytest.raises(XkfacError, match="name one of red"):
        router(images("red", 2), task="grey")
    with pytest.raises(XkfacError, match="must be a share from 0 to below 1"):
        router(images("red", 2), unknown=1.0)
    with pytest.raises(XkfacError, match="window is 0"), batch_statistics(convnet(), 0):
        pass
