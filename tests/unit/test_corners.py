"""Corners that the rules leave to common sense: unknown writes, other paths, silence."""

from __future__ import annotations

import numpy as np
import pytest
from hand import Hand, ref_of, replies, statuses, to_peers

import ptstore_mpi as pt
from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.protocol.effects import (
    AwaitTokens,
    Pack,
    Send,
    StartGet,
    StartWrite,
    Unpack,
)
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import SMALL, Actor, small_config
from ptstore_mpi.testing.checks import check_space

PROMPT = np.arange(32)


def test_a_publish_that_nobody_reserved_for_is_expired():
    hand = Hand()
    (reply,) = replies(hand.publish(op=5, attempt=2))
    assert (reply.status, reply.attempt) == ("expired", 2)
    assert hand.is_empty


def test_data_and_ends_of_writes_that_nobody_knows_are_nothing():
    hand = Hand()
    assert hand.handler.received(7, 5, hand.now) == []
    hand.handler.settled(7, 5)
    assert hand.abandon(op=5) == []
    assert hand.send(m.LostRequest, ref_of(0, 3, [1, 2], 2), op=6) == []
    assert hand.peer(peer.LinkResult(5, True, ())) == []
    assert hand.peer(peer.Unlink(5, ref_of(0, 3, [1, 2], 2), 1 << 48)) == []
    assert hand.is_empty


def test_lost_without_checksums_is_not_believed():
    hand = Hand()
    (ref,) = hand.stored([1, 2])
    hand.bad.add(hand.cache.find(ref).offset)
    assert hand.send(m.LostRequest, ref, op=6) == []
    assert hand.states() == {"PUBLISHED": 1}


@pytest.mark.parametrize("path_length", [0, 1, 3])
def test_the_record_takes_the_path_that_the_parent_really_has(path_length):
    """P8 over servers: the client's path has one segment before the parent, the real one others."""
    hand = Hand()
    client_path = [ref_of(3, 1, [1], 1), ref_of(1, 3, [1, 2, 3], 2)]
    (link,) = to_peers(hand.reserve([1, 2, 3, 4, 5, 6], ancestors=client_path, op=1))
    before = hand.cache.metadata_bytes
    path = tuple(ref_of(2, slot, [1], 1) for slot in range(path_length))
    hand.peer(peer.LinkResult(link.serial, True, path))
    assert hand.cache.metadata_bytes == before + 16 * (path_length - 1)
    assert statuses(hand.publish(op=1)) == ["published"]
    record = hand.match([1, 2, 3, 4, 5, 6])
    assert record[: path_length + 1] == (*path, client_path[-1])
    assert [ref.block_count for ref in record[path_length + 1 :]] == [2, 1]
    assert hand.match([1, 2, 3, 4, 5])[-1].block_count == 2
    for op, ref in enumerate(reversed(record[path_length + 1 :]), 20):
        assert replies(hand.drop(ref, op=op))[0].count == 1
    assert hand.is_empty


def test_a_longer_path_than_there_is_room_for_is_full_and_unlinked():
    hand = Hand(slots=1)
    parent = ref_of(1, 3, [1, 2], 2)
    (link,) = to_peers(hand.reserve([1, 2, 3], ancestors=(parent,), op=1))
    hand.publish(op=1)
    room = hand.cache.room.free_bytes // 16
    path = tuple(ref_of(2, slot, [1], 1) for slot in range(room + 2))
    actions = hand.peer(peer.LinkResult(link.serial, True, path))
    assert statuses(actions) == ["full"]
    assert to_peers(actions) == [peer.Unlink(link.serial, parent, link.child)]
    assert hand.cache.room.free_bytes >= 0
    hand.release(op=2)
    assert hand.is_empty


def test_a_long_far_write_waits_for_staging_that_its_own_segments_use():
    cluster = Cluster(small_config(slots=30, staging_bytes=8192, get_bytes=4096), client_nodes=(0,))
    actor = Actor(cluster, cluster.clients[0])
    prompt = next(
        PROMPT + start for start in range(99) if actor.hashes(PROMPT + start)[0, 0] % 2 == 1
    )
    actor.transport.hold_transfers = True
    operation = actor.start_store(prompt)
    operation.run_to(AwaitTokens)
    assert actor.transport.in_flight_count == 2, "two segments fill the staging memory"
    while not operation.done:
        if actor.transport.in_flight_count:
            actor.transport.land(1)
        operation.step()
    assert operation.result.reason == "stored"
    assert actor.context.ledger._staging.free_bytes == 8192
    actor.transport.hold_transfers = False
    assert actor.load(prompt) == 8


