"""Every block's operations against its dense matrix."""

import pytest
import torch

from xkfac.curvature.blocks import (
    Corrected,
    Diagonal,
    KhatriRao,
    Kronecker,
    Term,
    assemble,
    eigenbasis,
    khatri_rao,
    parts,
    root_term,
    symmetrised,
)
from xkfac.errors import XkfacError

GROUPS, ROWS, COLUMNS = 2, 3, 8


def psd(size, groups=GROUPS):
    root = torch.randn(groups, size + 1, size).double()
    return symmetrised(root.mT @ root)


def kronecker():
    return Kronecker((Term(psd(COLUMNS), psd(ROWS)), root_term(torch.randn(GROUPS, 1, COLUMNS).double(), psd(ROWS))))


def corrected():
    basis = eigenbasis(psd(COLUMNS), psd(ROWS))
    return Corrected(basis.left, basis.right, basis.left_values, basis.right_values, basis.scales.square())


BLOCKS = {
    "kronecker": kronecker,
    "diagonal": lambda: Diagonal(torch.rand(GROUPS, ROWS, COLUMNS).double()),
    "corrected": corrected,
}


def vec(matrix):
    """Return vec of [groups, C, D], rows fastest."""
    return matrix.mT.flatten(1)


@pytest.mark.parametrize("kind", BLOCKS)
def test_product_and_diagonal_are_those_of_the_dense_matrix(kind):
    block, v = BLOCKS[kind](), torch.randn(GROUPS, ROWS, COLUMNS).double()
    dense = block.dense()
    torch.testing.assert_close(dense, dense.mT)
    torch.testing.assert_close(vec(block.product(v)), (dense @ vec(v).unsqueeze(2)).squeeze(2))
    torch.testing.assert_close(vec(block.diagonal()), dense.diagonal(dim1=1, dim2=2))


@pytest.mark.parametrize("kind", BLOCKS)
def test_scale_and_parts(kind):
    block = BLOCKS[kind]()
    torch.testing.assert_close(block.scale(0.3).dense(), 0.3 * block.dense())
    again = assemble(type(block), parts(block))
    assert all(torch.equal(a, b) for a, b in zip(parts(block).values(), parts(again).values(), strict=True))
    assert torch.equal(again.dense(), block.dense())


def test_dense_matrix_follows_the_definition_of_the_kronecker_product():
    block = kronecker()
    expected = [
        sum(torch.kron(term.dense_left[g].contiguous(), term.right[g].contiguous()) for term in block.terms)
        for g in range(GROUPS)
    ]
    torch.testing.assert_close(block.dense(), torch.stack(expected))


def test_join_is_the_exact_sum():
    a, b = kronecker(), kronecker()
    torch.testing.assert_close(a.join(b).dense(), a.dense() + b.dense())
    d, e = BLOCKS["diagonal"](), BLOCKS["diagonal"]()
    torch.testing.assert_close(d.join(e).dense(), d.dense() + e.dense())
    with pytest.raises(XkfacError, match="cannot keep all terms"):
        corrected().join(corrected())


def test_average_of_corrected_blocks_is_the_diagonal_of_the_sum_in_the_new_basis():
    a, b = corrected(), corrected()
    averaged = a.average(b, 0.75, 0.25)
    basis = torch.stack([torch.kron(averaged.left[g], averaged.right[g]) for g in range(GROUPS)])
    total = 0.75 * a.dense() + 0.25 * b.dense()
    torch.testing.assert_close(vec(averaged.scales), (basis.mT @ total @ basis).diagonal(dim1=1, dim2=2))
    # The basis is that of the average of the two products of factors.
    both = (
        Kronecker((Term(*((u * v[:, None]) @ u.mT for u, v in ((c.left, c.left_values), (c.right, c.right_values)))),))
        for c in (a, b)
    )
    (factors,) = next(both).average(next(both), 0.75, 0.25).terms
    for side, found in (("left", factors.left), ("right", factors.right)):
        vectors, values = getattr(averaged, side), getattr(averaged, f"{side}_values")
        torch.testing.assert_close(vectors * values[:, None] @ vectors.mT, found)


def test_roots_stay_roots_only_while_they_are_cheaper():
    right = psd(ROWS)
    assert root_term(torch.randn(GROUPS, 2, COLUMNS).double(), right).low_rank
    assert not root_term(torch.randn(GROUPS, 3, COLUMNS).double(), right).low_rank


def test_khatri_rao_blocks():
    rows, columns = (2, 1, 3), (3, 2, 2)
    block = KhatriRao(tuple(Term(psd(7, 1), psd(6, 1)) for _ in range(2)), rows, columns)
    moves = [torch.randn(1, r, c).double() for r, c in zip(rows, columns, strict=True)]
    flat = torch.cat([vec(move)[0] for move in moves])
    products = torch.cat([vec(product)[0] for product in block.product(moves)])
    dense = block.dense()
    torch.testing.assert_close(products, dense @ flat)
    assert torch.linalg.eigvalsh(dense).min() > -1e-9
    corner = sum(torch.kron(t.left[0, :3, :3].contiguous(), t.right[0, :2, :2].contiguous()) for t in block.terms)
    torch.testing.assert_close(dense[:6, :6], corner)
    place = 0
    for unit, (row, column) in enumerate(zip(rows, columns, strict=True)):
        own = slice(place, place := place + row * column)
        torch.testing.assert_close(block.own_block(unit).dense()[0], block.dense()[own, own])
    again = khatri_rao(parts(block), rows, columns)
    assert torch.equal(again.dense(), dense)
    torch.testing.assert_close(block.scale(2.0).join(block).dense(), 3 * dense)
    torch.testing.assert_close(block.average(block, 0.5, 0.5).dense(), dense)


def test_blocks_of_different_numbers_of_terms_have_no_average():
    with pytest.raises(XkfacError, match="2 and 1 terms have no average"):
        kronecker().average(Kronecker((Term(psd(COLUMNS), psd(ROWS)),)), 0.5, 0.5)
