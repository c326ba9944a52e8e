"""The dict that the store is compared with: it knows tokens and outcomes only."""

from __future__ import annotations

from collections import Counter


class Model:
    """Which blocks are known: certainly (copies by hash), or perhaps (a store without an end)."""

    def __init__(self):
        self.copies: Counter[bytes] = Counter()
        self.perhaps: dict[object, list[bytes]] = {}
        self._doubtful: set[object] = set()

    def begin_store(self, key, hashes):
        """A store is under way: each of its blocks may become known at any step."""
        self.perhaps[key] = [bytes(block) for block in hashes]

    def end_store(self, key, stored):
        """A store has ended; None where its client does not know how."""
        if stored is None or stored.reason == "late" or key in self._doubtful:
            return
        hashes = self.perhaps.pop(key)
        if stored.reason == "stored":
            self.copies.update(hashes[len(hashes) - stored.block_count :])

    def drop(self, hashes, running, *, certain):
        """One copy of each of these blocks is gone, or no answer came: perhaps it is."""
        for block in hashes:
            if self.copies[block]:
                self.copies[block] -= 1
        if not certain:
            self.perhaps[object()] = list(hashes)
        self._doubt(running)

    def clear(self, running, *, certain):
        """Nothing is known, and only stores that are still under way can change that."""
        if not certain:
            self.perhaps[object()] = list(self.copies.elements())
        else:
            self.perhaps = {key: value for key, value in self.perhaps.items() if key in running}
        self.copies.clear()
        self._doubt(running)

    def _doubt(self, running):
        """What is under way may have been published, and removed again, without its client."""
        self._doubtful |= set(running)

    def bounds(self, hashes):
        """Return the least and the largest depth, in blocks, that a match may find."""
        perhaps = {block for blocks in self.perhaps.values() for block in blocks}
        least = most = 0
        for depth, block in enumerate(map(bytes, hashes), 1):
            if self.copies[block]:
                least = most = depth
            elif block in perhaps:
                most = depth
        return least, most
