"""Every limit of the store, with its unit, validated once.

A value comes from, in rising order of precedence: its default, a TOML file, a ``PTSTORE_<NAME>``
environment variable, a keyword. Unknown names and impossible values are refused by name.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_origin

import msgspec

from ptstore_mpi.errors import ConfigError
from ptstore_mpi.types import PAGE_BYTES

__all__ = ["Config", "parse_bytes"]

_OTHER_VARIABLES = {"PTSTORE_CONFIG", "PTSTORE_DATA", "PTSTORE_CACHE", "PTSTORE_VLLM_API"}
_FROM_ENVIRONMENT = "environment variable PTSTORE_*"
_ZERO_MEANS = {
    "assumed_disk_s": "as measured",
    "assumed_local_s": "as measured",
    "assumed_recompute_s": "as measured",
    "assumed_remote_s": "as measured",
    "copy_threads": "automatic",
    "pfs_bytes": "no such tier",
    "redirect_bytes": "never",
    "replica_max_share": "no replicas",
    "replica_min_share": "none is kept for them",
    "slab_bytes": "as fits the tier",
    "ssd_bytes": "no such tier",
    "stall_timeout_s": "never",
    "virtual_node_count": "real nodes",
}
_EMPTY_MEANS = {"pfs_dir": "no such tier", "ssd_dir": "no such tier"}
_LARGEST = (1 << 48) - 1  # of whole numbers: what a machine can address
_LONGEST_S = 1e9
_MOST_COPY_THREADS = 256
_MOST_SLABS = 256
_UNITS = {
    "": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "B": 1,
}


def parse_bytes(text: str | int) -> int:
    """Return a number of bytes from ``"512MiB"``, ``"2 GB"``, ``"4096"`` or an integer.

    Raises
    ------
    ConfigError
        The text is not a number with one of the units B, KB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    pattern = r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*"
    found = re.fullmatch(pattern, text, re.ASCII) if isinstance(text, str) else None
    if found is None or found[2].upper() not in _UNITS:
        raise ConfigError(f"expected a size such as 512MiB or 2GB, got {text!r:.80}")
    size = float(found[1]) * _UNITS[found[2].upper()]
    if size > _LARGEST:
        raise ConfigError(f"expected a size of at most {_LARGEST} bytes, got {text!r:.80}")
    return int(size)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one job; equal on every rank (``launch`` checks that).

    Attributes
    ----------
    memory_bytes
        KV memory of one *node*, metadata included, shared by the node's servers.
    servers_per_node
        Servers on each node: one per network interface. The lowest ranks of a node serve.
    virtual_node_count
        Nodes that the ranks of each host are split into, consecutive ranks each, as if they
        shared no memory: for trying things on one machine, with any MPI. 0: hosts are nodes.
        ``memory_bytes`` counts for every one of them.
    transport
        What carries bytes between nodes: ``mpi`` (one-sided, `MPI_Rget` from a window), ``p2p``
        (two-sided, no window at all) or ``auto``: ``mpi`` where a probe at start finds that it
        works, else ``p2p``.
    probe_timeout_s
        Time that the probe's one Get per client may take. A call that hangs inside MPI meanwhile
        ends the job after as much again, one second at least.
    probe_fault
        For tests of the fallback: the probe's Get never ends (``hang``), brings wrong bytes
        (``corrupt``), or is a call that never returns (``stuck``); ``none`` is what it should be.
    segment_tokens
        Tokens of a full segment; a multiple of every layout's ``block_tokens``.
    placement
        Owner of an increment: ``local`` (a server of the storing client's node), ``random``
        (a function of the block hashes) or ``least_loaded`` (the less loaded of two such).
    eviction
        What a full server drops to make room, always a segment that nothing continues and nobody
        reads: the one used least recently (``lru``), least often (``lfu``), with the least
        expected loss per byte (``gdsf``), by ``s3fifo``, or by whichever of these would have done
        best of late (``adaptive``); ``none``: a full server refuses stores.
    replica_admission
        Which segments of other nodes are kept in this node's memory once they were fetched:
        those asked for again (``second_hit``), all (``always``) or none (``never``).
    replica_min_share, replica_max_share
        Share of the memory that such replicas may take, 0 to 1: below the first they stay though
        owned segments want room; the second they never pass.
    replica_share
        Up to where replicas push owned segments out: ``fixed``, to ``replica_min_share``; or
        ``adaptive``, to a share between the two limits that each server moves to where prompts
        wait least, by what a step more of either would have saved and by measured times.
    assumed_local_s, assumed_remote_s, assumed_disk_s, assumed_recompute_s
        Seconds for 1 GB (10**9 bytes) of KV from this node's memory, another's, a lower tier or a
        prefill, which ``adaptive`` is to take for measured ones; 0: as measured.
    redirect_bytes
        Bytes that clients of other nodes are reading from an owner at once before it sends
        further ones to a node that has a replica; 0: never.
    ssd_dir, ssd_bytes
        Folder of a node's SSD where owned segments go that memory has no room for, and how much
        the node may take there, shared by its servers; without a folder there is no such tier.
    pfs_dir, pfs_bytes
        The same on a parallel file system, below the SSD: each node's own part of it.
    ssd_admission
        What may be written to the SSD: ``all``, or only what was read at least once (``reused``).
    slab_bytes
        Size of one file of these tiers: the largest segment must fit, and 256 files are the most.
        0: 1 GiB, more for tiers above 256 GiB, a quarter of those below 4 GiB.
    tier_direct
        Whether their files are read and written past the page cache (`O_DIRECT`): ``auto`` where
        the file system takes it.
    tier_threads
        Threads of each server that read and write each tier.
    verify
        Block checksums checked: ``off``, ``remote`` (whatever crossed a wire: by load, and by the
        owner before it makes an increment visible) or ``always`` (by every load).
    verify_publish
        Whether an owner also checks what was stored on its own node before it makes it visible.
    match_timeout_s
        Deadline of a match, also of the one inside a store, and of counters, clear and drop. An
        answer takes less than a millisecond; while a server stands still, every request waits
        this long and then does without that server.
    load_timeout_s, store_timeout_s
        Deadlines of the operations that move bytes. What misses one is a miss with a reason.
    retry_s
        Time after which an unanswered request is sent again.
    lease_cap_s
        Longest lease an owner grants.
    close_timeout_s
        Longest time for the collective open, but for the probe, and for the close once the last
        client has come; past it the job aborts.
    stall_timeout_s
        A rank that has been busy in the store for so long without getting on writes the Python
        stacks of all ranks into ``ptstore-stall-*.txt`` and ends the job; 0: never.
    stall_dir
        Folder of that file.
    staging_bytes
        Store-owned memory of a client where remote segments land; at least two full segments
        are kept whatever this says.
    get_bytes, gets_in_flight_count
        Largest single Get, and how many a client keeps in flight.
    copy_threads
        Threads of a client's copies, at most 256; 0 shares the node's cores among its clients
        (at most 4).
    idle
        ``adaptive``: spin ``idle_spin_s`` after the last activity, then nap, doubling from
        ``nap_first_s`` to ``nap_cap_s``. ``spin`` where a core is dedicated to the server.
    idle_spin_s, nap_first_s, nap_cap_s
        Of ``adaptive``: how long it spins, its shortest nap and its longest.
    unconfirmed_count
        Regions a client may hold unsettled at one server.
    shared_memory_dir
        Folder of the arenas: a tmpfs.
    hash_seed
        Key of the block hash, 32 hexadecimal digits; jobs that share files must agree on it.
    """

    memory_bytes: int = 1 << 30
    servers_per_node: int = 1
    virtual_node_count: int = 0
    transport: Literal["auto", "mpi", "p2p"] = "auto"
    probe_timeout_s: float = 5.0
    probe_fault: Literal["none", "hang", "corrupt", "stuck"] = "none"
    segment_tokens: int = 256
    placement: Literal["local", "random", "least_loaded"] = "local"
    eviction: Literal["lru", "lfu", "gdsf", "s3fifo", "adaptive", "none"] = "lru"
    replica_admission: Literal["second_hit", "always", "never"] = "second_hit"
    replica_min_share: float = 0.0
    replica_max_share: float = 0.5
    replica_share: Literal["fixed", "adaptive"] = "fixed"
    assumed_local_s: float = 0.0
    assumed_remote_s: float = 0.0
    assumed_disk_s: float = 0.0
    assumed_recompute_s: float = 0.0
    redirect_bytes: int = 64 << 20
    ssd_dir: str = ""
    ssd_bytes: int = 0
    pfs_dir: str = ""
    pfs_bytes: int = 0
    ssd_admission: Literal["all", "reused"] = "all"
    slab_bytes: int = 0
    tier_direct: Literal["auto", "on", "off"] = "auto"
    tier_threads: int = 2
    verify: Literal["off", "remote", "always"] = "remote"
    verify_publish: bool = False
    match_timeout_s: float = 1.0
    load_timeout_s: float = 10.0
    store_timeout_s: float = 30.0
    retry_s: float = 5.0
    lease_cap_s: float = 60.0
    close_timeout_s: float = 60.0
    stall_timeout_s: float = 300.0
    stall_dir: str = "."
    staging_bytes: int = 64 << 20
    get_bytes: int = 16 << 20
    gets_in_flight_count: int = 64
    copy_threads: int = 0
    idle: Literal["adaptive", "spin"] = "adaptive"
    idle_spin_s: float = 300e-6
    nap_first_s: float = 20e-6
    nap_cap_s: float = 200e-6
    unconfirmed_count: int = 8
    shared_memory_dir: str = "/dev/shm"
    hash_seed: str = "70747374 6f72652d 6d70692d 76310000".replace(" ", "")

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            name, value = field.name, getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                wanted = _expected(field.type, error)
                raise ConfigError(f"{name}: {wanted}, got {value!r:.80}") from None
            if name in _ZERO_MEANS:
                if value < 0:
                    meaning = _ZERO_MEANS[name]
                    raise ConfigError(f"{name} must be 0 ({meaning}) or more, got {value}")
            elif isinstance(value, int | float) and not isinstance(value, bool) and not value > 0:
                raise ConfigError(f"{name} must be greater than 0, got {value}")
            _check_most(name, value)
        if not self.arena_bytes:
            raise ConfigError(
                f"memory_bytes = {self.memory_bytes} is less than a page ({PAGE_BYTES} bytes) "
                f"for each of {self.servers_per_node} server(s)"
            )
        if not re.fullmatch(r"[0-9a-fA-F]{32}", self.hash_seed):
            raise ConfigError(f"hash_seed must be 32 hexadecimal digits, got {self.hash_seed!r}")
        if self.replica_min_share > self.replica_max_share:
            raise ConfigError(
                f"replica_min_share ({self.replica_min_share}) must not exceed "
                f"replica_max_share ({self.replica_max_share})"
            )
        for tier in ("ssd", "pfs"):
            directory, nbytes = getattr(self, f"{tier}_dir"), getattr(self, f"{tier}_bytes")
            if bool(directory) != bool(nbytes):
                raise ConfigError(
                    f"{tier}_dir and {tier}_bytes go together, got {directory!r} and {nbytes}"
                )
        if self.nap_first_s > self.nap_cap_s:
            raise ConfigError(
                f"nap_first_s ({self.nap_first_s}) must not exceed nap_cap_s ({self.nap_cap_s})"
            )

    @property
    def arena_bytes(self) -> int:
        """Bytes of one server's arena: its share of the node's memory, in whole 4 KiB pages."""
        return self.memory_bytes // self.servers_per_node // PAGE_BYTES * PAGE_BYTES

    def slab_bytes_of(self, capacity_bytes: int) -> int:
        """Return the size of one file of a tier of ``capacity_bytes``, in whole pages."""
        if self.slab_bytes:
            return self.slab_bytes
        least = -(-capacity_bytes // _MOST_SLABS // PAGE_BYTES) * PAGE_BYTES
        return max(least, min(1 << 30, capacity_bytes // 4 // PAGE_BYTES * PAGE_BYTES))

    @property
    def seed(self) -> bytes:
        """The 16-byte key of the block hash."""
        return bytes.fromhex(self.hash_seed)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Self:
        """Return the settings from a TOML file, ``PTSTORE_*`` variables and keywords.

        Parameters
        ----------
        path
            TOML file with the fields of this class at its top level; default: the file named by
            ``PTSTORE_CONFIG``, if any.
        environment
            Variables to read; default ``os.environ``.
        settings
            Keywords; they win. ``*_bytes`` accept ``"512MiB"``.

        Raises
        ------
        ConfigError
            An unknown name or an impossible value, with where it came from.
        """
        environment = os.environ if environment is None else environment
        if not isinstance(environment, Mapping):
            raise ConfigError(f"expected a mapping of variables, got {environment!r:.80}")
        path = path or environment.get("PTSTORE_CONFIG") or None
        if not isinstance(path, str | os.PathLike | None):
            raise ConfigError(f"expected the path of a configuration file, got {path!r:.80}")
        sources = [
            (_FROM_ENVIRONMENT, _from_environment(environment)),
            ("keyword", settings),
        ]
        if path is not None:
            sources.insert(0, (f"file {os.fspath(path)}", _from_toml(Path(path))))
        types = {field.name: field.type for field in msgspec.structs.fields(cls)}
        merged: dict[str, Any] = {}
        for source, given in sources:
            unknown = sorted(set(given) - set(types))
            if unknown:
                raise ConfigError(
                    f"unknown setting {', '.join(map(repr, unknown))} ({source}); "
                    f"known settings: {', '.join(types)}"
                )
            for name, value in given.items():
                merged[name] = _convert(name, value, types[name], source)
        return cls(**merged)


def _check_most(name: str, value: Any) -> None:
    """Refuse what no machine has: numbers without end, folders without a name."""
    if isinstance(value, str):
        if (not value and name not in _EMPTY_MEANS) or "\0" in value:
            raise ConfigError(f"{name} must be a text, not empty and without NUL, got {value!r}")
        return
    most = _LONGEST_S if name.endswith("_s") else _LARGEST
    most = _MOST_COPY_THREADS if name == "copy_threads" else most
    most = 1 if name.endswith("_share") else most
    if not value <= most:
        raise ConfigError(f"{name} must be at most {most}, got {value}")


def _convert(name: str, value: Any, kind: Any, source: str) -> Any:
    try:
        if name.endswith("_bytes"):
            value = parse_bytes(value)
        return msgspec.convert(value, kind, strict=False)
    except (ConfigError, msgspec.ValidationError) as error:
        if source == _FROM_ENVIRONMENT:
            source = f"environment variable PTSTORE_{name.upper()}"
        wanted = _expected(kind, error)
        raise ConfigError(f"{name} ({source}): {wanted}, got {value!r:.80}") from None


def _expected(kind: Any, error: Exception) -> str:
    """Return what would be right: the values there are, or else the words of ``error``."""
    if get_origin(kind) is Literal:
        return f"expected one of {', '.join(get_args(kind))}"
    return str(error)


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of digits, of the path
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix("PTSTORE_").lower(): value
        for name, value in environment.items()
        if name.startswith("PTSTORE_") and name not in _OTHER_VARIABLES
    }
