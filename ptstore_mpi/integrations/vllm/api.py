"""vLLM's connector API in its generations: the names that vLLM calls, over our two sides.

Each class has the signatures of one generation, checked against its sources by the tests. They know
no vLLM: `connector` puts the one that fits under vLLM's base class.

==========  =======================================================================================
generation  what differs
==========  =======================================================================================
0.11        constructor without the cache's configuration; no report of load errors: a load ends
            before it is claimed; blocks of a preempted request go without a word
0.15        load errors, hybrid groups, preemptions by name; a request aborted while its load runs
            keeps its blocks only if the connector says so
0.32        preemptions in the metadata; vLLM keeps such blocks itself; sources of hits; frees that
            are worth waiting for
==========  =======================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ptstore_mpi.integrations.vllm.attachment import current_attachment
from ptstore_mpi.integrations.vllm.checks import (
    check_engine,
    check_groups,
    check_layered,
    check_window,
)
from ptstore_mpi.integrations.vllm.group import TorchGroup
from ptstore_mpi.integrations.vllm.link import EngineLink
from ptstore_mpi.integrations.vllm.plans import StepPlan
from ptstore_mpi.integrations.vllm.scheduler_side import SchedulerSide
from ptstore_mpi.integrations.vllm.settings import ConnectorSettings
from ptstore_mpi.integrations.vllm.worker_side import WorkerSide

__all__ = ["GENERATIONS", "Api", "Api011", "Api015", "Api032"]


class Api:
    """What all generations call alike. `_open` comes first, on the scheduler's and worker's part.

    Attributes
    ----------
    RUN, CHECKED
        Versions of vLLM that are run by the tests, and those whose sources are checked against.
    REPORTS_LOAD_ERRORS
        Whether a load may fail after it was claimed.
    KEEPS_ORPHANS
        Whether vLLM keeps the blocks of a request that ends while it is loaded.
    CAN_LAYER
        Whether a load may be waited for layer by layer.
    SPLITS_KV
        Whether there are caches that begin with an axis of keys and values.
    """

    RUN: ClassVar[tuple[str, ...]] = ()
    CHECKED: ClassVar[tuple[str, ...]] = ()
    REPORTS_LOAD_ERRORS: ClassVar[bool] = True
    KEEPS_ORPHANS: ClassVar[bool] = False
    SPLITS_KV: ClassVar[bool] = True
    CAN_LAYER: ClassVar[bool] = False

    _link: EngineLink
    _scheduler: SchedulerSide
    _worker: WorkerSide
    _block_count: int | None = None

    def _open(self, vllm_config: Any, is_worker: bool, cache_config: Any) -> None:
        settings = ConnectorSettings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_engine(vllm_config)
        if cache_config is None:
            check_window(vllm_config)
        else:
            check_groups(cache_config)
            self._block_count = int(cache_config.num_blocks)
        self._link = current_attachment().link_of(vllm_config, settings)
        mode = settings.load if settings.load != "auto" else "async"
        if not self.REPORTS_LOAD_ERRORS:
            mode = "verified"
        if mode == "layered":
            check_layered(vllm_config, is_possible=self.CAN_LAYER)
        if is_worker:
            if vllm_config.parallel_config.tensor_parallel_size > 1:
                from vllm.distributed.parallel_state import get_tp_group

                self._link.group = TorchGroup(get_tp_group().cpu_group)
            self._worker = WorkerSide(
                self._link, is_layered=mode == "layered", keeps_orphans=self.KEEPS_ORPHANS
            )
        else:
            self._scheduler = SchedulerSide(
                self._link,
                is_async=mode == "async",
                is_verified=mode == "verified",
                keeps_orphans=self.KEEPS_ORPHANS,
            )

    # -- scheduler's part ------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens will be loaded beyond vLLM's own, and whether aside."""
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take note of the blocks of a request."""
        self._scheduler.blocks_given(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        """Return what the worker's part does in this step."""
        counts = scheduler_output.num_scheduled_tokens
        scheduled: dict[str, tuple[int, int]] = {}
        blocks: dict[str, tuple[list[int], bool]] = {}
        for new in scheduler_output.scheduled_new_reqs:
            scheduled[new.req_id] = (new.num_computed_tokens, counts[new.req_id])
            blocks[new.req_id] = (new.block_ids[0], True)
        cached = scheduler_output.scheduled_cached_reqs
        for place, name in enumerate(cached.req_ids):
            scheduled[name] = (cached.num_computed_tokens[place], counts[name])
            ids = cached.new_block_ids[place]
            if ids is not None:
                blocks[name] = (ids[0], self._is_resumed(cached, place))
        return self._scheduler.plan_step(
            scheduled, blocks, is_idle=not scheduler_output.total_num_scheduled_tokens
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Let saves begin: the step's tokens are out."""
        del connector_output
        self._link.thread.release_held()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell whether the blocks are still needed, and what came from where."""
        return self._scheduler.finished(request, block_ids)

    @staticmethod
    def _is_resumed(cached: Any, place: int) -> bool:
        return cached.req_ids[place] in cached.resumed_req_ids

    # -- worker's part ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Take note of where the blocks are."""
        self._link.register(kv_caches, block_count=self._block_count, splits_kv=self.SPLITS_KV)

    def bind_connector_metadata(self, connector_metadata: StepPlan) -> None:
        """Begin a step."""
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]
        self._worker.begin_step(connector_metadata)
        self._worker.start_clock()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads."""
        del forward_context, kwargs
        self._worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until a layer is there, where loads are layered."""
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: saves begin after the step, so that they never delay its token."""
        del layer_name, kv_layer, attn_metadata, kwargs

    def wait_for_save(self) -> None:
        """Queue this step's saves; waits for none."""
        self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests that were saved after their end, and requests that were loaded."""
        saved, loaded = self._worker.finished(finished_req_ids)
        return saved or None, loaded or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were claimed and did not come."""
        return self._worker.take_load_errors()

    def get_kv_connector_stats(self) -> Any:
        """Return what was counted since last time; None where nothing was."""
        if not hasattr(self, "_worker"):
            return None
        return self.build_kv_connector_stats(self._link.take_counted())

    def shutdown(self) -> None:
        """End what is under way; the store stays."""
        if hasattr(self, "_worker"):
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: Mapping[str, Any] | None = None) -> Any:
        """Return counters as vLLM adds them up."""
        from ptstore_mpi.integrations.vllm.connector_stats import PTStoreStats

        return PTStoreStats(data=dict(data)) if data else None


