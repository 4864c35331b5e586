"""Images: decoded as torchvision resizes them, once, into a cache that is whole at every moment."""

import contextlib
import io
import multiprocessing
import os
import random
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.helpers.made_up_images import CLASSES, all_of, decodings, load, make_tree, picture, same, zipped
from xkfac.experiments.data import images
from xkfac.experiments.data.digits import DataError, Parts
from xkfac.experiments.data.trees import Tree
from xkfac.experiments.packages import PackageError


def test_parts_hold_the_pictures_of_their_files(tree):
    parts = load(tree)
    assert isinstance(parts, Parts)
    train, aside = Tree.read(tree).split(0.25)
    for part, entries, first in ((parts.train, train, 0), (parts.validation, aside, 0), (parts.test, None, 500)):
        entries = Tree.read(tree).test if entries is None else entries
        wanted = [picture(entry.label, first + int(Path(entry.name).stem)).permute(2, 0, 1) for entry in entries]
        assert torch.equal(part.x, torch.stack(wanted))
        assert part.y.tolist() == [entry.label for entry in entries]
        assert part.x.dtype == torch.uint8
        assert len(part) == len(entries)
    assert [len(part) for part in all_of(parts)] == [12, 6, 6]


@pytest.mark.parametrize("size", [(40, 30), (30, 41), (17, 17), (300, 9)])
@pytest.mark.parametrize("pixels", [14, 64])
def test_pictures_are_resized_as_torchvision_resizes_them(size, pixels):
    from torchvision.transforms import functional

    content = io.BytesIO()
    array = picture(1, 2, size)
    image = Image.frombytes("RGB", size, bytes(array.flatten().tolist()))
    image.save(content, "PNG")
    squashed = functional.resize(image, [pixels, pixels])
    cropped = functional.center_crop(functional.resize(image, pixels), [pixels, pixels])
    for resize, wanted in (("squash", squashed), ("crop", cropped)):
        found = torch.frombuffer(bytearray(images.decoded(content.getvalue(), pixels, resize)), dtype=torch.uint8)
        assert torch.equal(found.view(3, pixels, pixels), functional.pil_to_tensor(wanted))


def test_the_size_that_is_stored(tmp_path):
    tree = make_tree(tmp_path / "tree", train=1, test=1, size=(20, 30))
    for settings_, side in (
        ({"pixels": 14, "resize": "squash"}, 14),
        ({"pixels": 14, "resize": "crop"}, 16),
        ({"pixels": 224, "resize": "crop"}, 256),
    ):
        assert load(tree, validation=0, parts=("test",), **settings_).test.x.shape == (3, 3, side, side)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_every_kind_of_colour_becomes_rgb(tree, mode):
    path = tree / "train/ant/0000.png"
    path.unlink()
    path = path.with_suffix(".tif")
    Image.frombytes("RGB", (12, 12), bytes(picture(0, 0).flatten().tolist())).convert(mode).save(path)
    result = load(tree, validation=0).train.x
    index = [entry.name for entry in Tree.read(tree).train].index("train/ant/0000.tif")
    wanted = torch.tensor(list(Image.open(path).convert("RGB").tobytes()), dtype=torch.uint8).view(12, 12, 3)
    assert torch.equal(result[index], wanted.permute(2, 0, 1))


def test_values_of_more_than_eight_bits_are_refused(tree):
    Image.new("I;16", (12, 12), 40000).save(tree / "train/ant/deep.png")
    with pytest.raises(DataError, match=r"train/ant/deep.png' of .* more than 8 bits"):
        load(tree)


@pytest.mark.parametrize(("content", "workers"), [(b"", 1), (b"no image", 1), ("half", 1), ("half", 2)])
def test_a_picture_that_cannot_be_read_is_named(tree, content, workers, tmp_path):
    path = tree / "train/bee/0001.png"
    path.write_bytes(path.read_bytes()[:200] if content == "half" else content)
    with pytest.raises(DataError, match=r"'train/bee/0001.png' of .* cannot be read as an image"):
        load(tree, validation=0, workers=workers)
    assert len(load(tree, validation=0, parts=("test",)).test) == 6
    assert not list((tmp_path / "cache" / "pictures").glob("*.part"))


def test_processes_decode_the_same_in_order(tmp_path, monkeypatch):
    tree = make_tree(tmp_path / "tree", train=60, test=3)  # more than one block
    told = []
    apart = load(tree, workers=2, progress=lambda done, total: told.append((done, total)))
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "other"))
    assert same(apart, load(tree))
    assert told[-1] == (189, 189)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_only_the_parts_asked_for_are_opened(tree, monkeypatch):
    for file in (tree / "train").rglob("*.png"):
        file.write_bytes(b"must not be read")
    seen = decodings(monkeypatch)
    parts = load(tree, parts=("test",))
    assert len(seen) == len(parts.test) == 6
    assert len(parts.train) == len(parts.validation) == 0
    assert parts.train.x.shape == (0, 3, 12, 12)
    assert parts.classes == CLASSES


