"""Random lives of many requests: no wrong byte is ever loaded, none is lost, all blocks come back.

vLLM's part is played by `Life`: it gives blocks away as soon as it is told that it may, and what
they held is overwritten at once. A save that reads too long, or a load that writes too long, ends
as wrong bytes in somebody's prompt.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_flows import forget
from vllm_stand_ins import BLOCK, Step, engines, request_of

from ptstore_mpi.integrations.vllm import store_thread
from ptstore_mpi.integrations.vllm.store_thread import NOTE, StoreThread

POOL = range(1, 64)
MOST = 6


class Life:
    """An engine's requests, and who has which blocks."""

    def __init__(self, engine):
        self.engine = engine
        self.free = list(POOL)
        self.tables, self.requests, self.cached = {}, {}, {}
        self.states = {}
        self.ended, self.given_up = set(), []
        self.count = 0

    def names(self, *states):
        """Return the requests in these states."""
        return [name for name, state in self.states.items() if state in states]

    def new(self, family, tokens):
        """A prompt arrives: families share their first two blocks, members of one all tokens."""
        if len(self.names("loading", "ready", "running", "waiting")) < MOST:
            name = f"r{self.count}"
            self.count += 1
            prompt = [*range(2 * BLOCK), *(1000 * family + n for n in range(tokens))]
            self.requests[name] = request_of(prompt, name)
            self.states[name] = "waiting"

    def schedule(self, name):
        """Ask about a waiting request and give it blocks, where there are enough."""
        request = self.requests[name]
        wanted = -(-len(request.all_token_ids) // BLOCK)
        external, is_async = self.engine.matched(request)
        if len(self.free) < wanted:
            return
        ids = self.tables[name] = [self.free.pop() for _ in range(wanted)]
        self.engine.give(request, external, ids)
        self.cached[name] = external
        self.states[name] = "loading" if is_async else "ready"

    def step(self, preempted=(), lost=None):
        """Carry out a step of everything that can be, without some that were running.

        The store may lose something between the matches of the step and its loads.
        """
        for which in preempted:
            self.preempt(which)
        for name in self.names("waiting"):
            self.schedule(name)
        if lost is not None:
            self.lose(lost)
        engine, ready = self.engine, self.names("ready")
        computed = {
            self.requests[name]: (
                self.cached[name],
                len(self.requests[name].all_token_ids) - self.cached[name],
            )
            for name in ready
        }
        plan = engine.plan(computed, {name: (self.tables[name], True) for name in ready})
        engine.worker.begin_step(plan)
        self.overwrite()
        engine.worker.start_clock()
        engine.worker.start_loads()
        for request, (before, _) in computed.items():
            ids = self.tables[request.request_id]
            engine.check(request, ids, before)
            engine.compute(request, ids, before)
            self.states[request.request_id] = "running"
        engine.worker.end_step()
        ended, self.ended = self.ended, set()
        step = Step(plan, *engine.worker.finished(ended), engine.worker.take_load_errors())
        self.take(step)

    def take(self, step):
        """Do what vLLM does with what it is told."""
        for name in step.loaded:
            if self.states[name] == "orphan":
                self.give_up(name)
                continue
            assert self.states[name] == "loading"
            missing = [n for n, block in enumerate(self.tables[name]) if block in step.errors]
            step.errors -= set(self.tables[name])
            if missing:
                self.cached[name] = missing[0] * BLOCK
            self.states[name] = "ready"
            if not self.cached[name]:
                self.give_up(name, "waiting")
            else:
                self.engine.give(self.requests[name], 0, self.tables[name])
        assert not step.errors
        for name in step.saved:
            assert self.states[name] == "delayed"
            self.give_up(name)

    def end(self, which):
        """A request is answered, or aborted, whatever it was doing."""
        names = self.names("loading", "ready", "running", "waiting")
        if names:
            name = names[which % len(names)]
            state = self.states[name]
            is_delayed, _ = self.engine.end(self.requests[name], self.tables.get(name, []))
            self.ended.add(name)
            if state == "loading" and name in self.engine.link.loads:
                self.states[name] = "orphan"
            elif is_delayed:
                self.states[name] = "delayed"
            else:
                self.give_up(name)

    def preempt(self, which):
        """A running request loses its blocks, and waits."""
        names = self.names("running")
        if names:
            name = names[which % len(names)]
            self.requests[name].num_preemptions += 1
            self.give_up(name, "waiting")

    def give_up(self, name, state="gone"):
        """Take the blocks of a request away: what they held is overwritten in the next step."""
        self.states[name] = state
        self.given_up += self.tables.pop(name, [])

    def overwrite(self):
        """Let others write to the blocks that were given up."""
        if self.given_up:
            for pages in self.engine.pool.pages:
                pages[torch.tensor(self.given_up)] = float(self.count)
        self.free += self.given_up
        self.given_up = []

    def lose(self, which):
        """The store loses something of a request's prompt."""
        if self.requests:
            names = list(self.requests)
            request = self.requests[names[which % len(names)]]
            namespace = self.engine.link.namespace_of(request)
            tokens = request.all_token_ids
            lose = lambda: namespace.drop_tail(namespace.match(tokens))  # noqa: E731
            self.engine.store_does(namespace.clear if which % 2 else lose)

    def save(self):
        """What is held is saved."""
        release_held(self.engine.link.thread)
        self.engine.store_does(lambda: None, NOTE)

    def finish(self):
        """End all requests and let everything come to its end."""
        while self.names("loading", "ready", "running", "waiting"):
            self.end(0)
        for _ in range(3):
            self.engine.finish_loads()
            self.save()
            self.step()
        self.overwrite()


NUMBER = st.integers(0, 30)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("new"), st.integers(1, 2), st.sampled_from([1, 16, 17, 50])),
        st.tuples(
            st.just("step"), st.lists(NUMBER, max_size=1), st.one_of(st.none(), st.none(), NUMBER)
        ),
        st.tuples(st.just("step")),
        st.tuples(st.just("end"), NUMBER),
        st.tuples(st.just("lose"), NUMBER),
        st.tuples(st.just("save")),
    ),
    min_size=12,
    max_size=40,
)


release_held = StoreThread.release_held


@pytest.mark.parametrize("load", ["async", "verified"])
def test_requests_in_any_order(monkeypatch, load):
    monkeypatch.setattr(StoreThread, "release_held", lambda thread: None)
    monkeypatch.setattr(store_thread, "LONGEST_HOLD_S", 3600.0)
    with engines(monkeypatch) as make:

        @settings(max_examples=5 * settings().max_examples)  # wrong reuse takes a long way
        @given(EVENTS)
        def play(events):
            engine = make(load=load)
            forget(engine, request_of(1))
            store = engine.link.store
            before = store.stats()["tokens"]
            life = Life(engine)
            for event, *arguments in [("new", 1, 50), ("step",), ("save",), *events]:
                getattr(life, event)(*arguments)
            life.finish()
            assert sorted(life.free) == list(POOL)
            link = engine.link
            left = [link.loads, link.saves, link.delayed, link.failed, link.results]
            assert not any(left), left
            life.save()
            after = store.stats()["tokens"]
            counted = {name: after[name] - before[name] for name in after if name != "stored"}
            assert counted == {name: link.counters[f"{name}_tokens"] for name in counted}

        play()
