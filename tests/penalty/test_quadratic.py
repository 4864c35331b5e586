"""The penalty against the dense quadratic form and central differences, in float64."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.penalties import CURVATURES, DAMPING, Problem, assert_same_gradients, central_difference, gradients
from tests.helpers.setups import data, mlp, move
from xkfac import estimate
from xkfac.curvature.blocks import Corrected, Diagonal, KhatriRao, Kronecker, Term
from xkfac.curvature.operator import Curvature
from xkfac.errors import MismatchError
from xkfac.model.merged_weight import INTERPRETATIONS, anchor_of, bind
from xkfac.penalty.quadratic import Penalty


def test_the_network_has_every_kind_of_unit():
    units = {name: bound.unit for name, bound in Problem("paper", "brn").bound.items()}
    kinds = {name: (unit.kind, unit.norm, unit.shape) for name, unit in units.items()}
    assert kinds == {
        "scale": ("free", None, (1, 1, 4)),
        "lone": ("norm", "lone", (2, 1, 2)),
        "conv": ("conv", "bn", (1, 4, 19)),
        "grouped": ("conv", "grouped_bn", (2, 2, 9)),
        "depthwise": ("conv", "depthwise_bn", (4, 1, 5)),
        "linear": ("linear", "linear_bn", (1, 3, 5)),
        "head": ("linear", None, (1, 3, 4)),
    }


def test_every_kind_of_block_is_met():
    blocks = {name: Problem(name, "eval").curvature for name in CURVATURES}
    assert isinstance(blocks["diagonal"].blocks["conv"], Diagonal)
    assert isinstance(blocks["corrected"].blocks["conv"], Corrected)
    assert isinstance(blocks["cross-layer"].joint, KhatriRao)
    assert blocks["cross-layer"].joint_units == ("linear", "head")
    assert any(term.low_rank for term in blocks["hierarchical"].blocks["conv"].terms)
    assert len(blocks["hierarchical"].blocks["conv"].terms) == 3
    assert len(blocks["pooled"].blocks["conv"].terms) == 2


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_value_and_all_gradients_are_those_of_the_dense_quadratic(curvature, interpretation):
    problem = Problem(curvature, interpretation)
    value = problem.penalty(problem.weights(problem.readings()))
    dense = problem.dense(problem.weights(problem.readings()))
    assert value > 0.1
    torch.testing.assert_close(value, dense, rtol=1e-11, atol=0)
    found, wanted = gradients(value, problem.leaves), gradients(dense, problem.leaves)
    assert_same_gradients(found, wanted, 1e-10)
    # The mini-batch mean takes a bias in front of a BN out again; without its gradient the input is not reached.
    through = interpretation in ("bn", "brn")
    zero = {"grouped.bias", "linear.bias"} if through else {"x"}
    assert {name for name, gradient in found.items() if gradient.abs().max() < 1e-10} == zero


@pytest.mark.parametrize("interpretation", INTERPRETATIONS)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_gradients_are_central_differences_along_random_directions(curvature, interpretation):
    problem = Problem(curvature, interpretation)
    found = gradients(problem.value(), problem.leaves)
    for name, leaf in problem.leaves.items():
        direction = torch.randn_like(leaf)
        difference = central_difference(problem, leaf, direction)
        slope = (found[name] * direction).sum()
        torch.testing.assert_close(difference, slope, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text)


@pytest.mark.parametrize("interpretation", ["bn", "brn"])
def test_every_entry_of_every_gradient_is_its_central_difference(interpretation):
    problem = Problem("paper", interpretation)
    found = gradients(problem.value(), problem.leaves)
    for name, leaf in problem.leaves.items():
        entries = range(leaf.numel()) if name != "x" else range(0, leaf.numel(), 17)
        for entry in entries:
            direction = torch.zeros_like(leaf).flatten()
            direction[entry] = 1
            difference = central_difference(problem, leaf, direction.reshape(leaf.shape))
            torch.testing.assert_close(difference, found[name].flatten()[entry], rtol=1e-5, atol=1e-6)


def test_damping_is_lambda_times_the_identity():
    anchor = {"a": torch.randn(2, 3, 4), "b": torch.randn(1, 1, 5)}
    nothing = Curvature({name: Diagonal(torch.zeros_like(value)) for name, value in anchor.items()})
    weights = {name: torch.randn_like(value).requires_grad_() for name, value in anchor.items()}
    value = Penalty(nothing, anchor, 0.7)(weights)
    moves = {name: (weights[name] - anchor[name]).detach() for name in anchor}
    torch.testing.assert_close(value, 0.35 * sum((one**2).sum() for one in moves.values()))
    value.backward()
    for name, one in moves.items():
        torch.testing.assert_close(weights[name].grad, 0.7 * one)
    problem = Problem("paper", "eval")
    weights = problem.weights({})
    difference = problem.penalty(weights) - Penalty(problem.curvature, problem.anchor, 0.0)(weights)
    square = sum(((weights[name] - problem.anchor[name]) ** 2).sum() for name in problem.anchor)
    torch.testing.assert_close(difference, DAMPING / 2 * square)


@pytest.mark.parametrize("curvature", CURVATURES)
def test_zero_at_the_anchor(curvature):
    problem = Problem(curvature, "eval")
    weights = {name: value.clone().requires_grad_() for name, value in problem.anchor.items()}
    value = problem.penalty(weights)
    value.backward()
    assert value == 0
    assert all(weight.grad.abs().max() == 0 for weight in weights.values())


def test_the_upstream_gradient_scales_all_gradients():
    problem = Problem("cross-layer", "brn")
    once = gradients(problem.value(), problem.leaves)
    value = problem.value()
    thrice = gradients(value * torch.tensor(3.0, dtype=torch.float64) + value.detach(), problem.leaves)
    assert_same_gradients(thrice, {name: 3 * gradient for name, gradient in once.items()}, 1e-12)


def test_a_second_derivative_is_refused_rather_than_wrong():
    problem = Problem("paper", "eval")
    (first,) = torch.autograd.grad(problem.value(), [problem.net.head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        first.sum().backward()


def psd(generator, size, rank, exponent):
    root = torch.randn(1, rank, size, generator=generator)
    columns = 10.0 ** (torch.rand(size, generator=generator) * 4 - 2)
    root = root * columns * 10.0 ** (exponent / 2)
    return root.mT @ root


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    ranks=st.tuples(*[st.integers(1, 6)] * 4),
    exponents=st.tuples(*[st.integers(-8, 8)] * 4),
    null_space=st.booleans(),
)
def test_never_negative_and_right_to_rounding_in_float32(seed, rows, columns, ranks, exponents, null_space):
    g = torch.Generator().manual_seed(seed)
    terms = tuple(
        Term(psd(g, columns, ranks[2 * k], exponents[2 * k]), psd(g, rows, ranks[2 * k + 1], exponents[2 * k + 1]))
        for k in range(2)
    )
    weight = torch.randn(1, rows, columns, generator=g)
    if null_space:
        weight = torch.linalg.eigh(terms[0].right)[1][:, :, :1] @ weight[:, :1]
    weight.requires_grad_()
    value = Penalty(Curvature({"a": Kronecker(terms)}), {"a": torch.zeros(1, rows, columns)})({"a": weight})
    value.backward()
    wide = weight.detach().double()
    products = [(t.right.double(), t.left.double()) for t in terms]
    exact = sum((wide * (h @ wide @ a)).sum() for h, a in products) / 2
    bound = sum((wide.abs() * (h.abs() @ wide.abs() @ a.abs())).sum() for h, a in products) / 2
    assert value >= 0
    assert abs(value.double() - exact) <= 1e-5 * bound
    error = (weight.grad.double() - sum(h @ wide @ a for h, a in products)).abs()
    assert (error <= 1e-5 * sum(h.abs() @ wide.abs() @ a.abs() for h, a in products)).all()


def single():
    """Return a float32 network away from its anchor with its penalty and merged weights."""
    net = mlp()
    made = estimate(net, data())
    penalty = Penalty(made.curvature, anchor_of(net, made.coverage.units), 1e-3)
    bound = bind(net, made.coverage.units)
    move(net)
    return net, penalty, lambda: {name: one.merged_weight() for name, one in bound.items()}


def test_full_precision_under_autocast():
    net, penalty, weights = single()
    wanted = gradients(penalty(weights()), dict(net.named_parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        assert (torch.randn(4, 4) @ torch.randn(4, 4)).dtype == torch.bfloat16
        value = penalty(weights())
    assert value.dtype == torch.float32
    assert torch.equal(value, penalty(weights()))
    found = gradients(value, dict(net.named_parameters()))
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())


def test_weights_of_another_dtype_than_the_curvature():
    net, penalty, weights = single()
    value = penalty(weights())
    wide = penalty({name: one.double() for name, one in weights().items()})
    torch.testing.assert_close(wide, value)
    wide.backward()
    assert net[0].weight.grad.abs().max() > 0


def test_anchor_and_curvature_of_different_units_are_refused():
    _, penalty, _ = single()
    less = {name: value for name, value in penalty.anchor.items() if name != "3"}
    with pytest.raises(MismatchError, match="unit '3' has no anchor"):
        Penalty(penalty.curvature, less)
    blocks = {name: block for name, block in penalty.curvature.blocks.items() if name != "3"}
    with pytest.raises(MismatchError, match="unit '3' has no curvature"):
        Penalty(Curvature(blocks), penalty.anchor)


def test_nothing_to_protect_costs_nothing():
    assert Penalty(Curvature({}), {})({}) == 0


def test_the_call_leaves_its_arguments_alone():
    _, penalty, weights = single()
    anchor, given_weights = copy.deepcopy(dict(penalty.anchor)), weights()
    before = {name: one.detach().clone() for name, one in given_weights.items()}
    penalty(given_weights).backward()
    assert all(torch.equal(penalty.anchor[name], one) for name, one in anchor.items())
    assert all(torch.equal(given_weights[name], one) for name, one in before.items())
