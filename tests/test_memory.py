"""Memories: consolidate, extend, check, summary, and moving between devices and dtypes."""

import copy

import pytest
import torch
from torch import nn

import xkfac
from tests.helpers.memories import assert_equal, blocks_of, consolidated, learn, make
from xkfac.curvature.blocks import Corrected, Diagonal, KhatriRao, Kronecker, parts
from xkfac.curvature.estimate import Estimate

OWN, OTHERS = 0.6, 0.4


def two_tasks(kind, variant, dtype=torch.float64):
    """Return a network, the memory of one task, and an estimate on another made the same way."""
    net, first, second = make(kind, dtype=dtype)
    memory = consolidated(net, first, variant)
    new = consolidated(net, second, variant)
    return net, memory, Estimate(new.curvature, new.coverage, new.examples)


def test_consolidate_keeps_anchor_curvature_and_how_it_was_made():
    net, data, _ = make("conv")
    likelihood = xkfac.Gaussian(2.0)
    memory = xkfac.consolidate(net, data, "kfac", likelihood=likelihood, exclude="head", draws=2, max_batches=2)
    new = xkfac.estimate(net, data, "kfac", likelihood=likelihood, exclude=["head"], draws=2, max_batches=2)
    assert (memory.tasks, memory.examples, memory.exclude) == (1, 16, ("head",))
    assert memory.coverage == new.coverage
    assert memory.likelihood is likelihood
    assert memory.method == xkfac.Method("kfac", xkfac.Settings("kfac", draws=2))
    for name, block in new.curvature.blocks.items():
        for part, tensor in parts(block).items():
            assert torch.equal(parts(memory.curvature.blocks[name])[part], tensor)
    scale = net.norm.weight / (net.norm.running_var + net.norm.eps).sqrt()
    expected = torch.cat([scale[:, None] * net.first.weight.flatten(1), net.norm.bias[:, None]], 1)
    expected[:, -1] -= scale * net.norm.running_mean
    torch.testing.assert_close(memory.anchor["first"], expected[None].detach())


def test_the_anchor_does_not_follow_the_network():
    net, data, _ = make("mlp")
    memory = consolidated(net, data)
    before = {name: tensor.clone() for name, tensor in memory.anchor.items()}
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.add_(1)
    assert all(torch.equal(memory.anchor[name], tensor) for name, tensor in before.items())


def test_fine_tuning_has_a_memory_of_nothing():
    net, first, second = make("conv")
    memory = consolidated(net, first, "fine-tuning")
    assert (dict(memory.anchor), dict(memory.curvature.blocks), memory.units) == ({}, {}, ())
    assert all(row.kind == "unprotected" for row in memory.coverage.rows)
    _, extended, _ = learn(net, memory, second)
    assert extended.tasks == 2


def trace(block):
    return block.diagonal().sum((1, 2))


@pytest.mark.parametrize(
    "variant", ["paper", "kfac", "pooled", "hierarchical", "fixed-bn", "xkfac", "mean-hierarchical"]
)
def test_extend_averages_every_block_with_the_trace_of_the_sum(variant):
    net, memory, new = two_tasks("conv", variant)
    extended = memory.extend(net, new, weights=(OWN, OTHERS))
    roots = 0
    for name, block in extended.curvature.blocks.items():
        old, other = memory.curvature.blocks[name], new.curvature.blocks[name]
        torch.testing.assert_close(trace(block), OWN * trace(old) + OTHERS * trace(other))
        if isinstance(block, Kronecker):
            homogeneous = name != "scale"
            expected = old.average(other, OWN, OTHERS, homogeneous=homogeneous)
            for term, before, wanted in zip(block.terms, old.terms, expected.terms, strict=True):
                assert (term.left.shape, term.low_rank) == (before.left.shape, before.low_rank)
                assert torch.equal(term.left, wanted.left)
                assert torch.equal(term.right, wanted.right)
                roots += term.low_rank
    assert (roots > 0) == (variant in ("xkfac", "mean-hierarchical"))


