"""One client's access to the store: namespaces, counters, the end.

Nothing here is collective. Using a closed store raises `ClosedError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptstore_mpi import _native
from ptstore_mpi.errors import ClosedError, ConfigError
from ptstore_mpi.layout import KVLayout, namespace_digest
from ptstore_mpi.namespace import Namespace
from ptstore_mpi.protocol import maintain
from ptstore_mpi.protocol.context import ClientContext
from ptstore_mpi.stats import ClientStats
from ptstore_mpi.tiers.header import SegmentContent
from ptstore_mpi.transport.base import ClientTransport
from ptstore_mpi.transport.server_parts import tier_settings
from ptstore_mpi.types import HASH_BYTES, BalanceDecision, TransportChoice, whole_pages

if TYPE_CHECKING:
    from mpi4py import MPI

    from ptstore_mpi.topology import Topology

__all__ = ["Store"]

Tokens = Sequence[int] | npt.NDArray[np.integer[Any]]

_LONGEST_PING_BYTES = 1 << 24
_MOST_PINGS = 4096


class Store:
    """One client's access to the store. `ptstore_mpi.run` makes it.

    Attributes
    ----------
    client_rank, client_count
        This client among the clients, 0-based, and how many there are.
    node
        Node of this client, 0-based.
    comm
        Communicator of the clients, for the caller's own use.
    topology
        Roles of all ranks of the job.
    config
        Settings of the job.
    transport_name
        What carries the bytes: ``local``, ``mpi``, ``p2p`` or ``sim``.
    transport_choice
        The same with why, and the MPI library.
    """

    def __init__(
        self,
        transport: ClientTransport,
        context: ClientContext,
        *,
        topology: Topology,
        comm: MPI.Comm,
        choice: TransportChoice | None = None,
    ) -> None:
        self._transport = transport
        self._context = context
        self._stats = ClientStats()
        self._closed = False
        self.comm = comm
        self.client_rank: int = comm.Get_rank()
        self.client_count: int = comm.Get_size()
        self.node = topology.nodes[context.ledger.client]
        self.topology = topology
        self.config = context.config
        self.transport_name = transport.name
        self.transport_choice = choice or TransportChoice(transport.name, "asked for")

    def namespace(
        self, model: str, layout: KVLayout, *, salt: str = "", **identity: str
    ) -> Namespace:
        """Return the namespace of everything that makes KV interchangeable.

        Collective: no.

        Parameters
        ----------
        model
            Model and revision, or a digest of both.
        layout
            Tensors and bytes of a block.
        salt
            Separates tenants.
        identity
            Anything else that changes the meaning of the bytes: backend, LoRA, weight epoch.

        Raises
        ------
        ConfigError
            ``segment_tokens`` is not a multiple of the layout's ``block_tokens``, or there is no
            memory to stage two segments of this layout.
        TypeError, ValueError
            ``layout`` is not a `KVLayout`, or ``model``, ``salt`` or the identity not text.
        """
        self._check_open()
        if not isinstance(layout, KVLayout):
            raise TypeError(f"layout: expected a KVLayout, got {layout!r:.80}")
        segment_tokens = self.config.segment_tokens
        if segment_tokens % layout.block_tokens:
            raise ConfigError(
                f"segment_tokens must be a multiple of the layout's block_tokens "
                f"({layout.block_tokens}), got {segment_tokens}"
            )
        digest = namespace_digest(layout, {"model": model, "salt": salt, **identity})
        self._check_slabs(segment_tokens // layout.block_tokens, layout)
        self._make_room_to_stage(segment_tokens // layout.block_tokens * layout.block_bytes)
        return Namespace(
            layout,
            digest,
            transport=self._transport,
            context=self._context,
            stats=self._stats,
            check_open=self._check_open,
        )

    def stats(self) -> dict[str, Any]:
        """Return the counters of this client, as nested dictionaries.

        ``tokens`` by source (they add up to ``asked``), ``bytes`` by path (``rma_bytes`` of them
        came from other nodes, through the window or, with `p2p`, in messages; ``discarded_bytes``
        of these were not used), ``seconds``, ``calls`` and ``reasons`` by operation;
        ``transport``: ``name``, ``reason`` and ``library``, and ``malformed_count``, replies that
        failed their checksum and were asked for again. With ``replica_share = adaptive`` also
        ``times_per_gb``: what 1 GB of KV took of late by where it came from. Collective: no.
        """
        choice = self.transport_choice
        times = self._context.times
        return {
            **self._stats.as_dict(self._context.counters),
            **({} if times is None else {"times_per_gb": times.times._asdict()}),
            "transport": {
                "name": choice.name,
                "reason": choice.reason,
                "library": choice.library,
                "malformed_count": self._transport.malformed_count,
            },
        }

    def server_stats(self) -> list[dict[str, int]]:
        """Return the counters of every server that answers, in order. Collective: no."""
        self._check_open()
        until = self._transport.now() + self.config.match_timeout_s
        counters = self._transport.perform(maintain.server_counters(self._context, until))
        return [counters[server] for server in sorted(counters)]

    def balance(self) -> dict[int, list[BalanceDecision]]:
        """Return what each server that answers decided of late about its share for replicas.

        Its last 256 decisions, oldest first, by server; none where ``replica_share`` is ``fixed``.
        Collective: no.
        """
        self._check_open()
        until = self._transport.now() + self.config.match_timeout_s
        decisions = self._transport.perform(maintain.server_decisions(self._context, until))
        return {int(server): decisions[server] for server in sorted(decisions)}

    def ping(self, *, request_bytes: int = 0, reply_bytes: int = 0, count: int = 1) -> float | None:
        """Return how long it takes until every server has answered messages of this size, s.

        None where one did not within ``match_timeout_s``. Collective: no.

        Parameters
        ----------
        request_bytes, reply_bytes
            Bytes of a message to each server, and of its answer.
        count
            Messages to each server, all of them in flight at once.

        Raises
        ------
        TypeError, ValueError
            A size is not an integer in 0 .. 16 MiB, or the count not one in 1 .. 4096.
        """
        self._check_open()
        for name, value, least, most in (
            ("request_bytes", request_bytes, 0, _LONGEST_PING_BYTES),
            ("reply_bytes", reply_bytes, 0, _LONGEST_PING_BYTES),
            ("count", count, 1, _MOST_PINGS),
        ):
            if not isinstance(value, int):
                raise TypeError(f"{name}: expected an integer, got {value!r:.80}")
            if not least <= value <= most:
                raise ValueError(f"{name}: expected {least} .. {most}, got {value}")
        started = self._transport.now()
        until = started + self.config.match_timeout_s
        payload = bytes(request_bytes)
        operation = maintain.ping(
            self._context, payload, reply_bytes=reply_bytes, count=count, until=until
        )
        answered = self._transport.perform(operation)
        return self._transport.now() - started if answered else None

    def close(self) -> None:
        """Leave the servers; using the store afterwards is an error. `run` calls this.

        Collective: no, but a server serves until every client has left.
        """
        if self._closed:
            return
        self._closed = True
        until = self._transport.now() + self.config.close_timeout_s
        self._transport.perform(maintain.drain(self._context, until))
        self._transport.perform(maintain.bye(self._context))
        self._transport.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the store is closed: its job has ended")

    def _check_slabs(self, segment_blocks: int, layout: KVLayout) -> None:
        """Refuse a layout whose segments no file of a tier could hold."""
        content = SegmentContent(
            namespace=b"",
            segment=0,
            hashes=np.zeros((segment_blocks, HASH_BYTES), np.uint8),
            tensor_bytes=tuple(tensor.block_bytes for tensor in layout.tensors),
        )
        wanted = content.header_bytes + content.payload_bytes
        for name, settings in tier_settings(self.config).items():
            if wanted > settings.slab_bytes:
                raise ConfigError(
                    f"a segment of this layout takes {wanted} bytes in a file of the tier {name}, "
                    f"whose files have {settings.slab_bytes}: set slab_bytes or {name}_bytes higher"
                )

    def _make_room_to_stage(self, segment_bytes: int) -> None:
        wanted = whole_pages(2 * max(whole_pages(segment_bytes), self.config.get_bytes))
        ledger = self._context.ledger
        if ledger.staging_bytes >= wanted:
            return
        until = self._transport.now() + self.config.load_timeout_s
        if not self._transport.perform(maintain.drain(self._context, until)):
            raise ConfigError(
                f"staging_bytes is {ledger.staging_bytes}, {wanted} are needed, and transfers "
                f"that are still in flight keep the old ones"
            )
        self._transport.replace_staging(wanted)
        ledger.replace_staging(_native.RegionAllocator(wanted))
