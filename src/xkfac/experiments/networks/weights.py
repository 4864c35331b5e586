"""Pretrained weights of a network with one head per task: read from files or downloads, checked, and written."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from xkfac import files
from xkfac.errors import MemoryFileError, XkfacError, nearest
from xkfac.experiments.files import check_path
from xkfac.experiments.networks.backbones import Architecture, ManyHeaded
from xkfac.experiments.networks.library import TIMM, BackboneError, library_model
from xkfac.experiments.packages import imported

DOWNLOAD = "download"
# Names in files that torchvision publishes and its own loading changes.
_OLD_NAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"(encoder_layer_\d+\.mlp)\.linear_1\."), r"\1.0."),
    (re.compile(r"(encoder_layer_\d+\.mlp)\.linear_2\."), r"\1.3."),
)
_INSIDE = ("state_dict", "model", "net")
_WRAPPERS = ("module.", "_orig_mod.")
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


class WeightsError(XkfacError):
    """A file of weights that cannot be read or written, or is not of the network."""


def load_source(net: ManyHeaded, weights: str | Path, source_task: str) -> dict[str, Any]:
    """Put pretrained weights of the whole library model in: its classifier becomes the head of `source_task`.

    weights: a file, .safetensors or one of torch.save, plain or below "state_dict", "model" or "net", read without
    running any code of it; or "download" for the library's own, its latest ones unless they are named, as in
    "download:IMAGENET1K_V1" for torchvision (timm has that in the model's name). Returns the facts that `save_source`
    wrote into it. The network is changed only when all of it fits.

    Raises WeightsError when the file is missing or no weights file, or has other names, shapes, classes or stem.
    """
    architecture, head = _architecture(net), net.head(source_task)
    where, facts = f"'{weights}'", dict[str, Any]()
    if is_download(weights):
        which = str(weights).partition(":")[2]
        where, tensors = f"the download of '{architecture.model}'", _downloaded(architecture.model, which)
    else:
        tensors, facts = _read(Path(weights))
    stem = facts.get("stem", architecture.stem)
    if stem != architecture.stem:
        raise WeightsError(
            f"{where} was trained with the stem '{stem}', and the network has '{architecture.stem}'; make it with "
            f"stem='{stem}'"
        )
    own = _library_state(net, source_task)
    given = _renamed(tensors)
    if fault := _misfit(given, own, architecture.classifier):
        raise WeightsError(f"{where} is not of '{architecture.model}': it {fault}; name matching weights or model")
    classes = len(given[f"{architecture.classifier}.weight"])
    if classes != head.out_features:
        raise WeightsError(
            f"{where} has a classifier of {classes} classes, and task '{source_task}' has {head.out_features}; use "
            "weights that were trained on this data"
        )
    for name, tensor in given.items():
        own[name].copy_(tensor)
    return facts


def is_download(weights: str | Path) -> bool:
    """Whether weights are named as the library's own, "download" or "download:NAME", not as a file."""
    return str(weights).partition(":")[0] == DOWNLOAD


def save_source(net: ManyHeaded, path: str | Path, task: str, facts: Mapping[str, Any]) -> None:
    """Write trunk and one head to a .safetensors file in the names of the library's own model, atomically.

    The model of that name, with as many classes as the task, loads it strictly. `facts` must fit into JSON.

    Raises WeightsError when the file cannot be written; what was there is then as it was.
    """
    architecture, path = _architecture(net), Path(path)
    if path.suffix != ".safetensors":
        raise WeightsError(f"'{path}' must end in .safetensors, which is what is written")
    known = {"model": architecture.model, "stem": architecture.stem, "task": task, "classes": net.tasks[task]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"format": "pt", "facts": json.dumps({**facts, **known})}
        files.write_tensors(path, _library_state(net, task), metadata)
    except (OSError, MemoryFileError) as error:
        raise WeightsError(str(error)) from None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a weights file and the facts in it."""
    facts: Any = {}
    check_path(path)
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise WeightsError(f"the weights '{path}' {what}; name a file, or '{DOWNLOAD}' for the library's own weights")
    try:
        if path.suffix == ".safetensors":
            with safe_open(str(path), framework="pt") as file:
                found: Any = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                facts = json.loads((file.metadata() or {}).get("facts", "{}"))
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file makes its reader fail in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise WeightsError(
            f"'{path}' is no weights file, or is damaged ({reason}); name a .safetensors file, or a state dict that "
            "torch.save wrote"
        ) from None
    if isinstance(found, dict):
        found = next((found[key] for key in _INSIDE if isinstance(found.get(key), dict)), found)
    if not isinstance(found, dict) or not found or not all(isinstance(one, Tensor) for one in found.values()):
        raise WeightsError(f"'{path}' holds no state dict, plain or in {', '.join(_INSIDE)}; save model.state_dict()")
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): tensor for name, tensor in found.items()}
    return found, facts if isinstance(facts, dict) else {}


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names that the library's model has, those of auxiliary classifiers left out."""
    given = {}
    for name, tensor in tensors.items():
        for old, new in _OLD_NAMES:
            name = old.sub(new, name)
        if not name.startswith(_AUXILIARY):
            given[name] = tensor
    return given


def _misfit(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], classifier: str) -> str:
    """Return what keeps tensors from being those of a network, if anything; the number of classes is free."""
    for name, tensor in wanted.items():
        # Old files do not count batches.
        if name not in given and not name.endswith(".num_batches_tracked"):
            return f"lacks '{name}'"
        free = 1 if name.rpartition(".")[0] == classifier else 0
        if given.get(name, tensor).shape[free:] != tensor.shape[free:]:
            return f"has '{name}' as {list(given[name].shape)}, not {list(tensor.shape)}"
    foreign = next((name for name in given if name not in wanted), None)
    return "" if foreign is None else f"has '{foreign}', which the model has not"


def _architecture(net: ManyHeaded) -> Architecture:
    if net.architecture is None:
        raise BackboneError("the trunk is not a model that torchvision or timm names; make it by make_backbone")
    return net.architecture


def _library_state(net: ManyHeaded, task: str) -> dict[str, Tensor]:
    """Return the tensors of trunk and head, not copied, by the names that they have in the library's own model."""
    classifier = _architecture(net).classifier
    head = {f"{classifier}.{name}": tensor for name, tensor in net.head(task).state_dict().items()}
    return {**net.trunk.state_dict(), **head}


def _downloaded(model: str, which: str = "") -> dict[str, Tensor]:
    options: dict[str, Any] = {"pretrained": True}
    if model.startswith(TIMM) and which:
        raise WeightsError(f"timm has the name of weights in that of the model: '{model}.{which}', not in the weights")
    if not model.startswith(TIMM):
        known = [each.name for each in imported("torchvision.models", "this network").get_model_weights(model)]
        if which and which not in known:
            raise WeightsError(
                f"torchvision has no weights '{which}' of '{model}'{nearest(which, known)}; name one of "
                f"{', '.join(known) or 'none'}"
            )
        options = {"weights": which or "DEFAULT"}
    try:
        state: dict[str, Tensor] = library_model(model, **options).state_dict()
    except XkfacError:
        raise
    except Exception as error:  # whatever a client of the network raises: the reason is in the sentence
        raise WeightsError(f"pretrained weights of '{model}' cannot be had ({error}); name a file of them") from error
    return state