@pytest.mark.parametrize("variant", ["cross-layer", "cross-layer-mean"])
def test_extend_averages_the_factors_across_layers(variant):
    net, memory, new = two_tasks("mlp", variant)
    extended = memory.extend(net, new, weights=(OWN, OTHERS))
    joint = extended.curvature.joint
    assert isinstance(joint, KhatriRao)
    for place, name in enumerate(extended.curvature.joint_units):
        a, b = memory.curvature.joint.own_block(place), new.curvature.joint.own_block(place)
        expected = a.average(b, OWN, OTHERS, homogeneous=True)
        torch.testing.assert_close(joint.own_block(place).dense(), expected.dense())
        trace, *both = (block.diagonal().sum() for block in (extended.curvature.block(name), a, b))
        torch.testing.assert_close(trace, OWN * both[0] + OTHERS * both[1])


@pytest.mark.parametrize("variant", ["xkfac", "kfac", "diagonal", "ewc", "paper", "hierarchical", "cross-layer"])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_extend_with_all_terms_is_the_exact_weighted_sum(kind, variant):
    net, memory, new = two_tasks(kind, variant)
    extended = memory.extend(net, new, weights=(OWN, OTHERS), keep_all=True)
    for name, block in blocks_of(extended).items():
        a = blocks_of(memory)[name].dense()
        b = (new.curvature.joint if name == "joint" else new.curvature.blocks[name]).dense()
        torch.testing.assert_close(block.dense(), OWN * a + OTHERS * b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("variant", ["diagonal", "ewc"])
def test_averaged_diagonals_are_exact(variant):
    net, memory, new = two_tasks("conv", variant)
    extended = memory.extend(net, new, weights=(OWN, OTHERS))
    for name, block in extended.curvature.blocks.items():
        assert isinstance(block, Diagonal)
        hand = OWN * memory.curvature.blocks[name].values + OTHERS * new.curvature.blocks[name].values
        assert torch.equal(block.values, hand)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_averaged_corrected_blocks_hold_the_sums_diagonal_in_the_new_basis(kind):
    net, memory, new = two_tasks(kind, "corrected")
    extended = memory.extend(net, new, weights=(OWN, OTHERS))
    seen = 0
    for name, block in extended.curvature.blocks.items():
        if not isinstance(block, Corrected):
            continue
        seen += 1
        total = OWN * memory.curvature.blocks[name].dense() + OTHERS * new.curvature.blocks[name].dense()
        for group in range(block.left.shape[0]):
            basis = torch.kron(block.left[group], block.right[group])
            torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis), dtype=basis.dtype))
            diagonal = (basis.mT @ total[group] @ basis).diagonal()
            torch.testing.assert_close(block.scales[group].mT.flatten(), diagonal)
    assert seen >= 3
    with pytest.raises(xkfac.XkfacError, match="corrected curvature cannot keep all terms"):
        memory.extend(net, new, weights=(OWN, OTHERS), keep_all=True)


def test_extend_anchors_at_the_network_and_counts():
    net, memory, new = two_tasks("mlp", "xkfac")
    moved = copy.deepcopy(net)
    with torch.no_grad():
        moved[6].weight.add_(1)
    extended = memory.extend(moved, new, weights=(OWN, OTHERS))
    assert (extended.tasks, extended.examples) == (2, 48)
    torch.testing.assert_close(extended.anchor["6"][0, :, :-1], memory.anchor["6"][0, :, :-1] + 1)
    assert torch.equal(extended.anchor["0"], memory.anchor["0"])
    assert (memory.tasks, memory.examples) == (1, 24)


def test_units_of_one_side_alone_count_zero_on_the_other():
    net, first, second = make("mlp", dtype=torch.float64)
    without_head = xkfac.consolidate(net, first, "xkfac", exclude="6")
    without_start = xkfac.estimate(net, second, exclude=["0", "1"])
    extended = without_head.extend(net, without_start, weights=(OWN, OTHERS))
    assert {unit.name for unit in extended.units} == set(extended.anchor) == {"0", "3", "6"}
    dense = {name: block.dense() for name, block in extended.curvature.blocks.items()}
    torch.testing.assert_close(dense["0"], OWN * without_head.curvature.blocks["0"].dense())
    torch.testing.assert_close(dense["6"], OTHERS * without_start.curvature.blocks["6"].dense())
    rows = {row.parameter: row.unit for row in extended.coverage.rows}
    assert rows == {name: {"1": "0", "4": "3"}.get(name[0], name[0]) for name, _ in net.named_parameters()}


