"""Policies against models that count every use at every item, and look at all of them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from policy_models import HALF_LIFE_S, Model, Node, RankedModel, S3FifoModel

from ptstore_mpi.cache.policies.adaptive import AdaptivePolicy
from ptstore_mpi.cache.policies.factory import POLICY_NAMES, make_policy
from ptstore_mpi.cache.policies.gdsf import GdsfRanking
from ptstore_mpi.cache.policies.rankings import RANKING_NAMES, make_ranking
from ptstore_mpi.cache.policies.tree import EvictionPolicy

CAPACITY = 50


chains = st.lists(st.integers(0, 2), min_size=1, max_size=7)


class PolicyMachine(RuleBasedStateMachine):
    """Chains of a small tree come, are used, pinned and removed; room is made for them."""

    name = "lru"

    @initialize()
    def open(self):
        if self.name == "gdsf":
            self.policy = EvictionPolicy(GdsfRanking(CAPACITY, half_life_s=HALF_LIFE_S))
        elif self.name == "adaptive":
            self.policy = AdaptivePolicy(CAPACITY, shadow_item_count=10)
        else:
            self.policy = make_policy(self.name, CAPACITY)
        self.model = (
            S3FifoModel(CAPACITY)
            if self.name == "s3fifo"
            else Model()
            if self.name == "adaptive"
            else RankedModel(self.name)
        )
        self.now = 0.0

    @rule(steps=chains, seconds=st.integers(0, 2), seed=st.integers(0, 7))
    def access(self, steps, seconds, seed):
        """Use a chain: what is there in one go, the rest as it comes."""
        self.now += seconds
        keys = [int("1" + "".join(map(str, steps[: i + 1])), 3) for i in range(len(steps))]
        depth = sum(key in self.policy for key in keys)
        parent = None
        if depth:
            parent = keys[depth - 1]
            self.policy.hit(parent, self.now)
            self.model.use(parent, self.now)
        for key in keys[depth:]:
            nbytes, cost_s = 1 << (key + seed) % 3, float(1 << (key ^ seed) % 4)
            if not self.make_room(nbytes, parent):
                break
            self.policy.add(key, nbytes, cost_s=cost_s, parent=parent, now=self.now)
            self.model.add(key, Node(nbytes, cost_s, parent), self.now)
            parent = key

    def make_room(self, nbytes, parent):
        if self.policy.nbytes + nbytes <= CAPACITY:
            return True
        if parent is not None:
            self.policy.pin(parent)
            self.model.nodes[parent].pins += 1
        while self.policy.nbytes + nbytes > CAPACITY:
            self.check_victim()
            victim = self.policy.victim()
            if victim is None:
                break
            self.policy.evict(victim)
            self.model.leave(victim, evicted=True)
        if parent is not None:
            self.policy.unpin(parent)
            self.model.nodes[parent].pins -= 1
        return self.policy.nbytes + nbytes <= CAPACITY

    @precondition(lambda self: self.model.nodes)
    @rule(data=st.data())
    def pin(self, data):
        key = data.draw(st.sampled_from(sorted(self.model.nodes)))
        self.policy.pin(key)
        self.model.nodes[key].pins += 1

    @precondition(lambda self: any(node.pins for node in self.model.nodes.values()))
    @rule(data=st.data())
    def unpin(self, data):
        pinned = sorted(key for key, node in self.model.nodes.items() if node.pins)
        key = data.draw(st.sampled_from(pinned))
        self.policy.unpin(key)
        self.model.nodes[key].pins -= 1

    @precondition(lambda self: self.model.nodes)
    @rule(data=st.data())
    def remove(self, data):
        """A leaf goes for another reason, pinned or not."""
        key = data.draw(st.sampled_from(sorted(self.model.leaves())))
        self.policy.remove(key)
        self.model.leave(key, evicted=False)

    @precondition(lambda self: self.name == "adaptive")
    @rule(name=st.sampled_from(RANKING_NAMES))
    def switch(self, name):
        self.policy._rank_by(make_ranking(name, CAPACITY))

    @invariant()
    def check_victim(self):
        victim = self.policy.victim()
        assert victim == self.policy.victim()
        assert self.model.allows(victim)

    @invariant()
    def contents_are_closed_and_fit(self):
        nodes = self.model.nodes
        assert len(self.policy) == len(nodes)
        assert all(key in self.policy for key in nodes)
        assert all(node.parent is None or node.parent in nodes for node in nodes.values())
        assert self.policy.nbytes == sum(node.nbytes for node in nodes.values()) <= CAPACITY
        if self.name == "adaptive":
            counters = self.policy.counters()
            assert all(counters[f"shadow_items_{name}"] <= CAPACITY for name in RANKING_NAMES)

    def teardown(self):
        """Whatever is left goes, once nothing pins it."""
        for key, node in self.model.nodes.items():
            for _ in range(node.pins):
                self.policy.unpin(key)
            node.pins = 0
        while self.model.nodes:
            self.check_victim()
            victim = self.policy.victim()
            self.policy.evict(victim)
            self.model.leave(victim, evicted=True)
        assert (len(self.policy), self.policy.nbytes) == (0, 0)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_the_victim_is_the_least_worthy_leaf(name):
    machine = type(f"{name.title()}Machine", (PolicyMachine,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=50))
