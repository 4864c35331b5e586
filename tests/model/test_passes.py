"""A pass over data leaves no trace: not on a model, nor on the random state, however it ends."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import xkfac
from xkfac.errors import XkfacError
from xkfac.model.passes import batches, device_of, norms_of, set_mode, untouched, unwrap
from xkfac.model.recentre import recentre

CPU = torch.device("cpu")


class Stop(BaseException):
    """Ends a pass like a key press does."""


class Noisy(nn.Module):
    """Draws from all global random states, in training and in evaluation, and counts calls in a buffer it replaces."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x):
        self.calls = self.calls + 1
        self.late = torch.ones(1)
        return x + 1e-3 * (torch.rand(()) + random.random() + np.random.rand())  # noqa: NPY002


def network():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        Noisy(),
        nn.Flatten(),
        nn.Linear(4 * 16, 6),
        xkfac.BatchRenorm1d(6, warmup=0, r_steps=10, d_steps=10),
        nn.PReLU(),
        nn.Linear(6, 3),
    )
    net(torch.randn(8, 1, 6, 6)).sum().backward()
    net[0].weight.requires_grad_(False)
    net[6].bias.grad = None
    net[4].late = None
    net[1].eval()
    net[7].momentum = None
    net[3].register_forward_hook(lambda *_: None)
    net[1].register_forward_pre_hook(lambda *_: None)
    return net


def loader(size=20, batch_size=8):
    data = TensorDataset(torch.randn(size, 1, 6, 6), torch.randint(3, (size,)))
    return DataLoader(data, batch_size, shuffle=True)


def breaking(loader, at, error):
    """Give the batches of a loader, but raise before number `at`."""
    for place, batch in enumerate(loader):
        if place == at:
            raise error
        yield batch


def random_state():
    numpy = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), (numpy[0], numpy[1].tolist(), *numpy[2:])


