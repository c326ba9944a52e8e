"""Arguments of the public face, checked: tokens, numbers of tokens, and matches.

Each check says what was expected and what was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi.layout import KVLayout
from ptstore_mpi.types import Match, SegmentRef, segment_owner

__all__ = ["Tokens", "as_token_ids", "check_match", "whole_blocks"]

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]


def check_match(match: Match, namespace: bytes, block_tokens: int, *, server_count: int) -> None:
    """Raise TypeError or ValueError unless ``match`` is one of this namespace and job, unchanged.

    Parameters
    ----------
    match
        What was given.
    namespace, block_tokens
        Digest of the namespace, and tokens of its blocks.
    server_count
        Servers of the job.
    """
    if not isinstance(match, Match):
        raise TypeError(f"expected a Match, got {type(match).__name__}")
    if match.namespace != namespace:
        given = match.namespace.hex() if isinstance(match.namespace, bytes) else ""
        raise ValueError(
            f"expected a match of this namespace ({namespace.hex()}), "
            f"got one of {given or 'no namespace'}"
        )
    refs = match.segments
    if not isinstance(refs, tuple) or not all(isinstance(ref, SegmentRef) for ref in refs):
        raise TypeError(f"match.segments: expected a tuple of SegmentRef, got {refs!r:.80}")
    strangers = [owner for ref in refs if (owner := segment_owner(ref.segment)) >= server_count]
    if strangers:
        raise ValueError(
            f"expected a match of this job, which has {server_count} server(s), got one that names "
            f"server {strangers[0]}"
        )
    tokens = sum(ref.block_count for ref in refs) * block_tokens
    if match.tokens != tokens:
        raise ValueError(
            f"expected a match as it was returned, of {tokens} tokens in its segments, "
            f"got tokens = {match.tokens!r:.80}"
        )
    if not isinstance(match.prompt_tokens, int) or match.prompt_tokens < tokens:
        raise ValueError(
            f"expected a match as it was returned, of a prompt of at least {tokens} tokens, "
            f"got prompt_tokens = {match.prompt_tokens!r:.80}"
        )


def whole_blocks(tokens: int, layout: KVLayout, *, name: str) -> int:
    """Return ``tokens`` in blocks; raise TypeError or ValueError unless they are whole blocks."""
    try:
        blocks, rest = divmod(index(tokens), layout.block_tokens)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {tokens!r:.80}") from None
    if rest or blocks < 0:
        raise ValueError(
            f"{name}: expected a multiple of block_tokens ({layout.block_tokens}), "
            f"got {tokens!r:.80}"
        )
    return blocks


def as_token_ids(tokens: Tokens) -> npt.NDArray[np.uint32]:
    """Return ``tokens`` as contiguous uint32, shape (n,).

    Raises
    ------
    TypeError, ValueError
        Not a flat, non-empty sequence of integers in 0 .. 2**32 - 1.
    """
    try:
        ids = np.asarray(tokens)
    except Exception as error:
        raise TypeError(
            f"expected a flat sequence of token ids, got {type(tokens).__name__}: {error}"
        ) from None
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"expected a flat, non-empty sequence of token ids, got shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"expected integer token ids, got dtype {ids.dtype}")
    if ids.min() < 0 or ids.max() > 0xFFFFFFFF:
        raise ValueError(f"expected token ids in 0 .. 4294967295, got {ids.min()} .. {ids.max()}")
    return np.ascontiguousarray(ids, dtype=np.uint32)
