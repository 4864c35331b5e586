"""Gram matrices of patches, by every way, against the product of patches that are written out."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from xkfac.curvature import patch_gram
from xkfac.curvature.patch_gram import PatchGram, way_of
from xkfac.curvature.patches import Axis, Patches, unroll
from xkfac.model.units import find_units

WAYS = ["unrolled", "products", "convolution"]


def patches_of(conv, image):
    (unit,) = find_units(nn.Sequential(conv), image).units
    return Patches(unit)


def written_out(patches, image):
    x = unroll(image, patches.convolution, patches.groups).flatten(1, 2)
    return x.mT @ x


def check(conv, *images, way):
    patches = patches_of(conv, images[0])
    gram = PatchGram(patches, way)
    for image in images:
        gram.add(image)
    total = gram.sum()
    expected = sum(written_out(patches, image) for image in images)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-10)
    assert torch.equal(total, total.mT)


axis = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3))


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(axes=st.lists(axis, min_size=1, max_size=2), groups=st.integers(1, 3), examples=st.integers(1, 3))
def test_every_way_is_the_product_of_the_patches(way, axes, groups, examples):
    """Any kernel, padding, dilation and size of the image, also where taps see nothing of it, at stride 1."""
    sizes, taps, pads, dilations = zip(*axes, strict=True)
    assume(all(s + 2 * p >= d * (t - 1) + 1 for s, t, p, d in axes))
    layer = [nn.Conv1d, nn.Conv2d][len(axes) - 1]
    conv = layer(2 * groups, groups, taps, 1, pads, dilations, groups, bias=False).double()
    images = [torch.randn(examples, 2 * groups, *sizes).double() for _ in range(2)]
    check(conv, *images, way=way)


@settings(max_examples=40, deadline=None)
@given(axes=st.lists(axis, min_size=1, max_size=2), strides=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_strides(axes, strides):
    sizes, taps, pads, dilations = zip(*axes, strict=True)
    assume(all(s + 2 * p >= d * (t - 1) + 1 for s, t, p, d in axes))
    layer = [nn.Conv1d, nn.Conv2d][len(axes) - 1]
    conv = layer(4, 2, taps, strides[: len(axes)], pads, dilations, 2, bias=False).double()
    check(conv, torch.randn(3, 4, *sizes).double(), way=None)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernel", [(2, 3, 1), (3, 3, 3)])
def test_volumes(way, kernel):
    conv = nn.Conv3d(4, 2, kernel, padding="same", groups=2, bias=False).double()
    check(conv, torch.randn(2, 4, 3, 4, 2).double(), way=way)


@pytest.mark.parametrize("way", WAYS)
def test_images_in_channels_last_order(way):
    conv = nn.Conv2d(4, 2, 3, padding=1, bias=False).double()
    check(conv, torch.randn(2, 4, 5, 4).double().to(memory_format=torch.channels_last), way=way)


@pytest.mark.parametrize("way", WAYS)
def test_images_of_several_sizes_add_up(way):
    conv = nn.Conv2d(2, 2, 3, padding=1, bias=False).double()
    check(conv, *(torch.randn(2, 2, *size).double() for size in ((4, 5), (1, 1), (4, 5), (2, 1))), way=way)


@pytest.mark.parametrize("way", ["unrolled", "products"])
def test_examples_are_written_out_a_few_at_a_time(way, monkeypatch):
    seen = []
    windows = patch_gram._windows
    monkeypatch.setattr(patch_gram, "_examples_at_once", lambda image, features: 2)
    monkeypatch.setattr(patch_gram, "_windows", lambda image, axes: seen.append(len(image[0])) or windows(image, axes))
    check(nn.Conv2d(2, 2, 3, padding=1, bias=False).double(), torch.randn(5, 2, 4, 4).double(), way=way)
    assert seen[:3] == [2, 2, 1]


def test_the_way_by_shape():
    cpu, wide = torch.device("cpu"), torch.float32

    def square(size, taps, stride=1):
        return [Axis(size, taps, stride, 1, taps // 2, taps // 2)] * 2

    assert way_of(square(16, 3), 64, cpu, wide) == "convolution"
    assert way_of(square(16, 3), 1, cpu, wide) == "convolution"
    assert way_of(square(2, 3), 512, cpu, wide) == "products"
    assert way_of(square(2, 3), 3, cpu, wide) == "unrolled"
    assert way_of(square(16, 3), 64, torch.device("cuda"), wide) == "products"
    assert way_of(square(16, 3), 64, cpu, torch.float64) == "products"
    assert way_of(square(32, 7), 3, cpu, torch.float64) == "unrolled"
    assert way_of(square(16, 3, stride=2), 64, cpu, wide) == "unrolled"
    assert way_of(square(16, 1), 64, cpu, wide) == "unrolled"


@pytest.mark.parametrize(("channels", "size", "taps"), [(64, 8, 3), (32, 6, 5), (96, 4, 3)])
def test_single_precision_stays_within_rounding(channels, size, taps):
    conv = nn.Conv2d(channels, 2, taps, padding=taps // 2, bias=False)
    image = torch.randn(8, channels, size, size)
    exact = written_out(patches_of(conv, image), image.double())
    for way in WAYS:
        gram = PatchGram(patches_of(conv, image), way)
        gram.add(image)
        torch.testing.assert_close(gram.sum().double(), exact, rtol=0, atol=3e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(("dtype", "features"), [(torch.bfloat16, 8), (torch.bfloat16, 16), (torch.float64, 4)])
@pytest.mark.parametrize("offset", [0, 1])
def test_large_pieces_are_the_same_bytes(dtype, features, offset):
    """Whatever the numbers are, and only where all of them lie at multiples of the pieces."""
    torch.manual_seed(0)
    flat = torch.randn(offset + 2 * 3 * 5 * 4 * features).to(dtype)[offset:]
    image = flat.view(2, 3, 5, 4, features)
    pieces = patch_gram._in_large_pieces(image)
    assert pieces.is_complex() == (offset == 0 and features * image.element_size() > 16)
    axes = [Axis(5, 2, 1, 1, 0, 0), Axis(4, 3, 1, 1, 0, 0)]
    wanted = patch_gram._windows(image, axes).flatten(4).flatten(2, -2)
    found = patch_gram._written_out(image, axes)
    assert found.shape == (2, 3, 4 * 2, 2 * 3 * features)
    assert torch.equal(found, wanted)
