"""Paths and files that a user may name: whatever cannot be used is one sentence, and nothing is waited for."""

import os
from pathlib import Path

import pytest

from xkfac import XkfacError
from xkfac.experiments import RunError, load_recipe, results, resume, start
from xkfac.experiments.data.digits import load
from xkfac.experiments.data.images import load_pictures
from xkfac.experiments.data.trees import Tree, find_tree
from xkfac.experiments.files import at_home, check_path, in_words, locked, parse_json, read_regular, shortened
from xkfac.experiments.networks.pretraining import pretrain
from xkfac.experiments.networks.weights import load_source, save_source
from xkfac.experiments.runs.folder import RunFolder, find_runs
from xkfac.experiments.tuning.tuning import tune

LONG = "a" * 5000
DEEP = "/".join(["a" * 200] * 25)
NULL = "a\0b"


@pytest.mark.parametrize("path", [LONG, DEEP, NULL, f"missing/{LONG}", f"/dev/null/{LONG}"])
def test_a_path_that_the_system_cannot_look_up_is_one_short_sentence(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    digits = load_recipe("demo", ["data.train=100"]).only(["fine-tuning"])
    images = ["pixels", "resize", "validation"]
    for call in (
        lambda: check_path(path),
        lambda: load_recipe(path),
        lambda: start("demo", path, device="cpu"),
        lambda: RunFolder.create(Path(path), digits, {}),
        lambda: resume(path),
        lambda: results(path),
        lambda: find_runs(Path(path)),
        lambda: tune(digits, path, device="cpu"),
        lambda: load("mnist", path, validation=10),
        lambda: Tree.read(path),
        lambda: find_tree(path, tmp_path),
        lambda: find_tree("insects", Path(path)),
        lambda: load_pictures(path, **dict(zip(images, (8, "squash", 0), strict=True))),
        lambda: pretrain("insects", f"{path}.safetensors", folder=tmp_path, device="cpu"),
    ):
        with pytest.raises(
            XkfacError, match=r"^the path '.*' cannot be used \(.*\); give (a shorter|another) one$"
        ) as e:
            call()
        assert len(str(e.value)) < 200
    assert not list(tmp_path.iterdir())


def test_weights_at_a_path_that_cannot_be_used_are_refused(tmp_path):
    from xkfac.experiments.networks.backbones import make_backbone

    net = make_backbone("timm:test_resnet", {"a": 2}, seed=0)
    with pytest.raises(XkfacError, match=r"the path '.*' cannot be used \(File name too long\); give a shorter one"):
        load_source(net, tmp_path / LONG, "a")
    with pytest.raises(XkfacError, match="could not be written"):
        save_source(net, tmp_path / f"{LONG}.safetensors", "a", {})


def test_a_path_that_can_be_used_is_returned_whether_or_not_it_is_there(tmp_path):
    for path in (tmp_path, tmp_path / "none" / "at" / "all", tmp_path / ("a" * 255)):
        assert check_path(path) == check_path(str(path)) == path
    (tmp_path / "file").touch()
    assert check_path(tmp_path / "file" / "below") == tmp_path / "file" / "below"
    (tmp_path / "loop").symlink_to("loop")
    assert check_path(tmp_path / "loop") == tmp_path / "loop"


def test_a_home_that_is_not_known_is_one_sentence(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert at_home("~/data") == Path("/somewhere/data")
    with pytest.raises(XkfacError, match="the path '~nobody-of-this-name/x' cannot be used"):
        at_home("~nobody-of-this-name/x")


def test_only_regular_files_within_a_limit_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    for name, limit, follow, message in (
        ("file", 4, True, "it has more than 4 bytes"),
        ("pipe", 9, True, "it is no regular file"),
        ("link", 9, False, "symbolic links"),
        ("", 9, True, "it is no regular file"),
        ("none", 9, True, "No such file"),
    ):
        with pytest.raises(OSError, match=message):
            read_regular(tmp_path / name, limit, follow=follow)
    with pytest.raises(OSError, match="it is no regular file"):
        read_regular(Path("/dev/zero"), 9)


def test_json_that_is_nested_too_deeply_is_no_json():
    assert parse_json(b"[1]") == [1]
    for text in (b"[" * 100_000, b'{"a":' * 100_000, b"1" * 5000, b"\xff", b""):
        with pytest.raises(ValueError):
            parse_json(text)


def test_sizes_and_long_texts_in_words():
    assert [in_words(size) for size in (7, 2**20, 2**28, 3 * 2**30)] == ["7 bytes", "1 MiB", "256 MiB", "3 GiB"]
    assert shortened("abc", 3) == "abc"
    assert shortened("a" * 50 + "b" * 50, 11) == "aaaaa…bbbbb"
    assert len(shortened("a" * 1000)) == 80


def test_a_recipe_that_is_too_large_or_no_regular_file_is_refused(tmp_path):
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(XkfacError, match=r"large.toml' cannot be read as a recipe \(it has more than 16 MiB\)"):
        load_recipe(tmp_path / "large.toml")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(XkfacError, match="there is no recipe"):
        load_recipe(tmp_path / "pipe.toml")


def test_a_run_is_not_started_where_the_files_of_its_jobs_could_not_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = load_recipe("demo").only(["fine-tuning"])
    deep = "/".join(["a" * 200] * 20)
    deep += "/" + "b" * (4095 - len(deep) - 20)
    assert check_path(deep) == Path(deep)
    with pytest.raises(XkfacError, match="File name too long"):
        RunFolder.create(Path(deep), made, {"place": "cpu", "data": None})
    assert not list(tmp_path.iterdir())
    with pytest.raises(RunError, match="is not the folder of a run"):
        RunFolder.open(tmp_path)


def test_a_lock_is_held_by_one_or_shared_by_several(tmp_path):
    path = tmp_path / "a" / "lock"
    with locked(path) as first, locked(path) as second:
        assert (first is None, second) == (False, None)
    with locked(path, shared=True) as first, locked(path, shared=True) as second, locked(path) as third:
        assert None not in (first, second)
        assert third is None
