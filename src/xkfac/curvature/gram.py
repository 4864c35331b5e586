"""Gram matrices, accumulated: each symmetric product is computed once, in stripes of its upper triangle.

Also here: symmetric matrices packed as triangles, for files and other processes.
"""

import math

import torch
from torch import Tensor

from xkfac.curvature.products import add_product_, in_rows, rounded, summed_in

_MANY = 256  # vectors: a product of fewer costs no more in full precision


def stripe_of(features: int, device: torch.device) -> int:
    """Return how many rows of a Gram matrix are one product.

    A stripe starts at the diagonal, so that many stripes come near half of the multiplications. On a CPU a product of
    some 100 rows runs at full speed, and for small matrices one of 64 saves more than it costs; on a GPU one has to be
    large to fill the device, and every one is a launch. Stripes are of about one height, a multiple of 16 rows.
    """
    most = 1024 if device.type != "cpu" else 128 if features > 256 else 64
    if features <= most:
        return max(features, 1)
    return 16 * -(-features // (-(-features // most) * 16))


def add_gram(total: Tensor, vectors: Tensor, scale: float = 1.0) -> None:
    """Add scale * V V^T to the upper triangle of `total` [groups, F, F], for V [groups, F, K]; below it is void."""
    features = vectors.shape[1]
    stripe = stripe_of(features, vectors.device)
    if stripe == features:
        add_product_(total, vectors, vectors.mT, scale)
        return
    vectors = in_rows(vectors)
    for start in range(0, features, stripe):
        part = slice(start, start + stripe)
        add_product_(total[:, part, start:], vectors[:, part], vectors[:, start:].mT, scale)


def mirror_(upper: Tensor) -> Tensor:
    """Make matrices [groups, F, F] exactly symmetric by their upper triangle, in place, stripe by stripe."""
    features = upper.shape[1]
    stripe = stripe_of(features, upper.device)
    for start in range(0, features, stripe):
        stop = min(features, start + stripe)
        corner = upper[:, start:stop, start:stop]
        corner.copy_(corner.triu() + corner.triu(1).mT)
        upper[:, stop:, start:stop] = upper[:, start:stop, stop:].mT
    return upper


def triangle(matrix: Tensor) -> Tensor:
    """Return the lower triangle of symmetric matrices [..., F, F], row by row, as [..., F (F + 1) / 2]."""
    rows = [row.narrow(-1, 0, place) for place, row in enumerate(matrix.unbind(-2), 1)]
    return torch.cat(rows, -1) if rows else matrix.flatten(-2)


def size_of(packed: Tensor) -> int:
    """Return F for packed triangles [..., F (F + 1) / 2]."""
    return (math.isqrt(8 * packed.shape[-1] + 1) - 1) // 2


def symmetric(packed: Tensor) -> Tensor:
    """Return the symmetric matrices [..., F, F] of packed triangles [..., F (F + 1) / 2]."""
    size = size_of(packed)
    matrix = packed.new_empty(*packed.shape[:-1], size, size)
    lower = torch.ones(size, size, dtype=torch.bool, device=packed.device).tril_()
    matrix.masked_scatter_(lower, packed)
    mirror_(matrix.view(math.prod(packed.shape[:-1]), size, size).mT)
    return matrix


class Gram:
    """Accumulates sum of scale * v v^T over vectors v, [groups, F, F].

    On a CPU few vectors at a time wait for more: every product reads and writes the whole matrix, which is larger than
    a cache. On a GPU a thin product costs no more than the copy that would let it wait, and waiting cannot be replayed.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._waiting: Tensor | None = None
        self._count = 0
        self._scale = 1.0

    def add(self, blocks: Tensor, scale: float = 1.0) -> None:
        """Take the vectors [groups, ., ., F]; `scale` may be negative."""
        count, features = blocks.shape[1] * blocks.shape[2], blocks.shape[3]
        room = 512 if features >= 512 else 128
        if not blocks.is_cuda and scale > 0 and count < room:
            self._wait(blocks.flatten(1, 2), scale, room)
            return
        blocks = rounded(blocks) if count >= _MANY else blocks
        # Vectors are rows or columns as they lie in memory, so that none is transposed on the way.
        by_features = blocks.stride(3) == 1 or features == 1
        vectors = blocks.flatten(1, 2).mT if by_features else blocks.permute(0, 3, 1, 2).flatten(2)
        self._accumulate(vectors, scale)

    def _wait(self, rows: Tensor, scale: float, room: int) -> None:
        """Keep a copy of the rows [groups, ., F] until there are `room` of them, or others count another scale."""
        if self._waiting is None:
            self._waiting = rows.new_empty(rows.shape[0], room, rows.shape[2])
        if self._count + rows.shape[1] > room or scale != self._scale:
            self._flush()
            self._scale = scale
        self._waiting.narrow(1, self._count, rows.shape[1]).copy_(rows)
        self._count += rows.shape[1]

    def _flush(self) -> None:
        if self._waiting is not None and self._count:
            self._accumulate(self._waiting[:, : self._count].mT, self._scale)
            self._count = 0

    def _accumulate(self, vectors: Tensor, scale: float) -> None:
        if self._total is None:
            dtype = summed_in(vectors.dtype)
            self._total = vectors.new_zeros(vectors.shape[0], vectors.shape[1], vectors.shape[1], dtype=dtype)
        add_gram(self._total, vectors, scale)

    def sum(self) -> Tensor | None:
        """Return the sum, exactly symmetric, which later vectors are added to; None if nothing was taken."""
        self._flush()
        return None if self._total is None else mirror_(self._total)
