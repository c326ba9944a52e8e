"""Both sides of a balance: what a step more, and a step less, of memory would have come to.

Each side follows one kind of copies of a server, replicas or owned segments. *More* is what its
ghosts would have saved; *less* is what the copies saved that were used least lately, as many as
a step holds. Owns names, sizes and sums; decides nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, TypeVar

from ptstore_mpi.cache.ghosts import ReplicaGhosts, SegmentGhosts
from ptstore_mpi.cache.times import GB_BYTES, Times
from ptstore_mpi.types import BlockHashes, SegmentRef

__all__ = ["Gain", "ReplicaSide", "SegmentSide", "Watch"]

C = TypeVar("C", contravariant=True)


class Watch(Protocol[C]):
    """Who hears what becomes of the copies of a cache."""

    def kept(self, copy: C) -> None:
        """Take note of a copy that is found from now on."""

    def used(self, copies: Sequence[C]) -> None:
        """Take note of copies that one request used, in the order of its prefix."""

    def left(self, copy: C, *, evicted: bool, on_disk: bool = False) -> None:
        """Take note of a copy that has left memory; ``evicted``: to make room.

        ``on_disk``: a file tier has it.
        """


class Gain:
    """Seconds saved of late, with their scatter."""

    __slots__ = ("seconds", "squares")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.squares = 0.0

    def add(self, seconds: float) -> None:
        """Add what one request would have saved."""
        self.seconds += seconds
        self.squares += seconds * seconds

    def fade(self, share_left: float) -> None:
        """Let everything so far count less."""
        self.seconds *= share_left
        self.squares *= share_left**2


class Oldest:
    """The copies that were used least lately, up to a number of bytes, in O(1) a use.

    Parameters
    ----------
    most_bytes
        As many bytes, or one copy more.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._recent: OrderedDict[Hashable, int] = OrderedDict()
        self._oldest: OrderedDict[Hashable, int] = OrderedDict()
        self._oldest_bytes = 0
        self._fresh: set[Hashable] = set()

    def touch(self, key: Hashable, nbytes: int) -> None:
        """Make a copy the latest of all."""
        self._remove(key)
        self._recent[key] = nbytes
        self._fill_up()

    def leave(self, key: Hashable) -> None:
        """Forget a copy."""
        self._remove(key)
        self._fill_up()

    def take(self, key: Hashable) -> bool:
        """Tell whether a copy is among the oldest; once for each time that it got there."""
        if key not in self._fresh:
            return False
        self._fresh.discard(key)
        return True

    def _remove(self, key: Hashable) -> None:
        if self._recent.pop(key, None) is None:
            self._oldest_bytes -= self._oldest.pop(key, 0)
            self._fresh.discard(key)

    def _fill_up(self) -> None:
        while self._oldest_bytes < self._most_bytes and self._recent:
            key, nbytes = self._recent.popitem(last=False)
            self._oldest[key] = nbytes
            self._oldest_bytes += nbytes
            self._fresh.add(key)


class _Replica(Protocol):
    @property
    def ref(self) -> SegmentRef: ...
    @property
    def block_count(self) -> int: ...
    @property
    def tensor_bytes(self) -> tuple[int, ...]: ...
    @property
    def charged_bytes(self) -> int: ...


