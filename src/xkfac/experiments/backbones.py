"""Deep networks with one head a task: a trunk that torchvision or timm knows by name, and its pretrained weights."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import pickle
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from xkfac import storage
from xkfac.errors import XkfacError
from xkfac.experiments.data import stream
from xkfac.experiments.files import flush
from xkfac.tasknorms import give_task_norms, task_norms_of

Stem = Literal["standard", "small"]

TIMM = "timm:"
DOWNLOAD = "download"
_EXTRA = "pip install 'xkfac[experiments]'"
# Names in files that torchvision publishes and its own loading changes.
_OLD_NAMES = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"(encoder_layer_\d+\.mlp)\.linear_1\."), r"\1.0."),
    (re.compile(r"(encoder_layer_\d+\.mlp)\.linear_2\."), r"\1.3."),
)
_INSIDE = ("state_dict", "model", "net")
_WRAPPERS = ("module.", "_orig_mod.")
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")


class BackboneError(XkfacError):
    """A network that cannot be made as asked."""


class WeightsError(XkfacError):
    """A file of weights that cannot be read or written, or is not of the network."""


@dataclass(frozen=True)
class Architecture:
    """Which network a trunk is of: its name, its stem, and the path of the classifier that was taken off."""

    model: str
    stem: Stem
    classifier: str


class ManyHeaded(nn.Module):
    """A trunk and one linear head a task, of which the active one is used.

    All heads are there from the start, so that the structure of the state never changes. The trunk gives features
    [N, width]. Head and trunk weights are fixed by the seed alone, whatever other tasks there are. What is kept of a
    task is of the trunk: `xkfac.consolidate(net, loader, exclude=["heads.*"])`.

    Raises BackboneError for tasks without classes, or names that cannot be those of modules.
    """

    def __init__(
        self,
        trunk: nn.Module,
        width: int,
        tasks: Mapping[str, int],
        *,
        seed: int,
        bias: bool = True,
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__()
        _check_tasks(tasks)
        self.trunk = trunk
        self.heads = nn.ModuleDict()
        for task, classes in tasks.items():
            with _fixed("head", seed, task):
                self.heads[task] = nn.Linear(width, classes, bias)
        self.architecture = architecture
        self.active = next(iter(tasks))
        self.enter(self.active)

    @property
    def tasks(self) -> dict[str, int]:
        """The tasks and their numbers of classes."""
        return {task: self.head(task).out_features for task in self.heads}

    def head(self, task: str) -> nn.Linear:
        """Return the head of a task.

        Raises BackboneError when there is none.
        """
        if task not in self.heads:
            raise BackboneError(
                f"there is no head for task '{task}'{_near(task, self.heads)}; name one of {_list(self)}"
            )
        head = self.heads[task]
        assert isinstance(head, nn.Linear)
        return head

    def enter(self, task: str) -> None:
        """Make a task the active one: the trunk and its head learn, all other heads stand still."""
        head = self.head(task)
        self.requires_grad_(True)
        self.heads.requires_grad_(False)
        head.requires_grad_(True)
        for norm in task_norms_of(self.trunk):
            norm.enter(task)
        for parameter in self.heads.parameters():
            # An optimizer applies weight decay and momentum wherever there is a gradient, be it an old one.
            parameter.grad = parameter.grad if parameter.requires_grad else None
        self.active = task

    @contextlib.contextmanager
    def using(self, task: str) -> Iterator[None]:
        """Use the head of a task for a while, to measure it; what learns stays as it is."""
        self.head(task)
        before = self.active
        self._use(task)
        try:
            yield
        finally:
            self._use(before)

    def _use(self, task: str) -> None:
        self.active = task
        for norm in task_norms_of(self.trunk):
            norm.active = task

    def give_norms(self) -> None:
        """Give each task BN layers of its own, copies of those that there are."""
        give_task_norms(self.trunk, self.heads)
        self.enter(self.active)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores [N, classes] of the active task."""
        scores: Tensor = self.heads[self.active](self.trunk(x))
        return scores


