"""Room for what comes: the order in which things go (section 5 of the design).

Replicas while there are more than their lower limit; then what is owned: with a file tier its
memory, else, or where the tier takes nothing, leaves that nobody uses. What is left, a server full
of parents, is `Trimming`'s.
"""

from __future__ import annotations

from collections.abc import Generator

from ptstore_mpi.cache.owned import OwnedCache
from ptstore_mpi.cache.replicas import ReplicaCache
from ptstore_mpi.protocol.actions import Action, ToPeer
from ptstore_mpi.protocol.demotion import Demotion
from ptstore_mpi.protocol.removal import Removal

__all__ = ["MakingRoom"]


class MakingRoom:
    """Makes room in the arena of one server.

    Parameters
    ----------
    cache, replicas
        What shares the arena.
    removal
        Takes what is dropped.

    Attributes
    ----------
    demotion
        Puts owned segments into a file tier; None: there is none.
    """

    def __init__(self, cache: OwnedCache, replicas: ReplicaCache, removal: Removal) -> None:
        self._cache = cache
        self.replicas = replicas
        self.removal = removal
        self.demotion: Demotion | None = None

    @property
    def idle_bytes(self) -> int:
        """Bytes of owned segments that may go, at most."""
        if not self._cache.evicts and self.demotion is None:
            return 0
        return self._cache.owned_bytes - self._cache.leased_bytes

    def make_room(self, need_bytes: int, now: float) -> Generator[Action | ToPeer, None, bool]:
        """Let something go; False: nothing can go now.

        Parameters
        ----------
        need_bytes
            Room that is wanted in all.
        now
            Time, s.
        """
        replica = self.replicas.victim_for_owned()
        if replica is not None:
            self.replicas.drop(replica, now, evicted=True)
            return True
        return (yield from self.of_owned(need_bytes, now))

    def of_owned(self, need_bytes: int, now: float) -> Generator[Action | ToPeer, None, bool]:
        """Let something owned go, as in `make_room`."""
        if self.demotion is not None:
            return (yield from self.demotion.make_room(need_bytes, now))
        victim = self._cache.victim()
        if victim is None:
            return False
        yield from self.removal.evict(victim, now)
        return True
