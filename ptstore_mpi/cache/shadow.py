"""A pool that holds no bytes: what would be in it under a policy, and what it would have served.

For choosing among policies while a server runs, and for experiments. Contents are closed under
prefixes; chains of length one make it a plain cache.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ptstore_mpi.cache.policies.tree import EvictionPolicy

__all__ = ["Block", "ShadowCounts", "ShadowPool"]

Block = tuple[int, int, float]
"""(key, nbytes, cost_s) of one block or segment of a chain."""


@dataclass(slots=True)
class ShadowCounts:
    """What a pool was asked for, and what it had.

    Attributes
    ----------
    block_count, nbytes
        Asked for.
    hit_block_count, hit_bytes
        Of these, in the pool.
    prefix_hit_block_count, prefix_hit_bytes
        Of these, before the first one of the chain that was not there: what a load can use.
    """

    block_count: int = 0
    nbytes: int = 0
    hit_block_count: int = 0
    hit_bytes: int = 0
    prefix_hit_block_count: int = 0
    prefix_hit_bytes: int = 0


class ShadowPool:
    """One pool under one policy, metadata only.

    Parameters
    ----------
    policy
        Decides what leaves; fresh.
    capacity_bytes
        Size of the pool.
    linked
        Whether a block continues the one before it. If not, blocks come and go on their own and
        a chain may have holes: the comparison that shows what closed contents are worth.
    """

    def __init__(self, policy: EvictionPolicy, capacity_bytes: int, *, linked: bool = True) -> None:
        self.policy = policy
        self.capacity_bytes = capacity_bytes
        self.counts = ShadowCounts()
        self._linked = linked

    def access(self, chain: Sequence[Block], now: float = 0.0) -> int:
        """Ask for a chain, from position 0, and keep it; return the blocks a load could use."""
        usable = self._access_prefix(chain, now) if self._linked else self._access_each(chain, now)
        counts = self.counts
        counts.block_count += len(chain)
        counts.nbytes += sum(nbytes for _, nbytes, _ in chain)
        counts.prefix_hit_block_count += usable
        counts.prefix_hit_bytes += sum(nbytes for _, nbytes, _ in chain[:usable])
        return usable

    def extend(self, parent: int | None, blocks: Iterable[Block], now: float = 0.0) -> None:
        """Take in the blocks that continue ``parent``, up to the first without room."""
        for key, nbytes, cost_s in blocks:
            if not self._make_room(nbytes, parent):
                return
            self.policy.add(key, nbytes, cost_s=cost_s, parent=parent, now=now)
            parent = key

    def resize(self, capacity_bytes: int) -> None:
        """Change the size of the pool; what is too much goes when something is added."""
        self.capacity_bytes = capacity_bytes
        self.policy.resize(capacity_bytes)

    # -- internals -------------------------------------------------------------------------

    def _access_prefix(self, chain: Sequence[Block], now: float) -> int:
        policy = self.policy
        depth = bisect_left(chain, True, key=lambda block: block[0] not in policy)
        parent = None
        if depth:
            parent = chain[depth - 1][0]
            policy.hit(parent, now)
        self.extend(parent, chain[depth:], now)
        self.counts.hit_block_count += depth
        self.counts.hit_bytes += sum(nbytes for _, nbytes, _ in chain[:depth])
        return depth

    def _access_each(self, chain: Sequence[Block], now: float) -> int:
        usable, is_whole = 0, True
        for block in chain:
            if block[0] in self.policy:
                self.policy.hit(block[0], now)
                self.counts.hit_block_count += 1
                self.counts.hit_bytes += block[1]
                usable += is_whole
            else:
                is_whole = False
                self.extend(None, (block,), now)
        return usable

    def _make_room(self, nbytes: int, parent: int | None) -> bool:
        policy = self.policy
        if policy.nbytes + nbytes <= self.capacity_bytes:
            return True
        if nbytes > self.capacity_bytes:
            return False
        if parent is not None:
            policy.pin(parent)
        while policy.nbytes + nbytes > self.capacity_bytes:
            victim = policy.victim()
            if victim is None:
                break
            policy.evict(victim)
        if parent is not None:
            policy.unpin(parent)
        return policy.nbytes + nbytes <= self.capacity_bytes
