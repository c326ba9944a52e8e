"""What the server's handler asks of its transport: the server side's counterpart of effects."""

from __future__ import annotations

from dataclasses import dataclass

from ptstore_mpi.protocol.messages import Reply
from ptstore_mpi.protocol.peer_messages import PeerFrame, PeerMessage
from ptstore_mpi.types import ServerIndex

__all__ = ["Action", "Answer", "CancelReceives", "PostReceives", "SendFrame", "ToPeer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """Send a reply to a client."""

    client: int
    reply: Reply


@dataclass(frozen=True, slots=True)
class ToPeer:
    """Tell another server something, FIFO and exactly once. The handler puts it in a frame."""

    server: ServerIndex
    message: PeerMessage


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Send a frame to another server. It may be lost: it is sent again until it was received."""

    server: ServerIndex
    frame: PeerFrame


@dataclass(frozen=True, slots=True)
class PostReceives:
    """Post receives for the data messages of a write, in order, before anything else is sent.

    The transport reports each write's end with ``handler.received``.
    """

    client: int
    op: int
    extents: tuple[tuple[int, int], ...]  # (offset, nbytes) in the arena


@dataclass(frozen=True, slots=True)
class CancelReceives:
    """Withdraw the receives of a write that are still unmatched; finish those that are matched.

    The transport reports the end of it with ``handler.settled``: only then are the bytes free.
    """

    client: int
    op: int


Action = Answer | SendFrame | PostReceives | CancelReceives
"""What a transport carries out."""
