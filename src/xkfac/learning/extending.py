"""The options that a memory goes on with."""

from collections.abc import Iterable
from dataclasses import replace

from xkfac.memory import Memory
from xkfac.model.batches import Forward
from xkfac.model.likelihood import Likelihood, get_likelihood
from xkfac.model.units import as_patterns


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
