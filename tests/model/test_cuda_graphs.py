"""Curvature passes that are replayed as CUDA graphs."""

import copy
import gc
from collections import UserDict, namedtuple

import pytest
import torch

from tests.helpers.setups import Everything, data, randomise
from xkfac import XkfacError, consolidate, estimate
from xkfac.model.batches import cloned
from xkfac.model.constant_bn import constants_of

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_graph_needs_a_cuda_device():
    with pytest.raises(XkfacError, match="graph=True needs the model on a CUDA device; leave it out"):
        consolidate(randomise(Everything()), data(2, 8, (2, 7, 7)), "xkfac", graph=True)


def test_a_batch_is_cloned_in_its_own_shape():
    pair = namedtuple("pair", "x y")
    batch = {"a": torch.ones(2), "b": [torch.zeros(3), pair(torch.ones(1), 5)], "c": (torch.ones(2), "text")}
    copy = cloned(batch)
    assert type(copy["b"]) is list
    assert type(copy["b"][1]) is pair
    assert copy["c"][1] == "text"
    assert copy["b"][1].y == 5
    copy["a"].zero_()
    copy["b"][1].x.zero_()
    assert batch["a"].sum() == 2
    assert batch["b"][1].x == 1


class Encoding(UserDict):
    """A batch that knows how to move, as tokenizers give it."""

    def to(self, device):
        return self


def test_a_batch_of_a_class_of_its_own_is_cloned_as_one():
    batch = Encoding(ids=torch.ones(2))
    copy = cloned(batch)
    assert type(copy) is Encoding
    copy["ids"].zero_()
    assert batch["ids"].sum() == 2


def batches():
    """Return batches on the GPU, the last one shorter than the others."""
    whole = [(x.cuda(), y.cuda()) for x, y in data(6, 8, (2, 7, 7))]
    return [*whole, tuple(tensor[:5] for tensor in whole[0])]


@CUDA
@pytest.mark.parametrize("statistics", ["batch", "population"])
@pytest.mark.parametrize("kind", ["xkfac", "kfac", "diagonal", "corrected"])
def test_replays_give_the_factors_of_ordinary_passes(kind, statistics):
    model, options = randomise(Everything()).cuda(), {"labels": "empirical", "statistics": statistics}
    one, two = (estimate(model, batches(), kind, **options, graph=graph).curvature for graph in (False, True))
    displacements = {name: torch.randn_like(block.diagonal()) for name, block in one.blocks.items()}
    for name, product in one.product(displacements).items():
        torch.testing.assert_close(two.product(displacements)[name], product, rtol=1e-3, atol=1e-5, msg=name)


@CUDA
def test_population_statistics_are_prepared_once_in_a_pass_and_give_the_factors_of_the_cpu(monkeypatch):
    model = randomise(Everything()).double()
    prepared = []
    monkeypatch.setattr(
        "xkfac.curvature.capture.constants_of", lambda *given: prepared.append(1) or constants_of(*given)
    )
    for _ in range(2):
        options = {"labels": "empirical", "statistics": "population", "grouping": "hierarchical"}
        given = [(x.double(), y) for x, y in data(3, 8, (2, 7, 7))]
        wanted = estimate(model, given, **options).curvature
        found = estimate(copy.deepcopy(model).cuda(), [(x.cuda(), y.cuda()) for x, y in given], **options).curvature
        for (name, one), (_, other) in zip(found.tensors(), wanted.tensors(), strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-8, atol=1e-10, msg=name)
        assert 0 < len(prepared) < 5  # BN layers of images, of which the first takes part in the graph
        prepared.clear()
        randomise(model)


@CUDA
def test_every_replay_draws_labels_of_its_own():
    model = randomise(Everything()).cuda()
    same = [batches()[0]] * 40
    traces = [
        sum(
            float(block.diagonal().sum())
            for block in estimate(model, same, graph=graph, draws=1).curvature.blocks.values()
        )
        for graph in (False, True)
    ]
    assert traces[1] == pytest.approx(traces[0], rel=0.2)
    other = estimate(model, same, graph=True, draws=1, seed=1).curvature
    assert sum(float(block.diagonal().sum()) for block in other.blocks.values()) != traces[1]


def test_no_node_of_the_graph_outlives_a_pass():
    """A node for a parameter belongs to the stream that it was made on; a step captured later must not meet it."""
    model = randomise(Everything())
    batch = data(1, 8, (2, 7, 7))[0]

    def nodes():
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            made = [
                parameter.expand_as(parameter).grad_fn for parameter in model.parameters() if parameter.requires_grad
            ]
            return [one.next_functions[0][0] for one in made]

    handle = model.register_forward_pre_hook(lambda *_: [node.metadata.update(seen=True) for node in nodes()] and None)
    gc.collect()
    gc.disable()
    try:
        estimate(model, [batch] * 2)
        model(batch[0])  # a node that is left over from the pass would be seen here
        handle.remove()
        assert not any("seen" in node.metadata for node in nodes())
    finally:
        gc.enable()
