"""Inputs of a network: images as torchvision resizes, mirrors and normalises them; crops distributed as its own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from xkfac.experiments.data.augmentation import Augmentation
from xkfac.experiments.data.digits import stream


def pictures(count, side, seed=0):
    return torch.randint(256, (count, 3, side, side), generator=stream("pictures", seed), dtype=torch.uint8)


def normalised(x):
    """What torchvision makes of images with values from 0 to 255."""
    from torchvision.transforms import functional

    return functional.normalize(x.float() / 255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def draws_of(boxes, side):
    """The draws that stand for boxes (left, top, width, height, mirrored) in whole pixels."""
    rows = [[(x + w / 2) / side, (y + h / 2) / side, w / side, h / side, -1.0 if m else 1.0] for x, y, w, h, m in boxes]
    return torch.tensor(rows)


@st.composite
def boxes_of_pictures(draw):
    side = draw(st.integers(1, 40))
    boxes = []
    for _ in range(draw(st.integers(1, 5))):
        width, height = draw(st.integers(1, side)), draw(st.integers(1, side))
        left, top = draw(st.integers(0, side - width)), draw(st.integers(0, side - height))
        boxes.append((left, top, width, height, draw(st.booleans())))
    return side, boxes


@settings(max_examples=150, deadline=None)
@given(boxes_of_pictures(), st.integers(1, 40), st.integers(0, 10))
def test_every_picture_is_cropped_and_resized_as_torchvision_does(case, pixels, seed):
    from torchvision.transforms import functional

    side, boxes = case
    x = pictures(len(boxes), side, seed)
    wanted = []
    for image, (left, top, width, height, mirrored) in zip(x, boxes, strict=True):
        crop = functional.resized_crop(image.float(), top, left, height, width, [pixels, pixels], antialias=False)
        wanted.append(functional.hflip(crop) if mirrored else crop)
    result = Augmentation(pixels).augmented(x, draws_of(boxes, side))
    torch.testing.assert_close(result, normalised(torch.stack(wanted)), rtol=0, atol=2e-3)


def test_nothing_from_beyond_a_crop_comes_in():
    x = torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    x[:, :, 2:5, 3:7] = 100
    result = Augmentation(16).augmented(x, draws_of([(3, 2, 4, 3, True)], 8))
    torch.testing.assert_close(result, normalised(torch.full((1, 3, 16, 16), 100.0)))


def test_a_whole_picture_of_the_right_size_stays_as_it_is():
    x = pictures(3, 32)
    result = Augmentation(32).augmented(x, torch.tensor([[0.5, 0.5, 1, 1, 1.0]] * 3))
    torch.testing.assert_close(result, Augmentation(32).plain(x), rtol=0, atol=1e-3)
    mirrored = Augmentation(32).augmented(x, torch.tensor([[0.5, 0.5, 1, 1, -1.0]] * 3))
    torch.testing.assert_close(mirrored, Augmentation(32).plain(x.flip(3)), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("side", "pixels"), [(256, 224), (9, 9), (9, 4), (10, 7), (11, 8)])
def test_evaluation_takes_the_centre_that_torchvision_takes(side, pixels):
    from torchvision.transforms import functional

    x = pictures(2, side)
    wanted = normalised(functional.center_crop(x, [pixels, pixels]))
    torch.testing.assert_close(Augmentation(pixels).plain(x), wanted, rtol=1e-5, atol=1e-6)


def test_each_channel_has_its_own_mean_and_deviation():
    x = torch.tensor([51, 102, 255], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 4, 4)
    by_hand = torch.tensor([(0.2 - 0.485) / 0.229, (0.4 - 0.456) / 0.224, (1 - 0.406) / 0.225])
    torch.testing.assert_close(Augmentation(4).plain(x), by_hand.view(1, 3, 1, 1).expand(2, 3, 4, 4))


def test_inputs_are_float32_and_channels_last_also_under_autocast():
    augmentation = Augmentation(6)
    x, draws = pictures(4, 9), augmentation.draw((4,), stream("draws"))
    with torch.autocast("cpu", torch.bfloat16):
        results = augmentation.augmented(x, draws), augmentation.plain(x)
    for result, wanted in zip(results, (augmentation.augmented(x, draws), augmentation.plain(x)), strict=True):
        assert result.dtype == torch.float32
        assert result.is_contiguous(memory_format=torch.channels_last)
        assert not result.requires_grad
        assert torch.equal(result, wanted)


def test_a_picture_does_not_depend_on_the_others_of_its_batch():
    augmentation = Augmentation(6)
    x, draws = pictures(5, 9), augmentation.draw((5,), stream("draws"))
    alone = torch.cat([augmentation.augmented(x[i : i + 1], draws[i : i + 1]) for i in range(5)])
    assert torch.equal(augmentation.augmented(x, draws), alone)


def torchvision_crops(count, scale, side=1_000_000):
    """Crops as torchvision draws them, in relative coordinates, on an image so large that rounding does not show."""
    from torchvision.transforms import RandomResizedCrop

    image = torch.empty(3, side, side, device="meta")
    boxes = [RandomResizedCrop.get_params(image, scale, (3 / 4, 4 / 3)) for _ in range(count)]
    top, left, height, width = (torch.tensor(column, dtype=torch.float64) / side for column in zip(*boxes, strict=True))
    return torch.stack((left + width / 2, top + height / 2, width, height), 1)


def measures(crops):
    """What a crop is known by: its area, ratio, and where it lies of where it could lie, across and down."""
    centre, size = crops[:, :2].double(), crops[:, 2:4].double()
    place = (centre - size / 2) / (1 - size).clamp(min=1e-6)
    return {"area": size.prod(1), "ratio": size[:, 0] / size[:, 1], "across": place[:, 0], "down": place[:, 1]}


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 0.9)])
def test_crops_are_distributed_as_those_of_torchvision(scale):
    ours = Augmentation(8, scale=scale).draw((4000,), stream("crops"))
    theirs = torchvision_crops(4000, scale)
    for name, values in measures(theirs).items():
        assert stats.ks_2samp(values, measures(ours)[name]).pvalue > 1e-3, name
    # A test that sees a wrong distribution: crops of areas from a slightly different range.
    other = Augmentation(8, scale=(scale[0] + 0.1, scale[1])).draw((4000,), stream("crops"))
    assert stats.ks_2samp(measures(theirs)["area"], measures(other)["area"]).pvalue < 1e-3


def test_when_no_try_fits_the_whole_picture_is_taken_as_often_as_torchvision_takes_it():
    ours = Augmentation(8, scale=(0.95, 1.0)).draw((2000,), stream("crops"))[:, :4]
    theirs = torchvision_crops(2000, (0.95, 1.0))
    whole = torch.tensor([0.5, 0.5, 1.0, 1.0])
    counts = [int(((crops - whole).abs() < 2e-6).all(1).sum()) for crops in (ours.double(), theirs)]
    assert 0 < counts[1] < 2000
    assert abs(counts[0] - counts[1]) < 5 * (sum(counts) * (1 - sum(counts) / 4000)) ** 0.5


def test_crops_lie_within_the_picture_and_half_are_mirrored():
    draws = Augmentation(8).draw((50, 100), stream("crops"))
    assert draws.shape == (50, 100, 5)
    assert draws.dtype == torch.float32
    centre, size, mirror = draws[..., :2], draws[..., 2:4], draws[..., 4]
    assert bool((centre - size / 2 >= -1e-6).all())
    assert bool((centre + size / 2 <= 1 + 1e-6).all())
    assert set(mirror.unique().tolist()) == {-1.0, 1.0}
    assert abs(mirror.mean().item()) < 5 / 5000**0.5
    assert Augmentation(8, flip=False).draw((50, 100), stream("crops"))[..., 4].eq(1).all()


def test_with_a_scale_of_one_nothing_is_cropped():
    draws = Augmentation(8, scale=(1, 1)).draw((500,), stream("crops"))
    assert torch.equal(draws[:, :4], torch.tensor([0.5, 0.5, 1.0, 1.0]).expand(500, 4))
    assert set(draws[:, 4].tolist()) == {-1.0, 1.0}


def test_draws_are_fixed_by_the_generator_alone():
    augmentation = Augmentation(8)
    first = augmentation.draw((7, 3), stream("draws", 1))
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(first, augmentation.draw((7, 3), stream("draws", 1)))
    assert not torch.equal(first, augmentation.draw((7, 3), stream("draws", 2)))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_graph_augments_what_lies_in_its_buffers():
    augmentation = Augmentation(24)
    x, draws = pictures(16, 32).cuda(), augmentation.draw((16,), stream("draws")).cuda()
    pixels, places = x.clone(), draws.clone()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        augmentation.augmented(pixels, places), augmentation.plain(pixels)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        augmented, plain = augmentation.augmented(pixels, places), augmentation.plain(pixels)
    for seed in (1, 2):
        x, draws = pictures(16, 32, seed), augmentation.draw((16,), stream("draws", seed))
        pixels.copy_(x)
        places.copy_(draws)
        graph.replay()
        torch.testing.assert_close(augmented.cpu(), augmentation.augmented(x, draws), rtol=0, atol=2e-3)
        torch.testing.assert_close(plain.cpu(), augmentation.plain(x))
        assert augmented.is_contiguous(memory_format=torch.channels_last)
