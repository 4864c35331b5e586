"""Loaders whose first batches are read ahead: to count those that do not say their length, or to look at a batch."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from xkfac.errors import XkfacError
from xkfac.model.batches import cloned, tensors
from xkfac.model.passes import NO_BATCH, check_loader, count_batches

READ_AHEAD_BYTES = 2**30
_END = object()


class Stream:
    """The batches of a loader, the first of which have been read: at most `most`, and about `READ_AHEAD_BYTES`.

    They are copies: a loader may write its next batch where the last one was, and tensors from workers hold files open.

    count: how many batches there are if they are fewer than `most`, else `most`; None if too large to read so far.

    Raises XkfacError for a loader that is no iterable.
    """

    def __init__(self, loader: Iterable[Any], most: int) -> None:
        check_loader(loader)
        self._loader, self._rest = loader, iter(loader)
        self._ahead: deque[Any] = deque()
        self._ended = False
        room = READ_AHEAD_BYTES
        while len(self._ahead) < most and room > 0 and not self._ended:
            batch = next(self._rest, _END)
            if batch is _END:
                self._ended = True
            else:
                self._ahead.append(cloned(batch))
                room -= sum(tensor.numel() * tensor.element_size() for tensor in tensors(batch))
        known = self._ended or len(self._ahead) == most
        self.count = len(self._ahead) if known else None

    @property
    def first(self) -> Any:
        """The first batch; raises XkfacError where there is none."""
        if not self._ahead:
            raise XkfacError(NO_BATCH)
        return self._ahead[0]

    def __iter__(self) -> Iterator[Any]:
        while self._ahead:
            yield self._ahead.popleft()
        yield from self._rest

    def __len__(self) -> int:
        length = self.count if self._ended else count_batches(self._loader, None)
        if length is None:
            raise TypeError("the loader does not say its length")
        return length


def counted(loader: Iterable[Any], most: int) -> tuple[Iterable[Any], int | None]:
    """Return a loader to iterate in place of `loader`, and how many batches it has, counted up to `most`.

    The number is the same for a list and for a stream of the same batches. It is None for a stream of batches that are
    too large to be read ahead.
    """
    # The length of a DataLoader over a stream is a guess: each worker may end with a smaller batch.
    guess = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    length = None if guess else count_batches(loader, None)
    if length is not None:
        return loader, min(length, most)
    stream = Stream(loader, most)
    return stream, stream.count
