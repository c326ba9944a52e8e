"""A simulated job whose bytes take time: each node has one link out and one link in.

A transfer waits until both its links are free and then has them to itself, at the speed of a
link; messages take a latency. So many readers of one node queue there, as they do in a network.
Nothing goes wrong here: this is for load, not for faults.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ptstore_mpi.protocol import effects
from ptstore_mpi.sim.faults import FaultPlan
from ptstore_mpi.sim.simulation import Simulation
from ptstore_mpi.sim.transport import SimTransport, Transfer

__all__ = ["LinkedSimulation"]


class LinkedSimulation(Simulation):
    """A simulation with links.

    Parameters
    ----------
    link_bytes_per_s
        Speed of each link.
    latency_s
        Mean time of a message on its way.
    arguments
        As in `Simulation`, but for its faults.

    Attributes
    ----------
    sent_bytes
        Bytes that have left each node, or will have when what is under way has ended.
    """

    def __init__(
        self, *arguments: Any, link_bytes_per_s: float, latency_s: float, **settings: Any
    ) -> None:
        plan = FaultPlan(delay_s=latency_s, peer_delay_s=latency_s)
        super().__init__(*arguments, plan=plan, **settings)
        self.processes.splits_copies = False
        self._link_bytes_per_s = link_bytes_per_s
        self._out_free_s: dict[int, float] = {}
        self._in_free_s: dict[int, float] = {}
        self.sent_bytes: Counter[int] = Counter()

    def move(self, transport: SimTransport, transfer: Transfer) -> None:
        """Let a transfer take its links for as long as its bytes need."""
        there = self.topology.nodes[self.topology.server_ranks[transfer.server]]
        here = self.topology.nodes[transport.client]
        source, target = (there, here) if transfer.meet is None else (here, there)
        free_s = max(self._out_free_s.get(source, 0.0), self._in_free_s.get(target, 0.0))
        end_s = max(self.now, free_s) + transfer.nbytes / self._link_bytes_per_s
        self._out_free_s[source] = self._in_free_s[target] = end_s
        self.sent_bytes[source] += transfer.nbytes
        self.at(end_s, lambda: self._arrive(transport, transfer))

    def _arrive(self, transport: SimTransport, transfer: Transfer) -> None:
        transfer.carry(0, transfer.nbytes)
        transport.done.append(transfer.token)
        self.processes.arrived(transport.client, effects.AwaitTokens)
        if transfer.meet is not None:
            self._at_server(transfer.server, transfer.arrived)
