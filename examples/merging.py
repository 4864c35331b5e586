"""Merge two networks with BN, fine-tuned from one: weighted by their Fisher information, against plain averages."""

import copy

import torch
from digits import accuracy, fine_tune, images, loaders, network

import xkfac
from xkfac.model.merged_weight import bind

torch.manual_seed(0)
upright, labels = images()
turned = upright.view(-1, 8, 8).transpose(1, 2).flatten(1)
mirrored = upright.view(-1, 8, 8).flip(2).flatten(1)

base = network()
fine_tune(base, loaders(upright, labels)[0], epochs=20)
experts, memories, tests = [], [], []
for domain in (turned, mirrored):
    train, _, test = loaders(domain, labels)
    expert = copy.deepcopy(base)
    fine_tune(expert, train, epochs=10)
    experts.append(expert.eval())
    memories.append(xkfac.consolidate(expert, train))
    tests.append(test)


def averaged(networks):
    """Return a network of the averages of all parameters and BN statistics."""
    merged = copy.deepcopy(networks[0])
    states = [one.state_dict() for one in networks]
    merged.load_state_dict({name: sum(state[name] for state in states) / len(states) for name in states[0]})
    return merged.eval()


def solution(memories, damping=1e-3):
    """Return the W~ of each unit that minimise the sum of all penalties, by conjugate gradients."""

    def product(x):
        terms = [memory.curvature.product(x) for memory in memories]
        return {name: sum(term[name] for term in terms) + damping * x[name] for name in x}

    def dot(a, b):
        return sum((a[name] * b[name]).sum() for name in a)

    start = {name: sum(memory.anchor[name] for memory in memories) / len(memories) for name in memories[0].anchor}
    pulls = [m.curvature.product({name: m.anchor[name] - start[name] for name in start}) for m in memories]
    rest = {name: sum(pull[name] for pull in pulls) for name in start}
    x, direction, size = {name: torch.zeros_like(r) for name, r in rest.items()}, dict(rest), dot(rest, rest)
    for _ in range(200):
        image = product(direction)
        step = size / dot(direction, image)
        x = {name: x[name] + step * direction[name] for name in x}
        rest = {name: rest[name] - step * image[name] for name in x}
        size, before = dot(rest, rest), size
        direction = {name: rest[name] + size / before * direction[name] for name in x}
    return {name: start[name] + x[name] for name in x}


@torch.no_grad()
def with_merged_weights(model, units, wanted):
    """Return a copy of a network whose layers, with their BN, have these W~: weight and beta take what they need."""
    model = copy.deepcopy(model)
    for name, one in bind(model, units).items():
        weight, last = wanted[name][0, :, :-1], wanted[name][0, :, -1]
        if one.norm is None:
            one.bias.copy_(last)
        else:
            scale = one.norm.weight / (one.norm.running_var + one.norm.eps).sqrt()
            weight = weight / scale[:, None]
            one.norm.bias.copy_(last + scale * (one.norm.running_mean - one.bias))
        one.weight.copy_(weight.view_as(one.weight))
    return model


def with_new_statistics(model, batches):
    """Return a copy of a network whose BN statistics are those of its inputs now, the usual repair of averages."""
    model = copy.deepcopy(model).train()
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm1d)):
        norm.reset_running_stats()
        norm.momentum = None  # plain averages over all batches
    with torch.no_grad():
        for x in batches:
            model(x)
    return model.eval()


plain = averaged(experts)
both = torch.cat([turned, mirrored])[torch.randperm(2 * len(labels))].split(64)
networks = {
    "first expert": experts[0],
    "second expert": experts[1],
    "plain average": plain,
    "plain average, BN statistics measured again": with_new_statistics(plain, both),
    "weighted by the Fisher information": with_merged_weights(plain, memories[0].units, solution(memories)),
}
averages = []
for name, model in networks.items():
    found = [accuracy(model, test) for test in tests]
    averages.append(sum(found) / 2)
    print(f"{name}: {found[0]:.1f}% of turned, {found[1]:.1f}% of mirrored, {averages[-1]:.1f}% on average")
forgetful, kept = max(averages[:-1]), averages[-1]
