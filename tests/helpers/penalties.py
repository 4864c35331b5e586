"""A network away from its anchor with its penalty, and gradients of it by autograd and by differences."""

import torch

from tests.helpers.setups import Everything, data, move, randomise
from xkfac import estimate
from xkfac.model.merged_weight import Reading, anchor_of, bind
from xkfac.model.passes import norms_of
from xkfac.penalty.quadratic import Penalty

CURVATURES = {
    "paper": {},
    "mean": {"form": "mean"},
    "pooled": {"grouping": "pooled"},
    "hierarchical": {"grouping": "hierarchical", "form": "mean"},
    "kfac": {"kind": "kfac"},
    "diagonal": {"kind": "diagonal"},
    "corrected": {"kind": "corrected"},
    "cross-layer": {"cross_layer": True},
}
DAMPING = 0.3


class Problem:
    """A network away from its anchor, its curvature, a mini-batch, and the penalty as a function of all leaves."""

    def __init__(self, curvature, interpretation):
        net = randomise(Everything()).double()
        batches = [(x.double(), y) for x, y in data(2, 5, (2, 7, 7))]
        made = estimate(net, batches, **CURVATURES[curvature])
        self.net, self.curvature, self.interpretation = net, made.curvature, interpretation
        self.anchor = anchor_of(net, made.coverage.units)
        self.bound = bind(net, made.coverage.units)
        self.penalty = Penalty(self.curvature, self.anchor, DAMPING)
        move(net)
        self.x = (torch.randn(5, 2, 7, 7, dtype=torch.float64) * 2 + 0.5).requires_grad_()
        self.leaves = {"x": self.x, **dict(net.named_parameters())}
        self.fixed = self.readings()

    def readings(self):
        """Read every BN of one forward pass in training mode; a momentum of 0 keeps the running statistics."""
        if self.interpretation == "eval":
            return {}
        found, handles = {}, []
        for name, bound in self.bound.items():
            if bound.norm is not None:

                def read(module, inputs, name=name, bound=bound):
                    found[name] = bound.read(inputs[0], self.interpretation)

                handles.append(bound.norm.register_forward_pre_hook(read))
        for norm in norms_of(self.net).values():
            norm.momentum = 0.0
        self.net.train()(self.x)
        for handle in handles:
            handle.remove()
        return found

    def weights(self, readings):
        return {name: bound.merged_weight(readings.get(name)) for name, bound in self.bound.items()}

    def value(self):
        """The penalty where what has no gradient (r and d, statistics that count as constant) stays as it was."""
        readings = {}
        for name, now in self.readings().items():
            then = self.fixed[name]
            moving = now if self.interpretation in ("bn", "brn") else then
            readings[name] = Reading(moving.mean, moving.var, then.r, then.d)
        return self.penalty(self.weights(readings))

    def dense(self, weights):
        """0.5 v^T (H + damping I) v with dense matrices on vec, rows running fastest."""
        v = {name: (weights[name] - self.anchor[name]).mT.flatten(1) for name in self.anchor}
        total = DAMPING * sum((one**2).sum() for one in v.values())
        for name, block in self.curvature.blocks.items():
            for matrix, one in zip(block.dense(), v[name], strict=True):
                total = total + one @ matrix @ one
        if self.curvature.joint is not None:
            one = torch.cat([v[name][0] for name in self.curvature.joint_units])
            total = total + one @ self.curvature.joint.dense() @ one
        return total / 2


def gradients(value, leaves):
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in zip(leaves, grads, strict=True)}


def assert_same_gradients(found, wanted, tolerance):
    for name, gradient in wanted.items():
        error = (found[name] - gradient).abs().max()
        assert error <= tolerance * max(1, gradient.abs().max()), f"{name}: {error}"


@torch.no_grad()
def central_difference(problem, leaf, direction, step=1e-5):
    start = leaf.clone()
    ends = []
    for sign in (1, -1):
        leaf.copy_(start + sign * step * direction)
        ends.append(problem.value())
    leaf.copy_(start)
    return (ends[0] - ends[1]) / (2 * step)
