"""The networks of the experiments."""

from itertools import pairwise

from torch import nn

from xkfac.experiments.data.digits import drawing_from
from xkfac.experiments.recipes.recipe import Line
from xkfac.model.renorm import BatchRenorm1d


def perceptron(features: int, classes: int, line: Line, seed: int) -> nn.Sequential:
    """Return the perceptron of a line, `features`-widths-`classes`, with its BN or BRN before each activation.

    The weights are fixed by the seed alone, whatever the line.
    """
    norms: dict[str, list[type[nn.Module]]] = {"bn": [nn.BatchNorm1d], "brn": [BatchRenorm1d], "none": []}
    with drawing_from("weights", seed):
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((features, *line.widths)):
            layers += [
                nn.Linear(inputs, outputs),
                *(norm(outputs) for norm in norms[line.norm]),
                nn.ReLU(inplace=True) if line.activation == "relu" else nn.GELU(),
            ]
        return nn.Sequential(*layers, nn.Linear((features, *line.widths)[-1], classes))
