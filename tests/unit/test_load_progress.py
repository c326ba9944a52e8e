"""Loads that say which tensors are there: in bands, in order, and nothing that is not right."""

from __future__ import annotations

import numpy as np
import pytest

from ptstore_mpi import KVLayout, TensorSpec
from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import plan
from ptstore_mpi.protocol.effects import Receive, Send, StartGet, Unpack
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import small_config
from ptstore_mpi.testing.oracle import BLANK, Oracle
from ptstore_mpi.types import SegmentRef

LAYOUT = KVLayout(
    tuple(TensorSpec(f"t{i}", size) for i, size in enumerate((64, 24, 8, 40, 16, 24))), 4
)
ALL = len(LAYOUT.tensors)
PROMPT = np.arange(33)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def small_bands(monkeypatch):
    monkeypatch.setattr(plan, "BAND_BYTES", 1)
    monkeypatch.setattr(plan, "COPY_BYTES", 1)


class Reader:
    """A client that loads the 8 blocks of `PROMPT` layer by layer; ``told`` is what it heard."""

    def __init__(self, cluster, client):
        self.cluster, self.client = cluster, client
        self.namespace = cluster.store(client).namespace("m", LAYOUT)
        self.oracle = Oracle(LAYOUT)
        self.out = self.oracle.blank(8)
        self.told = []

    def store(self, prompt=PROMPT):
        return self.namespace.store(prompt, self.oracle.arrays(prompt))

    def hear(self, count):
        for tensor in range(count):
            wanted = self.oracle.blocks(PROMPT, tensor)
            assert np.array_equal(self.out[tensor], wanted), (tensor, count)
        self.told.append(count)

    def start(self, **options):
        options = {"progress": self.hear, **options}
        match = self.namespace.match(PROMPT)
        assert match.tokens == 32
        return self.cluster.start(self.client, self.namespace.loading(match, self.out, **options))


def readers(*, nodes=(0, 1), **settings):
    cluster = Cluster(small_config(placement="local", **settings), client_nodes=nodes)
    return cluster, *(Reader(cluster, client) for client in cluster.clients)


def copies(operation):
    """Finish an operation and return its copies: first byte of the image, blocks."""
    found = []
    while operation.effect is not None:
        if isinstance(operation.effect, Unpack):
            found.append((operation.effect.image.offset, operation.effect.image.block_count))
        operation.step()
    return found


