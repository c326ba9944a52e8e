"""Settings of the whole process for a rank that computes on the CPU with torch.

Owns the choice of threads and two switches that make short prefills faster; all are set once,
by `TransformersEngine.from_pretrained`. Never touches a model or the store.
"""

from __future__ import annotations

import ctypes
import os

from ptstore_mpi.errors import ConfigError

__all__ = ["default_thread_count", "set_up_process"]

# Parameters of glibc's mallopt (malloc.h).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20


def default_thread_count(computing_rank_count: int) -> int:
    """Return this process's share of its cores: those of its affinity mask over the ranks.

    The ranks of a node that compute are taken to share the mask; where the launcher binds every
    rank to cores of its own, pass 1.
    """
    if computing_rank_count < 1:
        raise ConfigError(f"computing_rank_count: expected at least 1, got {computing_rank_count}")
    return max(1, len(os.sched_getaffinity(0)) // computing_rank_count)


def set_up_process(thread_count: int) -> None:
    """Pin torch to `thread_count` threads and make short prefills fast; for the whole process."""
    if thread_count < 1:
        raise ConfigError(f"threads: expected at least 1, got {thread_count}")
    import torch

    torch.set_num_threads(thread_count)
    # The suffix of a prompt has a mask, and with one the library repeats the prefix for every
    # query head unless told that the kernel knows grouped queries; on the CPU it does, bit for
    # bit (7 to 12 % of a 16-token suffix behind 2,048).
    os.environ.setdefault("TRANSFORMERS_SDPA_FORCE_GQA", "1")
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let the C library keep what one request frees for the next one.

    It would return it to the system, and the next request's buffers would cost a page fault per
    4 KiB: 15 to 20 ms of a mean load of 94 MB, 6 ms with this. At most the peak stays allocated.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # not glibc
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