def trace_of(net, but=()):
    """Return all there is to a model and to the random state, but for the tensors of the names in `but`."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    hooks = [
        {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks") and isinstance(value, dict)}
        for module in net.modules()
    ]
    return {
        "identity": {name: id(tensor) for name, tensor in tensors.items()},
        "buffers": [{name: id(value) for name, value in module._buffers.items()} for module in net.modules()],
        "values": {name: tensor.detach().numpy().tobytes() for name, tensor in tensors.items() if name not in but},
        "gradients": [None if p.grad is None else (id(p.grad), p.grad.numpy().tobytes()) for p in net.parameters()],
        "needs gradient": [p.requires_grad for p in net.parameters()],
        "flags": [module.training for module in net.modules()],
        "norms": [(norm.momentum, norm.track_running_stats, norm.eps) for norm in norms_of(net).values()],
        "hooks": hooks,
        "random": random_state(),
    }


def assert_same(before, after):
    for part, value in before.items():
        assert after[part] == value, part


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, Stop])
def test_untouched_restores_everything_however_it_is_left(error):
    net = network()
    before = trace_of(net)
    mean = net[1].running_mean
    try:
        with untouched(net):
            net.train()
            net.requires_grad_(True)
            net(torch.randn(8, 1, 6, 6))
            mean.fill_(3.0)
            net[1].running_mean = torch.full((4,), 7.0)
            net[1].register_buffer("new", torch.zeros(1))
            net[7].track_running_stats = False
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)  # noqa: NPY002
            if error is not None:
                raise error
    except (ValueError, KeyboardInterrupt, Stop) as caught:
        assert type(caught) is error  # noqa: PT017
    assert_same(before, trace_of(net))
    assert net[1].running_mean is mean
    assert net[4].late is None


ESTIMATES = {
    "default": {},
    "kfac": {"kind": "kfac"},
    "corrected": {"kind": "corrected"},
    "diagonal without units": {"kind": "diagonal", "per_parameter": True},
    "population": {"statistics": "population"},
    "one example in the last batch": {"max_batches": None},
}


@pytest.mark.parametrize("options", ESTIMATES.values(), ids=ESTIMATES.keys())
def test_an_estimate_leaves_no_trace(options):
    net, data = network(), loader(17 if "max_batches" in options else 20)
    before = trace_of(net)
    xkfac.estimate(net, data, **options)
    assert_same(before, trace_of(net))


def test_finding_units_leaves_no_trace():
    net = network()
    before = trace_of(net)
    xkfac.find_units(net, torch.zeros(2, 1, 6, 6))
    assert_same(before, trace_of(net))


def moved_by_recentring(net):
    return {f"{path}.{name}" for path in norms_of(net) for name in ("weight", "bias", "running_mean", "running_var")}


def test_recentring_changes_norms_and_nothing_else():
    net, data = network(), loader()
    but = moved_by_recentring(net)
    before, old = trace_of(net, but), {name: net.state_dict()[name].clone() for name in but}
    recentre(net, data)
    assert_same(before, trace_of(net, but))
    assert all(not torch.equal(net.state_dict()[name], value) for name, value in old.items())


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error, self.passed = error, 0

    def forward(self, x):
        self.passed += x.shape[0]
        if self.passed > 10:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("lost"), KeyboardInterrupt(), Stop()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("where", ["loader", "forward"])
@pytest.mark.parametrize("work", [xkfac.estimate, recentre])
def test_a_pass_that_is_interrupted_leaves_no_trace(error, where, work):
    net = network()
    data = loader()
    if where == "forward":
        net.insert(5, Fails(error))
    else:
        data = breaking(data, 1, error)
    before = trace_of(net)
    with pytest.raises(type(error)):
        work(net, data)
    assert_same(before, trace_of(net))


def test_an_estimate_does_not_depend_on_the_batches_before():
    """A batch of one example runs with population statistics: those of the model, whatever ran in between."""
    net = network()
    net[4] = nn.Identity()
    x = torch.randn(9, 1, 6, 6)
    one, many = [x[:1]], [x[1:], x[:1]]
    seen = []
    forward = lambda model, batch: seen.append(out := model(batch)) or out  # noqa: E731
    xkfac.estimate(net, one, forward=forward)
    xkfac.estimate(net, many, forward=forward)
    assert torch.equal(seen[1], seen[-1])  # the first run of each estimate looks for units
    net.eval()
    assert torch.equal(seen[-1], net(x[:1]))


class NormWithDropout(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(4)
        self.drop = nn.Dropout(0.5)


def test_the_mode_of_a_pass_is_evaluation_but_for_the_norms():
    net = nn.Sequential(nn.Dropout(), NormWithDropout(), xkfac.BatchRenorm1d(4)).train()
    set_mode(net, "batch")
    assert [m.training for m in (net, net[0], net[1], net[1].drop, net[2])] == [False, False, True, False, True]
    statistics = [norm.running_mean.clone() for norm in norms_of(net).values()]
    net(torch.randn(8, 4) + 3)
    assert all(torch.equal(a, b.running_mean) for a, b in zip(statistics, norms_of(net).values(), strict=True))
    set_mode(net, "population")
    assert not any(module.training for module in net.modules())


def test_a_loader_gives_batches_with_their_sizes():
    given = list(batches(loader(20), CPU))
    assert [size for size, _ in given] == [8, 8, 4]
    assert [x.shape[0] for _, (x, _) in given] == [8, 8, 4]
    assert len(list(batches(loader(20), CPU, max_batches=2))) == 2
    assert len(list(batches(loader(20), CPU, max_batches=9))) == 3


def test_no_batch_is_drawn_beyond_the_last_one_that_counts():
    drawn = iter([torch.zeros(2)] * 5)
    assert len(list(batches(drawn, CPU, max_batches=2))) == 2
    assert len(list(drawn)) == 3


def test_batches_go_to_the_device():
    ((_, (x, y)),) = batches([(torch.zeros(2), torch.zeros(2))], torch.device("meta"))
    assert x.device.type == y.device.type == "meta"


USED_UP = iter([torch.zeros(2)])
next(USED_UP)
BAD_LOADERS = {
    "empty": ([], {}, "the loader gave no batch; is it empty, or an iterator that was used up before?"),
    "used up": (USED_UP, {}, "the loader gave no batch; is it empty, or an iterator that was used up before?"),
    "a number": (3, {}, "the loader is a int; it must be an iterable of batches"),
    "a tensor": (torch.zeros(2, 3), {}, "the loader is a Tensor; it must be an iterable of batches"),
    "a data set": (TensorDataset(torch.zeros(2)), {}, "the loader is a TensorDataset; it must be an iterable"),
    "no examples": ([torch.zeros(2), torch.zeros(0, 3)], {}, "batch 1 of the loader has no examples"),
    "no tensor": ([{"name": "x"}], {}, "without a tensor that has a batch dimension"),
    "no batches": ([torch.zeros(2)], {"max_batches": 0}, "max_batches must be at least 1, not 0"),
}


@pytest.mark.parametrize(("data", "options", "message"), BAD_LOADERS.values(), ids=BAD_LOADERS.keys())
def test_a_loader_that_gives_no_batches_is_an_error(data, options, message):
    with pytest.raises(XkfacError, match=message.replace("?", r"\?")):
        list(batches(data, CPU, **options))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.zeros(5, 2))


@pytest.mark.parametrize(("options", "shown"), [({}, "1/?"), ({"max_batches": 2}, "1/2, 0 s left")])
def test_a_stream_of_unknown_length_shows_progress(options, shown, capsys):
    assert [size for size, _ in batches(DataLoader(Stream(), 3), CPU, progress=True, **options)] == [3, 2]
    assert shown in capsys.readouterr().err


def test_progress_goes_to_standard_error(capsys):
    list(batches([torch.zeros(2)] * 3, CPU, progress=True, what="curvature"))
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.split("\r")
    assert [line.split(",")[0] for line in lines[1:4]] == ["curvature: 1/3", "curvature: 2/3", "curvature: 3/3"]
    assert lines[-1].startswith("curvature: 3 in ")
    assert shown.err.endswith("\n")
    list(batches([torch.zeros(2)], CPU))
    assert capsys.readouterr().err == ""


def test_progress_may_wrap_the_loader(capsys):
    data, wrapped = [torch.zeros(2)] * 3, []

    def bar(iterable):
        assert iterable is data
        for item in iterable:
            wrapped.append(item)
            yield item

    assert len(list(batches(data, CPU, progress=bar, max_batches=2))) == 2
    assert len(wrapped) == 2
    assert capsys.readouterr().err == ""


def test_the_users_own_module_is_unwrapped():
    net = network()
    for wrapped in (net, nn.DataParallel(net), torch.compile(net), torch.compile(nn.DataParallel(net))):
        assert unwrap(wrapped) is net


def test_compiled_parts_run_as_written_so_that_hooks_see_them():
    ran = []

    def backend(graph, inputs):
        return lambda *arguments: ran.append(1) or graph.forward(*arguments)

    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)), nn.ReLU(), nn.Linear(4, 2))
    data = [torch.randn(8, 4) + 2]
    mean = net[0](data[0]).mean(0)
    net[1] = torch.compile(net[1], backend=backend)
    with torch.no_grad():
        net.eval()(data[0])  # compiled now, as a pass will run it
    assert len(ran) == 1
    units = xkfac.find_units(net, data[0]).units
    assert [(unit.name, unit.norm) for unit in units] == [("0", "1._orig_mod.0"), ("3", None)]
    recentre(net, data)
    assert torch.allclose(unwrap(net[1])[0].running_mean, mean, atol=1e-6)
    assert len(ran) == 1
    net(data[0])
    assert len(ran) == 2


def test_the_device_is_that_of_the_first_tensor():
    assert device_of(nn.Linear(2, 2, device="meta")).type == "meta"
    assert device_of(nn.BatchNorm1d(2, affine=False, device="meta")).type == "meta"
    assert device_of(nn.ReLU()) == CPU
