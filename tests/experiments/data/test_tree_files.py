"""Files of image trees: whatever is no regular file inside the tree, too large or of another format is not read."""

import io
import os
import shutil
import struct
import time
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from PIL import EpsImagePlugin, Image

from tests.helpers.made_up_images import decodings, load, picture, same, zipped
from xkfac.experiments.data import images, tree_files
from xkfac.experiments.data.digits import DataError
from xkfac.experiments.data.trees import Tree, find_tree


def refused(path, message, monkeypatch):
    """Check that a tree is refused in one sentence before anything of it is decoded, and without waiting."""
    seen, start = decodings(monkeypatch), time.monotonic()
    with pytest.raises(DataError, match=message) as caught:
        load(path, validation=0)
    assert not seen
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 30


# What is no regular file of the tree


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/null", "/etc/passwd", "../../../outside.png"])
def test_a_link_out_of_the_tree_is_refused(tree, tmp_path, monkeypatch, target):
    shutil.copy(tree / "train/ant/0000.png", tmp_path / "outside.png")
    (tree / "train/ant/link.png").symlink_to(target)
    refused(tree, r"'train/ant/link.png' of .*insects' .*leads out of the tree\); replace it or remove it", monkeypatch)


def test_a_pipe_or_a_socket_is_refused_and_not_waited_for(tree, monkeypatch):
    os.mkfifo(tree / "train/ant/pipe.png")
    refused(tree, r"'train/ant/pipe.png' of .*insects' is no regular file; remove it", monkeypatch)


def test_a_link_to_nothing_or_to_itself_is_refused(tree, monkeypatch):
    for target in ("nowhere.png", "link.png"):
        (tree / "train/ant/link.png").symlink_to(target)
        refused(tree, r"'train/ant/link.png' of .* cannot be used \(.*\); replace it or remove it", monkeypatch)
        (tree / "train/ant/link.png").unlink()


@pytest.mark.parametrize("where", ["train", "train/ant", "train/ant/deep"])
def test_a_folder_that_is_a_link_out_of_the_tree_is_refused(tree, tmp_path, monkeypatch, where):
    outside = tmp_path / "outside"
    if (tree / where).exists():
        shutil.move(tree / where, outside)
    else:
        outside.mkdir()
    (tree / where).symlink_to(outside)
    refused(tree, rf"'{where}' of .* cannot be used \(it is a link that leads out of the tree\)", monkeypatch)


def test_folders_that_are_links_in_a_circle_are_refused(tree, monkeypatch):
    (tree / "train/ant/again").symlink_to(tree / "train")
    refused(tree, r"again' of .* is the second link to a folder, or a link in a circle", monkeypatch)


def test_links_inside_the_tree_are_followed(tree, tmp_path):
    """People link the same image, or the same folder, into a tree twice."""
    expected = load(tree, validation=0)
    store = tree / "store"
    store.mkdir()
    shutil.move(tree / "train/bee/0003.png", store / "some.png")
    (tree / "train/bee/0003.png").symlink_to("../../store/some.png")
    shutil.move(tree / "test/cat", store / "cats")
    (tree / "test/cat").symlink_to(store / "cats")
    assert same(load(tree, validation=0), expected)
    (tmp_path / "elsewhere").symlink_to(tree)  # the tree itself may be a link
    assert same(load(tmp_path / "elsewhere", validation=0), expected)


def test_what_is_not_read_may_be_anything(tree):
    expected = load(tree, validation=0)
    os.mkfifo(tree / "train/ant/notes.txt")
    (tree / "train/bee/.hidden.png").symlink_to("/dev/zero")
    (tree / "other").symlink_to("/")
    assert same(load(tree, validation=0), expected)


def test_a_file_that_became_a_link_or_a_pipe_since_it_was_listed_is_not_read(tree, tmp_path):
    listed = Tree.read(tree)
    path = tree / "train/ant/0000.png"
    shutil.copy(path, tmp_path / "outside.png")
    for change, message in (
        (lambda: path.symlink_to(tmp_path / "outside.png"), "it is a link that leads out of the tree"),
        (lambda: os.mkfifo(path), "it is no regular file"),
    ):
        path.unlink()
        change()
        with pytest.raises(DataError, match=rf"'train/ant/0000.png' of .* cannot be read as an image \({message}\)"):
            load(listed, validation=0)


def test_a_pipe_in_place_of_a_zip_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "insects.zip")
    with pytest.raises(DataError, match=r"insects.zip' is neither a folder nor an intact zip file"):
        find_tree("insects", tmp_path)


# Sizes


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tree, tmp_path, monkeypatch):
    with (tree / "test/bee/large.png").open("wb") as file:
        file.truncate(tree_files.LARGEST_FILE + 2**30)  # takes no room on the disk
    refused(tree, r"'test/bee/large.png' of .* has 1 GiB, more than 256 MiB; remove it", monkeypatch)
    os.truncate(tree / "test/bee/large.png", 10)
    with pytest.raises(DataError, match=r"'test/bee/large.png' of .* cannot be read as an image"):
        load(tree)