class _Segment(Protocol):
    @property
    def id(self) -> int: ...
    @property
    def serial(self) -> int: ...
    @property
    def hashes(self) -> BlockHashes: ...
    @property
    def tensor_bytes(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def metadata_bytes(self) -> int: ...


class ReplicaSide:
    """Replicas: a byte of them saves the difference between ``remote`` and ``local``.

    Parameters
    ----------
    step_bytes
        Bytes that are compared.

    Attributes
    ----------
    more, less
        What a step more would have saved, and what a step less would not have.
    left_bytes
        Bytes that left, or found no room, since somebody set it to 0.
    times
        What KV costs; see `Times`.
    """

    def __init__(self, step_bytes: int, times: Times) -> None:
        self.times = times
        self.more = Gain()
        self.less = Gain()
        self.left_bytes = 0
        self._ghosts = ReplicaGhosts(step_bytes)
        self._oldest = Oldest(step_bytes)

    @property
    def _worth_s(self) -> float:
        return max(self.times.remote_s - self.times.local_s, 0.0) / GB_BYTES

    def kept(self, copy: _Replica) -> None:
        """As `Watch.kept`."""
        self._oldest.touch(copy.ref.segment, copy.charged_bytes)

    def used(self, copies: Sequence[_Replica]) -> None:
        """As `Watch.used`."""
        for copy in copies:
            if self._oldest.take(copy.ref.segment):
                self.less.add(self._worth_s * copy.block_count * sum(copy.tensor_bytes))
            self._oldest.touch(copy.ref.segment, copy.charged_bytes)

    def left(self, copy: _Replica, *, evicted: bool, on_disk: bool = False) -> None:
        """As `Watch.left`."""
        self._oldest.leave(copy.ref.segment)
        if evicted:
            self.refused(copy.ref, copy.charged_bytes)

    def refused(self, ref: SegmentRef, nbytes: int) -> None:
        """Take note of a replica of so many bytes that there was no room for."""
        self._ghosts.add(ref, nbytes)
        self.left_bytes += nbytes

    def missed(self, ref: SegmentRef, nbytes: int) -> None:
        """Take note of so many bytes that were wished for and are not here."""
        if self._ghosts.take(ref):
            self.more.add(self._worth_s * nbytes)


class SegmentSide:
    """Owned segments: a byte of them saves its prefill, or a read from disk, for a remote one.

    What they save is told by the prompts, of which every server sees all, not by reads: what
    other nodes read from their replicas of a segment is lost with it, too.

    Parameters
    ----------
    step_bytes
        Bytes that are compared.

    Attributes
    ----------
    more, less, left_bytes, times
        As in `ReplicaSide`.
    event_s
        What missing one segment costs, as the last that left would have.
    """

    def __init__(self, step_bytes: int, times: Times) -> None:
        self.times = times
        self.more = Gain()
        self.less = Gain()
        self.left_bytes = 0
        self.event_s = 0.0
        self._ghosts = SegmentGhosts(step_bytes)
        self._oldest = Oldest(step_bytes)
        self._block_bytes: dict[int, int] = {}

    @property
    def _worth_s(self) -> float:
        return max(self.times.recompute_s - self.times.remote_s, 0.0) / GB_BYTES

    def kept(self, copy: _Segment) -> None:
        """As `Watch.kept`."""
        self._block_bytes[copy.id] = sum(copy.tensor_bytes)
        self._oldest.touch(copy.id, copy.nbytes + copy.metadata_bytes)

    def used(self, copies: Sequence[_Segment]) -> None:
        """As `Watch.used`: what continues a segment goes before it."""
        for copy in reversed(copies):
            self._oldest.touch(copy.id, copy.nbytes + copy.metadata_bytes)

    def left(self, copy: _Segment, *, evicted: bool, on_disk: bool = False) -> None:
        """As `Watch.left`."""
        self._oldest.leave(copy.id)
        self._block_bytes.pop(copy.id, None)
        if evicted:
            nbytes = copy.nbytes + copy.metadata_bytes
            block_bytes = sum(copy.tensor_bytes)
            self._ghosts.add(
                copy.serial, copy.hashes, nbytes, block_bytes=block_bytes, on_disk=on_disk
            )
            self.left_bytes += nbytes
            self.event_s = self._worth_s * copy.nbytes

    def asked(self, hashes: BlockHashes, refs: Iterable[SegmentRef]) -> None:
        """Take note of a prompt, and of the record that this server has of it."""
        oldest_bytes = known_blocks = 0
        for ref in refs:
            known_blocks += ref.block_count
            if self._oldest.take(ref.segment):
                oldest_bytes += ref.block_count * self._block_bytes[ref.segment]
        if oldest_bytes:
            self.less.add(self._worth_s * oldest_bytes)
        lost_bytes, disk_bytes = self._ghosts.take(hashes, known_blocks)
        if lost_bytes or disk_bytes:
            disk_s = max(self.times.disk_s - self.times.remote_s, 0.0) / GB_BYTES
            self.more.add(self._worth_s * lost_bytes + disk_s * disk_bytes)
