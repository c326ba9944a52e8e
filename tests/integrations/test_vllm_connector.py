"""The API classes over a stand-in for vLLM's base class: what vLLM calls reaches the two sides."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
import vllm_stand_ins
from vllm_stand_ins import (
    BLOCK,
    CONFIG,
    LIMIT_S,
    StandInBase,
    StandInRole,
    install_vllm,
    request_of,
    stand_in_config,
)

import ptstore_mpi as pt
from ptstore_mpi.integrations.vllm import attach
from ptstore_mpi.integrations.vllm.api import Api011, Api015, Api032
from ptstore_mpi.integrations.vllm.checks import UnsupportedEngineError
from ptstore_mpi.integrations.vllm.group import TorchGroup

GENERATIONS = [Api011, Api015, Api032]
BLOCKS = 32


@pytest.fixture
def attached(monkeypatch):
    install_vllm(monkeypatch)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    job = pt.launch(CONFIG)
    with attach(job.client) as attachment:
        yield attachment
    job.close()


class Pair:
    """An engine's two connectors, and steps as vLLM describes them."""

    def __init__(self, api, *, settings=None, group="FullAttentionSpec", **changes):
        self.api = api
        settings = {"match_wait_s": LIMIT_S, "fetch": "always", **(settings or {})}
        config = stand_in_config(
            **{"kv_transfer_config__kv_connector_extra_config": settings, **changes}
        )
        spec = type(group, (), {})()
        caches = SimpleNamespace(
            num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
        )
        arguments = () if api is Api011 else (caches,)
        made = type("PTStoreConnector", (api, StandInBase), {})
        self.worker = made(config, StandInRole.WORKER, *arguments)
        self.scheduler = made(config, StandInRole.SCHEDULER, *arguments)
        shape = (2, BLOCKS, BLOCK, 2, 8) if api.SPLITS_KV else (BLOCKS, 2, BLOCK, 16)
        self.caches = {f"layer.{n}": torch.rand(shape) for n in range(2)}
        self.worker.register_kv_caches(self.caches)

    def step(self, *, new=(), cached=(), ended=()):
        """Carry out a step: ``new`` and ``cached`` are (request, ids, before, count, resumed)."""
        output = self.output(new, cached)
        plan = self.scheduler.build_connector_meta(output)
        if self.api is Api032:
            self.worker.handle_preemptions(plan)
        self.worker.bind_connector_metadata(plan)
        assert self.worker.bound is plan
        self.worker.start_load_kv(None)
        for layer, cache in self.caches.items() if output.total_num_scheduled_tokens else ():
            self.worker.wait_for_layer_load(layer)
            self.worker.save_kv_layer(layer, cache, None)
        self.worker.wait_for_save()
        saved, loaded = self.worker.get_finished(set(ended))
        errors = self.worker.get_block_ids_with_load_errors()
        self.scheduler.update_connector_output(None)
        return saved, loaded, errors

    def output(self, new=(), cached=()):
        """Return a step as the scheduler describes it to this generation."""
        resumed = [each[4] for each in cached]
        names = [each[0].request_id for each in cached]
        described = SimpleNamespace(
            req_ids=names,
            new_block_ids=[None if each[1] is None else (each[1],) for each in cached],
            num_computed_tokens=[each[2] for each in cached],
        )
        if self.api is Api011:
            described.resumed_from_preemption = resumed
        else:
            described.resumed_req_ids = {
                n for n, is_so in zip(names, resumed, strict=True) if is_so
            }
        counts = {each[0].request_id: each[3] for each in (*new, *cached)}
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=request.request_id, block_ids=(ids,), num_computed_tokens=before
                )
                for request, ids, before, *_ in new
            ],
            scheduled_cached_reqs=described,
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
        )

    def serve(self, request, ids):
        """Serve a request; return the tokens that it had."""
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, 0)
        self.scheduler.update_state_after_alloc(request, tables(ids), external)
        if is_async:
            loaded = self.step()[1] or set()
            link = self.worker._link
            assert link.thread.wait([each.task for each in link.loads.values()], LIMIT_S)
            assert loaded | (self.step()[1] or set()) == {request.request_id}
            self.scheduler.update_state_after_alloc(request, tables(ids), 0)
        count = len(request.all_token_ids) - external
        self.step(new=[(request, ids, external, count)])
        return external

    def end(self, request, ids):
        """End a request as this generation does."""
        if self.api is Api011:
            return self.scheduler.request_finished(request, ids)
        return self.scheduler.request_finished_all_groups(request, (ids,))


def tables(ids):
    """Return vLLM's ``KVCacheBlocks``."""
    return SimpleNamespace(get_block_ids=lambda: (ids,))


