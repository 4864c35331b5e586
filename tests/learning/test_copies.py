"""A copy of a model that learns has no tie to the learner: a mean teacher, an average of weights, a checkpoint."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.setups import data, leave_side_stream, mlp, started, target
from xkfac import BatchRenorm1d, Learner, consolidate
from xkfac.model.merged_weight import INTERPRETATIONS

NETWORKS = {"torch's BN": nn.BatchNorm1d, "a hooked BN": lambda size: BatchRenorm1d(size, warmup=0, r_steps=1)}


def penalised_gradients(model, learner, between):
    """Return all gradients of a step, with `between` run after the forward pass and before the objective."""
    x, y = target()[0]
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    between()
    learner.objective(loss).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("bn", NETWORKS)
@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
def test_a_copy_that_runs_between_changes_no_bit_of_a_step(interpretation, bn, beside, no_grad):
    found = []
    for copied in (False, True):
        torch.manual_seed(0)
        model, learner = started(mlp(NETWORKS[bn]), interpretation=interpretation)
        leave_side_stream(learner, beside)
        other = copy.deepcopy(model)

        def run(other=other, copied=copied):
            if copied:
                with torch.set_grad_enabled(not no_grad):
                    other(target()[1][0] * 3)

        found.append(penalised_gradients(model, learner, run))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_copy_in_training_is_a_plain_network():
    model, _ = started(bn_momentum=None)
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    twin = copy.deepcopy(model)
    x = target()[0][0]
    assert torch.equal(twin(x), plain.train()(x))
    assert all(torch.equal(a, b) for a, b in zip(twin.buffers(), plain.buffers(), strict=True))


def test_a_copy_of_fixed_bn_uses_batch_statistics_again():
    model = mlp().train()
    learner = Learner(model, consolidate(model, data(), "fixed-bn"))
    learner.begin()
    plain = mlp()
    plain.load_state_dict(model.state_dict())
    x = target()[0][0]
    assert torch.equal(copy.deepcopy(model)(x), plain.train()(x))
    assert not torch.equal(model(x), plain(x))


@pytest.mark.parametrize("bn", NETWORKS)
def test_a_copy_can_be_pickled_and_does_not_keep_the_learner(bn):
    model, learner = started(mlp(NETWORKS[bn]))
    penalised_gradients(model, learner, lambda: None)
    twin = copy.deepcopy(model)
    assert pickle.loads(pickle.dumps(model))(target()[0][0]).isfinite().all()
    pickle.dumps(twin)
    gone = weakref.ref(learner)
    learner.close()
    del learner, model
    gc.collect()
    assert gone() is None


def test_a_model_that_is_pickled_while_it_learns_comes_back_without_a_tie():
    found = []
    for stored in (False, True):
        torch.manual_seed(0)
        model, learner = started()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)

        def run(loaded=loaded, stored=stored):
            if stored:
                loaded(target()[1][0] * 3)

        found.append(penalised_gradients(model, learner, run))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_learner_of_a_copy_is_as_fast_as_one_of_the_original():
    model, learner = started()
    twin = copy.deepcopy(model)
    other = Learner(twin, learner.memory)
    other.load_state_dict(learner.state_dict())
    found = penalised_gradients(model, learner, lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(found, penalised_gradients(twin, other, lambda: None), strict=True))
    assert type(twin[1].forward) is type(model[1].forward)
    other.close()
    learner.close()
    assert not any("forward" in vars(module) for module in (*model.modules(), *twin.modules()))
