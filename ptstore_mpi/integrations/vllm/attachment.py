"""The store that the connectors of this process use.

vLLM makes its connectors by itself, from a name; the store comes from `ptstore_mpi.run`. They meet
here: a process attaches its store, and whatever vLLM builds meanwhile finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ptstore_mpi import Store
from ptstore_mpi.errors import ConfigError
from ptstore_mpi.integrations.vllm.link import EngineLink
from ptstore_mpi.integrations.vllm.plans import SaveReport
from ptstore_mpi.integrations.vllm.settings import ConnectorSettings
from ptstore_mpi.integrations.vllm.store_thread import StoreThread

__all__ = ["Attachment", "attach", "current_attachment"]


class Attachment:
    """A store and the engines that use it in this process.

    Attributes
    ----------
    store
        The store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._thread = StoreThread()
        self._links: dict[str, EngineLink] = {}

    def link_of(self, vllm_config: Any, settings: ConnectorSettings) -> EngineLink:
        """Return what both sides of an engine's connector share; the first that asks makes it."""
        name = str(vllm_config.kv_transfer_config.engine_id)
        link = self._links.get(name)
        if link is None:
            link = EngineLink(self.store, self._thread, settings, vllm_config)
            self._links[name] = link
        return link

    def wait_for_saves(self, timeout_s: float = 60.0) -> bool:
        """Wait until everything is saved and counted; False: not within ``timeout_s``."""
        return self._thread.drain(timeout_s)

    def name_weights(self, name: str) -> None:
        """Say that this process's engines have other weights now, and which.

        Engines that say the same share KV again; call it after ``reset_prefix_cache`` with
        ``reset_connector=True``, or instead of it. Collective: no.
        """
        for link in self._links.values():
            link.name_weights(name)

    def take_saves(self) -> list[tuple[str, int, str, float]]:
        """Return request, bytes, reason and seconds of every save that ended since last time.

        Reasons are those of `StoreResult`, and ``queue_full``, ``preempted`` or ``too_large``.
        """
        taken: list[SaveReport] = []
        for link in self._links.values():
            while link.reports:
                taken.append(link.reports.popleft())
        return [(save.request_id, save.bytes, save.reason, save.seconds) for save in taken]

    def stats(self) -> dict[str, Any]:
        """Return the counters of all engines, and what was measured of loads and prefills.

        The tokens by source add up to ``asked_tokens``, as those of `Store.stats` do.
        """
        counters: dict[str, int] = {}
        for link in self._links.values():
            for name, value in dict(link.counters).items():
                counters[name] = counters.get(name, 0) + value
        costs = [link.fetch.as_dict() for link in self._links.values()]
        return {**dict(sorted(counters.items())), "costs": costs}

    def close(self) -> None:
        """Give what is to be saved its time, then end; engines must be gone, or idle."""
        self.wait_for_saves(self.store.config.store_timeout_s)
        self._thread.close()


_current: list[Attachment] = []


@contextmanager
def attach(store: Store) -> Iterator[Attachment]:
    """Attach a store to this process: engines built meanwhile use it.

    Collective: no. One store at a time; what is to be saved is, before the block is left.

    Raises
    ------
    ConfigError, TypeError
        Another store is attached, or it is none.
    """
    if not isinstance(store, Store):
        raise TypeError(f"attach: expected a Store, got {store!r:.80}")
    if _current:
        raise ConfigError("attach: expected no store to be attached, there is one already")
    attachment = Attachment(store)
    _current.append(attachment)
    try:
        yield attachment
    finally:
        _current.remove(attachment)
        attachment.close()


def current_attachment() -> Attachment:
    """Return the store that is attached.

    Raises
    ------
    ConfigError
        None is.
    """
    if not _current:
        raise ConfigError(
            "PTStoreConnector: expected a store in this process, found none; build the engine "
            "within `with ptstore_mpi.integrations.vllm.attach(store):`, in a client of "
            "ptstore_mpi.run, with VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    return _current[-1]