class Api011(Api):
    """vLLM 0.11: two arguments, no load errors."""

    CHECKED = ("0.11.0",)
    REPORTS_LOAD_ERRORS = False

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)  # type: ignore[call-arg]
        self._open(vllm_config, role.name == "WORKER", None)

    @staticmethod
    def _is_resumed(cached: Any, place: int) -> bool:
        return bool(cached.resumed_from_preemption[place])


class _WithCacheConfig(Api):
    """From 0.12 on: the cache's configuration is the third argument."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._open(vllm_config, role.name == "WORKER", kv_cache_config)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do as `request_finished`; there is one group."""
        return self._scheduler.finished(request, block_ids[0])

    def reset_cache(self) -> bool | None:
        """Share KV no longer with engines of the weights so far: these have changed.

        `Attachment.name_weights` lets engines of equal new weights share again.
        """
        self._scheduler.reset()
        return True


class Api015(_WithCacheConfig):
    """vLLM 0.15."""

    CHECKED = ("0.15.0", "0.15.1")

    def handle_preemptions(self, preempted_req_ids: set[str]) -> None:
        """End the saves of preempted requests before their blocks are overwritten."""
        for name in preempted_req_ids:
            self._link.end_saves(name, "preempted")


class Api032(_WithCacheConfig):
    """vLLM 0.32."""

    RUN = ("0.32.0",)
    KEEPS_ORPHANS = True
    SPLITS_KV = False
    CAN_LAYER = True

    _vllm_cache: Any = None

    def handle_preemptions(self, kv_connector_metadata: StepPlan) -> None:
        """End the saves of preempted requests before their blocks are overwritten."""
        self._worker.begin_step(kv_connector_metadata)

    def update_connector_output(self, connector_output: Any) -> None:
        """Let saves begin, and vLLM forget blocks that it entered before their load fell short."""
        super().update_connector_output(connector_output)
        spoiled = self._scheduler.take_spoiled()
        if spoiled and self._vllm_cache is not None:
            self._vllm_cache.evict_blocks(spoiled)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Take note of vLLM's own prefix cache."""
        super().bind_kv_cache_manager(kv_cache_manager)  # type: ignore[misc]
        self._vllm_cache = kv_cache_manager

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, not a loss."""
        return False

    def has_pending_block_frees(self) -> bool:
        """Whether saves under way will give blocks back."""
        return bool(self._link.delayed)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[Any, int]:
        """Say where a hit will come from, as far as it is known before the lease."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        host = self._scheduler.expected_near(request, num_external_tokens)
        found = {CacheHitSource.HOST: host, CacheHitSource.P2P: num_external_tokens - host}
        return {source: tokens for source, tokens in found.items() if tokens}

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layered loads are waited for between layers, which a whole graph would skip."""
        return ConnectorSettings.of(extra_config).load == "layered"


GENERATIONS: dict[str, type[Api]] = {"0.11": Api011, "0.15": Api015, "0.32": Api032}
"""By the first two numbers of the version."""
