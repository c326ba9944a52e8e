"""Starting and ending an engine, over stand-ins; events of a device, over stand-ins too."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from vllm_stand_ins import LIMIT_S, VERSION, busy, engines, install_vllm, request_of

from ptstore_mpi import ConfigError
from ptstore_mpi.integrations.vllm import (
    VllmVersionError,
    build_llm,
    join_ranks,
    kv_transfer_config,
    release,
    settle,
)
from ptstore_mpi.integrations.vllm.api import Api011, Api032
from ptstore_mpi.integrations.vllm.fences import Fence, StepClock
from ptstore_mpi.integrations.vllm.plans import StepPlan


def add_modules(monkeypatch, **contents):
    """Let modules of vLLM be found; dots in their names are written as two underscores."""
    for name, values in contents.items():
        module = ModuleType(name.replace("__", "."))
        module.__path__ = []
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)


class StandInLLM(SimpleNamespace):
    """What ``vllm.LLM`` is given; unlike its base it can be referred to weakly."""


@dataclass
class NewTransferConfig:
    """vLLM's ``KVTransferConfig`` of today."""

    kv_connector: str
    kv_connector_module_path: str
    kv_role: str
    kv_connector_extra_config: dict = field(default_factory=dict)
    kv_load_failure_policy: str = "fail"


@dataclass
class OldTransferConfig:
    """That of 0.11."""

    kv_connector: str
    kv_connector_module_path: str
    kv_role: str
    kv_connector_extra_config: dict = field(default_factory=dict)


@pytest.fixture
def vllm(monkeypatch):
    """Return what ``vllm.LLM`` is given."""
    install_vllm(monkeypatch)
    platform = SimpleNamespace(is_cpu=lambda: True)
    add_modules(
        monkeypatch,
        vllm__config={"KVTransferConfig": NewTransferConfig},
        vllm__platforms={"current_platform": platform},
    )
    monkeypatch.setattr("ptstore_mpi.integrations.vllm.engine_setup._alive", [])
    monkeypatch.setattr(sys.modules["vllm"], "LLM", StandInLLM, raising=False)
    return platform


def test_an_engine_has_what_all_have_in_common(vllm, tmp_path):
    llm = build_llm(tmp_path)
    assert vars(llm) == {
        "model": str(tmp_path),
        "dtype": "auto",
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 1 << 30,  # vLLM would take nearly all that there is
    }
    vllm.is_cpu = lambda: False
    with pytest.raises(ConfigError, match="release the first one"):
        build_llm("m")
    del llm
    on_a_device = build_llm("m")
    assert on_a_device.enforce_eager is False
    assert not hasattr(on_a_device, "kv_cache_memory_bytes")


@pytest.mark.usefixtures("vllm")
def test_an_engine_takes_what_vllm_takes():
    llm = build_llm(
        "m",
        dtype="bfloat16",
        max_model_len=512,
        kv_cache_bytes=1 << 20,
        prefix_caching=False,
        connector={"save": "all"},
        enforce_eager=False,
        block_size=32,
    )
    assert (llm.dtype, llm.max_model_len, llm.kv_cache_memory_bytes) == ("bfloat16", 512, 1 << 20)
    assert (llm.enable_prefix_caching, llm.enforce_eager, llm.block_size) == (False, False, 32)
    transfer = llm.kv_transfer_config
    assert transfer.kv_connector_extra_config == {"save": "all"}


@pytest.mark.usefixtures("vllm")
def test_lost_loads_are_computed_where_vllm_can_be_told(monkeypatch):
    transfer = kv_transfer_config()
    assert (transfer.kv_connector, transfer.kv_role) == ("PTStoreConnector", "kv_both")
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config == {}
    add_modules(monkeypatch, vllm__config={"KVTransferConfig": OldTransferConfig})
    assert kv_transfer_config({"salt": "s"}) == OldTransferConfig(
        "PTStoreConnector", transfer.kv_connector_module_path, "kv_both", {"salt": "s"}
    )