@pytest.mark.parametrize(
    ("tensor_bytes", "segments", "skip", "ends"),
    [
        ([MIB] * 8, [1], 0, [2, 4, 6, 8]),
        ([MIB] * 7, [1], 0, [2, 4, 7]),
        ([MIB // 2] * 8, [1], 0, [4, 8]),
        ([MIB // 2] * 7, [1], 0, [7]),
        ([MIB // 2] * 2, [1], 0, [2]),
        ([8 * MIB], [9], 0, [1]),
        ([1] * 64, [9], 0, [64]),
        ([4 * MIB] * 64, [4], 0, [2, *range(8, 63, 6), 64]),
        ([MIB // 128] * 4, [64, 64], 0, [2, 4]),
        ([MIB // 128] * 4, [64, 64], 1, [4]),
        ([MIB // 8] * 32, [1] * 8, 0, [2, 10, 18, 26, 32]),
        ([MIB // 8] * 32, [1] * 9, 8, [16, 32]),
    ],
)
def test_bands(monkeypatch, tensor_bytes, segments, skip, ends):
    """Whole pairs of 2 MiB and more, the first of them as small as may be, sixteen at most.

    And in every segment 1 MiB, but of the first.
    """
    monkeypatch.setattr(plan, "BAND_BYTES", 2 * MIB)
    monkeypatch.setattr(plan, "COPY_BYTES", MIB)
    refs = [SegmentRef(slot << 20, blocks, b"h" * 16) for slot, blocks in enumerate(segments)]
    assert plan.band_ends(tensor_bytes, refs, skip) == ends
    assert len(ends) <= plan.BAND_COUNT


def test_tensors_are_told_of_before_the_next_are_copied():
    _, near, _ = readers()
    near.store()
    blank_then = []

    def hear(count):
        near.hear(count)
        blank_then.append([bool((array == BLANK).all()) for array in near.out[count:]])

    operation = near.start(progress=hear)
    assert len(copies(operation)) == 3 * 4, "of each segment, three bands"
    assert near.told == [2, 4, 6]
    assert blank_then == [[True] * 4, [True] * 2, []]
    assert operation.result.tokens == 32


def test_who_does_not_ask_has_whole_segments_copied():
    _, near, _ = readers()
    near.store()
    operation = near.start(progress=None)
    assert len(copies(operation)) == 4
    assert operation.result.tokens == 32


def test_skipped_blocks_are_not_waited_for():
    _, near, _ = readers()
    near.store()
    for tensor, array in enumerate(near.out):
        array[:5] = near.oracle.blocks(PROMPT, tensor)[:5]
    result = near.start(skip_tokens=20).finish()
    assert near.told == [2, 4, 6]
    assert (result.tokens, result.by_source["engine"]) == (32, 20)


@pytest.mark.parametrize("copied", range(1, 12))
def test_p12_a_lease_that_runs_out_between_bands_ends_what_is_told(copied):
    """Four segments in three bands; a segment is loaded when its last band is."""
    cluster, near, _ = readers(load_timeout_s=2.0)
    near.store()
    operation = near.start()
    for _ in range(copied):
        operation.run_to(Unpack)
        operation.step()
    operation.step()  # the clock was looked at
    cluster.advance(3.0)
    told = [2, 4, 6][: copied // 4]
    assert near.told == told
    assert len(copies(operation)) == 1, "the next one is late, and the work ends"
    assert near.told == told
    assert operation.result.tokens == 8 * max(copied - 8, 0)
    assert operation.result.reason == "late"


def test_p12_a_callback_that_takes_too_long_is_late():
    cluster, near, _ = readers(load_timeout_s=2.0)
    near.store()
    result = near.start(progress=lambda count: near.hear(count) or cluster.advance(3.0)).finish()
    assert near.told == [2]
    assert (result.tokens, result.reason) == (0, "late")


def half_far(**settings):
    """Return a cluster where `PROMPT` is half on the node of the first client."""
    cluster, near, far = readers(**settings)
    near.store(PROMPT[:16])
    far.store()
    return cluster, near


def test_nothing_is_told_before_what_comes_from_elsewhere_is_there():
    _, near = half_far()
    transport = near.namespace._transport
    transport.hold_transfers = True
    operation = near.start()
    operation.run_to(StartGet)
    while transport.in_flight_count < 1 or isinstance(operation.effect, StartGet):
        operation.step()
    for _ in range(4):
        operation.run_to(Unpack)
        operation.step()
    operation.step()
    assert near.told == [], "two bands are there, of half of the prefix"
    transport.hold_transfers = False
    transport.land()
    assert operation.finish().by_source == {
        "engine": 0, "owned": 16, "replica": 0, "remote": 16, "disk": 0
    }  # fmt: skip
    assert near.told[-1] == ALL
    assert near.told[0] >= 4


def test_all_from_elsewhere_is_told_of_at_once():
    _, near, far = readers()
    near.store()
    assert far.start().finish().tokens == 32
    assert far.told == [ALL]


def test_nothing_is_told_of_a_prefix_with_a_hole():
    """Then no tensor will be whole: segments are copied one by one, and the first ones count."""
    cluster, near, far = readers()
    near.store(PROMPT[:16])
    far.store()
    match = near.namespace.match(PROMPT)
    assert far.namespace.drop_tail(match)
    operation = cluster.start(
        near.client, near.namespace.loading(match, near.out, progress=near.hear)
    )
    result = operation.finish()
    assert (result.tokens, result.reason, near.told) == (24, "gone", [])


def test_nothing_is_told_of_corrupt_bytes():
    cluster, near = half_far()
    match = near.namespace.match(PROMPT)
    segment = cluster.servers[1].cache.find(match.segments[-1])
    cluster.memories[1][segment.offset] ^= 1
    result = near.start().finish()
    assert (result.tokens, result.reason, near.told) == (24, "corrupt", [])


def test_checksums_are_those_of_whole_segments():
    _, near, _ = readers(verify="always")
    near.store()
    operation = near.start()
    assert len(copies(operation)) == 4
    assert near.told == [ALL]


def test_p17_what_another_client_fetches_is_told_of_in_bands():
    _, near, first, second = readers(nodes=(0, 1, 1), replica_admission="always", slots=16)
    near.store()
    filling = first.start()
    filling.run_to(StartGet)
    waiting = second.start()
    while not (
        isinstance(waiting.effect, Send) and isinstance(waiting.effect.message, m.AwaitRequest)
    ):
        waiting.step()
    waiting.run_to(Receive)
    assert second.told == []
    assert filling.finish().tokens == 32
    assert waiting.finish().by_source["replica"] == 32
    assert first.told == [ALL]
    assert second.told == [2, 4, 6]


def test_what_the_callback_raises_ends_the_load():
    _, near, _ = readers()
    near.store()

    def fail(count):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        near.namespace.load(near.namespace.match(PROMPT), near.out, progress=fail)
    assert near.start().finish().tokens == 32
    assert near.told == [2, 4, 6]


def test_nothing_to_load_is_nothing_to_tell():
    _, near, _ = readers()
    near.store()
    assert near.start(skip_tokens=32).finish().reason == "nothing"
    assert near.told == []


def test_the_callback_is_a_function():
    _, near, _ = readers()
    near.store()
    with pytest.raises(TypeError, match=r"progress: .*function.*7"):
        near.start(progress=7).finish()
