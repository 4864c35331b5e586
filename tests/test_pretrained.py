"""A folder of network, memory and card: it loads with one call to the same bits, or not at all."""

import re

import pytest
import torch
from safetensors import safe_open
from torch import nn

import xkfac
from tests.helpers.setups import Everything, data, mlp, randomise
from xkfac.pretrained import CARD, MEMORY, MODEL, card

IMAGES = {"shape": (2, 7, 7)}


@pytest.fixture
def saved(tmp_path):
    model = randomise(Everything())
    memory = xkfac.consolidate(model, data(2, **IMAGES), "xkfac", draws=1, exclude=["head"])
    xkfac.save_pretrained(tmp_path / "folder", model, memory)
    return tmp_path / "folder", model, memory


def test_one_call_loads_network_and_memory_to_the_same_bits(saved):
    folder, model, memory = saved
    other = Everything()
    loaded = xkfac.load_pretrained(folder, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    for (_, a), (_, b) in zip(memory.curvature.tensors(), loaded.curvature.tensors(), strict=True):
        assert torch.equal(a, b)
    xkfac.Learner(other, loaded).begin(data(2, **IMAGES))


def test_the_weights_are_a_safetensors_file_as_others_write_it(saved):
    folder, model, _ = saved
    with safe_open(folder / MODEL, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {name: file.get_tensor(name).dtype for name in file.keys()} == {  # noqa: SIM118
            name: tensor.dtype for name, tensor in model.state_dict().items()
        }


def test_tensors_of_other_kinds_come_back(tmp_path):
    model = mlp().half()
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("count", torch.tensor(3, dtype=torch.uint8))
    memory = xkfac.consolidate(mlp(), data(), "fine-tuning")
    xkfac.save_pretrained(tmp_path, model, memory)
    other = mlp().half()
    other.register_buffer("mask", torch.tensor([False, False]))
    other.register_buffer("count", torch.tensor(0, dtype=torch.uint8))
    xkfac.load_pretrained(tmp_path, other)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def test_two_networks_are_not_mixed(saved, tmp_path):
    folder, model, memory = saved
    with pytest.raises(xkfac.MismatchError, match="away from those that the memory was made from"):
        xkfac.save_pretrained(tmp_path / "other", randomise(Everything()), memory)
    xkfac.save_pretrained(tmp_path / "other", model, memory)
    nn.init.ones_(model.bn.weight)
    again = xkfac.consolidate(model, data(2, **IMAGES), draws=1)
    again.save(folder / MEMORY)
    with pytest.raises(xkfac.MismatchError, match="away from those that the memory was made from"):
        xkfac.load_pretrained(folder, Everything())


def test_what_cannot_be_loaded_leaves_the_model_as_it_was(saved):
    folder, _, _ = saved
    model = Everything()
    model.extra = nn.Linear(1, 1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(xkfac.MismatchError, match=r"'extra\.\w+' differs between"):
        xkfac.load_pretrained(folder, model)
    (folder / MODEL).write_bytes(b"no weights")
    with pytest.raises(xkfac.MemoryFileError, match="cannot be read"):
        xkfac.load_pretrained(folder, Everything())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_card_says_what_the_memory_is(saved):
    folder, _, memory = saved
    text = (folder / CARD).read_text()
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1]
    assert "library_name: xkfac" in head
    for fact in ("| network | Everything |", "| examples | 16 |", "| method | `xkfac` |", "| left out | `head` |"):
        assert fact in text
    assert "| `conv` | conv | bn | 1 x 4 x 19 |" in text
    assert text.count("\n| `") == len(memory.units)
    assert "load_pretrained" in text
    assert "Memory.load" in card(memory)
