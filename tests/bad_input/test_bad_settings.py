"""Wrong settings, from every source, and jobs that cannot be opened with them."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import REPOSITORY, refused

import ptstore_mpi as pt
from ptstore_mpi import Config, ConfigError, parse_bytes
from ptstore_mpi.free_memory import UNKNOWN_BYTES, free_memory_bytes, group_free_bytes

PAGE = 4096


def kind(name, *values):
    return pytest.param(*values, id=name)


SIZES = [
    kind("none", None, "None"),
    kind("list", [1], r"\[1\]"),
    kind("float", 1.5, r"1\.5"),
    kind("boolean", True, "True"),
    kind("bytes", b"1", "b'1'"),
    kind("empty", "", "''"),
    kind("unit_alone", "GiB", "'GiB'"),
    kind("unknown_unit", "12 parsecs", "'12 parsecs'"),
    kind("negative", "-5MiB", "'-5MiB'"),
    kind("exponent", "1e9", "'1e9'"),
    kind("other_digits", "\u0663MiB", "'\u0663MiB'"),
]


@pytest.mark.parametrize(("size", "given"), SIZES)
def test_sizes(size, given):
    refused(lambda: parse_bytes(size), ConfigError, "expected a size such as 512MiB", given)


@pytest.mark.parametrize("size", ["9" * 400 + "GB", "500TiB", "9" * 5000])
def test_sizes_without_end(size):
    refused(lambda: parse_bytes(size), ConfigError, "at most 281474976710655 bytes", size[:20])


ABOVE = "must be greater than 0"
VALUES = [
    kind("memory_none", "memory_bytes", None, "Expected `int`", "None"),
    kind("memory_zero", "memory_bytes", 0, ABOVE, "got 0"),
    kind("memory_below_a_page", "memory_bytes", 4095, r"less than a page \(4096", "4095"),
    kind("memory_below_a_page_each", "servers_per_node", 2**40, "less than a page", str(2**40)),
    kind("memory_beyond_addresses", "memory_bytes", 2**70, "at most", str(2**70)),
    kind("memory_boolean", "memory_bytes", True, "Expected `int`", "True"),
    kind("servers_zero", "servers_per_node", 0, ABOVE, "got 0"),
    kind("servers_text", "servers_per_node", "two", "Expected `int`", "'two'"),
    kind("virtual_nodes_negative", "virtual_node_count", -1, "must be 0", "-1"),
    kind("transport", "transport", "rma", "expected one of", "'rma'"),
    kind("probe_fault", "probe_fault", "crash", "expected one of", "'crash'"),
    kind("segment_fraction", "segment_tokens", 16.5, "Expected `int`", r"16\.5"),
    kind("segment_huge", "segment_tokens", 2**60, "at most", str(2**60)),
    kind("placement", "placement", "nearest", "expected one of", "'nearest'"),
    kind("verify_none", "verify", None, "expected one of", "None"),
    kind("verify_publish_number", "verify_publish", 3, "Expected `bool`", "3"),
    kind("timeout_zero", "match_timeout_s", 0, ABOVE, "got 0"),
    kind("timeout_nan", "load_timeout_s", float("nan"), ABOVE, "nan"),
    kind("timeout_infinite", "store_timeout_s", float("inf"), "at most", "inf"),
    kind("timeout_of_ages", "close_timeout_s", 1e12, "at most", "1000000000000"),
    kind("timeout_text", "retry_s", "soon", "Expected `float`", "'soon'"),
    kind("stall_negative", "stall_timeout_s", -1.0, r"must be 0 \(never\)", r"-1\.0"),
    kind("lease_zero", "lease_cap_s", 0.0, ABOVE, r"0\.0"),
    kind("gets_zero", "gets_in_flight_count", 0, ABOVE, "got 0"),
    kind("get_bytes_negative", "get_bytes", -1, ABOVE, "-1"),
    kind("threads_negative", "copy_threads", -1, r"must be 0 \(automatic\)", "-1"),
    kind("threads_100000", "copy_threads", 100_000, "at most 256", "100000"),
    kind("idle", "idle", "sleepy", "expected one of", "'sleepy'"),
    kind("nap_beyond_its_cap", "nap_first_s", 5.0, "must not exceed nap_cap_s", r"5\.0"),
    kind("folder_empty", "shared_memory_dir", "", "without NUL", "''"),
    kind("folder_nul", "shared_memory_dir", "a\0b", "without NUL", r"'a\\x00b'"),
    kind("folder_number", "stall_dir", 5, "Expected `str`", "5"),
    kind("seed_short", "hash_seed", "12", "32 hexadecimal digits", "'12'"),
    kind("seed_letters", "hash_seed", "z" * 32, "32 hexadecimal digits", "'zzz"),
]


@pytest.mark.parametrize(("name", "value", "expected", "given"), VALUES)
def test_values(name, value, expected, given):
    refused(lambda: Config(**{name: value}), ConfigError, f"{name}|memory_bytes", expected, given)


@pytest.mark.parametrize(("name", "value", "expected", "given"), VALUES)
def test_values_of_the_environment(name, value, expected, given):
    """The same as texts: refused too, whatever the words."""
    variables = {f"PTSTORE_{name.upper()}": str(value)}
    if value in ("", True, 3):  # an empty text or "True" or "3" mean something here
        variables[f"PTSTORE_{name.upper()}"] = "perhaps" if name != "shared_memory_dir" else ""
    elif name == "stall_dir":
        variables = {"PTSTORE_STALL_DIR": ""}
    refused(lambda: Config.load(environment=variables), ConfigError, f"{name}|memory_bytes")


FILES = [
    kind("no_value", "memory_bytes = \n", "is not TOML"),
    kind("binary", b"\xff\xfe\x00", "is not TOML"),
    kind("twice", "verify = 'off'\nverify = 'off'\n", "is not TOML"),
    kind("endless_number", f"segment_tokens = {'9' * 5000}\n", "is not TOML"),
    kind("endless_nesting", f"a = {'[' * 100_000}", "is not TOML"),
    kind("typo", "memory_bites = 1\n", "unknown setting 'memory_bites'"),
    kind("table", "[store]\nmemory_bytes = 1\n", "unknown setting 'store'"),
    kind("date", "verify = 2020-01-01\n", "verify .*2020"),
    kind("list", "segment_tokens = [16]\n", r"segment_tokens .*\[16\]"),
    kind("inline_table", "memory_bytes = {a = 1}\n", "memory_bytes .*'a': 1"),
    kind("nan", "retry_s = nan\n", "retry_s .*nan"),
]


@pytest.mark.parametrize(("text", "said"), FILES)
def test_files(tmp_path, text, said):
    path = tmp_path / "ptstore.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refused(lambda: Config.load(path, environment={}), ConfigError, said)
    assert str(path) in message or "retry_s" in message
    variables = {"PTSTORE_CONFIG": str(path)}
    assert refused(lambda: Config.load(environment=variables), ConfigError) == message


PATHS = [
    kind("missing", "/nowhere/ptstore.toml", "/nowhere/ptstore.toml: No such file"),
    kind("folder", "/", "configuration file /: Is a directory"),
    kind("number", 5, "expected the path of a configuration file, got 5"),
    kind("bytes", b"/x", "expected the path of a configuration file, got b'/x'"),
    kind("nul", "a\0b", "null byte"),
]


@pytest.mark.parametrize(("path", "said"), PATHS)
def test_paths(path, said):
    refused(lambda: Config.load(path, environment={}), ConfigError, said)


TYPOS = [
    kind("keyword", {"memory_bites": 1}, {}, "'memory_bites' .keyword"),
    kind("environment", {}, {"PTSTORE_MEMORY_BITES": "1"}, "'memory_bites' .environment"),
    kind("case", {"Memory_Bytes": 1}, {}, "'Memory_Bytes' .keyword"),
]


@pytest.mark.parametrize(("settings", "variables", "said"), TYPOS)
def test_typos(settings, variables, said):
    load = Config.load
    refused(
        lambda: load(environment=variables, **settings), ConfigError, said, "known .*memory_bytes"
    )


SMALLEST = {"memory_bytes": 1 << 20}
JOBS = [
    kind("folder_missing", {"shared_memory_dir": "/nowhere"}, ConfigError, "/nowhere.*No such"),
    kind("folder_is_a_file", {"shared_memory_dir": __file__}, pt.TransportError, "Not a directory"),
    kind("beyond_shared_memory", {"memory_bytes": 1 << 47}, ConfigError,
         f"want arenas of {1 << 47} bytes in /dev/shm.*lower memory_bytes"),
    kind("staging_beyond_memory", {"staging_bytes": 1 << 47}, ConfigError,
         f"no memory of {1 << 47} bytes .*staging_bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "error", "said"), JOBS)
def test_jobs_that_cannot_be_opened(settings, error, said):
    """Nothing of a job that was refused stays behind."""
    launch = pt.launch  # starts MPI, which opens files
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    refused(lambda: launch(Config(**{**SMALLEST, **settings})), error, said)
    gc.collect()  # a mapping ends with its last user
    assert len(list(Path("/proc/self/fd").iterdir())) <= before  # MPI closes some of its own


def communicators():
    from mpi4py import MPI

    return {
        "text": ("world", TypeError, "a communicator, got 'world'"),
        "null": (MPI.COMM_NULL, ValueError, "got COMM_NULL"),
    }


@pytest.mark.parametrize("name", ["text", "null"])
def test_communicators(name):
    comm, error, said = communicators()[name]
    refused(lambda: pt.launch(Config(**SMALLEST), comm=comm), error, said)
    refused(lambda: pt.run(print, Config(**SMALLEST), comm=comm), error, said)


@pytest.mark.parametrize("config", ["x", {"memory_bytes": 5}, Config])
def test_what_is_no_config(config):
    refused(lambda: pt.launch(config), TypeError, "expected a Config", "got ['{<]")


@pytest.mark.parametrize("main", [None, 5, "main"])
def test_what_is_no_function(main):
    refused(lambda: pt.run(main, Config(**SMALLEST)), TypeError, "expected a function", "got")


MOUNTED = """
import sys
sys.path[:0] = {search!r}
import ptstore_mpi as pt
try:
    pt.launch(pt.Config(memory_bytes=1 << 46, shared_memory_dir=sys.argv[1]))
