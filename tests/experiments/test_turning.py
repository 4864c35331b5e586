"""A turned first layer takes the same steps, with the same penalty, and comes back to where it would have been."""

import copy

import pytest
import torch

from tests.experiments import small_runs
from xkfac import Learner, consolidate
from xkfac.experiments import sequence as sequences
from xkfac.experiments.data import Part
from xkfac.experiments.folder import JobFolder
from xkfac.experiments.networks import perceptron
from xkfac.experiments.recipe import Line
from xkfac.experiments.training import Stepper, make_optimizer, pool
from xkfac.experiments.turning import Turn
from xkfac.kronecker import Kronecker, Term

WIDE = 40  # inputs, so many that the mean term is kept by its root


@pytest.fixture
def part():
    torch.manual_seed(1)
    return Part(torch.rand(48, WIDE, dtype=torch.float64) ** 3, torch.randint(4, (48,)))


def trained(part, norm="bn", tasks=1, **method):
    """Return a network that has left its anchor, and its memory of some tasks."""
    model = perceptron(WIDE, 4, Line(widths=(7, 5), norm=norm), 0).double()
    loader = list(zip(part.x.split(12), part.y.split(12), strict=True))
    memory = consolidate(model, loader, **method)
    for _ in range(tasks - 1):
        with Learner(model, memory) as learner:
            learner.penalty()
            memory = learner.finish([(x.flip(1), y) for x, y in loader])
    return model, memory


def steps(model, memory, part, turn=None):
    """Return the losses and penalties of three epochs with momentum, each in and out of the turn."""
    order = torch.arange(48).view(4, 12)
    examples = pool(part, [torch.arange(WIDE)])
    optimizer = make_optimizer(model, 0.9)
    told = []
    with Learner(model, memory if turn is None else turn.memory, damping=1e-2) as learner:
        learner.load_state_dict({"begun": True, "balance": None})
        stepper = Stepper(model, examples if turn is None else turn.pool(examples), optimizer, learner)
        for _ in range(3):
            if turn is None:
                told += stepper.epoch(order, 0.125)
            else:
                with turn.turned(optimizer):
                    told += stepper.epoch(order, 0.125)
    return told


@pytest.mark.parametrize("norm", ["bn", "brn", "none"])
@pytest.mark.parametrize("tasks", [1, 3])
def test_a_turned_layer_takes_the_same_steps(part, norm, tasks):
    model, memory = trained(part, norm, tasks)
    other = copy.deepcopy(model)
    turn = Turn.of(other, memory)
    assert turn is not None
    expected = steps(model, memory, part)
    assert expected[1] > 0
    assert steps(other, memory, part, turn) == pytest.approx(expected, rel=1e-9)
    for (name, one), two in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-8, atol=1e-10, msg=name)
    moved = (model[0].weight - perceptron(WIDE, 4, Line(widths=(7, 5), norm=norm), 0).double()[0].weight).norm()
    assert moved > 0.01


def test_a_row_of_steps_as_a_graph_has_them_is_the_epoch(part):
    """A graph takes its batches from the epoch's order by a counter that stays on the device."""
    results = []
    for rows in (0, 2):
        model, memory = trained(part)
        turn = Turn.of(model, memory)
        optimizer = make_optimizer(model, 0.9)
        order = torch.randperm(48, generator=torch.Generator().manual_seed(0)).view(4, 12)
        with Learner(model, turn.memory, damping=1e-2) as learner:
            learner.load_state_dict({"begun": True, "balance": None})
            stepper = Stepper(model, turn.pool(pool(part, [torch.arange(WIDE)])), optimizer, learner)
            with turn.turned(optimizer):
                storages = [parameter.data_ptr() for parameter in model.parameters()]
                for group in optimizer.param_groups:
                    group["lr"].fill_(0.125)
                model.train()
                stepper._order, stepper._steps = order, rows
                if rows:
                    for _ in range(2):
                        stepper._next(rows)
                else:
                    for index in order:
                        stepper._step(index)
            # What a graph has captured must stay where it was, in the turn and out of it.
            assert [parameter.data_ptr() for parameter in model.parameters()] == storages
        results.append([*model.state_dict().values(), stepper._totals])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)
    assert (results[0][-1] > 0).all()


def test_the_turned_curvature_is_the_same_operator(part):
    model, memory = trained(part, tasks=2)
    turn = Turn.of(model, memory)
    displacement = torch.randn(memory.units[0].shape, dtype=torch.float64)
    inside = torch.cat([displacement[..., :-1] @ turn.basis, displacement[..., -1:]], -1)
    product = memory.curvature.blocks["0"].product(displacement)
    turned = turn.memory.curvature.blocks["0"].product(inside)
    back = torch.cat([turned[..., :-1] @ turn.basis.mT, turned[..., -1:]], -1)
    torch.testing.assert_close(back, product, rtol=1e-9, atol=1e-12)
    assert turn.memory.curvature.blocks["0"].terms[0].diagonal


@pytest.mark.parametrize(
    "method",
    [{"method": "kfac"}, {"method": "ewc"}, {"method": "corrected"}, {"form": "paper"}, {"cross_layer": True}],
)
def test_other_curvatures_are_left_as_they_are(part, method):
    model, memory = trained(part, **method)
    assert Turn.of(model, memory) is None


def test_a_factor_that_is_no_covariance_is_left_as_it_is(part):
    model, memory = trained(part)
    first, second = memory.curvature.blocks["0"].terms
    memory.curvature.blocks["0"] = Kronecker((Term(first.left + 1.0, first.right), second))
    assert Turn.of(model, memory) is None


def test_a_diagonal_term_is_its_dense_twin():
    torch.manual_seed(0)
    term = Term(torch.rand(2, 1, 5), torch.rand(2, 3, 3), diagonal=True)
    dense = Term(term.dense_left, term.right)
    displacement = torch.randn(2, 3, 5)
    torch.testing.assert_close(term.product(displacement), dense.product(displacement))
    for one in (term, dense):
        out = torch.ones(2, 3, 5)
        one.add_product(displacement, out)
        torch.testing.assert_close(out, 1 + dense.product(displacement))
    blocks = [Kronecker((one,)).scale(2.0) for one in (term, dense)]
    torch.testing.assert_close(blocks[0].diagonal(), blocks[1].diagonal())
    torch.testing.assert_close(blocks[0].dense(), blocks[1].dense())


def test_a_job_gives_the_same_with_and_without(tmp_path, monkeypatch):
    line = small_runs.recipe("lines.xkfac.widths=[16]").lines["xkfac"]
    rows = []
    for name, of in (("with", Turn.of), ("without", lambda model, memory: None)):
        used = []
        monkeypatch.setattr(sequences.Turn, "of", lambda *given, of=of, used=used: used.append(of(*given)) or used[-1])
        job = small_runs.sequence(JobFolder(tmp_path / name, name, 0), line)
        job.run()
        assert used
        assert all((turn is not None) == (name == "with") for turn in used)
        rows.append([job.model.state_dict(), job.folder.result().epochs])
    for (name, one), two in zip(rows[0][0].items(), rows[1][0].values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-3, msg=name)
    penalties = [[epoch["penalty"] for epoch in epochs] for _, epochs in rows]
    assert penalties[0] == pytest.approx(penalties[1], rel=1e-2, abs=1e-6)
    assert penalties[0][-1] > 0
