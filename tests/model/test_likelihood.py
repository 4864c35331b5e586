"""Likelihoods: scores by differentiation, roots by the definition of the Fisher, draws by their frequencies."""

import itertools
import math

import pytest
import torch
from torch import nn

import xkfac
from xkfac.model import likelihood as module
from xkfac.model.likelihood import (
    LIKELIHOODS,
    Bernoulli,
    Categorical,
    Gaussian,
    Likelihood,
    get_likelihood,
    random_signs,
)

CASES = {
    "categorical": (Categorical(), (3, 4)),
    "categorical with positions": (Categorical(), (2, 3, 2, 2)),
    "bernoulli": (Bernoulli(), (3, 4)),
    "bernoulli of one": (Bernoulli(), (5,)),
    "gaussian": (Gaussian(variance=0.5), (3, 4)),
}


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("name", CASES)
def test_score_is_the_gradient_of_the_summed_loss(name):
    likelihood, shape = CASES[name]
    output = torch.randn(shape).double().requires_grad_()
    labels = likelihood.sample(output, generator())
    loss = likelihood.nll(output, labels)
    assert loss.shape == shape[:1]
    (gradient,) = torch.autograd.grad(loss.sum(), output)
    torch.testing.assert_close(likelihood.score(output, labels), gradient)


@pytest.mark.parametrize("name", CASES)
def test_root_and_draws_give_the_fisher_of_the_output(name):
    likelihood, shape = CASES[name]
    output = torch.randn(shape).double()
    roots = torch.stack([root.flatten(1) if root.dim() > 1 else root[:, None] for root in likelihood.root(output)])
    fisher = torch.einsum("kni,knj->nij", roots, roots)
    draws, rng = 20_000, generator()
    many = output.repeat(draws, *[1] * (output.dim() - 1))
    scores = likelihood.score(many, likelihood.sample(many, rng)).reshape(draws, shape[0], -1)
    sampled = torch.einsum("dni,dnj->nij", scores, scores) / draws
    assert (sampled - fisher).norm() < 0.03 * fisher.norm()
    assert scores.mean(0).abs().max() < 0.05


@pytest.mark.parametrize("name", CASES)
def test_random_roots_have_the_fisher_of_the_output_over_all_signs(name, monkeypatch):
    likelihood, shape = CASES[name]
    output = torch.randn(shape).double()
    roots = torch.stack([root.flatten(1) if root.dim() > 1 else root[:, None] for root in likelihood.root(output)])
    patterns = list(itertools.product((-1.0, 1.0), repeat=math.prod(shape[1:])))
    found = []
    for pattern in patterns:
        signs = torch.tensor(pattern).double().reshape(shape[1:]).expand(shape)
        monkeypatch.setattr(module, "random_signs", lambda like, generator, signs=signs: signs)
        found.append(likelihood.random_root(output, generator()).reshape(shape[0], -1))
    vectors = torch.stack(found)
    torch.testing.assert_close(vectors.mean(0), torch.zeros_like(vectors[0]))
    fisher = torch.einsum("kni,knj->nij", roots, roots)
    torch.testing.assert_close(torch.einsum("kni,knj->nij", vectors, vectors) / len(patterns), fisher)


def test_random_signs_are_independent_and_fair():
    signs = random_signs(torch.empty(2000, 5, dtype=torch.float64), generator())
    assert signs.unique().tolist() == [-1, 1]
    moments = signs.T @ signs / 2000
    assert (moments - torch.eye(5)).abs().max() < 0.1
    assert signs.mean(0).abs().max() < 0.1


def test_random_roots_are_as_large_where_the_network_is_sure():
    """Nearly all labels that a sure network draws have a tiny score, and a few have a huge one."""
    output, draws, rng = torch.tensor([[8.0, 0.0, 0.0]]).double().expand(4000, 3), 4000, generator()
    likelihood = Categorical()
    scores = likelihood.score(output, likelihood.sample(output, rng)).square().sum(1)
    roots = likelihood.random_root(output, rng).square().sum(1)
    assert roots.var() < 1e-2 * scores.var()
    assert abs(roots.mean() - scores.mean()) < 5 * (scores.var() / draws).sqrt()


