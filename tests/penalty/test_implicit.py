"""Implicit steps are products with (I + c H)^-1, block by block, and let a strong penalty have long steps."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xkfac.penalty.implicit
from tests.helpers.setups import data, mlp, randomise, target
from xkfac import Learner, consolidate
from xkfac.errors import NotFiniteError
from xkfac.penalty.implicit import Implicit


class Mixed(nn.Module):
    """A BN alone, layers with and without biases in front of BN, a grouped convolution, a plain layer at the end."""

    def __init__(self):
        super().__init__()
        self.lone = nn.BatchNorm1d(2)
        self.first = nn.Conv1d(2, 4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.grouped = nn.Conv1d(4, 4, 1, groups=2, bias=False)
        self.second = nn.BatchNorm1d(4, affine=False)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(self.lone(x.view(len(x), 2, 3)))))
        return self.last(torch.tanh(self.second(self.grouped(x))).mean(2))


def started(build, damping=0.0, **options):
    torch.manual_seed(0)
    model = randomise(build()).double()
    memory = consolidate(model, [(x.double(), y) for x, y in data()], **{"method": "xkfac", **options})
    learner = Learner(model, memory, damping=damping, importance=(0.5, 0.5), strength=4e4, penalty_every=1)
    with torch.no_grad():  # away from the anchor, where the Hessian is that of elsewhere
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model, learner


def hessian(learner, parameter):
    """The Hessian of L_s in one parameter where its W~ is linear in it, population statistics held."""

    def penalty():
        return learner._step.quadratic({name: one.merged_weight() for name, one in learner._step.bound.items()})

    columns, step = [], 1.0
    for place in range(parameter.numel()):
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.view(-1)[place] += sign * step
            (gradient,) = torch.autograd.grad(penalty(), parameter)
            found.append(gradient.flatten())
            with torch.no_grad():
                parameter.view(-1)[place] -= sign * step
        columns.append((found[0] - found[1]) / (2 * step))  # exact: L_s is quadratic in it
    return torch.stack(columns, 1)


@pytest.mark.parametrize("build", [mlp, Mixed])
@pytest.mark.parametrize("damping", [0.0, 1e-3])
@pytest.mark.parametrize(
    "made", [{"method": "kfac"}, {"method": "diagonal"}, {"method": "ewc"}, {"method": "kfac", "cross_layer": True}]
)
def test_of_one_kronecker_product_every_block_is_exactly_inverted(build, made, damping, monkeypatch):
    monkeypatch.setattr(xkfac.penalty.implicit, "_STIFF", 0.0)  # no direction counts as flat
    _, learner = started(build, damping, **made)
    weight = 0.3 * 0.5 * 4e4
    implicit = learner.implicit(0.3, rank=1000)
    assert len(implicit.parameters) > 3
    for parameter in implicit.parameters:
        gradient = torch.randn_like(parameter)
        (found,) = implicit([parameter], [gradient])
        matrix = torch.eye(parameter.numel(), dtype=torch.float64) + weight * hessian(learner, parameter)
        wanted = torch.linalg.solve(matrix, gradient.flatten()).view_as(parameter)
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
        free = torch.allclose(matrix, torch.eye(len(matrix), dtype=torch.float64), atol=1e-3)  # a bias in front of a BN
        assert free or not torch.allclose(found, gradient, rtol=1e-3)


@pytest.mark.parametrize("made", [{"form": "paper"}, {"form": "mean"}, {"grouping": "hierarchical"}])
@pytest.mark.parametrize(("rank", "damping"), [(2, 0.0), (2, 1e-3), (1000, 0.0), (1000, 1e-3)])
def test_a_sum_of_products_is_inverted_to_its_diagonal_in_one_basis(made, rank, damping):
    """Vectors exactly; weights by a matrix between 0 and 1 that is near the inverse where the rank allows."""
    model, learner = started(Mixed, damping, **made)
    weight = 0.3 * 0.5 * 4e4
    implicit = learner.implicit(0.3, rank=rank)
    assert set(map(id, implicit.parameters)) == {
        id(p) for name, p in model.named_parameters() if not name.startswith("second")
    }
    for parameter in implicit.parameters:
        size = parameter.numel()
        columns = [
            implicit([parameter], [one.view_as(parameter)])[0].flatten() for one in torch.eye(size, dtype=torch.float64)
        ]
        found = torch.stack(columns, 1)
        values = torch.linalg.eigvalsh(found)
        torch.testing.assert_close(found, found.T, rtol=1e-9, atol=1e-12)
        assert values.min() > 0
        assert values.max() < 1 + 1e-9
        matrix = weight * hessian(learner, parameter)
        if parameter.dim() == 1:
            wanted = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + matrix)
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
        elif rank > 2:
            assert torch.linalg.eigvals(found @ matrix).real.max() < 2 < torch.linalg.eigvalsh(matrix).max()


@pytest.mark.parametrize("made", [{"method": "kfac"}, {"grouping": "hierarchical"}])
def test_a_strong_penalty_takes_steps_that_would_diverge_without(made):
    torch.manual_seed(0)
    model = randomise(mlp())
    memory = consolidate(model, data(), **{"method": "xkfac", **made})
    lr = 0.1
    for kind in ("plain", "implicit"):
        net = copy.deepcopy(model)
        learner = Learner(net, memory, strength=3e4, interpretation="eval")
        learner.begin(target())
        net[1].momentum = net[4].momentum = 0.01
        implicit = learner.implicit(lr, 0.9) if kind == "implicit" else None
        limit = learner.stable_lr(0.9, implicit=implicit)
        assert limit < 0.1 * lr if implicit is None else limit > lr
        optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
        with pytest.raises(NotFiniteError, match="too long") if implicit is None else contextlib.nullcontext():
            for x, y in target() * 30:
                optimizer.zero_grad()
                learner.backward(F.cross_entropy(net(x), y))
                if implicit is not None:
                    implicit.step()
                optimizer.step()
        end = float(learner.last_penalty)
        learner.close()
    assert end < 1e-3


@pytest.mark.parametrize("strength", [1e2, 1e4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("every", [1, 8, 13])
def test_directions_beyond_the_rank_are_implicit_as_far_as_explicit_steps_would_diverge(every, momentum, strength):
    """Inputs that spread evenly have more stiff directions than the rank; the limit is what power iteration finds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    memory = consolidate(model, [(torch.randn(400, 96).double(), torch.randint(3, (400,)))], "kfac", draws=8)
    learner = Learner(model, memory, strength=strength, penalty_every=every)
    lr, rank = 20.0, 4
    implicit = learner.implicit(lr, momentum, rank=rank)
    assert learner.stable_lr(momentum) < lr < learner.stable_lr(momentum, implicit=implicit)
    for _, part in implicit._groups:
        if hasattr(part, "change"):
            part.change[:, :, :-rank] = 0  # the directions beyond the rank are explicit again
    assert learner.stable_lr(momentum, implicit=implicit) < lr


