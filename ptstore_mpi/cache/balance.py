"""How much of one arena is for replicas, where that follows the work (`replica_share`).

What a prompt waits for is, by bytes, ``local``, ``remote``, ``disk`` or ``recompute`` time. More
replicas turn remote bytes into local ones; more owned segments turn recomputed bytes (or such from
disk) into found ones. Each side says what a step more would have saved it and what a step less
would have cost::

    replicas.more > owned.less      the target rises by a step
    owned.more > replicas.less      it falls by one

The target is the lower limit of the replicas: owned segments push them down to it where they need
the room, replicas push owned segments out up to it, and nothing is dropped only because the target
moved. The upper limit stays what the settings say.

Nothing moves while a time is unknown, nor on a difference that chance explains.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from ptstore_mpi.cache.replicas import ReplicaCache
from ptstore_mpi.cache.sides import Gain, ReplicaSide, SegmentSide
from ptstore_mpi.cache.times import MeanTime, Times
from ptstore_mpi.types import BalanceDecision, BlockHashes, SegmentRef

__all__ = ["Balance"]

_STEPS = 16  # of an arena
_PERIODS = 4  # of a step: as many bytes leave between two decisions
_LEAST_ASKED = 8  # prompts between two decisions
_LEAST_APART_S = 0.1
_SHARE_LEFT = 0.97  # of the gains, after each decision
_MARGIN_SHARE = 0.1
_ERRORS = 1.0  # standard errors of a difference that are put down to chance
_MOST_DECISIONS = 256


class Balance:
    """Moves the lower limit of one server's replicas between two limits.

    Parameters
    ----------
    replicas
        The replicas; their ``least_bytes`` is the target from now on.
    assumed
        Times that are taken in place of measured ones where they are not 0.

    Attributes
    ----------
    replica_side, segment_side
        What they hear of; to be told what becomes of replicas and of owned segments.
    decisions
        The last 256, oldest first.
    move_count, decision_count
        How often the target moved, and how often that was decided about.
    """

    def __init__(self, replicas: ReplicaCache, assumed: Times | None = None) -> None:
        self._replicas = replicas
        self._capacity_bytes = replicas.room.capacity_bytes
        self._least_bytes, self._most_bytes = replicas.least_bytes, replicas.most_bytes
        self._step_bytes = max(self._capacity_bytes // _STEPS, 1)
        self._assumed = Times() if assumed is None else assumed
        self._means = [MeanTime() for _ in Times._fields]
        self.times = self._assumed
        self.replica_side = ReplicaSide(self._step_bytes, self.times)
        self.segment_side = SegmentSide(self._step_bytes, self.times)
        self._asked_count = 0
        self._decided_s = -math.inf
        self.decisions: deque[BalanceDecision] = deque(maxlen=_MOST_DECISIONS)
        self.move_count = 0
        self.decision_count = 0

    def measured(self, times: Iterable[float]) -> None:
        """Take in what a client measured, as `Times`; what it does not know is 0."""
        for mean, value_s in zip(self._means, times, strict=False):
            mean.add(1e9, value_s)
        found = zip(self._assumed, self._means, strict=True)
        self.times = Times(*(assumed_s or mean.value_s for assumed_s, mean in found))
        self.replica_side.times = self.segment_side.times = self.times

    def asked(self, hashes: BlockHashes, refs: Iterable[SegmentRef], now: float) -> None:
        """Take note of a prompt, and of the record that is here; decide if it is time.

        Every server sees every prompt.
        """
        self.segment_side.asked(hashes, refs)
        self._asked_count += 1
        left_bytes = self.replica_side.left_bytes + self.segment_side.left_bytes
        if (
            left_bytes * _PERIODS >= self._step_bytes
            and self._asked_count >= _LEAST_ASKED
            and now - self._decided_s >= _LEAST_APART_S
        ):
            self._decide(now)

    def counters(self) -> dict[str, int]:
        """Return the target, what it rests on and how often it moved, by name.

        Shares in parts per million of the arena, gains in microseconds of a step, times in
        microseconds for a GB.
        """
        share = self._replicas.least_bytes / self._capacity_bytes
        replicas, segments = self.replica_side, self.segment_side
        return {
            "balance_share_ppm": round(1e6 * share),
            "balance_replica_more_us": round(1e6 * replicas.more.seconds),
            "balance_replica_less_us": round(1e6 * replicas.less.seconds),
            "balance_owned_more_us": round(1e6 * segments.more.seconds),
            "balance_owned_less_us": round(1e6 * segments.less.seconds),
            **{
                f"balance_{name.removesuffix('_s')}_us": round(1e6 * value_s)
                for name, value_s in self.times._asdict().items()
            },
            "balance_move_count": self.move_count,
            "balance_decision_count": self.decision_count,
        }

    # -- internals ---------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        replicas, segments, times = self.replica_side, self.segment_side, self.times
        before = self._replicas.least_bytes
        if times.local_s and times.remote_s and times.recompute_s:
            if self._is_more(replicas.more, segments.less):
                self._replicas.least_bytes = min(before + self._step_bytes, self._most_bytes)
            elif self._is_more(segments.more, replicas.less):
                self._replicas.least_bytes = max(before - self._step_bytes, self._least_bytes)
        moved_bytes = self._replicas.least_bytes - before
        self.move_count += moved_bytes != 0
        self.decision_count += 1
        gains = (replicas.more, replicas.less, segments.more, segments.less)
        self.decisions.append(
            BalanceDecision(
                now,
                self._replicas.least_bytes / self._capacity_bytes,
                moved_bytes,
                replicas.more.seconds,
                replicas.less.seconds,
                segments.more.seconds,
                segments.less.seconds,
                *times,
            )
        )
        for gain in gains:  # what was seen with another share says little about this one
            gain.fade(0.0 if moved_bytes else _SHARE_LEFT)
        replicas.left_bytes = segments.left_bytes = 0
        self._asked_count = 0
        self._decided_s = now

    def _is_more(self, gain: Gain, loss: Gain) -> bool:
        """Tell whether a gain is clearly more than a loss, of which one event may be unseen."""
        squares = gain.squares + loss.squares + self.segment_side.event_s**2
        chance_s = _ERRORS * math.sqrt(squares)
        margin_s = _MARGIN_SHARE * max(gain.seconds, loss.seconds)
        return gain.seconds - loss.seconds > chance_s + margin_s