def test_root_of_the_categorical_is_its_hessian():
    """For a softmax the Fisher of the logits is the Hessian of the loss, whatever the label."""
    output = torch.randn(1, 5).double()
    hessian = torch.autograd.functional.hessian(lambda o: Categorical().nll(o, torch.tensor([2])).sum(), output)
    roots = torch.stack(list(Categorical().root(output)))
    torch.testing.assert_close(torch.einsum("kni,knj->ij", roots, roots), hessian[0, :, 0])


def test_sampling_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    for likelihood, shape in CASES.values():
        likelihood.sample(torch.randn(shape, generator=generator()), generator())
        likelihood.random_root(torch.randn(shape, generator=generator()), generator())
    assert torch.equal(torch.get_rng_state(), before)


def dense_net(channels):
    return nn.Sequential(
        nn.Conv2d(2, channels, 1), nn.BatchNorm2d(channels), nn.Tanh(), nn.Conv2d(channels, 3, 1)
    ).double()


def test_curvature_of_dense_predictions_is_that_of_the_mean_loss():
    """Behind the head there is only the softmax, so its Fisher is the Hessian of cross_entropy's mean."""
    net, x = dense_net(2), torch.randn(2, 2, 2, 2).double()
    diagonal = xkfac.estimate(net, [x], "diagonal", labels="exact").curvature.blocks["3"].values
    features = net[:3](x).detach()
    labels = torch.randint(3, (2, 2, 2))

    def loss(weight):
        logits = nn.functional.conv2d(features, weight[:, :-1, None, None], weight[:, -1])
        return nn.functional.cross_entropy(logits, labels)

    weight = torch.cat([net[3].weight.flatten(1), net[3].bias[:, None]], 1).detach()
    hessian = torch.autograd.functional.hessian(loss, weight).reshape(9, 9)
    torch.testing.assert_close(diagonal.flatten(), hessian.diagonal())


class Poisson(Likelihood):
    """A user's own: counts with rate exp(output)."""

    name = "poisson"

    def sample(self, output, generator):
        return torch.poisson(output.exp(), generator=generator)

    def nll(self, output, labels):
        return (output.exp() - labels * output).sum(1)


def test_a_user_s_likelihood_needs_a_sample_and_a_loss_only():
    net, x = nn.Linear(3, 2).double(), torch.randn(4, 3).double()
    rate = net(x).exp().detach()
    estimate = xkfac.estimate(net, [x], "diagonal", likelihood=Poisson(), draws=4000).curvature
    drawn = xkfac.estimate(net, [x], "diagonal", likelihood=Poisson(), labels="sampled", draws=4000).curvature
    assert torch.equal(*(next(iter(one.blocks.values())).values for one in (estimate, drawn)))
    ones = torch.cat([x, torch.ones(4, 1).double()], 1)
    (unit,) = estimate.blocks.values()
    expected = torch.einsum("nc,nd->cd", rate, ones.square()) / 4
    assert (unit.values[0] - expected).norm() < 0.05 * expected.norm()
    with pytest.raises(xkfac.XkfacError, match="'poisson' has no root\\(\\)"):
        xkfac.estimate(net, [x], likelihood=Poisson(), labels="exact")


def test_names_and_errors():
    assert all(get_likelihood(name).name == name for name in LIKELIHOODS)
    with pytest.raises(xkfac.XkfacError, match="likelihood 'gausian' is not known; it is one of categorical"):
        get_likelihood("gausian")
    with pytest.raises(xkfac.XkfacError, match="variance of a Gaussian likelihood must be positive, not 0"):
        Gaussian(0)
    with pytest.raises(xkfac.XkfacError, match=r"takes outputs \[N, classes, ...\], not \[4\]"):
        xkfac.estimate(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), [torch.randn(4, 3)])
