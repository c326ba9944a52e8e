"""The file tier in the life of a server: what follows from its events, and from time.

Puts demotion and promotion into the read and the write path. Owns nothing but the order in which
they take their turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.protocol.actions import Action, ToPeer
from ptstore_mpi.protocol.demotion import Demotion
from ptstore_mpi.protocol.promotion import Promotion
from ptstore_mpi.protocol.reads import ReadPath
from ptstore_mpi.protocol.writes import WritePath

__all__ = ["LowerTier"]


class LowerTier:
    """What one server does with the file tier of its cache.

    Parameters
    ----------
    cache
        Its owned cache, with copies and tier.
    reads, writes
        Its paths, which from now on bring back and demote.
    reused_only
        Whether only what was read since it was published may be written.
    """

    def __init__(
        self, cache: OwnedCache, reads: ReadPath, writes: WritePath, *, reused_only: bool
    ) -> None:
        assert cache.tier is not None, "a server without a tier"
        self._tier = cache.tier
        self._writes = writes
        making_room = writes.making_room
        removal = making_room.removal
        self.demotion = Demotion(cache, removal, making_room.replicas, reused_only=reused_only)
        self.promotion = Promotion(
            cache,
            removal,
            demotion=self.demotion,
            make_room=making_room.make_room,
            grant=reads.grant,
            again=reads.acquire,
        )
        reads.promotion = self.promotion
        making_room.demotion = self.demotion

    def poll(self, now: float) -> Iterator[Action | ToPeer]:
        """Take what has ended in the tier, and go on with what waited for it."""
        ended = self._tier.poll()
        for each in ended:
            if each.kind == "write":
                self.demotion.write_ended(each.segment, now, is_done=each.is_done)
            else:
                yield from self.promotion.read_ended(each.segment, now, is_done=each.is_done)
        if self._tier.take_change() or ended:
            yield from self.promotion.start_reads(now)
            yield from self._retry(now)
            self.demotion.write_ahead()

    def tick(self, now: float) -> Iterator[Action | ToPeer]:
        """Let time pass: end what has waited long enough."""
        self.promotion.expire(now)
        yield from self._retry(now)

    def _retry(self, now: float) -> Iterator[Action | ToPeer]:
        """Acquires first: what is stored is often what a load has brought too little of."""
        yield from self.promotion.retry_roomless(now)
        yield from self._writes.retry_waiting(now)

    def counters(self) -> dict[str, int]:
        """Return what the tier did, and what it was good for; bytes and counts."""
        counts = {
            "useful_bytes": self.promotion.useful_bytes,
            "demoted_count": self.demotion.demoted_count,
            "promoted_count": self.promotion.promoted_count,
        }
        named = {f"{self._tier.name}_{name}": count for name, count in counts.items()}
        return {**self._tier.counters(), **named}
