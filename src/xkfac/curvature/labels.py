"""Where backward passes begin: gradients of losses with respect to the output, for labels drawn, given, or all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xkfac.curvature.operator import Labels
from xkfac.curvature.shared_moments import Coupling
from xkfac.errors import XkfacError
from xkfac.model.batches import labels_of
from xkfac.model.likelihood import Likelihood


@dataclass
class Cotangents:
    """Yields what backward passes begin with, batch by batch.

    `draws` are those a batch. With a coupling, labels are drawn for the whole mini-batch, alike on all processes, and
    an example's own loss is zero on those that do not have it.
    """

    labels: Labels
    likelihood: Likelihood
    seed: int
    generator: torch.Generator
    coupling: Coupling | None = None
    draws: int = 1
    _outputs: dict[torch.Size, torch.Size] = field(default_factory=dict)  # shapes, by that of the labels

    def begin_batch(self, number: int) -> None:
        """Begin with a batch, whose number in the pass fixes its draws, whichever process has it."""
        digest = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=4).digest()
        self.generator.manual_seed(int.from_bytes(digest, "big"))

    def of(self, output: Tensor, batch: Any) -> Iterator[tuple[Tensor, float, bool]]:
        """Yield gradients of losses with respect to the output, the weight of each, and whether more may follow."""
        if self.labels == "sampled":
            for draw in range(1, self.draws + 1):
                yield self.likelihood.score(output, self._sample(output)), 1 / self.draws, draw < self.draws
        elif self.labels == "empirical":
            yield self.likelihood.score(output, self._given(output, batch)), 1.0, False
        else:
            for root in self.likelihood.root(output):
                for example in self._examples(output.shape[0]):
                    one = torch.zeros_like(root)
                    if example is not None:
                        one[example] = root[example]
                    yield one.to(output.dtype), 1.0, True

    def check(self, batch: Any) -> None:
        """Raise XkfacError for true labels that the likelihood cannot have, from the second batch of a shape on.

        Looking at their values synchronises the device, which the work on a batch must not do: it may be recorded.
        """
        labels = labels_of(batch) if self.labels == "empirical" else None
        if isinstance(labels, Tensor) and labels.shape in self._outputs:
            self.likelihood.check_labels(labels, self._outputs[labels.shape])

    def _given(self, output: Tensor, batch: Any) -> Tensor:
        """Return the true labels, of a shape that comes for the first time checked against the output."""
        labels = labels_of(batch)
        if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.shape[0] != output.shape[0]:
            raise XkfacError(f"labels='empirical' needs a tensor of {output.shape[0]} labels in each batch")
        if self._outputs.get(labels.shape) != output.shape:
            self.likelihood.check_labels(labels, output.shape)
            self._outputs[labels.shape] = output.shape
        return labels

    def _sample(self, output: Tensor) -> Tensor:
        if self.coupling is None:
            return self.likelihood.sample(output, self.generator)
        return self.coupling.own(self.likelihood.sample(self.coupling.rows(output.detach()), self.generator))

    def _examples(self, size: int) -> Iterator[int | None]:
        """Yield the places of the mini-batch's examples in this process's part, None for those of other processes."""
        if self.coupling is None:
            yield from range(size)
            return
        for rank, theirs in enumerate(self.coupling.sizes):
            yield from (example if rank == self.coupling.processes.rank else None for example in range(theirs))
