"""The scheduler's side of the connector: how much of a prompt comes from the store.

Owns one decision per request, made once however often vLLM asks: match, weigh, claim. It travels
to the worker's side in the `StepPlan`. Never touches a block.

::

    asked --> match (in the store's thread) --> judged --> claimed --> blocks given --> LoadPlan
      ^         not there yet: ask later         declined, or nothing: counted, computed
      `-- preempted: asked anew, for more tokens
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any, TypeVar

import numpy as np

from ptstore_mpi import LoadResult, Match
from ptstore_mpi.integrations.vllm.link import EngineLink, block_array, whole_blocks
from ptstore_mpi.integrations.vllm.plans import LoadPlan, Prefill, SavePlan, StepPlan
from ptstore_mpi.integrations.vllm.store_thread import LOAD, MATCH, Task, at_once
from ptstore_mpi.integrations.vllm.tracked import Decision, Tracked, facts_of, has_tokens

__all__ = ["SchedulerSide"]

T = TypeVar("T")

_MOST_HOST_LOADS = 2
_LATER_WAIT_S = 0.001
_MOST_TIMEOUTS = 1.1  # of a match, from when it was asked for
_log = logging.getLogger(__name__)


class SchedulerSide:
    """Decides for one engine.

    Parameters
    ----------
    link
        What both sides share.
    is_async
        Whether loads run outside the batch.
    is_verified
        Whether a load ends before it is claimed.
    keeps_orphans
        Whether vLLM itself keeps the blocks of a request that ends while it is loaded.
    """

    def __init__(
        self, link: EngineLink, *, is_async: bool, is_verified: bool, keeps_orphans: bool
    ) -> None:
        self._link = link
        self._is_async = is_async and not is_verified
        self._is_verified = is_verified
        self._keeps_orphans = keeps_orphans
        self._preempted: list[str] = []
        self._tracked: dict[str, Tracked] = {}
        self._planned: list[LoadPlan] = []

    def matched_tokens(self, request: Any, have_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens beyond those that vLLM has will be loaded, and whether aside.

        None: not known yet, ask again. Asking changes nothing; equal questions get equal answers.
        Collective over the ranks of the engine.
        """
        tracked = self._track(request)
        decision = tracked.decision
        if decision is None or decision.have_tokens != have_tokens:
            # Also where there is none yet: what was decided for another question is void.
            decision = tracked.decision = self._decide(tracked, have_tokens)
            if decision is None:
                return None, False
        return decision.external_tokens, self._is_async and decision.external_tokens > 0

    def blocks_given(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """Take note of a request's blocks; plan its load, or count it, once."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        tracked.block_ids = list(block_ids)
        decision = tracked.decision
        if decision is None:
            return
        if external_tokens > 0:
            self._plan_load(tracked, decision, external_tokens)
        if tracked.is_counted:
            return
        tracked.is_counted = True
        tracked.facts |= {
            "reason": decision.reason,
            "match_s": 0.0 if tracked.found is None else tracked.found.seconds,
            "load_s": tracked.facts.get("load_s", 0.0),
        }
        if external_tokens > 0:
            return
        self._drop_host(tracked)
        if tracked.namespace is not None:
            self._link.count_without_load(
                tracked.namespace,
                prompt_tokens=len(tracked.tokens),
                have_tokens=min(
                    decision.have_tokens,
                    whole_blocks(len(tracked.tokens), self._link.block_tokens),
                ),
                reason=decision.reason,
            )
        tracked.facts |= facts_of({"engine": decision.have_tokens}, len(tracked.tokens))

    def plan_step(
        self,
        scheduled: dict[str, tuple[int, int]],
        blocks: dict[str, tuple[list[int], bool]],
        *,
        is_idle: bool,
    ) -> StepPlan:
        """Return what this step loads and saves. Collective over the ranks of the engine.

        Parameters
        ----------
        scheduled
            By request, tokens computed before this step and in it.
        blocks
            By request, blocks that it was given, and whether they are all it has.
        is_idle
            Whether nothing is computed.
        """
        plan = StepPlan(self._planned, preempted=self._preempted, is_idle=is_idle)
        self._planned, self._preempted = [], []
        for name, (ids, are_all) in blocks.items():
            tracked = self._tracked.get(name)
            if tracked is not None:
                tracked.block_ids = list(ids) if are_all else tracked.block_ids + list(ids)
        for name in self._link.replan & self._tracked.keys():
            self._tracked[name].is_prompt_planned = False
        self._link.replan.clear()
        for name in [*self._link.saves]:
            tracked = self._tracked.get(name)
            if tracked is not None and tracked.was_preempted:
                tracked.is_prompt_planned = False
                plan.preempted.append(name)
        for name, (before, count) in scheduled.items():
            tracked = self._tracked.get(name)
            if tracked is not None:
                self._plan_save(tracked, before + count, plan)
        if len(scheduled) == 1:
            ((before, count),) = scheduled.values()
            if count > 1:
                plan.prefill = Prefill(count, before)
        return plan

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Tell whether vLLM must leave the request's blocks alone, and what came from where.

        Collective over the ranks of the engine.
        """
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return False, None
        link, name = self._link, tracked.name
        self._drop_host(tracked)
        if tracked.match_task is not None:
            link.thread.abandon([tracked.match_task])
        if tracked.was_preempted and name in link.saves:
            self._preempted.append(name)
        self._planned = [plan for plan in self._planned if plan.request_id != name]
        load = link.loads.get(name)
        if load is not None:
            load.is_orphan = True
        if link.settings.save == "all" and load is None:
            self._save_decoded(tracked, block_ids)
        is_delayed = not link.release_saves(name)
        is_delayed |= load is not None and not self._keeps_orphans
        link.failed.pop(name, None)
        self._take_result(tracked)
        return is_delayed, {"ptstore": tracked.facts} if tracked.facts else None

    def expected_near(self, request: Any, external_tokens: int) -> int:
        """Return how many of a hit's tokens servers of this node own."""
        tracked = self._tracked.get(request.request_id)
        decision = tracked.decision if tracked is not None else None
        if decision is None:
            return 0
        expected = self._link.expected_sources(decision.match, decision.have_tokens)
        return min(external_tokens, sum(expected.values()) - expected.get("remote", 0))

    def take_spoiled(self) -> set[int]:
        """Return the blocks from a short layered load's end on, of all that hold them."""
        first, self._link.spoiled = self._link.spoiled, set()
        spoiled = set(first)
        for tracked in self._tracked.values() if first else ():
            for place, block in enumerate(tracked.block_ids):
                if block in first:
                    spoiled.update(tracked.block_ids[place:])
                    break
        return spoiled

    def reset(self) -> None:
        """Forget everything stored under the weights so far: they have changed.

        What was computed in part with the old ones is not stored.
        """
        self._link.name_weights(uuid.uuid4().hex)
        for tracked in self._tracked.values():
            tracked.saves = False
        waiting = [name for name, tracked in self._tracked.items() if not tracked.block_ids]
        for name in waiting:
            self._drop_host(self._tracked.pop(name))

    def _track(self, request: Any) -> Tracked:
        name = str(request.request_id)
        tracked = self._tracked.get(name)
        if tracked is not None and not tracked.was_preempted:
            if name in self._link.failed and tracked.refusal != "failed":
                # vLLM asks again after a load that brought nothing: it computes.
                tracked.decision = None
                tracked.refusal = "failed"
            return tracked
        namespace = self._link.namespace_of(request) if has_tokens(request) else None
        previous, tracked = tracked, Tracked.of(request, namespace)
        tracked.saves &= self._link.settings.save != "none"
        if previous is not None:
            tracked.facts = previous.facts
            tracked.is_prompt_planned = previous.is_prompt_planned
            if name in self._link.saves:
                tracked.is_prompt_planned = False
                self._preempted.append(name)
            self._drop_host(previous)
            self._link.failed.pop(name, None)
        self._tracked[name] = tracked
        return tracked

    def _decide(self, tracked: Tracked, have_tokens: int) -> Decision | None:
        """Match and weigh; None where the match, or a load to the host, has not ended."""
        nothing = Match(0, len(tracked.tokens), tracked.refusal or "cold")
        if tracked.refusal or tracked.namespace is None:
            return Decision(have_tokens, 0, nothing, tracked.refusal)
        found = self._found(tracked)
        local = -1 if found is None else self._worth(tracked, found, have_tokens)
        (agreed,) = self._link.group.smallest([local])
        if agreed < 0 or found is None:
            return None
        if agreed <= have_tokens:
            reason = "declined" if found.tokens > have_tokens else found.reason
            return Decision(have_tokens, 0, nothing, reason)
        match = found
        if agreed < found.tokens:
            match = tracked.namespace.cut(found, tracked.tokens, agreed)
        if self._is_verified:
            return self._decide_verified(tracked, match, have_tokens)
        return Decision(have_tokens, agreed - have_tokens, match, match.reason)

    def _found(self, tracked: Tracked) -> Match | None:
        link, namespace = self._link, tracked.namespace
        assert namespace is not None
        if tracked.found is not None:
            return tracked.found
        wait_s = min(link.settings.match_wait_s, _LATER_WAIT_S)
        if tracked.match_task is None:
            tokens, wait_s = tracked.tokens, link.settings.match_wait_s
            tracked.match_task = link.thread.submit(at_once(lambda: namespace.match(tokens)), MATCH)
        task = tracked.match_task
        late_s = task.submitted_s + _MOST_TIMEOUTS * link.store.config.match_timeout_s
        if link.thread.wait([task], wait_s):
            tracked.found = _outcome(task, Match(0, len(tracked.tokens), "error"))
        elif time.monotonic() > late_s:
            link.thread.abandon([task])  # it waits for others' that are late: all would be
            tracked.found = Match(0, len(tracked.tokens), "late")
        return tracked.found

    def _worth(self, tracked: Tracked, found: Match, have_tokens: int) -> int:
        """Return the tokens of a match, or 0 where computing them is faster."""
        link = self._link
        if found.tokens <= have_tokens:
            return 0
        if tracked.worth is not None and tracked.worth[0] == have_tokens:
            return tracked.worth[1]
        verdict = link.fetch.judge(
            prompt_tokens=len(tracked.tokens),
            have_tokens=have_tokens,
            found_tokens=found.tokens,
            expected=link.expected_sources(found, have_tokens),
        )
        link.count({f"fetch_{verdict.reason}_count": 1})
        tracked.worth = (have_tokens, found.tokens if verdict.fetch else 0)
        return tracked.worth[1]

    def _decide_verified(self, tracked: Tracked, match: Match, have_tokens: int) -> Decision | None:
        """Load into host memory first, and claim what came; collective."""
        link, namespace = self._link, tracked.namespace
        assert namespace is not None
        assert link.pool is not None
        if have_tokens < tracked.host_skip_tokens:
            self._drop_host(tracked)
        if tracked.host_task is None:
            busy = sum(other.host is not None for other in self._tracked.values())
            if busy < _MOST_HOST_LOADS:
                tracked.host_skip_tokens = have_tokens
                host = tracked.host = link.pool.host_buffers(match.tokens // link.block_tokens)
                tracked.host_task = link.thread.submit(
                    at_once(lambda: link.load_to_host(namespace, match, host, have_tokens)), LOAD
                )
        task = tracked.host_task
        if task is not None:
            link.thread.wait([task], min(link.settings.match_wait_s, _LATER_WAIT_S))
        result = None if task is None else _outcome(task, LoadResult(0, {}, {}, "error"))
        (agreed,) = link.group.smallest([-1 if result is None else result.tokens])
        if agreed < 0 or result is None:
            return None
        tracked.is_counted = task is not None and task.error is None
        tracked.facts |= facts_of(result.by_source, len(tracked.tokens))
        tracked.facts |= {"load_s": result.seconds, "load_reason": result.reason}
        tracked.facts |= {"match_s": match.seconds, "reason": result.reason}
        if agreed < match.tokens:
            tracked.short_tokens = agreed
            match = namespace.cut(match, tracked.tokens, agreed)
        if agreed <= have_tokens:
            tracked.refusal = "failed"
            self._drop_host(tracked)
        return Decision(have_tokens, max(agreed - have_tokens, 0), match, result.reason)

    def _plan_load(self, tracked: Tracked, decision: Decision, external_tokens: int) -> None:
        match, end = decision.match, decision.have_tokens + external_tokens
        assert tracked.namespace is not None
        assert tracked.host_task is None or tracked.host_task.is_done
        if end < match.tokens:
            match = tracked.namespace.cut(match, tracked.tokens, end)
        self._planned.append(
            LoadPlan(
                tracked.name,
                tracked.namespace,
                match,
                block_array(tracked.block_ids, end, self._link.block_tokens),
                decision.have_tokens,
                tracked.host,
            )
        )
        tracked.host, tracked.host_task = None, None

    def _plan_save(self, tracked: Tracked, computed_tokens: int, plan: StepPlan) -> None:
        link = self._link
        if not tracked.saves or tracked.is_prompt_planned or tracked.namespace is None:
            return
        whole = whole_blocks(len(tracked.request.prompt_token_ids), link.block_tokens)
        if not whole or computed_tokens < whole:
            return
        tracked.is_prompt_planned = True
        failed = link.failed.get(tracked.name, tracked.short_tokens)
        decision = tracked.decision
        if failed is None and decision is not None and decision.match.tokens >= whole:
            return  # all of it came from the store
        if link.plan_save(tracked.name, whole):
            ids = block_array(tracked.block_ids, whole, link.block_tokens)
            plan.saves.append(
                SavePlan(tracked.name, tracked.namespace, tracked.tokens[:whole], ids, failed)
            )

    def _save_decoded(self, tracked: Tracked, block_ids: list[int]) -> None:
        """Store what was computed of prompt and answer; the last token's KV was not."""
        link, request = self._link, tracked.request
        if not tracked.saves or tracked.namespace is None:
            return
        tokens = np.array(list(request.all_token_ids), dtype=np.uint32)
        computed = min(int(request.num_computed_tokens), len(tokens) - 1)
        whole = min(whole_blocks(computed, link.block_tokens), len(block_ids) * link.block_tokens)
        if whole <= whole_blocks(len(request.prompt_token_ids), link.block_tokens):
            return
        if link.plan_save(tracked.name, whole):
            ids = block_array(list(block_ids), whole, link.block_tokens)
            failed = link.failed.get(tracked.name, tracked.short_tokens)
            plan = SavePlan(tracked.name, tracked.namespace, tokens[:whole], ids, failed)
            link.submit_save(plan, fence=link.fence())

    def _take_result(self, tracked: Tracked) -> None:
        result = self._link.results.pop(tracked.name, None)
        if result is not None:
            tracked.facts |= facts_of(result.by_source, len(tracked.tokens))
            tracked.facts |= {"load_s": result.seconds, "load_reason": result.reason}

    def _drop_host(self, tracked: Tracked) -> None:
        """Give the host memory of a request back; a load into it that runs goes on by itself."""
        if tracked.host_task is not None:
            self._link.thread.abandon([tracked.host_task])
        tracked.host, tracked.host_task = None, None


def _outcome(task: Task[T], instead: T) -> T | None:
    """Return what a task returned; ``instead`` where it raised, None while it goes on."""
    if not task.is_done:
        return None
    if task.error is not None:
        _log.error("an operation of the store failed; tokens are computed", exc_info=task.error)
        return instead
    return task.result