def blocks_of(pair, ids):
    """Return the bytes of blocks in all layers."""
    axis = 1 if pair.api.SPLITS_KV else 0
    return [cache.index_select(axis, torch.tensor(ids)) for cache in pair.caches.values()]


@pytest.mark.parametrize("api", GENERATIONS)
def test_a_prompt_goes_through_the_store(attached, api):
    pair = Pair(api)
    first, again = request_of(65, "first"), request_of(65, "again")
    assert pair.serve(first, [1, 2, 3, 4, 5]) == 0
    assert attached.wait_for_saves(LIMIT_S)
    pair.end(first, [1, 2, 3, 4, 5])
    assert pair.serve(again, [11, 12, 13, 14, 15]) == 64
    for old, new in zip(
        blocks_of(pair, [1, 2, 3, 4]), blocks_of(pair, [11, 12, 13, 14]), strict=True
    ):
        assert torch.equal(old, new)
    is_delayed, told = pair.end(again, [11, 12, 13, 14, 15])
    assert (is_delayed, told["ptstore"]["owned_tokens"]) == (False, 64)
    assert attached.stats()["owned_tokens"] == 64
    assert [each[:1] + each[2:3] for each in attached.take_saves()] == [("first", "stored")]


@pytest.mark.parametrize(
    ("api", "given", "mode"),
    [
        (Api032, "auto", (True, False, False)),
        (Api032, "async", (True, False, False)),
        (Api032, "layered", (False, True, False)),
        (Api015, "verified", (False, False, True)),
        (Api011, "auto", (False, False, True)),
        (Api011, "async", (False, False, True)),
        (Api011, "layered", (False, False, True)),
    ],
)
@pytest.mark.usefixtures("attached")
def test_loads_are_of_the_mode_that_the_version_can_do(api, given, mode):
    """Where no load error can be told, a load ends before it is claimed."""
    pair = Pair(api, settings={"load": given})
    scheduler, worker = pair.scheduler._scheduler, pair.worker._worker
    assert (scheduler._is_async, worker._is_layered, scheduler._is_verified) == mode


@pytest.mark.parametrize("api", GENERATIONS)
@pytest.mark.usefixtures("attached")
def test_blocks_of_later_steps_are_appended_or_are_all_there_are(api):
    pair = Pair(api)
    request = request_of(65)
    pair.scheduler.get_num_new_matched_tokens(request, 0)
    pair.scheduler.update_state_after_alloc(request, tables([1, 2]), 0)
    pair.step(new=[(request, [1, 2], 0, 32)])
    pair.step(cached=[(request, [3], 32, 16, False)])
    tracked = pair.scheduler._scheduler._tracked["r"]
    assert tracked.block_ids == [1, 2, 3]
    pair.step(cached=[(request, None, 48, 1, False)])
    assert tracked.block_ids == [1, 2, 3]
    pair.step(cached=[(request, [7, 8, 9], 0, 10, True)])
    assert tracked.block_ids == [7, 8, 9]


@pytest.mark.usefixtures("attached")
def test_both_sides_of_an_engine_share_their_link():
    pair = Pair(Api032)
    assert pair.worker._link is pair.scheduler._link


@pytest.mark.parametrize("api", [Api015, Api032])
@pytest.mark.usefixtures("attached")
def test_the_end_of_preempted_requests_saves_comes_before_their_blocks_go(api, monkeypatch):
    pair = Pair(api)
    ended = []
    monkeypatch.setattr(pair.worker._link, "end_saves", lambda *args: ended.append(args))
    if api is Api015:
        pair.worker.handle_preemptions({"r"})
    else:
        plan = pair.scheduler.build_connector_meta(pair.output())
        plan.preempted.append("r")
        pair.worker.handle_preemptions(plan)
    assert ended == [("r", "preempted")]


@pytest.mark.usefixtures("attached")
def test_new_weights_are_told_to_the_connector():
    pair = Pair(Api032)
    epoch = pair.worker._link.weight_epoch
    assert pair.scheduler.reset_cache() is True
    assert pair.worker._link.weight_epoch != epoch


