"""Trees of images: wrong ones are refused by name, splits are fixed by keys and take their share of each class."""

import io
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.made_up_images import CLASSES, decodings, load, make_tree, picture, same, save, zipped
from xkfac.experiments.data.digits import DataError
from xkfac.experiments.data.trees import ImageFile, Tree, find_tree


def test_a_tree_lists_classes_and_pictures_by_name(tree):
    listed = Tree.read(tree)
    assert listed.classes == CLASSES
    assert [entry[:2] for entry in listed.test] == [
        (f"test/{name}/{number:04d}.png", label) for label, name in enumerate(CLASSES) for number in range(2)
    ]
    assert Counter(entry.label for entry in listed.train) == {0: 6, 1: 6, 2: 6}


@pytest.mark.parametrize("top", ["", "insects-1.0/"])
def test_a_zip_file_holds_what_the_folder_holds(tree, tmp_path, top):
    archive = zipped(tree, tmp_path / "packed.zip", top)
    packed, plain = Tree.read(archive), Tree.read(tree)
    assert packed.classes == plain.classes
    for part in ("train", "test"):
        pairs = zip(getattr(packed, part), getattr(plain, part), strict=True)
        assert all(a.name == f"{top}{b.name}" and a.label == b.label for a, b in pairs)
    assert same(load(archive), load(tree))


def test_a_folder_may_hold_its_tree_in_one_folder(tmp_path):
    make_tree(tmp_path / "download" / "insects")
    assert same(load(tmp_path / "download"), load(tmp_path / "download" / "insects"))


@pytest.mark.parametrize("name", ["val", "validation"])
def test_another_name_of_the_test_part(tmp_path, name):
    tree = make_tree(tmp_path / "a", test_name=name)
    assert same(load(tree), load(make_tree(tmp_path / "b")))
    make_tree(tree, train=0, test=1)
    assert len(Tree.read(tree).test) == 3, "test comes before the others"


def test_what_is_beside_the_pictures_is_left_out(tree, tmp_path):
    before = load(tree)
    for name in (
        "README", "labels.csv", "train/list.bin", "train/ant/.DS_Store", "train/bee/boxes.txt", "train/.git/HEAD",
        "__MACOSX/train/ant/._0000.png", "scripts/run.py",
    ):  # fmt: skip
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("nothing to see")
    assert same(load(tree), before)
    assert same(load(zipped(tree, tmp_path / "packed.zip")), before)


def test_pictures_may_lie_deeper_and_be_of_any_kind(tmp_path):
    tree = make_tree(tmp_path / "tree", train=3, test=1)
    (tree / "train/ant/images").mkdir()
    (tree / "train/ant/0002.png").rename(tree / "train/ant/images/0002.PNG")
    save(tree / "train/bee/a.bmp", picture(1, 77))
    parts = load(tree, validation=0)
    assert Counter(parts.train.y.tolist()) == {0: 3, 1: 4, 2: 3}
    # Names are in order of bytes: digits, then the two names in letters.
    assert torch.equal(parts.train.x[2], picture(0, 2).permute(2, 0, 1))
    assert torch.equal(parts.train.x[6], picture(1, 77).permute(2, 0, 1))


def spoilt(tree, how):
    if how == "no train":
        (tree / "train").rename(tree / "training")
    elif how == "no test":
        shutil.rmtree(tree / "test")
    elif how == "no classes":
        shutil.rmtree(tree / "test")
        (tree / "test").mkdir()
        (tree / "test" / "0000.png").touch()
    elif how == "empty class":
        (tree / "train" / "dog").mkdir()
    elif how == "emptied class":
        for file in (tree / "test" / "bee").iterdir():
            file.rename(file.with_suffix(".txt"))
    elif how == "not in test":
        save(tree / "train/dog/0.png", picture(3, 0))
    elif how == "not in train":
        save(tree / "test/ants/0.png", picture(3, 0))
    elif how == "no image":
        (tree / "train/cat/model.pt").touch()


WRONG = [
    ("no train", "no part 'train', only test, training"),
    ("no test", "no part 'test', only train"),
    ("no classes", "the part 'test' of .* has no classes"),
    ("empty class", "class 'dog' of .* has no images in 'train'"),
    ("emptied class", "class 'bee' of .* has no images in 'test'"),
    ("not in test", "class 'dog' of .* is in 'train' but not in 'test'"),
    ("not in train", "class 'ants' of .* is in 'test' but not in 'train' .did you mean 'ant'"),
    ("no image", "'train/cat/model.pt' of .* is no image"),
]


@pytest.mark.parametrize(("how", "message"), WRONG)
def test_a_wrong_tree_is_refused_before_anything_is_decoded(tree, tmp_path, monkeypatch, how, message):
    seen = decodings(monkeypatch)
    spoilt(tree, how)
    for path in (tree, zipped(tree, tmp_path / "packed.zip")):
        with pytest.raises(DataError, match=message) as caught:
            load(path)
        assert path.name in str(caught.value)
    assert not seen


