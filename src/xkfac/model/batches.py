"""What a batch of a user's loader means: the model's inputs, the labels, the number of examples."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.errors import XkfacError

Forward = Callable[[nn.Module, Any], Tensor]
"""Runs a model on a batch of the user's loader and returns its output [N, ...]."""

LABEL_KEYS = ("label", "labels", "target", "targets", "y")


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested structure of lists, tuples and mappings, depth first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def to_device(value: Any, device: torch.device) -> Any:
    """Return the nested structure `value` with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if callable(getattr(value, "to", None)):  # a packed sequence, a tokenizer's batch: these know how to move
        return value.to(device)
    return _each(value, lambda item: to_device(item, device))


def cloned(value: Any) -> Any:
    """Return the nested structure `value` with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.clone()
    return copy.deepcopy(value) if callable(getattr(value, "to", None)) else _each(value, cloned)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a mapping, list or tuple with every item changed; anything else as it is."""
    if isinstance(value, Mapping):
        return {key: change(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(change, value))
    return type(value)(map(change, value)) if isinstance(value, (list, tuple)) else value


def inputs_of(batch: Any) -> Any:
    """Return the part of a batch that the model takes.

    A pair or longer sequence holds the inputs first; a mapping holds them under every key that is not one of
    `LABEL_KEYS`; a tensor is the input itself.
    """
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise XkfacError("a batch of the loader is empty; it should be (inputs, labels), a dict, or a tensor")
        return batch[0]
    if isinstance(batch, Mapping):
        return {key: item for key, item in batch.items() if key not in LABEL_KEYS}
    if isinstance(batch, Tensor):
        return batch
    raise XkfacError(
        f"a batch of the loader is a {type(batch).__name__}; it should be (inputs, labels), a dict, or a tensor, "
        "or pass forward=... to say how the model takes it"
    )


def labels_of(batch: Any) -> Any:
    """Return the true labels of a batch, for the empirical Fisher.

    Raises XkfacError when the batch has none.
    """
    if isinstance(batch, (list, tuple)) and len(batch) >= 2:
        return batch[1]
    if isinstance(batch, Mapping):
        for key in LABEL_KEYS:
            if key in batch:
                return batch[key]
    raise XkfacError(
        "labels='empirical' needs the true labels: batches must be (inputs, labels) or dicts with one of the keys "
        + ", ".join(LABEL_KEYS)
    )


def size_of(batch: Any) -> int:
    """Return the number of examples N of a batch: the leading dimension of its first tensor that has one."""
    for tensor in tensors(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise XkfacError(
        f"a batch of the loader is a {type(batch).__name__} without a tensor that has a batch dimension; batches must "
        "be tensors, or lists, tuples or dicts of them"
    )


def default_forward(model: nn.Module, batch: Any) -> Tensor:
    """Call `model` on the inputs of `batch` and return its output tensor [N, ...].

    A mapping is passed by keyword when the model's forward takes its keys, by position when it has a single value; a
    sequence of inputs is passed by position. An output with a `logits` field gives that field.

    Raises XkfacError when inputs or output are not understood; pass `forward=` then.
    """
    inputs = inputs_of(batch)
    if isinstance(inputs, Mapping):
        output = _call_by_key(model, inputs)
    else:
        output = _call_by_position(model, inputs if isinstance(inputs, (list, tuple)) else (inputs,))
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise XkfacError(f"the model returned a {type(output).__name__}; pass forward=lambda model, batch: a_tensor")
    return output


def unknown_forward(model: nn.Module, batch: Any) -> Tensor:
    """Stand for the `forward` of a memory that was read from a file, which cannot hold it.

    Raises XkfacError, since to read batches in another way than the memory's could go unnoticed.
    """
    raise XkfacError(
        "the memory was made with a forward function, which its file cannot hold; pass forward=... again to Learner or "
        "calibrate, forward=lambda model, batch: model(batch[0]) if batches are (inputs, labels) now"
    )


def _call_by_position(model: nn.Module, inputs: Sequence[Any]) -> Any:
    try:
        return model(*inputs)
    except TypeError:
        try:
            inspect.signature(model.forward).bind(*inputs)
        except TypeError as error:
            raise XkfacError(
                f"the model's forward cannot be called with the first item of a batch ({error}); give batches "
                "((input, input), labels) for several inputs, or pass forward=lambda model, batch: ..."
            ) from None
        raise


def _call_by_key(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    if not inputs:
        raise XkfacError(f"a batch of the loader holds labels alone; inputs need keys beside {', '.join(LABEL_KEYS)}")
    try:
        inspect.signature(model.forward).bind(**inputs)
    except TypeError:
        if len(inputs) == 1:
            return model(*inputs.values())
        raise XkfacError(
            f"the model's forward does not take the batch's keys {', '.join(map(repr, inputs))}; pass "
            "forward=lambda model, batch: ... to say how it does"
        ) from None
    return model(**inputs)
