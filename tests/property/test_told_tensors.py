"""Loads layer by layer, from anywhere, stopped by the clock anywhere: what is told is right."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from ptstore_mpi import KVLayout, TensorSpec
from ptstore_mpi.protocol import plan
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import small_config
from ptstore_mpi.testing.oracle import Oracle

BLOCKS = 12
PROMPT = np.arange(4 * BLOCKS + 1)
STORED = st.lists(st.tuples(st.integers(0, 1), st.integers(1, BLOCKS)), min_size=1, max_size=5)


@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    stored=STORED,
    skip=st.integers(0, BLOCKS),
    verify=st.sampled_from(["off", "remote", "always"]),
    replicas=st.sampled_from(["never", "always"]),
    band_bytes=st.integers(1, 2000),
    expires=st.integers(0, 150),
    dropped=st.booleans(),
)
def test_what_is_told_is_there(sizes, stored, skip, verify, replicas, band_bytes, expires, dropped):
    layout = KVLayout(tuple(TensorSpec(f"t{i}", size) for i, size in enumerate(sizes)), 4)
    config = small_config(
        slots=40, placement="local", verify=verify, replica_admission=replicas, load_timeout_s=5.0
    )
    cluster = Cluster(config)
    one, two = (cluster.store(client).namespace("m", layout) for client in cluster.clients)
    oracle = Oracle(layout)
    for owner, blocks in stored:
        prompt = PROMPT[: 4 * blocks]
        (one, two)[owner].store(prompt, oracle.arrays(prompt))
    match = one.match(PROMPT)
    blocks = match.tokens // 4
    right = oracle.arrays(PROMPT[: match.tokens])
    out = oracle.blank(blocks)
    if dropped:
        two.drop_tail(match)
    told = []

    def progress(count):
        assert count > (told[-1] if told else 0)
        assert all(np.array_equal(out[i][skip:], right[i][skip:]) for i in range(count))
        told.append(count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "BAND_BYTES", band_bytes)
        patch.setattr(plan, "COPY_BYTES", 1)
        operation = cluster.start(
            cluster.clients[0], one.loading(match, out, skip_tokens=4 * skip, progress=progress)
        )
        for step in range(1000):
            if step == expires:
                cluster.advance(6.0)
            if operation.done:
                break
            operation.step()
    result = operation.finish()
    assert (told[-1:] == [len(sizes)]) == (result.reason == "loaded")
    assert len(told) <= plan.BAND_COUNT
    assert all(np.array_equal(out[i][skip:], right[i][skip:]) for i in range(max(told, default=0)))
    assert result.tokens >= 4 * skip
    oracle.check(PROMPT, out, until_tokens=max(result.tokens, 4 * skip), from_tokens=4 * skip)
