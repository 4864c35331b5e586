"""Extend a memory by a task that a network has learnt: the options that it goes on with, and the pass itself."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from xkfac.errors import XkfacError
from xkfac.memory import Memory, estimate_for
from xkfac.methods import Method
from xkfac.model.batches import Forward
from xkfac.model.likelihood import Likelihood, get_likelihood
from xkfac.model.passes import unwrap
from xkfac.model.units import as_patterns

Keep = Literal["average", "all"]


def check_keep(keep: str) -> None:
    """Raise XkfacError for another word than `Keep` has."""
    if keep not in ("average", "all"):
        raise XkfacError(f"keep is {keep!r}; it must be 'average' or 'all'")


def with_options(
    memory: Memory,
    *,
    likelihood: str | Likelihood | None = None,
    exclude: Iterable[str] | None = None,
    forward: Forward | None = None,
) -> Memory:
    """Return a memory that goes on with other options, those that are given."""
    return replace(
        memory,
        likelihood=memory.likelihood if likelihood is None else get_likelihood(likelihood),
        exclude=memory.exclude if exclude is None else as_patterns(exclude),
        forward=memory.forward if forward is None else forward,
    )


def extended(
    memory: Memory,
    method: Method,
    model: nn.Module,
    loader: Iterable[Any],
    importance: tuple[float, float],
    keep: Keep = "average",
    **options: Any,
) -> Memory:
    """Return the memory of one task more, whose curvature is estimated on `loader` with the memory's options.

    options: those of `estimate` beside them, such as `max_batches` and `seed`.
    """
    check_keep(keep)
    own = {"likelihood": memory.likelihood, "exclude": memory.exclude, "forward": memory.forward}
    new = estimate_for(method, model, loader, **own, **options)
    return memory.extend(unwrap(model), new, weights=importance, keep_all=keep == "all")
