"""Features that tasks are inferred from: coarse statistics of inputs and of what the first BN gets, or a head's input.

Early features come from a frozen copy of the layers of the first task: they never change while the network learns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xkfac.errors import XkfacError
from xkfac.model.batches import tensors
from xkfac.model.passes import norms_of
from xkfac.task_layers import task_layers_of

POSITIONS = 32  # along each axis; more of them cost more and say no more about means and variances
EPSILON = 1e-5  # added to variances over positions before their logarithm
# Cells along each axis, for means and for variances: they say where in an image something is.
CELLS = (4, 4)
INPUT_CELLS = (8, 1)
MOST = 1024  # means of one tensor, and variances of one: with many channels there are fewer cells


class _Reached(Exception):
    """The first BN layer was reached; holds its input."""


class _End(nn.Module):
    """Stands for a BN layer, and ends the pass."""

    def forward(self, x: Tensor) -> Tensor:
        raise _Reached(x)


class Probe(nn.Module):
    """Early features [N, F] of inputs: of the input itself, and of what the BN layer `norm` gets, the first that runs.

    Images [N, C, ...] give mean and log variance of each channel in each cell, vectors [N, C] their entries alone. Of
    the given model, only the layers `needed` in front of this BN layer are kept. blocks: how many features in a row are
    of one kind. every: a convolution right in front of this BN computes one position out of so many along each axis.
    flat: whether the inputs seen last are vectors.
    """

    def __init__(
        self, model: nn.Module, norm: str | None, needed: list[str], blocks: list[int], every: int = 1
    ) -> None:
        super().__init__()
        self.norm, self.needed, self.blocks, self.every = norm, needed, blocks, every
        self.flat = False
        self.layers = None if norm is None else _prefix(model, norm, needed)
        if self.layers is not None and every > 1:
            conv: Any = self.layers.get_submodule(needed[-1])
            conv.stride = tuple(every * stride for stride in conv.stride)

    def description(self) -> dict[str, Any]:
        """Return what it is made with beside the model."""
        return {"norm": self.norm, "needed": self.needed, "blocks": self.blocks, "every": self.every}

    def sees(self, x: Any) -> bool:
        """Return whether inputs like x have features: whether there is a BN layer, or they are numbers [N, C, ...]."""
        return self.norm is not None or bool(_numbers(x))

    def reached(self, x: Any) -> list[Tensor]:
        """Return what the BN layer gets for inputs x; nothing without one."""
        try:
            if self.layers is not None:
                self.layers(x)
        except _Reached as reached:
            return list(reached.args)
        return []

    @torch.no_grad()
    def forward(self, x: Any) -> Tensor:
        """Return the features [N, F] of the inputs x of a model."""
        seen = _numbers(x)
        blocks = [block for one in seen for block in statistics(one, INPUT_CELLS)]
        blocks += [block for one in self.reached(x) for block in statistics(one)]
        if not blocks:
            raise XkfacError("the network has no BN, and its inputs are no numbers [N, C, ...]; use by='last'")
        self.blocks, self.flat = [block.shape[1] for block in blocks], _are_vectors(seen)
        return torch.cat(blocks, 1)


def make_probe(model: nn.Module, x: Any) -> Probe:
    """Return the probe of a model without a `TaskLayer`, for inputs like x; of vectors it sees the entries alone."""
    if _are_vectors(_numbers(x)):
        return Probe(model, None, [], [])
    called, norms = _called(model, x), norms_of(model)
    norm = next((path for path in called if path in norms), None)
    needed = called[: called.index(norm)] if norm else []
    probe = Probe(model, norm, needed, [])
    if not needed or not isinstance(model.get_submodule(needed[-1]), (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return probe
    (reached,) = probe.reached(x)
    return Probe(model, norm, needed, [], max(1, min(reached.shape[2:]) // POSITIONS))


def _numbers(x: Any) -> list[Tensor]:
    """Return those tensors of inputs x that features are taken of."""
    return [one for one in tensors(x) if one.is_floating_point() and one.dim() > 1]


def _are_vectors(inputs: list[Tensor]) -> bool:
    return bool(inputs) and all(one.dim() == 2 for one in inputs)


def statistics(x: Tensor, cells: tuple[int, int] = CELLS) -> list[Tensor]:
    """Return means and log variances of images x [N, C, ...] in cells, [N, C * cells] each, or vectors x [N, C] alone.

    cells: how many there are along each axis, for means and for variances.
    """
    if x.dim() == 2:
        return [x.float()]
    overall = x.float().mean(tuple(range(2, x.dim())), keepdim=True)
    centred = x - overall  # squares of means would be large against variances
    means, coarse = (_in_cells(centred, count) for count in cells)
    variance = (_in_cells(centred.square_(), cells[1]) - coarse.square()).clamp_(min=0)
    return [(means + overall).flatten(1), (variance + EPSILON).log().flatten(1)]


def _in_cells(x: Tensor, cells: int) -> Tensor:
    """Return means of x [N, C, ...] in cells along each axis, in fewer where `MOST` would be exceeded."""
    axes = x.dim() - 2
    while cells > 1 and x.shape[1] * cells**axes > MOST:
        cells -= 1
    if axes > 3:
        return x.mean(tuple(range(2, x.dim())), keepdim=True)
    pool: Callable[[Tensor, int], Tensor] = getattr(nn.functional, f"adaptive_avg_pool{axes}d")
    return pool(x, cells)


def last_features(model: nn.Module, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the input [N, F] of the linear layer that a run of a model calls last, and what the run gives."""
    seen: list[Tensor] = []

    def note(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen[:] = inputs[:1]

    hooks = [one.register_forward_pre_hook(note) for one in model.modules() if isinstance(one, nn.Linear)]
    try:
        answers = run()
    finally:
        for hook in hooks:
            hook.remove()
    if not seen or seen[0].dim() != 2:
        raise XkfacError("the network ends in no linear layer with inputs [N, F]; infer tasks by='early' features")
    return seen[0].detach().float(), answers


def plain(model: nn.Module, task: str) -> nn.Module:
    """Return a copy of a model in evaluation mode, with the layers of one task in place of every `TaskLayer`."""
    network = copy.deepcopy(model).eval()
    for path, layer in task_layers_of(network).items():
        network.set_submodule(path, layer.of[task])
    return network


def _called(model: nn.Module, x: Any) -> list[str]:
    """Return the paths of BN layers and of modules without children that a pass runs, in the order of their calls."""
    called: dict[str, None] = {}
    norms = norms_of(model)

    def noting(path: str) -> Callable[..., None]:
        return lambda *_: called.setdefault(path)

    leaves = {path: module for path, module in model.named_modules() if path in norms or not list(module.children())}
    hooks = [module.register_forward_pre_hook(noting(path)) for path, module in leaves.items()]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return list(called)


def _prefix(model: nn.Module, norm: str, needed: list[str]) -> nn.Module:
    """Return a model that ends at a BN layer, its weights frozen, without the weights of layers that are not needed."""
    for path, module in list(model.named_modules()):
        if path == norm:
            model.set_submodule(path, _End())
        elif path not in needed and not list(module.children()) and module.state_dict():
            model.set_submodule(path, nn.Identity())
    return model.requires_grad_(False)
