"""Files of tensors: what is written comes back, and a damaged file is refused or gives the same content."""

import builtins
import errno
import json
import os
import pickle
import resource
import socket
import stat
import struct
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from xkfac import MemoryFileError, files
from xkfac.curvature.gram import symmetric, triangle

DESCRIPTION = {"tasks": 2, "names": ["é", "a/b"], "nested": {"none": None, "number": 0.1}}


def some_tensors():
    generator = torch.Generator().manual_seed(1)
    return {
        "single": torch.randn(3, 4, generator=generator),
        "half": torch.randn(5, generator=generator).bfloat16(),
        "double": torch.randn(2, 2, generator=generator, dtype=torch.float64),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
    }


def assert_same(found, tensors):
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].nan_to_num(), tensor.nan_to_num())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("storage") / "file.safetensors"
    files.write(path, DESCRIPTION, some_tensors())
    return path, path.read_bytes()


@given(size=st.integers(0, 40), groups=st.sampled_from([(), (1,), (3,), (2, 2)]), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_symmetric_is_the_inverse_of_triangle(size, groups, seed):
    matrix = torch.randn(*groups, size, size, generator=torch.Generator().manual_seed(seed))
    matrix = matrix + matrix.mT
    packed = triangle(matrix)
    assert packed.shape == (*groups, size * (size + 1) // 2)
    assert torch.equal(symmetric(packed), matrix)


def test_triangle_holds_the_rows_of_the_lower_half():
    matrix = torch.tensor([[1.0, 2, 4], [2, 3, 5], [4, 5, 6]])
    assert triangle(matrix).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_sizes_of_triangles_are_exact(size):
    assert symmetric(torch.zeros(size * (size + 1) // 2)).shape == (size, size)


@given(
    size=st.integers(1, 60), rank=st.integers(0, 60), scale=st.sampled_from([1e-18, 1.0, 1e12]), seed=st.integers(0, 9)
)
@settings(max_examples=40, deadline=None)
def test_correlations_stay_positive_and_keep_to_their_bound(size, rank, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(3, size, rank, generator=generator) * torch.rand(3, size, 1, generator=generator).exp2() ** 9
    root[0, 0] = 0
    root[2] = root[2, :1]  # all rows alike: rank one, its correlations are 1 and not rounded
    matrix = (root @ root.mT) * scale
    matrix = (matrix + matrix.mT) / 2
    packed, diagonal = files.correlations(matrix)
    assert (packed.dtype, diagonal.dtype) == (torch.int16, torch.float32)
    found = files.from_correlations(packed, diagonal)
    assert torch.equal(found, found.mT)
    assert torch.equal(found.diagonal(dim1=1, dim2=2), matrix.diagonal(dim1=1, dim2=2))
    sizes = matrix.diagonal(dim1=1, dim2=2).double().sqrt()
    units = torch.where(sizes > 0, 1 / sizes, 0.0)
    assert float(torch.linalg.eigvalsh(found.double() * units[:, :, None] * units[:, None, :]).min()) > -1e-6
    shrunk = (1.17 * size**0.5 + 1) / 32767
    bound = (shrunk + 2**-16 + 1e-6) * sizes[:, :, None] * sizes[:, None, :]
    assert bool(((found.double() - matrix.double()).abs() <= bound).all())


def test_correlations_that_are_rounded_alike_are_shrunk_more():
    """Errors of one sign add up: what serves random ones would leave a negative eigenvalue."""
    matrix = torch.full((1, 300, 300), -1 / 299)  # 109.6 steps, which are rounded to 110; singular along ones
    matrix.diagonal(dim1=1, dim2=2).fill_(1.0)
    assert float(torch.linalg.eigvalsh((matrix[0] * 32746).round().fill_diagonal_(32767).double()).min()) < -1
    found = files.from_correlations(*files.correlations(matrix))
    assert float(torch.linalg.eigvalsh(found.double()).min()) >= 0
    assert float((found - matrix).abs().max()) < 300 / 32767 / 299


@pytest.mark.parametrize("kind", ["random", "one", "alike", "zero"])
def test_the_norm_bound_is_one_and_not_far_above(kind):
    generator = torch.Generator().manual_seed(3)
    random = torch.randn(2, 300, 300, generator=generator)
    vector = torch.randn(2, 300, 1, generator=generator)
    made = {"random": random + random.mT, "one": vector @ vector.mT, "alike": torch.ones(2, 300, 300)}
    matrix = made.get(kind, torch.zeros(2, 300, 300))
    norm = torch.linalg.matrix_norm(matrix, 2)
    bound = files.norm_bound(matrix)
    assert bool((bound >= norm).all())
    assert bool((bound <= 2.1 * norm + 1e-30).all())


def test_write_and_read_round_trip(written):
    description, tensors = files.read(written[0])
    assert description == DESCRIPTION
    assert_same(tensors, some_tensors())


def test_tensors_that_share_memory_or_are_views_are_written(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"a": base, "b": base, "row": base[1], "column": base[:, 1], "turned": base.T}
    files.write(tmp_path / "shared", {}, tensors)
    assert_same(files.read(tmp_path / "shared")[1], tensors)


def test_a_file_without_tensors(tmp_path):
    files.write(tmp_path / "none", {"a": 1}, {})
    assert files.read(tmp_path / "none") == ({"a": 1}, {})


def test_a_read_file_is_written_again_over_itself(written, tmp_path):
    path = tmp_path / "again"
    path.write_bytes(written[1])
    description, tensors = files.read(path)
    files.write(path, description, tensors)
    assert_same(files.read(path)[1], some_tensors())
    assert_same(tensors, some_tensors())


def test_nan_and_infinity_come_back_as_they_were(tmp_path):
    values = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    files.write(tmp_path / "odd", {}, {"x": values})
    assert torch.equal(files.read(tmp_path / "odd")[1]["x"].view(torch.int32), values.view(torch.int32))


def test_a_file_is_plain_safetensors_and_no_pickle(written):
    with safe_open(str(written[0]), framework="pt") as file:
        metadata = file.metadata()
        assert torch.equal(file.get_tensor("single"), some_tensors()["single"])
    assert metadata["format"] == files.FORMAT
    assert metadata["version"] == str(files.VERSION)
    assert json.loads(metadata["description"]) == DESCRIPTION
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(written[1])


def test_files_have_the_mode_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        files.write(tmp_path / "shared", {}, some_tensors())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o640


def test_the_digest_depends_on_everything():
    tensors = {"a": torch.ones(2), "b": torch.zeros(3)}
    variants = [
        ("1", "{}", tensors),
        ("2", "{}", tensors),
        ("1", "{ }", tensors),
        ("1", "{}", {"a": torch.ones(2), "c": torch.zeros(3)}),
        ("1", "{}", {"a": torch.ones(2), "b": torch.zeros(1, 3)}),
        ("1", "{}", {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.int32)}),
        ("1", "{}", {"a": torch.tensor([1.0, 1.0000001]), "b": torch.zeros(3)}),
    ]
    digests = [files._digest(files.FORMAT, *variant) for variant in variants]
    assert len(set(digests)) == len(digests)
    assert files._digest(files.FORMAT, "1", "{}", dict(reversed(tensors.items()))) == digests[0]


def assert_refused_or_same(path, data):
    """Read damaged bytes: MemoryFileError and nothing else, in one sentence with the name, or the same content."""
    path = path.with_name("damaged")
    path.write_bytes(data)
    start = time.monotonic()
    refusal = None
    try:
        description, tensors = files.read(path)
    except MemoryFileError as error:
        refusal = str(error)
    assert time.monotonic() - start < 30
    if refusal is not None:
        assert str(path) in refusal
        assert "\n" not in refusal
        return False
    assert description == DESCRIPTION
    assert_same(tensors, some_tensors())
    return True


damage = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(data=st.data())
@damage
def test_truncated_files_are_refused(written, data):
    path, raw = written
    assert not assert_refused_or_same(path, raw[: data.draw(st.integers(0, len(raw) - 1))])


@given(data=st.data())
@damage
def test_flipped_bits_are_refused(written, data):
    path, raw = written
    changed = bytearray(raw)
    changed[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert not assert_refused_or_same(path, bytes(changed))


@pytest.mark.parametrize("bit", range(64))
def test_flipped_bits_of_the_header_length_are_refused_at_once(written, bit):
    path, raw = written
    length = struct.unpack("<Q", raw[:8])[0] ^ (1 << bit)
    assert not assert_refused_or_same(path, struct.pack("<Q", length) + raw[8:])


@given(tail=st.binary(min_size=1, max_size=64))
@damage
def test_appended_bytes_are_refused(written, tail):
    assert not assert_refused_or_same(written[0], written[1] + tail)


@given(data=st.data())
@damage
def test_swapped_bytes_are_refused_or_harmless(written, data):
    path, raw = written
    a, b = (data.draw(st.integers(0, len(raw) - 1)) for _ in range(2))
    changed = bytearray(raw)
    changed[a], changed[b] = changed[b], changed[a]
    assert_refused_or_same(path, bytes(changed))


@given(data=st.data())
@damage
def test_zeroed_ranges_are_refused_or_harmless(written, data):
    path, raw = written
    start = data.draw(st.integers(0, len(raw) - 1))
    stop = data.draw(st.integers(start + 1, len(raw)))
    changed = raw[:start] + bytes(stop - start) + raw[stop:]
    assert assert_refused_or_same(path, changed) == (changed == raw)


@given(data=st.data(), noise=st.binary(min_size=1, max_size=40))
@damage
def test_overwritten_ranges_are_refused_or_harmless(written, data, noise):
    path, raw = written
    start = data.draw(st.integers(0, len(raw) - len(noise)))
    changed = raw[:start] + noise + raw[start + len(noise) :]
    assert assert_refused_or_same(path, changed) == (changed == raw)


@given(noise=st.binary(max_size=300))
@damage
def test_arbitrary_bytes_are_refused(written, noise):
    assert not assert_refused_or_same(written[0], noise)


def foreign_files(folder):
    torch.save({"a": torch.ones(3)}, folder / "pickle.pt")
    save_file({"a": torch.ones(3)}, folder / "other.safetensors")
    (folder / "text.txt").write_text("a text file, and no memory\n" * 40)
    (folder / "empty").write_bytes(b"")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    return {
        "pickle.pt": "no safetensors file",
        "other.safetensors": "no xkfac memory; name a file that was saved as one",
        "text.txt": "no safetensors file",
        "empty": "truncated",
        "folder": "is a folder; name a file",
        "pipe": "is no regular file; name a file",
        "missing": "does not exist; name a file",
        "n" * 300: "cannot be read",
    }


def test_foreign_files_are_refused_by_name(tmp_path):
    for name, sentence in foreign_files(tmp_path).items():
        with pytest.raises(MemoryFileError, match=sentence) as caught:
            files.read(tmp_path / name)
        assert str(tmp_path / name) in str(caught.value)


def test_a_file_that_may_not_be_read_is_refused(written, monkeypatch):
    def deny(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(MemoryFileError, match=r"cannot be read.*Permission denied"):
        files.read(written[0])


def test_newer_versions_ask_for_an_upgrade(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "VERSION", files.VERSION + 6)
    files.write(tmp_path / "new", {}, {})
    monkeypatch.undo()
    with pytest.raises(MemoryFileError, match=r"'.*new' has format version 7, this xkfac reads up to 1; upgrade"):
        files.read(tmp_path / "new")


@pytest.mark.parametrize("version", ["", "x", "-1", "1.0", "9" * 5000])
def test_versions_that_are_none_are_refused(tmp_path, version):
    metadata = {"format": files.FORMAT, "version": version, "description": "{}", "digest": ""}
    save_file({}, tmp_path / "odd", metadata)
    with pytest.raises(MemoryFileError, match=r"'.*odd'.*damaged"):
        files.read(tmp_path / "odd")


@pytest.mark.parametrize("missing", ["version", "description", "digest"])
def test_an_incomplete_header_is_refused(tmp_path, missing):
    metadata = {"format": files.FORMAT, "version": "1", "description": "{}", "digest": ""}
    del metadata[missing]
    save_file({}, tmp_path / "part", metadata)
    with pytest.raises(MemoryFileError, match="its header is incomplete; fetch or make it again"):
        files.read(tmp_path / "part")


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000])
def test_a_description_that_is_none_is_refused(tmp_path, text):
    metadata = {"format": files.FORMAT, "version": "1", "description": text}
    save_file({}, tmp_path / "odd", {**metadata, "digest": files._digest(files.FORMAT, "1", text, {})})
    with pytest.raises(MemoryFileError, match=r"'.*odd'.*damaged"):
        files.read(tmp_path / "odd")


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def stop(*args, **kwargs):
    raise KeyboardInterrupt


def half_written(tensors, path, metadata):
    Path(path).write_bytes(b"half of a file")
    raise KeyboardInterrupt


@pytest.mark.parametrize("there_before", [True, False])
@pytest.mark.parametrize(
    ("owner", "name", "fault", "raised"),
    [
        (files, "save_file", full_disk, MemoryFileError),
        (os, "fsync", full_disk, MemoryFileError),
        (Path, "replace", full_disk, MemoryFileError),
        (files, "save_file", half_written, KeyboardInterrupt),
        (os, "fsync", stop, KeyboardInterrupt),
        (Path, "replace", stop, KeyboardInterrupt),
    ],
)
def test_a_write_that_fails_leaves_everything_as_it_was(
    written, tmp_path, monkeypatch, there_before, owner, name, fault, raised
):
    path = tmp_path / "file"
    if there_before:
        path.write_bytes(written[1])
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(raised) as caught:
        files.write(path, {}, {"new": torch.ones(2)})
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == ([path] if there_before else [])
    assert not there_before or path.read_bytes() == written[1]
    if raised is MemoryFileError:
        assert str(path) in str(caught.value)
        assert "as it was before ([Errno 28] No space left on device)" in str(caught.value)
        assert "choose another place" in str(caught.value)


def test_a_file_that_outgrows_the_disk_leaves_everything_as_it_was(written, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(written[1])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(MemoryFileError, match=r"could not be written and is as it was before .*File too large"):
            files.write(path, {}, {"big": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == written[1]


def test_places_that_take_no_file_are_named(tmp_path):
    with pytest.raises(MemoryFileError, match=r"the folder '.*absent' does not exist; make it first"):
        files.write(tmp_path / "absent" / "file", {}, {})
    with pytest.raises(MemoryFileError, match="it is a folder; name a file in it"):
        files.write(tmp_path, {}, {})
    with pytest.raises(MemoryFileError, match="could not be written"):
        files.write("/proc/file", {}, {})
    with pytest.raises(MemoryFileError, match="could not be written"):
        files.write(tmp_path / ("n" * 300), {}, {})
    assert list(tmp_path.iterdir()) == []


def test_a_symbolic_link_is_followed_to_what_it_points_to(tmp_path):
    """Guards a fault: the link was replaced by a file, and what it pointed to stayed as it was."""
    (tmp_path / "store").mkdir()
    (tmp_path / "links").mkdir()
    for name, there_before in (("old", True), ("new", False)):
        target, link = tmp_path / "store" / name, tmp_path / "links" / name
        if there_before:
            files.write(target, {"tasks": 1}, {})
        link.symlink_to(Path("..") / "store" / name)
        chain = tmp_path / f"chain-{name}"
        chain.symlink_to(link)
        files.write(chain, DESCRIPTION, some_tensors())
        assert chain.is_symlink()
        assert link.is_symlink()
        assert not target.is_symlink()
        assert files.read(target)[0] == files.read(chain)[0] == DESCRIPTION
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["new", "old"]
    assert sorted(path.name for path in (tmp_path / "links").iterdir()) == ["new", "old"]


def test_links_that_lead_nowhere_are_named(tmp_path):
    (tmp_path / "lost").symlink_to(tmp_path / "absent" / "file")
    with pytest.raises(
        MemoryFileError, match=r"lost' cannot be written: the folder '.*absent' does not exist; make it"
    ):
        files.write(tmp_path / "lost", {}, {})
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(MemoryFileError, match=r"one' could not be written .*symbolic links"):
        files.write(tmp_path / "one", {}, {})
    (tmp_path / "folder").symlink_to(tmp_path)
    with pytest.raises(MemoryFileError, match="it is a folder; name a file in it"):
        files.write(tmp_path / "folder", {}, {})
    assert all(path.is_symlink() for path in tmp_path.iterdir())


def test_pipes_sockets_and_devices_are_refused_and_stay_as_they_are(tmp_path):
    """Guards a fault: they were replaced by a file."""
    os.mkfifo(tmp_path / "pipe")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    listening.close()
    (tmp_path / "link").symlink_to("/dev/null")
    before = {path: path.lstat() for path in tmp_path.iterdir()}
    for name, what in (("pipe", "pipe"), ("socket", "socket"), ("link", "device")):
        with pytest.raises(MemoryFileError) as caught:
            files.write(tmp_path / name, {}, some_tensors())
        assert str(caught.value) == (
            f"'{tmp_path / name}' cannot be written: it is a {what}, which holds no memory; name a regular file"
        )
    assert {path: path.lstat() for path in tmp_path.iterdir()} == before
    with pytest.raises(MemoryFileError, match="'/dev/null' cannot be written: it is a device"):
        files.write("/dev/null", {}, {})
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_reading_and_writing_use_no_pickle(tmp_path, monkeypatch):
    for name in ("dumps", "dump", "loads", "load", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, stop)
    monkeypatch.setattr(builtins, "eval", stop)
    files.write(tmp_path / "file", DESCRIPTION, some_tensors())
    assert files.read(tmp_path / "file")[0] == DESCRIPTION


def test_the_same_content_gives_the_same_bytes(tmp_path):
    tensors = {"b": torch.randn(3, 2), "a": torch.randn(5).bfloat16(), "c": torch.randn(2).double()}
    for name in ("one", "two"):
        files.write(tmp_path / name, {"tasks": 1}, tensors)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert {name: tensor.dtype for name, tensor in load_file(tmp_path / "one").items()} == {
        name: tensor.dtype for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("white", [b"\r", b"\n", b"\t"])
def test_white_space_changed_in_the_header_is_noticed(tmp_path, white):
    """Guards a fault: JSON does not care which white space stands between its tokens, a damaged file does."""
    path = tmp_path / "file"
    files.write(path, {"tasks": 1}, {"a": torch.ones(3)})
    raw = path.read_bytes()
    for place in (place for place, byte in enumerate(raw) if byte == ord(" ")):
        path.write_bytes(raw[:place] + white + raw[place + 1 :])
        with pytest.raises(MemoryFileError):
            files.read(path)