except pt.ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a large tmpfs")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare of util-linux")
def test_an_arena_larger_than_memory_where_the_file_system_has_room(tmp_path):
    """A tmpfs may promise more than the machine has: filling it would kill the job."""
    mount = 'mount -t tmpfs -o size=100t tmpfs "$0" && exec "$1" -c "$2" "$0"'
    program = MOUNTED.format(search=[str(REPOSITORY), *sys.path])
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, str(tmp_path), sys.executable, program],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert f"want arenas of {1 << 46} bytes in {tmp_path}, but there and in memory" in ended.stdout


def group(folder, *, limit, used, version):
    """Write what a control group of 1,000 bytes of file pages tells of itself."""
    names = ("memory.max", "memory.current") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes")  # fmt: skip
    prefix = "" if version == 2 else "total_"
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    pages = f"{prefix}inactive_file 600\n{prefix}active_file 400\nshmem 50\n"
    (folder / "memory.stat").write_text(pages)
    return folder


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_limits_memory(tmp_path, version):
    """What pages of files hold is given up first; what a tmpfs holds is not."""
    assert group_free_bytes(group(tmp_path, limit=5000, used=3000, version=version)) == 3000
    assert group_free_bytes(group(tmp_path, limit=5000, used=9000, version=version)) == 0


def test_without_a_limit_the_machine_decides(tmp_path):
    assert group_free_bytes(tmp_path) == UNKNOWN_BYTES
    assert group_free_bytes(group(tmp_path, limit="max", used=1, version=2)) == UNKNOWN_BYTES
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert 0 < free_memory_bytes() <= total
