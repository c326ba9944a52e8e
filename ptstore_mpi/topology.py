"""Who serves and who computes: a pure function of where the ranks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.types import ServerIndex

__all__ = ["Topology", "assign_roles", "split_nodes"]


@dataclass(frozen=True, slots=True)
class Topology:
    """Roles of the ranks of a job; equal on every rank.

    Attributes
    ----------
    nodes
        Node of each rank, numbered from 0 in order of its lowest rank.
    server_ranks
        Rank of each server.
    client_ranks
        Rank of each client.
    """

    nodes: tuple[int, ...]
    server_ranks: tuple[int, ...]
    client_ranks: tuple[int, ...]

    @property
    def node_count(self) -> int:
        """Number of nodes."""
        return max(self.nodes) + 1

    def servers_of(self, node: int) -> tuple[ServerIndex, ...]:
        """Return the servers of a node."""
        return tuple(
            ServerIndex(index)
            for index, rank in enumerate(self.server_ranks)
            if self.nodes[rank] == node
        )

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node."""
        return tuple(rank for rank, of in enumerate(self.nodes) if of == node)

    def is_server(self, rank: int) -> bool:
        """Tell whether ``rank`` serves."""
        return rank in self.server_ranks


def split_nodes(node_ids: Sequence[int], count: int) -> list[int]:
    """Split the ranks of each node into ``count`` virtual nodes of consecutive ranks.

    Parameters
    ----------
    node_ids
        For each rank anything that is equal exactly for the ranks of one node.
    count
        Virtual nodes of each node, of sizes that differ by one at most.

    Returns
    -------
    For each rank the lowest rank of its virtual node.

    Raises
    ------
    ConfigError
        A host has fewer ranks than ``count``.
    """
    lowest = [0] * len(node_ids)
    for node in dict.fromkeys(node_ids):
        ranks = [rank for rank, of in enumerate(node_ids) if of == node]
        if len(ranks) < count:
            raise ConfigError(
                f"virtual_node_count = {count}, but a host has only {len(ranks)} rank(s): {ranks}"
            )
        firsts: dict[int, int] = {}
        for place, rank in enumerate(ranks):
            lowest[rank] = firsts.setdefault(place * count // len(ranks), rank)
    return lowest


def assign_roles(node_ids: Sequence[int], servers_per_node: int) -> Topology:
    """Make the lowest ``servers_per_node`` ranks of each node servers, the rest clients.

    Parameters
    ----------
    node_ids
        For each rank anything that is equal exactly for the ranks of one node.
    servers_per_node
        Servers of each node.

    Raises
    ------
    ConfigError
        A node has fewer ranks than servers, or no client is left in the whole job.
    """
    numbers: dict[int, int] = {}
    nodes = tuple(numbers.setdefault(node, len(numbers)) for node in node_ids)
    servers: list[int] = []
    for node in range(len(numbers)):
        ranks = [rank for rank, of in enumerate(nodes) if of == node]
        if len(ranks) < servers_per_node:
            raise ConfigError(
                f"servers_per_node = {servers_per_node}, but node {node} has only "
                f"{len(ranks)} rank(s): {ranks}"
            )
        servers += ranks[:servers_per_node]
    clients = tuple(rank for rank in range(len(nodes)) if rank not in servers)
    if not clients:
        raise ConfigError(
            f"no client is left: {len(nodes)} rank(s) on {len(numbers)} node(s) with "
            f"servers_per_node = {servers_per_node}; start more ranks per node"
        )
    return Topology(nodes, tuple(sorted(servers)), clients)
