"""The networks that torchvision and timm know by name."""

from typing import Any

from torch import nn

from xkfac.errors import XkfacError, nearest
from xkfac.experiments.packages import imported

TIMM = "timm:"


class BackboneError(XkfacError):
    """A network that cannot be made as asked."""


def library_model(model: str, **options: Any) -> Any:
    """Return the network of a name, its weights drawn from torch's generator, or pretrained if `options` say so."""
    name = model.removeprefix(TIMM)
    if model.startswith(TIMM):
        timm: Any = imported("timm", "this network")
        if not timm.is_model(name):
            raise _unknown(model, [f"{TIMM}{one}" for one in timm.list_models()])
        try:
            return timm.create_model(name, **(options or {"num_classes": 1000}))
        except (RuntimeError, TypeError) as error:
            raise BackboneError(f"timm cannot make '{name}' ({error}); choose another model") from None
    models: Any = imported("torchvision.models", "this network")
    known = models.list_models(module=models)
    if name not in known:
        raise _unknown(model, known)
    if name in ("googlenet", "inception_v3"):
        # Classifiers on the way are not heads; and all published weights are for transformed inputs.
        options = {"aux_logits": False, **(options or {"init_weights": True})}
        network = models.get_model(name, **options)
        network.transform_input = True
        return network
    return models.get_model(name, **options)


def classifier_path(model: str, network: Any) -> str:
    """Return the path of the layer that gives the classes: timm says it, in torchvision it is the last linear one."""
    if model.startswith(TIMM):
        path = network.default_cfg.get("classifier")
        if not isinstance(path, str) or path not in dict(network.named_modules()):
            raise BackboneError(f"'{model}' has not one classifier but {path!r}; choose another model")
        return path
    layers = (path for path, module in network.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d)))
    return list[str](layers)[-1]


def _unknown(model: str, known: list[str]) -> BackboneError:
    return BackboneError(
        f"model '{model}' is not known{nearest(model, known)}; name one of torchvision's classification models, or "
        "timm:NAME of timm's"
    )
