"""Prompts of a simulated job, the KV that follows from them, and what every block must contain.

Prompts are made of numbered blocks, so that few of them meet often; everything that follows from
one is computed once for all runs of a process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ptstore_mpi import _native
from ptstore_mpi.config import Config
from ptstore_mpi.layout import KVLayout, TensorSpec, namespace_digest
from ptstore_mpi.testing.actor import SMALL
from ptstore_mpi.testing.oracle import Oracle
from ptstore_mpi.types import HASH_BYTES, BlockHashes

__all__ = ["BLOCK_TOKENS", "LAYOUTS", "MODEL", "Book", "Prompt", "book_of"]

MODEL = "model"
PAGED = KVLayout((TensorSpec("key", 1024), TensorSpec("value", 1024)), SMALL.block_tokens)
LAYOUTS = (SMALL, PAGED)
"""A segment of two blocks is less than a page, or just one, so that neighbours touch."""

BLOCK_TOKENS = SMALL.block_tokens
"""Tokens of a block in every layout of `LAYOUTS`."""

_SEED = Config().seed


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt of whole blocks and at most one token more.

    Attributes
    ----------
    tokens
        Token ids, shape (n,).
    arrays
        KV of its whole blocks: uint8, shape (blocks, block_bytes), one per tensor.
    hashes
        Chained hashes of its whole blocks, 16 bytes each.
    """

    tokens: npt.NDArray[np.uint32]
    arrays: list[npt.NDArray[np.uint8]]
    hashes: list[bytes]

    def __repr__(self) -> str:
        return f"Prompt({self.tokens[::BLOCK_TOKENS].tolist()})"


class Book:
    """Every prompt of one namespace that was ever made, and the bytes of every block by its hash.

    Parameters
    ----------
    salt
        Tells namespaces apart.
    layout
        Its layout.
    """

    def __init__(self, salt: str, layout: KVLayout) -> None:
        self.salt = salt
        self.digest = namespace_digest(layout, {"model": MODEL, "salt": salt})
        self.oracle = Oracle(layout, salt=int.from_bytes(self.digest[:8], "little"))
        self._prompts: dict[tuple[int, ...], Prompt] = {}
        self._by_hash: dict[bytes, tuple[Prompt, int]] = {}
        self._images: dict[tuple[bytes, int], npt.NDArray[np.uint8]] = {}

    def prompt(self, blocks: tuple[int, ...], *, tail: bool = True) -> Prompt:
        """Return the prompt of these blocks; with a tail, one token more than they hold."""
        key = (*blocks, -1) if tail else blocks
        known = self._prompts.get(key)
        if known is not None:
            return known
        tokens = np.repeat(np.array(blocks, np.uint32), BLOCK_TOKENS)
        if tail:
            tokens = np.append(tokens, np.uint32(7))
        rows = _native.hash_blocks(tokens, block_tokens=BLOCK_TOKENS, root=self.digest, seed=_SEED)
        made = Prompt(tokens, self.oracle.arrays(tokens), [row.tobytes() for row in rows])
        self._prompts[key] = made
        for block, block_hash in enumerate(made.hashes):
            self._by_hash.setdefault(block_hash, (made, block))
        return made

    def chain_to(self, block_hash: bytes) -> list[bytes] | None:
        """Return the hashes of the prefix that ends with this block; None where nobody has it."""
        found = self._by_hash.get(block_hash)
        return None if found is None else found[0].hashes[: found[1] + 1]

    def image_of(self, hashes: BlockHashes) -> npt.NDArray[np.uint8]:
        """Return the bytes that a copy of these blocks must contain: uint8, shape (n,)."""
        key = (hashes[-1].tobytes(), len(hashes))
        image = self._images.get(key)
        if image is None:
            assert hashes.shape[1] == HASH_BYTES
            prompt, last = self._by_hash[key[0]]
            first = last + 1 - len(hashes)
            image = np.concatenate([array[first : last + 1].ravel() for array in prompt.arrays])
            self._images[key] = image
        return image


@cache
def book_of(salt: str, layout: KVLayout) -> Book:
    """Return the one book of a namespace."""
    return Book(salt, layout)
