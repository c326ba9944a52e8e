"""What servers tell each other about the links between their segments, typed (P7, P15, P16).

It travels in numbered frames, so that the channel is FIFO and exactly once over whatever carries
it; see `peer_link`.
"""

from __future__ import annotations

import msgspec

from ptstore_mpi.types import SegmentRef

__all__ = ["Link", "LinkResult", "PeerFrame", "PeerMessage", "Prune", "Trim", "Unlink"]


class _Peer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """``serial`` names one link for ever: it is never reused (P7)."""

    serial: int


class Link(_Peer, frozen=True):
    """``child`` (of the sender) continues ``parent`` (of the receiver)."""

    parent: SegmentRef
    child: int


class LinkResult(_Peer, frozen=True):
    """Whether the parent was there and is now held by the link; if so, the path to it.

    ``path`` is the flat record before the parent, as its owner knows it.
    """

    linked: bool
    path: tuple[SegmentRef, ...]


class Unlink(_Peer, frozen=True):
    """The child of this link is gone."""

    parent: SegmentRef
    child: int


class Prune(_Peer, frozen=True):
    """The parent of this link is lost: the child must go, with all that hangs on it (P15)."""

    child: int


class Trim(_Peer, frozen=True):
    """The parent's server is full: drop a leaf that hangs on this child, or pass it on (P16)."""

    child: int


PeerMessage = Link | LinkResult | Unlink | Prune | Trim


class PeerFrame(msgspec.Struct, frozen=True, array_like=True):
    """What travels between two servers; see `ptstore_mpi.protocol.peer_link`.

    ``number`` counts the messages of one direction from 1; 0 carries none. ``received`` is the
    highest number up to which everything has arrived from the other side.
    """

    number: int
    received: int
    message: PeerMessage | None = None
