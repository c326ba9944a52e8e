"""Counterexample 2: Gets that land in the engine's memory and not in the store's.

Planted over the transport of the simulation: whatever a Get brings is also unpacked where the
newest load of that client wants it, when it lands, be that load over or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ptstore_mpi.protocol.load as load
from ptstore_mpi.protocol.effects import Unpack
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.transport import SimTransport

__all__ = ["gets_into_the_engine"]


@contextmanager
def gets_into_the_engine() -> Iterator[None]:
    """Run the body of the ``with`` with such Gets."""
    wanted = {}  # client and start of a staging extent: the copies that its load would make
    right_start, right_end = load._start_gets, Simulation._end_transfer

    def start_gets(state):
        yield from right_start(state)
        for fetch in state.started:
            if fetch.extent is not None:
                wanted[state.context.ledger.client, fetch.extent.offset] = [
                    Unpack(state.whole.views, part.view_block, image)
                    for part, image in fetch.images(state.block_bytes)
                ]

    def end_transfer(self, transport: SimTransport, transfer):
        right_end(self, transport, transfer)
        if transfer.meet is None and not transfer.torn:
            staging = transport._memories[None]
            offset = transfer.staging.ctypes.data - staging.ctypes.data
            for copy in wanted.get((transport.client, offset), ()):
                transport.execute(copy)

    load._start_gets, Simulation._end_transfer = start_gets, end_transfer
    try:
        yield
    finally:
        load._start_gets, Simulation._end_transfer = right_start, right_end
