"""Who probes whom, and with what bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from mpi4py import MPI

from ptstore_mpi import Config
from ptstore_mpi.topology import assign_roles
from ptstore_mpi.transport import probe
from ptstore_mpi.transport.probe import choose_transport, pattern_of, server_to_probe


@pytest.mark.parametrize(
    ("nodes", "ranks", "servers"), [(2, 2, 1), (5, 5, 1), (4, 6, 2), (3, 9, 1), (7, 3, 2)]
)
def test_clients_read_from_other_nodes_and_spread_evenly(nodes, ranks, servers):
    topology = assign_roles([rank // ranks for rank in range(nodes * ranks)], servers)
    read = Counter()
    for client in topology.client_ranks:
        server = server_to_probe(topology, client)
        assert topology.nodes[topology.server_ranks[server]] != topology.nodes[client]
        read[server] += 1
    counts = [read[server] for server in range(len(topology.server_ranks))]
    assert max(counts) - min(counts) <= 1, counts


def test_one_node_has_nothing_to_probe():
    topology = assign_roles([0, 0, 0], 1)
    assert [server_to_probe(topology, client) for client in topology.client_ranks] == [None, None]


def test_patterns_differ_everywhere():
    words = np.concatenate([pattern_of(server, 1 << 16).view(np.uint64) for server in range(4)])
    assert len(words) == len(np.unique(words))
    assert words.all()


def test_no_window_is_made_where_it_is_known_to_hang_or_not_wanted(monkeypatch, capsys):
    two_nodes = assign_roles([0, 0, 1, 1], 1)
    comm = MPI.COMM_SELF
    asked = choose_transport(Config(transport="p2p"), comm=comm, topology=two_nodes, own=None)
    assert asked.window is None
    assert (asked.choice.name, asked.choice.reason) == ("p2p", "asked for")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(probe, "known_hang", lambda version: "it is known to hang")
    known = choose_transport(Config(), comm=comm, topology=two_nodes, own=None)
    assert known.window is None
    assert known.choice.is_fallback
    assert "ptstore: transport p2p: it is known to hang; " in capsys.readouterr().err
