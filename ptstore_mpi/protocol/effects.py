"""What a protocol generator asks of its transport, and what it gets back.

A client operation is a generator: it yields one effect at a time and is resumed with the answer.
It knows neither MPI nor a clock, so the same code runs over every transport, and a simulated one
can stall it between any two steps. An operation may be closed at any of them: the effect that it
stands at has then not been carried out.

==============  =================================================================================
effect          answer
==============  =================================================================================
`Now`           float: monotonic time, s
`Send`          None: the message is on its way
`Receive`       Reply or None: the next reply of any server, None when ``until`` has passed
`StartGet`      int: token of a one-sided read into staging
`StartWrite`    int: token of a data message from staging into a reserved region
`AwaitTokens`   tuple[int, ...]: tokens that have completed, () when ``until`` has passed
`Pack`          None: views were copied into a segment image
`Unpack`        None: a segment image was copied into views
`Checksums`     ndarray uint32: CRC-32C of each block of a segment image
==============  =================================================================================
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from ptstore_mpi import _native
from ptstore_mpi.protocol.messages import Request
from ptstore_mpi.types import ServerIndex

__all__ = [
    "AwaitTokens",
    "Checksums",
    "Effect",
    "Image",
    "Now",
    "Operation",
    "Pack",
    "Receive",
    "Send",
    "StartGet",
    "StartWrite",
    "Unpack",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Image:
    """Consecutive blocks of one segment image in mapped memory.

    ``server`` names the mapped arena the image lies in; None is the client's staging memory.
    The image starts at ``offset``, holds ``segment_blocks`` blocks per tensor, and the
    ``block_count`` blocks from ``first_block`` on are meant.
    """

    server: ServerIndex | None
    offset: int
    segment_blocks: int
    first_block: int
    block_count: int


@dataclass(frozen=True, slots=True)
class Now:
    """Ask for the time."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request."""

    server: ServerIndex
    message: Request


@dataclass(frozen=True, slots=True)
class Receive:
    """Wait for one reply, at most until ``until``."""

    until: float


@dataclass(frozen=True, slots=True)
class StartGet:
    """Start reading ``nbytes`` of a server's arena into staging memory."""

    server: ServerIndex
    offset: int
    staging_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StartWrite:
    """Start sending ``nbytes`` of staging memory into the receive posted for ``op``.

    Its token completes only when the owner's receive has taken the message (P3).
    """

    server: ServerIndex
    op: int
    staging_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class AwaitTokens:
    """Wait until at least one outstanding token has completed, at most until ``until``.

    With ``until`` in the past it only looks.
    """

    until: float


@dataclass(frozen=True, slots=True)
class Pack:
    """Copy ``image.block_count`` blocks of the views, from ``view_block`` on, into an image."""

    views: _native.TensorViews
    view_block: int
    image: Image


@dataclass(frozen=True, slots=True)
class Unpack:
    """Copy an image into the views from ``view_block`` on."""

    views: _native.TensorViews
    view_block: int
    image: Image


@dataclass(frozen=True, slots=True)
class Checksums:
    """Compute the CRC-32C of each block of an image of tensors of ``block_bytes`` each."""

    image: Image
    block_bytes: tuple[int, ...]


Effect = Now | Send | Receive | StartGet | StartWrite | AwaitTokens | Pack | Unpack | Checksums

Operation = Generator[Effect, Any, T]
"""A client operation that returns ``T``."""
