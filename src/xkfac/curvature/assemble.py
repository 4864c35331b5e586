"""One curvature from the collectors of a pass, also where several processes have shared it.

Units are shared out: the sums of a unit are reduced at one process, its owner, which puts its block together and
decomposes it where that is asked for, and sends the block to all. Every process ends with the same curvature, bit by
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from xkfac.curvature.blocks import (
    Block,
    Corrected,
    Diagonal,
    KhatriRao,
    Kronecker,
    assemble,
    eigenbasis,
    khatri_rao,
    parts,
)
from xkfac.curvature.collectors import JOINT, Collector, Collectors, JointCollector
from xkfac.curvature.operator import Curvature, is_finite
from xkfac.curvature.processes import Layout, Processes, shared_out
from xkfac.errors import NotFiniteError, UnitError, XkfacError
from xkfac.model.passes import NO_BATCH
from xkfac.model.tracing import Convolution
from xkfac.model.units import Coverage, Row, Unit

Source = Collector | JointCollector


@dataclass
class Outcome:
    """What a process says of its part of a pass: how many batches and examples, which units, and what went wrong."""

    batches: int = 0
    examples: int = 0
    coverage: Coverage | None = None
    error: str | None = None

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Outcome:
        """Return what another process says, from what `asdict` makes of it."""
        coverage = described["coverage"] and _coverage(described["coverage"])
        return cls(**{**described, "coverage": coverage})


def _coverage(described: Mapping[str, Any]) -> Coverage:
    units = []
    for entry in described["units"]:
        convolution = entry["convolution"]
        if convolution is not None:
            padding = tuple(tuple(pair) for pair in convolution.pop("padding"))
            convolution = Convolution(padding=padding, **{name: tuple(sizes) for name, sizes in convolution.items()})
        units.append(Unit(**{**entry, "shape": tuple(entry["shape"]), "convolution": convolution}))
    return Coverage(tuple(units), tuple(Row(**row) for row in described["rows"]))


def agreed(processes: Processes, own: Outcome) -> tuple[Coverage, list[int], int]:
    """Return the units that the processes have found, the batches of each, and the examples of all together.

    Raises XkfacError, on every process, when one failed, when they found different units, or when none has a batch.
    """
    every = [Outcome.read(described) for described in processes.exchanged(asdict(own))]
    _raise_first(outcome.error for outcome in every)
    found = [(rank, outcome.coverage) for rank, outcome in enumerate(every) if outcome.coverage is not None]
    if not found:
        raise XkfacError(NO_BATCH)
    first, coverage = found[0]
    for rank, theirs in found[1:]:
        if theirs.units != coverage.units:
            odd = min({*theirs.units} ^ {*coverage.units}, key=lambda unit: unit.name)
            raise XkfacError(
                f"processes {first} and {rank} have found different units, such as '{odd.name}'; make the network run "
                "the same layers on the batches of every process, or exclude it"
            )
    return coverage, [outcome.batches for outcome in every], sum(outcome.examples for outcome in every)


def _raise_first(errors: Iterable[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise XkfacError(f"process {rank} of the shared pass failed: {error}")


def finished(collectors: Collectors, processes: Processes | None, total: int, *, decompose: bool = False) -> Curvature:
    """Return the curvature of collectors, resting on a `total` of examples, with `decompose` in its eigenbasis.

    Raises NotFiniteError for the first unit with factors that are not finite.
    """
    sources = collectors.sources()
    if processes is None:
        blocks: Mapping[str, Any] = {name: _block(name, one, total, decompose) for name, one in sources.items()}
    else:
        blocks = _Shared(sources, processes, collectors.examples, total, decompose).blocks()
    if collectors.joint is None or JOINT not in blocks:
        return Curvature({name: block for name, block in blocks.items() if name != JOINT})
    units = tuple(unit.name for unit in collectors.joint.units)
    return Curvature({name: blocks[name] for name in sources if name != JOINT}, blocks[JOINT], units)


def _block(name: str, source: Source, examples: int, decompose: bool) -> Block | KhatriRao:
    block = source.block(examples)
    assert block is not None
    for tensor in parts(block).values():
        if not is_finite(tensor):
            name = name if isinstance(source, Collector) else " and ".join(unit.name for unit in source.units)
            raise NotFiniteError(
                f"the factors of unit '{name}' are not finite; check the data and the network's outputs, or estimate "
                "in float32 instead of a reduced precision"
            )
    if not decompose or not isinstance(block, Kronecker):
        return block
    (moments,) = block.terms  # of columns and of rows of the gradient
    return eigenbasis(moments.left, moments.right)


@dataclass
class _Shared:
    """The blocks of a pass of which this process has the sums over `examples` of a `total`."""

    sources: Mapping[str, Source]
    processes: Processes
    examples: int
    total: int
    decompose: bool

    def blocks(self) -> dict[str, Any]:
        roots = self._roots()
        owners = self._owners()
        for owner in range(self.processes.size):
            self._reduce(owner, [name for name in self.sources if owners[name] == owner], roots)
        mine = [name for name in self.sources if owners[name] == self.processes.rank]
        made, error = _caught(lambda: {name: self._made(name) for name in mine})
        fault = error and [type(error).__name__, str(error)]
        every = self.processes.exchanged([fault, {name: _described(block) for name, block in (made or {}).items()}])
        for theirs, _ in every:
            if theirs is not None:
                raise _FAULTS.get(theirs[0], XkfacError)(theirs[1])
        blocks = {}
        for owner, (_, described) in enumerate(every):
            layouts = {name: (kind, _layouts(parts)) for name, (kind, parts) in described.items()}
            blocks.update(self._sent(owner, layouts, made or {}))
        return {name: blocks[name] for name in self.sources}

    def _made(self, name: str) -> Block | KhatriRao:
        return _block(name, self.sources[name], self.total, self.decompose)

    def _roots(self) -> dict[str, Tensor]:
        """Return the roots of M of all examples: means count by the examples that they are of."""
        own = {} if self.examples == 0 else {name: one.root(self.examples) for name, one in self.sources.items()}
        mine = {name: root for name, root in own.items() if root is not None}
        told = self.processes.exchanged({name: Layout.of(root).described() for name, root in mine.items()})
        every = [_layouts(theirs) for theirs in told]
        layouts = next(one for one in every if one or not any(every))
        for rank, theirs in enumerate(every):
            for name in theirs:
                if theirs[name] != layouts[name]:
                    raise UnitError(
                        f"unit '{name}' has {theirs[name].shape[1]} means by location on process {rank} and "
                        f"{layouts[name].shape[1]} on another, so the mean of both is undefined; use form='paper', or "
                        "grouping='pooled'"
                    )
        share = self.examples / self.total
        counted = [mine[name] * share for name in layouts] if mine else None
        return dict(zip(layouts, self.processes.totals(list(layouts.values()), counted), strict=True))

    def _owners(self) -> dict[str, int]:
        """Return the owner of each unit: by what is reduced, or by the products of a decomposition."""
        costs = {
            name: sum(one.elements * (one.shape[-1] if self.decompose else 1) for one in source.layouts())
            for name, source in self.sources.items()
        }
        return shared_out(costs, self.processes.size)

    def _reduce(self, owner: int, names: list[str], roots: Mapping[str, Tensor]) -> None:
        layouts = {name: self.sources[name].layouts() for name in names}
        own = None
        if self.examples:
            own = [one for name in names for one in self.sources[name].sums(self.examples, roots.get(name))]
        sums = self.processes.sums_at(owner, [one for name in names for one in layouts[name]], own)
        for name in names if sums else ():
            self.sources[name].take([sums.pop(0) for _ in layouts[name]], roots.get(name))

    def _sent(
        self, owner: int, described: Mapping[str, tuple[str, dict[str, Layout]]], made: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the owner's blocks; what a process holds already does not travel."""
        held = {name: self.sources[name].held() for name in described}
        layouts = {
            (name, part): layout
            for name, (_, named) in described.items()
            for part, layout in named.items()
            if part not in held[name]
        }
        own = None
        if owner == self.processes.rank:
            own = [parts(made[name])[part] for name, part in layouts]
        arrived = dict(zip(layouts, self.processes.copies_of(owner, list(layouts.values()), own), strict=True))
        blocks = {}
        for name, (kind, named) in described.items():
            tensors = {part: held[name].get(part, arrived.get((name, part))) for part in named}
            blocks[name] = self._assembled(name, kind, tensors)
        return blocks

    def _assembled(self, name: str, kind: str, tensors: Any) -> Block | KhatriRao:
        source = self.sources[name]
        if isinstance(source, JointCollector):
            units = source.units
            return khatri_rao(tensors, [unit.shape[1] for unit in units], [unit.shape[2] for unit in units])
        return assemble(_BLOCKS[kind], tensors)


_BLOCKS: dict[str, type[Block]] = {block.__name__: block for block in (Kronecker, Diagonal, Corrected)}
_FAULTS = {fault.__name__: fault for fault in (NotFiniteError, UnitError)}


def _described(block: Block | KhatriRao) -> tuple[str, dict[str, list[Any]]]:
    """Return the class of a block and the layouts of its tensors; the factors of Kronecker products are symmetric."""
    factors = isinstance(block, (Kronecker, KhatriRao))
    return type(block).__name__, {
        name: Layout.of(tensor, symmetric=factors and not name.startswith("root")).described()
        for name, tensor in parts(block).items()
    }


def _layouts(described: Mapping[str, list[Any]]) -> dict[str, Layout]:
    return {name: Layout.read(layout) for name, layout in described.items()}


def _caught(work: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, Exception | None]:
    try:
        return work(), None
    except XkfacError as error:
        return None, error
    except RuntimeError as error:  # of a decomposition, or of a device that is full
        return None, XkfacError(str(error))
