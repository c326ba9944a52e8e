"""How fast a tier is, against a plain loop over one file.

``python -m ptstore_mpi.tiers.throughput DIRECTORY`` prints a table. Both run in the same folder,
the same mode, the same run, one after the other, several times: medians. The plain loop writes a
file with all its blocks from front to back, a segment with each call, and reads it back; it
computes no checksums and keeps no headers. The tier does the same through `SlabStore`, with a
caller that polls and naps as a server does, and checks every byte it reads.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ptstore_mpi.tiers.file_system import examine
from ptstore_mpi.tiers.files import Files
from ptstore_mpi.tiers.header import SegmentContent
from ptstore_mpi.tiers.outcomes import Refusal
from ptstore_mpi.tiers.room import FileSlot
from ptstore_mpi.tiers.settings import TierSettings
from ptstore_mpi.tiers.slab_store import SlabStore
from ptstore_mpi.types import PAGE_BYTES

__all__ = ["Throughput", "main", "measure"]

_MIB = 1 << 20
_NAP_S = 100e-6
_BLOCKS, _TENSORS = 16, 64


@dataclass(frozen=True, slots=True)
class Throughput:
    """Median speeds for segments of one size, bytes per second."""

    segment_bytes: int
    plain_write_bytes_per_s: float
    tier_write_bytes_per_s: float
    plain_read_bytes_per_s: float
    tier_read_bytes_per_s: float


def measure(
    settings: TierSettings, segment_bytes: int, *, total_bytes: int, round_count: int = 3
) -> Throughput:
    """Return the speeds of a tier of ``settings`` and of the plain loop.

    Parameters
    ----------
    settings
        Where and how; the capacity must hold one slab more than ``total_bytes``.
    segment_bytes
        Size of each segment: a multiple of 4 MiB, or a power of two from 4 KiB.
    total_bytes
        Bytes written and read in each round.
    round_count
        Rounds, of which the medians are taken.
    """
    arena = memoryview(mmap.mmap(-1, max(2 * segment_bytes, 128 * _MIB)))
    arena[:] = os.urandom(_MIB) * (arena.nbytes // _MIB)
    count = max(total_bytes // segment_bytes, 1)
    views = [
        arena[start : start + segment_bytes] for start in range(0, arena.nbytes, segment_bytes)
    ]
    facts = examine(settings.directory, settings.direct)
    speeds: list[tuple[float, ...]] = []
    for _ in range(round_count):
        plain = _plain(settings.directory, Files(direct=facts.direct), views, count)
        tier = _tier(settings, views, count)
        speeds.append(tuple(count * segment_bytes / seconds for seconds in (*plain, *tier)))
    medians = [statistics.median(each) for each in zip(*speeds, strict=True)]
    return Throughput(segment_bytes, medians[0], medians[2], medians[1], medians[3])


def _plain(
    directory: str, files: Files, views: list[memoryview], count: int
) -> tuple[float, float]:
    """Return the seconds of writing and of reading."""
    nbytes = views[0].nbytes
    with tempfile.TemporaryDirectory(prefix="ptstore-plain-", dir=directory) as folder:
        descriptor = files.create(Path(folder) / "file", count * nbytes, go_on=lambda: True)
        started_s = time.perf_counter()
        for i in range(count):
            _whole(files.write, descriptor, views[i % len(views)], i * nbytes)
            files.let_pages_go(descriptor, i * nbytes, nbytes, dirty=True)
        wrote_s = time.perf_counter()
        for i in range(count):
            _whole(files.read, descriptor, views[i % len(views)], i * nbytes)
            files.let_pages_go(descriptor, i * nbytes, nbytes, dirty=False)
        read_s = time.perf_counter()
        os.close(descriptor)
    return wrote_s - started_s, read_s - wrote_s


def _whole(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    view: memoryview,
    offset: int,
) -> None:
    done = 0
    while done < view.nbytes:
        done += call(descriptor, [view[done:]], offset + done)


def _tier(settings: TierSettings, views: list[memoryview], count: int) -> tuple[float, float]:
    """Return the seconds of writing and of reading."""
    store = SlabStore.open(settings, owner="throughput")
    try:
        slots = _reserve_all(store, _content(views[0].nbytes), count)
        return tuple(_run(store, slots, views, kind) for kind in ("write", "read"))  # type: ignore[return-value]
    finally:
        store.close()


def _reserve_all(store: SlabStore, content: SegmentContent, count: int) -> list[FileSlot]:
    slots: list[FileSlot] = []
    while len(slots) < count:
        slot = store.reserve(content)
        if isinstance(slot, FileSlot):
            slots.append(slot)
            continue
        assert slot is Refusal.GROWING, f"no room: {slot}, {store.counters()}"
        time.sleep(_NAP_S)
        store.poll()
    return slots


def _run(
    store: SlabStore,
    slots: list[FileSlot],
    views: list[memoryview],
    kind: Literal["write", "read"],
) -> float:
    """Write or read every slot, each into memory that nothing else is using."""
    start = store.start_write if kind == "write" else store.start_read
    free = deque(views)
    lent: dict[FileSlot, memoryview] = {}
    waiting: Iterator[FileSlot] = iter(slots)
    pending = next(waiting, None)
    started_s = time.perf_counter()
    while pending is not None or lent:
        while pending is not None and free and start(pending, free[0]):
            lent[pending] = free.popleft()
            pending = next(waiting, None)
        ended = store.poll()
        for each in ended:
            assert each.outcome == "done", each
            free.append(lent.pop(each.slot))
        if not ended:
            time.sleep(_NAP_S)
    return time.perf_counter() - started_s


def _content(nbytes: int) -> SegmentContent:
    blocks = tensors = 1
    if nbytes % (_BLOCKS * _TENSORS * PAGE_BYTES) == 0 or nbytes >= _BLOCKS * _TENSORS:
        blocks, tensors = _BLOCKS, _TENSORS
    return SegmentContent(
        namespace=bytes(16),
        segment=1,
        hashes=np.zeros((blocks, 16), dtype=np.uint8),
        tensor_bytes=(nbytes // (blocks * tensors),) * tensors,
    )


def main(arguments: list[str] | None = None) -> None:
    """Print a table of the speeds."""
    parser = argparse.ArgumentParser(description="Speed of a file tier against a plain loop.")
    parser.add_argument("directory")
    parser.add_argument("--direct", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--total-mib", type=int, default=512, help="bytes of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--segment-mib", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    given = parser.parse_args(arguments)
    slab_bytes = 256 * _MIB
    settings = TierSettings(
        directory=given.directory,
        # headers take some of each slab, and what is left of it may be smaller than a segment
        capacity_bytes=(2 * given.total_mib * _MIB // slab_bytes + 2) * slab_bytes,
        slab_bytes=slab_bytes,
        io_threads=given.threads,
        direct=given.direct,
    )
    facts = examine(settings.directory, settings.direct)
    print(f"{facts.file_system}, direct: {facts.direct} ({facts.direct_reason}); MB/s")
    print("segment MiB | write plain  tier ratio | read plain  tier ratio")
    for size in given.segment_mib:
        total = given.total_mib * _MIB
        m = measure(settings, size * _MIB, total_bytes=total, round_count=given.rounds)
        writes = (m.plain_write_bytes_per_s, m.tier_write_bytes_per_s)
        reads = (m.plain_read_bytes_per_s, m.tier_read_bytes_per_s)
        print(
            f"{size:11d} | {writes[0] / 1e6:11.0f} {writes[1] / 1e6:5.0f} "
            f"{writes[1] / writes[0]:5.2f} | {reads[0] / 1e6:10.0f} {reads[1] / 1e6:5.0f} "
            f"{reads[1] / reads[0]:5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
