"""Memory files: what is saved comes back exactly and goes on as before; what does not fit is refused by name."""

import copy
import dataclasses
import functools
import json
import math
import operator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import xkfac
from tests.helpers.memories import VARIANTS, assert_equal, blocks_of, consolidated, learn, make
from xkfac import Memory, MemoryFileError, files, memory_file
from xkfac.curvature.blocks import Diagonal, Kronecker, parts
from xkfac.curvature.estimate import Estimate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_memories_come_back_exactly(tmp_path, kind, variant, dtype):
    net, first, second = make(kind, dtype=dtype)
    memory = consolidated(net, first, variant)
    memory.save(tmp_path / "memory")
    loaded = Memory.load(tmp_path / "memory", net)
    assert_equal(loaded, memory)
    new = consolidated(net, second, variant)
    new = Estimate(new.curvature, new.coverage, new.examples)
    extended = memory.extend(net, new, weights=(0.5, 0.5), keep_all=variant in ("xkfac", "cross-layer", "kfac"))
    extended.save(tmp_path / "memory")
    assert_equal(Memory.load(tmp_path / "memory", net), extended)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loaded_memory_goes_on_as_the_one_in_process(tmp_path, kind, variant):
    net, first, second = make(kind)
    memory = consolidated(net, first, variant)
    memory.save(tmp_path / "memory")
    penalties, extended, there = learn(net, memory, second)
    loaded_penalties, loaded_extended, here = learn(net, Memory.load(tmp_path / "memory"), second)
    assert torch.equal(penalties, loaded_penalties)
    assert variant == "fine-tuning" or float(penalties[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(there.parameters(), here.parameters(), strict=True))
    assert_equal(loaded_extended, extended)


def test_files_are_saved_over_themselves_and_stay_the_same(tmp_path):
    net, data, _ = make("conv")
    memory = consolidated(net, data, "corrected")
    memory.save(tmp_path / "memory")
    loaded = Memory.load(tmp_path / "memory")
    loaded.save(tmp_path / "memory")
    assert_equal(loaded, memory)
    assert_equal(Memory.load(str(tmp_path / "memory")), memory)


def test_terms_that_share_a_root_are_saved(tmp_path):
    net, data, _ = make("conv")
    memory = consolidated(net, data, "xkfac")
    same = Estimate(memory.curvature, memory.coverage, memory.examples)
    extended = memory.extend(net, same, weights=(0.5, 0.5), keep_all=True)
    extended.save(tmp_path / "memory")
    assert_equal(Memory.load(tmp_path / "memory"), extended)


def test_names_with_slashes_are_kept_apart(tmp_path):
    net = nn.Sequential()
    for name, layer in (("a", nn.Linear(6, 5)), ("a/left", nn.Linear(5, 4)), ("joint", nn.Linear(4, 3))):
        net.add_module(name, layer)
    memory = consolidated(net, make("mlp")[1])
    memory.save(tmp_path / "memory")
    assert_equal(Memory.load(tmp_path / "memory", net), memory)


def tensors_of(memory):
    return [tensor for _, tensor in (*memory.anchor.items(), *memory.curvature.tensors())]


@pytest.mark.parametrize("variant", VARIANTS)
def test_memories_lie_aligned_row_by_row_in_process_and_from_a_file(tmp_path, variant):
    """Products round by the addresses and strides of their operands, even where the numbers are equal."""
    net, first, second = make("mlp" if variant.startswith("cross-layer") else "conv")
    few = {} if variant == "fine-tuning" else {"draws": 1}
    memory, new = (consolidated(net, data, variant, **few) for data in (first, second))
    extended = memory.extend(net, Estimate(new.curvature, new.coverage, new.examples), weights=(0.5, 0.5))
    for made in (memory, extended):
        made.save(tmp_path / "memory")
        for tensor in (*tensors_of(made), *tensors_of(Memory.load(tmp_path / "memory"))):
            assert tensor.data_ptr() % 64 == 0
            assert tensor.stride() == torch.empty(tensor.shape).stride()


def test_nothing_of_a_loaded_memory_is_mapped_from_its_file(tmp_path):
    """Guards a fault: writing to the file changed the curvature in use, and cutting it off ended the process."""
    net, data, _ = make("mlp")
    path = tmp_path / "memory"
    memory = consolidated(net, data, "diagonal")
    memory.save(path)
    loaded = Memory.load(path)
    assert str(path) not in Path("/proc/self/maps").read_text()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert_equal(loaded, memory)
    with path.open("r+b") as file:
        file.truncate(10)
    assert_equal(loaded, memory)


def test_the_digest_is_checked_on_what_is_kept(tmp_path, monkeypatch):
    """A file that is written to while it is read is refused, or what was read before is kept as it was."""
    net, data, _ = make("mlp")
    path = tmp_path / "memory"
    memory = consolidated(net, data)
    memory.save(path)
    checked = files._digest

    def overwritten(*content):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        return checked(*content)

    monkeypatch.setattr(files, "_digest", overwritten)
    assert_equal(Memory.load(path), memory)
    monkeypatch.undo()
    with pytest.raises(MemoryFileError):
        Memory.load(path)


def test_a_loaded_memory_gives_the_bits_of_the_one_in_process_wherever_its_tensors_are_in_the_file(tmp_path):
    """Guards a fault: products of a mapped root of 129 numbers were rounded by its place in the file."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    data = [(torch.randn(16, 20), torch.randint(0, 10, (16,))) for _ in range(3)]
    memory = consolidated(net, data, "xkfac", draws=1)
    penalties, extended, _ = learn(net, memory, data, steps=3)
    for zeros in (8, 16):  # the header is longer by as much, and one of the two has the root at an odd multiple of 8
        moved = dataclasses.replace(memory, examples=10**zeros)
        moved.save(tmp_path / "memory")
        found, again, _ = learn(net, Memory.load(tmp_path / "memory"), data, steps=3)
        assert torch.equal(found, penalties)
        assert_equal(dataclasses.replace(again, examples=extended.examples), extended)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize(("dtype", "bytes_each"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)])
def test_files_hold_triangles(tmp_path, kind, dtype, bytes_each):
    net, data, _ = make(kind)
    memory = consolidated(net, data)
    memory.save(tmp_path / "memory", dtype)
    numbers = diagonals = 0
    for unit in memory.units:
        groups, rows, columns = unit.shape
        halves = 2 * groups * (rows * (rows + 1) // 2 + columns * (columns + 1) // 2)
        numbers += columns if unit.kind == "free" else halves
        diagonals += 0 if unit.kind == "free" or dtype is not torch.bfloat16 else 2 * groups * (rows + columns)
    anchor = sum(tensor.numel() for tensor in memory.anchor.values()) * max(bytes_each, 4)
    raw = (tmp_path / "memory").read_bytes()
    assert len(raw) - 8 - int.from_bytes(raw[:8], "little") == numbers * bytes_each + diagonals * 4 + anchor


def test_bfloat16_keeps_the_anchor_and_rounds_the_factors(tmp_path):
    net, data, _ = make("conv")
    for variant in ("xkfac", "paper", "cross-layer"):
        memory = consolidated(net, data, variant)
        memory.save(tmp_path / "memory", torch.bfloat16)
        loaded = Memory.load(tmp_path / "memory", net)
        for name, tensor in memory.anchor.items():
            assert torch.equal(loaded.anchor[name], tensor)
        for name, block in blocks_of(memory).items():
            for part, tensor in parts(block).items():
                found = parts(blocks_of(loaded)[name])[part]
                assert found.dtype == torch.float32
                bound = tensor.abs() / 2**8
                if not isinstance(block, Diagonal) and not part.startswith("root"):
                    scale = tensor.diagonal(dim1=-2, dim2=-1).sqrt()
                    bound = scale[..., :, None] * scale[..., None, :] / 2**7
                assert bool(((found - tensor).abs() <= 1.01 * bound + 1e-12).all()), (variant, name, part)


def test_bfloat16_keeps_the_factors_positive(tmp_path):
    """Rounding a factor entry by entry made some of its eigenvalues negative, and so the penalty of some steps."""
    net = nn.Sequential(
        nn.Linear(30, 60), nn.BatchNorm1d(60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3)
    )
    base = torch.randn(4, 30)
    data = [(torch.randn(32, 4) @ base, torch.randint(0, 3, (32,))) for _ in range(3)]
    memory = consolidated(net, data)
    memory.save(tmp_path / "memory", torch.bfloat16)
    rounded = 0.0
    for name, block in Memory.load(tmp_path / "memory").curvature.blocks.items():
        assert isinstance(block, Kronecker)
        for part, tensor in parts(block).items():
            values = torch.linalg.eigvalsh(tensor.double())
            assert float(values.min()) >= -1e-6 * float(values.max())
            plain = torch.linalg.eigvalsh(parts(memory.curvature.blocks[name])[part].bfloat16().double())
            rounded = min(rounded, float(plain.min() / plain.max()))
    assert rounded < -1e-4


def test_bfloat16_files_serve_a_float64_network(tmp_path):
    net, first, second = make("mlp", dtype=torch.float64)
    memory = consolidated(net, first)
    memory.save(tmp_path / "memory", torch.bfloat16)
    exact, _, _ = learn(net, memory, second)
    rounded, _, _ = learn(net, Memory.load(tmp_path / "memory"), second)
    torch.testing.assert_close(rounded.double(), exact, rtol=0.02, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32])
def test_other_dtypes_are_refused(tmp_path, dtype):
    net, data, _ = make("mlp")
    with pytest.raises(xkfac.XkfacError, match=r"stored in torch.float32, .*, not torch\.(float16|int32); choose one"):
        consolidated(net, data).save(tmp_path / "memory", dtype)
    assert list(tmp_path.iterdir()) == []


def test_likelihoods_come_back_with_their_arguments(tmp_path):
    net, data, _ = make("mlp")
    for likelihood in (xkfac.Gaussian(2.5), xkfac.Gaussian(torch.tensor(0.5)), xkfac.Bernoulli(), xkfac.Categorical()):
        memory = consolidated(net, data, likelihood=likelihood)
        memory.save(tmp_path / "memory")
        loaded = Memory.load(tmp_path / "memory").likelihood
        assert type(loaded) is type(likelihood)
        assert loaded.arguments == {name: float(value) for name, value in likelihood.arguments.items()}


class Laplace(xkfac.Categorical):
    """A user's own likelihood that keeps the name of its parent."""


class Named(xkfac.Categorical):
    name = "my own"
    arguments = {"not": object()}  # noqa: RUF012


@pytest.mark.parametrize("likelihood", [Laplace(), Named()])
def test_a_users_own_likelihood_is_named_and_asked_for_again(tmp_path, likelihood):
    net, first, second = make("mlp")
    memory = consolidated(net, first, likelihood=likelihood)
    memory.save(tmp_path / "memory")
    loaded = Memory.load(tmp_path / "memory", net)
    sentence = f"likelihood '{likelihood.name}', which its file cannot hold; pass likelihood=... again"
    for labels in ("signs", "sampled", "empirical", "exact"):
        method = xkfac.Method("xkfac", xkfac.Settings(labels=labels))
        with pytest.raises(xkfac.XkfacError, match=sentence):
            learn(net, dataclasses.replace(loaded, method=method), second)
    loaded.save(tmp_path / "memory")
    _, extended, _ = learn(net, Memory.load(tmp_path / "memory"), second, likelihood=likelihood)
    _, in_process, _ = learn(net, memory, second)
    for (_, a), (_, b) in zip(extended.curvature.tensors(), in_process.curvature.tensors(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("variant", ["xkfac", "corrected", "cross-layer"])
def test_another_network_is_refused_by_unit(tmp_path, variant):
    net, data, _ = make("mlp")
    consolidated(net, data, variant).save(tmp_path / "memory")
    other = copy.deepcopy(net)
    other[3], other[4] = nn.Linear(8, 9), nn.BatchNorm1d(9)
    with pytest.raises(xkfac.MismatchError, match="unit '3': the memory's merged weight is 1x7x9"):
        Memory.load(tmp_path / "memory", other)
    with pytest.raises(xkfac.MismatchError, match=r"unit '0': the model lacks '0.weight'"):
        Memory.load(tmp_path / "memory", make("conv")[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("variant", "tensor", "unit"),
    [
        ("xkfac", "curvature/3/right.1", "3"),
        ("corrected", "curvature/6/scales", "6"),
        ("xkfac", "anchor/0", "0"),
        ("cross-layer", "joint/left.0", "0 and 3 and 6"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_unit(tmp_path, variant, tensor, unit, value):
    net, data, _ = make("mlp")
    path = tmp_path / "memory"
    consolidated(net, data, variant).save(path)
    description, tensors = files.read(path)
    tensors[tensor] = tensors[tensor].clone()
    tensors[tensor].view(-1)[1] = value
    files.write(path, description, tensors)
    with pytest.raises(MemoryFileError, match=f"memory' holds numbers of unit '{unit}' that are not finite; make it"):
        Memory.load(path)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_memory_that_is_not_finite_is_not_saved(tmp_path, dtype):
    net, data, _ = make("mlp")
    memory = consolidated(net, data)
    memory.curvature.blocks["3"].terms[0].left[0, 0, 0] = float("nan")
    with pytest.raises(xkfac.XkfacError, match="numbers of unit '3' are not finite"):
        memory.save(tmp_path / "memory", dtype)
    large = consolidated(*make("mlp", dtype=torch.float64)[:2])
    large.curvature.blocks["0"].terms[0].right[0, 0, 0] = 1e60
    large.save(tmp_path / "large")
    with pytest.raises(xkfac.XkfacError, match=r"numbers of unit '0' are not finite in torch.float32; .*float64"):
        large.save(tmp_path / "memory", torch.float32)
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def without(key):
    return lambda description, tensors: description.pop(key)


def unit(**changes):
    return lambda description, tensors: description["units"][0].update(changes)


CONTRADICTIONS = {
    **{f"no {key}": without(key) for key in ("method", "blocks", "tasks", "examples", "exclude", "rows", "joint")},
    "unknown block": lambda d, t: d["blocks"].update({"0": "tucker"}),
    "another block": lambda d, t: d["blocks"].update({"0": "diagonal"}),
    "blocks as a list": lambda d, t: d.update(blocks=[]),
    "unknown setting": lambda d, t: d["method"]["settings"].update(magic=1),
    "weights with noise": lambda d, t: d["method"]["settings"].update(noise=0.2),
    "bad setting": lambda d, t: d["method"]["settings"].update(kind="magic"),
    "draws that are true": lambda d, t: d["method"]["settings"].update(draws=True),
    "method without a penalty": lambda d, t: d["method"].update(penalised=False),
    "unknown likelihood": lambda d, t: d["likelihood"].update(name="magic"),
    "likelihood without arguments": lambda d, t: d["likelihood"].pop("arguments"),
    "likelihood of a variance": lambda d, t: d["likelihood"].update(arguments={"variance": 1.0}),
    "variance that is infinite": lambda d, t: d.update(
        likelihood={"name": "gaussian", "arguments": {"variance": math.inf}}
    ),
    "unknown unit field": unit(magic=1),
    "unit without a name": lambda d, t: d["units"][0].pop("name"),
    "unit of an unknown kind": unit(kind="magic"),
    "unit of another kind": unit(kind="free"),
    "unit with a geometry": unit(convolution={"kernel": [3], "stride": [1], "padding": [[0, 0]], "dilation": [1]}),
    "unit without a weight": unit(weight=None),
    "weight as a list": unit(weight=["0.weight"]),
    "bias of another unit": unit(bias="3.bias"),
    "unit called never": unit(calls=0),
    "one unit fewer": lambda d, t: d["units"].pop(),
    "one unit twice": lambda d, t: d["units"].append(d["units"][0]),
    "one block fewer": lambda d, t: d["blocks"].pop("0"),
    "other shape": unit(shape=[1, 7, 7]),
    "shape of two": unit(shape=[8, 7]),
    "units as a number": lambda d, t: d.update(units=3),
    "rows as a table": lambda d, t: d.update(rows={}),
    "row of an unknown unit": lambda d, t: d["rows"][0].update(unit="9"),
    "row of a negative size": lambda d, t: d["rows"][0].update(size=-1),
    "tasks as a list": lambda d, t: d.update(tasks=[1]),
    "no task": lambda d, t: d.update(tasks=0),
    "half a task": lambda d, t: d.update(tasks=0.5),
    "examples as a text": lambda d, t: d.update(examples="24"),
    "exclude as a text": lambda d, t: d.update(exclude="head"),
    "exclude of numbers": lambda d, t: d.update(exclude=[1]),
    "flipped roots": lambda d, t: d.update(roots=True),
    "roots as a number": lambda d, t: d.update(roots=0),
    "joint of nothing": lambda d, t: d.update(joint={"units": [], "rows": [], "columns": []}),
    "calibration as a list": lambda d, t: d.update(calibration=[]),
    "calibration of texts": lambda d, t: d.update(
        calibration={"scale": "2", "radius": 1.0, "curve": [], "examples": 3}
    ),
    "calibration of a number too large": lambda d, t: d.update(
        calibration={"scale": 10**400, "radius": 1.0, "curve": [], "examples": 3}
    ),
    "no anchor": lambda d, t: t.pop("anchor/0"),
    "no factor": lambda d, t: t.pop("curvature/0/left.0"),
    "no factors": lambda d, t: [t.pop(f"curvature/0/{part}") for part in ("left.0", "right.0", "left.1", "right.1")],
    "odd triangle": lambda d, t: t.update({"curvature/0/left.0": torch.ones(1, 29)}),
    "smaller factor": lambda d, t: t.update({"curvature/0/left.1": torch.ones(1, 21)}),
    "other anchor": lambda d, t: t.update({"anchor/0": torch.ones(1, 8, 6)}),
    "negative factor": lambda d, t: t["curvature/0/right.0"].neg_(),
    "factor that is no Gram matrix": lambda d, t: t["curvature/0/right.0"][:, 1].fill_(1e6),
    "one dtype more": lambda d, t: t.update({"curvature/0/left.0": t["curvature/0/left.0"].double()}),
    "another dtype": lambda d, t: t.update({name: tensor.long() for name, tensor in t.items()}),
    "rounded anchor": lambda d, t: t.update({"anchor/0": t["anchor/0"].bfloat16()}),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_header_that_does_not_fit_its_tensors_is_refused(tmp_path, contents, change):
    description, tensors = contents("xkfac", "mlp", form="paper")
    change(description, tensors)
    files.write(tmp_path / "memory", description, tensors)
    with pytest.raises(
        MemoryFileError, match=r"'.*memory' is damaged: .* does not describe its tensors .*make it again"
    ) as caught:
        Memory.load(tmp_path / "memory")
    assert "\n" not in str(caught.value)


def test_a_header_that_says_there_is_no_noise_is_read(tmp_path, contents):
    description, tensors = contents("xkfac", "mlp")
    files.write(tmp_path / "plain", description, tensors)
    description["method"]["settings"]["noise"] = 0.0
    files.write(tmp_path / "noise", description, tensors)
    assert_equal(Memory.load(tmp_path / "noise"), Memory.load(tmp_path / "plain"))


@pytest.fixture(scope="module")
def contents(tmp_path_factory):
    """Return a function that gives the description and the tensors of a memory's file, new ones each time."""
    path = tmp_path_factory.mktemp("contents") / "memory"

    @functools.cache
    def made(variant, kind, dtype, **options):
        net, data, _ = make(kind)
        few = {} if variant == "fine-tuning" else {"draws": 1}
        consolidated(net, data, variant, **few, **options).save(path, dtype)
        return files.read(path)

    def get(variant, kind, dtype=None, **options):
        description, tensors = made(variant, kind, dtype, **options)
        return copy.deepcopy(description), {name: tensor.clone() for name, tensor in tensors.items()}

    return get


def leaves(value, path=()):
    """Yield the path of every table, list, text and number of a description."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield from leaves(part, (*path, key))


def kind_of(value):
    return "number" if type(value) in (int, float) else type(value)


FORGED = [("mean-hierarchical", "conv"), ("cross-layer-mean", "mlp"), ("corrected", "conv"), ("unmerged", "mlp")]


@pytest.mark.parametrize(("variant", "kind"), FORGED[:2])
def test_every_field_of_another_type_is_refused(tmp_path, contents, variant, kind):
    """One error, whatever stands where something else is expected; nothing of another type is taken."""
    original, tensors = contents(variant, kind)
    original["calibration"] = {"scale": 2.0, "radius": 1.0, "curve": [{"predicted": 0.1, "real": 0.2}], "examples": 3}
    path = tmp_path / "memory"
    taken, refused = [], 0
    for place in [place for place in leaves(original) if place]:
        *way, key = place
        inner = functools.reduce(operator.getitem, way, original)
        right = inner[key]
        for value in ([], {}, "text", None, True, -1.5):
            if kind_of(right) == kind_of(value):
                continue
            inner[key] = value
            try:
                memory_file.rebuilt(original, tensors)
            except (LookupError, TypeError, ValueError):
                refused += 1
            else:
                taken.append((key, value))
        inner[key] = right
    assert refused > 300
    # What may be left out, or be a text in place of nothing, is all that is taken.
    names = {"weight", "bias", "norm", "calibration", "draws", "arguments"}
    assert [(name, value) for name, value in taken if name not in names or value not in (None, "text")] == []
    files.write(path, original, tensors)
    assert Memory.load(path).calibration.scale == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("variant", "kind"), [*FORGED, ("diagonal", "mlp"), ("xkfac", "mlp")])
def test_every_tensor_of_another_shape_dtype_or_name_is_refused(contents, variant, kind, dtype):
    description, original = contents(variant, kind, dtype)
    memory_file.rebuilt(description, original)
    for name, tensor in original.items():
        forged = {
            "longer": {name: torch.cat([tensor, tensor[..., :1]], -1)},
            "shorter": {name: tensor[..., :-1]},
            "more": {name: torch.cat([tensor, tensor[:1]])},
            "flat": {name: tensor.flatten()},
            "deeper": {name: tensor[None]},
            "none": {name: tensor[:0]},
            "dtype": {name: tensor.double()},
            "whole": {name: tensor.long()},
            "renamed": {f"{name}x": tensor},
            "left over": {name: tensor, f"{name}.9": tensor},
        }
        for change in forged.values():
            rest = {other: one for other, one in original.items() if other != name}
            with pytest.raises((LookupError, TypeError, ValueError)):
                memory_file.rebuilt(description, {**rest, **change})


@pytest.mark.parametrize(
    ("variant", "tensor", "sentence"),
    [
        ("corrected", "curvature/0/left", "the eigenvectors of unit '0' are none"),
        ("corrected", "curvature/0/scales", "the curvature of unit '0' is negative"),
        ("corrected", "curvature/0/left_values", "the curvature of unit '0' is negative"),
        ("diagonal", "curvature/3/values", "the curvature of unit '3' is negative"),
        ("cross-layer", "joint/right.0", "the factors across layers are not positive semi-definite"),
        ("unmerged", "anchor/1", "a sigma of unit '1' is not positive"),
    ],
)
def test_numbers_that_cannot_be_are_refused(contents, variant, tensor, sentence):
    description, tensors = contents(variant, "mlp")
    tensors[tensor] = -tensors[tensor] if tensors[tensor].min() >= 0 or "joint" in tensor else 2 * tensors[tensor]
    if tensor == "anchor/1":
        tensors[tensor][..., 3] = 0
    with pytest.raises(ValueError, match=sentence):
        memory_file.rebuilt(description, tensors)


def test_factors_across_layers_of_another_size_are_refused(tmp_path, contents):
    description, tensors = contents("cross-layer", "mlp")
    files.write(tmp_path / "memory", description, {**tensors, "joint/right.0": torch.ones(1, 3)})
    with pytest.raises(MemoryFileError, match="factors across layers are of another size"):
        Memory.load(tmp_path / "memory")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("memory") / "memory"
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    memory = xkfac.consolidate(net, [(torch.randn(4, 2), torch.zeros(4))], "xkfac")
    memory.save(path)
    return memory, path.with_name("damaged"), path.read_bytes()


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_memories_are_refused_or_the_same(small, data):
    memory, path, raw = small
    changed = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changed = changed[: data.draw(st.sampled_from([len(raw), len(raw) // 2, len(raw) - 1]))]
    path.write_bytes(changed)
    try:
        loaded = Memory.load(path)
    except MemoryFileError:
        return
    assert changed == raw
    assert_equal(loaded, memory)


def test_a_failing_save_keeps_the_memory_that_was_there(tmp_path, monkeypatch):
    net, first, second = make("mlp")
    path = tmp_path / "memory"
    memory = consolidated(net, first)
    memory.save(path)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(MemoryFileError, match="could not be written and is as it was before"):
        consolidated(net, second).save(path)
    assert_equal(Memory.load(path, net), memory)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(MemoryFileError, match=r"the folder '.*absent' does not exist; make it first"):
        memory.save(tmp_path / "absent" / "memory")


def test_a_file_tells_what_it_is_to_any_reader_of_safetensors(tmp_path):
    net, data, _ = make("mlp")
    consolidated(net, data).save(tmp_path / "memory")
    with safe_open(str(tmp_path / "memory"), framework="pt") as file:
        description = json.loads(file.metadata()["description"])
        assert tuple(file.get_tensor("anchor/0").shape) == (1, 8, 7)
    assert description["method"]["name"] == "xkfac"
    assert [unit["name"] for unit in description["units"]] == ["0", "3", "6"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("variant", VARIANTS)
def test_memories_move_between_cpu_and_gpu(tmp_path, variant):
    net, data, _ = make("conv")
    memory = consolidated(net, data, variant)
    memory.save(tmp_path / "memory")
    loaded = Memory.load(tmp_path / "memory", net, device="cuda")
    assert all(tensor.is_cuda for _, tensor in (*loaded.anchor.items(), *loaded.curvature.tensors()))
    assert_equal(loaded.to("cpu"), memory)
    loaded.save(tmp_path / "memory")
    assert_equal(Memory.load(tmp_path / "memory"), memory)
