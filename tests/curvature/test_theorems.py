"""The theorems of the paper, by double differentiation and by building its groups one by one."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import oracles
from xkfac.curvature.blocks import Kronecker, Term


def bn_net(widths=(3, 4, 3, 2)):
    first, second, third, classes = widths
    return nn.Sequential(
        nn.Linear(first, second, bias=False),
        nn.BatchNorm1d(second),
        nn.Tanh(),
        nn.Linear(second, third, bias=False),
        nn.BatchNorm1d(third),
        nn.Tanh(),
        nn.Linear(third, classes, bias=False),
    ).double()


LAYERS = (0, 3, 6)


def shifted(net, x, shifts):
    """Return the outputs of a net whose linear layers' outputs h_l are shifted."""
    net = copy.deepcopy(net)
    for place, module in enumerate(net):
        x = module(x)
        if place in shifts:
            x = x + shifts[place]
    return x


def loss_hessian_in_h(net, x, labels, n, first, second):
    """Return d2 L_n / d h_first d h_second, [m, a, m', c], by double differentiation."""
    shapes = [torch.Size((x.shape[0], net[layer].out_features)) for layer in (first, second)]

    def loss(u, v):
        shifts = {first: u + v} if first == second else {first: u, second: v}
        return nn.functional.cross_entropy(shifted(net, x, shifts)[n : n + 1], labels[n : n + 1])

    zeros = tuple(torch.zeros(shape, dtype=x.dtype) for shape in shapes)
    return torch.autograd.functional.hessian(loss, zeros)[0][1]


def loss_hessian_in_w(net, x, labels, n, first, second):
    """Return d2 L_n / d W_first d W_second, [a, b, c, d]."""

    def loss(u, v):
        moved = copy.deepcopy(net)
        weights = {first: net[first].weight.detach() + u, second: net[second].weight.detach() + v}
        if first == second:
            weights = {first: net[first].weight.detach() + u + v}
        out = x
        for place, module in enumerate(moved):
            out = nn.functional.linear(out, weights[place]) if place in weights else module(out)
        return nn.functional.cross_entropy(out[n : n + 1], labels[n : n + 1])

    zeros = tuple(torch.zeros_like(net[layer].weight) for layer in (first, second))
    return torch.autograd.functional.hessian(loss, zeros)[0][1]


@pytest.mark.parametrize("layer", LAYERS)
def test_theorem_1_hessian_of_a_linear_layer(layer):
    net, x, labels = bn_net(), torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0])
    inputs, _ = oracles.run(net, x)
    a = inputs[layer].detach()
    for n in range(4):
        in_h = loss_hessian_in_h(net, x, labels, n, layer, layer)
        expected = sum(
            torch.einsum("b,d,ac->abcd", a[m], a[k], in_h[m, :, k]) for m, k in itertools.product(range(4), repeat=2)
        )
        torch.testing.assert_close(loss_hessian_in_w(net, x, labels, n, layer, layer), expected, atol=1e-12, rtol=1e-9)


def test_theorem_1_between_layers_holds_in_expectation_over_the_model_s_labels():
    """For l != l' the exact Hessian has a further term, dL_n/dh_l' da_{l'-1}/dW_l; its mean over labels is zero."""
    net, x = bn_net(), torch.randn(3, 3).double()
    inputs, outputs = oracles.run(net, x)
    p = outputs[-1].detach().softmax(1)
    first, second = inputs[0].detach(), inputs[3].detach()
    gap, largest_gap_of_one_label = 0, 0
    for n, label in itertools.product(range(3), range(2)):
        labels = torch.full((3,), label)
        in_h = loss_hessian_in_h(net, x, labels, n, 0, 3)
        theorem = torch.einsum("mb,kd,makc->abcd", first, second, in_h)
        difference = loss_hessian_in_w(net, x, labels, n, 0, 3) - theorem
        largest_gap_of_one_label = max(largest_gap_of_one_label, difference.abs().max().item())
        gap = gap + p[n, label] * difference
    assert largest_gap_of_one_label > 1e-3
    torch.testing.assert_close(gap, torch.zeros_like(gap), atol=1e-12, rtol=0)


