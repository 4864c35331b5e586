"""Small networks, data and training steps that several tests share; importable by spawned processes."""

import torch
import torch.nn.functional as F
from torch import nn

import xkfac
from xkfac.model.passes import norms_of


class Everything(nn.Module):
    """One unit of every kind: a lone BN, strided, grouped, dilated and depthwise convolutions, a free parameter, ..."""

    def __init__(self):
        super().__init__()
        self.lone = nn.BatchNorm2d(2)
        self.conv = nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 2, dilation=2, groups=2)
        self.grouped_bn = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 2, groups=4, bias=False)
        self.depthwise_bn = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.linear = nn.Linear(4, 3)
        self.linear_bn = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        x = torch.tanh(self.bn(self.conv(self.lone(x))))
        x = torch.tanh(self.grouped_bn(self.grouped(x)))
        x = torch.tanh(self.depthwise_bn(self.depthwise(x)))
        x = x.mean((2, 3)) * self.scale
        return self.head(torch.tanh(self.linear_bn(self.linear(x))))


class Alike(nn.Module):
    """Units of one shape: with BN, without a bias, without BN, grouped, BN alone; one of them frozen."""

    def __init__(self):
        super().__init__()
        self.linear = nn.ModuleList(nn.Linear(6, 6, bias=place != 1) for place in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(6, eps=10.0**-place) for place in range(1, 4))
        self.lone = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))
        self.plain = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.grouped = nn.ModuleList(nn.Conv1d(6, 6, 1, groups=2) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(3))
        self.linear[2].weight.requires_grad_(False)
        self.lone[0].bias.requires_grad_(False)

    def forward(self, x):
        for linear, norm in zip(self.linear, self.norms, strict=True):
            x = torch.tanh(norm(linear(x)))
        for one in (*self.lone, *self.plain):
            x = torch.tanh(one(x))
        for one in self.grouped:
            x = torch.tanh(one(x[:, :, None])[:, :, 0])
        return x[:, :3]


class Skipping(nn.Module):
    """A network one block of which can be left out of a forward pass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)
        self.skip = False

    def forward(self, x):
        x = self.first(x)
        return self.head(x if self.skip else x + self.block(x))


def randomise(net):
    """Give every BN parameters and population statistics of its own."""
    for norm in norms_of(net).values():
        if norm.weight is not None:
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)
        norm.running_mean.normal_(std=0.3)
        norm.running_var.uniform_(0.5, 1.5)
    return net


def mlp(bn=nn.BatchNorm1d):
    """Return a small network of linear layers with BN."""
    return randomise(
        nn.Sequential(nn.Linear(6, 5, bias=False), bn(5), nn.ReLU(), nn.Linear(5, 4), bn(4), nn.ReLU(), nn.Linear(4, 3))
    )


def data(count=3, size=8, shape=(6,), classes=3, shift=0.0, scale=1.0, seed=0):
    """Return `count` batches (x, y) of `size` examples."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, *shape, generator=generator) * scale + shift,
            torch.randint(classes, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def target(**changes):
    """Return batches of a task whose statistics differ from those of `data()`."""
    return data(**{"shift": 0.5, "scale": 2.0, "seed": 1, **changes})


def started(model=None, method="xkfac", *, made=None, **options):
    """Return (model, learner), the task begun on `target()`, the model in training mode and away from the anchor."""
    model = mlp() if model is None else model
    memory = xkfac.consolidate(model, data(), method, **(made or {}))
    learner = xkfac.Learner(model, memory, **{"penalty_every": 1, **options})
    learner.begin(target())
    move(model)
    return model.train(), learner


@torch.no_grad()
def move(model, seed=2):
    """Move every parameter that takes a gradient by a little."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)


def gradients(model, learner, batch=None, call=None):
    """Return the objective and a copy of all gradients of one step on `batch`."""
    x, y = target()[0] if batch is None else batch
    model.zero_grad()
    objective = learner.objective(F.cross_entropy((call or model)(x), y))
    objective.backward()
    return objective.detach(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def bare(model):
    """Return a model without the hooks and forward passes that a learner has put on it, or on what it is a copy of."""
    for module in model.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
        vars(module).pop("forward", None)
    return model


def leave_side_stream(learner, beside=False):
    """Have a learner evaluate its penalty after the forward pass instead of beside it, unless `beside`."""
    if not beside and learner._step._hook is not None:
        learner._step._hook.remove()
