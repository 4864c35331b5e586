"""Gram matrices in stripes against sums of outer products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xkfac.curvature.gram import Gram, add_gram, mirror_, stripe_of


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=6), seed=st.integers(0, 10**6))
def test_gram_adds_many_and_few_vectors_alike_and_is_exactly_symmetric(sizes, seed):
    torch.manual_seed(seed)
    gram, expected = Gram(), 0
    for size in sizes:
        blocks = torch.randn(2, size, 1, 3).double()
        gram.add(blocks, 1 / size)
        expected = expected + torch.einsum("gnsi,gnsj->gij", blocks, blocks) / size
    total = gram.sum()
    torch.testing.assert_close(total, expected)
    assert torch.equal(total, total.mT)


def test_a_gram_of_nothing_is_none():
    assert Gram().sum() is None


@pytest.mark.parametrize("stripe", [1, 4, 7, 128])
@pytest.mark.parametrize("transposed", [False, True])
def test_stripes_are_the_upper_triangle_of_the_product(stripe, transposed, monkeypatch):
    monkeypatch.setattr("xkfac.curvature.gram.stripe_of", lambda features, device: stripe)
    vectors = torch.randn(2, 5, 9).double().mT if transposed else torch.randn(2, 9, 5).double()
    start = torch.randn(2, 9, 9).double()
    start = start + start.mT
    total = start.clone()
    add_gram(total, vectors, -0.5)
    torch.testing.assert_close(mirror_(total), start - 0.5 * vectors @ vectors.mT, rtol=1e-12, atol=1e-12)


def test_vectors_are_taken_as_they_lie_in_memory():
    """Rows of features and, as gradients of images come, features of positions, many and few."""
    for size in (3, 200):
        by_channel = torch.randn(size, 2, 4, 5).double()
        blocks, gram = by_channel.permute(1, 0, 3, 2), Gram()
        gram.add(blocks, 2.0)
        gram.add(blocks.contiguous(), -0.5)
        torch.testing.assert_close(gram.sum(), 1.5 * torch.einsum("gnsi,gnsj->gij", blocks, blocks))


@pytest.mark.parametrize("features", [0, 1, 63, 64, 65, 128, 256, 257, 784, 785, 4609])
def test_stripes_of_a_cpu_are_of_about_one_height_and_fast(features):
    stripe = stripe_of(features, torch.device("cpu"))
    most = 64 if features <= 256 else 128
    if features <= most:
        assert stripe == max(1, features)
    else:
        assert most / 2 < stripe <= most
        assert stripe % 16 == 0
        assert -(-features // stripe) == -(-features // most)


def test_products_of_bfloat16_are_summed_in_float32():
    """Integers of few digits are exact in bfloat16, and their sums beyond 256 only in float32."""
    vectors = torch.randint(-3, 4, (2, 5, 300)).bfloat16()
    total = torch.zeros(2, 5, 5)
    add_gram(total, vectors, 2.0)
    wanted = 2 * vectors.float() @ vectors.float().mT
    assert torch.equal(total.triu(), wanted.triu())
    assert wanted.max() > 512
    gram = Gram()
    gram.add(vectors.mT[:, :, None])
    assert gram.sum().dtype == torch.float32
    assert torch.equal(gram.sum(), wanted / 2)