def groups_one_by_one(a, t):
    """Return G1 + ... + G5 and eq. bnsimple's right side, for a [N, D] and t = d2 L_n / dh dh [n, m, a, m', c].

    Every group is the K-FAC of its summands: the mean over the group of a a^T, times the mean over n of the sum over
    the group of t. `torch.kron` of the two is the block.
    """
    size = a.shape[0]
    indices = range(size)

    def group(belongs):
        pairs = [(n, m, k) for n, m, k in itertools.product(indices, repeat=3) if belongs(n, m, k)]
        if not pairs:
            return torch.zeros(a.shape[1] * t.shape[2], a.shape[1] * t.shape[2], dtype=a.dtype)
        inputs = sum(torch.outer(a[m], a[k]) for _, m, k in pairs) / len(pairs)
        second = sum(t[n, m, :, k] for n, m, k in pairs) / size
        return torch.kron(inputs, second)

    total = (
        group(lambda n, m, k: m == n == k)
        + group(lambda n, m, k: m == k != n)
        + group(lambda n, m, k: m == n != k)
        + group(lambda n, m, k: k == n != m)
        + group(lambda n, m, k: len({n, m, k}) == 3)
    )
    h_prime = sum(t[n, m, :, m] for n, m in itertools.product(indices, repeat=2)) / size
    h_second = t.sum((1, 3)).mean(0)
    big_a, a_prime = a.T @ a / size, torch.outer(a.mean(0), a.mean(0))
    closed = oracles.xkfac(big_a[None], a_prime[None], h_prime[None], h_second[None], size)[0]
    return total, closed


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_closed_form_equals_the_five_groups_on_random_second_derivatives(size):
    a = torch.randn(size, 3).double()
    t = torch.randn(size, size, 2, size, 2).double()
    t = t + t.permute(0, 3, 4, 1, 2)
    total, closed = groups_one_by_one(a, t)
    torch.testing.assert_close(total, closed, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("layer", LAYERS)
def test_closed_form_equals_the_five_groups_on_a_bn_net(size, layer):
    net, x = bn_net(), torch.randn(size, 3).double()
    labels = torch.arange(size) % 2
    t = torch.stack([loss_hessian_in_h(net, x, labels, n, layer, layer) for n in range(size)])
    total, closed = groups_one_by_one(oracles.run(net, x)[0][layer].detach(), t)
    torch.testing.assert_close(total, closed, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_theorem_2_is_exact_where_its_assumption_holds(size):
    """Activations independent of second derivatives, and all orders of the examples equally likely."""
    a = torch.randn(size, 3).double()
    t = torch.randn(size, size, 2, size, 2).double()
    orders = list(itertools.permutations(range(size)))
    exact = sum(torch.einsum("mb,kd,nmakc->badc", a[list(order)], a[list(order)], t) for order in orders)
    exact = exact.reshape(6, 6) / len(orders) / size
    h_prime = torch.einsum("nmamc->ac", t) / size
    h_second = t.sum((0, 1, 3)) / size
    big_a, a_prime = a.T @ a / size, torch.outer(a.mean(0), a.mean(0))
    closed = oracles.xkfac(big_a[None], a_prime[None], h_prime[None], h_second[None], size)[0]
    torch.testing.assert_close(closed, exact, atol=1e-11, rtol=1e-10)


def test_hessian_and_fisher_factors_agree_where_the_rest_of_the_net_is_linear():
    """Behind the head there is only the softmax, whose Hessian has no label in it: H' = hat H' and H'' = hat H''."""
    net, x = bn_net(), torch.randn(4, 3).double()
    labels = torch.zeros(4, dtype=torch.long)
    t = torch.stack([loss_hessian_in_h(net, x, labels, n, 6, 6) for n in range(4)])
    _, _, h_prime, h_second = oracles.factors(net, [x], 6, 6, homogeneous=False)
    torch.testing.assert_close(torch.einsum("nmamc->ac", t) / 4, h_prime[0])
    torch.testing.assert_close(t.sum((0, 1, 3)) / 4, h_second[0])


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 9), rows=st.integers(1, 4), columns=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_theorem_3_positive_semi_definite(size, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(5, size, columns, generator=generator).double()
    g = torch.randn(5, size, size, rows, generator=generator).double() * 10
    mean, total = a.mean(1), g.sum(2)
    big_a = torch.einsum("bnd,bne->de", a, a) / (5 * size)
    a_prime = torch.einsum("bd,be->de", mean, mean) / 5
    h_prime = torch.einsum("bnmr,bnmq->rq", g, g) / (5 * size)
    h_second = torch.einsum("bnr,bnq->rq", total, total) / (5 * size)
    paper = oracles.xkfac(*(m[None] for m in (big_a, a_prime, h_prime, h_second)), size)[0]
    if size == 1:
        terms = (Term(big_a[None], h_prime[None]),)
    else:
        centred = (size * h_prime - h_second) / (size - 1)
        terms = (Term((big_a - a_prime)[None], centred[None]), Term(a_prime[None], h_second[None]))
    arranged = Kronecker(terms).dense()[0]
    torch.testing.assert_close(arranged, paper, atol=1e-8, rtol=1e-9)
    assert torch.linalg.eigvalsh(paper).min() >= -1e-9 * torch.linalg.eigvalsh(paper).max()
