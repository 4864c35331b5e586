"""A pass over a model that has an open learner: the same curvature as without it, and the learner notices nothing."""

import copy

import pytest
import torch

import xkfac
from tests.helpers.setups import Everything, data, gradients, mlp, randomise, target


@pytest.mark.parametrize("net", ["mlp", "renorm", "convolutions"])
@pytest.mark.parametrize("options", [{}, {"interpretation": "bn"}, {"interpretation": "const"}, {"method": "fixed-bn"}])
def test_an_open_learner_does_not_change_a_curvature(net, options):
    model = {"mlp": mlp, "renorm": lambda: xkfac.to_renorm(mlp()), "convolutions": lambda: randomise(Everything())}[
        net
    ]()
    batches = data(shape=(2, 7, 7) if net == "convolutions" else (6,))
    changes = {name: value for name, value in options.items() if name != "method"}
    memory = xkfac.consolidate(model, batches, options.get("method", "xkfac"), draws=1)
    expected = xkfac.consolidate(model, batches, "xkfac", draws=2)
    with xkfac.Learner(model, memory, **changes) as learner:
        found = xkfac.consolidate(model, batches, "xkfac", draws=2)
        assert not learner._step.readings.readings
    for (name, one), (_, other) in zip(found.curvature.tensors(), expected.curvature.tensors(), strict=True):
        assert torch.equal(one, other), name


def test_a_pass_between_two_steps_changes_no_gradient():
    first = mlp().train()
    memory = xkfac.consolidate(first, data(), "xkfac", draws=1)
    found = []
    for model in (first, copy.deepcopy(first)):
        with xkfac.Learner(model, memory) as learner:
            learner.begin(recentre=False)
            gradients(model, learner)
            if model is not first:
                xkfac.estimate(model, data(), draws=1)
            found.append(gradients(model, learner, target()[1])[1])
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name
