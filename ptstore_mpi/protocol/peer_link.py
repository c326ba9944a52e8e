"""FIFO and exactly once between two servers, over a carrier that may do anything (P7).

Every message gets the next number of its direction. The receiver takes them in that order, keeps
what came early and drops what came twice; every frame tells how far it has got. What is not known
to have arrived is sent again, ever more seldom. Over MPI, which loses nothing, this costs one
number per message and a bare acknowledgement where nothing else goes back.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptstore_mpi.protocol.peer_messages import PeerFrame, PeerMessage

__all__ = ["PeerLink"]

_BACKOFF_COUNT = 6  # sent again at most 64 times more seldom than at first


@dataclass(slots=True)
class _Unconfirmed:
    message: PeerMessage
    due_s: float
    resend_count: int = 0


class PeerLink:
    """One server's end of its channel to one other server.

    Parameters
    ----------
    resend_s
        Time after which a message that was not confirmed is sent again; doubles every time.
    """

    def __init__(self, resend_s: float) -> None:
        self._resend_s = resend_s
        self._sent_count = 0
        self._received_count = 0
        self._unconfirmed: dict[int, _Unconfirmed] = {}  # by number, rising
        self._early: dict[int, PeerMessage] = {}
        self._owes_word = False
        self.resend_count = 0
        self.duplicate_count = 0

    @property
    def unconfirmed_count(self) -> int:
        """Messages that are not known to have arrived."""
        return len(self._unconfirmed)

    @property
    def is_quiet(self) -> bool:
        """Whether everything sent was confirmed and everything received was confirmed back."""
        return not self._unconfirmed and not self._owes_word

    def send(self, message: PeerMessage, now: float) -> PeerFrame:
        """Return the frame that carries the next message."""
        self._sent_count += 1
        self._unconfirmed[self._sent_count] = _Unconfirmed(message, now + self._resend_s)
        return self._frame(self._sent_count, message)

    def receive(self, frame: PeerFrame) -> list[PeerMessage]:
        """Take a frame; return the messages that are due now, in the order they were sent."""
        while self._unconfirmed and next(iter(self._unconfirmed)) <= frame.received:
            del self._unconfirmed[next(iter(self._unconfirmed))]
        if frame.message is None:
            return []
        self._owes_word = True
        if frame.number <= self._received_count or frame.number in self._early:
            self.duplicate_count += 1
            return []
        self._early[frame.number] = frame.message
        due: list[PeerMessage] = []
        while (message := self._early.pop(self._received_count + 1, None)) is not None:
            self._received_count += 1
            due.append(message)
        return due

    def tick(self, now: float) -> list[PeerFrame]:
        """Let time pass: return what is to be sent again, or a word on what was received."""
        frames: list[PeerFrame] = []
        for number, waiting in self._unconfirmed.items():
            if waiting.due_s <= now:
                waiting.resend_count += 1
                waiting.due_s = now + self._resend_s * 2 ** min(
                    waiting.resend_count, _BACKOFF_COUNT
                )
                self.resend_count += 1
                frames.append(self._frame(number, waiting.message))
        if self._owes_word:
            frames.append(self._frame(0, None))
        return frames

    def _frame(self, number: int, message: PeerMessage | None) -> PeerFrame:
        self._owes_word = False
        return PeerFrame(number, self._received_count, message)
