"""The operations of the store on the prefixes of one namespace: match, load, store.

Nothing here is collective. A deadline or a lost race is a result with a reason; exceptions mean
wrong arguments (`LayoutMismatchError`, ``TypeError``, ``ValueError``), an increment that can never
fit (`CapacityError`) or a closed store (`ClosedError`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi import _native
from ptstore_mpi.arguments import Tokens, as_token_ids, check_match, whole_blocks
from ptstore_mpi.layout import KVLayout
from ptstore_mpi.protocol import load as load_protocol
from ptstore_mpi.protocol import maintain
from ptstore_mpi.protocol import store as store_protocol
from ptstore_mpi.protocol.context import ClientContext
from ptstore_mpi.protocol.effects import Now, Operation
from ptstore_mpi.protocol.match import cut, match_broadcast
from ptstore_mpi.protocol.plan import Band, band_ends, bands_of
from ptstore_mpi.protocol.times import checked_prefill
from ptstore_mpi.stats import ClientStats
from ptstore_mpi.tensor_view import bind_bands, bind_views
from ptstore_mpi.transport.base import ClientTransport
from ptstore_mpi.types import SOURCES, BlockHashes, LoadResult, Match, StoreResult

__all__ = ["Namespace"]


class Namespace:
    """Prefixes whose KV is interchangeable. `Store.namespace` makes it.

    Attributes
    ----------
    layout
        Tensors and bytes of a block.
    digest
        16 bytes that root the hashes of this namespace, equal on every rank.
    near_servers
        Servers of this client's node; what others own is remote.
    """

    def __init__(
        self,
        layout: KVLayout,
        digest: bytes,
        *,
        transport: ClientTransport,
        context: ClientContext,
        stats: ClientStats,
        check_open: Callable[[], None],
    ) -> None:
        self.layout = layout
        self.digest = digest
        self.near_servers = context.near
        self._transport = transport
        self._context = context
        self._config = context.config
        self._stats = stats
        self._check_open = check_open
        self._tensor_bytes = tuple(spec.block_bytes for spec in layout.tensors)

    def match(self, tokens: Tokens) -> Match:
        """Find the longest known prefix of a prompt.

        Collective: no. Blocks until every server has answered, at most ``match_timeout_s``.

        Parameters
        ----------
        tokens
            Token ids of the prompt, non-negative 32-bit integers.

        Returns
        -------
        Match
            Whole blocks, at most ``len(tokens) - 1`` tokens; zero is an ordinary result.

        Raises
        ------
        TypeError, ValueError
            ``tokens`` is not a flat sequence of integers in 0 .. 2**32 - 1, or is empty.
        """
        return self._transport.perform(self.matching(tokens))

    def matching(self, tokens: Tokens) -> Operation[Match]:
        """Return the operation behind `match`, to be performed effect by effect.

        Parameters, result and errors are as in `match`.
        """
        self._check_open()
        started = yield Now()
        ids = as_token_ids(tokens)
        usable = (len(ids) - 1) // self.layout.block_tokens
        hashes = self._hash_ids(ids[: usable * self.layout.block_tokens])
        until = started + self._config.match_timeout_s
        found = yield from match_broadcast(self._context, hashes, until)
        if not usable:
            reason = "short"
        elif found.partial:
            reason = "partial"
        elif found.block_count == usable:
            reason = "whole"
        else:
            reason = "diverged" if found.block_count else "cold"
        match = Match(
            found.block_count * self.layout.block_tokens,
            len(ids),
            reason,
            found.refs,
            self.digest,
            (yield Now()) - started,
        )
        self._stats.add_match(match)
        return match

    def cut(self, match: Match, tokens: Tokens, token_count: int) -> Match:
        """Return a match shortened to its first ``token_count`` tokens, to load no more than these.

        Collective: no, it asks no server.

        Parameters
        ----------
        match
            Result of `match` in this namespace.
        tokens
            The prompt it was made for.
        token_count
            What is left: whole blocks, at most ``match.tokens``.

        Raises
        ------
        TypeError, ValueError
            As `load` and `match` raise; also where ``tokens`` are not those of the match.
        """
        self._check_open()
        self._check_own(match)
        ids = as_token_ids(tokens)
        if len(ids) != match.prompt_tokens:
            raise ValueError(
                f"tokens: expected the {match.prompt_tokens} of the match, got {len(ids)}"
            )
        blocks = whole_blocks(token_count, self.layout, name="token_count")
        if token_count > match.tokens:
            raise ValueError(
                f"token_count: expected at most match.tokens ({match.tokens}), got {token_count}"
            )
        hashes = self._hash_ids(ids[: match.tokens])
        if match.segments and hashes[-1].tobytes() != match.segments[-1].last_hash:
            raise ValueError(f"tokens: expected those of the match, got others ({ids!r:.80})")
        if token_count == match.tokens:
            return match
        return dataclasses.replace(
            match,
            tokens=blocks * self.layout.block_tokens,
            reason="cut",
            segments=cut(match.segments, blocks, hashes),
        )

    def load(
        self,
        match: Match,
        out: Sequence[Any],
        *,
        skip_tokens: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> LoadResult:
        """Copy the KV of a match into the caller's memory.

        Call it for an empty match too: that costs nothing, and it is what counts the request.
        Collective: no. Blocks until done, at most ``load_timeout_s``; nothing writes into ``out``
        after it has returned.

        Parameters
        ----------
        match
            Result of `match` in this namespace.
        out
            One writable array or `TensorView` per tensor of the layout, with room for
            ``match.tokens`` and apart from each other; token 0 of the prompt is token 0 of each.
            All in host memory, or all on one CUDA device (see `TensorView`; not yet run on one).
        skip_tokens
            Leading tokens that the caller has already, also beyond the match: a multiple of
            ``block_tokens``, at most ``match.prompt_tokens``. They are not written and count as
            ``engine``.
        progress
            Called during the load, by this thread, with the number of leading tensors of which
            the whole match beyond ``skip_tokens`` is in ``out`` and may be used: more each time,
            and all at last if everything was loaded. What was said stays right if the load then
            ends short. It must not use this store, and be quick: its time counts against leases.
            What it raises ends the load.

            With it, segments of this node are copied layer by layer: a lease that runs out may
            cost them all. What comes from other nodes is there as a whole before the first call;
            so is, with ``verify = always``, everything.

        Raises
        ------
        LayoutMismatchError
            ``out`` does not fit the layout, or there is no CUDA driver; nothing was written.
        TransportError
            A CUDA driver failed; ``out`` is unspecified, and nothing writes into it any more.
        TypeError, ValueError
            No match, one of another namespace or that was changed, ``skip_tokens`` is not whole
            blocks or more than the prompt, or ``progress`` cannot be called.
        """
        operation = self.loading(match, out, skip_tokens=skip_tokens, progress=progress)
        return self._transport.perform(operation)

    def loading(
        self,
        match: Match,
        out: Sequence[Any],
        *,
        skip_tokens: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> Operation[LoadResult]:
        """Return the operation behind `load`, to be performed effect by effect.

        Parameters, result and errors are as in `load`.
        """
        self._check_open()
        self._check_own(match)
        started = yield Now()
        block_tokens = self.layout.block_tokens
        skip_blocks = whole_blocks(skip_tokens, self.layout, name="skip_tokens")
        if skip_tokens > match.prompt_tokens:
            raise ValueError(
                f"skip_tokens: expected at most match.prompt_tokens ({match.prompt_tokens}), "
                f"got {skip_tokens}"
            )
        if progress is not None and not callable(progress):
            raise TypeError(f"progress: expected a function or None, got {progress!r:.80}")
        by_source = dict.fromkeys(SOURCES, 0)
        by_source["engine"] = skip_blocks * block_tokens
        by_server: dict[int, int] = {}
        reason = "nothing"
        blocks = match.tokens // block_tokens
        if blocks > skip_blocks:
            views = bind_views(self.layout, out, blocks, writable=True, first_block=skip_blocks)
            loaded = yield from load_protocol.load(
                self._context,
                match.segments,
                views,
                namespace=self.digest,
                tensor_bytes=self._tensor_bytes,
                skip_blocks=skip_blocks,
                until=started + self._config.load_timeout_s,
                progress=progress,
                bands=() if progress is None else self._bands(match, out, skip_blocks),
            )
            by_source |= {name: n * block_tokens for name, n in loaded.blocks.items()}
            by_server = {server: n * block_tokens for server, n in loaded.by_server.items()}
            reason = loaded.reason
        result = LoadResult(
            sum(by_source.values()), by_source, by_server, reason, (yield Now()) - started
        )
        self._stats.add_load(match, result)
        return result

    def store(
        self, tokens: Tokens, kv: Sequence[Any], *, verified_tokens: int | None = None
    ) -> StoreResult:
        """Keep the KV of a prompt beyond what is known. Call it after the first token.

        Collective: no. Blocks until published, at most ``store_timeout_s``, and no longer than
        ``match_timeout_s`` where a server does not say what it knows; ``kv`` is only read, and
        not any more after it has returned.

        Parameters
        ----------
        tokens
            Token ids of the prompt; its whole blocks are stored.
        kv
            One array or `TensorView` per tensor of the layout, holding all of these blocks. All
            in host memory, or all on one CUDA device (see `TensorView`; not yet run on one).
        verified_tokens
            ``tokens`` of this prompt's `LoadResult`: a known prefix beyond it did not load and is
            not built upon. Default: every known prefix is trusted.

        Raises
        ------
        CapacityError
            The increment is larger than an arena; nothing was written.
        LayoutMismatchError
            ``kv`` does not fit the layout, or there is no CUDA driver; nothing was written.
        TransportError
            A CUDA driver failed; nothing became visible.
        ValueError
            ``verified_tokens`` is not whole blocks.
        """
        return self._transport.perform(self.storing(tokens, kv, verified_tokens=verified_tokens))

    def storing(
        self, tokens: Tokens, kv: Sequence[Any], *, verified_tokens: int | None = None
    ) -> Operation[StoreResult]:
        """Return the operation behind `store`, to be performed effect by effect.

        Parameters, result and errors are as in `store`.
        """
        self._check_open()
        started = yield Now()
        ids = as_token_ids(tokens)
        hashes = self._hash_ids(ids)
        verified = len(hashes)
        if verified_tokens is not None:
            loaded = whole_blocks(verified_tokens, self.layout, name="verified_tokens")
            # The last token is never loaded: whoever loaded all but its block has verified all.
            verified = loaded if loaded < (len(ids) - 1) // self.layout.block_tokens else verified
        outcome = store_protocol.Stored(0, "short")
        if len(hashes):
            increment = store_protocol.Increment(
                self.digest,
                hashes,
                bind_views(self.layout, kv, len(hashes), writable=False),
                self._tensor_bytes,
                self._config.segment_tokens // self.layout.block_tokens,
            )
            until = started + self._config.store_timeout_s
            outcome = yield from store_protocol.store(
                self._context, increment, verified_blocks=verified, until=until
            )
            yield from maintain.abandon_unsettled(self._context)
        result = StoreResult(
            outcome.block_count * self.layout.block_tokens,
            outcome.block_count * self.layout.block_bytes,
            outcome.reason,
            (yield Now()) - started,
        )
        self._stats.add_store(result)
        return result

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """Tell how long an engine took to compute the KV of so many tokens, after it has.

        ``replica_share = adaptive`` weighs a miss by it; else it does nothing. Collective: no.

        Parameters
        ----------
        tokens, seconds
            What was computed, and the time. TypeError or ValueError unless finite, 0 or more.
        """
        count, taken_s = checked_prefill(tokens, seconds)
        if self._context.times is not None:
            self._context.times.prefilled(count * self.layout.bytes_per_token, taken_s)

    def clear(self) -> int | None:
        """Forget this namespace on every server.

        Collective: no. Returns how many segments the servers removed for this request (what one
        server's removal took along on another is not counted twice, nor at all), or None where a
        server did not answer within ``match_timeout_s``.
        """
        return self._transport.perform(self.clearing())

    def clearing(self) -> Operation[int | None]:
        """Return the operation behind `clear`, with its result as in `clear`."""
        self._check_open()
        until = (yield Now()) + self._config.match_timeout_s
        return (yield from maintain.clear(self._context, self.digest, until))

    def drop_tail(self, match: Match) -> bool | None:
        """Drop the last segment of a match if nothing continues it.

        Collective: no. Returns False where the segment is gone, has children or goes on beyond
        the match, None where its owner did not answer within ``match_timeout_s``. ``match`` must
        be one of this namespace, or it raises as `load` does.
        """
        return self._transport.perform(self.dropping_tail(match))

    def dropping_tail(self, match: Match) -> Operation[bool | None]:
        """Return the operation behind `drop_tail`, with parameters as in `drop_tail`."""
        self._check_open()
        self._check_own(match)
        if not match.segments:
            return False
        until = (yield Now()) + self._config.match_timeout_s
        return (yield from maintain.drop(self._context, match.segments[-1], until))

    def _bands(self, match: Match, out: Sequence[Any], skip_blocks: int) -> list[Band]:
        ends = band_ends(self._tensor_bytes, match.segments, skip_blocks)
        return bands_of(bind_bands(self.layout, out, ends), self._tensor_bytes)

    def _check_own(self, match: Match) -> None:
        servers = self._context.server_count
        check_match(match, self.digest, self.layout.block_tokens, server_count=servers)

    def block_hashes(self, tokens: Tokens) -> BlockHashes:
        """Return the chained hashes of the whole blocks of ``tokens``: uint8, shape (blocks, 16).

        Collective: no, it asks no server. Raises as `match` does.
        """
        return self._hash_ids(as_token_ids(tokens))

    def _hash_ids(self, ids: npt.NDArray[np.uint32]) -> BlockHashes:
        return _native.hash_blocks(
            ids,
            block_tokens=self.layout.block_tokens,
            root=self.digest,
            seed=self._config.seed,
        )