@pytest.mark.usefixtures("attached")
def test_what_the_newest_generation_asks_beside_that(monkeypatch):
    pair = Pair(Api032)
    assert pair.scheduler.requires_kv_delivery is False
    assert pair.scheduler.has_pending_block_frees() is False
    pair.worker._link.delayed.add("r")
    assert pair.scheduler.has_pending_block_frees() is True
    pair.worker._link.delayed.clear()
    assert Api032.requires_piecewise_for_cudagraph({"load": "layered"}) is True
    assert Api032.requires_piecewise_for_cudagraph({}) is False
    install(monkeypatch, "vllm.v1.metrics.cache_hit_source", CacheHitSource=Sources)
    request = request_of(65)
    assert pair.scheduler.get_external_cache_hit_sources(request, 0) == {}
    assert pair.scheduler.get_external_cache_hit_sources(request, 32) == {"p2p": 32}
    pair.serve(request, [1, 2, 3, 4, 5])
    assert pair.worker._link.thread.wait(pair.worker._link.saves["r"].tasks, LIMIT_S)
    again = request_of(65, "again")
    external, _ = pair.scheduler.get_num_new_matched_tokens(again, 0)
    assert pair.scheduler.get_external_cache_hit_sources(again, external) == {"host": 64}


class Sources:
    """vLLM's ``CacheHitSource``."""

    HOST = "host"
    P2P = "p2p"


class Stats:
    """vLLM's ``KVConnectorStats``."""

    def __init__(self, data=None):
        self.data = data or {}


def install(monkeypatch, name, **values):
    """Let a module of vLLM be found, and the packages that it is in."""
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.__path__ = []
        if end == len(parts):
            vars(module).update(values)
        if end == len(parts) or module.__name__ not in sys.modules:
            monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("attached")
def test_statistics_are_those_of_the_worker(monkeypatch):
    install(
        monkeypatch,
        "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
        KVConnectorStats=Stats,
    )
    monkeypatch.delitem(sys.modules, "ptstore_mpi.integrations.vllm.connector_stats", raising=False)
    pair = Pair(Api032)
    assert pair.scheduler.get_kv_connector_stats() is None
    assert pair.worker.get_kv_connector_stats() is None, "nothing was counted"
    pair.serve(request_of(65), [1, 2, 3, 4, 5])
    told = pair.worker.get_kv_connector_stats()
    assert told.data["asked_tokens"] == 65
    assert told.reduce()["reused_share"] == 0.0
    more = Api032.build_kv_connector_stats({"asked_tokens": 35, "engine_tokens": 20})
    assert told.aggregate(more) is told
    assert (told.data["asked_tokens"], told.data["engine_tokens"]) == (100, 20)
    assert told.reduce()["reused_share"] == 0.35
    assert not told.is_empty()
    told.reset()
    assert told.is_empty()
    assert told.reduce() == {"reused_share": 0.0}
    assert Api032.build_kv_connector_stats() is None
    monkeypatch.delitem(sys.modules, "ptstore_mpi.integrations.vllm.connector_stats")


@pytest.mark.usefixtures("attached")
def test_shutting_down_ends_what_is_under_way_and_leaves_the_store():
    pair = Pair(Api032)
    pair.serve(request_of(65), [1, 2, 3, 4, 5])
    pair.worker.shutdown()
    pair.scheduler.shutdown()
    assert all(task.is_done for task in pair.worker._link.saves["r"].tasks)
    assert pair.worker._link.store.stats()


@pytest.mark.usefixtures("attached")
def test_engines_that_cannot_work_are_refused_at_their_start():
    with pytest.raises(UnsupportedEngineError, match="speculative"):
        Pair(Api032, speculative_config="eagle")
    with pytest.raises(UnsupportedEngineError, match="MambaSpec"):
        Pair(Api032, group="MambaSpec")
    with pytest.raises(pt.ConfigError, match="kv_connector_extra_config"):
        Pair(Api032, settings={"lod": "async"})


def test_an_engine_without_a_store_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    install_vllm(monkeypatch)
    with pytest.raises(pt.ConfigError, match="attach"):
        Pair(Api032)


@pytest.mark.usefixtures("attached")
def test_ranks_are_asked_through_the_group_of_vllm():
    pair = Pair(
        Api032,
        parallel_config__tensor_parallel_size=2,
        parallel_config__distributed_executor_backend="external_launcher",
    )
    assert isinstance(pair.worker._link.group, TorchGroup)
    assert pair.worker._link.group._group == "cpu group"
    assert vllm_stand_ins.rank.number == 0


def test_the_connector_is_registered_once(monkeypatch):
    from ptstore_mpi.integrations.vllm import register

    registered = {}

    class Factory:
        _registry = registered

        @classmethod
        def register_connector(cls, name, path, class_name):
            assert name not in registered
            registered[name] = (path, class_name)

    install_vllm(monkeypatch)
    install(
        monkeypatch,
        "vllm.distributed.kv_transfer.kv_connector.factory",
        KVConnectorFactory=Factory,
    )
    register()
    register()
    assert registered == {
        "PTStoreConnector": ("ptstore_mpi.integrations.vllm.connector", "PTStoreConnector")
    }
