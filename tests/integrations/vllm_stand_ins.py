"""An engine of vLLM moved by hand, and what else of vLLM the connector looks at.

`Engine` has both sides of the connector over a store, and pages that are filled from the tokens
alone (`Oracle`): every byte that was loaded can be told right from wrong. No vLLM is needed.
"""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

import ptstore_mpi as pt
from ptstore_mpi.integrations.vllm.link import EngineLink
from ptstore_mpi.integrations.vllm.scheduler_side import SchedulerSide
from ptstore_mpi.integrations.vllm.settings import ConnectorSettings
from ptstore_mpi.integrations.vllm.store_thread import MATCH, NOTE, StoreThread, at_once
from ptstore_mpi.integrations.vllm.worker_side import WorkerSide
from ptstore_mpi.testing.oracle import Oracle

BLOCK = 16
LIMIT_S = 20.0
"""More than anything here takes."""

VERSION = "0.32.0"
CONFIG = pt.Config(memory_bytes=8 << 20, segment_tokens=2 * BLOCK, copy_threads=1)

rank = threading.local()
"""`number`: rank within the engine of the thread that asks."""


@dataclass(eq=False)
class StandInRequest:
    """What the connector reads of vLLM's ``Request``."""

    request_id: str
    prompt_token_ids: list[int] | None
    all_token_ids: list[int] | None = None
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(prompt_logprobs=None))
    prompt_embeds: Any = None
    cache_salt: str | None = None
    lora_request: Any = None
    mm_features: list[Any] = field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    skip_reading_prefix_cache: bool = False

    def __post_init__(self):
        if self.all_token_ids is None:
            self.all_token_ids = list(self.prompt_token_ids or [])


class StandInRole(Enum):
    """vLLM's ``KVConnectorRole``."""

    SCHEDULER = 0
    WORKER = 1


class StandInBase:
    """What the API classes want of vLLM's ``KVConnectorBase_V1``."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        self.role = role
        self.bound = None

    def bind_connector_metadata(self, connector_metadata):
        """Bind."""
        self.bound = connector_metadata


class _ModelSettings(SimpleNamespace):
    def to_dict(self):
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def stand_in_config(*, tp=1, **changes):
    """Return vLLM's configuration of an engine; ``part__name=value`` changes it."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=tp,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            distributed_executor_backend="external_launcher" if tp > 1 else None,
        ),
        model_config=SimpleNamespace(
            model="some/model",
            revision="abc",
            dtype=torch.float32,
            quantization=None,
            seed=0,
            max_model_len=512,
            get_sliding_window=lambda: None,
            attention_chunk_size=None,
            hf_config=_ModelSettings(hidden_size=64, _commit_hash=None, _name_or_path="x"),
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        kv_transfer_config=SimpleNamespace(engine_id="engine", kv_connector_extra_config={}),
        compilation_config=SimpleNamespace(static_forward_context={}),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
    )
    for name, value in changes.items():
        *parts, last = name.split("__")
        place = config
        for part in parts:
            place = getattr(place, part)
        setattr(place, last, value)
    return config


def install_vllm(monkeypatch, version=VERSION):
    """Let ``import vllm`` find what the connector asks of it, and nothing else."""
    rank.number = 0
    contents = {
        "vllm": {"__version__": version},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: getattr(rank, "number", 0),
            "get_tp_group": lambda: SimpleNamespace(cpu_group="cpu group"),
        },
    }
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    for name, values in contents.items():
        module = ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


@contextmanager
def busy(thread):
    """Keep the thread of the store busy: nothing that is submitted meanwhile begins."""
    begun, go_on = threading.Event(), threading.Event()

    def work():
        begun.set()
        assert go_on.wait(LIMIT_S)

    task = thread.submit(at_once(work), MATCH)
    assert begun.wait(LIMIT_S)
    try:
        yield
    finally:
        go_on.set()
        assert thread.wait([task], LIMIT_S)


@contextmanager
def engines(monkeypatch, config=CONFIG):
    """Open a store in this process; yield a function that makes an `Engine` over it."""
    install_vllm(monkeypatch)
    job, thread = pt.launch(config), StoreThread()
    try:
        yield lambda **options: Engine(job.client, thread, **options)
    finally:
        thread.close()
        job.close()


