"""What a server is made of, whatever carries its messages."""

from __future__ import annotations

import numpy as np

from ptstore_mpi import _native
from ptstore_mpi.arena import Arena
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.config import Config
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.types import ServerIndex

__all__ = ["make_handler"]


def make_handler(server: ServerIndex, arena: Arena, config: Config) -> ServerHandler:
    """Return the handler of ``server`` over its arena, with no page in use yet."""

    def is_intact(segment: Segment, checksums: bytes) -> bool:
        found = _native.block_checksums(
            arena.memory,
            offset=segment.offset,
            block_bytes=np.asarray(segment.record.tensor_bytes, dtype=np.int64),
            segment_blocks=segment.block_count,
            segment_block=0,
            block_count=segment.block_count,
        )
        return found.tobytes() == checksums

    return ServerHandler(
        OwnedCache(server, config.arena_bytes, populated_bytes=0),
        is_intact=is_intact,
        lease_cap_s=config.lease_cap_s,
        unconfirmed_count=config.unconfirmed_count,
        verify_publish=config.verify_publish,
    )
