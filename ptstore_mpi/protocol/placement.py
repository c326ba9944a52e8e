"""Who owns a new increment, and who keeps a replica: pure functions, equal on every rank (P9)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ptstore_mpi.types import ServerIndex, segment_slot

__all__ = ["Placement", "keeper_of", "place"]

Placement = Literal["local", "random", "least_loaded"]


def place(
    placement: Placement,
    first_hash: bytes,
    *,
    server_count: int,
    near: Sequence[ServerIndex],
    free_bytes: Mapping[ServerIndex, int],
) -> ServerIndex:
    """Return the owner of the increment whose first new block has ``first_hash``.

    The hash is chained, so it stands for the parent too: clients that store equal increments
    choose the same owner under ``random`` and the same two candidates under ``least_loaded``.

    Parameters
    ----------
    placement
        ``local``: a server of the client's node (the hash chooses where there are several);
        ``random``: any server by the hash; ``least_loaded``: of two servers by the hash the one
        with more free bytes.
    first_hash
        Chained hash of the first new block, 16 bytes.
    server_count
        Servers of the job.
    near
        Servers of the client's node.
    free_bytes
        Free bytes as the servers last told; a server that is missing counts as full.
    """
    one = int.from_bytes(first_hash[:8], "little")
    two = int.from_bytes(first_hash[8:], "little")
    if placement == "local":
        return near[one % len(near)]
    first = ServerIndex(one % server_count)
    if placement == "random" or server_count == 1:
        return first
    second = ServerIndex((first + 1 + two % (server_count - 1)) % server_count)
    return max(first, second, key=lambda server: (free_bytes.get(server, -1), -server))


def keeper_of(segment: int, near: Sequence[ServerIndex]) -> ServerIndex:
    """Return the server of a node that keeps its replica of ``segment``, if any does."""
    return near[segment_slot(segment) % len(near)]