def test_parameters_without_a_gradient_and_those_that_are_not_its_own_are_left_alone():
    model, learner = started(Mixed)
    implicit = learner.implicit(10.0)
    assert isinstance(implicit, Implicit)
    model.last.weight.grad = torch.ones_like(model.last.weight)
    stranger = nn.Parameter(torch.ones(3, dtype=torch.float64))
    implicit.step()
    assert model.first.weight.grad is None
    assert not torch.equal(model.last.weight.grad, torch.ones_like(model.last.weight))
    (same,) = implicit([stranger], [torch.ones(3, dtype=torch.float64)])
    assert torch.equal(same, torch.ones(3, dtype=torch.float64))


def test_weights_with_their_channels_last_are_treated_alike():
    layers = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        net = nn.Sequential(*copy.deepcopy(layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
        net = randomise(net).double().to(memory_format=layout)
        memory = consolidate(net, [(x.double(), y) for x, y in data(2, 8, (3, 5, 5))], "xkfac", grouping="hierarchical")
        implicit = Learner(net, memory, strength=1e4).implicit(0.1)
        generator = torch.Generator().manual_seed(1)
        for parameter in net.parameters():
            given = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            parameter.grad = torch.empty_like(parameter).copy_(given)
        implicit.step()
        results.append([parameter.grad for parameter in net.parameters()])
    assert results[1][0].is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("made", [{"method": "kfac"}, {"grouping": "hierarchical"}])
def test_directions_that_are_not_stiff_are_left_alone(made, monkeypatch):
    """Along these eta ls h is at most a half, so that explicit steps are stable; all others are shortened as before."""
    monkeypatch.setattr(xkfac.penalty.implicit, "_FIRST", 1)  # so that the number of directions has to grow
    _, learner = started(Mixed, **made)
    learner._strength.value = 3e3
    some = learner.implicit(0.3)
    monkeypatch.setattr(xkfac.penalty.implicit, "_STIFF", 0.0)
    every = learner.implicit(0.3)
    fewer = 0
    for (_, part), (_, whole) in zip(some._groups, every._groups, strict=True):
        if hasattr(part, "change"):
            fewer += whole.left.shape[2] - part.left.shape[2]
            left_out = whole.change.amin((0, 1)) >= 1 / 1.5 - 1
            assert int((~left_out).sum()) == part.left.shape[2] > 0
            given = torch.randn(part.left.shape[0], part.right.shape[1], part.left.shape[1], dtype=torch.float64)
            of_some, of_every = given.clone(), given.clone()
            part(of_some.unbind())
            whole(of_every.unbind())
            inside = whole.left[:, :, ~left_out]
            torch.testing.assert_close(of_some @ inside, of_every @ inside, rtol=1e-6, atol=1e-9)
            outside = whole.left[:, :, left_out]
            torch.testing.assert_close(of_some @ outside, given @ outside, rtol=1e-6, atol=1e-9)
    assert fewer > 0


def test_many_equal_eigenvalues_on_which_float32_does_not_converge(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 3))
    memory = consolidate(model, data(1, 2, (3,)), "kfac", labels="empirical")
    whole = torch.linalg.eigh

    def fails_in_float32(matrix):
        if matrix.dtype == torch.float32:  # as LAPACK does on some of such matrices
            raise torch.linalg.LinAlgError("failed to converge")
        return whole(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    found = []
    for net in (model, copy.deepcopy(model).double()):
        learner = Learner(net, memory, strength=1e4)
        torch.manual_seed(1)
        gradients = [torch.randn_like(parameter.float()).to(parameter) for parameter in net.parameters()]
        found.append(learner.implicit(0.3)(list(net.parameters()), gradients))
        assert any((one - other).norm() > 0.1 for one, other in zip(found[-1], gradients, strict=True))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("large", [1, 2**20])
def test_gradients_that_a_gpu_changes_side_by_side_are_those_of_the_cpu(large, monkeypatch):
    monkeypatch.setattr("xkfac.penalty.implicit._LARGE", large)
    model, learner = started(Mixed, grouping="hierarchical")
    wanted = learner.implicit(0.3)
    twin = copy.deepcopy(model).cuda()
    own = Learner(twin, learner.memory, damping=0.0, importance=learner.importance, strength=learner.strength)
    implicit = own.implicit(0.3)
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    found = implicit(list(twin.parameters()), [gradient.cuda() for gradient in gradients])
    for one, other in zip(found, wanted(list(model.parameters()), gradients), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-6, atol=1e-8)
