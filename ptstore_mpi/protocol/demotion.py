"""From memory to the file tier: what is written, when its memory is freed, what is dropped (P14).

::

    dirty --write--> clean --> its memory is freed in an instant --> only in the file
      ^      |
      `------'  failed: it stays where it is

Nothing waits here. Who needs room frees clean copies; where there are none, the coldest are being
written, and who can wait comes again when one of them has been. Where the tier takes nothing,
leaves are dropped (P15). Writing begins before room is short, so that this is rare.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from ptstore_mpi.cache.memory_copies import MemoryCopies
from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.replicas import ReplicaCache
from ptstore_mpi.cache.segment import Segment, SegmentState
from ptstore_mpi.cache.tier import Tier
from ptstore_mpi.protocol.actions import Action, ToPeer
from ptstore_mpi.protocol.removal import Removal

__all__ = ["Demotion"]

_LOW_MARK_SHARE = 10  # a tenth of the arena is kept free or clean, if all goes well


class Demotion:
    """Makes room in the memory of one server that has a file tier.

    Parameters
    ----------
    cache
        Its owned cache, with copies and tier.
    removal
        Takes what is dropped.
    replicas
        What shares its memory, and goes first.
    reused_only
        Whether only what was read since it was published may be written.
    """

    def __init__(
        self, cache: OwnedCache, removal: Removal, replicas: ReplicaCache, *, reused_only: bool
    ) -> None:
        assert cache.copies is not None, "a tier without an order of memory copies"
        assert cache.tier is not None, "an order of memory copies without a tier"
        self._cache = cache
        self._copies: MemoryCopies = cache.copies
        self._tier: Tier = cache.tier
        self._removal = removal
        self._replicas = replicas
        self._reused_only = reused_only
        self._low_mark_bytes = cache.room.capacity_bytes // _LOW_MARK_SHARE
        self._writing_bytes = 0
        self._refusal = ""
        self.demoted_count = 0

    @property
    def is_freeing(self) -> bool:
        """Whether memory will be free soon: by a write, or once the tier has room or time."""
        is_growing = self._refusal == "growing" and self._tier.is_growing
        return bool(self._writing_bytes) or is_growing or self._refusal == "busy"

    def make_room(self, need_bytes: int, now: float) -> Generator[Action | ToPeer, None, bool]:
        """Free something at once, or begin to; whether it was at once.

        Parameters
        ----------
        need_bytes
            Room that is wanted in all.
        now
            Time, s.
        """
        clean = self._copies.coldest_clean()
        if clean is not None and not clean.is_leased(now):
            self._free(clean)
            return True
        victim = self._unwanted()
        if victim is None:
            self._write(max(need_bytes, self._low_mark_bytes), at_least_one=True)
            if self.is_freeing:
                return False
            victim = self._droppable()
        if victim is None:
            return False
        yield from self._removal.evict(victim, now)
        return True

    def is_making_room_for(self, segments: Sequence[Segment]) -> bool:
        """Tell whether those not in memory lack room now and will have it soon; see to that."""
        cache, copies = self._cache, self._copies
        missing_bytes = sum(segment.nbytes for segment in segments if not segment.in_memory)
        own_bytes = sum(segment.nbytes for segment in segments if copies.is_ready(segment))
        need_bytes = missing_bytes + own_bytes  # what it needs itself is not freed for it
        if need_bytes <= self._available_bytes:
            return False
        held_bytes = cache.reserved_bytes + cache.zombie_bytes + cache.leased_bytes
        held_bytes += self._replicas.kept_bytes
        if need_bytes > cache.room.capacity_bytes - cache.metadata_bytes - held_bytes:
            return False
        self._write(max(need_bytes, self._low_mark_bytes))
        return self.is_freeing

    def write_ahead(self) -> None:
        """Begin to write where little memory is free or clean."""
        self._write(self._low_mark_bytes)

    def write_ended(self, segment: Segment, now: float, *, is_done: bool) -> None:
        """Take note of the end of a write; its memory copy may be freed from now on."""
        segment.move = ""
        self._writing_bytes -= segment.nbytes
        self._cache.let_go(segment)
        if segment.state is SegmentState.ZOMBIE:
            self._cache.free_if_dead(segment, now)
        elif not is_done:
            self._cache.let_slot_go(segment)

    # -- internals -------------------------------------------------------------------------

    @property
    def _available_bytes(self) -> int:
        """Memory that is free, or free in an instant."""
        replicas = self._replicas
        droppable_bytes = replicas.used_bytes - replicas.kept_bytes
        return self._cache.room.free_bytes + self._copies.ready_bytes + droppable_bytes

    def _free(self, segment: Segment) -> None:
        self._cache.free_memory(segment)
        self.demoted_count += 1

    def _write(self, target_bytes: int, *, at_least_one: bool = False) -> None:
        """Write the coldest until so much memory is free, clean or being written.

        There is always to be room for one more segment: no acquire waits for it.
        """
        copies = self._copies
        self._refusal = ""
        while (victim := copies.coldest_dirty()) is not None:
            coming_bytes = self._available_bytes + self._writing_bytes
            is_enough = coming_bytes >= max(target_bytes, victim.nbytes)
            if is_enough and (self._writing_bytes or not at_least_one):
                return
            if not self._may_be_written(victim):
                return
            self._refusal = self._begin(victim)
            if self._refusal:
                return

    def _begin(self, segment: Segment) -> str:
        """Begin to write a segment; return why not, or nothing."""
        slot = self._tier.reserve(segment)
        if isinstance(slot, str):
            return slot
        segment.slot = slot
        if not self._tier.start_write(segment):
            self._cache.let_slot_go(segment)
            return "busy"
        segment.move = "write"
        self._writing_bytes += segment.nbytes
        self._cache.hold(segment)
        return ""

    def _may_be_written(self, segment: Segment) -> bool:
        return not self._reused_only or segment.is_reused or bool(segment.links)

    def _unwanted(self) -> Segment | None:
        """Return the coldest copy if it may not be written: it is dropped instead."""
        victim = self._copies.coldest_dirty() if self._reused_only else None
        unwanted = victim is not None and not self._may_be_written(victim)
        return victim if unwanted and self._cache.evicts else None

    def _droppable(self) -> Segment | None:
        """Return the leaf that goes because the tier takes nothing.

        A full tier has room again when the coldest leaf of all has gone, wherever that is. One
        that takes nothing at all leaves only what is in memory; leaves in files follow, because
        they may keep their parents in memory.
        """
        if not self._cache.evicts:
            return None
        leaf = None if self._refusal == "full" else self._copies.coldest_leaf()
        return self._cache.victim() if leaf is None else leaf
