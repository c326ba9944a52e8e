"""The one encoding of all messages: a CRC-32C (4 bytes, little-endian) and a MessagePack array.

A bit that was bent on the way makes a message that is refused, and so lost: the sender asks again.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ptstore_mpi import _native
from ptstore_mpi.protocol.messages import Reply, Request
from ptstore_mpi.protocol.peer_messages import PeerFrame

__all__ = ["decode_frame", "decode_reply", "decode_request", "encode"]

_CRC_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)
_frame_decoder = msgspec.msgpack.Decoder(PeerFrame)


def encode(message: Request | Reply | PeerFrame) -> bytes:
    """Return the wire form of a message."""
    body = _encoder.encode(message)
    return _crc(body) + body


def decode_request(data: bytes | bytearray) -> Request:
    """Return the request in ``data``; raises ``msgspec.DecodeError`` on anything else."""
    request: Request = _request_decoder.decode(_body(data))
    return request


def decode_reply(data: bytes | bytearray) -> Reply:
    """Return the reply in ``data``; raises ``msgspec.DecodeError`` on anything else."""
    reply: Reply = _reply_decoder.decode(_body(data))
    return reply


def decode_frame(data: bytes | bytearray) -> PeerFrame:
    """Return the frame in ``data``; raises ``msgspec.DecodeError`` on anything else."""
    return _frame_decoder.decode(_body(data))


def _crc(body: bytes | memoryview) -> bytes:
    return _native.crc32c(np.frombuffer(body, np.uint8)).to_bytes(_CRC_BYTES, "little")


def _body(data: bytes | bytearray) -> memoryview:
    body = memoryview(data)[_CRC_BYTES:]
    if not body or data[:_CRC_BYTES] != _crc(body):
        raise msgspec.DecodeError(f"{len(data)} bytes that are not a message: wrong checksum")
    return body
