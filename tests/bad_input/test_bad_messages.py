"""Messages: what is no message is refused as such, and no request harms a server."""

from __future__ import annotations

import typing

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptstore_mpi import _native
from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.protocol import wire
from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.testing.actor import Actor, small_config
from ptstore_mpi.testing.checks import check_links, check_quiet, check_reachable, check_space
from ptstore_mpi.types import BalanceDecision, SegmentRef, pack_segment_id

HASH = b"h" * 16
REF = [5, 1, HASH]
KEY = [7, 3, 0, 3]
DECODERS = (wire.decode_request, wire.decode_reply, wire.decode_frame)


def sealed(body: bytes) -> bytes:
    """Return a body as it travels: whatever it holds, its checksum is right."""
    return _native.crc32c(np.frombuffer(body, np.uint8)).to_bytes(4, "little") + body


def packed(*fields) -> bytes:
    return sealed(msgspec.msgpack.encode(fields))


def reserve(hashes=HASH, counts=(1,), tensor_bytes=(64, 24), *, remaining_s=1.0, ancestors=()):
    tail = [hashes, counts, tensor_bytes, remaining_s, True]
    return packed("ReserveRequest", *KEY, HASH, ancestors, *tail)


def kind(name, *values):
    return pytest.param(*values, id=name)


REQUESTS = [
    kind("unknown_kind", packed("FormatRequest", *KEY), "FormatRequest"),
    kind("no_kind", packed(*KEY), "Expected `str`"),
    kind("object", sealed(msgspec.msgpack.encode({"client": 1})), "Expected `array`"),
    kind("short", packed("ByeRequest", 1), "at least length 5"),
    kind("key_text", packed("ByeRequest", "me", 1, 1, 1), "Expected `int`"),
    kind("client_negative", packed("ByeRequest", -1, 1, 1, 1), ">= 0"),
    kind("low_negative", packed("ByeRequest", 1, 1, 1, -1), ">= 0"),
    kind("hashes_cut", packed("MatchRequest", *KEY, HASH[:-1]), "multiple of 16 bytes, got 15"),
    kind("hashes_text", packed("MatchRequest", *KEY, "abc"), "bytes|base64"),
    kind("lease_nan", packed("AcquireRequest", *KEY, [REF], float("nan"), True), ">="),
    kind("lease_without_end", packed("AcquireRequest", *KEY, [REF], float("inf"), True), "<="),
    kind("segment_negative", packed("LostRequest", *KEY, [-1, 1, HASH]), ">= 0"),
    kind("segment_of_no_block", packed("LostRequest", *KEY, [5, 0, HASH]), ">= 1"),
    kind("segment_hash_short", packed("DropRequest", *KEY, [5, 1, HASH[1:]]), "length >= 16"),
    kind("segment_hash_long", packed("DropRequest", *KEY, [5, 1, HASH * 2]), "length <= 16"),
    kind("reserve_nothing", reserve(b"", ()), "0 blocks"),
    kind("reserve_other_counts", reserve(HASH * 3, (1, 1)), "2 blocks .*3 hashes"),
    kind("reserve_no_block", reserve(HASH, (0, 1)), ">= 1"),
    kind("reserve_negative", reserve(HASH, (-1, 2)), ">= 1"),
    kind("reserve_no_tensor", reserve(tensor_bytes=()), "0 tensors"),
    kind("reserve_tensor_of_no_byte", reserve(tensor_bytes=(64, 0)), ">= 1"),
    kind("reserve_hashes_cut", reserve(HASH + b"x"), "multiple of 16 bytes, got 17"),
    kind("reserve_for_ever", reserve(remaining_s=float("inf")), "<="),
    kind("reserve_behind_nonsense", reserve(ancestors=["a"]), "Expected `array`"),
    kind("checksums_cut", packed("PublishRequest", *KEY, b"123"), "multiple of 4 bytes, got 3"),
    kind("nesting_without_end", sealed(b"\x91" * 100_000), "."),
    kind("array_without_end", sealed(b"\xdd\xff\xff\xff\xff"), "."),
    kind("never_used_byte", sealed(b"\xc1"), "."),
    kind("text_that_is_no_utf8", sealed(b"\x95\xa2\xff\xfe" + b"\x01" * 4), "."),
    kind("empty", b"", "0 bytes that are not a message"),
    kind("checksum_alone", sealed(b""), "4 bytes that are not a message"),
    kind("nonsense", b"GET / HTTP/1.1\r\n\r\n", "wrong checksum"),
]


