"""The binding of the eviction queue; the algorithm itself is tested in C++ against a model."""

from __future__ import annotations

import pytest

from ptstore_mpi import _native


def test_the_lowest_eligible_comes_first_and_equal_ones_in_order():
    queue = _native.EvictionQueue()
    assert queue.lowest() is None
    queue.set(2**64 - 1, 1)
    queue.set(7, 1.0)
    queue.set(8, 1.0, order=0)
    queue.set(9, -0.5)
    queue.set_eligible(9, False)
    assert (len(queue), queue.eligible_count, 9 in queue, 10 in queue) == (4, 3, True, False)
    order = []
    while (found := queue.lowest()) is not None:
        order.append(found)
        assert queue.remove(found[0])
    assert order == [(8, 1.0), (2**64 - 1, 1.0), (7, 1.0)]  # of equal orders the lower key
    assert not queue.remove(7)
    assert queue.nbytes > 0


def test_bad_arguments_are_refused_and_change_nothing():
    queue = _native.EvictionQueue()
    with pytest.raises(ValueError, match="priority of key 1 must be a number, got NaN"):
        queue.set(1, float("nan"))
    with pytest.raises(ValueError, match="key 1 is not in the queue"):
        queue.set_eligible(1, True)
    for key in (-1, 2**64, 1.5, "1"):
        with pytest.raises(TypeError):
            queue.set(key, 1.0)
    assert len(queue) == 0
