"""Where backward passes begin: random signs at the output, or scores of labels that are drawn, given, or all.

Also here: how many draws are made per batch.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xkfac.curvature.moments import Draw
from xkfac.curvature.operator import DRAWN, Labels, Settings
from xkfac.curvature.processes import Processes
from xkfac.errors import XkfacError, XkfacWarning
from xkfac.model.batches import labels_of
from xkfac.model.likelihood import Categorical, Likelihood
from xkfac.model.streams import counted


def warn_of_labels(likelihood: Likelihood, batch: Any, output: Tensor) -> None:
    """Warn of true labels that are numbers, not classes or their probabilities, where the likelihood is categorical."""
    try:
        labels = labels_of(batch)
    except XkfacError:
        return
    if not isinstance(likelihood, Categorical) or not isinstance(labels, Tensor):
        return
    if not labels.is_floating_point() or labels.shape != output.shape:
        return
    if bool((labels < 0).any()) or bool(((labels.sum(1) - 1).abs() > 1e-2).any()):
        warnings.warn(
            "the labels are numbers, one per output, and likelihood='categorical' is for classes; pass the likelihood "
            "of your loss, such as xkfac.Bernoulli(mean=True) or xkfac.Gaussian(variance=...)",
            XkfacWarning,
            stacklevel=2,
        )


@dataclass
class Cotangents:
    """Yields what backward passes begin with, batch by batch.

    `draws` are those per batch.
    """

    labels: Labels
    likelihood: Likelihood
    seed: int
    generator: torch.Generator
    draws: int
    _outputs: dict[torch.Size, torch.Size] = field(default_factory=dict)  # shapes, by that of the labels

    def begin_batch(self, number: int) -> None:
        """Begin with a batch, whose number in the pass fixes its draws, whichever process has it."""
        digest = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=4).digest()
        self.generator.manual_seed(int.from_bytes(digest, "big"))

    def of(self, output: Tensor, batch: Any) -> Iterator[tuple[Tensor, Draw, bool]]:
        """Yield what backward passes begin with at the output, what each stands for, and whether more may follow."""
        scale = 1 / self.likelihood.predictions(output)
        if self.labels in DRAWN:
            for place in range(self.draws):
                draw = Draw(scale / self.draws, place, self.draws)
                yield self._drawn(output), draw, place + 1 < self.draws
        elif self.labels == "empirical":
            yield self.likelihood.score(output, self._given(output, batch)), Draw(scale), False
        else:
            for root in self.likelihood.root(output):
                for example in range(output.shape[0]):
                    one = torch.zeros_like(root)
                    one[example] = root[example]
                    yield one.to(output.dtype), Draw(scale), True

    def _drawn(self, output: Tensor) -> Tensor:
        if self.labels == "signs":
            return self.likelihood.random_root(output, self.generator)
        return self.likelihood.score(output, self.likelihood.sample(output, self.generator))

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


class Draws:
    """The number of draws `per_batch` in one pass, the same on all processes that share it.

    Where the settings leave it open, it goes by the number of batches of all processes. A loader that does not say its
    length is read ahead to count them, so that a stream gives what a list of the same batches gives.
    """

    def __init__(self, settings: Settings, processes: Processes | None) -> None:
        self.settings, self.processes = settings, processes
        self.per_batch = settings.draws_over(0)
        self._counted = True

    def decide(self, loader: Iterable[Any], max_batches: int | None) -> Iterable[Any]:
        """Decide on the number, and return the loader to iterate, of which batches may have been read ahead.

        Where the loader of another process has failed, there is nothing to iterate.
        """
        if not self.settings.draws_are_open:
            return loader
        enough = self.settings.enough_draws
        most = enough if max_batches is None else min(max_batches, enough)
        count, error = None, None
        try:
            loader, count = counted(loader, most)
        except Exception as caught:
            if self.processes is None:
                raise
            error = caught
        own = (most if count is None else count, count is not None, error is not None)
        every = [own] if self.processes is None else self.processes.exchanged(own)
        if error is not None:
            raise error
        self._counted = all(known for _, known, _ in every)
        self.per_batch = self.settings.draws_over(sum(number for number, _, _ in every))
        return () if any(failed for _, _, failed in every) else loader

    def check(self, batches: Sequence[int]) -> None:
        """Make sure that the number goes with the batches that came, by process.

        Raises XkfacError for a stream that was too large to be counted, and had fewer batches than was assumed.
        """
        count = sum(batches)
        right = self.settings.draws_over(count)
        if right == self.per_batch:
            return
        if not self._counted:
            raise XkfacError(
                f"the loader gave {count} batches, for which draws=None means {right} draws per batch, but this was "
                "known too late: it does not say its length, and its batches are too large to be read ahead; pass "
                f"draws={right}"
            )
        if self.processes is None or self.processes.rank == 0:
            warnings.warn(
                f"the loader gave {count} batches, which is not the length that it said, so there were "
                f"{self.per_batch} draws per batch and not {right}; correct its length, or pass draws={right}",
                XkfacWarning,
                stacklevel=2,
            )
