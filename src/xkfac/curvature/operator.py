"""The curvature of a network as an operator, and the settings that say which curvature it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from xkfac.curvature.blocks import Block, KhatriRao, Kronecker, assemble, is_zero, khatri_rao, parts
from xkfac.curvature.input_moments import Level
from xkfac.curvature.moments import GROUPINGS, KFAC, Form, Grouping
from xkfac.errors import XkfacError
from xkfac.model.passes import Statistics
from xkfac.plain_values import Positive, check_fields

CurvatureKind = Literal["xkfac", "kfac", "diagonal", "corrected"]
Labels = Literal["signs", "sampled", "exact", "empirical"]

DRAWN = ("signs", "sampled")
ENOUGH_DRAWS = 512  # in a pass, where a draw is one sample of a factor
ENOUGH_DRAWS_OF_EXAMPLES = 128  # where every example of a draw is one


@dataclass(frozen=True)
class Settings:
    """How a curvature is estimated.

    kind: `xkfac` or `kfac` factors, the `diagonal` (EWC, from batch gradients), or `corrected`: the Fisher's exact
        variances in a Kronecker eigenbasis (two passes over the data).
    form, grouping: which XK-FAC (see `curvature.moments`): the paper's, or `mean`, and `pooled`, `hierarchical`.
    labels: where backward passes begin. `signs`: the root of the output's Fisher times random signs, so that no label
        is drawn; `sampled`: labels drawn from the model, as unbiased, with more noise the surer the network is;
        `exact`, all examples and classes (for tests and tiny networks); `empirical`, the true labels, which is biased:
        it is no Fisher, and it vanishes as a network fits its training data.
    draws: of signs or labels per batch, each a backward pass. None for as many as make `ENOUGH_DRAWS` in all, or
        `ENOUGH_DRAWS_OF_EXAMPLES` of signs where every example is a sample, up to 32 per batch. H'' gets one sample per
        draw: its rank is at most their number.
    statistics: `batch`, BN normalises with the mini-batch's; `population`, with the running ones.
    cross_layer: blocks between all pairs of linear units too, as a Khatri-Rao product.
    """

    kind: CurvatureKind = "xkfac"
    form: Form = "mean"
    grouping: Grouping = "paper"
    labels: Labels = "signs"
    draws: Positive | None = None
    statistics: Statistics = "batch"
    cross_layer: bool = False

    def __post_init__(self) -> None:
        check_fields(self, XkfacError)
        if self.draws is not None and self.labels not in DRAWN:
            raise XkfacError(f"draws={self.draws} goes with labels='signs' or 'sampled', not '{self.labels}'")
        for name in ("form", "grouping"):
            if self.kind != "xkfac" and getattr(self, name) != getattr(type(self), name):
                raise XkfacError(f"{name}={getattr(self, name)!r} has no effect on kind '{self.kind}'; leave it out")
        if self.cross_layer and self.kind not in ("xkfac", "kfac"):
            raise XkfacError(f"cross_layer goes with kind 'xkfac' or 'kfac', not '{self.kind}'")

    @property
    def draws_are_open(self) -> bool:
        """Whether the number of batches decides on the number of draws."""
        return self.draws is None and self.labels in DRAWN

    @property
    def enough_draws(self) -> int:
        """How many draws a pass needs, over all batches: fewer of signs where no factor is of whole batches."""
        of_examples = self.kind == "kfac" or (self.kind == "xkfac" and self.within_examples)
        return ENOUGH_DRAWS_OF_EXAMPLES if of_examples and self.labels == "signs" else ENOUGH_DRAWS

    def draws_over(self, count: int) -> int:
        """Return the draws per batch for a pass over `count` batches."""
        if not self.draws_are_open:
            return self.draws or 1
        return min(math.ceil(self.enough_draws / max(count, 1)), 32)

    @property
    def levels(self) -> tuple[Level, ...]:
        """The chain of partitions that the factors follow."""
        return KFAC if self.kind == "kfac" else GROUPINGS[self.grouping]

    @property
    def within_examples(self) -> bool:
        """Whether units have a term within examples and one between them, those of one position the latter alone."""
        return self.statistics == "population" and self.levels == GROUPINGS["hierarchical"]


class SettingsOptions(TypedDict, total=False):
    """The fields of `Settings` that a call can give one by one, with their types."""

    kind: CurvatureKind
    form: Form
    grouping: Grouping
    labels: Labels
    draws: int | None
    statistics: Statistics
    cross_layer: bool


@dataclass(frozen=True)
class Curvature:
    """The curvature of a network as an operator on displacements of its merged weights, unit by unit.

    `blocks` are block diagonal; `joint` holds the units `joint_units` together with the blocks between them.
    """

    blocks: Mapping[str, Block]
    joint: KhatriRao | None = None
    joint_units: tuple[str, ...] = ()

    def __contains__(self, unit: object) -> bool:
        return unit in self.blocks or unit in self.joint_units

    def block(self, unit: str) -> Block | None:
        """Return the block of a unit by itself, also of one that is held together with others; None if it has none."""
        if self.joint is not None and unit in self.joint_units:
            return self.joint.own_block(self.joint_units.index(unit))
        return self.blocks.get(unit)

    def zero_units(self) -> list[str]:
        """Return the units whose curvature is exactly zero, so that nothing protects them."""
        blocks = ((name, self.block(name)) for name in (*self.blocks, *self.joint_units))
        return [name for name, block in blocks if block is not None and is_zero(block)]

    def product(self, displacements: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return H v for displacements v, each [groups, rows, columns] by unit (eq. bp)."""
        products = {name: block.product(displacements[name]) for name, block in self.blocks.items()}
        if self.joint is not None:
            joint = self.joint.product([displacements[name] for name in self.joint_units])
            products.update(zip(self.joint_units, joint, strict=True))
        return products

    def quadratic(self, displacements: Mapping[str, Tensor]) -> Tensor:
        """Return v^T H v / 2, a scalar."""
        products = self.product(displacements)
        return torch.stack([(displacements[name] * product).sum() for name, product in products.items()]).sum() / 2

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Curvature:
        """Return the curvature on a device, in a floating-point dtype."""
        if dtype is not None and not dtype.is_floating_point:
            raise XkfacError(f"a curvature has no numbers of dtype {dtype}; use torch.float32, float64 or bfloat16")
        return self._map(lambda tensor: tensor.to(device=device, dtype=dtype))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Curvature:
        def convert(block: Block | KhatriRao) -> dict[str, Tensor]:
            return {name: function(tensor) for name, tensor in parts(block).items()}

        blocks = {name: assemble(type(block), convert(block)) for name, block in self.blocks.items()}
        joint = self.joint and khatri_rao(convert(self.joint), self.joint.rows, self.joint.columns)
        return Curvature(blocks, joint, self.joint_units)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (unit, tensor) for every tensor of the curvature."""
        for name, block in self.blocks.items():
            yield from ((name, tensor) for tensor in parts(block).values())
        if self.joint is not None:
            yield from ((" and ".join(self.joint_units), tensor) for tensor in parts(self.joint).values())

    def without(self, units: Collection[str]) -> Curvature:
        """Return the curvature of all other units."""
        blocks = {name: block for name, block in self.blocks.items() if name not in units}
        places = [place for place, name in enumerate(self.joint_units) if name not in units]
        if self.joint is None or len(places) == len(self.joint_units):
            return Curvature(blocks, self.joint, self.joint_units)
        joint = self.joint.cut(places) if places else None
        return Curvature(blocks, joint, tuple(self.joint_units[place] for place in places))

    def extend(
        self,
        other: Curvature,
        own: float,
        others: float,
        *,
        homogeneous: Container[str],
        keep_all: bool = False,
        within_examples: bool = False,
    ) -> Curvature:
        """Return own * (this) + others * (the other): the postprocessing of the paper.

        Terms are averaged (see `curvature.averaging`), at constant size, or with `keep_all` all are kept, which is
        exact. A unit that only one side has counts as zero on the other. `homogeneous`: the units whose inputs are
        extended by a 1, which averages of means go by. `within_examples`: of two terms and one, the first of the two is
        one within examples, which is zero in the other block, of one position per example.

        Raises XkfacError when the two were estimated in ways that do not add up.
        """
        if self.joint_units != other.joint_units:
            raise XkfacError("the two curvatures join different units across layers; estimate both with the same units")
        blocks: dict[str, Block] = {}
        for name in dict.fromkeys([*self.blocks, *other.blocks]):
            one, two = self.blocks.get(name), other.blocks.get(name)
            if within_examples and isinstance(one, Kronecker) and isinstance(two, Kronecker):
                one, two = _as_many_terms(one, two), _as_many_terms(two, one)
            blocks[name] = _combine(name, one, two, own, others, keep_all, name in homogeneous)
        joint, extended = None, [name in homogeneous for name in self.joint_units]
        if self.joint is not None:
            units = " and ".join(self.joint_units)
            joint = _combine(units, self.joint, other.joint, own, others, keep_all, extended)
        return Curvature(blocks, joint, self.joint_units)


def _as_many_terms(block: Kronecker, other: Kronecker) -> Kronecker:
    """Return a block of one term beside one of two with a zero term before it; any other as it is."""
    if (len(block.terms), len(other.terms)) != (1, 2):
        return block
    (term,) = block.terms
    return Kronecker((replace(term, left=torch.zeros_like(term.left)), term))


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite. Their sum says so, in one reading of them, unless it overflows."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def _combine(name: str, a: Any, b: Any, own: float, others: float, keep_all: bool, homogeneous: Any) -> Any:
    if a is None or b is None:
        return b.scale(others) if a is None else a.scale(own)
    if type(a) is not type(b):
        raise XkfacError(
            f"unit '{name}' has a {type(a).__name__} block on one side and a {type(b).__name__} block on the other; "
            "estimate both the same way"
        )
    by_means = {"homogeneous": homogeneous} if isinstance(a, (Kronecker, KhatriRao)) else {}
    try:
        return a.scale(own).join(b.scale(others)) if keep_all else a.average(b, own, others, **by_means)
    except XkfacError as error:
        raise XkfacError(f"unit '{name}': {error}") from None
