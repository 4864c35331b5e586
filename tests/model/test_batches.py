"""What a batch means: inputs, labels, size, and how a model takes it."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from xkfac.errors import XkfacError
from xkfac.model.batches import LABEL_KEYS, default_forward, inputs_of, labels_of, size_of, tensors, to_device

Pair = namedtuple("Pair", "image label")
X, Y = torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 2])
DEVICE = torch.device("cpu")
META = torch.device("meta")


@dataclass
class Output:
    logits: object
    hidden: object = None


class Model(nn.Module):
    """Returns `wrap(result)`; the result tells the arguments apart."""

    def __init__(self, wrap=lambda result: result):
        super().__init__()
        self.wrap = wrap

    def forward(self, x, mask=None):
        return self.wrap(x * 2 if mask is None else x * 10 + mask)


class TakesAll(nn.Module):
    def forward(self, **inputs):
        return inputs["pixel_values"] + inputs["extra"]


class Required(nn.Module):
    def forward(self, x, **options):
        assert not options
        return x * 2


class PositionalOnly(nn.Module):
    def forward(self, x, /):
        return x * 2


FORWARDS = {
    "pair": (Model(), (X, Y), X * 2),
    "list, as a data loader collates": (Model(), [X, Y], X * 2),
    "triple": (Model(), (X, Y, Y), X * 2),
    "inputs alone in a list": (Model(), [X], X * 2),
    "named tuple": (Model(), Pair(X, Y), X * 2),
    "tensor": (Model(), X, X * 2),
    "several inputs": (Model(), ((X, X + 1), Y), X * 10 + X + 1),
    "keys": (Model(), {"x": X, "mask": X + 1, "labels": Y}, X * 10 + X + 1),
    "keys in any order": (Model(), {"target": Y, "mask": X + 1, "x": X}, X * 10 + X + 1),
    "keys inside a pair": (Model(), ({"mask": X + 1, "x": X}, Y), X * 10 + X + 1),
    "one key of the model": (Model(), {"x": X, "label": Y}, X * 2),
    "one key of another name": (Model(), {"image": X, "label": Y}, X * 2),
    "one key, other keywords taken": (Required(), {"image": X, "y": Y}, X * 2),
    "one key, by position only": (PositionalOnly(), {"x": X, "y": Y}, X * 2),
    "any keys": (TakesAll(), {"pixel_values": X, "extra": X, "targets": Y}, X * 2),
    "a mapping that is no dict": (Model(), UserDict(x=X, mask=X + 1, labels=Y), X * 10 + X + 1),
    "an output with logits": (Model(Output), (X, Y), X * 2),
    "a named tuple with logits": (Model(lambda h: namedtuple("Out", "logits aux")(h, None)), (X, Y), X * 2),
    "an output dict": (Model(lambda h: {"loss": None, "logits": h}), (X, Y), X * 2),
}


@pytest.mark.parametrize(("model", "batch", "expected"), FORWARDS.values(), ids=FORWARDS.keys())
def test_a_model_takes_a_batch(model, batch, expected):
    assert torch.equal(default_forward(model, batch), expected)


def test_the_forward_of_a_wrapped_model_takes_keys():
    batch = {"x": X, "mask": X + 1, "labels": Y}
    assert torch.equal(default_forward(nn.DataParallel(Model()), batch), X * 10 + X + 1)


ERRORS = {
    "empty batch": (Model(), (), r"a batch of the loader is empty; it should be .inputs, labels., a dict, or"),
    "string": (Model(), "text", "a batch of the loader is a str;.*pass forward="),
    "object": (Model(), Output(X), "a batch of the loader is a Output"),
    "unknown keys": (
        Model(),
        {"image": X, "size": Y, "labels": Y},
        "the model's forward does not take the batch's keys 'image', 'size'; pass forward=lambda model, batch",
    ),
    "a missing key": (Model(), {"mask": X, "size": X}, "does not take the batch's keys 'mask', 'size'"),
    "two inputs": (
        nn.Bilinear(3, 3, 2),
        (X, X, Y),
        r"\(missing a required argument: 'input2'\); give batches \(\(input, input\), labels\) for several inputs, or",
    ),
    "labels alone": (Model(), {"labels": Y}, "holds labels alone; inputs need keys beside label, labels"),
    "tuple output": (Model(lambda h: (h, h)), (X, Y), "the model returned a tuple; pass forward=lambda model, batch"),
    "dict output": (Model(lambda h: {"scores": h}), (X, Y), "the model returned a dict"),
    "no logits": (Model(lambda h: Output(None)), (X, Y), "the model returned a NoneType"),
}  # fmt: skip


@pytest.mark.parametrize(("model", "batch", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_what_is_not_understood_is_an_error_that_says_so(model, batch, message):
    with pytest.raises(XkfacError, match=message):
        default_forward(model, batch)


def test_an_error_inside_the_model_is_not_hidden():
    class Broken(nn.Module):
        def forward(self, x):
            raise TypeError("inside")

    for batch in ({"x": X}, (X, Y)):
        with pytest.raises(TypeError, match="inside"):
            default_forward(Broken(), batch)


@pytest.mark.parametrize("key", LABEL_KEYS)
def test_labels_lie_under_any_usual_key_and_are_no_input(key):
    batch = {key: Y, "x": X}
    assert labels_of(batch) is Y
    assert inputs_of(batch) == {"x": X}


def test_labels_are_the_second_of_a_sequence():
    assert labels_of((X, Y, X)) is Y
    assert labels_of(Pair(X, Y)) is Y


@pytest.mark.parametrize("batch", [X, (X,), [], {"x": X}])
def test_missing_labels_are_an_error(batch):
    with pytest.raises(
        XkfacError, match=r"needs the true labels: batches must be \(inputs, labels\) or dicts.*label, "
    ):
        labels_of(batch)


@pytest.mark.parametrize(
    "batch", [X, (X, Y), [[X], Y], {"a": {"b": (X,)}}, Pair(X, Y), (torch.tensor(7), X), ("name", None, 3, X)]
)
def test_the_size_is_the_leading_dimension_of_the_first_tensor_that_has_one(batch):
    assert size_of(batch) == 3


def test_an_empty_batch_has_size_zero():
    assert size_of((X[:0], Y[:0])) == 0


@pytest.mark.parametrize("batch", [(), {}, "text", torch.tensor(1.0), (torch.tensor(1.0), {"n": 3}), Output(X)])
def test_a_batch_without_a_size_is_an_error(batch):
    with pytest.raises(XkfacError, match=f"is a {type(batch).__name__} without a tensor that has a batch dimension"):
        size_of(batch)


def test_tensors_come_depth_first():
    a, b, c, d = torch.arange(4.0).split(1)
    assert [t.item() for t in tensors([a, {"k": (b, [c], "text", None)}, Pair(d, 3)])] == [0, 1, 2, 3]
    assert list(tensors("text")) == list(tensors(None)) == []


def test_moving_keeps_the_structure():
    moved = to_device({"pair": Pair(X, "name"), "list": [X, (Y, 3)], "none": None}, META)
    assert moved["pair"].image.device == moved["list"][0].device == moved["list"][1][0].device == META
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].label == "name"
    assert isinstance(moved["list"], list)
    assert isinstance(moved["list"][1], tuple)
    assert moved["none"] is None
    assert list(to_device(OrderedDict(b=X, a=Y), META)) == ["b", "a"]
    assert to_device(torch.Size([2, 3]), META) == (2, 3)


def test_a_tensor_that_is_there_already_is_not_copied():
    assert to_device((X, Y), DEVICE)[0] is X


def test_what_knows_how_to_move_moves_itself():
    class Encoding(UserDict):
        def to(self, device):
            return Encoding({key: value.to(device) for key, value in self.items()})

    assert isinstance(to_device(Encoding(x=X), META), Encoding)
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    moved = to_device(packed, META)
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META
    assert moved.batch_sizes.device == DEVICE
