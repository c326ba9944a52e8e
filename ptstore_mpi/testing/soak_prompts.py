"""Prompts of the soak: conversations of skewed popularity that grow, and sometimes diverge.

A function of numbers alone: every client makes the same tokens for the same conversation, turn and
branch, whenever it likes. Never keeps a prompt.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ptstore_mpi.testing.bench import Tokens

__all__ = ["MOST_TOKENS", "TEXT_TOKENS", "Conversations"]

SYSTEM_TOKENS = 96
TEXT_TOKENS = 768
MOST_TOKENS = SYSTEM_TOKENS + TEXT_TOKENS

_SYSTEM_COUNT = 8
_TURN_COUNT = 12
_BRANCH_COUNT = 4
_BRANCH_SHARE = 0.15
_STAYS_SHARE = 0.3
_VOCABULARY = 50_000
_SYSTEM, _TEXT, _BRANCH, _LENGTH = range(4)  # streams of the seed
_EXPONENT = 0.9


class Conversations:
    """What one client says in its conversations.

    Parameters
    ----------
    count
        Conversations of the job; each has `TEXT_TOKENS` tokens of its own in the end.
    seed
        Of all clients alike.
    rng
        Random numbers of this client.
    """

    def __init__(self, count: int, *, seed: int, rng: np.random.Generator) -> None:
        self.count = count
        self._seed = seed
        self._rng = rng
        weights = 1 / np.arange(1, count + 1, dtype=np.float64) ** _EXPONENT
        self._popularity: npt.NDArray[np.float64] = np.cumsum(weights) / weights.sum()
        self._turns = np.zeros(count, dtype=np.uint8)

    def next_prompt(self) -> Tokens:
        """Draw a conversation and return its prompt; most often one turn longer than before."""
        drawn = int(np.searchsorted(self._popularity, self._rng.random()))
        conversation = min(drawn, self.count - 1)
        turn = int(self._turns[conversation])
        if self._rng.random() >= _STAYS_SHARE:
            self._turns[conversation] = (turn + 1) % _TURN_COUNT
        diverges = self._rng.random() < _BRANCH_SHARE
        branch = 1 + int(self._rng.integers(_BRANCH_COUNT)) if diverges else 0
        return self.prompt(conversation, turn, branch)

    def prompt(self, conversation: int, turn: int, branch: int) -> Tokens:
        """Return the tokens up to a turn, int64; of a branch above 0 the last turn is another."""
        system = self._draw(_SYSTEM, conversation % _SYSTEM_COUNT, SYSTEM_TOKENS)
        text = self._draw(_TEXT, conversation, TEXT_TOKENS)
        ends = self._stream(_LENGTH, conversation).choice(
            np.arange(1, TEXT_TOKENS), _TURN_COUNT - 1, replace=False
        )
        borders = [0, *np.sort(ends).tolist(), TEXT_TOKENS]
        end = borders[turn + 1]
        if branch:
            before = borders[turn]
            other = self._draw(_BRANCH, conversation * 100 + branch, end - before)
            text = np.concatenate([text[:before], other])
        return np.concatenate([system, text[:end]])

    def _draw(self, stream: int, number: int, count: int) -> Tokens:
        return self._stream(stream, number).integers(0, _VOCABULARY, count)

    def _stream(self, stream: int, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, stream, number])
