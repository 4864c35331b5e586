"""What is checked before a target is learnt: that the network is the memory's, and what its batches show of it."""

import warnings
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.errors import MismatchError, XkfacError, XkfacWarning
from xkfac.memory import Memory, excluded_by
from xkfac.methods import Method
from xkfac.model.batches import default_forward, size_of, to_device
from xkfac.model.merged_weight import BoundUnit
from xkfac.model.passes import device_of, norms_of, unwrap
from xkfac.model.structure import check_structure
from xkfac.model.units import find_units
from xkfac.task_layers import task_layers_of

_TOLERANCE = 1e-5  # of a unit's merged weight: what float32 leaves of it on another device, or after re-centring


def check_amounts(
    *, damping: float, strength: float, importance: tuple[float, float] | None, bn_momentum: float | None
) -> None:
    """Raise XkfacError for a number of a learner outside its range."""
    if bn_momentum is not None and not 0 < bn_momentum <= 1:
        raise XkfacError(f"bn_momentum must be above 0 and at most 1, or None for BN's own, not {bn_momentum}")
    given = [("damping", damping), ("strength", strength), *(("importance", one) for one in importance or ())]
    for name, value in given:
        if not isinstance(value, Real) or not 0 <= value < float("inf"):
            raise XkfacError(f"{name} must be a number of at least 0, not {value!r}")


def check_interpretation(method: Method, before: Method) -> None:
    """Raise XkfacError for another interpretation than before of a method that penalises no merged weights."""
    merged = method.penalised and not (method.per_parameter or method.fixed_bn)
    if method.interpretation != before.interpretation and not merged:
        raise XkfacError(
            f"method '{method.name}' penalises no merged weights that could be read as '{method.interpretation}'; "
            "leave interpretation out"
        )


def check_recentring(method: Method, recentre: bool, has_data: bool) -> None:
    """Raise XkfacError where a method cannot re-centre, or has no data for it."""
    if recentre and (method.fixed_bn or method.fixed_affine or method.per_parameter):
        raise XkfacError(f"method '{method.name}' keeps gamma and beta, which re-centring moves; pass recentre=False")
    if recentre and not has_data:
        raise XkfacError(f"method '{method.name}' re-centres BN on the target: begin needs its loader")


def check_batch(model: nn.Module, memory: Memory, batch: Any) -> None:
    """Run a network once on a batch of the target and compare what runs with the memory.

    The network is left as it was, bit by bit.

    Raises MismatchError where `finish` would, after all the training: for units, BN partners or convolutions other than
    those of the memory. Raises XkfacError for outputs that the memory's likelihood does not take.
    """
    if not memory.method.penalised or size_of(batch) == 0:
        return
    run = memory.forward or default_forward

    def checked(network: nn.Module, given: Any) -> Tensor:
        output = run(network, given)
        memory.likelihood.check(output)
        return output

    coverage = find_units(
        model,
        to_device(batch, device_of(unwrap(model))),
        merge=memory.method.merge,
        per_parameter=memory.method.per_parameter,
        exclude=excluded_by(memory.method, model, memory.exclude),
        forward=checked,
    )
    check_structure(memory.coverage, coverage, size_of(batch))


@torch.no_grad()
def check_at_anchor(bound: Mapping[str, BoundUnit], anchor: Mapping[str, Tensor], tolerance: float | None) -> None:
    """Compare the merged weights of a network, its BN statistics among them, with the anchor.

    tolerance: how far a unit may be off, relative to its size; by default what rounding explains.

    Raises MismatchError for the first unit that is further off.
    """
    for name, one in bound.items():
        wanted = anchor[name]
        parts = [tensor for tensor in (*one.parameters(), *one.statistics(), wanted) if tensor.is_floating_point()]
        coarsest = max(torch.finfo(tensor.dtype).eps for tensor in parts)
        distance = (one.merged_weight() - wanted).norm()
        size = wanted.norm() + _cancelled(one)
        allowed = max(_TOLERANCE, 2 * coarsest) if tolerance is None else tolerance
        if not bool(distance <= allowed * size):
            often = f"leave a head that is new out, with memory.without('{name}')"
            if one.norm is not None:
                often = "run it in evaluation mode until then (in training mode BN statistics move)"
            raise MismatchError(
                f"the weights or BN statistics of unit '{name}' are {float(distance / size):.1e} (relative) away from "
                f"those that the memory was made from; load the source network's state before begin, {often}, take up "
                "a task in progress with load_state_dict, or accept small differences with begin(..., tolerance=...)"
            )


def _cancelled(one: BoundUnit) -> Tensor | float:
    """Return the size of what cancels in beta - gamma mu / sigma, which rounding is relative to."""
    if one.norm is None or one.unit.kind == "unmerged":
        return 0.0
    norm = one.norm
    scale = (norm.running_var.float() + norm.eps).rsqrt() * (1.0 if norm.weight is None else norm.weight.float())
    size: Tensor = (scale * norm.running_mean.float()).norm()
    return size if norm.bias is None else size + norm.bias.float().norm()


def warn_of_shared_bn(model: nn.Module) -> None:
    """Warn, in the user's line, where BN that belongs to each task is shared by all, and learns."""
    inside = tuple(f"{path}." for path in task_layers_of(model))
    for path, norm in norms_of(model).items():
        learns = norm.training or any(parameter.requires_grad for parameter in norm.parameters())
        if learns and not path.startswith(inside):
            warnings.warn(
                f"method 'own-bn' does not protect BN, and '{path}' is shared by all tasks, so past tasks lose theirs; "
                "give each task its own with give_task_norms(model, tasks) and enter_task(model, task), or keep copies "
                "of the BN of past tasks",
                XkfacWarning,
                stacklevel=6,
            )
            return


def check_not_replaced(model: nn.Module, bound: Mapping[str, BoundUnit]) -> None:
    """Compare the layers of a network with those that a penalty was made for.

    Raises MismatchError for the first unit whose layer or BN is another module's now.
    """
    for name, one in bound.items():
        now = BoundUnit(model, one.unit)
        same = now.norm is one.norm and now.bias is one.bias
        if not same or (one.unit.weight is not None and now.weight is not one.weight):
            raise MismatchError(
                f"the layer of unit '{name}' was replaced after the Learner was made, so that the new one is not "
                "protected; make the Learner after all changes to the network, and leave heads that change out of the "
                f"memory, with memory.without('{name}')"
            )
