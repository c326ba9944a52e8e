"""Whose folder it is: locked for life, reclaimed when it is provably nobody's, else left alone."""

from __future__ import annotations

import errno
import fcntl
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tier_hand import SLAB, content_of, tier_settings, write

from ptstore_mpi.errors import ConfigError, TransportError
from ptstore_mpi.tiers import directory as module
from ptstore_mpi.tiers.directory import Leftovers, TierDirectory, reclaim
from ptstore_mpi.tiers.slab_store import SlabStore

LIVE = """
import sys, time
sys.path.insert(0, {unit!r})
from tier_hand import tier_settings, content_of, write
from ptstore_mpi.tiers.slab_store import SlabStore
store = SlabStore.open(tier_settings({directory!r}), owner="victim")
assert write(store, content_of())[1].outcome == "done"
print("written", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path):
    """The folder of a process that is gone: unlocked, with a slab of 5000 bytes."""
    tier = TierDirectory.create(str(tmp_path), "gone")
    (tier.path / "slab-000000").write_bytes(bytes(5000))
    module.os.close(tier._lock)
    return tier.path


def test_a_killed_server_is_reclaimed_by_the_next_and_a_live_one_is_not(tmp_path):
    unit = str(Path(__file__).parent)
    script = LIVE.format(unit=unit, directory=str(tmp_path))
    victim = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert victim.stdout.readline() == "written\n"
        settings = tier_settings(tmp_path)
        store = SlabStore.open(settings, owner="neighbour")
        assert store.leftovers == Leftovers(live_count=1, live_bytes=SLAB)
        store.close()
        (left,) = tmp_path.iterdir()
        assert "-victim-" in left.name
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.communicate()
    store = SlabStore.open(settings, owner="next")
    assert store.leftovers == Leftovers(reclaimed_count=1, reclaimed_bytes=SLAB)
    assert store.counters()["reclaimed_bytes"] == SLAB
    assert not left.exists()
    assert write(store, content_of())[1].outcome == "done"
    store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file_system", "same_kernel", "is_reclaimed"),
    [("xfs", True, True), ("xfs", False, True), ("lustre", True, True), ("lustre", False, False)],
)
def test_only_locks_that_can_be_seen_here_prove_anything(
    tmp_path, folder, monkeypatch, file_system, same_kernel, is_reclaimed
):
    monkeypatch.setattr(module, "file_system_type", lambda directory: file_system)
    if not same_kernel:
        monkeypatch.setattr(module, "_boot_id", lambda: "f" * 32)
    found = reclaim(str(tmp_path))
    expected = Leftovers(1, 5000) if is_reclaimed else Leftovers(doubtful_count=1)
    assert (found, folder.exists()) == (expected, not is_reclaimed)


def test_without_the_name_of_its_kernel_a_machine_trusts_local_disks_alone(
    tmp_path, monkeypatch, folder
):
    folder.rename(tmp_path / f"ptstore-tier-{'0' * 32}-gone-x")
    monkeypatch.setattr(module, "_boot_id", lambda: "0" * 32)
    monkeypatch.setattr(module, "file_system_type", lambda directory: "nfs4")
    assert reclaim(str(tmp_path)).doubtful_count == 1


def test_what_is_not_a_tiers_is_left_alone(tmp_path, folder):
    (tmp_path / "ptstore-tier-notes").mkdir()
    (tmp_path / "data").write_text("mine")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"{folder.name}2").symlink_to(folder)
    assert reclaim(str(tmp_path)).reclaimed_count == 1
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ptstore-tier-notes", "data", "elsewhere", f"{folder.name}2"}


def test_a_folder_without_a_lock_goes_only_when_it_is_empty(tmp_path, folder):
    (folder / "lock").unlink()
    assert reclaim(str(tmp_path)) == Leftovers(doubtful_count=1)
    (folder / "slab-000000").unlink()
    assert reclaim(str(tmp_path)) == Leftovers()
    assert list(tmp_path.iterdir()) == []


def test_where_there_are_no_locks_nothing_is_reclaimed(tmp_path, monkeypatch):
    def flock(descriptor, operation):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    tier = TierDirectory.create(str(tmp_path), "server")
    assert [file.name for file in tier.path.iterdir()] == ["unlocked"]
    assert reclaim(str(tmp_path)) == Leftovers(doubtful_count=1)
    assert tier.path.exists()
    tier.close()
    assert list(tmp_path.iterdir()) == []


def test_makers_and_reclaimers_at_once(tmp_path):
    """Nobody loses a folder that it holds, and nothing is left."""
    stop, faults = threading.Event(), []

    def reclaim_on():
        while not stop.is_set():
            reclaim(str(tmp_path))

    def make():
        for _ in range(60):
            tier = TierDirectory.create(str(tmp_path), "race")
            if not (tier.path / "lock").exists() or tier.path.stat().st_mode & 0o777 != 0o700:
                faults.append(tier.path)
            tier.close()

    makers = [threading.Thread(target=make) for _ in range(2)]
    others = [threading.Thread(target=reclaim_on) for _ in range(2)]
    for thread in (*makers, *others):
        thread.start()
    for thread in makers:
        thread.join()
    stop.set()
    for thread in others:
        thread.join()
    reclaim(str(tmp_path))
    assert (faults, list(tmp_path.iterdir())) == ([], [])


def test_a_directory_that_is_none_is_an_error_with_its_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none'.*No such file"):
        SlabStore.open(tier_settings(tmp_path / "none"), owner="x")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file'.*Not a directory"):
        SlabStore.open(tier_settings(tmp_path / "file"), owner="x")
    with pytest.raises(TransportError, match="none"):
        TierDirectory.create(str(tmp_path / "none"), "x")
