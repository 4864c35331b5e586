"""A limited number of Kronecker products for many tasks."""

import pytest
import torch

from xkfac.curvature.blocks import KhatriRao, Kronecker, Term
from xkfac.curvature.operator import Curvature


def _random_tasks(kind, count):
    """Return curvatures of one task each, some alike: a plain product, two terms of which one is a root, or a joint."""
    tasks = []
    for place in range(count):
        torch.manual_seed(place % 3)
        scale = 1 + 0.1 * place
        (a, h), (root, g) = ((torch.randn(1, 9, 5).double(), torch.randn(1, 9, 4).double()) for _ in range(2))
        terms = [Term(scale * a.mT @ a, h.mT @ h)]
        if kind == "root":
            terms.append(Term(root[:, :1], scale * g.mT @ g, True))
        if kind == "joint":
            tasks.append(Curvature({}, KhatriRao(tuple(terms), (1, 3), (2, 3)), ("a", "b")))
        else:
            tasks.append(Curvature({"a": Kronecker(tuple(terms))}))
    return tasks


@pytest.mark.parametrize("kind", ["plain", "root", "joint"])
@pytest.mark.parametrize("keep", [2, 3])
def test_of_more_tasks_than_are_kept_those_are_averaged_whose_average_is_nearest_to_their_sum(kind, keep):
    def dense(curvature):
        return curvature.joint.dense() if kind == "joint" else curvature.blocks["a"].dense()[0]

    def scaled(curvature, weight):
        joint = curvature.joint and curvature.joint.scale(weight)
        blocks = {name: block.scale(weight) for name, block in curvature.blocks.items()}
        return Curvature(blocks, joint, curvature.joint_units)

    first, *rest = _random_tasks(kind, 6)
    found, expected = first, [first]
    for new in rest:
        found = found.extend(new, 0.7, 0.6, homogeneous=(), keep=keep)
        expected = [scaled(one, 0.7) for one in expected] + [scaled(new, 0.6)]
        if len(expected) > keep:
            pairs = [(i, j) for i in range(len(expected)) for j in range(i)]
            merged = {(i, j): expected[j].extend(expected[i], 1, 1, homogeneous=()) for i, j in pairs}
            error = {p: (dense(merged[p]) - sum(dense(expected[i]) for i in p)).norm().item() for p in pairs}
            best = min(pairs, key=lambda p: error[p])
            expected = [one for place, one in enumerate(expected) if place not in best] + [merged[best]]
    assert len(expected) == keep
    total = dense(found)
    torch.testing.assert_close(total, sum(dense(one) for one in expected), rtol=1e-9, atol=1e-9)
    assert torch.linalg.eigvalsh(total).min() > -1e-9 * total.norm()
