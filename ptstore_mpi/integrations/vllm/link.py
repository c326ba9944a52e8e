"""What the two sides of one engine's connector share: its blocks, namespaces, and work under way.

vLLM builds a connector for its scheduler and one for its worker. They live in one process here, for
the store does: whoever attached it (`attachment`) is where both find it. Owns nothing that decides;
the scheduler's side decides, the worker's side carries out.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ptstore_mpi import SOURCES, CapacityError, LoadResult, Match, Namespace, Store
from ptstore_mpi.errors import ConfigError
from ptstore_mpi.integrations.fetch_or_recompute import FetchOrRecompute, expected_sources
from ptstore_mpi.integrations.vllm.blocks import BlockPool
from ptstore_mpi.integrations.vllm.fences import Fence, current_device
from ptstore_mpi.integrations.vllm.group import Alone, Group
from ptstore_mpi.integrations.vllm.identity import (
    engine_identity,
    request_identity,
    weights_identity,
)
from ptstore_mpi.integrations.vllm.plans import (
    Load,
    SavePlan,
    SaveRecord,
    SaveReport,
    SaveTotals,
)
from ptstore_mpi.integrations.vllm.settings import ConnectorSettings
from ptstore_mpi.integrations.vllm.store_thread import NOTE, SAVE, Slices, StoreThread, at_once

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["EngineLink"]

_MOST_NAMESPACES = 4096
_MOST_REPORTS = 65536
_log = logging.getLogger(__name__)


class EngineLink:
    """One engine and its store.

    Attributes
    ----------
    store, thread
        The store, and who performs its operations.
    settings
        Of the connector.
    block_tokens
        Tokens of a block of vLLM.
    pool
        vLLM's blocks; None until they are registered.
    fetch
        What was measured of loads and prefills.
    group
        Ranks that are this engine.
    loads, saves
        Work under way by request.
    delayed
        Requests that have ended while vLLM leaves their blocks to us.
    failed
        Tokens there by request, where a load brought less than was claimed.
    replan
        Requests whose prompt is to be saved after all: it is computed again.
    results
        What a load brought, by request, until it is told.
    weight_epoch
        Name of the weights.
    spoiled
        vLLM's blocks that hold what was computed upon a short load, until they are told.
    """

    def __init__(
        self, store: Store, thread: StoreThread, settings: ConnectorSettings, vllm_config: Any
    ) -> None:
        self.store = store
        self.thread = thread
        self.settings = settings
        self.pool: BlockPool | None = None
        self.fetch = FetchOrRecompute(is_on=settings.fetch == "cost")
        self.group: Group = Alone()
        self.loads: dict[str, Load] = {}
        self.saves: dict[str, SaveRecord] = {}
        self.delayed: set[str] = set()
        self.failed: dict[str, int] = {}
        self.replan: set[str] = set()
        self.results: dict[str, LoadResult] = {}
        self.weight_epoch = str(settings.weight_epoch)
        self.spoiled: set[int] = set()
        self.counters: Counter[str] = Counter()
        self._counting = threading.Lock()  # both threads count
        self.reports: deque[SaveReport] = deque(maxlen=_MOST_REPORTS)
        self._told: Counter[str] = Counter()
        self.block_tokens = int(vllm_config.cache_config.block_size)
        self._near_servers = store.topology.servers_of(store.node)
        self._vllm_config = vllm_config
        self._model_id = ""
        self._identity: tuple[str, dict[str, str]] | None = None
        self._namespaces: dict[tuple[tuple[str, str], ...], Namespace] = {}

    def register(
        self, caches: Mapping[str, Tensor], *, block_count: int | None, splits_kv: bool
    ) -> None:
        """Take note of where vLLM keeps its blocks, as `BlockPool` reads them.

        Raises
        ------
        ConfigError
            The store cannot hold segments of this layout, or another engine of this process has
            registered its blocks: vLLM has one connector per process, and would mix them up.
        """
        if self.pool is not None:
            raise ConfigError(
                "PTStoreConnector: expected one engine in this process, found a second one beside "
                "one that is not released; see ptstore_mpi.integrations.vllm.release"
            )
        self.pool = BlockPool(
            caches, block_count=block_count, block_tokens=self.block_tokens, splits_kv=splits_kv
        )
        segment_tokens = self.store.config.segment_tokens
        if segment_tokens % self.block_tokens:
            raise ConfigError(
                f"expected segment_tokens of the store to be a multiple of vLLM's block_size "
                f"({self.block_tokens}), got {segment_tokens}"
            )
        # All weights are read for it: now, not when the first request waits.
        self._model_id = self.settings.model_id or weights_identity(self._vllm_config)

    def close(self) -> None:
        """Let the engine's memory go; what was counted stays."""
        self.pool = self._vllm_config = None
        self._namespaces.clear()

    def name_weights(self, name: str) -> None:
        """Say that the engine has other weights now: only engines that say the same share KV."""
        self.weight_epoch = name

    def fence(self) -> Fence | None:
        """Return a fence behind what the engine's device does now; None: nothing."""
        assert self.pool is not None
        return Fence.on(self.pool.device)

    def namespace_of(self, request: Any) -> Namespace:
        """Return the namespace of a request's KV."""
        facts = request_identity(request)
        key = tuple(sorted({**facts, "epoch": self.weight_epoch}.items()))
        found = self._namespaces.get(key)
        if found is None:
            if len(self._namespaces) >= _MOST_NAMESPACES:
                self._namespaces.clear()
            assert self.pool is not None, "vLLM registers its caches before it schedules"
            if self._identity is None:
                self._identity = engine_identity(
                    self._vllm_config,
                    version=_version(),
                    model_id=self._model_id,
                    tensor_shape=self.pool.shape,
                )
            model, identity = self._identity
            found = self._namespaces[key] = self.store.namespace(
                model,
                self.pool.layout,
                salt=self.settings.salt,
                weight_epoch=self.weight_epoch,
                **identity,
                **facts,
            )
        return found

    def count_without_load(
        self, namespace: Namespace, *, prompt_tokens: int, have_tokens: int, reason: str
    ) -> None:
        """Count a request for which nothing is loaded: it is what vLLM has, or recomputed."""
        nothing = Match(0, prompt_tokens, reason, (), namespace.digest)
        self.thread.submit(
            at_once(lambda: namespace.load(nothing, [], skip_tokens=have_tokens)), NOTE
        )
        self.count_tokens({"engine": have_tokens}, prompt_tokens)

    def load_to_host(
        self, namespace: Namespace, match: Match, host: list[Any], have_tokens: int
    ) -> LoadResult:
        """Load into host buffers, and count it, whoever waits for it still. The thread calls it."""
        result = namespace.load(match, host, skip_tokens=have_tokens)
        self.note_load(result, match, have_tokens=have_tokens)
        return result

    def note_load(self, result: LoadResult, match: Match, *, have_tokens: int) -> None:
        """Take note of a load of ``match`` that has ended."""
        asked = match.prompt_tokens
        brought: Mapping[str, int] = result.by_source
        if result.reason == "late" and sum(brought.values()) <= have_tokens:
            brought = self.expected_sources(match, have_tokens)  # for nothing, in all of its time
        self.fetch.note_load(brought, result.seconds)
        self.count({f"load_{result.reason}_count": 1})
        self.count_tokens(result.by_source, asked)

    def expected_sources(self, match: Match, have_tokens: int) -> dict[str, int]:
        """Return the tokens of a match beyond those that vLLM has, by where they will come from."""
        return expected_sources(match, self._near_servers, self.block_tokens, have_tokens)

    def count_tokens(self, by_source: Mapping[str, int], asked: int) -> None:
        """Count a request's tokens by source, for vLLM's own statistics."""
        tokens = {f"{source}_tokens": by_source.get(source, 0) for source in SOURCES}
        recomputed = asked - sum(by_source.values())
        self.count({"asked_tokens": asked, **tokens, "recomputed_tokens": recomputed})

    def count(self, counts: Mapping[str, int]) -> None:
        """Add to the counters."""
        with self._counting:
            self.counters.update(counts)

    def take_counted(self) -> dict[str, int]:
        """Return how much the counters grew since last time."""
        with self._counting:
            now = Counter(self.counters)
        grown = dict(now - self._told)
        self._told = now
        return grown

    @property
    def queued_save_tokens(self) -> int:
        """Tokens whose blocks wait to be saved."""
        return sum(record.token_count for record in self.saves.values() if not record.is_settled)

    def plan_save(self, request_id: str, token_count: int) -> bool:
        """Make room for a save in the queue; False, and counted, where a rank has none.

        Collective over the ranks of the engine.
        """
        has_room = self.queued_save_tokens + token_count <= self.settings.save_queue_tokens
        if self.group.smallest([int(has_room)]) == [0]:
            self.report(SaveReport(request_id, 0, 0, "queue_full", 0.0))
            return False
        record = self.saves.setdefault(request_id, SaveRecord())
        if record.is_settled:
            record.token_count = 0
        record.planned_count += 1
        record.token_count += token_count
        return True

    def submit_save(
        self, plan: SavePlan, *, fence: Fence | None = None, hold: bool = False
    ) -> None:
        """Start a save that `plan_save` made room for."""
        record, totals = self.saves[plan.request_id], SaveTotals()
        record.totals.append(totals)
        record.tasks.append(self.thread.submit(self._save(plan, fence, totals), SAVE, hold=hold))

    def give_up_save(self, plan: SavePlan) -> None:
        """Forget a save that was planned: what its blocks hold is not what was to be computed."""
        self.saves[plan.request_id].planned_count -= 1
        self.replan.add(plan.request_id)

    def end_saves(self, request_id: str, reason: str) -> None:
        """End what is being saved of a request: after this, nothing reads its blocks."""
        record = self.saves.get(request_id)
        if record is None:
            return
        self.thread.cancel([task for task in record.tasks if not task.is_done])
        for task, totals in zip(record.tasks, record.totals, strict=True):
            if task.is_cancelled and not totals.is_told:
                self._tell(request_id, totals, reason)

    def release_saves(self, request_id: str) -> bool:
        """Let a request that ends go; False where its blocks are still being saved on a rank.

        Collective over the ranks of the engine.
        """
        record = self.saves.get(request_id)
        if record is None:
            return True
        if self.group.smallest([int(record.is_settled)]) == [0]:
            self.delayed.add(request_id)
            return False
        del self.saves[request_id]
        return True

    def report(self, report: SaveReport) -> None:
        """Take note of what came of a save."""
        counts = {"saved_tokens": report.tokens, "saved_bytes": report.bytes}
        self.count({**counts, f"save_{report.reason}_count": 1})
        self.reports.append(report)

    def _save(self, plan: SavePlan, fence: Fence | None, totals: SaveTotals) -> Slices[None]:
        """Store slice by slice, so that a match never waits for a long prompt."""
        assert self.pool is not None
        if fence is not None:
            fence.wait()
        views = self.pool.views(plan.block_ids)
        step = max(self.settings.save_slice_tokens // self.block_tokens, 1) * self.block_tokens
        reason = "known"
        verified = len(plan.tokens) if plan.verified_tokens is None else plan.verified_tokens
        for end in [*range(step, len(plan.tokens), step), len(plan.tokens)]:
            try:
                with current_device(self.pool.device):
                    result = plan.namespace.store(
                        plan.tokens[:end],
                        views,
                        verified_tokens=verified if verified < end else None,
                    )
            except CapacityError:
                reason = "too_large"
                break
            except Exception:
                _log.exception("a save failed; what it would have kept is a miss")
                reason = "error"
                break
            totals.tokens += result.tokens
            totals.bytes += result.bytes
            totals.seconds += result.seconds
            if result.reason == "stored":
                reason = "stored"
            elif result.reason not in ("known", "dedup"):
                reason = result.reason
                break
            verified = max(verified, end)
            yield
        self._tell(plan.request_id, totals, reason)

    def _tell(self, request_id: str, totals: SaveTotals, reason: str) -> None:
        totals.is_told = True
        self.report(SaveReport(request_id, totals.tokens, totals.bytes, reason, totals.seconds))


def whole_blocks(token_count: int, block_tokens: int) -> int:
    """Return the tokens of the whole blocks among ``token_count``."""
    return token_count // block_tokens * block_tokens


def block_array(block_ids: list[int], token_count: int, block_tokens: int) -> Any:
    """Return the first blocks of a table, those of ``token_count`` tokens, as int64."""
    return np.array(block_ids[: token_count // block_tokens], dtype=np.int64)


def _version() -> str:
    import vllm

    return str(vllm.__version__)