def test_a_far_write_that_gets_no_staging_in_time_is_late():
    cluster = Cluster(
        small_config(slots=30, staging_bytes=8192, get_bytes=4096, store_timeout_s=2.0),
        client_nodes=(0,),
    )
    actor = Actor(cluster, cluster.clients[0])
    prompt = next(
        PROMPT + start for start in range(99) if actor.hashes(PROMPT + start)[0, 0] % 2 == 1
    )
    actor.transport.hold_transfers = True
    before = cluster.now
    assert actor.store(prompt) == "late"
    assert cluster.now == pytest.approx(before + 2.0)
    assert actor.transport.in_flight_count == 2
    actor.transport.hold_transfers = False
    actor.transport.land()
    actor.known_blocks(prompt)
    check_space(cluster)
    assert cluster.servers[1].cache.reserved_bytes == 0
    assert actor.store(prompt) == "stored"


def test_silent_servers_are_none_not_false():
    cluster = Cluster(small_config(match_timeout_s=1.0), server_nodes=(0,), client_nodes=(0,))
    store = cluster.store(cluster.clients[0])
    namespace = store.namespace("m", SMALL)
    actor = Actor(cluster, cluster.clients[0])
    namespace.store(PROMPT, actor.oracle.arrays(PROMPT))
    match = namespace.match(np.append(PROMPT, 1))
    cluster.on_request = lambda server, message: []
    assert namespace.drop_tail(match) is None
    assert namespace.clear() is None
    assert store.server_stats() == []
    silent = namespace.match(PROMPT)
    assert (silent.tokens, silent.reason) == (0, "partial")


def test_staging_that_is_in_use_is_not_replaced():
    cluster = Cluster(
        small_config(placement="local", staging_bytes=8192, get_bytes=4096, load_timeout_s=2.0)
    )
    near, far = (Actor(cluster, client) for client in cluster.clients)
    near.store(PROMPT)
    far.transport.hold_transfers = True
    assert far.load(PROMPT) == 0
    wide = pt.KVLayout((pt.TensorSpec("key", 50_000),), 4)
    store = cluster.store(cluster.clients[1])
    with pytest.raises(pt.ConfigError, match=r"staging_bytes.*8192.*in flight"):
        store.namespace("m", wide)
    far.transport.hold_transfers = False
    far.transport.land()
    store.namespace("m", wide)
    assert far.load(PROMPT) == 8


@pytest.mark.parametrize("kind", [Pack, StartWrite, AwaitTokens])
def test_a_far_write_that_is_stopped_anywhere_gives_its_staging_back(kind):
    cluster = Cluster(small_config(slots=30), client_nodes=(0,))
    actor = Actor(cluster, cluster.clients[0])
    prompt = next(
        PROMPT + start for start in range(99) if actor.hashes(PROMPT + start)[0, 0] % 2 == 1
    )
    operation = actor.start_store(prompt)
    operation.run_to(kind)
    operation.stop()
    actor.transport.land()
    actor.flush()
    actor.known_blocks(prompt)
    ledger = actor.context.ledger
    assert ledger.transfer_count == 0
    assert ledger._staging.free_bytes == ledger.staging_bytes
    assert cluster.servers[1].cache.reserved_bytes == 0


@pytest.mark.parametrize("kind", [StartGet, AwaitTokens, Unpack, Send])
def test_a_far_load_that_is_stopped_anywhere_gives_its_staging_back(kind):
    cluster = Cluster(small_config(placement="local"))
    near, far = (Actor(cluster, client) for client in cluster.clients)
    near.store(PROMPT)
    load = far.start_load(PROMPT, far.match(PROMPT).refs)
    load.operation.run_to(kind)
    if kind is Send:
        load.operation.step()
        load.operation.run_to(Send)  # the release
    load.operation.stop()
    far.transport.land()
    for _ in range(2):
        far.known_blocks(PROMPT)
    ledger = far.context.ledger
    assert ledger.transfer_count == 0
    assert ledger._staging.free_bytes == ledger.staging_bytes
    assert cluster.servers[0].cache.leased_bytes == 0
