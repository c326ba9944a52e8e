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
`StartGet`      int: token of a one-sided read into staging, or a replica's slot
`StartWrite`    int: token of a data message from staging into a reserved region
`AwaitTokens`   tuple[int, ...]: tokens that have completed, () when ``until`` has passed
`Pack`          Checksums of views that were copied into a segment image
`Unpack`        Checksums of a segment image that was copied into views
==============  =================================================================================
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ptstore_mpi.device_views import Views
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

Checksums = npt.NDArray[np.uint32] | None
"""CRC-32C of each copied block, shape (blocks,), chained over its tensors; None: not asked for."""


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
    """Start reading ``nbytes`` of a server's arena into memory of the store.

    ``into`` names the mapped arena they land in; None is the client's staging memory.
    """

    server: ServerIndex
    offset: int
    into: ServerIndex | None
    into_offset: int
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

    views: Views
    view_block: int
    image: Image
    checksums: bool = False


@dataclass(frozen=True, slots=True)
class Unpack:
    """Copy an image into the views from ``view_block`` on."""

    views: Views
    view_block: int
    image: Image
    checksums: bool = False


Effect = Now | Send | Receive | StartGet | StartWrite | AwaitTokens | Pack | Unpack

Operation = Generator[Effect, Any, T]
"""A client operation that returns ``T``."""
