"""One interface for all libraries: a curvature batch, its product with a displacement, and a file of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nets import Batches
from torch import Tensor, nn
from torch.nn import functional as F

Moved = dict[str, Tensor]
Step = Callable[[Tensor, Tensor], None]
LAYERS = (nn.Linear, nn.Conv2d)


class AbsentError(Exception):
    """The library has no such thing."""


def layers_of(net: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the linear and convolutional layers of a network by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, LAYERS)}


def layer_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of linear and convolutional layers by name."""
    return {f"{name}.{part}": p for name, layer in layers_of(net).items() for part, p in layer.named_parameters()}


class Peer:
    """One row: a library with a setting.

    once: slow, so one batch is measured once. ahead: it reads all batches before it works on them. delays: it puts work
    off until there is more of it, so that batches of a short pass cost more than the time between them. sampled:
    whether it draws labels. cycle: steps in a row that are timed together, since they differ. warm_up: steps before
    these.
    """

    package = ""
    row = ""
    once = ahead = delays = False
    sampled = True
    cycle = warm_up = 1

    def prepare(self, net: nn.Module) -> None:
        """Do what the library wants done to a network beforehand."""

    def curvature(self, net: nn.Module, data: Batches) -> Any:
        """Return the curvature from a pass over the data."""
        raise NotImplementedError

    def product(self, state: Any, net: nn.Module, moved: Moved) -> Moved:
        """Return the curvature times a displacement, by parameter, in the scale of a mean over examples."""
        raise NotImplementedError

    def raw(self, net: nn.Module, data: Batches) -> Callable[[Moved], Moved]:
        """Return the curvature of the parameters as they are, for a comparison with the exact Fisher."""
        state = self.curvature(net, data)
        return lambda moved: self.product(state, net, moved)

    def stepper(self, net: nn.Module, state: Any) -> Step:
        """Return a penalised training step: a plain one, and the product added to the gradients."""
        parameters = dict(net.named_parameters())
        anchor = {name: parameter.detach().clone() for name, parameter in parameters.items()}

        def step(x: Tensor, y: Tensor) -> None:
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
            with torch.no_grad():
                moved = {name: parameter - anchor[name] for name, parameter in parameters.items()}
                for name, gradient in self.product(state, net, moved).items():
                    parameters[name].grad.add_(gradient)

        return step

    def stored(self, state: Any) -> Any:
        """Return what a file of the curvature holds."""
        return state

    def restored(self, content: Any, net: nn.Module, data: Batches) -> Any:
        """Return the curvature from what a file held."""
        return content

    def save(self, state: Any, net: nn.Module, path: Path) -> None:
        """Write curvature and anchor to a file."""
        torch.save({"anchor": dict(net.named_parameters()), "curvature": self.stored(state)}, path)

    def load(self, net: nn.Module, data: Batches, path: Path) -> Any:
        """Read them back."""
        return self.restored(torch.load(path, weights_only=False)["curvature"], net, data)