def test_a_large_member_of_a_zip_file_is_refused_by_the_size_that_it_declares(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(tree_files, "LARGEST_FILE", 10_000)
    path = zipped(tree, tmp_path / "packed.zip")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("test/bee/large.png", bytes(10_001))
    refused(path, r"'test/bee/large.png' of .*packed.zip' has 10001 bytes, more than 10000", monkeypatch)


def test_a_member_of_a_zip_file_that_declares_too_small_a_size_is_read_within_the_limit(tree, tmp_path, monkeypatch):
    """The size in the list of a zip file is what its author wrote there."""
    path, size = tmp_path / "packed.zip", 3_000_000
    zipped(tree, path)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("test/bee/large.png", bytes(size))
    content = path.read_bytes()
    path.write_bytes(content.replace(struct.pack("<I", size), struct.pack("<I", 10)))
    listed = Tree.read(path)
    assert {entry.name: entry.stamp for entry in listed.test}["test/bee/large.png"].startswith("10:")
    with pytest.raises(DataError, match=r"'test/bee/large.png' of .*packed.zip' cannot be read as an image"):
        load(listed, validation=0)
    monkeypatch.setattr(tree_files, "LARGEST_FILE", 1000)
    with zipfile.ZipFile(tmp_path / "other.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(1001))
        archive.writestr("b", bytes(1000))
    read = tree_files.reader(tmp_path / "other.zip")
    assert read("b") == bytes(1000)
    with pytest.raises(OSError, match="it has more than 1000 bytes"):
        read("a")


def png(width, height):
    """A PNG file of a few bytes that says it has so many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


@pytest.mark.parametrize("sides", [(8_945, 8_945), (12_000, 12_000), (2**31 - 1, 2)])
@pytest.mark.filterwarnings("error")
def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tree, sides):
    (tree / "train/ant/bomb.png").write_bytes(png(*sides))
    with pytest.raises(DataError, match=r"'train/ant/bomb.png' of .* cannot be read as an image \(.*pixels"):
        load(tree, validation=0)


def test_an_image_that_would_be_resized_to_too_many_pixels_is_refused():
    content = io.BytesIO()
    Image.new("RGB", (20_000, 1)).save(content, "PNG")
    assert len(images.decoded(content.getvalue(), 64, "squash")) == 3 * 64 * 64
    with pytest.raises(ValueError, match="its sides are 20000 and 1, too unlike"):
        images.decoded(content.getvalue(), 64, "crop")


# Formats


@pytest.mark.parametrize(("ending", "kind"), [
    (".jpg", "JPEG"), (".JPEG", "JPEG"), (".png", "PNG"), (".webp", "WEBP"), (".bmp", "BMP"), (".gif", "GIF"),
    (".tiff", "TIFF"), (".ppm", "PPM"),
])  # fmt: skip
def test_each_format_of_the_list_is_read(tree, ending, kind):
    path = tree / f"train/ant/zebra{ending}"
    Image.frombytes("RGB", (12, 12), bytes(picture(0, 9).flatten().tolist())).save(path, kind)
    wanted = Image.open(path).convert("RGB").tobytes()
    found = load(tree, validation=0).train
    index = [entry.name for entry in Tree.read(tree).train].index(f"train/ant/zebra{ending}")
    assert bytes(found.x[index].permute(1, 2, 0).flatten().tolist()) == wanted


@pytest.mark.parametrize("ending", [".eps", ".ps", ".pdf", ".jp2", ".ico", ".psd", ".h5", ".mpo", ""])
def test_another_format_is_refused_by_its_ending(tree, tmp_path, monkeypatch, ending):
    (tree / f"train/ant/file{ending}").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n")
    message = rf"'train/ant/file{ending}' of .* is no image by its ending; remove it, or save it as one of JPEG, PNG,"
    refused(tree, message, monkeypatch)
    refused(zipped(tree, tmp_path / "packed.zip"), message, monkeypatch)


def test_an_eps_file_under_another_name_never_reaches_ghostscript(tree, monkeypatch):
    called = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *arguments, **options: called.append(arguments))
    content = io.BytesIO()
    Image.new("RGB", (12, 12)).save(content, "EPS")
    (tree / "train/ant/file.png").write_bytes(content.getvalue())
    with pytest.raises(DataError, match=r"'train/ant/file.png' of .* cannot be read as an image \(cannot identify"):
        load(tree, validation=0)
    assert not called


def test_the_same_images_give_the_same_cache_as_before(tree, tmp_path):
    """Names of cache files depend on names, sizes and times alone: what was decoded once is not decoded again."""
    entries = Tree.read(tree).train
    for entry in entries:
        status = Path(tree / entry.name).stat()
        assert entry.stamp == f"{status.st_size}:{status.st_mtime_ns}"
    with zipfile.ZipFile(zipped(tree, tmp_path / "packed.zip")) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    for entry in Tree.read(tmp_path / "packed.zip").train:
        assert entry.stamp == f"{infos[entry.name].file_size}:{infos[entry.name].CRC:08x}"
    assert torch.equal(load(tree).test.x, load(tmp_path / "packed.zip").test.x)