def make_backbone(model: str, tasks: Mapping[str, int], *, stem: Stem = "standard", seed: int) -> ManyHeaded:
    """Return the network `model` with a head for every task (name -> classes), its weights fixed by the seed alone.

    model: a classification network of torchvision, as "resnet18", or "timm:NAME" for one of timm. Its classifier is
    taken off and says how wide a head is. stem: "small" leaves out the max-pooling behind the first convolution, for
    images of 64 pixels and below; weights of either stem have the same shapes.

    Raises BackboneError for a name that is not known, a network whose classifier is not one linear layer, and a small
    stem of one without such a pooling.
    """
    if stem not in get_args(Stem):
        raise BackboneError(f"stem is '{stem}'; it must be one of {', '.join(get_args(Stem))}")
    with _fixed("weights", seed):
        trunk = _library_model(model)
    path = _classifier_path(model, trunk)
    classifier = trunk.get_submodule(path)
    if not isinstance(classifier, nn.Linear):
        raise BackboneError(
            f"the classifier '{path}' of '{model}' is a {type(classifier).__name__}, not a linear layer, and cannot be "
            "replaced by heads; choose another model"
        )
    trunk.set_submodule(path, nn.Identity())
    if stem == "small":
        if not isinstance(getattr(trunk, "maxpool", None), nn.Module):
            raise BackboneError(f"'{model}' has no 'maxpool' that a small stem could leave out; use stem='standard'")
        trunk.maxpool = nn.Identity()
    architecture = Architecture(model, stem, path)
    bias = classifier.bias is not None
    return ManyHeaded(trunk, classifier.in_features, tasks, seed=seed, bias=bias, architecture=architecture)


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
    fit = _fitting(where, architecture, tensors, own)
    classes = len(fit[f"{architecture.classifier}.weight"])
    if classes != head.out_features:
        raise WeightsError(
            f"{where} has a classifier of {classes} classes, and task '{source_task}' has {head.out_features}; use "
            "weights that were trained on this data"
        )
    for name, tensor in fit.items():
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
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in _library_state(net, task).items()}
    known = {"model": architecture.model, "stem": architecture.stem, "task": task, "classes": net.tasks[task]}
    temporary = path.parent / f".xkfac-{secrets.token_hex(8)}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.save_file(state, temporary, {"format": "pt", "facts": json.dumps({**facts, **known})})
        flush(temporary)
        temporary.replace(path)
    except OSError as error:
        raise WeightsError(
            f"'{path}' could not be written and is as it was before ({error.strerror}); free space there or choose "
            "another place"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of a weights file and the facts in it."""
    facts: Any = {}
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
    except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, ValueError, LookupError, EOFError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise WeightsError(
            f"'{path}' is no weights file, or is damaged ({reason}); name a .safetensors file, or a state dict that "
            "torch.save wrote"
        ) from None
    if isinstance(found, dict):
        found = next((found[key] for key in _INSIDE if isinstance(found.get(key), dict)), found)
    if not isinstance(found, dict) or not found or not all(isinstance(one, Tensor) for one in found.values()):
        raise WeightsError(
            f"'{path}' holds no state dict, plain or below {', '.join(_INSIDE)}; save model.state_dict()"
        )
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): tensor for name, tensor in found.items()}
    return found, facts if isinstance(facts, dict) else {}


def _fitting(
    where: str, architecture: Architecture, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors under the names of `own`, which they must fit in all but the number of classes."""
    given = {}
    for name, tensor in tensors.items():
        for old, new in _OLD_NAMES:
            name = old.sub(new, name)
        if not name.startswith(_AUXILIARY):
            given[name] = tensor
    wanted = {name: tensor.shape for name, tensor in own.items()}
    fault = _misfit({name: tensor.shape for name, tensor in given.items()}, wanted, architecture.classifier)
    if fault is not None:
        raise WeightsError(f"{where} is not of '{architecture.model}': it {fault}{_looks(given, architecture)}")
    return given


def _misfit(given: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size], classifier: str) -> str | None:
    """Return what keeps tensors from being those of a network, or None; the number of classes is free."""
    for name, shape in wanted.items():
        # Old files do not count batches.
        if name not in given and not name.endswith(".num_batches_tracked"):
            return f"lacks '{name}'"
        free = 1 if name.rpartition(".")[0] == classifier else 0
        if given.get(name, shape)[free:] != shape[free:]:
            return f"has '{name}' as {list(given[name])}, not {list(shape)}"
    foreign = next((name for name in given if name not in wanted), None)
    return None if foreign is None else f"has '{foreign}', which the model has not"


def _looks(given: Mapping[str, Tensor], architecture: Architecture) -> str:
    """Return which of torchvision's models tensors look like, those of similar names being asked first."""
    models: Any = _library("torchvision.models")
    name = architecture.model.removeprefix(TIMM)
    names = models.list_models(module=models)
    shapes = {name: tensor.shape for name, tensor in given.items()}
    for other in sorted(names, key=lambda one: -difflib.SequenceMatcher(None, one, name).ratio()):
        try:
            with torch.device("meta"):
                network = _library_model(other)
        except NotImplementedError:  # some need numbers to be made
            continue
        wanted = {key: tensor.shape for key, tensor in network.state_dict().items()}
        if _misfit(shapes, wanted, _classifier_path(other, network)) is None:
            return f"; it looks like '{other}'"
    return "; name weights of this model, or the model that they are of"


