"""What a driver knows of an engine: how it starts, its systems, and how these take turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.baselines.base import System
from experiments.common.workload import Workload

if TYPE_CHECKING:
    from experiments.common.options import Options


class Engine(ABC):
    """The engine of one client.

    Attributes
    ----------
    alternates
        Whether all its systems are open at once and answer in turn, batch by batch; else each
        answers everything before the next one is opened.
    compared
        What of the outputs is compared with vanilla's.
    model_id
        Names the model and its weights or configuration, for the record.
    block_tokens
        Tokens of a block, the unit of matching.
    bytes_per_token
        KV bytes of one token.
    """

    alternates: ClassVar[bool]
    compared: ClassVar[str]
    model_id: str
    block_tokens: int
    bytes_per_token: float

    @classmethod
    def require(cls) -> None:
        """See that the engine is installed, on any rank; load nothing.

        Raises
        ------
        UsageError
            It is not; the message says what to do.
        """
        return

    @classmethod
    def prepare_process(cls, threads: int) -> None:
        """Set this process up for the engine before anything of it is imported."""
        return

    @classmethod
    @abstractmethod
    def start(cls, folder: Path, options: Options, workload: Workload) -> Engine:
        """Get ready to build systems that compute with the model in `folder`.

        Raises
        ------
        UsageError
            The engine cannot do what was asked for; on every client alike.
        """

    @abstractmethod
    def build_system(self, name: str, *, stores: Mapping[str, Any], cache_bytes: int) -> System:
        """Build a system of `baselines.SYSTEMS`.

        Parameters
        ----------
        name
            Of the system.
        stores
            A `ptstore_mpi.Store` for each system that has servers, by its name.
        cache_bytes
            What a client may keep in a cache of its own; for ``prefix`` only.

        Raises
        ------
        UsageError
            As `start`.
        """

    def rounds(self, systems: Sequence[System]) -> list[Sequence[System]]:
        """Return the systems in groups that are open at the same time, one group after another."""
        return [systems] if self.alternates else [[system] for system in systems]


@contextmanager
def opened(systems: Sequence[System]) -> Iterator[None]:
    """Open systems, and close them in reverse, even one whose opening has failed."""
    with ExitStack() as stack:
        for system in systems:
            stack.callback(system.close)
            system.open()
        yield
