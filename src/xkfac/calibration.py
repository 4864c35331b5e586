"""What was measured of a memory's penalty against the real loss: its scale, and how far it can be trusted."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Self

from xkfac.plain_values import Amount, Range

Factor = Annotated[float, Range("a finite number above 0", lambda value: 0 < value < math.inf)]
TRUST = 2.0
"""The factor within which the scaled penalty follows the real loss inside the radius."""

RISE = 0.1
"""The real rise of the loss, in nats per prediction, at which the scale is read."""


@dataclass(frozen=True)
class CurvePoint:
    """A displaced network: the penalty L_s that was predicted for it, and the real rise of the source's loss."""

    predicted: Amount
    real: float


@dataclass(frozen=True)
class Calibration:
    """How the penalty of a memory relates to the real loss of the source, on held-out examples.

    scale: what L_s must be multiplied by to meet the real rise of the loss where that is `RISE`. radius: the largest
    predicted L_s, not scaled, up to which the scaled penalty was within a factor of two of it; 0 where it was so
    nowhere. curve: what was measured, by predicted L_s. examples: how many held-out examples measured. scales: what
    each made-up task gave; `scale` is their geometric mean.
    """

    scale: Factor
    radius: Amount
    curve: tuple[CurvePoint, ...]
    examples: int
    scales: tuple[Factor, ...] = ()

    def __str__(self) -> str:
        spread = ""
        if len(self.scales) > 1:
            spread = f" ({min(self.scales):.3g} to {max(self.scales):.3g} over {len(self.scales)} made-up tasks)"
        return f"scale {self.scale:.3g}{spread}, radius {self.radius:.3g}, measured on {self.examples:,} examples"

    @classmethod
    def of(cls, curves: Iterable[Iterable[CurvePoint]], examples: int) -> Self:
        """Return the calibration that the measured curves of several tasks give; nan without a rise."""
        curves = [tuple(curve) for curve in curves]
        scales = tuple(map(scale_of, curves))
        scale = math.exp(sum(map(math.log, scales)) / len(scales))
        points = sorted((point for curve in curves for point in curve), key=lambda point: point.predicted)
        return cls(scale, radius_of(points, scale), tuple(points), examples, scales)


def scale_of(curve: Iterable[CurvePoint]) -> float:
    """Return real / predicted where the real rise is `RISE`; nan without a point that has both.

    Between two points the logarithm of the ratio is interpolated over that of the rise. Where all points lie on one
    side of `RISE`, the nearest counts. How long a task was learnt is thus no part of the scale: the ratio grows with
    the distance, and this is the ratio at one stated distance.
    """
    points = sorted((point.real, point.predicted) for point in curve if point.real > 0 and point.predicted > 0)
    below = [(math.log(real), math.log(real / predicted)) for real, predicted in points if real < RISE]
    above = [(math.log(real), math.log(real / predicted)) for real, predicted in points if real >= RISE]
    if not (below and above):
        return math.exp((below[-1:] + above[:1])[0][1]) if points else math.nan
    (start, low), (end, high) = below[-1], above[0]
    return math.exp(low + (high - low) * (math.log(RISE) - start) / (end - start))


def radius_of(curve: Iterable[CurvePoint], scale: float) -> float:
    """Return the largest predicted penalty up to which no point is underrated by more than `TRUST`.

    Points are taken by their predicted penalty. One that is overrated does no harm: the penalty is too strict there.
    """
    radius = 0.0
    for point in sorted(curve, key=lambda point: point.predicted):
        if point.real > TRUST * scale * point.predicted:
            break
        radius = point.predicted
    return radius
