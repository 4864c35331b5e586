"""Densities of features: Student's t with a scale matrix of low rank plus diagonal; knows nothing of networks.

Features z [F] of a task have the density of a t distribution with NU degrees of freedom, a mean, and the scale matrix
V V^T + D, D diagonal. Its tails are heavy, as those of real features are: under a Gaussian, images far from all tasks
go to the task with the widest features. With A = I + V^T D^-1 V = L L^T, Woodbury's identity gives the distance

    q(z) = |D^-1/2 (z - mean)|^2 - |L^-1 V^T D^-1 (z - mean)|^2,   log p(z) = offset - (NU + F) / 2 log(1 + q / NU).

So a task is F (r + 2) + 1 numbers for r directions, and no image of it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NU = 30.0
FLOOR = 0.01  # variance added to every feature, for features whose mean variance in the first task is one


class Moments:
    """Mean and covariance of rows [n, F] that come in batches, in double precision."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self._scatter = torch.zeros((), dtype=torch.double)

    def add(self, rows: Tensor) -> None:
        """Take rows [n, F] in."""
        rows = rows.double()
        own, total = rows.mean(0), self.count + len(rows)
        step, centred = own - self.mean.to(own.device), rows - own
        between = torch.outer(step, step) * (self.count * len(rows) / total)
        self._scatter = self._scatter.to(own.device) + centred.T @ centred + between
        self.mean = self.mean.to(own.device) + step * (len(rows) / total)
        self.count = total

    @property
    def covariance(self) -> Tensor:
        """The covariance [F, F] of all rows."""
        return self._scatter / self.count


@dataclass(frozen=True, eq=False)
class Densities:
    """The densities of T tasks: mean [T, F], the diagonal of D^-1 [T, F], D^-1 V L^-T [T, F, r], and offset [T]."""

    mean: Tensor
    precision: Tensor
    factor: Tensor
    offset: Tensor

    def log_density(self, z: Tensor) -> Tensor:
        """Return log p(z) [N, T] of features z [N, F] under each task.

        Features are centred once, by the mean of the first task, so that no tensor [T, N, F] is made. Squares of large
        features need double precision then; products of few columns in it cost little.
        """
        with torch.autocast(z.device.type, enabled=False):
            z, step = z.float() - self.mean[0], self.mean - self.mean[0]
            projected = z.expand(len(step), *z.shape) @ self.factor - step[:, None] @ self.factor
            z, step, precision = z.double(), step.double(), self.precision.double()
            weighted = precision * step
            distance = z.square() @ precision.T - 2 * z @ weighted.T + (weighted * step).sum(1)
            distance = (distance - projected.square().sum(-1).T).clamp(min=0)
            return self.offset - 0.5 * (NU + z.shape[1]) * torch.log1p(distance / NU).float()

    def joined(self, other: Densities) -> Densities:
        """Return the densities of these tasks and of others."""
        return Densities(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))

    def apply(self, change: Callable[[Tensor], Tensor]) -> Densities:
        """Return the densities with a function applied to every tensor."""
        return Densities(*map(change, vars(self).values()))


def fit(moments: Moments, unit: Tensor, rank: int, shrinkage: float = 0.0, floor: float = FLOOR) -> Densities:
    """Return the density of rows of these moments, divided by `unit` [F]; V has at most `rank` columns.

    V spans the leading directions of the covariance, which is shrunk: covariances are multiplied by 1 - shrinkage,
    variances stay. What is left of the variances, and `floor`, is the diagonal D.
    """
    covariance = moments.covariance / torch.outer(unit, unit)
    values, vectors = torch.linalg.eigh(covariance)
    first = max(len(values) - rank, 0)
    factor = vectors[:, first:] * ((1 - shrinkage) * values[first:].clamp(min=0)).sqrt()
    variance = (covariance.diagonal() - factor.square().sum(1)).clamp(min=0) + floor
    weighted = factor / variance[:, None]
    root = torch.linalg.cholesky(factor.T @ weighted + torch.eye(factor.shape[1]).to(factor))
    determinant = variance.log().sum() + 2 * root.diagonal().log().sum()
    size = len(values)
    constant = math.lgamma((NU + size) / 2) - math.lgamma(NU / 2) - size / 2 * math.log(NU * math.pi)
    thin = torch.linalg.solve_triangular(root, weighted.T, upper=False).T
    density = Densities(moments.mean / unit, variance.reciprocal(), thin, constant - 0.5 * determinant)
    return density.apply(lambda one: one[None].float())
