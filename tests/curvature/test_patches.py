"""Patches of images against convolutions, loops over entries, and means of what is written out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import oracles
from xkfac.curvature.patches import Axis, Patches, unroll
from xkfac.model.tracing import Convolution
from xkfac.model.units import find_units


@settings(max_examples=40, deadline=None)
@given(
    rank=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
    size=st.integers(5, 6),
)
def test_unrolled_input_times_weight_is_the_convolution(rank, kernel, stride, padding, dilation, groups, size):
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
    conv = layer(4, 2, kernel, stride, padding, dilation, groups, bias=False).double()
    x = torch.randn(2, 4, *[size] * rank).double()
    geometry = Convolution((kernel,) * rank, (stride,) * rank, ((padding, padding),) * rank, (dilation,) * rank)
    patches = unroll(x, geometry, groups)
    weight = conv.weight.reshape(groups, 2 // groups, -1)
    expected = conv(x)
    ours = (patches @ weight.mT.unsqueeze(1)).permute(1, 0, 3, 2).reshape(expected.shape)
    torch.testing.assert_close(ours, expected)


def test_unroll_equals_the_loop_over_entries():
    conv = nn.Conv2d(4, 2, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    x = torch.randn(2, 4, 6, 5)
    geometry = Convolution((3, 2), (2, 1), ((1, 1), (2, 2)), (1, 2))
    assert torch.equal(unroll(x, geometry, 2), oracles.patches(conv, x))


def test_channels_last_inputs_are_unrolled_alike():
    geometry = Convolution((3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1))
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(unroll(x.to(memory_format=torch.channels_last), geometry, 1), unroll(x, geometry, 1))


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 6),
    taps=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 3),
    low=st.integers(0, 4),
    high=st.integers(0, 4),
)
def test_taps_that_read_only_padding_are_left_out(size, taps, stride, dilation, low, high):
    axis = Axis(size, taps, stride, dilation, low, high)
    if axis.positions < 1:
        return
    live, first = axis.live()
    assert live.positions == axis.positions
    read = [axis.pixels(tap) for tap in range(taps)]
    assert [live.pixels(tap) for tap in range(live.taps)] == read[first : first + live.taps]
    assert not any(read[:first] + read[first + live.taps :])
    if any(read):
        assert all([live.pixels(0), live.pixels(live.taps - 1)])


@settings(max_examples=30, deadline=None)
@given(
    rank=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    groups=st.sampled_from([1, 2]),
    bias=st.booleans(),
)
def test_patches_averaged_over_positions(rank, kernel, stride, padding, groups, bias):
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[rank]
    net = nn.Sequential(layer(4, 2, kernel, stride, padding, groups=groups, bias=bias)).double()
    image = torch.randn(3, 4, *range(3, 3 + rank)).double()
    (unit,) = find_units(net, image).units
    patches, x = Patches(unit), unroll(image, unit.convolution, groups, homogeneous=bias)
    assert patches.positions(image) == x.shape[2]
    for layout in [image, image.movedim(1, -1).contiguous().movedim(-1, 1)]:  # channels first, and last
        found = patches.averaged(layout)
        torch.testing.assert_close(found, x.mean(2, keepdim=True)[..., : found.shape[-1]])
        assert found.shape[-1] == x.shape[-1] - bias
    assert torch.equal(patches.unrolled(image), x)
