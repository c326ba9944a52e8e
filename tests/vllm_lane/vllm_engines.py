"""Engines of vLLM driven by hand, and what must hold of each of them in the end.

vLLM knows one connector per process. The engines here take turns: `Engine` puts its own in vLLM's
place before each step, as if every engine had a process of its own.
"""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from ptstore_mpi import SOURCES, Namespace
from ptstore_mpi.integrations.vllm import build_llm, engine_setup, release
from ptstore_mpi.integrations.vllm.store_thread import LOAD, NOTE, at_once

BLOCK = 32
BATCH = 256
ARGUMENTS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_batched_tokens": BATCH,
    "max_num_seqs": 8,
    "block_size": BLOCK,
    "kv_cache_bytes": 8 << 20,  # 5,461 tokens
}
CLOSE = 1e-3
"""Between KV computed in batches of other shapes; that of other tokens is apart by whole units."""

PATIENCE_S = 60.0
OFF = {"ptstore_load": False, "ptstore_save": False}
LEASES = ("leased_bytes", "replica_leased_bytes", "reserved_bytes", "zombie_bytes")


@dataclass
class Answer:
    """What became of a request."""

    name: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    facts: dict = field(default_factory=dict)
    reason: str | None = None
    prompt_logprobs: list | None = None


class Engine:
    """One engine; without a connector where ``connector`` is None."""

    def __init__(self, model, attachment, connector, **arguments):
        from vllm.distributed.kv_transfer import kv_transfer_state

        self.attachment = attachment
        self._state = kv_transfer_state
        self._state._KV_CONNECTOR_AGENT = None
        engine_setup._alive.clear()
        self.llm = build_llm(model, connector=connector, **{**ARGUMENTS, **arguments})
        self._agent = self._state._KV_CONNECTOR_AGENT
        self._numbers = itertools.count()
        self.answers: dict[str, Answer] = {}
        self.mode = (connector or {}).get("load")

    @property
    def core(self):
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self):
        return self.core.scheduler

    @property
    def connector(self):
        return self.scheduler.connector

    @property
    def link(self):
        return self.connector._link

    @property
    def tracked(self):
        return self.connector._scheduler._tracked

    @property
    def free_blocks(self):
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def block_count(self):
        return self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks

    def add(self, prompt, *, max_tokens=4, salt=None, wishes=None, lora=None, **sampling):
        """Add a request and return its name in vLLM."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if wishes is None else {"kv_transfer_params": wishes},
            **sampling,
        )
        asked = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            asked["cache_salt"] = salt
        outer = f"r{next(self._numbers)}"
        name = self.llm.llm_engine.add_request(outer, asked, params, lora_request=lora)
        self.answers[outer] = Answer(name, list(prompt))
        return outer

    def inner(self, name):
        """Return vLLM's own name of a request."""
        return self.answers[name].name

    def request(self, name):
        """Return the scheduler's request; None after its end."""
        return self.scheduler.requests.get(self.inner(name))

    def step(self):
        """Take one step and note its answers."""
        self._state._KV_CONNECTOR_AGENT = self._agent
        for output in self.llm.llm_engine.step():
            answer = self.answers[output.request_id]
            answer.tokens = list(output.outputs[0].token_ids)
            answer.reason = output.outputs[0].finish_reason
            answer.prompt_logprobs = output.prompt_logprobs
            answer.facts = (output.kv_transfer_params or {}).get("ptstore", {})

    def abort(self, *names):
        self._state._KV_CONNECTOR_AGENT = self._agent
        self.llm.llm_engine.abort_request(list(names))

    def step_until(self, holds, patience_s=PATIENCE_S):
        """Take steps until it holds; return how many."""
        until_s = time.monotonic() + patience_s
        count = 0
        while not holds():
            assert time.monotonic() < until_s, "never came about"
            self.step()
            count += 1
        return count

    def finish(self, *names, patience_s=PATIENCE_S):
        """Take steps until requests have ended, and return their answers."""
        answers = [self.answers[name] for name in names]
        self.step_until(lambda: all(answer.reason for answer in answers), patience_s)
        return answers

    def answer(self, *prompts, **options):
        """Answer prompts, added at once."""
        return self.finish(*[self.add(prompt, **options) for prompt in prompts])

    def answer_alone(self, *prompts, **options):
        """Return the tokens that answer prompts one by one."""
        return [self.answer(prompt, **options)[0].tokens for prompt in prompts]

    def settle(self):
        """Take steps until every save has ended and vLLM has its blocks back."""
        self.step_until(
            lambda: not (self.scheduler.requests or self.scheduler.has_finished_requests())
        )
        if self.connector is not None:
            assert self.attachment.wait_for_saves()
            self.drain()

    def forget(self):
        """Empty vLLM's own cache: whatever comes now comes from the store, or is computed."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def drain(self):
        """Wait until the store's thread has done everything, the least urgent too."""
        self.on_thread(lambda: None, NOTE)

    def on_thread(self, work, urgency=LOAD):
        """Do something with the store, on its thread, and return what comes of it."""
        task = self.link.thread.submit(at_once(work), urgency)
        assert self.link.thread.wait([task], PATIENCE_S)
        return task.result

    def namespace(self, salt=None):
        """Return the namespace of this engine's plain requests."""
        return self.link.namespace_of(
            SimpleNamespace(cache_salt=salt, lora_request=None, mm_features=[])
        )

    def known_tokens(self, prompt, salt=None):
        """Return how much of a prompt the store knows."""
        namespace = self.namespace(salt)
        return self.on_thread(lambda: namespace.match(np.array(prompt, np.uint32))).tokens

    def stored_kv(self, prompt):
        """Return the bytes that the store has of a prompt, as one tensor per layer."""
        namespace = self.namespace()

        def load():
            match = namespace.match(np.array(prompt, np.uint32))
            out = self.link.pool.host_buffers(match.tokens // BLOCK)
            result = namespace.load(match, out)
            assert result.tokens == match.tokens, result
            return out

        return self.on_thread(load)

    def check_stored(self, prompt, known_tokens):
        """Check how much of a prompt the store has, and that these are the bytes to compute."""
        self.settle()
        assert self.known_tokens(prompt) == known_tokens
        computed = [pages[: known_tokens // BLOCK] for pages in self.computed_kv(prompt)]
        assert largest_difference(self.stored_kv(prompt), computed) < CLOSE

    def computed_kv(self, prompt):
        """Return the bytes of the same blocks, computed by vLLM alone."""
        self.forget()
        name = self.add(prompt, wishes=OFF, max_tokens=8)
        self.step_until(lambda: self.answers[name].tokens)
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(self.inner(name))
        whole = (len(prompt) - 1) // BLOCK
        kv = [pages[list(ids[:whole])].clone() for pages in self.link.pool.pages]
        self.abort(name)
        self.settle()
        return kv

    def check_idle(self):
        """Check that nothing is under way, tracked, lent or held any more."""
        self.settle()
        link = self.link
        assert not self.tracked
        under_way = (link.loads, link.saves, link.delayed, link.failed, link.results)
        assert not any(under_way), under_way
        assert not self.connector._scheduler._planned
        assert not self.connector._scheduler._preempted
        assert self.free_blocks == self.block_count - 1  # the null block is never free
        check_quiet(self.attachment.store, self)

    def close(self):
        self._state._KV_CONNECTOR_AGENT = self._agent
        release(self.llm)


@contextmanager
def before_each(operation, act):
    """Do something on the store's thread before each load of a match, or each store."""
    real = getattr(Namespace, operation)

    def preceded(self, first, *args, **options):
        if operation != "load" or first.tokens:  # a load of nothing only counts
            act()
        return real(self, first, *args, **options)

    setattr(Namespace, operation, preceded)
    try:
        yield
    finally:
        setattr(Namespace, operation, real)


def once(act):
    """Return what does something when it is called first, and nothing after that."""
    left = [act]
    return lambda: left.pop()() if left else None


def largest_difference(some, others):
    """Return the largest difference of two lists of tensors."""
    pairs = zip(some, others, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def check_quiet(store, engine):
    """Check that nothing is leased or reserved, and that space is conserved."""
    for counters in engine.on_thread(store.server_stats):
        assert not any(counters.get(name, 0) for name in LEASES), counters
        used = sum(counters[name] for name in ("owned_bytes", "metadata_bytes", "replica_bytes"))
        assert counters["free_bytes"] == counters["capacity_bytes"] - used, counters


@contextmanager
def books_kept(engine):
    """Check that connector and store count alike what engines do meanwhile; yields the counts."""
    counted = {}
    before = _counts(engine)
    yield counted
    engine.settle()
    after = _counts(engine)
    of_connector, of_store = (
        {name: late.get(name, 0) - early.get(name, 0) for name in late}
        for early, late in zip(before, after, strict=True)
    )
    assert of_connector == of_store
    parts = sum(of_store[name] for name in (*SOURCES, "recomputed"))
    assert parts == of_store["asked"], of_store
    counted |= of_store


def _counts(engine):
    engine.drain()
    stats = engine.attachment.stats()
    names = (*SOURCES, "recomputed", "asked")
    tokens = engine.attachment.store.stats()["tokens"]
    return {name: stats.get(f"{name}_tokens", 0) for name in names}, {
        name: tokens.get(name, 0) for name in names
    }
