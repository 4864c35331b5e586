"""The trade-off of a method: what is kept of the source against what is learnt of the targets, as its strength grows.

A curve is the chain of straight lines through the points of a sweep, in the order of the swept value. A point is
(kept, share): the source accuracy after all tasks over that of the source network, and the target accuracy over its
ceiling, on average over targets. Both are numbers near 0 to 1.

    reach(x) = the largest share on the curve at points that keep at least x
    area     = the integral of reach over x from 0 to 1

So reach never grows with x, and needs no curve that falls by itself. Nothing is extrapolated: beyond the point that
keeps most, nothing is reached, and the area gains nothing; left of the point that keeps least, reach is the largest
share there is, as all points keep more than asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

Point = tuple[float, float]


def reach(curve: Sequence[Point], kept: float) -> float | None:
    """Return the largest share on a curve at points that keep at least `kept`; None where no point does."""
    shares = [share for x, share in curve if x >= kept]
    shares += [_height(one, other, kept) for one, other in pairwise(curve) if _crosses(one, other, kept)]
    return max(shares, default=None)


def area(curve: Sequence[Point]) -> float:
    """Return the area under the reach of a curve over what is kept from 0 to 1; exact up to rounding."""
    ends = sorted({0.0, *(min(max(x, 0.0), 1.0) for x, _ in curve)})
    return math.fsum(_strip(curve, low, high) for low, high in pairwise(ends))


def _strip(curve: Sequence[Point], low: float, high: float) -> float:
    """Return the area between neighbouring points: that below a constant and straight lines, whichever is highest."""
    level = reach(curve, high)
    assert level is not None  # some point keeps at least `high`
    across = [pair for pair in pairwise(curve) if min(pair)[0] <= low and high <= max(pair)[0] and low < high]
    lines = [(level, level), *((_height(*pair, low), _height(*pair, high)) for pair in across)]
    # Lines are pairs of heights at both ends; where two cross, the higher one changes.
    crossings = [0.0, 1.0]
    for (a, b), (c, d) in combinations(lines, 2):
        if (a - c) * (b - d) < 0:
            crossings.append((a - c) / ((a - c) - (b - d)))
    crossings.sort()
    tops = [max(a + (b - a) * place for a, b in lines) for place in crossings]
    shares = (
        (right - left) * (one + other) / 2
        for (left, one), (right, other) in pairwise(zip(crossings, tops, strict=True))
    )
    return (high - low) * sum(shares)


def _crosses(one: Point, other: Point, kept: float) -> bool:
    return min(one[0], other[0]) < kept < max(one[0], other[0])


def _height(one: Point, other: Point, kept: float) -> float:
    """Return the share where the line between two points keeps `kept`."""
    (x, low), (z, high) = sorted((one, other))
    place = (kept - x) / (z - x)
    return low * (1 - place) + high * place