def test_a_name_that_is_damaged_in_a_zip_file_is_refused(tmp_path):
    path = tmp_path / "packed.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("train/fée/0.png", b"")
    content = path.read_bytes()
    place = content.rindex("é".encode())  # in the directory at the end of the file
    path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    with pytest.raises(DataError, match=r"packed.zip' cannot be read, or is a damaged zip .*; fetch it again"):
        load(path)


def test_a_damaged_zip_file_is_refused_wherever_it_is_damaged(tree, tmp_path, monkeypatch):
    path = zipped(tree, tmp_path / "packed.zip")
    content = path.read_bytes()
    reference = load(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"packed.zip' cannot be read, or is a damaged zip"):
        load(path)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        middle = archive.getinfo("train/bee/0003.png").header_offset + 80
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert same(load(path), reference), "the cache knows the images by the checksums in the zip file"
    monkeypatch.setenv("XKFAC_CACHE", str(tmp_path / "other"))
    with pytest.raises(DataError, match=r"'train/bee/0003.png' of .*packed.zip' cannot be read as an image"):
        load(path)
    assert not list((tmp_path / "other" / "pictures").glob("*.part")), "nothing half written remains"


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        Tree.read(tmp_path / "nowhere")


def test_find_tree_takes_folders_and_zip_files_by_name(tree, tmp_path, monkeypatch):
    archive = zipped(tree, tmp_path / "packed.zip")
    assert find_tree("insects", tmp_path) == tree
    assert find_tree("packed", tmp_path) == find_tree("packed.zip", tmp_path) == archive
    assert find_tree(str(tmp_path / "packed"), None) == archive
    zipped(tree, tmp_path / "birds-1.0.zip")
    assert find_tree("birds-1.0", tmp_path).name == "birds-1.0.zip"
    monkeypatch.setenv("XKFAC_DATA", str(tmp_path))
    assert find_tree("insects", None) == tree


def test_find_tree_says_what_is_there_instead(tree, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"no images 'insect'.*did you mean 'insects'.*--data"):
        find_tree("insect", tmp_path)
    with pytest.raises(DataError, match="nothing like it is there"):
        find_tree("insects", tmp_path / "nowhere")
    (tmp_path / "text.zip").write_text("no zip file")
    with pytest.raises(DataError, match=r"text.zip' is neither a folder nor an intact zip"):
        find_tree("text", tmp_path)
    monkeypatch.delenv("XKFAC_DATA", raising=False)
    with pytest.raises(DataError, match="--data FOLDER or in the variable XKFAC_DATA"):
        find_tree("insects", None)


def made_up_tree(sizes):
    entries = [ImageFile(f"train/{label}/{i:03d}", label, "") for label, size in enumerate(sizes) for i in range(size)]
    return Tree(Path("tree"), tuple(f"class {label}" for label in range(len(sizes))), tuple(entries), ())


def counts(entries, classes):
    found = Counter(entry.label for entry in entries)
    return [found[label] for label in range(classes)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(2, 30), min_size=1, max_size=8), st.floats(0, 0.99), st.integers(1, 200))
def test_a_split_takes_its_share_of_each_class(sizes, share, limit):
    tree, classes = made_up_tree(sizes), len(sizes)
    train, aside = tree.split(share)
    assert sorted(train + aside) == sorted(tree.train)
    for size, kept, out in zip(sizes, counts(train, classes), counts(aside, classes), strict=True):
        assert kept >= 1
        assert out >= (share > 0)
        if 1 <= share * size <= size - 1:
            assert abs(out - share * size) <= 0.5
    some, same_aside = tree.split(share, limit)
    assert same_aside == aside
    assert set(some) <= set(train)
    assert len(some) == min(limit, len(train))
    assert set(some) <= set(tree.split(share, limit + 1)[0]), "fewer are among more"
    for total, kept in zip(counts(train, classes), counts(some, classes), strict=True):
        assert abs(kept - total * len(some) / len(train)) <= classes
        assert kept >= (limit >= classes)


def test_a_split_depends_on_nothing_but_names(tree, tmp_path):
    other = shutil.copytree(tree, tmp_path / "elsewhere" / "copy", copy_function=shutil.copyfile)
    first, second = Tree.read(tree).split(0.3, 7), Tree.read(other).split(0.3, 7)
    assert [[entry.name for entry in part] for part in first] == [[entry.name for entry in part] for part in second]
    # A class more leaves the validation images of the others alone.
    make_tree(other, classes=("aardvark",))
    more = Tree.read(other).split(0.3)[1]
    assert [e.name for e in more if "aardvark" not in e.name] == [e.name for e in first[1]]


def test_a_split_is_no_prefix_of_a_class():
    aside = made_up_tree([100] * 5).split(0.2)[1]
    numbers = [sorted(int(entry.name[-3:]) for entry in aside if entry.label == label) for label in range(5)]
    assert len({tuple(chosen) for chosen in numbers}) == 5
    assert all(20 < sum(chosen) / 20 < 80 for chosen in numbers)


def test_a_class_of_one_picture_cannot_be_split():
    with pytest.raises(DataError, match=r"class 'class 1' .* one training image"):
        made_up_tree([3, 1]).split(0.1)
    assert len(made_up_tree([3, 1]).split(0)[0]) == 4
