"""Jobs that come to a bad end: they end soon, and nothing of them is left on the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

from ptstore_mpi.testing.launching import find_mpiexec, is_openmpi, job_environment, run_ranks

PROGRAM = Path(__file__).parent / "programs" / "ends.py"
MARK = "JOB_OF_TEST_MPI_ENDS"
RANKS = 4
END_S = 15.0

pytestmark = [
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec"),
    pytest.mark.skipif(is_openmpi(), reason="MPICH's launcher and its files are meant"),
]


class RunningJob:
    """A job on 2 virtual nodes, known by a variable that all its processes inherit."""

    def __init__(self, folder: Path, mode: str, netmod: str, ranks: int) -> None:
        self.folder = folder
        self.ranks = ranks
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        name, _, value = self.mark.partition("=")
        environment = {**job_environment(2, netmod), name: value, "TMPDIR": str(self.temporary)}
        launched = [find_mpiexec(), "-n", str(ranks)] if ranks > 1 else []
        with (folder / "stderr").open("w") as words:
            self.launcher = subprocess.Popen(
                [*launched, sys.executable, "-m", "mpi4py", PROGRAM, folder, mode],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=words,
            )

    def notes(self, what: str, count: int) -> dict[int, str]:
        """Wait for the notes of that many ranks."""
        deadline = time.monotonic() + 60
        while len(found := list(self.folder.glob(f"{what}.*"))) < count:
            assert time.monotonic() < deadline, self.words()
            time.sleep(0.01)
        return {int(path.suffix[1:]): path.read_text() for path in found}

    def words(self) -> str:
        return (self.folder / "stderr").read_text()

    def processes(self) -> list[int]:
        """Return the processes of the job that live, the launcher's own included."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:  # it has just ended
                continue
        return found

    def await_end(self) -> float:
        """Return the seconds until every process of the job had gone."""
        started = time.monotonic()
        while self.launcher.poll() is None or self.processes():
            assert time.monotonic() - started < END_S, (self.processes(), self.words())
            time.sleep(0.02)
        return time.monotonic() - started


@pytest.fixture
def start():
    """Start a job in a new folder of shared memory; look for what is left once it has ended."""
    jobs = []
    with tempfile.TemporaryDirectory(prefix="ptstore-test-", dir="/dev/shm") as name:
        folder = Path(name)
        (folder / "shared").mkdir()

        def start_job(mode: str, netmod: str = "ucx", ranks: int = RANKS) -> RunningJob:
            jobs.append(RunningJob(folder, mode, netmod, ranks))
            return jobs[0]

        yield start_job
        for pid in jobs[0].processes():
            os.kill(pid, signal.SIGKILL)
        jobs[0].launcher.wait()
        notes = jobs[0].notes("names", jobs[0].ranks).values()
        names = {name for text in notes for name in text.split()}
        assert names, "MPICH is expected to share memory through files"
        assert not [name for name in names if Path(name).exists()]
        assert not list((folder / "shared").iterdir())
        assert not list(jobs[0].temporary.iterdir())


@pytest.mark.parametrize("phase", ["main", "open", "close"])
def test_an_exception_ends_the_job(start, phase):
    job = start(phase)
    job.notes("names", RANKS)
    job.await_end()
    assert job.launcher.returncode != 0
    assert f"rank 3: failed in phase '{phase}'" in job.words()
    assert "RuntimeError: the engine fell over" in job.words()


def test_an_exit_code_is_that_of_the_job(start):
    job = start("exit")
    job.notes("names", RANKS)
    job.await_end()
    assert job.launcher.returncode == 7
    assert "rank 3: sys.exit in phase 'main'" in job.words()
    assert "Traceback" not in job.words()


@pytest.mark.parametrize("mode", ["settings", "doctor"])
def test_a_wrong_setting_ends_the_job_before_it_is_one(start, mode):
    job = start(mode)
    job.await_end()
    assert job.launcher.returncode == 1


@pytest.mark.parametrize("netmod", ["ucx", "ofi"])
def test_a_server_that_stands_still_does_not_hold_up_the_close(start, netmod):
    job = start("stopped", netmod)
    (left,) = job.notes("left", 1).values()
    job.await_end()
    assert time.time() - float(left) > 3
    assert job.launcher.returncode != 0
    assert "phase 'close' did not end within 3 s" in job.words()


def test_clients_wait_in_close_for_one_that_computes(start):
    job = start("late")
    job.notes("left", 1)
    job.await_end()
    assert job.launcher.returncode == 0, job.words()


@pytest.mark.parametrize(("netmod", "victim"), [("ucx", 0), ("ofi", 2), ("ucx", 3)])
def test_a_killed_rank_ends_the_job(start, netmod, victim):
    job = start("wait", netmod)
    job.notes("ready", 2)
    os.kill(int(job.notes("pid", RANKS)[victim]), signal.SIGKILL)
    job.await_end()
    assert job.launcher.returncode != 0


@pytest.mark.parametrize(
    ("netmod", "number"),
    [
        ("ucx", signal.SIGINT),
        ("ofi", signal.SIGTERM),
        ("ucx", signal.SIGKILL),
        ("ofi", signal.SIGKILL),
    ],
)
def test_a_killed_launcher_ends_the_job(start, netmod, number):
    job = start("wait", netmod)
    job.notes("ready", 2)
    job.launcher.send_signal(number)
    job.await_end()


def test_ranks_leave_when_nobody_is_left_who_started_them(start):
    """Launcher and its helper killed at once: the ranks themselves have to notice."""
    job = start("wait")
    job.notes("ready", 2)
    ranks = {int(pid) for pid in job.notes("pid", RANKS).values()}
    for pid in set(job.processes()) - ranks:
        os.kill(pid, signal.SIGKILL)
    job.launcher.wait()
    until = time.monotonic() + 10  # who was killed takes a moment to be gone
    while not set(job.processes()) <= ranks:
        assert time.monotonic() < until, set(job.processes()) - ranks
        time.sleep(0.02)
    job.await_end()


def test_a_single_process_leaves_nothing_either(start):
    job = start("wait", ranks=1)
    job.notes("ready", 1)
    job.launcher.kill()
    job.await_end()


@pytest.mark.parametrize("who", ["server", "client"])
def test_a_rank_that_does_not_get_on_leaves_evidence(who, tmp_path):
    done = run_ranks([PROGRAM.with_name("stall.py"), who, tmp_path], ranks=4, nodes=2)
    assert done.returncode != 0
    assert "stall_timeout_s = 2" in done.stderr, done.stderr
    (evidence,) = tmp_path.iterdir()
    text = evidence.read_text()
    assert text.count("== rank ") == 4, text
    assert "has not got on with" in text, text
    assert "in stand_still" in text
    assert str(evidence) in done.stderr
