"""What a curve of source kept against target learnt reaches, and the area below, against brute force."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkfac.experiments.report.tradeoff_tables import area, reach

NUMBERS = st.floats(0, 1.2).map(lambda number: round(number, 3))
CURVES = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6)


def brute_reach(curve, kept, steps=500):
    """The largest share of many points that lie close together on the curve and keep at least `kept`."""
    close = [curve[0]]
    for (x, y), (u, v) in pairwise(curve):
        close += [(x + (u - x) * i / steps, y + (v - y) * i / steps) for i in range(1, steps)]
        close += [(u, v)]
    return max((y for x, y in close if x >= kept), default=None)


@settings(max_examples=60, deadline=None)
@given(CURVES, NUMBERS)
def test_what_is_reached_is_the_best_of_all_points_of_the_curve_that_keep_enough(curve, kept):
    found, brute = reach(curve, kept), brute_reach(curve, kept)
    if brute is None:
        assert found is None
        return
    assert found >= brute - 1e-9
    # Between two points of the brute force a steep line can rise: it keeps a little less by then.
    assert found <= brute_reach(curve, kept - 5e-3) + 6e-3


@settings(max_examples=60, deadline=None)
@given(CURVES)
def test_the_area_is_that_below_what_is_reached(curve):
    steps = 800
    heights = [reach(curve, (i + 0.5) / steps) or 0.0 for i in range(steps)]
    # What is reached never grows, so that a sum over strips is off by one strip of its height at most.
    assert area(curve) == pytest.approx(math.fsum(heights) / steps, abs=1.3 / steps)


@settings(max_examples=60, deadline=None)
@given(CURVES, st.tuples(NUMBERS, NUMBERS))
def test_more_points_at_the_end_never_reach_less(curve, point):
    longer = [*curve, point]
    assert area(longer) >= area(curve) - 1e-12
    assert area(curve[::-1]) == pytest.approx(area(curve), abs=1e-12)
    assert all((reach(longer, i / 20) or 0) >= (reach(curve, i / 20) or 0) for i in range(24))


@settings(max_examples=60, deadline=None)
@given(CURVES)
def test_what_is_reached_never_grows_with_what_is_asked_for(curve):
    heights = [reach(curve, i / 50) for i in range(61)]
    ended = [height is None for height in heights]
    assert ended == sorted(ended)
    there = [height for height in heights if height is not None]
    assert there == sorted(there, reverse=True) or max(
        later - earlier for earlier, later in pairwise(there)
    ) == pytest.approx(0, abs=1e-12)


def test_by_hand():
    curve = [(0.4, 1.0), (0.8, 0.8), (1.0, 0.4)]
    assert reach(curve, 0.3) == 1.0, "all points keep more than asked for"
    assert reach(curve, 0.6) == pytest.approx(0.9)
    assert reach(curve, 0.9) == pytest.approx(0.6)
    assert reach(curve, 1.0) == pytest.approx(0.4)
    assert reach(curve, 1.01) is None, "nothing is extrapolated"
    assert area(curve) == pytest.approx(0.4 * 1.0 + 0.4 * 0.9 + 0.2 * 0.6)
    assert area([(0.5, 0.8)]) == pytest.approx(0.4)
    assert area([(1.1, 0.8)]) == pytest.approx(0.8), "what is kept beyond the source's own counts as all of it"
    assert area([]) == 0.0
    assert reach([], 0.5) is None


def test_a_curve_that_bends_back_counts_where_it_is_best():
    """A strength too weak for its steps can lose on both axes: the best point that keeps enough counts."""
    assert reach([(0.5, 0.9), (0.9, 0.95), (0.8, 0.5)], 0.6) == 0.95
    assert area([(0.5, 0.9), (0.9, 0.95), (0.8, 0.5)]) == pytest.approx(0.9 * 0.95)
