"""The clients of a simulation: scripts that go effect by effect, stall, break off and vanish."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ptstore_mpi.errors import PTStoreError
from ptstore_mpi.protocol import effects

if TYPE_CHECKING:
    from ptstore_mpi.sim.simulation import Simulation

__all__ = ["AbortedError", "Process", "Processes", "Sleep"]

_STEP_S = 20e-6


class AbortedError(PTStoreError):
    """Thrown into an operation between two of its steps."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """What a process yields to let time pass without the store."""

    seconds: float


class Process:
    """A client's script: a generator of effects and `Sleep`, resumed by the schedule.

    Attributes
    ----------
    stalled_s
        Time it stood still by faults, s.
    in_operation
        Whether an operation of the store is under way: only these are aborted.
    state
        ``running``, ``ended`` or ``vanished``.
    """

    def __init__(self, client: int, script: Generator[Any, Any, None]) -> None:
        self.client = client
        self.script = script
        self.stalled_s = 0.0
        self.in_operation = False
        self.state = "running"
        self.turn = 0  # what was scheduled for an earlier turn is void
        self.parked: type[effects.Effect] | None = None
        self.pending: deque[effects.Effect] = deque()
        self.answers: list[Any] = []  # of the parts of one copy


def _whole(answers: list[Any]) -> Any:
    """Return the answer to an effect, put together from the checksums of its blocks."""
    if len(answers) == 1 or answers[0] is None:
        return answers[0]
    return np.concatenate(answers)


class Processes:
    """Moves the scripts of all clients on the schedule of a simulation.

    Attributes
    ----------
    by_client
        The newest process of each client.
    running_count
        Processes that have neither ended nor vanished.
    splits_copies
        Whether copies are carried out block by block, half of them.
    """

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self._dice = sim.dice
        self.by_client: dict[int, Process] = {}
        self.running_count = 0
        self.splits_copies = True

    def spawn(self, client: int, script: Generator[Any, Any, None]) -> Process:
        """Let a client carry out a script, from now on."""
        process = Process(client, script)
        self.by_client[client] = process
        self.running_count += 1
        self._resume(process, None)
        return process

    def _resume(self, process: Process, answer: Any) -> None:
        """Give the script an answer and schedule its next effect."""
        try:
            effect = process.script.send(answer)
            while isinstance(effect, effects.Now):  # takes no time; what follows may be held up
                effect = process.script.send(self._sim.transports[process.client].now())
        except StopIteration:
            self._end(process, "ended")
        else:
            self._schedule(process, effect)

    def _end(self, process: Process, state: str) -> None:
        self._sim.note(f"client {process.client}", state)
        process.state = state
        self.running_count -= 1

    def _schedule(self, process: Process, effect: Any) -> None:
        if isinstance(effect, Sleep):
            self._next_turn(process, effect.seconds)
        else:
            if isinstance(effect, effects.Pack | effects.Unpack):
                process.pending.extend(self._parts(effect))
            else:
                process.pending.append(effect)
            self._next_turn(process, self._stall_s(process))

    def _next_turn(self, process: Process, after_s: float) -> None:
        process.turn += 1
        turn = process.turn
        when = self._sim.now + after_s + self._dice.rng.random() * _STEP_S
        self._sim.at(when, lambda: self._act(process, turn))

    def _stall_s(self, process: Process) -> float:
        if not self._dice.strikes("stall", self._dice.plan.stall):
            return 0.0
        seconds = self._dice.plan.stall_s * self._dice.rng.random() ** 2
        process.stalled_s += seconds
        self._sim.note(f"client {process.client}", "stalls", seconds)
        return seconds

    def _parts(self, copy: effects.Pack | effects.Unpack) -> Iterable[effects.Effect]:
        """Return a copy as its single blocks: it can be interrupted between any two."""
        image = copy.image
        if not self.splits_copies or image.block_count == 1 or self._dice.rng.random() < 0.5:
            return [copy]
        return [
            replace(
                copy,
                view_block=copy.view_block + i,
                image=replace(image, first_block=image.first_block + i, block_count=1),
            )
            for i in range(image.block_count)
        ]

    def _act(self, process: Process, turn: int) -> None:
        """Carry out the effect whose turn it is, unless the client is gone or was interrupted."""
        if process.turn != turn or process.state != "running":
            return
        if process.in_operation and self._dice.strikes("vanish", self._dice.plan.vanish):
            self._vanish(process)
            return
        if process.in_operation and self._dice.strikes("abort", self._dice.plan.abort):
            self._abort(process)
            return
        if not process.pending:
            self._resume(process, None)  # after a Sleep
            return
        effect = process.pending[0]
        transport = self._sim.transports[process.client]
        if isinstance(effect, effects.Receive | effects.AwaitTokens):
            waits_for_reply = isinstance(effect, effects.Receive)
            ready = transport.replies if waits_for_reply else transport.done
            until = transport.cluster_time(effect.until)
            if not ready and until > self._sim.now:
                process.parked = type(effect)
                self._sim.at(until, lambda: self._wake(process, turn))
                return
            process.pending.popleft()
            if not waits_for_reply:
                self._resume(process, transport.take_done())
            else:
                reply = transport.replies.popleft() if ready else None
                for hear in self._sim.hearers["took"]:
                    hear(process.client, reply)
                self._resume(process, reply)
            return
        process.pending.popleft()
        for hear in self._sim.hearers["effect"]:
            hear(process.client, effect)
        self._sim.note(f"client {process.client}", "", effect)
        process.answers.append(transport.execute(effect))
        if process.pending:
            self._next_turn(process, self._stall_s(process))
        else:
            answers, process.answers = process.answers, []
            self._resume(process, _whole(answers))

    def _wake(self, process: Process, turn: int) -> None:
        if process.parked is not None and process.turn == turn:
            process.parked = None
            self._act(process, turn)

    def arrived(self, client: int, kind: type[effects.Effect]) -> None:
        """Something came that the client may be waiting for."""
        process = self.by_client.get(client)
        if process is not None and process.parked is kind:
            process.parked = None
            self._next_turn(process, self._stall_s(process))

    def _abort(self, process: Process) -> None:
        self._sim.note(f"client {process.client}", "its operation is aborted")
        process.pending.clear()
        process.answers.clear()
        try:
            effect = process.script.throw(AbortedError("aborted"))
        except StopIteration:
            self._end(process, "ended")
        else:
            self._schedule(process, effect)

    def _vanish(self, process: Process) -> None:
        self._end(process, "vanished")
        torn = any(isinstance(effect, effects.Pack) for effect in process.pending)
        torn |= self._sim.tear_transfers(process.client)
        self._dice.fired["torn_write"] += torn
