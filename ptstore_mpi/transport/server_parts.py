"""What a server is made of, whatever carries its messages."""

from __future__ import annotations

import numpy as np

from ptstore_mpi import _native
from ptstore_mpi.arena import Memory
from ptstore_mpi.cache.admission import make_admission
from ptstore_mpi.cache.balance import Balance
from ptstore_mpi.cache.eviction import Eviction
from ptstore_mpi.cache.memory_copies import MemoryCopies
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.policies.factory import make_policy
from ptstore_mpi.cache.replicas import Replica, ReplicaCache
from ptstore_mpi.cache.room import Room
from ptstore_mpi.cache.segment import Segment
from ptstore_mpi.cache.tier import Tier
from ptstore_mpi.cache.times import Times
from ptstore_mpi.config import Config
from ptstore_mpi.errors import ConfigError, PTStoreError
from ptstore_mpi.protocol.handler import ServerHandler
from ptstore_mpi.tiers.segment_tier import SegmentTier
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.tiers.slab_store import SlabStore
from ptstore_mpi.tiers.stacked_tier import StackedTier
from ptstore_mpi.types import GENERATION_BITS, ServerIndex

__all__ = ["check_shared_memory", "make_handler", "open_tier", "tier_settings"]


def check_shared_memory(config: Config, *, host: str, server_count: int, free_bytes: int) -> None:
    """Refuse arenas that the shared memory or the memory of one host cannot hold.

    Raises
    ------
    ConfigError
        ``server_count`` arenas need more than ``free_bytes``.
    """
    wanted = server_count * config.arena_bytes
    if wanted > free_bytes:
        raise ConfigError(
            f"host {host}: {server_count} server(s) want arenas of {wanted} bytes in "
            f"{config.shared_memory_dir}, but there and in memory {free_bytes} bytes are free; "
            f"lower memory_bytes ({config.memory_bytes})"
        )


def tier_settings(config: Config) -> dict[str, TierSettings]:
    """Return the settings of the file tiers of each server by name, the upper one first.

    Raises
    ------
    ConfigError
        They do not fit together.
    """
    found: dict[str, TierSettings] = {}
    for name in ("ssd", "pfs"):
        if not getattr(config, f"{name}_dir"):
            continue
        capacity_bytes = getattr(config, f"{name}_bytes") // config.servers_per_node
        try:
            found[name] = TierSettings(
                directory=getattr(config, f"{name}_dir"),
                capacity_bytes=capacity_bytes,
                slab_bytes=config.slab_bytes_of(capacity_bytes),
                io_threads=config.tier_threads,
                direct=config.tier_direct,
            )
        except ConfigError as error:
            raise ConfigError(
                f"{name}_bytes = {getattr(config, f'{name}_bytes')}, for each of "
                f"{config.servers_per_node} server(s) {capacity_bytes}: {error}"
            ) from None
    return found


def open_tier(server: ServerIndex, memory: Memory, config: Config) -> Tier | None:
    """Open the file tiers of ``server`` over the memory of its arena; None: there are none.

    Raises
    ------
    ConfigError
        The settings do not fit together, or a folder does not do what they ask.
    TransportError
        No folder can be made there.
    """
    stores: dict[str, SlabStore] = {}
    try:
        for name, settings in tier_settings(config).items():
            stores[name] = SlabStore.open(settings, owner=f"server-{server}")
    except PTStoreError:
        for store in stores.values():
            store.close()
        raise
    if len(stores) == 2:
        (upper_name, upper), (lower_name, lower) = stores.items()
        return StackedTier((upper_name, lower_name), upper, lower, memory=memory)
    return next((SegmentTier(name, store, memory) for name, store in stores.items()), None)


def make_handler(
    server: ServerIndex,
    memory: Memory | None,
    config: Config,
    *,
    server_count: int,
    populated_bytes: int = 0,
    generation_bits: int = GENERATION_BITS,
    peer_resend_s: float = 1.0,
    tier: Tier | None = None,
) -> ServerHandler:
    """Return the handler of ``server`` over the memory of its arena.

    Parameters
    ----------
    server, memory, config
        The server, its arena's bytes, the settings of the job. Without a memory bytes are only
        counted, and never bad.
    server_count
        Servers of the job.
    populated_bytes
        Pages of the arena that may be used from the beginning.
    generation_bits
        As in `SlotTable`.
    peer_resend_s
        As in `ServerHandler`.
    tier
        Its file tier, from `open_tier`.
    """

    def is_intact(copy: Segment | Replica, checksums: bytes) -> bool:
        if memory is None:
            return True
        found = _native.block_checksums(
            memory,
            offset=copy.offset,
            block_bytes=np.asarray(copy.tensor_bytes, dtype=np.int64),
            segment_blocks=copy.block_count,
            segment_block=0,
            block_count=copy.block_count,
        )
        return found.tobytes() == checksums

    eviction = copies = None
    policy = "lru" if config.eviction == "none" else config.eviction  # of what may always go
    if tier is not None:
        copies = MemoryCopies(Eviction(make_policy(policy, config.arena_bytes)))
    if config.eviction != "none":
        below = 0 if tier is None else tier.capacity_bytes
        eviction = Eviction(make_policy(config.eviction, config.arena_bytes + below))
    room = Room(config.arena_bytes, populated_bytes=populated_bytes)
    replicas = ReplicaCache(
        room,
        make_policy(policy, config.arena_bytes),
        least_bytes=int(config.replica_min_share * config.arena_bytes),
        most_bytes=int(config.replica_max_share * config.arena_bytes),
    )
    return ServerHandler(
        OwnedCache(
            server,
            room,
            generation_bits=generation_bits,
            eviction=eviction,
            copies=copies,
            tier=tier,
        ),
        replicas,
        admission=make_admission(config.replica_admission),
        is_intact=is_intact,
        server_count=server_count,
        lease_cap_s=config.lease_cap_s,
        redirect_bytes=config.redirect_bytes,
        unconfirmed_count=config.unconfirmed_count,
        peer_resend_s=peer_resend_s,
        reused_only=config.ssd_admission == "reused",
        verify="always" if config.verify_publish else "off" if config.verify == "off" else "remote",
        balance=_balance(replicas, config) if config.replica_share == "adaptive" else None,
    )


def _balance(replicas: ReplicaCache, config: Config) -> Balance:
    assumed = (
        config.assumed_local_s,
        config.assumed_remote_s,
        config.assumed_disk_s,
        config.assumed_recompute_s,
    )
    return Balance(replicas, Times(*assumed))
