"""Whether a curvature is right, and what the making of it leaves behind, on networks small enough for brute force.

The exact Fisher of a layer comes from its definition: one backward pass for each example and class, through BN with
the batch's statistics, F = sum_n sum_c p_nc g_nc g_nc^T / N with g_nc the gradient of log p_nc in weight and bias.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from adapters import PEERS
from interface import Moved, Peer
from nets import Batches, Case
from torch import Tensor, nn
from torch.nn import functional as F
from turns import described

DRAWS = 256
DEFINITION = "definition"


@dataclass
class Conduct:
    """What was found of a peer.

    notices: "runs", or what it says of BN in training mode. traces: what it changed of the model or the process.
    error: relative distance (Frobenius) to the exact Fisher of a layer, by network. drift: the same to K-FAC by its
    definition, of the weight alone, since some libraries keep weight and bias apart. bias: the share of a layer's
    curvature that falls on a bias in front of a BN; truly 0.
    """

    notices: str = ""
    mode: str = "train"
    traces: dict[str, bool] = field(default_factory=dict)
    error: dict[str, float | str] = field(default_factory=dict)
    drift: dict[str, float] = field(default_factory=dict)
    bias: float | str = ""


@dataclass(frozen=True)
class Truth:
    """A network with the exact Fisher of its first layer and its K-FAC by definition, each [P, P]."""

    case: Case
    exact: Tensor
    kfac: Tensor


def bn_net() -> Case:
    """Return a perceptron with BN behind layers that have a bias, its population's statistics those of the batch."""
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=1.0), nn.ReLU(),
        nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=1.0), nn.ReLU(),
        nn.Linear(6, 4),
    )  # fmt: skip
    inputs = torch.randn(24, 8) + 1
    with torch.no_grad():
        net(inputs)
    for norm in (net[1], net[4]):
        norm.momentum = 0.1
    return Case(net, inputs, torch.randint(4, (24,)))


def conv_net(pixels: int, **options: int) -> Case:
    """Return a convolution of 4 to 6 channels whose output has 2x2 locations, and a linear layer; no BN.

    The fewer locations, the closer K-FAC is to the Fisher, and the plainer are factors that are not K-FAC's.
    """
    torch.manual_seed(1)
    conv = nn.Conv2d(4, 6, 3, **options)
    inputs = torch.randn(16, 4, pixels, pixels) + 0.5
    features = conv(inputs).flatten(1).shape[1]
    return Case(nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(features, 4)), inputs, torch.randint(4, (16,)))


CASES: dict[str, tuple[str, Callable[[], Case]]] = {
    "bn": ("linear layer in front of a BN", bn_net),
    "plain": ("convolution", lambda: conv_net(4)),
    "grouped": ("grouped convolution", lambda: conv_net(4, groups=2)),
    "dilated": ("dilated convolution", lambda: conv_net(6, dilation=2)),
}


def scores(case: Case, wanted: list[Tensor], log_p: Tensor) -> Iterator[tuple[float, list[Tensor]]]:
    """Give p_nc / N and the gradients of log p_nc in some tensors, for every example n and class c."""
    for row in log_p:
        for one in row:
            gradients = torch.autograd.grad(one, wanted, retain_graph=True)
            yield float(one.detach().exp()) / len(log_p), list(gradients)


def exact(case: Case) -> Tensor:
    """Return the exact Fisher of the first layer [P, P], weight before bias."""
    net = copy.deepcopy(case.net)
    log_p = net(case.inputs).log_softmax(1)
    total: Tensor | float = 0.0
    for weight, gradients in scores(case, list(net[0].parameters()), log_p):
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        total = total + weight * torch.outer(flat, flat)
    assert isinstance(total, Tensor)
    return total


