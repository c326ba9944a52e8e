"""The client's half of P1, P3 and P13: operation numbers, watermarks, staging on loan."""

from __future__ import annotations

import math

import pytest

from ptstore_mpi import _native
from ptstore_mpi.protocol.context import Ledger, Transfer

PAGE = 4096


@pytest.fixture
def ledger():
    return Ledger(7, _native.RegionAllocator(4 * PAGE))


def started(ledger, token, op, server, extent):
    ledger.start(token, Transfer(op, (server,), extent))


def test_numbers_grow_and_are_never_used_again(ledger):
    first = ledger.open()
    ledger.close(first)
    second = ledger.open()
    third = ledger.open()
    assert first < second < third
    assert ledger.key(third, 0, attempt=2)[:3] == (7, third, 2)


def test_low_without_anything_live_is_the_next_number(ledger):
    assert ledger.low(0) == 1
    op = ledger.open()
    assert ledger.low(0) == 2, "an operation is live only where it was sent"
    ledger.close(op)
    assert ledger.low(0) == 2


def test_low_is_per_server(ledger):
    old, new = ledger.open(), ledger.open()
    ledger.key(old, 0)
    ledger.key(new, 1)
    assert (ledger.low(0), ledger.low(1), ledger.low(2)) == (old, new, new + 1)
    ledger.close(old)
    assert (ledger.low(0), ledger.low(1)) == (new + 1, new)


def test_a_request_never_carries_a_low_above_its_own_operation(ledger):
    old, new = ledger.open(), ledger.open()
    assert ledger.key(new, 0)[3] == new
    assert ledger.key(old, 0)[3] == old
    assert ledger.key(new, 0)[3] == old


def test_a_transfer_keeps_its_operation_low_after_it_ended(ledger):
    """Counterexample 17: low raised while own writes are in flight."""
    op = ledger.open()
    ledger.key(op, 0)
    extent = ledger.borrow(PAGE)
    started(ledger, 1, op, 0, extent)
    started(ledger, 2, op, 0, extent)
    ledger.close(op)
    later = ledger.open()
    assert ledger.key(later, 0)[3] == op
    assert ledger.key(later, 1)[3] == later, "the transfer is into server 0 only"
    ledger.finish([1])
    assert ledger.low(0) == op
    ledger.finish([2])
    assert ledger.low(0) == later


def test_key_of_a_closed_operation_does_not_make_it_live_again(ledger):
    op = ledger.open()
    ledger.key(op, 0)
    ledger.close(op)
    assert ledger.key(op, 0) == (7, op, 0, op + 1), "what an abandon carries"
    assert ledger.low(0) == op + 1


def test_staging_is_lent_until_released_and_idle(ledger):
    extent = ledger.borrow(PAGE + 1)
    other = ledger.borrow(2 * PAGE)
    assert ledger.borrow(1) is None
    started(ledger, 1, 1, 0, extent)
    started(ledger, 2, 1, 0, extent)
    ledger.give_back(extent)
    assert ledger.borrow(1) is None
    ledger.finish([1])
    assert ledger.borrow(1) is None, "one transfer still uses it"
    ledger.finish([2])
    assert ledger.borrow(2 * PAGE).offset == extent.offset
    started(ledger, 3, 1, 0, other)
    ledger.finish([3])
    assert ledger.borrow(1) is None, "it was not given back"
    ledger.give_back(other)
    assert ledger.borrow(2 * PAGE).offset == other.offset


def test_transfer_count(ledger):
    extent = ledger.borrow(1)
    for token in range(3):
        started(ledger, token, 1, token % 2, extent)
    assert ledger.transfer_count == 3
    ledger.finish([0, 2])
    assert ledger.transfer_count == 1
    assert ledger.low(1) == 1 < math.inf