@pytest.mark.parametrize(("data", "said"), REQUESTS)
def test_requests_that_are_none(data, said):
    with pytest.raises(msgspec.DecodeError, match=said):
        wire.decode_request(data)


def samples():
    """Return a valid message of every kind, as it travels."""
    ref = SegmentRef(5, 1, HASH)
    values = {
        bytes: HASH, int: 5, float: 0.5, bool: True, SegmentRef: ref,
        tuple[SegmentRef, ...]: (ref,), tuple[int, ...]: (1,), m.WriteStatus: "published",
        tuple[m.Grant, ...]: (m.Grant(4096, 1, HASH),), dict[str, int]: {"free_bytes": 1},
        m.ReplicaWish | None: None, tuple[m.ReplicaPlace, ...]: (m.ReplicaPlace("wait"),),
        tuple[tuple[int, int], ...]: ((0, 3),), tuple[float, ...]: (0.5,) * 4,
        tuple[BalanceDecision, ...]: (),
    }  # fmt: skip
    for union in (m.Request, m.Reply, peer.PeerMessage):
        for each in typing.get_args(union):
            hints = typing.get_type_hints(each)
            given = {name: values[hints[name]] for name in each.__struct_fields__}
            given |= {"checksums": bytes(4)} if each is m.FilledRequest else {}
            message = each(**given)
            yield wire.encode(
                peer.PeerFrame(1, 0, message) if union is peer.PeerMessage else message
            )


