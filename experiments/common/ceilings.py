"""What the best cache could find in a trace: an infinite one, and Belady's with a capacity.

Owns the two bounds; knows hashes of blocks, no store. All nodes' memory counts as one cache of
equal blocks, without metadata, copies or borders between nodes.

A request *asks* for the whole blocks of its prompt, one token less (that one is left to compute),
and leaves the whole blocks of what it keeps, prompt and known answer, to be cached.

**infinite**: a block is found if any earlier request left it.

**belady** (the MIN of Belady, 1966, that may also bypass): over its room it drops the block whose
next use is farthest, the deepest among equals; a block that comes again before its next use as
something left, not asked for, is not worth keeping until then. Hashes are chained: whoever asks
for a block asks for its ancestors too, so a parent's next use is never later than its child's and
the victim is always a leaf. The rule that a prefix without its beginning is worth nothing thus
costs MIN nothing: what it finds of a prompt is the prompt's beginning.

In this sense it bounds: no cache of as many blocks, prefix-closed or not, whenever it evicts and
whatever it refuses, finds more blocks in this order of requests. Between a block's being left and
its next use lies an interval, worth one block found if the block is kept all along; at most
`capacity` intervals may cover a moment, and dropping the one that ends last is optimal for that
(Carlisle and Lloyd, 1995: k-colouring of intervals).

It is fast because all kept blocks with the same next use are on one prompt: a *number* for each
request that still comes is all the state there is.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class AskedBlocks:
    """The blocks of one request.

    Attributes
    ----------
    keys
        Of the blocks that it leaves, from position 0: int64, shape (blocks,); chained.
    asked_blocks
        How many of the first ones it asks for.
    asked_tokens
        Tokens of its prompt.
    """

    keys: Keys
    asked_blocks: int
    asked_tokens: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a bound finds of a trace.

    Attributes
    ----------
    found_blocks
        Blocks found.
    block
        Of the blocks asked for.
    usable_prefix
        Of the tokens asked for: those of found blocks.
    """

    found_blocks: int
    block: float
    usable_prefix: float


class Ceilings:
    """Bounds of one trace.

    Parameters
    ----------
    requests
        Blocks of each request, in order.
    block_tokens
        Tokens of a block.
    """

    def __init__(self, requests: Sequence[AskedBlocks], block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._asked_blocks = sum(each.asked_blocks for each in requests)
        self._asked_tokens = sum(each.asked_tokens for each in requests)
        counts = np.array([len(each.keys) for each in requests], dtype=np.int64)
        keys = np.concatenate([each.keys for each in requests] or [np.empty(0, np.int64)])
        request = np.repeat(np.arange(len(requests)), counts)
        position = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
        asked = position < np.repeat([each.asked_blocks for each in requests], counts)
        order = np.argsort(keys, kind="stable")  # equal keys stay in the order of requests
        again = keys[order[1:]] == keys[order[:-1]]
        earlier, later = order[:-1][again], order[1:][again]
        next_use = np.full(len(keys), _NEVER)
        next_use[earlier] = np.where(asked[later], request[later], _NEVER)
        self.distinct_blocks = len(keys) - len(later)
        self._found_ever = int(asked[later].sum())
        self._uses = [_counted(part) for part in np.split(next_use, np.cumsum(counts)[:-1])]

    def infinite(self) -> Ceiling:
        """Return what a cache without limit finds."""
        return self._ceiling(self._found_ever)

    def belady(self, capacity_blocks: int) -> Ceiling:
        """Return what no cache of so many blocks exceeds."""
        return self._ceiling(sum(self.belady_found(capacity_blocks)))

    def belady_found(self, capacity_blocks: int) -> list[int]:
        """Return the blocks that `belady` finds, request by request."""
        kept: dict[int, int] = {}  # blocks by the request that uses them next
        farthest: list[int] = []  # the same requests, negated: a heap
        total = 0
        found = []
        for number, uses in enumerate(self._uses):
            found.append(kept.pop(number, 0))
            total -= found[-1]
            for use, blocks in uses:
                if use not in kept:
                    heapq.heappush(farthest, -use)
                    kept[use] = 0
                kept[use] += blocks
                total += blocks
            while total > capacity_blocks:
                last = -farthest[0]
                dropped = min(kept.get(last, 0), total - capacity_blocks)
                total -= dropped
                if dropped and kept[last] > dropped:
                    kept[last] -= dropped
                else:
                    kept.pop(last, None)
                    heapq.heappop(farthest)
        return found

    def _ceiling(self, found_blocks: int) -> Ceiling:
        return Ceiling(
            found_blocks,
            found_blocks / max(self._asked_blocks, 1),
            found_blocks * self._block_tokens / max(self._asked_tokens, 1),
        )


def _counted(next_use: Keys) -> list[tuple[int, int]]:
    """Return (request, blocks that it uses next), without those that nobody uses."""
    uses, blocks = np.unique(next_use[next_use != _NEVER], return_counts=True)
    return list(zip(uses.tolist(), blocks.tolist(), strict=True))
