"""The networks of the experiments."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from xkfac.experiments.data.digits import stream
from xkfac.experiments.recipes.recipe import Line, Norm
from xkfac.model.renorm import BatchRenorm1d


def perceptron(features: int, classes: int, line: Line, seed: int) -> nn.Sequential:
    """Return the perceptron of a line, `features`-widths-`classes`, with its BN or BRN before each ReLU.

    The weights are fixed by the seed alone, whatever the line.
    """
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(stream("weights", seed).initial_seed())
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((features, *line.widths)):
            layers += [nn.Linear(inputs, outputs), *_norm(line.norm, outputs), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Linear((features, *line.widths)[-1], classes))


def _norm(norm: Norm, channels: int) -> list[nn.Module]:
    if norm == "none":
        return []
    return [nn.BatchNorm1d(channels) if norm == "bn" else BatchRenorm1d(channels)]
