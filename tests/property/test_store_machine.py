"""A whole job under arbitrary interleavings, against a dict: invariants 1-5 and 7 of the design.

Clients stop inside loads and stores, hold matches while segments are dropped and cleared, and
write late; servers have room for a few segments and reuse every id at once (no generation bits).
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from store_model import Model

from ptstore_mpi.sim.cluster import Cluster
from ptstore_mpi.sim.promises import Promises
from ptstore_mpi.testing.actor import Actor, small_config
from ptstore_mpi.testing.checks import check_links, check_quiet, check_reachable, check_space
from ptstore_mpi.types import segment_owner

CLIENTS = 3


def prompt_of(length, turn, blocks):
    """Return a prompt that follows one common text up to ``turn`` and its own from there."""
    text = [0, 1, 0, 0, 1, 1, 0][:length]
    own = blocks[: max(length - turn, 0)]
    return np.repeat(np.array([*text[: length - len(own)], *own]), 4)


prompts = st.builds(
    prompt_of, st.integers(1, 7), st.integers(0, 7), st.lists(st.integers(0, 1), max_size=7)
)
clients = st.integers(0, CLIENTS - 1)
steps = st.integers(0, 20)


class StoreMachine(RuleBasedStateMachine):
    lossy = False

    @initialize(
        servers=st.sampled_from([(0,), (0, 1), (0, 1, 1)]),
        slots=st.integers(3, 8),
        placement=st.sampled_from(["local", "random", "least_loaded"]),
        verify=st.sampled_from(["off", "remote", "always"]),
        unconfirmed=st.integers(1, 3),
    )
    def open(self, servers, slots, placement, verify, unconfirmed):
        config = small_config(
            slots=slots, placement=placement, verify=verify, unconfirmed_count=unconfirmed
        )
        nodes = [min(node, servers[-1]) for node in (0, 1, 0)]
        self.cluster = Cluster(config, server_nodes=servers, client_nodes=nodes, generation_bits=0)
        self.promises = Promises(self.cluster)
        self.losses = iter(())
        self.cluster.on_request = self.on_request
        self.cluster.on_reply = self.on_reply
        self.actors = [Actor(self.cluster, client) for client in self.cluster.clients]
        self.model = Model()
        self.running = {}
        self.held = []

    # -- the network -------------------------------------------------------------------------

    def fate(self, message):
        """Return how often a message arrives: as the next draw of `lose` says, else once."""
        return [message] * next(self.losses, 1)

    def on_request(self, server, message):
        arriving = self.fate(message)
        for each in arriving:
            self.promises.request(server, each)
        return arriving

    def on_reply(self, client, reply):
        self.promises.reply(client, reply)
        return self.fate(reply)

    @precondition(lambda self: self.lossy)
    @rule(times=st.lists(st.sampled_from([0, 1, 1, 2]), min_size=3, max_size=20))
    def lose(self, times):
        self.losses = iter(times)

    def hold_peers(self, hold):
        self.cluster.hold_peers = hold
        if not hold:
            self.cluster.deliver_peers()

    @rule(pick=st.integers(0, 5))
    def deliver_one(self, pick):
        links = self.cluster.peers_on_their_way
        if links:
            self.cluster.deliver_peer(*links[pick % len(links)])

    def hold_transfers(self, client, hold):
        self.actors[client].transport.hold_transfers = hold
        if not hold:
            self.actors[client].transport.land()

    @rule(client=clients)
    def land_one(self, client):
        transport = self.actors[client].transport
        if transport.in_flight_count:
            transport.land(1)

    @rule(
        client=clients,
        event=st.sampled_from(["peers", "transfers", "clear", "wait"]),
        hold=st.booleans(),
        seconds=st.sampled_from([0.01, 0.5, 3.0, 9.95, 40.0]),
    )
    def rare(self, client, event, hold, seconds):
        match event:
            case "peers":
                self.hold_peers(hold)
            case "transfers":
                self.hold_transfers(client, hold)
            case "clear" if hold:
                self.clear(client)
            case "wait":
                self.cluster.advance(seconds)

    @property
    def operations(self):
        """Operations under way."""
        return [operation for operation, _ in self.running.values()]

    # -- operations, step by step --------------------------------------------------------------

    def idle(self, client):
        """Let the client end what it is doing."""
        if client in self.running:
            self.finish(client)

    @rule(client=clients, prompt=prompts, verified=st.none() | st.integers(0, 6), count=steps)
    def begin_store(self, client, prompt, verified, count):
        self.idle(client)
        actor = self.actors[client]
        operation = actor.start_store(prompt, verified_blocks=verified)
        self.model.begin_store(operation, actor.hashes(prompt))
        self.running[client] = (operation, None)
        self.step(client, count)

    @rule(client=clients, prompt=prompts)
    def hold_match(self, client, prompt):
        self.idle(client)
        found = self.match(client, prompt)
        if found.refs:
            self.held = [*self.held[-3:], (prompt, found.refs)]

    @rule(client=clients, prompt=prompts, skip=st.integers(0, 3), count=steps)
    def begin_load(self, client, prompt, skip, count):
        self.hold_match(client, prompt)
        self.begin_held_load(client, 3, skip, count)

    @precondition(lambda self: self.held)
    @rule(client=clients, pick=st.integers(0, 3), skip=st.integers(0, 3), count=steps)
    def begin_held_load(self, client, pick, skip, count):
        self.idle(client)
        if self.held:
            prompt, refs = self.held[min(pick, len(self.held) - 1)]
            skip = min(skip, sum(ref.block_count for ref in refs) - 1)
            load = self.actors[client].start_load(prompt, refs, skip_blocks=skip)
            self.running[client] = (load.operation, load)
            self.step(client, count)

    @precondition(lambda self: self.running)
    @rule(client=clients, count=steps)
    def step(self, client, count):
        operation, _ = self.running.get(client, (None, None))
        for _ in range(count):
            if operation is not None and not operation.done:
                operation.step()
        if operation is not None and operation.done:
            self.finish(client)

    @precondition(lambda self: self.running)
    @rule(client=clients)
    def finish(self, client):
        if client not in self.running:
            return
        operation, load = self.running.pop(client)
        if load is not None:
            load.checked_blocks(self.actors[client].oracle)
        else:
            self.model.end_store(operation, operation.finish())
            self.actors[client].flush()

    @precondition(lambda self: self.running)
    @rule(client=clients, flush=st.booleans())
    def stop(self, client, flush):
        """An exception in the engine, or a client that went on to its next request."""
        if client in self.running:
            operation, load = self.running.pop(client)
            operation.stop()
            if load is None:
                self.model.end_store(operation, None)
            if flush:
                self.actors[client].flush()

    # -- whole operations ------------------------------------------------------------------------

    def match(self, client, prompt):
        actor = self.actors[client]
        found = actor.match(prompt)
        assert self.lossy or not found.partial
        if not found.partial:
            least, most = self.model.bounds(actor.hashes(prompt))
            assert least <= found.block_count <= most, (least, found.block_count, most)
        return found

    @rule(client=clients, prompt=prompts)
    def match_and_load(self, client, prompt):
        self.idle(client)
        found = self.match(client, prompt)
        if not found.refs:
            return
        actor = self.actors[client]
        actor.transport.hold_transfers = False
        actor.transport.land()
        loaded = actor.start_load(prompt, found.refs).checked_blocks(actor.oracle)
        if not self.lossy:
            assert loaded == found.block_count, (loaded, found)

    @rule(client=clients, prompt=prompts)
    def store(self, client, prompt):
        self.begin_store(client, prompt, None, 0)
        self.actors[client].transport.hold_transfers = False
        self.actors[client].transport.land()
        self.finish(client)

    @rule(client=clients, prompt=prompts)
    def drop(self, client, prompt):
        self.idle(client)
        found = self.match(client, prompt)
        if not found.refs:
            return
        ref = found.refs[-1]
        segment = self.cluster.servers[segment_owner(ref.segment)].cache.find(ref)
        hashes = [] if segment is None else [bytes(block) for block in segment.hashes]
        may_go = (
            segment is not None and not segment.links and ref.block_count == segment.block_count
        )
        dropped = self.actors[client].drop(ref)
        if dropped is not False:
            self.model.drop(hashes, self.operations, certain=dropped is not None)
        if not self.lossy:
            assert dropped == may_go, "only a leaf that is named to its last block"

    @precondition(lambda self: self.running)
    @rule(client=clients, seconds=st.sampled_from([0.0, 9.95, 40.0]), texts=st.lists(prompts))
    def churn(self, client, seconds, texts):
        """Whoever else is under way stalls, while everything is forgotten and written anew."""
        self.cluster.advance(seconds)
        self.clear(client)
        for prompt in texts:
            self.store(client, 1 - prompt)

    def clear(self, client):
        self.idle(client)
        removed = self.actors[client].clear()
        self.model.clear(self.operations, certain=removed is not None)

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def space_is_conserved(self):
        check_space(self.cluster)

    @invariant()
    def nothing_is_freed_under_a_user(self):
        for server in self.cluster.memories:
            self.promises.check(server)

    @invariant()
    def every_path_is_whole(self):
        if not self.cluster.peers_on_their_way:
            check_reachable(self.cluster)
            check_links(self.cluster)

    def teardown(self):
        if not hasattr(self, "cluster"):
            return
        self.losses = iter(())
        self.cluster.hold_peers = False
        self.cluster.deliver_peers()
        for client, actor in enumerate(self.actors):
            self.stop(client, False)
            actor.leave()
            ledger = actor.context.ledger
            assert ledger.borrow(ledger.staging_bytes), "staging memory did not come back"
        self.every_path_is_whole()
        check_space(self.cluster)
        check_quiet(self.cluster)


class LossyStoreMachine(StoreMachine):
    """The same where messages between clients and servers are lost and doubled."""

    lossy = True


@pytest.mark.timeout(500)  # a failure is shrunk, for at most five minutes, before it is told
@pytest.mark.parametrize("machine", [StoreMachine, LossyStoreMachine])
def test_store_machine(machine):
    # Long traces of few segments: what goes wrong needs a stall, a removal and a reuse in a row.
    examples = 6 * settings().max_examples
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=60,
            phases=[Phase.generate, Phase.shrink],
        ),
    )