SAMPLES = list(samples())
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.binary(max_size=40),
    st.text(max_size=10),
)
TREES = st.recursive(
    ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


def only_decode_errors(data):
    for decode in DECODERS:
        try:
            decode(data)
        except msgspec.DecodeError:
            continue


@settings(max_examples=300)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes(data, checksummed):
    only_decode_errors(sealed(data) if checksummed else data)


@settings(max_examples=300)
@given(st.sampled_from(SAMPLES), st.sampled_from(SAMPLES), st.data())
def test_cut_and_joined_messages(first, second, data):
    cut = data.draw(st.integers(0, len(first)))
    start = data.draw(st.integers(4, len(second)))
    only_decode_errors(first[:cut] + second[start:])
    only_decode_errors(sealed(first[4 : max(cut, 4)] + second[start:]))


@settings(max_examples=300)
@given(st.sampled_from(SAMPLES), st.data())
def test_messages_with_other_fields(sample, data):
    fields = msgspec.msgpack.decode(sample[4:])
    place = data.draw(st.integers(0, len(fields) - 1))
    fields[place] = data.draw(TREES)
    only_decode_errors(packed(*fields))


# -- a server that is sent anything that can be decoded ------------------------------------------

NAMES_OF_REQUESTS = [each.__name__ for each in typing.get_args(m.Request)]
NAMES = st.sampled_from([b"n" * 16, b"", b"x"])


def block_hashes(count):
    return st.lists(st.sampled_from([bytes([i]) * 16 for i in range(8)]), max_size=count).map(
        b"".join
    )


@st.composite
def requests(draw, known):
    """Draw the fields of a request; ``known`` are references to segments that there are."""
    low = draw(st.sampled_from([0, 0, 0, 0, 1, 2, 2**63]))
    key = [draw(st.integers(2, 4)), draw(st.integers(0, 3)), draw(st.integers(0, 1)), low]
    ref = st.sampled_from(known) | st.builds(
        lambda owner, slot, count, of: [pack_segment_id(owner, slot, 0), count, bytes([of]) * 16],
        st.sampled_from([0, 1, 2, 65535]), st.integers(0, 9), st.integers(1, 3), st.integers(0, 7),
    )  # fmt: skip
    seconds = st.sampled_from([0.0, 1.0, 100.0, -1.0, 1e10])
    name = draw(st.sampled_from([*NAMES_OF_REQUESTS, *["ReserveRequest"] * 6, "PublishRequest"]))
    tails = {
        "MatchRequest": [block_hashes(6)],
        "AcquireRequest": [st.lists(ref, max_size=3), seconds, st.booleans()],
        "ReserveRequest": [
            NAMES, st.lists(ref, min_size=draw(st.integers(0, 1)), max_size=2), block_hashes(5),
            st.lists(st.integers(1, 3), min_size=1, max_size=3),
            st.lists(st.sampled_from([1, 64, 5000, 2**62]), min_size=1, max_size=2),
            seconds, st.booleans(),
        ],
        "PublishRequest": [st.sampled_from([b"", b"1234", b"12345678", b"1234" * 9])],
        "ClearRequest": [NAMES],
        "LostRequest": [ref],
        "DropRequest": [ref],
        "PingRequest": [st.binary(max_size=9), st.sampled_from([0, 9, -1, 2**63])],
    }  # fmt: skip
    tail = [draw(strategy) for strategy in tails.get(name, [])]
    if name == "ReserveRequest" and draw(st.integers(0, 5)):  # most: as many hashes as blocks
        blocks = sum(tail[3])
        tail[2] = (tail[2] + HASH * blocks)[: 16 * blocks]
    return packed(name, *key, *tail)


@settings(max_examples=100)
@given(st.data())
def test_no_request_harms_a_server(data):
    """It never raises, its books balance at every step, and it forgets whoever leaves."""
    cluster = Cluster(small_config(slots=6), server_nodes=(0, 1), client_nodes=(0, 1, 0))
    cluster.on_reply = lambda client, reply: ()  # nobody waits for an answer
    actor = Actor(cluster, 2)
    cluster.on_reply = None
    assert actor.store(np.arange(16)) == "stored"
    known = [[r.segment, r.block_count, r.last_hash] for r in actor.match(np.arange(16)).refs]
    cluster.on_reply = lambda client, reply: ()
    for _ in range(data.draw(st.integers(1, 15))):
        server = data.draw(st.integers(0, 1))
        try:
            request = wire.decode_request(data.draw(requests(known)))
        except msgspec.DecodeError:
            continue
        cluster.handle(server, request)
        check_space(cluster)
        if data.draw(st.booleans()):
            cluster.advance(data.draw(st.sampled_from([0.0, 0.5, 61.0])))
            check_space(cluster)
    check_reachable(cluster)
    check_links(cluster)
    for client in (2, 3, 4):
        for server in (0, 1):
            cluster.handle(server, m.ByeRequest(client, 2**63, 0, 2**63))
    cluster.advance(200.0)
    check_space(cluster)
    check_quiet(cluster)
    check_links(cluster)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(SAMPLES[-4:]), st.data()), max_size=6))
def test_no_frame_of_another_server_harms_a_server(frames):
    cluster = Cluster(small_config(slots=6), server_nodes=(0, 1), client_nodes=(0, 1))
    actor = Actor(cluster, 2)
    actor.store(np.arange(16))
    for receiver, sample, data in frames:
        frame = wire.decode_frame(sample)
        number = data.draw(st.integers(0, 3))
        serial = data.draw(st.sampled_from([0, 1, 2, (1 << 48) + 1]))
        message = msgspec.structs.replace(frame.message, serial=serial)
        handler = cluster.servers[receiver]
        handler.handle_peer(1 - receiver, peer.PeerFrame(number, 0, message), cluster.now)
        check_space(cluster)
