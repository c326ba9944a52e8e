"""How clients wait for each other without taking the cores from those that still compute.

Owns the naps. A blocking MPI call is a loop that polls: on a machine with more ranks than cores
it starves the client that everybody waits for. So clients first meet in a nonblocking barrier
with naps, and only then enter the (now short) collective call.
"""

from __future__ import annotations

import socket
import time
from typing import Any

NAP_FIRST_S = 50e-6
NAP_LONGEST_S = 2e-3


def meet(comm: Any | None) -> None:
    """Wait until every client is here. Collective over the clients; naps while it waits."""
    if comm is None:
        return
    request = comm.Ibarrier()
    nap_s = NAP_FIRST_S
    while not request.Test():
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, NAP_LONGEST_S)


def gather(comm: Any | None, value: Any) -> list[Any] | None:
    """Return the values of all clients on client 0, None elsewhere. Collective, naps first."""
    if comm is None:
        return [value]
    meet(comm)
    values: list[Any] | None = comm.gather(value, root=0)
    return values


def gather_to_all(comm: Any | None, value: Any) -> list[Any]:
    """Return the values of all clients to all of them. Collective, naps first."""
    if comm is None:
        return [value]
    meet(comm)
    values: list[Any] = comm.allgather(value)
    return values


def clients_on_this_host(comm: Any | None) -> int:
    """Count the clients that share this machine's cores (virtual nodes share one machine)."""
    return gather_to_all(comm, socket.gethostname()).count(socket.gethostname())
