"""The wire form: every message comes back equal, and anything else is refused."""

from __future__ import annotations

import typing

import msgspec
import pytest

from ptstore_mpi.protocol import messages as m
from ptstore_mpi.protocol import peer_messages as peer
from ptstore_mpi.protocol import wire
from ptstore_mpi.types import BalanceDecision, SegmentRef

REF = SegmentRef((1 << 64) - 1, 3, bytes(range(16)))
SAMPLES = {
    bytes: b"\x00\xff" * 40,
    int: 5,
    float: 0.125,
    bool: True,
    SegmentRef: REF,
    tuple[SegmentRef, ...]: (REF, REF),
    tuple[int, ...]: (1, 4),
    tuple[m.Grant, ...]: (m.Grant(1 << 40, 16, b"1234"), m.Grant(0, 1, b"")),
    dict[str, int]: {"free_bytes": 1 << 50},
    m.WriteStatus: "published",
}


SAMPLES |= {
    m.ReplicaWish | None: m.ReplicaWish((REF,), b"n" * 16, (64, 24), may_fill=True),
    tuple[m.ReplicaPlace, ...]: (
        m.ReplicaPlace("wait"),
        m.ReplicaPlace("here", m.Grant(1, 2, b"3")),
    ),
    tuple[tuple[int, int], ...]: ((0, 3), (7, 1)),
    tuple[float, ...]: (0.0, 1.5, 1e6, 0.25),
    tuple[BalanceDecision, ...]: (BalanceDecision(1.0, 0.5, -4096, *(0.25,) * 8),),
}
KEY = (5, 5, 5, 5)
WHOLE = {  # what does not go with just any values
    m.FilledRequest: m.FilledRequest(*KEY, (REF, REF), bytes(96), bytes(24)),
}


def sample(kind):
    if kind in WHOLE:
        return WHOLE[kind]
    hints = typing.get_type_hints(kind)
    return kind(*(SAMPLES[hints[name]] for name in kind.__struct_fields__))


@pytest.mark.parametrize(
    ("union", "decode"),
    [
        (m.Request, wire.decode_request),
        (m.Reply, wire.decode_reply),
        (peer.PeerMessage, wire.decode_frame),
    ],
)
def test_round_trip_of_every_message(union, decode):
    for kind in typing.get_args(union):
        message = sample(kind)
        if union is peer.PeerMessage:
            message = peer.PeerFrame(1 << 40, 3, message)
        assert decode(wire.encode(message)) == message
        assert decode(bytearray(wire.encode(message))) == message


def test_a_bent_bit_is_refused():
    data = wire.encode(sample(m.AcquireReply))
    for byte in range(len(data)):
        for bit in range(8):
            bent = bytearray(data)
            bent[byte] ^= 1 << bit
            with pytest.raises(msgspec.DecodeError):
                wire.decode_reply(bent)


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"nonsense", wire.encode(peer.PeerFrame(1, 0, None))]
)
def test_anything_else_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        wire.decode_request(data)
    with pytest.raises(msgspec.DecodeError):
        wire.decode_reply(data)


def test_every_status_is_a_reason_that_is_documented():
    from ptstore_mpi.types import StoreResult

    documented = StoreResult.__doc__
    for status in typing.get_args(m.WriteStatus):
        if status not in ("reserved", "published"):
            assert f"``{status}``" in documented, f"StoreResult does not explain {status!r}"
