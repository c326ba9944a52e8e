"""The rankings by name."""

from __future__ import annotations

from ptstore_mpi.cache.policies.base import Ranking
from ptstore_mpi.cache.policies.gdsf import GdsfRanking
from ptstore_mpi.cache.policies.lfu import LfuRanking
from ptstore_mpi.cache.policies.lru import LruRanking
from ptstore_mpi.cache.policies.s3fifo import S3FifoRanking

__all__ = ["RANKING_NAMES", "make_ranking"]

_RANKINGS: dict[str, type[Ranking]] = {
    ranking.name: ranking for ranking in (LruRanking, LfuRanking, GdsfRanking, S3FifoRanking)
}

RANKING_NAMES = tuple(_RANKINGS)
"""Names of the rankings, the safest first."""


def make_ranking(name: str, capacity_bytes: int) -> Ranking:
    """Return a fresh ranking for a pool of so many bytes; an unknown name is a KeyError."""
    return _RANKINGS[name](capacity_bytes)
