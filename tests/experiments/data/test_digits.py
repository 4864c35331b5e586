"""Data sets: splits, permutations and batches are fixed by their keys, and a wrong file never passes as data."""

import gzip
import hashlib
import http.server
import itertools
import os
import socket
import struct
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xkfac.errors import XkfacError
from xkfac.experiments.data import digits
from xkfac.experiments.data.digits import DataError, Part

TRAIN, TEST, SHAPE = 50, 10, (3, 4)


def idx(array):
    """Return the idx file of a uint8 tensor."""
    sizes = b"".join(struct.pack(">I", size) for size in array.shape)
    return b"\x00\x00\x08" + bytes([array.dim()]) + sizes + bytes(array.flatten().tolist())


def small_mnist():
    """Return four small arrays under MNIST's names; the first two pixels of an image say which example it is."""
    generator = torch.Generator().manual_seed(5)
    arrays = {}
    for prefix, kind, count in (("train", 0, TRAIN), ("t10k", 255, TEST)):
        images = torch.randint(256, (count, *SHAPE), generator=generator, dtype=torch.uint8)
        images[:, 0, 0], images[:, 0, 1] = kind, torch.arange(count, dtype=torch.uint8)
        arrays[f"{prefix}-images-idx3-ubyte"] = images
        arrays[f"{prefix}-labels-idx1-ubyte"] = (torch.arange(count) % 10).to(torch.uint8)
    return arrays


CONTENT = {name: idx(array) for name, array in small_mnist().items()}
PACKED = {name: gzip.compress(content, mtime=0) for name, content in CONTENT.items()}
NAMES = list(digits.MNIST)
IMAGES, LABELS = NAMES[:2]


@pytest.fixture
def small(monkeypatch):
    """Let the small files be the published ones."""
    for name in digits.MNIST:
        monkeypatch.setitem(digits.MNIST, name, hashlib.sha256(CONTENT[name]).hexdigest())
    monkeypatch.delenv("XKFAC_DATA", raising=False)


def write(folder, files, suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}{suffix}").write_bytes(content)
    return folder


def sources(part):
    """Return which examples of the small MNIST a part has, as (file, number)."""
    return [tuple(row) for row in (part.x[:, :2] * 255).round().int().tolist()]


def rows(part):
    return {tuple(row) for row in part.x.tolist()}


# --- MNIST from files