class Scheduler:
    """vLLM's scheduler when all requests are answered: some have blocks that we keep."""

    def __init__(self, connector, steps):
        self.connector = connector
        self.requests = dict.fromkeys(range(steps))

    def has_unfinished_requests(self):
        """Whether one has no answer yet."""
        return False

    def has_finished_requests(self):
        """Whether a step has to announce some."""
        return len(self.requests) > 1

    def step(self):
        """Give one request its blocks back."""
        self.requests.popitem()


def engine_of(connector, steps=0):
    """Return an ``LLM`` with that scheduler."""
    scheduler = Scheduler(connector, steps)
    core = SimpleNamespace(scheduler=scheduler, is_shut=False)
    core.shutdown = lambda: setattr(core, "is_shut", True)
    client = SimpleNamespace(engine_core=core)
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client, step=scheduler.step))


def test_an_engine_settles_when_vllm_has_its_blocks_back():
    llm = engine_of(SimpleNamespace(), steps=3)
    assert settle(llm) is True
    assert not llm.llm_engine.engine_core.engine_core.scheduler.requests


def test_an_engine_without_a_connector_settles_too():
    assert settle(engine_of(None, steps=1)) is True


def test_an_engine_that_does_not_settle_is_told():
    llm = engine_of(SimpleNamespace(), steps=2)
    llm.llm_engine.step = lambda: None
    assert settle(llm, 0.01) is False


def test_settling_waits_for_saves(monkeypatch):
    with engines(monkeypatch) as make:
        engine = make()
        llm = engine_of(SimpleNamespace(_link=engine.link))
        with busy(engine.link.thread):
            thread = engine.link.thread
            request = request_of(65, sampling_params=None)
            engine.serve(request)
            assert settle(llm, 0.01) is False
        assert settle(llm, LIMIT_S) is True
        assert thread.wait(engine.link.saves["r"].tasks, 0.0)


def test_an_engine_is_released():
    llm = engine_of(SimpleNamespace(), steps=1)
    core = llm.llm_engine.engine_core.engine_core
    release(llm)
    assert core.is_shut
    assert llm.llm_engine is None


class Comm:
    """A communicator as one of its ranks has it: `hosts` by rank."""

    def __init__(self, rank, hosts):
        self.rank, self.hosts = rank, hosts

    def Get_rank(self):  # noqa: N802
        return self.rank

    def Get_size(self):  # noqa: N802
        return len(self.hosts)

    def allgather(self, host):
        assert host == socket.gethostname()
        return self.hosts

    def bcast(self, value, root):
        assert root == 0
        return value


@pytest.mark.parametrize(
    ("rank", "hosts", "local", "expected"),
    [
        (0, "a", None, ("0", "0", "1", "1")),
        (1, "aa", None, ("1", "1", "2", "2")),
        (2, "aab", None, ("2", "0", "3", "1")),
        (3, "abab", None, ("3", "1", "4", "2")),
        (3, "abab", 0, ("3", "0", "4", "2")),
    ],
)
def test_ranks_that_join_know_their_places(monkeypatch, rank, hosts, local, expected):
    monkeypatch.setattr(os, "environ", {})
    join_ranks(Comm(rank, list(hosts)), local_rank=local)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    assert tuple(os.environ[name] for name in names) == expected
    assert os.environ["MASTER_ADDR"] == ("127.0.0.1" if len(set(hosts)) == 1 else "a")
    assert 0 < int(os.environ["MASTER_PORT"]) < 65536


# -- the class that vLLM builds ----------------------------------------------------------------

MODULE = "ptstore_mpi.integrations.vllm.connector"


class Metadata:
    """vLLM's ``KVConnectorMetadata``: classes may be registered as one."""

    registered: list[type] = []  # noqa: RUF012

    @classmethod
    def register(cls, kind):
        """Register."""
        cls.registered.append(kind)