def test_of_a_limited_train_part_only_those_pictures_are_decoded(tree, monkeypatch):
    seen = decodings(monkeypatch)
    parts = load(tree, limit=5, parts=("train",))
    assert len(seen) == len(parts.train) == 5
    assert set(parts.train.y.tolist()) == {0, 1, 2}


# The cache


def test_nothing_is_decoded_twice(tree, monkeypatch):
    seen = decodings(monkeypatch)
    told = []
    first = load(tree)
    assert len(seen) == len(set(seen)) == 24
    assert same(first, load(tree, progress=lambda *numbers: told.append(numbers)))
    assert len(seen) == 24
    assert not told


def test_whatever_changes_pictures_changes_what_is_loaded(tree, tmp_path, monkeypatch):
    before = load(tree)
    content = (tree / "test/ant/0000.png").read_bytes()
    path = tree / "test/bee/0001.png"
    path.write_bytes(content)
    os.utime(path, (10**9, 10**9))
    after = load(tree)
    assert torch.equal(after.train.x, before.train.x)
    assert torch.equal(after.test.x[3], before.test.x[0])
    archive = zipped(tree, tmp_path / "packed.zip")
    assert same(load(archive), after)
    seen = decodings(monkeypatch)
    moved = archive.rename(tmp_path / "moved.zip")
    os.utime(moved)
    shutil.copy(moved, archive)
    assert same(load(archive), after)
    assert not seen, "a zip file is known by what is in it"
    path.write_bytes((tree / "test/cat/0000.png").read_bytes())
    assert torch.equal(load(zipped(tree, archive)).test.x[3], before.test.x[4])


def test_a_cache_file_that_was_cut_off_is_made_again(tree, tmp_path):
    before = load(tree)
    copies = [part.x.clone() for part in all_of(before)]
    for file in (tmp_path / "cache" / "pictures").glob("*.bytes"):
        file.write_bytes(file.read_bytes()[:-5])
    assert all(torch.equal(part.x, copy) for part, copy in zip(all_of(load(tree)), copies, strict=True))


def test_writing_on_pictures_changes_no_cache(tree):
    first = load(tree)
    wanted = first.train.x.clone()
    first.train.x.zero_()
    assert torch.equal(load(tree).train.x, wanted)


def test_what_a_killed_process_left_does_no_harm(tree, tmp_path, monkeypatch):
    wanted = load(tree)
    names = [file.name for file in (tmp_path / "cache" / "pictures").glob("*.bytes")]
    other = tmp_path / "other" / "pictures"
    other.mkdir(parents=True)
    for name in names:
        (other / f".{name}.part").write_bytes(b"x" * 10_000)
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "other"))
    assert same(load(tree), wanted)
    assert sorted(file.name for file in other.iterdir() if file.suffix != ".lock") == sorted(names)


def test_a_cache_that_cannot_be_written_is_named(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"the cache '.*file/pictures' cannot be written .* XKFAC_CACHE"):
        load(tree)


def test_a_full_disk_leaves_nothing_half_written(tree, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(images.os, "fsync", full)
    with pytest.raises(DataError, match="No space left"):
        load(tree)
    assert {file.suffix for file in (tmp_path / "cache" / "pictures").iterdir()} == {".lock"}
    monkeypatch.setattr(images.os, "fsync", lambda handle: None)
    assert len(load(tree).train) == 12


class GaveUp(Exception):
    pass


def write_once(target, log, fails):
    """Write a cache file with a pause in its middle, where some give up; note who has written it."""
    with images._claimed(target, 8) as file:
        if file is None:
            return
        file.write(b"1234")
        file.flush()
        time.sleep(random.random() * 0.004)
        if fails and random.random() < 0.5:
            raise GaveUp
        file.write(b"5678")
        with log.open("a") as lines:
            lines.write(f"{target.name}\n")


def write_all(folder, log, fails):
    random.seed(os.getpid())
    for number in range(30):
        while not images._whole(folder / f"{number}.bytes", 8):
            with contextlib.suppress(GaveUp):
                write_once(folder / f"{number}.bytes", log, fails)


@pytest.mark.parametrize("fails", [False, True])
def test_of_processes_that_want_the_same_file_one_writes_it(tmp_path, fails):
    context = multiprocessing.get_context("fork")  # quick to start, so that they truly compete; they do not use torch
    folder, log = tmp_path / "files", tmp_path / "log"
    workers = [context.Process(target=write_all, args=(folder, log, fails)) for _ in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    names = [f"{number}.bytes" for number in range(30)]
    assert sorted(log.read_text().split()) == sorted(names)
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".lock"} == dict.fromkeys(
        names, b"12345678"
    )


def test_without_pillow_the_error_says_what_to_install(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.delitem(sys.modules, "PIL.Image")
    with pytest.raises(PackageError, match=r"Pillow, which cannot be imported .*: pip install 'xkfac\[experiments\]'"):
        load(tree)
