"""Small networks, their data, and exact comparison of memories, for the tests of memories and files."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from xkfac.curvature.blocks import parts

VARIANTS = {
    **{name: {"method": name} for name in xkfac.METHODS},
    "paper": {"form": "paper"},
    "pooled": {"grouping": "pooled", "form": "paper"},
    "hierarchical": {"grouping": "hierarchical", "form": "paper"},
    "mean-hierarchical": {"grouping": "hierarchical", "form": "mean"},
    "cross-layer": {"cross_layer": True, "form": "paper"},
    "cross-layer-mean": {"cross_layer": True, "form": "mean"},
}


def mlp():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)
    )


class ConvNet(nn.Module):
    """Convolution and BN, grouped convolution, a lone BN, a free parameter, and a head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 6, (3, 2), stride=2, groups=2)
        self.lone = nn.BatchNorm2d(6)
        self.scale = nn.Parameter(torch.ones(6, 1, 1))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        x = self.lone(self.grouped(x).tanh()) * self.scale
        return self.head(x.mean((2, 3)))


NETS = {"mlp": (mlp, (6,)), "conv": (ConvNet, (2, 5, 5))}


def make(kind="mlp", seed=0, dtype=torch.float32):
    """Return a network with used BN statistics, its data, and another task's data."""
    torch.manual_seed(seed)
    build, shape = NETS[kind]
    net = build().to(dtype)
    tasks = [
        [(torch.randn(8, *shape, dtype=dtype) + shift, torch.randint(0, 3, (8,))) for _ in range(3)]
        for shift in (0.0, 0.5)
    ]
    net.train()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for x, _ in tasks[0]:
            net(x)
    return net, *tasks


def consolidated(net, data, variant="paper", **options):
    return xkfac.consolidate(net, data, **{"method": "xkfac", **VARIANTS[variant], **options})


def learn(net, memory, data, steps=2, **options):
    """Take a copy of the network through a task; return the penalties, the extended memory, and the network."""
    net = copy.deepcopy(net)
    learner = xkfac.Learner(net, memory)
    learner.begin(data)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    penalties = []
    for x, y in data[:steps]:
        loss = learner.objective(F.cross_entropy(net(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        penalties.append(learner.last_penalty)
    return torch.stack(penalties), learner.finish(data, **options), net


def blocks_of(memory):
    joint = {} if memory.curvature.joint is None else {"joint": memory.curvature.joint}
    return {**memory.curvature.blocks, **joint}


def assert_equal(a, b):
    """Every number and every word of two memories is the same."""
    assert list(a.anchor) == list(b.anchor)
    for name, tensor in a.anchor.items():
        assert tensor.dtype == b.anchor[name].dtype
        assert torch.equal(tensor, b.anchor[name]), name
    assert list(blocks_of(a)) == list(blocks_of(b))
    for name, block in blocks_of(a).items():
        other = blocks_of(b)[name]
        assert type(block) is type(other)
        assert list(parts(block)) == list(parts(other))
        for part, tensor in parts(block).items():
            assert tensor.dtype == parts(other)[part].dtype
            assert torch.equal(tensor, parts(other)[part]), (name, part)
    assert a.curvature.joint_units == b.curvature.joint_units
    words = ("tasks", "examples", "exclude", "method", "coverage")
    assert [getattr(a, word) for word in words] == [getattr(b, word) for word in words]
    assert (a.likelihood.name, a.likelihood.arguments) == (b.likelihood.name, b.likelihood.arguments)
    assert a.summary() == b.summary()