def test_extend_refuses_curvature_of_another_kind():
    net, memory, _ = two_tasks("mlp", "xkfac", torch.float32)
    data = make("mlp")[1]
    with pytest.raises(xkfac.XkfacError, match="unit '0' has a Kronecker block on one side and a Diagonal block"):
        memory.extend(net, xkfac.estimate(net, data, "diagonal"), weights=(OWN, OTHERS))
    with pytest.raises(xkfac.XkfacError, match="2 and 1 terms have no average"):
        memory.extend(net, xkfac.estimate(net, data, "kfac"), weights=(OWN, OTHERS))
    with pytest.raises(xkfac.XkfacError, match="join different units across layers"):
        memory.extend(net, xkfac.estimate(net, data, cross_layer=True), weights=(OWN, OTHERS))


def test_extend_refuses_units_of_another_shape_or_make():
    net, first, second = make("mlp")
    memory = consolidated(net, first)
    wider = make("mlp")[0]
    wider[3], wider[4], wider[6] = nn.Linear(8, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)
    with pytest.raises(xkfac.MismatchError, match=r"unit '3' is linear \[1, 9, 9\] with '4' now and was .*\[1, 7, 9\]"):
        memory.extend(wider, xkfac.estimate(wider, second), weights=(OWN, OTHERS))
    with pytest.raises(
        xkfac.MismatchError, match="unit '0' is without a BN behind it now and was merged with '1' in the memory"
    ):
        memory.extend(net, xkfac.estimate(net, second, merge=False), weights=(OWN, OTHERS))
    lone = xkfac.consolidate(net, first, "xkfac", exclude="0")
    with pytest.raises(xkfac.MismatchError, match="unit '1' of the memory is part of unit '0' now; exclude the same"):
        lone.extend(net, xkfac.estimate(net, second), weights=(OWN, OTHERS))


@pytest.mark.parametrize("importance", [(-0.1, 1.0), (1.0, float("nan")), (float("inf"), 0.0)])
def test_extend_refuses_importance_that_is_none(importance):
    net, memory, new = two_tasks("mlp", "xkfac")
    with pytest.raises(xkfac.XkfacError, match="importance of a task must be a number of at least 0"):
        memory.extend(net, new, weights=importance)


