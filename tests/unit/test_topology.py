"""Who serves and who computes."""

from __future__ import annotations

import pytest

from ptstore_mpi import ConfigError
from ptstore_mpi.topology import assign_roles, split_nodes


@pytest.mark.parametrize(
    ("node_ids", "servers_per_node", "servers", "clients"),
    [
        ("aa", 1, (0,), (1,)),
        ("aaaa", 1, (0,), (1, 2, 3)),
        ("aabb", 1, (0, 2), (1, 3)),
        ("abab", 1, (0, 1), (2, 3)),
        ("bbbaaa", 2, (0, 1, 3, 4), (2, 5)),
        ("aab", 1, (0, 2), (1,)),  # node b has no client
        ("baa", 1, (0, 1), (2,)),
    ],
)
def test_the_lowest_ranks_of_each_node_serve(node_ids, servers_per_node, servers, clients):
    topology = assign_roles(list(map(ord, node_ids)), servers_per_node)
    assert topology.server_ranks == servers
    assert topology.client_ranks == clients
    assert [topology.is_server(rank) for rank in range(len(node_ids))] == [
        rank in servers for rank in range(len(node_ids))
    ]


def test_nodes_are_numbered_in_order_of_their_lowest_rank():
    topology = assign_roles([7, 7, 3, 3, 7], 1)
    assert topology.nodes == (0, 0, 1, 1, 0)
    assert topology.node_count == 2
    assert topology.servers_of(0) == (0,)
    assert topology.servers_of(1) == (1,)
    assert topology.ranks_of(0) == (0, 1, 4)


def test_servers_of_a_node_are_indices_not_ranks():
    topology = assign_roles([0, 0, 0, 1, 1, 1], 2)
    assert topology.server_ranks == (0, 1, 3, 4)
    assert topology.servers_of(1) == (2, 3)


@pytest.mark.parametrize(
    ("node_ids", "servers_per_node", "message"),
    [
        ([0, 0, 1], 2, r"servers_per_node = 2, but node 1 has only 1 rank\(s\): \[2\]"),
        ([0, 1, 2], 1, "no client is left: 3 .* on 3 node"),
        ([0, 0], 2, "no client is left"),
    ],
)
def test_roles_that_cannot_be_dealt(node_ids, servers_per_node, message):
    with pytest.raises(ConfigError, match=message):
        assign_roles(node_ids, servers_per_node)


@pytest.mark.parametrize(
    ("node_ids", "count", "split"),
    [
        ([0, 0, 0, 0], 2, [0, 0, 2, 2]),
        ([0, 0, 0, 0], 1, [0, 0, 0, 0]),
        ([0, 0, 0, 0, 0], 2, [0, 0, 0, 3, 3]),
        ([0, 1, 0, 1, 0, 1], 3, [0, 1, 2, 3, 4, 5]),
        ([5, 5, 5, 5, 9, 9, 9, 9], 2, [0, 0, 2, 2, 4, 4, 6, 6]),
    ],
)
def test_virtual_nodes_are_consecutive_ranks_of_one_host(node_ids, count, split):
    assert split_nodes(node_ids, count) == split


def test_a_host_with_fewer_ranks_than_virtual_nodes():
    with pytest.raises(ConfigError, match=r"virtual_node_count = 3, but .* 2 rank\(s\): \[3, 4\]"):
        split_nodes([0, 0, 0, 1, 1], 3)
