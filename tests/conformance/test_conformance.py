"""The shipped conformance suite over the transports that need no launcher."""

from __future__ import annotations

import pytest

from ptstore_mpi.testing.conformance import CASES, run_case
from ptstore_mpi.testing.oracle import Oracle

TRANSPORTS = ("local", "sim")
LOAD_NO_BYTES = {"cold", "tokens_of_all_kinds", "too_large", "closed"}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CASES)
def test_conformance(name, transport):
    run_case(CASES[name], transport)


def test_wrong_bytes_are_seen(monkeypatch):
    """A store that keeps other bytes than it was given fails every case that loads any."""
    right = Oracle.arrays
    monkeypatch.setattr(
        Oracle, "arrays", lambda self, tokens: [array ^ 1 for array in right(self, tokens)]
    )
    passed = set()
    for case in CASES.values():
        try:
            run_case(case, "sim")
        except AssertionError:
            continue
        passed.add(case.name)
    assert passed == LOAD_NO_BYTES