def request_of(tokens, name="r", **changes):
    """Return a request for a prompt: its tokens, or how many of 0, 1, 2, ..."""
    prompt = list(range(tokens)) if isinstance(tokens, int) else list(tokens)
    return StandInRequest(name, prompt, **changes)


class Together:
    """Ranks in threads: what any of them asks, all must ask, and each hears the smallest."""

    def __init__(self, count):
        self._barrier = threading.Barrier(count, timeout=LIMIT_S / 4)
        self._given = [[] for _ in range(count)]
        self.calls = [[] for _ in range(count)]

    def member(self, number):
        """Return the group as one rank has it."""
        return SimpleNamespace(smallest=lambda values: self._smallest(number, list(values)))

    def _smallest(self, number, values):
        self.calls[number].append(values)
        self._given[number] = values
        self._barrier.wait()
        agreed = [min(each) for each in zip(*self._given, strict=True)]
        self._barrier.wait()
        return agreed


@dataclass
class Step:
    """What came of one step: its plan, and what the worker's side reported after it."""

    plan: Any
    saved: set[str]
    loaded: set[str]
    errors: set[int]


class Engine:
    """One rank of an engine: both sides of the connector, and its pages.

    Parameters
    ----------
    store, thread
        Its store, and who performs the store's operations.
    load
        ``async``, ``layered`` or ``verified``.
    group
        Ranks of the engine, `Together.member`.
    keeps_orphans
        As in `SchedulerSide`.
    number
        Rank in the engine.
    config
        Changes of `stand_in_config`.
    settings
        As in `ConnectorSettings`.
    """

    def __init__(
        self, store, thread, *, load="async", group=None, keeps_orphans=True, number=0,
        config=None, **settings,
    ):  # fmt: skip
        settings = {"match_wait_s": LIMIT_S, "load": load, "fetch": "always", **settings}
        self.number = number
        self.config = stand_in_config(tp=1 if group is None else 2, **(config or {}))
        self.link = EngineLink(store, thread, ConnectorSettings.of(settings), self.config)
        if group is not None:
            self.link.group = group
        caches = {f"layer.{layer}": torch.zeros(64, 2, BLOCK, 8) for layer in range(3)}
        self.link.register(caches, block_count=64, splits_kv=False)
        self.pool = self.link.pool
        self.scheduler = SchedulerSide(
            self.link,
            is_async=load == "async",
            is_verified=load == "verified",
            keeps_orphans=keeps_orphans,
        )
        self.worker = WorkerSide(
            self.link, is_layered=load == "layered", keeps_orphans=keeps_orphans
        )
        self._free = iter(range(1, 64))
        self.blocks = {}

    # -- pages -------------------------------------------------------------------------------

    def table(self, count):
        """Return blocks that nobody has had, in no order."""
        return [next(self._free) for _ in range(count)][::-1]

    def compute(self, request, ids, first_token=0):
        """Write the KV of a request's whole blocks from a token on, as a forward pass would."""
        first, tokens = first_token // BLOCK, request.all_token_ids
        for tensor, pages in enumerate(self.pool.pages):
            kv = torch.from_numpy(self._oracle(request).blocks(tokens, tensor))
            count = min(len(kv), len(ids))
            shaped = kv.view(pages.dtype).reshape(len(kv), *pages.shape[1:])
            pages[torch.tensor(ids[first:count], dtype=torch.int64)] = shaped[first:count]

    def check(self, request, ids, until_tokens, from_tokens=0):
        """Raise unless blocks hold the KV of a request's tokens."""
        count = until_tokens // BLOCK
        found = [
            pages[ids[:count]]
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .reshape(count, spec.block_bytes)
            for pages, spec in zip(self.pool.pages, self.pool.layout.tensors, strict=True)
        ]
        self._oracle(request).check(
            request.all_token_ids, found, until_tokens=until_tokens, from_tokens=from_tokens
        )

    def _oracle(self, request):
        digest = self.link.namespace_of(request).digest
        return Oracle(self.pool.layout, salt=int.from_bytes(digest[:8], "little"))

    # -- what vLLM does ----------------------------------------------------------------------

    def ask(self, request, have=0):
        """Ask once how much will be loaded."""
        return self.scheduler.matched_tokens(request, have)

    def matched(self, request, have=0):
        """Ask until it is known."""
        for _ in range(1000):
            tokens, is_async = self.ask(request, have)
            if tokens is not None:
                return tokens, is_async
        raise AssertionError("never known")

    def give(self, request, external, ids=None):
        """Give a request its blocks; return them."""
        if ids is None:
            ids = self.table(-(-len(request.all_token_ids) // BLOCK))
        self.blocks[request.request_id] = ids
        self.scheduler.blocks_given(request, ids, external)
        return ids

    def plan(self, computed=None, blocks=None):
        """Plan a step: by request, tokens before it and in it."""
        computed = computed or {}
        scheduled = {request.request_id: counts for request, counts in computed.items()}
        return self.scheduler.plan_step(scheduled, blocks or {}, is_idle=not scheduled)

    def step(self, computed=None, ended=(), blocks=None):
        """Carry out a step, computing as it is planned."""
        plan = self.plan(computed, blocks)
        self.worker.begin_step(plan)
        self.worker.start_clock()
        self.worker.start_loads()
        for layer in self.pool.layer_ends if computed else ():
            self.worker.wait_for_layer(layer)
        for request, (before, _) in (computed or {}).items():
            self.compute(request, self.blocks[request.request_id], before)
        self.worker.end_step()
        return Step(plan, *self.worker.finished(ended), self.worker.take_load_errors())

    def load_all(self):
        """Carry out idle steps until no load is under way; return all that they reported."""
        first = self.step()
        self.finish_loads()
        last = self.step()
        reports = (getattr(first, name) | getattr(last, name) for name in ("saved", "loaded"))
        return Step(first.plan, *reports, first.errors | last.errors)

    def finish_loads(self):
        """Wait until the loads under way have ended, in the store."""
        tasks = [load.task for load in self.link.loads.values() if load.task is not None]
        assert self.link.thread.wait(tasks, LIMIT_S)

    def finish_saves(self):
        """Wait until what was queued is saved."""
        self.link.thread.release_held()
        tasks = [task for record in self.link.saves.values() for task in record.tasks]
        assert self.link.thread.wait(tasks, LIMIT_S)

    def finish_all(self):
        """Wait until the thread of the store has done all that was submitted."""
        self.finish_saves()
        self.store_does(lambda: None, urgency=NOTE)

    def store_does(self, work, urgency=MATCH):
        """Let the thread of the store do something, and return its result."""
        task = self.link.thread.submit(at_once(work), urgency)
        assert self.link.thread.wait([task], LIMIT_S)
        return task.result

    def serve(self, request, have=0, ids=None):
        """Serve a request from question to end as vLLM would; return the tokens that it had.

        What was loaded is compared, what was not is computed.
        """
        external, is_async = self.matched(request, have)
        ids = self.give(request, external, ids)
        cached = have + external
        if is_async:
            assert request.request_id in self.load_all().loaded
            cached = self.link.failed.get(request.request_id, cached)
            self.give(request, 0, ids)
        total = len(request.all_token_ids)
        self.step({request: (cached, total - cached)}, blocks={request.request_id: (ids, True)})
        self.check(request, ids, total // BLOCK * BLOCK)
        return cached

    def end(self, request, ids=None):
        """End a request; return what vLLM is told."""
        ids = self.blocks.get(request.request_id, []) if ids is None else ids
        return self.scheduler.finished(request, ids)

    # -- counters ----------------------------------------------------------------------------

    def check_counters(self, *, with_saves=True):
        """Raise unless both sides of the count agree: the connector's and the store's."""
        self.finish_all()
        ours, theirs = self.link.counters, self.link.store.stats()["tokens"]
        names = ("asked", "engine", "owned", "replica", "remote", "disk", "recomputed")
        assert {name: ours[f"{name}_tokens"] for name in names} == {n: theirs[n] for n in names}
        assert theirs["asked"] == sum(theirs[name] for name in names[1:])
        assert ours["saved_tokens"] == theirs["stored"] or not with_saves