def _architecture(net: ManyHeaded) -> Architecture:
    if net.architecture is None:
        raise BackboneError("the trunk is not a model that torchvision or timm names; make it by make_backbone")
    return net.architecture


def _library_state(net: ManyHeaded, task: str) -> dict[str, Tensor]:
    """Return the tensors of trunk and head, not copied, by the names that they have in the library's own model."""
    classifier = _architecture(net).classifier
    head = {f"{classifier}.{name}": tensor for name, tensor in net.head(task).state_dict().items()}
    return {**net.trunk.state_dict(), **head}


def _library_model(model: str, **options: Any) -> Any:
    """Return the network of a name, its weights drawn from torch's generator, or pretrained if `options` say so."""
    name = model.removeprefix(TIMM)
    if model.startswith(TIMM):
        timm: Any = _library("timm")
        if not timm.is_model(name):
            raise _unknown(model, [f"{TIMM}{one}" for one in timm.list_models()])
        try:
            return timm.create_model(name, **(options or {"num_classes": 1000}))
        except (RuntimeError, TypeError) as error:
            raise BackboneError(f"timm cannot make '{name}' ({error}); choose another model") from None
    models: Any = _library("torchvision.models")
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown(model, known)
    if name in ("googlenet", "inception_v3"):
        # Classifiers on the way are not heads; and all published weights are for transformed inputs.
        options = {"aux_logits": False, **(options or {"init_weights": True})}
        made = models.get_model(name, **options)
        made.transform_input = True
        return made
    return models.get_model(name, **options)


def _classifier_path(model: str, network: Any) -> str:
    """Return the path of the layer that gives the classes: timm says it, in torchvision it is the last linear one."""
    if model.startswith(TIMM):
        path = network.default_cfg.get("classifier")
        if not isinstance(path, str) or path not in dict(network.named_modules()):
            raise BackboneError(f"'{model}' has not one classifier but {path!r}; choose another model")
        return path
    layers = (path for path, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d)))
    return list[str](layers)[-1]


def _downloaded(model: str, which: str = "") -> dict[str, Tensor]:
    options: dict[str, Any] = {"pretrained": True}
    if model.startswith(TIMM) and which:
        raise WeightsError(f"timm has the name of weights in that of the model: '{model}.{which}', not in the weights")
    if not model.startswith(TIMM):
        known = [each.name for each in _library("torchvision.models").get_model_weights(model)]
        if which and which not in known:
            raise WeightsError(
                f"torchvision has no weights '{which}' of '{model}'{_near(which, known)}; name one of "
                f"{', '.join(known) or 'none'}"
            )
        options = {"weights": which or "DEFAULT"}
    try:
        state: dict[str, Tensor] = _library_model(model, **options).state_dict()
    except XkfacError:
        raise
    except Exception as error:  # whatever a client of the network raises: the reason is in the sentence
        raise WeightsError(
            f"the pretrained weights of '{model}' cannot be had ({error}); name a file that has them"
        ) from error
    return state


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError) as error:  # torchvision's operators miss a torch of another build as such
        raise BackboneError(f"{name.partition('.')[0]} cannot be imported ({error}): {_EXTRA}") from None


@contextlib.contextmanager
def _fixed(*key: str | int) -> Iterator[None]:
    """Draw weights on the CPU from a stream of their own; torch's generator goes on as if nothing was drawn."""
    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        torch.default_generator.manual_seed(stream(*key).initial_seed())
        yield


def _check_tasks(tasks: Mapping[str, int]) -> None:
    if not tasks:
        raise BackboneError("a network needs at least one task; give tasks as {name: number of classes}")
    for task, classes in tasks.items():
        if not task or "." in task or hasattr(nn.ModuleDict(), task):
            raise BackboneError(f"a task cannot be named '{task}', as its head is a module; choose another name")
        if not isinstance(classes, int) or isinstance(classes, bool) or classes < 1:
            raise BackboneError(f"task '{task}' has {classes!r} classes; it must be an integer of at least 1")


def _unknown(model: str, known: list[str]) -> BackboneError:
    near = difflib.get_close_matches(model, known, 3)
    hint = f"; near to it are {', '.join(near)}" if near else ""
    return BackboneError(
        f"model '{model}' is not known{hint}; name one of torchvision's classification models, or timm:NAME of timm's"
    )


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean '{close[0]}'?)" if close else ""


def _list(net: ManyHeaded) -> str:
    return ", ".join(net.heads)
