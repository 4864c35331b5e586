"""What every benchmark shares: the digits as data, small BN networks, and the record of where a number comes from."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import xkfac
from xkfac.experiments.provenance import provenance as of_process


def digits(permutation_seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's 1,797 digits as images [N, 1, 8, 8] in [0, 1], pixels permuted if asked, and labels [N]."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32)
    if permutation_seed is not None:
        images = images[:, torch.randperm(64, generator=torch.Generator().manual_seed(permutation_seed))]
    return images.reshape(-1, 1, 8, 8), torch.tensor(labels)


def batches(images: Tensor, labels: Tensor, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return the full batches of one shuffled pass."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return [(images[part], labels[part]) for part in order.split(size) if len(part) == size]


def mlp(width: int = 16) -> nn.Sequential:
    """Return a 64-width-width-10 perceptron with BN before each ReLU."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, width, bias=False),
        nn.BatchNorm1d(width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def convnet() -> nn.Sequential:
    """Return a network of three convolutions with BN, a global average pool, and a linear head."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 6, 1), *block(6, 8, 2), *block(8, 8, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


def train(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    seed: int,
    lr: float = 0.1,
    learner: xkfac.Learner | None = None,
) -> None:
    """Train by SGD with momentum 0.9, batch 32, a learning rate that falls to zero along a cosine."""
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    net.train()
    for epoch in range(epochs):
        for x, y in batches(images, labels, 32, seed * 1000 + epoch):
            loss = nn.functional.cross_entropy(net(x), y)
            optimizer.zero_grad()
            (loss if learner is None else learner.objective(loss)).backward()
            optimizer.step()
        schedule.step()


def provenance() -> dict[str, str]:
    """Return the command, commit, versions and hardware of this run, to be kept beside its numbers.

    Call it once the number of threads is set, and before the work: the commit is that of the code that is about to run.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {**of_process(device, torch.get_num_threads()), "command": shlex.join(["python", *sys.argv])}


def keep(output: Path, record: dict[str, Any], results: Any, table: str, *, show: bool = True) -> None:
    """Write the numbers with their provenance, and the table, to a folder, and show the table."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text(json.dumps({**record, "results": results}, indent=1))
    (output / "table.md").write_text(table + "\n")
    if show:
        print(table)


def operations_of(run: Callable[[], object]) -> float:
    """Return the GFLOP of matrix products and convolutions of a run."""
    aten = torch.ops.aten
    # The counter's own formulas do not know that a product can have a dtype of its own, which follows its factors.
    own = {aten.mm: _product, aten.bmm: _product, aten.addmm: _added_product, aten.baddbmm: _added_product}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        run()
    return counter.get_total_flops() / 1e9


def _product(first: torch.Size, second: torch.Size, *rest: object, **options: object) -> int:
    """Return the operations of a product of matrices of these shapes, which may be of a batch."""
    return 2 * math.prod(first) * second[-1]


def _added_product(total: torch.Size, first: torch.Size, second: torch.Size, *rest: object, **options: object) -> int:
    return _product(first, second)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, as if none of it stayed in a cache; views are free."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and func is not torch.ops.aten.detach.default:
            for tensor in tree_leaves((args, kwargs, result)):
                if isinstance(tensor, Tensor):
                    self.total += tensor.numel() * tensor.element_size()
        return result


def bytes_of(run: Callable[[], object]) -> float:
    """Return how many GB a run reads and writes."""
    with Traffic() as traffic:
        run()
    return traffic.total / 1e9
