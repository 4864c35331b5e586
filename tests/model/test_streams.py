"""A stream of batches gives the memory that a list of the same batches gives, however many there are."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import xkfac
from tests.helpers.setups import data, mlp
from xkfac.curvature import operator
from xkfac.model import streams


class Source(IterableDataset):
    """Gives batches, and says how many examples there are only if it is told to."""

    def __init__(self, batches, length=None):
        self.batches = batches
        if length is not None:
            self.__class__ = type("Sized", (Source,), {"__len__": lambda self: length})

    def __iter__(self):
        return iter(self.batches)


class Counting:
    """An endless stream that counts the batches taken from it."""

    def __init__(self, batches):
        self.batches, self.taken = batches, 0

    def __iter__(self):
        for batch in itertools.cycle(self.batches):
            self.taken += 1
            yield batch


def equal(first, second):
    pairs = zip(first.curvature.tensors(), second.curvature.tensors(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize(("count", "method"), [(1, "xkfac"), (20, "xkfac"), (3, "corrected")])
def test_a_stream_gives_what_a_list_gives(count, method):
    net, batches = mlp(), data(count)
    expected = xkfac.consolidate(net, batches, method)
    kinds = [DataLoader(Source(batches), batch_size=None), DataLoader(Source(batches, 7), batch_size=None)]
    kinds += [] if method == "corrected" else [iter(batches), (batch for batch in batches)]
    for loader in kinds:
        assert equal(xkfac.consolidate(net, loader, method), expected)


@pytest.mark.parametrize(("max_batches", "count"), [(2, 2), (2, 5), (5, 2), (4, 3)])
def test_a_stream_gives_what_a_list_gives_of_at_most_some_batches(max_batches, count, monkeypatch):
    few_draws(monkeypatch, 8)
    net, batches = mlp(), data(count)
    expected = xkfac.consolidate(net, batches, "xkfac", max_batches=max_batches)
    assert equal(expected, xkfac.consolidate(net, batches[:max_batches], "xkfac"))
    assert equal(expected, xkfac.consolidate(net, iter(batches), "xkfac", max_batches=max_batches))


def test_no_more_is_taken_from_an_endless_stream_than_asked_for():
    stream = Counting(data(3))
    memory = xkfac.consolidate(mlp(), stream, "xkfac", max_batches=4)
    assert (stream.taken, memory.examples) == (4, 32)


def few_draws(monkeypatch, enough):
    """Let so many draws be enough."""
    monkeypatch.setattr(operator, "ENOUGH_DRAWS", enough)


@pytest.mark.parametrize("count", [3, 4, 5, 9])
def test_a_long_stream_gives_what_a_long_list_gives(count, monkeypatch):
    few_draws(monkeypatch, 4)
    net, batches = mlp(), data(count)
    assert equal(xkfac.consolidate(net, iter(batches), "xkfac"), xkfac.consolidate(net, batches, "xkfac"))


def test_a_stream_is_read_ahead_by_a_bounded_number_of_batches(monkeypatch):
    few_draws(monkeypatch, 4)
    stream = Counting(data(3))
    ahead, count = streams.counted(stream, 4)
    assert (stream.taken, count) == (4, 4)
    assert [batch[0].sum() for batch in itertools.islice(ahead, 9)] == [x.sum() for x, _ in data(3) * 3]
    with pytest.raises(TypeError):
        len(ahead)


def test_a_stream_is_not_read_ahead_where_the_draws_are_given():
    stream = Counting(data(3))
    held = []

    def forward(net, batch):
        held.append(stream.taken)
        return net(batch[0])

    xkfac.estimate(mlp(), stream, draws=1, max_batches=3, forward=forward)
    assert held == [1, 1, 2, 3]  # the first batch finds the units, too


def test_batches_that_are_written_over_are_kept():
    net, batches = mlp(), data(3)

    def same_place():
        place = torch.empty_like(batches[0][0])
        for x, y in batches:
            yield {"input": place.copy_(x), "y": [y]}

    assert equal(xkfac.consolidate(net, same_place(), "xkfac"), xkfac.consolidate(net, batches, "xkfac"))


def test_progress_knows_the_length_of_a_short_stream(capsys):
    xkfac.consolidate(mlp(), iter(data(3)), "xkfac", progress=True)
    assert "curvature: 3/3" in capsys.readouterr().err


class TestLargeBatches:
    """Streams of batches that are too large to be read ahead until their end."""

    @pytest.fixture(autouse=True)
    def _limit(self, monkeypatch):
        few_draws(monkeypatch, 8)
        size = sum(tensor.numel() * tensor.element_size() for tensor in data(1)[0])
        monkeypatch.setattr(streams, "READ_AHEAD_BYTES", 2 * size)

    def test_about_as_many_bytes_are_read_ahead_as_may_be(self):
        stream = Counting(data(3))
        assert streams.counted(stream, 8)[1] is None
        assert stream.taken == 2

    @pytest.mark.parametrize(("count", "max_batches"), [(8, None), (12, None), (4, 4), (6, 4)])
    def test_as_many_batches_as_there_can_be_are_assumed(self, count, max_batches):
        net, batches = mlp(), data(count)
        expected = xkfac.consolidate(net, batches, "xkfac", max_batches=max_batches)
        assert equal(xkfac.consolidate(net, iter(batches), "xkfac", max_batches=max_batches), expected)

    @pytest.mark.parametrize(("count", "max_batches"), [(3, None), (3, 4)])
    def test_fewer_are_refused(self, count, max_batches):
        with pytest.raises(xkfac.XkfacError) as refused:
            xkfac.consolidate(mlp(), iter(data(count)), "xkfac", max_batches=max_batches)
        assert str(refused.value) == (
            "the loader gave 3 batches, for which draws=None means 3 draws per batch, but this was known too late: it "
            "does not say its length, and its batches are too large to be read ahead; pass draws=3"
        )


def test_a_length_that_is_wrong_is_told():
    class Wrong(list):
        def __len__(self):
            return 100

    with pytest.warns(xkfac.XkfacWarning) as caught:
        xkfac.consolidate(mlp(), Wrong(data(3)), "xkfac")
    assert str(caught[0].message) == (
        "the loader gave 3 batches, which is not the length that it said, so there were 6 draws per batch and not 32; "
        "correct its length, or pass draws=32"
    )