def test_the_size_stays_the_same_over_many_tasks(tmp_path):
    net, memory, new = two_tasks("conv", "xkfac", torch.float32)
    sizes, numbers = set(), set()
    for task in range(2, 9):
        memory = memory.extend(net, new, weights=((task - 1) / task, 1 / task))
        numbers.add(sum(tensor.numel() for _, tensor in memory.curvature.tensors()))
        memory.save(tmp_path / "memory")
        sizes.add((tmp_path / "memory").stat().st_size // 64)
    assert memory.tasks == 8
    assert len(numbers) == 1
    assert max(sizes) - min(sizes) <= 1


def test_the_average_of_equal_tasks_is_that_task():
    net, memory, _ = two_tasks("mlp", "xkfac")
    same = Estimate(memory.curvature, memory.coverage, memory.examples)
    extended = memory.extend(net, same, weights=(0.5, 0.5))
    for (_, a), (_, b) in zip(memory.curvature.tensors(), extended.curvature.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


def test_check_names_the_unit_that_does_not_fit():
    net, data, _ = make("conv")
    memory = consolidated(net, data)
    memory.check(net)
    memory.check(copy.deepcopy(net).eval())
    cases = {
        "grouped": (nn.Identity(), r"unit 'grouped': the model lacks 'grouped.weight'; is it the memory's network"),
        "first": (nn.Conv2d(3, 4, 3, bias=False), r"unit 'first': the memory's merged weight is 1x4x19, the model's"),
        "norm": (nn.Identity(), r"unit 'first': the model lacks BN 'norm'; is it the memory's network"),
        "lone": (nn.BatchNorm2d(7), r"unit 'lone': the memory's merged weight is 6x1x2, the model's 7x1x2"),
        "head": (nn.Linear(6, 4), r"unit 'head': the memory's merged weight is 1x3x7, the model's 1x4x7"),
    }
    for name, (module, sentence) in cases.items():
        other = copy.deepcopy(net)
        setattr(other, name, module)
        with pytest.raises(xkfac.MismatchError, match=sentence):
            memory.check(other)
    other = copy.deepcopy(net)
    other.scale = nn.Parameter(torch.ones(5, 1, 1))
    with pytest.raises(xkfac.MismatchError, match="unit 'scale'"):
        memory.check(other)


def test_summary_lists_every_parameter_and_the_totals():
    net, data, _ = make("conv")
    memory = consolidated(net, data)
    head, *lines = memory.summary().splitlines()
    numbers = sum(tensor.numel() for _, tensor in memory.curvature.tensors())
    assert head == repr(memory)
    assert head == f"memory of 1 task, method xkfac, 24 examples, curvature of {numbers:,} numbers"
    columns = [line.split() for line in lines[1:-1]]
    sizes = {name: parameter.numel() for name, parameter in net.named_parameters()}
    assert {line[0]: int(line[3].replace(",", "")) for line in columns} == sizes
    assert {line[0]: line[1] for line in columns}["norm.weight"] == "first"
    assert lines[-1] == f"5 units, {len(sizes)} parameters, {sum(sizes.values()):,} numbers"
    # first: 4 x 19 columns, grouped: 2 x (3 x 13), lone: 6 x (1 x 2), scale: 6, head: 3 x 7; two terms each.
    assert numbers == 2 * (16 + 361 + 2 * (9 + 169) + 6 * (1 + 4) + 9 + 49) + 6


@pytest.mark.parametrize("variant", ["xkfac", "paper", "corrected", "cross-layer"])
def test_to_moves_every_number(variant):
    net, data, _ = make("mlp")
    memory = consolidated(net, data, variant)
    double = memory.to(dtype=torch.float64)
    tensors = [*double.anchor.values(), *(tensor for _, tensor in double.curvature.tensors())]
    assert {tensor.dtype for tensor in tensors} == {torch.float64}
    assert_equal(double.to(dtype=torch.float32), memory)
    moved = memory.to("meta")
    tensors = [*moved.anchor.values(), *(tensor for _, tensor in moved.curvature.tensors())]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(("model", "factors"), [("float64", "float32"), ("float32", "float64")])
def test_a_memory_has_one_dtype_and_serves_a_network_of_another(model, factors):
    net, first, second = make("mlp", dtype=getattr(torch, model))
    memory = consolidated(net, first, accumulation_dtype=getattr(torch, factors))
    assert {tensor.dtype for tensor in memory.anchor.values()} == {torch.float64}
    assert {tensor.dtype for _, tensor in memory.curvature.tensors()} == {torch.float64}
    penalties, extended, _ = learn(net, memory, second)
    assert bool((penalties[1:] > 0).all())
    assert len({tensor.dtype for _, tensor in (*extended.anchor.items(), *extended.curvature.tensors())}) == 1


@pytest.mark.parametrize("method", sorted(set(xkfac.METHODS) - {"fine-tuning"}))
def test_a_network_that_gives_nan_is_refused_by_unit(method):
    net, data, _ = make("mlp")
    with torch.no_grad():
        net[6].bias[0] = float("nan")
    with pytest.raises(xkfac.XkfacError, match=r"the factors of unit '0(\.weight)?' are not finite; check the data"):
        xkfac.consolidate(net, data, method)


def test_statistics_that_are_not_finite_are_refused_by_unit():
    net, first, second = make("mlp")
    memory = consolidated(net, first)
    new = xkfac.estimate(net, second)
    net[4].running_var[0] = float("nan")
    for make_memory in (lambda: consolidated(net, first), lambda: memory.extend(net, new, weights=(OWN, OTHERS))):
        with pytest.raises(xkfac.XkfacError, match="merged weight of unit '3' is not finite; check weights"):
            make_memory()