@pytest.mark.parametrize("place", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_mnist_is_found_in_each_layout(tmp_path, small, place, suffix):
    write(tmp_path / place, PACKED if suffix else CONTENT, suffix)
    parts = digits.load("mnist", tmp_path, validation=8)
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [42, 8, TEST]
    for part in (parts.train, parts.validation, parts.test):
        assert part.x.dtype == torch.float32
        assert part.y.dtype == torch.int64
        assert part.x.shape == (len(part), 12)
        assert part.x.min() >= 0
        assert part.x.max() <= 1


def test_values_and_labels_are_those_of_the_files(tmp_path, small):
    parts = digits.load("mnist", write(tmp_path, PACKED, ".gz"), validation=8)
    arrays = small_mnist()
    assert torch.equal(parts.test.x, arrays[NAMES[2]].flatten(1).float() / 255)
    assert torch.equal(parts.test.y, arrays[NAMES[3]].long())
    for part in (parts.train, parts.validation):
        number = torch.tensor([number for _, number in sources(part)])
        assert torch.equal(part.x, arrays[IMAGES][number].flatten(1).float() / 255)
        assert torch.equal(part.y, number % 10)


def test_a_file_packed_anew_or_under_the_other_name_passes(tmp_path, small):
    write(tmp_path, {name: gzip.compress(content, 1) for name, content in CONTENT.items()}, ".gz")
    (tmp_path / f"{IMAGES}.gz").write_bytes(CONTENT[IMAGES])
    (tmp_path / LABELS).write_bytes(PACKED[LABELS])
    assert len(digits.load("mnist", tmp_path, validation=8).train) == 42


def test_the_variable_names_the_folder_and_the_argument_goes_first(tmp_path, small, monkeypatch):
    monkeypatch.setenv("XKFAC_DATA", str(write(tmp_path / "files", CONTENT)))
    assert len(digits.load("mnist", None, validation=8).train) == 42
    with pytest.raises(DataError, match="missing' does not exist"):
        digits.load("mnist", tmp_path / "missing", validation=8)


@pytest.mark.parametrize("variable", [None, ""])
def test_no_folder_names_the_ways_to_give_one(small, monkeypatch, variable):
    if variable is not None:
        monkeypatch.setenv("XKFAC_DATA", variable)
    for download in (False, True):
        with pytest.raises(DataError, match=r"--data FOLDER .* XKFAC_DATA, .*--download"):
            digits.load("mnist", None, validation=8, download=download)


@pytest.mark.parametrize("missing", NAMES)
def test_a_missing_file_is_named(tmp_path, small, missing):
    write(tmp_path, {name: content for name, content in CONTENT.items() if name != missing})
    with pytest.raises(DataError, match=rf"^'{missing}' is neither in '{tmp_path}'.*--download"):
        digits.load("mnist", tmp_path, validation=8)


def test_a_folder_that_is_none_is_named(tmp_path, small):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file' is no folder"):
        digits.load("mnist", tmp_path / "file", validation=8)
    with pytest.raises(DataError, match=r"could not be written .*; choose another folder"):
        digits.load("mnist", tmp_path / "file", validation=8, download=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_one_changed_byte_is_noticed(tmp_path, small, name, suffix):
    changed = bytearray(CONTENT[name])
    changed[-1] ^= 1
    write(tmp_path, PACKED if suffix else CONTENT, suffix)
    (tmp_path / f"{name}{suffix}").write_bytes(gzip.compress(changed) if suffix else changed)
    with pytest.raises(DataError) as caught:
        digits.load("mnist", tmp_path, validation=8)
    for words in (
        str(tmp_path / f"{name}{suffix}"),
        hashlib.sha256(changed).hexdigest(),
        digits.MNIST[name],
        "delete it and add --download",
    ):
        assert words in str(caught.value)


def test_a_gz_file_cut_or_changed_at_any_byte_never_gives_other_data(tmp_path, small):
    """The header of gzip has bytes without meaning (time, system): changed, they may pass with the same content."""
    write(tmp_path, PACKED, ".gz")
    path, whole = tmp_path / f"{LABELS}.gz", PACKED[LABELS]
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(DataError, match=LABELS):
            digits.load("mnist", tmp_path, validation=8)
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 0xFF
        path.write_bytes(changed)
        try:
            found = digits.load("mnist", tmp_path, validation=8)
        except DataError as error:
            assert LABELS in str(error)  # noqa: PT017
        else:
            assert 4 <= at < 10
            assert torch.equal(found.train.y, torch.tensor([number % 10 for _, number in sources(found.train)]))


def test_a_web_page_in_place_of_a_file_is_named(tmp_path, small):
    write(tmp_path, CONTENT)
    (tmp_path / IMAGES).write_bytes(b"<html>404</html>")
    with pytest.raises(DataError, match=rf"{IMAGES}' is damaged or no file of mnist"):
        digits.load("mnist", tmp_path, validation=8)


@pytest.mark.skipif(not os.environ.get("XKFAC_DATA"), reason="XKFAC_DATA names no folder with MNIST")
def test_the_published_mnist():
    parts = digits.load("mnist", None, validation=5000)
    assert [tuple(part.x.shape) for part in (parts.train, parts.validation, parts.test)] == [
        (55000, 784),
        (5000, 784),
        (10000, 784),
    ]
    labels = torch.cat((parts.train.y, parts.validation.y)).bincount().tolist()
    assert labels == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert parts.test.y[:5].tolist() == [7, 2, 1, 0, 4]
    assert parts.train.y[:10].tolist() == [0, 1, 5, 3, 7, 6, 1, 4, 0, 6]  # the split of this version
    for part in (parts.train, parts.validation, parts.test):
        assert part.x.min() == 0
        assert part.x.max() == 1
    mean = (parts.train.x.double().sum() + parts.validation.x.double().sum()) / (60000 * 784)
    assert mean.item() == pytest.approx(0.1306605, abs=1e-6)


# --- downloads


@pytest.fixture
def serve(monkeypatch):
    """Return a function that serves files here as the last of the mirrors: its address, and what it was asked."""
    servers = []
    monkeypatch.setattr(digits, "MIRRORS", ())
    monkeypatch.setattr(digits, "TIMEOUT", 5.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    def start(files, short=False):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.path)
                content = files.get(self.path.rsplit("/", 1)[1].removesuffix(".gz"))
                if content is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[:-9] if short else content)

            def log_message(self, *arguments):
                pass

        asked = []
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        mirror = f"http://127.0.0.1:{server.server_port}/mnist/"
        monkeypatch.setattr(digits, "MIRRORS", (*digits.MIRRORS, mirror))
        return mirror, asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


WHOLE = sorted(f"MNIST/raw/{name}.gz" for name in NAMES)


def test_download_fetches_all_once_and_the_files_are_found_again(tmp_path, small, serve):
    folder = tmp_path / "new"
    _, asked = serve(PACKED)
    parts = digits.load("mnist", folder, validation=8, download=True)
    assert files_below(folder) == WHOLE
    assert {name: (folder / "MNIST" / "raw" / f"{name}.gz").read_bytes() for name in NAMES} == PACKED
    assert asked == [f"/mnist/{name}.gz" for name in NAMES]
    for download in (True, False):
        again = digits.load("mnist", folder, validation=8, download=download)
        assert torch.equal(again.train.x, parts.train.x)
    assert len(asked) == 4


def test_download_fetches_only_what_is_missing_and_says_so_on_stderr(tmp_path, small, serve, capsys):
    mirror, asked = serve(PACKED)
    write(tmp_path / "mnist", {name: CONTENT[name] for name in NAMES[1:]})
    digits.load("mnist", tmp_path, validation=8, download=True)
    assert asked == [f"/mnist/{IMAGES}.gz"]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"fetching {mirror}{IMAGES}.gz" in printed.err


@pytest.mark.parametrize("fault", ["absent", "damaged", "short", "refused"])
def test_the_second_mirror_is_asked_when_the_first_fails(tmp_path, small, serve, monkeypatch, fault):
    if fault == "refused":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            monkeypatch.setattr(digits, "MIRRORS", (f"http://127.0.0.1:{free.getsockname()[1]}/",))
    else:
        bad = {} if fault == "absent" else PACKED if fault == "short" else dict.fromkeys(NAMES, PACKED[LABELS][:-1])
        serve(bad, short=fault == "short")
    _, asked = serve(PACKED)
    assert len(digits.load("mnist", tmp_path, validation=8, download=True).test) == TEST
    assert len(asked) == 4
    assert files_below(tmp_path) == WHOLE


def test_when_every_mirror_fails_each_is_named_with_its_failure_and_nothing_is_left(tmp_path, small, serve):
    damaged = PACKED[IMAGES][:-1] + b"?"
    first, _ = serve({})
    second, _ = serve({IMAGES: damaged})
    with pytest.raises(DataError) as caught:
        digits.load("mnist", tmp_path, validation=8, download=True)
    message = str(caught.value)
    assert f"'{IMAGES}.gz' could not be fetched from {first} (HTTP Error 404: Not Found) nor from {second} (" in message
    assert files_below(tmp_path) == []


def test_an_interrupted_download_leaves_nothing_and_the_next_one_goes_on(tmp_path, small, serve, monkeypatch):
    _, asked = serve(PACKED)
    write_bytes, calls = Path.write_bytes, itertools.count()

    def interrupted(path, content):
        if next(calls) == 1:
            write_bytes(path, content[:5])
            raise KeyboardInterrupt
        return write_bytes(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", interrupted)
        with pytest.raises(KeyboardInterrupt):
            digits.load("mnist", tmp_path, validation=8, download=True)
    assert files_below(tmp_path) == [f"MNIST/raw/{IMAGES}.gz"]
    digits.load("mnist", tmp_path, validation=8, download=True)
    assert len(asked) == 5


def test_a_damaged_file_is_not_overwritten_by_download(tmp_path, small, serve):
    _, asked = serve(PACKED)
    write(tmp_path, CONTENT)
    (tmp_path / LABELS).write_bytes(b"mine")
    with pytest.raises(DataError, match="delete it and add --download"):
        digits.load("mnist", tmp_path, validation=8, download=True)
    assert (tmp_path / LABELS).read_bytes() == b"mine"
    assert asked == []


# --- splits


@given(validation=st.integers(0, TRAIN - 1), draw=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_splits_are_disjoint_cover_all_and_leave_the_test_part_alone(tmp_path, small, validation, draw):
    limit = draw.draw(st.none() | st.integers(1, TRAIN - validation))
    write(tmp_path, CONTENT)
    parts = digits.load("mnist", tmp_path, validation=validation, train=limit)
    whole = digits.load("mnist", tmp_path, validation=validation)
    shuffle = sources(digits.load("mnist", tmp_path, validation=0).train)
    assert len(parts.validation) == validation
    assert len(parts.train) == (TRAIN - validation if limit is None else limit)
    assert sources(whole.train) + sources(whole.validation) == shuffle
    assert sorted(shuffle) == [(0, number) for number in range(TRAIN)]
    assert shuffle != sorted(shuffle)
    # `train` takes away from the end of training alone.
    assert sources(parts.train) == sources(whole.train)[: len(parts.train)]
    assert sources(parts.validation) == sources(whole.validation)
    assert sources(parts.test) == [(255, number) for number in range(TEST)]


@given(validation=st.integers(0, 1396))
@settings(max_examples=15, deadline=None)
def test_digits_are_split_into_disjoint_parts_with_one_test_part(validation):
    parts = digits.load("digits", None, validation=validation)
    assert parts.train.x.shape == (1397 - validation, 64)
    assert parts.validation.x.shape == (validation, 64)
    # All digits are different images, so that rows tell examples apart.
    assert len(rows(parts.train) | rows(parts.validation) | rows(parts.test)) == 1797
    assert torch.equal(parts.test.x, digits.load("digits", None, validation=0).test.x)
    assert parts.test.y.bincount().min() > 20


def test_digits_are_those_of_scikit_learn_scaled_to_one():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    known = {tuple(row): label for row, label in zip((images / 16).tolist(), labels.tolist(), strict=True)}
    parts = digits.load("digits", None, validation=397, train=900)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (900, 397, 400)
    for part in (parts.train, parts.validation, parts.test):
        assert (part.x.dtype, part.y.dtype) == (torch.float32, torch.int64)
        assert [known[tuple(row)] for row in part.x.tolist()] == part.y.tolist()
    assert parts.test.y[:10].tolist() == [6, 0, 4, 7, 4, 0, 4, 4, 1, 0]  # the same on any platform


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(XkfacError, match=r"pip install 'xkfac\[experiments\]'"):
        digits.load("digits", None, validation=100)


@pytest.mark.parametrize(
    ("validation", "train", "words"),
    [
        (1397, None, "validation=1397 leaves 0 for training, and 1 must be left; lower validation$"),
        (5000, None, "leaves 0 for training"),
        (397, 1001, "validation=397 leaves 1000 for training, and 1001 must be left; lower validation or train$"),
    ],
)
def test_too_few_examples_are_said(validation, train, words):
    with pytest.raises(DataError, match=words):
        digits.load("digits", None, validation=validation, train=train)


# --- streams


def draws(generator):
    return torch.randint(2**62, (4,), generator=generator).tolist()


def test_streams_are_fixed_by_their_key_alone():
    torch.manual_seed(1)
    first = draws(digits.stream("weights", 3))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert (
        draws(digits.stream("weights", 3))
        == first
        == [2632366994319655109, 3863412170813005942, 2493835402618256558, 2392636871997605938]
    )  # the same on any platform
    assert torch.equal(torch.get_rng_state(), before)


def test_keys_that_look_alike_have_different_streams():
    keys = [("a", 1), ("a", "1"), ("a1",), ("a/1",), ("a", 1, 1), ("a", 11), ("b", 1), (1, "a"), ("a",), ("a", -1)]
    assert len({tuple(draws(digits.stream(*key))) for key in keys}) == len(keys)


@given(features=st.integers(1, 900), seed=st.integers(-(2**40), 2**70), task=st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_a_permutation_is_a_bijection_fixed_by_seed_and_task(features, seed, task):
    found = digits.permutation(features, seed, task)
    assert found.dtype == torch.int64
    assert found.sort().values.tolist() == list(range(features))
    digits.permutation(features, seed, task + 1)
    torch.rand(3)
    assert torch.equal(digits.permutation(features, seed, task), found)


def test_permutations_differ_between_all_tasks_and_seeds():
    found = {tuple(digits.permutation(64, seed, task).tolist()) for seed in range(20) for task in range(1, 101)}
    assert len(found) == 2000
    assert digits.permutation(10, 0, 1).tolist() == [8, 3, 9, 6, 2, 0, 1, 7, 4, 5]  # the same on any platform


def part_of(count):
    return Part(torch.arange(float(count))[:, None], torch.arange(count))


keys = st.fixed_dictionaries({name: st.integers(0, 1000) for name in ("seed", "task", "epoch")})


@given(count=st.integers(1, 200), key=keys, draw=st.data())
@settings(max_examples=80, deadline=None)
def test_batches_are_full_and_use_each_example_at_most_once(count, key, draw):
    size = draw.draw(st.integers(1, count))
    order = digits.batches(count, size, **key)
    assert order.dtype == torch.int64
    assert order.shape == (count // size, size)
    used = order.flatten().tolist()
    assert len(set(used)) == len(used)
    assert set(used) <= set(range(count))
    # The size of batches cuts one and the same order into pieces.
    assert used == digits.batches(count, 1, **key).flatten()[: len(used)].tolist()


@given(first=keys, second=keys)
@settings(max_examples=60, deadline=None)
def test_batches_are_fixed_by_their_key_and_differ_between_keys(first, second):
    order = digits.batches(100, 7, **first)
    other = digits.batches(100, 7, **second)
    assert torch.equal(order, other) == (first == second)
    assert torch.equal(order, digits.batches(100, 7, **first))


def test_every_epoch_has_another_order_and_leaves_out_others():
    orders = [digits.batches(40, 16, seed=0, task=1, epoch=epoch) for epoch in range(50)]
    assert len({tuple(order.flatten().tolist()) for order in orders}) == 50
    assert set(torch.cat(orders).flatten().tolist()) == set(range(40))
    assert orders[0][0, :5].tolist() == [8, 29, 7, 24, 3]  # the same on any platform


def test_no_full_batch_is_said():
    with pytest.raises(DataError, match="batch size is 11, but there are 10 examples"):
        digits.batches(10, 11, seed=0, task=0, epoch=0)


def test_parts_move_and_nothing_depends_on_the_default_device():
    parts = digits.load("digits", None, validation=100)
    moved = parts.to("meta")
    assert {part.x.device.type for part in (moved.train, moved.validation, moved.test)} == {"meta"}
    assert {part.y.device.type for part in (moved.train, moved.validation, moved.test)} == {"meta"}
    with torch.device("meta"):
        again = digits.load("digits", None, validation=100)
        order = digits.batches(len(again.train), 32, seed=0, task=0, epoch=0)
    assert {tensor.device.type for tensor in (again.train.x, again.test.y, order)} == {"cpu"}
    assert torch.equal(again.train.x, parts.train.x)


def test_mnist_does_not_depend_on_the_default_device(tmp_path, small):
    write(tmp_path, CONTENT)
    with torch.device("meta"):
        found = digits.load("mnist", tmp_path, validation=8)
    assert torch.equal(found.train.x, digits.load("mnist", tmp_path, validation=8).train.x)
