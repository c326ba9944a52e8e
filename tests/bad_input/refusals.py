"""What a refusal must look like, and a store that must be unharmed by it."""

from __future__ import annotations

import itertools
import re
import traceback
from pathlib import Path

import numpy as np
import pytest

import ptstore_mpi as pt
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import SMALL, small_config
from ptstore_mpi.testing.oracle import Oracle

OURS = ("ptstore_mpi", "experiments", "plots")
FOREIGN = re.compile(r"site-packages/(numpy|mpi4py|nanobind|h5py|msgspec|torch)/")
REPOSITORY = Path(__file__).resolve().parents[2]
QUIET = ("leased_bytes", "reserved_bytes", "zombie_bytes", "live_reservation_count")


def check_refusal(error, *said):
    """Check that an error is ours: its class, who raised it, what its traceback shows, and says."""
    assert isinstance(error, pt.PTStoreError | TypeError | ValueError), repr(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = Path(frame.filename)
    assert where.is_relative_to(REPOSITORY), f"{error!r} was raised at {where}:{frame.lineno}"
    where = where.relative_to(REPOSITORY)
    assert where.parts[0] in OURS, f"{error!r} was raised at {where}:{frame.lineno}"
    raised = f"{where}:{frame.lineno}: {frame.line}"
    assert frame.line.startswith("raise "), f"{error!r} is not raised by a check, but by {raised}"
    shown = "".join(traceback.format_exception(error))
    assert not FOREIGN.search(shown), shown
    assert len(str(error)) < 2000, f"an endless message: {str(error)[:200]}"
    for words in said:
        assert re.search(words, str(error)), f"expected {words!r} in: {error}"


def refused(call, error, *said):
    """Check that ``call`` raises exactly ``error``, by a check of ours that says all of ``said``.

    ``said``: what was expected and what was given, as regular expressions.
    """
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error, repr(caught.value)
    check_refusal(caught.value, *said)
    return str(caught.value)


def refused_or_done(call):
    """Return what ``call`` returns, or None where it refuses as it should."""
    try:
        return call()
    except Exception as error:
        check_refusal(error)
        return None


class Bench:
    """A client of a store that knows one prompt: `prompt`, with its KV and its match."""

    def __init__(self, store):
        self.store = store
        self.namespace = store.namespace("model", SMALL)
        self.oracle = Oracle(SMALL)
        self.prompt = np.arange(32)
        self.kv = self.oracle.arrays(self.prompt)
        assert self.namespace.store(self.prompt, self.kv).reason == "stored"
        self.match = self.namespace.match(np.append(self.prompt, 99))
        assert self.match.tokens == 32
        self._fresh = itertools.count(1_000_000, 1000)
        self._before = self._kept()

    def out(self):
        """Return memory for the whole prompt."""
        return self.oracle.blank(8)

    def fresh(self, count=16):
        """Return a prompt that nobody knows, and its KV."""
        prompt = np.arange(count) + next(self._fresh)
        return prompt, self.oracle.arrays(prompt)

    def check_unharmed(self):
        """Check that nothing was kept or lost, nothing is held, and storing and loading work."""
        assert self._kept() == self._before
        out = self.out()
        result = self.namespace.load(self.match, out)
        assert (result.tokens, result.reason) == (32, "loaded")
        self.oracle.check(self.prompt, out, until_tokens=32)
        prompt, kv = self.fresh(8)
        assert self.namespace.store(prompt, kv).reason == "stored"
        match, out = self.namespace.match(np.append(prompt, 0)), self.oracle.blank(2)
        assert self.namespace.load(match, out).tokens == 8
        self.oracle.check(prompt, out, until_tokens=8)
        assert self.namespace.drop_tail(match) is True
        assert self._kept() == self._before
        ledger = self.store._context.ledger
        assert ledger._staging.free_bytes == ledger.staging_bytes, "staging memory is lent"
        assert not ledger._open, "an operation is open"

    def _kept(self):
        servers = self.store.server_stats()
        for server in servers:
            assert not any(server[name] for name in QUIET), server
        return [(server["segment_count"], server["owned_bytes"]) for server in servers]


def sim_store():
    """Return the store of a client whose prompts lie here and on another node."""
    cluster = Cluster(small_config(slots=64), server_nodes=(0, 1), client_nodes=(0, 1))
    return cluster.store(cluster.clients[0])
