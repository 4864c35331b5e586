"""How large the entries of K-FAC and XK-FAC are, and how far the two are apart (section 5.2 of the paper).

Both follow from XK-FAC's factors. In the mean form, H = S (x) H' + M (x) H'', K-FAC is A (x) H' with A = S + M. In the
paper's form, H = (A - A') (x) R + A' (x) H'' with R = (N H' - H'') / (N - 1), so H' = R + (H'' - R) / N needs the size
N of the mini-batches. The difference K-FAC - XK-FAC is a single product again:

    mean form     M (x) (H' - H'')                             paper's form     (N A' - A) / (N - 1) (x) (H' - H'')

The mean absolute entry of one product is exact, mean |A| mean |H|. That of a sum is estimated: an entry is drawn with a
probability q in proportion to sum_k |A_k| |H_k|, whose total Z is exact, and |sum_k A_k H_k| / sum_k |A_k| |H_k|, a
number in [0, 1], is averaged. That is unbiased, and its standard error is at most Z / 2 over the root of the draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xkfac.curvature.blocks import Kronecker, Term
from xkfac.curvature.operator import Settings
from xkfac.errors import XkfacError

DRAWS = 2**17
_SMALL = 2**22  # as many entries are written out


@dataclass(frozen=True)
class MeanEntry:
    """The mean absolute value of `count` entries, with its standard error, zero where the mean is exact."""

    mean: float
    error: float
    count: int


def over_blocks(means: Sequence[MeanEntry]) -> MeanEntry | None:
    """Return the mean over the entries of several blocks together, estimated independently; None of no blocks."""
    count = sum(mean.count for mean in means)
    if not count:
        return None
    total = math.fsum(mean.mean * mean.count for mean in means)
    return MeanEntry(total / count, math.hypot(*(mean.error * mean.count for mean in means)) / count, count)


def derivable(settings: Settings, batch: int | None, *, averaged: bool = False) -> str:
    """Return why K-FAC and XK-FAC cannot both be known from factors that were estimated so; nothing if they can."""
    mixed = settings.kind == "xkfac" and settings.form == "paper"
    if batch is not None and not (mixed and settings.grouping == "paper"):
        raise XkfacError(
            f"batch={batch} is for memories of XK-FAC in the paper's form and grouping, not for this one; leave it out"
        )
    if batch is not None and batch < 2:
        raise XkfacError(f"batch is {batch}; mini-batches with inter-example terms have at least 2 examples")
    if settings.kind == "kfac":
        return "the memory holds K-FAC factors alone, which say nothing of H''; XK-FAC cannot be derived from them"
    if settings.kind != "xkfac":
        return f"the memory holds {settings.kind} curvature, from which neither K-FAC nor XK-FAC can be derived"
    if mixed and settings.grouping != "paper":
        return (
            f"the {settings.grouping} grouping in the paper's form keeps H' mixed with coarser factors by numbers of "
            "positions that the memory does not hold; K-FAC cannot be derived from it"
        )
    if mixed and batch is None:
        return (
            "the paper's form keeps H' mixed with H'' by the size of the mini-batches, which the memory does not hold; "
            "give it to see K-FAC (--batch)"
        )
    if averaged and settings.levels[1:]:
        return (
            "the memory averages several tasks, each term by its own gradients, so A is no longer the sum of its input "
            "factors; K-FAC can be derived from a memory that keeps all terms (keep='all')"
        )
    return ""


def approximations(
    block: Kronecker, settings: Settings, batch: int | None = None, *, averaged: bool = False
) -> dict[str, tuple[Term, ...]]:
    """Return a block as sums of products, task by task where the memory keeps all terms.

    They are `kfac`, `xkfac` and `difference`, K-FAC - XK-FAC, as far as they can be known.

    `averaged`: the block is the average over several tasks, of which XK-FAC alone can be known.
    """
    if settings.kind == "kfac":
        return {"kfac": block.terms}
    if settings.kind != "xkfac":
        return {}
    if derivable(settings, batch, averaged=averaged):
        return {"xkfac": block.terms}
    kfac: list[Term] = []
    difference: list[Term] = []
    levels = len(settings.levels)
    for k in range(0, len(block.terms), levels):
        within, *others = block.terms[k : k + levels]
        total = sum((term.dense_left for term in others), start=within.dense_left)
        right = within.right
        if batch is not None:
            (between,) = others
            right = right + (between.right - right) / batch
            others = [Term((batch * between.dense_left - total) / (batch - 1), between.right)]
        kfac.append(Term(total, right))
        difference += [Term(other.left, right - other.right, other.low_rank) for other in others]
    return {"kfac": tuple(kfac), "xkfac": block.terms, "difference": tuple(difference)}


def mean_absolute(terms: Sequence[Term], generator: torch.Generator, draws: int = DRAWS) -> MeanEntry:
    """Return the mean of |sum_k A_k (x) H_k| over all entries of the blocks of all groups.

    The factors need not be positive. Exact for one term and for small blocks, else estimated from `draws` entries.
    """
    groups, rows, columns = terms[0].right.shape[0], terms[0].right.shape[-1], terms[0].left.shape[-1]
    count = groups * (rows * columns) ** 2
    lefts, rights = [term.dense_left.flatten(1) for term in terms], [term.right.flatten(1) for term in terms]
    sizes = torch.stack([_total(left) * _total(right) for left, right in zip(lefts, rights, strict=True)])
    if len(terms) == 1 or not bool(sizes.any()):
        return MeanEntry(float(sizes.sum()) / count, 0.0, count)
    if count <= _SMALL:
        return MeanEntry(float(Kronecker(tuple(terms)).dense().abs().double().mean()), 0.0, count)
    ratios = _drawn_ratios(lefts, rights, sizes, generator, draws)
    scale = float(sizes.sum()) / count
    return MeanEntry(scale * float(ratios.mean()), scale * float(ratios.std()) / math.sqrt(draws), count)


def _total(factor: Tensor) -> Tensor:
    return factor.abs().sum(1, dtype=torch.float64)


def _drawn_ratios(
    lefts: Sequence[Tensor], rights: Sequence[Tensor], sizes: Tensor, generator: torch.Generator, draws: int
) -> Tensor:
    """Return |sum_k A_k H_k| / sum_k |A_k| |H_k| at entries drawn in proportion to the denominator, [draws].

    A term and group are drawn by their `sizes` [terms, groups], then, independently, an entry of either factor.
    """
    groups = sizes.shape[1]
    drawn = torch.multinomial(sizes.flatten(), draws, replacement=True, generator=generator)
    found = []
    for k in range(len(lefts)):
        group = drawn[drawn // groups == k] % groups
        if not len(group):
            continue
        inner, outer = (_places(factors[k], group, generator) for factors in (lefts, rights))
        products = torch.stack(
            [a[group, inner].double() * h[group, outer].double() for a, h in zip(lefts, rights, strict=True)]
        )
        found.append(products.sum(0).abs() / products.abs().sum(0).clamp(min=torch.finfo(torch.float64).tiny))
    return torch.cat(found)


def _places(factor: Tensor, group: Tensor, generator: torch.Generator) -> Tensor:
    """Return an entry for each of some groups, drawn in proportion to the absolute values of a factor [groups, .]."""
    weights = factor.abs().double()
    # Every group has total one: a group of small numbers is resolved as well as its neighbours.
    weights /= weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    ends = weights.flatten().cumsum(0)
    size = factor.shape[1]
    first = torch.where(group > 0, ends[(group * size - 1).clamp(min=0)], 0.0)
    last = ends[(group + 1) * size - 1]
    target = first + torch.rand(len(group), generator=generator, dtype=torch.float64) * (last - first)
    place = torch.searchsorted(ends, target, right=True) - group * size
    return place.clamp(min=0, max=size - 1)