@pytest.fixture
def import_connector(monkeypatch):
    """Return a function that imports the connector beside a version of vLLM."""

    def load(version, **bases):
        install_vllm(monkeypatch, version)
        v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
        names = [v1.rsplit(".", cut)[0] for cut in (2, 1)]
        for name in (*names, v1):
            add_modules(monkeypatch, **{name.replace(".", "__"): {}})
        base = ModuleType(f"{v1}.base")
        vars(base).update({"KVConnectorMetadata": Metadata, **bases})
        monkeypatch.setitem(sys.modules, base.__name__, base)
        monkeypatch.setattr(sys.modules[v1], "base", base, raising=False)
        monkeypatch.delitem(sys.modules, MODULE, raising=False)
        return importlib.import_module(MODULE).PTStoreConnector

    monkeypatch.delenv("PTSTORE_VLLM_API", raising=False)
    yield load
    sys.modules.pop(MODULE, None)


def test_the_connector_is_the_api_of_its_version_over_the_classes_there_are(import_connector):
    base, hybrid = type("Base", (), {}), type("Hybrid", (), {})
    old = import_connector("0.11.0", KVConnectorBase_V1=base)
    assert old.__mro__[1] is Api011
    assert issubclass(old, base)
    new = import_connector(VERSION, KVConnectorBase_V1=base, SupportsHMA=hybrid)
    assert new.__bases__ == (Api032, base, hybrid)
    assert (new.__name__, new.__module__) == ("PTStoreConnector", MODULE)
    assert new.__doc__
    assert StepPlan in Metadata.registered


def test_other_versions_are_refused_or_taken_for_one(import_connector, monkeypatch):
    base = type("Base", (), {})
    with pytest.raises(VllmVersionError, match=r"found 0\.99\.0"):
        import_connector("0.99.0", KVConnectorBase_V1=base)
    monkeypatch.setenv("PTSTORE_VLLM_API", "0.32")
    assert issubclass(import_connector("0.99.0", KVConnectorBase_V1=base), Api032)


# -- devices -----------------------------------------------------------------------------------


class Event:
    """An event of a device that reaches it when the test says so."""

    made: list[Event] = []  # noqa: RUF012

    def __init__(self, enable_timing=False):
        self.enable_timing, self.recorded, self.is_reached = enable_timing, [], False
        self.made.append(self)

    def record(self, stream=None):
        """Record."""
        self.recorded.append(stream)

    def query(self):
        """Whether it was reached."""
        return self.is_reached

    def elapsed_time(self, end):
        """Return milliseconds."""
        assert self.enable_timing
        assert end.enable_timing
        return 250.0


@pytest.fixture
def device(monkeypatch):
    """Return a device of stand-ins, and the events that its stream was told to wait for."""
    waited = []
    stream = SimpleNamespace(wait_event=waited.append)
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
    return SimpleNamespace(device=torch.device("cuda"), stream=stream, waited=waited)


def test_nothing_is_under_way_on_a_host():
    assert Fence.on(torch.device("cpu")) is None
    clock = StepClock(torch.device("cpu"))
    clock.stop()
    assert clock.seconds() >= 0


def test_a_fence_is_an_event_behind_what_is_under_way(device):
    fence = Fence.on(device.device)
    (event,) = Event.made
    assert event.recorded == [device.stream]
    fence.wait()
    assert device.waited == [event]


def test_a_clock_of_a_device_is_known_when_its_work_is_done(device):
    clock = StepClock(device.device)
    clock.stop()
    assert clock.seconds() is None
    Event.made[1].is_reached = True
    assert clock.seconds() == 0.25


def test_loads_and_saves_follow_the_work_of_the_device(monkeypatch, device):
    """And steps are measured once it is done, in their order."""
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    with engines(monkeypatch) as make:
        engine = make()
        engine.pool.device = device.device
        noted = []
        monkeypatch.setattr(
            engine.link.fetch, "note_prefill", lambda *args, **named: noted.append(args)
        )
        engine.serve(request_of(65))
        engine.finish_saves()
        fences = [event for event in Event.made if not event.enable_timing]
        assert device.waited == fences
        assert len(fences) == 1
        engine.serve(request_of([4] * 30, "other"))
        engine.finish_saves()
        assert noted == []
        for event in Event.made:
            event.is_reached = True
        engine.serve(request_of([5] * 20, "third"))
        assert noted[:2] == [(65, 0.25), (30, 0.25)]
        engine.serve(request_of(65, "again"))
        assert len(device.waited) >= 4
