"""A pass that two or four processes share: the curvature of one process over the same mini-batches, to rounding."""

import functools
import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

import xkfac
from tests.helpers.processes import in_processes
from tests.helpers.shared_pass import (
    SHARED,
    SIZES,
    SYNCHRONISED,
    drawn,
    everything,
    images,
    perceptron,
    process,
    several_sizes,
    whole,
)
from xkfac.curvature.assemble import Outcome
from xkfac.curvature.blocks import Corrected, parts
from xkfac.curvature.labels import Draws
from xkfac.curvature.operator import Settings
from xkfac.curvature.processes import shared_out
from xkfac.plain_values import from_plain


@pytest.fixture(scope="module")
def of_processes(tmp_path_factory):
    """Return a function that gives what so many processes have left, each number of them started once."""

    @functools.cache
    def started(ranks):
        folder = tmp_path_factory.mktemp("processes")
        try:
            return in_processes(process, ranks, folder), folder
        except Exception as error:  # kept, so that no test starts them again to fail as long
            return error

    def made(ranks):
        left = started(ranks)
        if isinstance(left, Exception):
            pytest.fail(f"{ranks} processes that share a pass ended with an error: {left}")
        return left

    return made


@pytest.fixture(params=[2, 4])
def results(request, of_processes):
    return of_processes(request.param)


def same(found, expected, rtol):
    """Assert that two curvatures are the same operator: by its tensors, or where a basis is free by its products."""
    assert found.blocks.keys() == expected.blocks.keys()
    assert found.joint_units == expected.joint_units
    blocks = [(found.blocks[name], expected.blocks[name]) for name in expected.blocks]
    for one, other in [*blocks, *([(found.joint, expected.joint)] if expected.joint else [])]:
        assert type(one) is type(other)
        if isinstance(one, Corrected):
            torch.testing.assert_close(one.dense(), other.dense(), rtol=1e-6, atol=1e-9)
            continue
        assert parts(one).keys() == parts(other).keys()
        for name, tensor in parts(other).items():
            # A bias in front of a BN has no curvature but what is left by rounding.
            atol = rtol * float(tensor.abs().max()) + 1e-28
            torch.testing.assert_close(parts(one)[name], tensor, rtol=rtol, atol=atol)


def identical(curvatures):
    """Assert that all processes have the same bits."""
    for other in curvatures[1:]:
        for (name, one), (_, two) in zip(curvatures[0].tensors(), other.tensors(), strict=True):
            assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("results", "name"), [(ranks, name) for ranks, kinds in SHARED.items() for name in kinds], indirect=["results"]
)
def test_processes_find_what_one_finds_over_the_same_mini_batches(results, name):
    found, _ = results
    expected = xkfac.estimate(everything(), images(), **drawn(name))
    for curvature, examples in (one[name] for one in found):
        same(curvature, expected.curvature, 1e-5 if name == "single" else 1e-11)
        assert examples == expected.examples == sum(SIZES)
    identical([one[name][0] for one in found])


@pytest.mark.parametrize("form", ["mean", "paper"])
def test_blocks_across_layers_are_shared(results, form):
    expected = xkfac.estimate(perceptron(), whole(), form=form, cross_layer=True).curvature
    for one in results[0]:
        same(one[f"cross-layer {form}"], expected, 1e-11)


def test_means_of_a_process_count_by_the_positions_of_its_images(results):
    expected = xkfac.estimate(everything(), several_sizes(), **drawn("pooled")).curvature
    for one in results[0]:
        same(one["several sizes"], expected, 1e-11)


def test_the_number_of_draws_goes_by_the_batches_of_all_processes():
    class Others:
        def exchanged(self, own):
            return [own, [60, True, False]]

    draws = Draws(Settings(), Others())
    draws.decide([None] * 100, None)
    assert draws.per_batch == 4  # 512 over 160, rounded up; it would be 6 over these 100


def test_processes_without_a_batch_get_the_curvature_of_the_others(results):
    found, _ = results
    ranks = len(found)
    keyed = [xkfac.estimate(everything(), images()[1::ranks], labels="empirical").curvature]
    identical([one["alone"] for one in found])
    identical([one["alone corrected"] for one in found])
    assert found[0]["alone"].blocks.keys() == keyed[0].blocks.keys()
    left = parts(found[0]["alone"].blocks["conv"])["left.0"]  # inputs do not depend on the labels that are drawn
    torch.testing.assert_close(left, parts(keyed[0].blocks["conv"])["left.0"], rtol=1e-11, atol=1e-12)
    assert {one["max_batches"] for one in found} == {SIZES[0] * ranks}


