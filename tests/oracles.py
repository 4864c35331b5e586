"""Brute force, written straight from the paper's definitions with loops and no cleverness, for `nn.Sequential` nets.

A unit is given by the place of its layer (or lone BN) in the net, and its output by the place of the module whose
output is h. Arrays have the format [groups, N, S, features] (see xkfac.curvature.moments).
"""

import copy
import itertools

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def run(net, x):
    """Return the input and the output of every module of a sequential net; a copy runs, so statistics stay."""
    net = copy.deepcopy(net)
    inputs, outputs = [], []
    for module in net:
        inputs.append(x)
        x = module(x)
        if not x.requires_grad:
            x = x.requires_grad_()
        outputs.append(x)
    return inputs, outputs


def patches(conv, x):
    """Return the unrolled input [groups, N, S, C/groups*K] of a convolution, entry by entry."""
    rank = x.dim() - 2
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        pads = [(t // 2, t - t // 2) for t in totals]
    else:
        pads = [(p, p) for p in conv.padding]
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    flat = [side for pair in reversed(pads) for side in pair]
    x = nn.functional.pad(x, flat, mode=mode) if any(flat) else x
    sizes = [
        (x.shape[2 + i] - conv.dilation[i] * (conv.kernel_size[i] - 1) - 1) // conv.stride[i] + 1 for i in range(rank)
    ]
    channels = x.shape[1] // conv.groups
    rows = []
    for group in range(conv.groups):
        examples = []
        for n in range(x.shape[0]):
            positions = []
            for place in itertools.product(*map(range, sizes)):
                features = []
                for c in range(channels):
                    for offset in itertools.product(*map(range, conv.kernel_size)):
                        at = [
                            p * s + o * d for p, s, o, d in zip(place, conv.stride, offset, conv.dilation, strict=True)
                        ]
                        features.append(x[(n, group * channels + c, *at)])
                positions.append(torch.stack(features))
            examples.append(torch.stack(positions))
        rows.append(torch.stack(examples))
    return torch.stack(rows)


def unit_inputs(module, x, homogeneous):
    """Return the inputs of a unit as [groups, N, S, D], a 1 appended where it is homogeneous."""
    x = x.detach()
    if isinstance(module, nn.Linear):
        a = x.reshape(1, x.shape[0], -1, x.shape[-1])
    elif isinstance(module, _BatchNorm):
        a = torch.stack([x[:, c].reshape(x.shape[0], -1, 1) for c in range(x.shape[1])])
    else:
        a = patches(module, x)
    return torch.cat([a, torch.ones_like(a[..., :1])], -1) if homogeneous else a


def unit_outputs(module, h):
    """Return something at a unit's output, shaped as it, as [groups, N, S, C]."""
    if isinstance(module, nn.Linear):
        return h.reshape(1, h.shape[0], -1, h.shape[-1])
    groups = h.shape[1] if isinstance(module, _BatchNorm) else module.groups
    rows = h.shape[1] // groups
    return torch.stack(
        [h[:, g * rows : (g + 1) * rows].reshape(h.shape[0], rows, -1).transpose(1, 2) for g in range(groups)]
    )


def example_gradients(net, x, layer, output):
    """Return p [N, C] and dL_n/dh [N, C, groups, N, S, rows] for every example n and label."""
    _, outputs = run(net, x)
    log_p = outputs[-1].log_softmax(1)
    gradients = []
    for n in range(log_p.shape[0]):
        labels = []
        for label in range(log_p.shape[1]):
            (gradient,) = torch.autograd.grad(-log_p[n, label], outputs[output], retain_graph=True, allow_unused=True)
            labels.append(unit_outputs(net[layer], gradient))
        gradients.append(torch.stack(labels))
    return log_p.detach().exp(), torch.stack(gradients)


def factors(net, batches, layer, output, homogeneous=True):
    """Return A, A', H', H'' (app:kfc; for linear layers S = 1), each [groups, ., .], expectation over labels exact."""
    total = None
    examples = sum(x.shape[0] for x in batches)
    for x in batches:
        a = unit_inputs(net[layer], run(net, x)[0][layer], homogeneous)
        p, g = example_gradients(net, x, layer, output)
        groups, size, positions, _ = a.shape
        parts = [[0, 0, 0, 0] for _ in range(groups)]
        for group in range(groups):
            part = parts[group]
            for s in range(positions):
                for n in range(size):
                    part[0] = part[0] + torch.outer(a[group, n, s], a[group, n, s]) / size
                mean = sum(a[group, n, s] for n in range(size)) / size
                part[1] = part[1] + torch.outer(mean, mean)
                for n, label in itertools.product(range(size), range(p.shape[1])):
                    weight = p[n, label] / size / positions
                    for m in range(size):
                        one = g[n, label, group, m, s]
                        part[2] = part[2] + weight * torch.outer(one, one)
                        for other in range(size):
                            part[3] = part[3] + weight * torch.outer(one, g[n, label, group, other, s])
        stacked = [torch.stack([part[k] for part in parts]) * (size / examples) for k in range(4)]
        total = stacked if total is None else [t + part for t, part in zip(total, stacked, strict=True)]
    return total


def fisher(net, batches, layer, output, homogeneous=True):
    """Return the exact Fisher [groups, C D, C D] of a unit's W~: E_n E_y of squared dL_n/dW~, rows of W~ fastest."""
    total, examples = 0, sum(x.shape[0] for x in batches)
    for x in batches:
        a = unit_inputs(net[layer], run(net, x)[0][layer], homogeneous)
        p, g = example_gradients(net, x, layer, output)
        weight_gradients = torch.einsum("ncgmsr,gmsd->ncgdr", g, a).flatten(3)
        total = total + torch.einsum("nc,ncgi,ncgj->gij", p, weight_gradients, weight_gradients) / examples
    return total


def dense(left, right):
    """Return the Kronecker product of two matrices, a group."""
    return torch.stack([torch.kron(a.contiguous(), h.contiguous()) for a, h in zip(left, right, strict=True)])


def xkfac(a, a_prime, h_prime, h_second, size):
    """Return XK-FAC as eq. bnsimple writes it, [groups, C D, C D]."""
    extra = (size * a_prime - a) / max(size - 1, 1)
    return dense(a, h_prime) + dense(extra, h_second - h_prime)


def input_factors(batches, levels, form):
    """Return the input factor of every level from inputs x [groups, N, S, D] batch by batch, all blocks written out."""
    examples = sum(x.shape[1] for x in batches)
    factors = [0] * len(levels)
    population = None
    if form == "mean" and len(levels) > 1:  # by location, or over everything
        everything = batches if 2 not in levels[-1] else [x.flatten(1, 2)[:, :, None] for x in batches]
        population = torch.cat(everything, 1).mean(1, keepdim=True)
    for x in batches:
        means = [x, *(x.mean(level, keepdim=True) for level in levels[1:])]
        means[-1] = means[-1] if population is None else population
        for k, mean in enumerate(means):
            part = (mean - means[k + 1] if k + 1 < len(means) else mean).expand_as(x)
            factors[k] = factors[k] + torch.einsum("gnsi,gnsj->gij", part, part) / examples
    return factors
