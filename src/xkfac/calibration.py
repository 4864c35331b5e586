"""What was measured of a memory's penalty against the real loss: its scale, and how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

TRUST = 2.0
"""The factor within which the scaled penalty follows the real loss inside the radius."""


@dataclass(frozen=True)
class CurvePoint:
    """A displaced network: the penalty L_s that was predicted for it, and the real rise of the source's loss."""

    predicted: float
    real: float


@dataclass(frozen=True)
class Calibration:
    """How the penalty of a memory relates to the real loss of the source, on held-out examples.

    scale: what L_s must be multiplied by to meet the real rise of the loss. radius: the largest predicted L_s, not
    scaled, up to which the scaled penalty was within a factor of two of it; 0 where it was so nowhere. curve: what was
    measured along the last path, in order. examples: how many held-out examples measured.
    """

    scale: float
    radius: float
    curve: tuple[CurvePoint, ...]
    examples: int

    @classmethod
    def of(cls, curve: Iterable[CurvePoint], examples: int) -> Calibration:
        """Return the calibration that a measured curve gives."""
        curve = tuple(curve)
        scale = scale_of(curve)
        return cls(scale, radius_of(curve, scale), curve, examples)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> Calibration:
        """Return the calibration of an entry in a file's description, as `dataclasses.asdict` writes it.

        Raises ValueError for numbers that no calibration has.
        """
        curve = tuple(CurvePoint(float(point["predicted"]), float(point["real"])) for point in entry["curve"])
        scale, radius = float(entry["scale"]), float(entry["radius"])
        if not (0 < scale < math.inf and 0 <= radius < math.inf):
            raise ValueError(f"a calibration of scale {scale} and radius {radius}")
        return cls(scale, radius, curve, int(entry["examples"]))


def scale_of(curve: Iterable[CurvePoint]) -> float:
    """Return the geometric mean of real / predicted, each point weighted by its real rise; nan without such points.

    A rise close to nothing is noise of the estimate and of BN's running statistics, and its ratio means little.
    """
    points = [point for point in curve if point.real > 0 and point.predicted > 0]
    total = sum(point.real for point in points)
    if not 0 < total < math.inf:
        return math.nan
    return math.exp(sum(point.real * math.log(point.real / point.predicted) for point in points) / total)


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
