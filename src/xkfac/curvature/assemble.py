"""One curvature from the collectors of a pass, also where several processes have shared it.

The sums of all units are added up over the processes, so that each puts the same blocks together. Decompositions are
shared out: one process, the owner of a unit, decomposes its block and sends it to all. Every process ends with the same
curvature, bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from xkfac.curvature.blocks import Block, Corrected, KhatriRao, Kronecker, Term, eigenbasis, parts
from xkfac.curvature.collectors import Collectors, Source
from xkfac.curvature.input_moments import Means
from xkfac.curvature.operator import Curvature, is_finite
from xkfac.curvature.processes import Processes, shared_out
from xkfac.errors import NotFiniteError, UnitError, XkfacError
from xkfac.model.passes import NO_BATCH
from xkfac.model.units import Coverage
from xkfac.plain_values import from_plain


@dataclass
class Outcome:
    """What a process says of its part of a pass: how many batches and examples, which units, and what went wrong."""

    batches: int = 0
    examples: int = 0
    coverage: Coverage | None = None
    error: str | None = None


def agreed(processes: Processes, own: Outcome) -> tuple[Coverage, list[int], int]:
    """Return the units that the processes have, the batches of each, and the examples of all together.

    Raises XkfacError, on every process, when one failed, when they have different units, or when none has a batch.
    """
    every = [from_plain(Outcome, plain, "an outcome") for plain in processes.exchanged(asdict(own))]
    processes.raise_first(outcome.error for outcome in every)
    known = [(rank, outcome.coverage) for rank, outcome in enumerate(every) if outcome.coverage is not None]
    if not known:
        raise XkfacError(NO_BATCH)
    first, coverage = known[0]
    for rank, theirs in known[1:]:
        if theirs.units != coverage.units:
            odd = min({*theirs.units} ^ {*coverage.units}, key=lambda unit: unit.name)
            raise XkfacError(
                f"processes {first} and {rank} have found different units, such as '{odd.name}'; make the network run "
                "the same layers on the batches of every process, or exclude it"
            )
    return coverage, [outcome.batches for outcome in every], sum(outcome.examples for outcome in every)


def finished(collectors: Collectors, processes: Processes | None, total: int, *, decompose: bool = False) -> Curvature:
    """Return the curvature of collectors, resting on a `total` of examples, with `decompose` in its eigenbasis.

    Raises NotFiniteError for the first unit with factors that are not finite.
    """
    sources = collectors.sources()
    if processes is not None:
        means = _means(sources, processes, collectors.examples, total)
        for name, source in sources.items():
            source.share(processes, collectors.examples, means.get(name))
    blocks: dict[str, Any] = {name: _block(source, total) for name, source in sources.items()}
    if decompose:
        moments = {name: block.terms[0] for name, block in blocks.items() if isinstance(block, Kronecker)}
        blocks |= _decomposed(moments, processes)
    if collectors.joint is None:
        return Curvature(blocks)
    joint = blocks.pop(collectors.joint.unit.name)
    return Curvature(blocks, joint, tuple(unit.name for unit in collectors.joint.units))


def _block(source: Source, examples: int) -> Block | KhatriRao:
    block = source.block(examples)
    for tensor in parts(block).values():
        if not is_finite(tensor):
            raise NotFiniteError(
                f"the factors of unit '{source.unit.name}' are not finite; check the data and the network's outputs, "
                "or estimate in float32 instead of a reduced precision"
            )
    return block


def _means(sources: Mapping[str, Source], processes: Processes, examples: int, total: int) -> dict[str, Means]:
    """Return the means of all examples: those of a process count by the inputs that they are of.

    Raises UnitError, on every process, for a unit with other numbers of positions on another process.
    """
    own = {name: source.means(examples) if examples else None for name, source in sources.items()}
    mine = {name: means for name, means in own.items() if means is not None}
    every = processes.exchanged({name: (means.count * examples, means.rows.shape) for name, means in mine.items()})
    shapes: dict[str, list[int]] = {}
    for rank, theirs in enumerate(every):
        for name, (_, shape) in theirs.items():
            if shape != shapes.setdefault(name, shape):
                raise UnitError(
                    f"unit '{name}' has {shape[1]} means by location on process {rank} and {shapes[name][1]} on "
                    "another, so the mean of both is undefined; use form='paper', or grouping='pooled'"
                )
    result = {}
    for name in (name for name in sources if name in shapes):
        inputs = sum(theirs[name][0] for theirs in every if name in theirs)
        part = sources[name].like.new_zeros(shapes[name])
        if name in mine:
            part = mine[name].rows * (mine[name].count * examples / inputs)
        result[name] = Means(processes.total(part), inputs / total)
    return result


def _decomposed(moments: Mapping[str, Term], processes: Processes | None) -> dict[str, Corrected]:
    """Return the eigenbases of moments of columns and rows of the gradient, each worked out by one process."""
    if processes is None:
        return {name: eigenbasis(term.left, term.right) for name, term in moments.items()}
    costs = {name: term.left.shape[-1] ** 3 + term.right.shape[-1] ** 3 for name, term in moments.items()}
    owners = shared_out({name: len(moments[name].left) * cost for name, cost in costs.items()}, processes.size)
    bases, error = {}, None
    try:
        for name, term in moments.items():
            mine = owners[name] == processes.rank
            bases[name] = eigenbasis(term.left, term.right, empty=not mine)
    except RuntimeError as caught:  # of the decomposition, or of a device that is full
        error = str(caught)
    processes.raise_first(processes.exchanged(error))
    return {
        name: Corrected(**{part: processes.copy_of(tensor, owners[name]) for part, tensor in parts(basis).items()})
        for name, basis in bases.items()
    }
