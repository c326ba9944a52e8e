"""The worker's side of the connector: carries out what a `StepPlan` says, beside the engine.

Owns the loads and saves under way. Never decides what to load, and never blocks a step for a save;
the one thing that it waits for is a save whose blocks are given to another request.

::

    begin_step     saves of preempted requests end, before anything overwrites their blocks
    start_loads    into vLLM's own blocks, in the store's thread
    wait_for_layer layered loads only: until this layer's tensors are there
    end_step       layered loads have ended, or never will
    finished       what has ended, agreed upon by the ranks of the engine; saves of this step's
                   prompts are queued, and begin when the step's token is out
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

from ptstore_mpi import LoadResult
from ptstore_mpi.integrations.vllm.fences import Fence, StepClock, current_device
from ptstore_mpi.integrations.vllm.link import EngineLink
from ptstore_mpi.integrations.vllm.plans import Load, Prefill, StepPlan
from ptstore_mpi.integrations.vllm.store_thread import LOAD, Slices

__all__ = ["WorkerSide"]

IDLE_WAIT_S = 0.002
"""How long a step that computes nothing waits for a load to end."""

_MOST_MEASURED = 64
_log = logging.getLogger(__name__)


class WorkerSide:
    """Moves blocks for one engine.

    Parameters
    ----------
    link
        What both sides share.
    is_layered
        Whether a load is waited for layer by layer, within its step.
    keeps_orphans
        As in `SchedulerSide`.
    """

    def __init__(self, link: EngineLink, *, is_layered: bool, keeps_orphans: bool) -> None:
        self._link = link
        self._is_layered = is_layered
        self._keeps_orphans = keeps_orphans
        self._plan = StepPlan()
        self._announced: set[str] = set()
        self._wrong_blocks: set[int] = set()
        self._clock: StepClock | None = None
        self._waited_s = 0.0
        self._computed: Fence | None = None
        self._measured: deque[tuple[StepClock, Prefill, float]] = deque(maxlen=_MOST_MEASURED)

    def begin_step(self, plan: StepPlan) -> None:
        """Begin a step: nothing of the preempted requests is read any more after this."""
        self._plan = plan
        for name in plan.preempted:
            self._link.end_saves(name, "preempted")

    def start_clock(self) -> None:
        """Begin to measure the step, where it says something."""
        pool = self._link.pool
        self._waited_s = 0.0
        if self._plan.prefill is not None and pool is not None:
            self._clock = StepClock(pool.device)

    def start_loads(self) -> None:
        """Start the loads of this step."""
        plans, self._plan.loads = self._plan.loads, []
        for plan in plans:
            if plan.host is not None:
                assert self._link.pool is not None
                first = plan.skip_tokens // self._link.block_tokens
                self._link.pool.copy_in(plan.host, plan.block_ids, first)
                continue
            until_s = time.monotonic() + self._link.store.config.load_timeout_s
            load = Load(plan, until_s=until_s, is_awaited=not self._is_layered)
            self._link.loads[plan.request_id] = load
            load.task = self._link.thread.submit(self._load(load, self._link.fence()), LOAD)

    def wait_for_layer(self, layer: str) -> None:
        """Wait until a layer's blocks are there, or their load has ended short."""
        pool = self._link.pool
        if not self._is_layered or pool is None or not self._link.loads:
            return
        wanted = pool.layer_ends.get(layer, len(pool.layout.tensors))
        started = time.perf_counter()
        for load in list(self._link.loads.values()):
            self._await(load, wanted)
            load.layers.add(layer)
        self._waited_s += time.perf_counter() - started

    def end_step(self) -> None:
        """End a step after its forward pass.

        A layered load that is later than anybody waits is ended: its blocks are computed again.
        """
        if self._is_layered:
            loads = list(self._link.loads.values())
            for load in loads:
                self._await(load, None)
                # A captured graph may pass over the waits: then it read what was not there yet.
                load.was_missed |= not load.layers >= self._layers
            self._link.thread.cancel([load.task for load in loads if load.task is not None])
        self._computed = self._link.fence() if self._plan.saves else None
        self._stop_clock()

    def finished(self, ended_requests: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return requests whose blocks were saved, and whose blocks were loaded, since last time.

        Collective over the ranks of the engine.

        Parameters
        ----------
        ended_requests
            Requests that have ended since last time.
        """
        link = self._link
        link.thread.release_held()
        self._announced |= set(ended_requests) & link.delayed
        loads = list(link.loads.values())
        if self._plan.is_idle and loads:
            link.thread.wait_for_any([load.task for load in loads if load.task], IDLE_WAIT_S)
        late = [load for load in loads if load.is_awaited and load.until_s < time.monotonic()]
        link.thread.abandon([load.task for load in late if load.task is not None])
        told = [name for name in link.saves if name in self._announced]
        own = [_brought(load) for load in loads] + [
            int(link.saves[name].is_settled) for name in told
        ]
        agreed = link.group.smallest(own) if own else []
        saved = {name for name, flag in zip(told, agreed[len(loads) :], strict=True) if flag}
        loaded: set[str] = set()
        wrong: set[int] = set()
        for load, tokens in zip(loads, agreed, strict=False):
            if tokens >= 0:
                wrong |= self._end_load(load, tokens, saved, loaded)
        self._wrong_blocks |= wrong
        for name in saved:
            self._announced.discard(name)
            link.delayed.discard(name)
            link.saves.pop(name, None)  # none where it ended in a load
        self._queue_saves(wrong)
        return saved, loaded

    def _queue_saves(self, wrong: set[int]) -> None:
        """Queue this step's saves, but those that were computed upon wrong blocks."""
        plans, self._plan.saves = self._plan.saves, []
        for plan in plans:
            if wrong.isdisjoint(plan.block_ids.tolist()):
                self._link.submit_save(plan, fence=self._computed, hold=True)
            else:
                self._link.give_up_save(plan)

    def take_load_errors(self) -> set[int]:
        """Return vLLM's blocks that were claimed and did not come, since last time."""
        wrong, self._wrong_blocks = self._wrong_blocks, set()
        return wrong

    def close(self) -> None:
        """End everything under way: the engine's memory goes."""
        link = self._link
        tasks = [load.task for load in link.loads.values() if load.task is not None]
        tasks += [task for record in link.saves.values() for task in record.tasks]
        link.thread.cancel(tasks)
        link.close()

    def _stop_clock(self) -> None:
        """End the measurement of this step, and take note of those that are known by now."""
        clock, prefill = self._clock, self._plan.prefill
        self._clock = self._plan.prefill = None
        if clock is not None and prefill is not None:
            clock.stop()
            self._measured.append((clock, prefill, self._waited_s))
        while self._measured:
            clock, prefill, waited_s = self._measured[0]
            seconds = clock.seconds()
            if seconds is None:
                return
            self._measured.popleft()
            self._link.fetch.note_prefill(
                prefill.tokens, max(seconds - waited_s, 0.0), cached_tokens=prefill.cached_tokens
            )

    def _load(self, load: Load, fence: Fence | None) -> Slices[LoadResult]:
        plan, thread = load.plan, self._link.thread
        assert self._link.pool is not None
        if fence is not None:
            fence.wait()

        def progress(tensors: int) -> None:
            load.ready_tensors = tensors
            thread.notify()

        with current_device(self._link.pool.device):
            result = plan.namespace.load(
                plan.match,
                self._link.pool.views(plan.block_ids),
                skip_tokens=plan.skip_tokens,
                progress=progress if self._is_layered else None,
            )
        yield from ()
        return result

    def _end_load(self, load: Load, tokens: int, saved: set[str], loaded: set[str]) -> set[int]:
        """Take note of a load that has ended, and return the blocks that did not come."""
        link, plan = self._link, load.plan
        name = plan.request_id
        del link.loads[name]
        result = _result_of(load)
        if load.task is not None and load.task.error is not None:
            _log.error("a load failed; its tokens are computed", exc_info=load.task.error)
        if load.task is None or load.task.error is not None or load.task.is_cancelled:
            link.count_without_load(
                plan.namespace,
                prompt_tokens=plan.match.prompt_tokens,
                have_tokens=plan.skip_tokens,
                reason=result.reason,
            )
        else:
            link.note_load(result, plan.match, have_tokens=plan.skip_tokens)
        if load.is_orphan:
            (loaded if self._keeps_orphans else saved).add(name)
            return set()
        link.results[name] = result
        if load.is_awaited:
            loaded.add(name)
        if tokens < plan.match.tokens:
            link.failed[name] = tokens
            link.replan.add(name)
            first = max(tokens, plan.skip_tokens) // link.block_tokens
            if not load.is_awaited:
                link.spoiled.add(int(plan.block_ids[first]))
            return {int(block) for block in plan.block_ids[first:]}
        return set()

    def _await(self, load: Load, tensors: int | None) -> None:
        """Wait until so many tensors of a load are there; None: until it has ended."""
        task = load.task
        assert task is not None
        load.was_missed |= not self._link.thread.wait_until(
            lambda: task.is_done or (tensors is not None and load.ready_tensors >= tensors),
            max(load.until_s - time.monotonic(), 0.0),
        )

    @property
    def _layers(self) -> set[str]:
        pool = self._link.pool
        return set(pool.layer_ends) if pool is not None else set()


def _brought(load: Load) -> int:
    """Return the tokens that a load brought in time; -1 while it goes on."""
    if load.task is None or not load.task.is_done:
        return -1
    return load.plan.skip_tokens if load.was_missed else _result_of(load).tokens


def _result_of(load: Load) -> LoadResult:
    """Return what a load brought: nothing where it was cancelled or raised."""
    task, plan = load.task, load.plan
    assert task is not None
    if task.error is not None or task.result is None:
        skipped = min(plan.skip_tokens, plan.match.prompt_tokens)
        reason = "error" if task.error is not None else "ended"
        return LoadResult(skipped, {"engine": skipped}, {}, reason)
    return task.result