def test_streams_are_counted_over_all_processes(results):
    for streamed, listed in (one["streams"] for one in results[0]):
        identical([streamed, listed])


def test_synchronised_layers_run_as_those_of_each_process_and_are_as_before(results):
    for one in results[0]:
        for name in SYNCHRONISED:
            identical([one[f"synchronised {name}"], one[name][0]])
        assert one["still synchronised"]


def test_factors_travel_as_triangles(results):
    found, _ = results
    units = [(1, 5, 7), (1, 4, 6), (1, 3, 5)]

    def triangle(size):
        return size * (size + 1) // 2

    right = sum(2 * triangle(rows) for _, rows, _ in units)
    left = sum(triangle(columns) for *_, columns in units)
    for one in found:
        roots = sum(columns for *_, columns in units)
        assert sum(one["numbers"]["all_reduce"]) == roots + left + right
        # Of the BN layers: mean and variance, and how many batches they have seen.
        assert sum(one["numbers"]["broadcast"]) == 2 * (5 + 4) + 2


def test_decompositions_are_shared_out(results):
    found, _ = results
    assert sum(one["decomposed"] for one in found) == 3
    assert max(one["decomposed"] for one in found) - min(one["decomposed"] for one in found) <= 1


def test_the_memory_is_the_same_file_and_the_network_is_as_before(results):
    found, folder = results
    files = {(folder / f"memory-{rank}.safetensors").read_bytes() for rank in range(len(found))}
    assert len(files) == 1
    assert found[0]["trace"] == (set(), True)
    for one in found[1:]:  # DistributedDataParallel would have broadcast it with the next forward pass
        assert one["trace"] == ({"bn.running_mean"}, True)


@pytest.mark.parametrize(
    ("fault", "own", "others"),
    [
        ("settings", "process 1 has form='paper' where process 0 has form='mean'; give all", None),
        ("none", "the loader gave no batch", None),
        ("failed", "XkfacError: the disk is on fire", "process 1 of the shared pass failed: the disk is on fire"),
        ("positions", "means by location on process 1 and .* use form='paper'", None),
        ("not finite", "NotFiniteError: the factors of unit '.*' are not finite", None),
        ("weights", "'head.weight' of process 1 is not that of process 0; .* load the same state", None),
        ("buffers", "'bn.running_var' of process 1 is not that of process 0", None),
    ],
)
def test_faults_are_raised_on_every_process(results, fault, own, others):
    for rank, one in enumerate(results[0]):
        assert re.search(own if others is None or rank == 1 else others, one[fault]), one[fault]


def test_nothing_but_json_and_tensors_travels():
    sources = Path(xkfac.__file__).parent.rglob("*.py")
    assert not [path for path in sources if re.search(r"^\s*(import|from) pickle", path.read_text(), re.MULTILINE)]
    coverage = xkfac.find_units(everything(), images(1)[0])
    outcome = Outcome(2, 13, coverage, None)
    assert from_plain(Outcome, json.loads(json.dumps(asdict(outcome))), "an outcome") == outcome


def test_costs_are_balanced():
    costs = {f"unit {k}": cost for k, cost in enumerate([9, 1, 5, 4, 3, 2, 8, 6])}
    owners = shared_out(costs, 3)
    loads = [sum(costs[name] for name in costs if owners[name] == rank) for rank in range(3)]
    assert sum(loads) == sum(costs.values())
    assert max(loads) - min(loads) <= 2
    assert shared_out(dict(reversed(costs.items())), 3) == owners


def on_gpu(rank, ranks, folder):
    """Share a pass over the GPU's networks: torch's own SyncBatchNorm, or BN and a single process of NCCL."""
    torch.cuda.set_device(0)
    net = everything().cuda()
    if ranks > 1:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    parallel = nn.parallel.DistributedDataParallel(net, device_ids=[0])
    return {name: xkfac.estimate(parallel, images()[rank::ranks], **drawn(name)).curvature.to("cpu") for name in ON_GPU}


ON_GPU = ("mean", "paper", "corrected")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (1, "nccl")])
def test_on_a_gpu(tmp_path, ranks, backend):
    for results in in_processes(on_gpu, ranks, tmp_path, backend):
        for name, curvature in results.items():
            expected = xkfac.estimate(everything().cuda(), images(), **drawn(name)).curvature.to("cpu")
            same(curvature, expected, 1e-8)