def by_definition(case: Case) -> Tensor:
    """Return the K-FAC block of the first layer [P, P]: a Kronecker product a group, expectation over labels exact."""
    net = copy.deepcopy(case.net)
    layer = net[0]
    groups = getattr(layer, "groups", 1)
    h = layer(case.inputs)
    count, rows = len(h), h.shape[1] // groups
    if isinstance(layer, nn.Conv2d):
        a = F.unfold(case.inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    else:
        a = case.inputs[..., None]
    a = a.view(count, groups, -1, a.shape[-1])
    a = torch.cat([a, torch.ones_like(a[:, :, :1])], 2)  # [N, groups, D, S]
    left = torch.einsum("ngds,nges->gde", a, a) / count
    right = torch.zeros(groups, rows, rows)
    for weight, (gradient,) in scores(case, [h], net[1:](h).log_softmax(1)):
        g = gradient.view(count, groups, rows, -1)
        right += weight * torch.einsum("ngrs,ngqs->grq", g, g) / a.shape[-1]
    features = a.shape[2] - 1
    block = torch.zeros(groups, rows, features + 1, groups, rows, features + 1)
    for group in range(groups):
        block[group, :, :, group] = torch.einsum("rq,de->rdqe", right[group], left[group])
    outputs = groups * rows
    where = torch.arange(outputs * (features + 1)).view(outputs, features + 1)
    order = torch.cat([where[:, :-1].flatten(), where[:, -1]])
    return block.view(len(order), len(order))[order][:, order]


def dense(product: Callable[[Moved], Moved], net: nn.Module) -> Tensor:
    """Return a peer's block of the first layer [P, P], column by column, as a penalty would see it."""
    zero = {name: torch.zeros_like(parameter) for name, parameter in net.named_parameters()}
    columns = []
    for name in ("0.weight", "0.bias"):
        for index in range(zero[name].numel()):
            unit = torch.zeros_like(zero[name]).flatten()
            unit[index] = 1
            found = product({**zero, name: unit.view_as(zero[name])})
            columns.append(torch.cat([found[part].flatten().detach() for part in ("0.weight", "0.bias")]))
    return torch.stack(columns, 1)


def snapshot(net: nn.Module) -> dict[str, object]:
    """Return what a curvature pass should leave as it is."""
    modules = list(net.modules())
    return {
        "running statistics": [buffer.clone() for buffer in net.buffers()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in net.parameters()],
        "training flags": [module.training for module in modules],
        "random state": torch.get_rng_state(),
        "attributes and hooks": [
            {name for name in vars(thing) if name != "grad"} for thing in (*modules, *net.parameters())
        ]
        + [len(hooks) for m in modules for name, hooks in vars(m).items() if name.endswith("_hooks")],
    }


def same(before: object, after: object) -> bool:
    """Say whether two parts of snapshots are alike, bit by bit."""
    if isinstance(before, Tensor):
        return isinstance(after, Tensor) and torch.equal(before, after)
    if isinstance(before, list):
        return isinstance(after, list) and all(same(a, b) for a, b in zip(before, after, strict=True))
    return before == after


def with_gradients(net: nn.Module) -> nn.Module:
    """Give the parameters of a network gradients of their own, as in the midst of an accumulation."""
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    return net


def behaviour(peer: Peer, case: Case, found: Conduct) -> None:
    """Find out what a peer says of BN in training mode, and what it leaves behind."""
    data = Batches((case.inputs, case.labels))
    for mode in ("train", "eval"):
        net = with_gradients(copy.deepcopy(case.net)).train(mode == "train")
        before = snapshot(net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                peer.prepare(net)
                peer.curvature(net, data)
            except Exception as error:  # whatever a library raises is its answer
                found.notices = found.notices or described(error)
                continue
        told = [str(one.message) for one in caught if "batchnorm" in str(one.message).lower().replace(" ", "")]
        found.notices = found.notices or (f"warns: {' '.join(told[0].split())}" if told else "runs")
        found.mode = mode
        after = snapshot(net)
        found.traces = {name: not same(part, after[name]) for name, part in before.items()}
        return


def distance(block: Tensor, truth: Tensor) -> float:
    """Return the relative distance of a matrix to another."""
    return float((block - truth).norm() / truth.norm())


def examine(key: str, truths: dict[str, Truth]) -> Conduct:
    """Return what was found of a peer on all networks."""
    peer, found = PEERS[key], Conduct()
    behaviour(peer, truths["bn"].case, found)
    for name, truth in truths.items():
        case = truth.case
        net = copy.deepcopy(case.net).train(name != "bn" or found.mode == "train")
        stage = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                peer.prepare(net)
                product = peer.raw(net, Batches((case.inputs, case.labels), DRAWS if peer.sampled else 1))
                stage = "no error before the product, then "
                block = dense(product, net)
        except Exception as error:  # as above
            text = described(error)
            found.error[name] = text if text == "no Fisher" else stage + text
            continue
        found.error[name] = distance(block, truth.exact)
        own = slice(net[0].weight.numel())
        found.drift[name] = distance(block[own, own], truth.kfac[own, own])
        if name == "bn":
            found.bias = share(block, net)
    if isinstance(found.error["bn"], str):
        found.bias = found.error["bn"]
    return found


def share(block: Tensor, net: nn.Module) -> float:
    """Return the share of the bias in the trace of a block."""
    diagonal = block.diagonal()
    return float(diagonal[-len(net[0].bias) :].sum() / diagonal.sum())


def measure(keys: list[str]) -> dict[str, Conduct]:
    """Return what was found of each peer, and of K-FAC by its definition."""
    cases = {name: make() for name, (_, make) in CASES.items()}
    truths = {name: Truth(case, exact(case), by_definition(case)) for name, case in cases.items()}
    reference = Conduct(bias=share(truths["bn"].kfac, cases["bn"].net))
    reference.error.update({name: distance(truth.kfac, truth.exact) for name, truth in truths.items()})
    return {DEFINITION: reference, **{key: examine(key, truths) for key in keys}}
