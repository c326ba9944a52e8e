"""How much memory this process may still use: of the machine, and of its control groups.

A job manager limits a job by a control group, and pages of a tmpfs count in it: whoever fills an
arena beyond the limit is killed without a word. Reads /proc and /sys (Linux); elsewhere, and where
something cannot be read, there is no limit that is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["free_memory_bytes", "group_free_bytes"]

UNKNOWN_BYTES = (1 << 63) - 1

_GROUPS = Path("/sys/fs/cgroup")
# version 2, then version 1: limit, use, and what of the use are pages of files
_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def free_memory_bytes() -> int:
    """Return the least of what the machine and each control group of this process have free."""
    return min([_machine_free_bytes(), *map(group_free_bytes, _own_groups())])


def group_free_bytes(group: Path) -> int:
    """Return what a control group may still use; pages of files are given up when it needs them.

    Parameters
    ----------
    group
        Its folder below ``/sys/fs/cgroup``.
    """
    for limit, use, file_pages in _FILES:
        try:
            allowed = int((group / limit).read_text())  # "max" in version 2: no limit
            used = int((group / use).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            counters = dict(line.split() for line in lines)
        except (OSError, ValueError):
            continue
        return max(allowed - used + sum(int(counters.get(name, 0)) for name in file_pages), 0)
    return UNKNOWN_BYTES


def _machine_free_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return UNKNOWN_BYTES


def _own_groups() -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process, and those above them."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = _GROUPS / "memory" if controllers else _GROUPS
        own = top / name.lstrip("/")
        yield from (own, *(above for above in own.parents if above.is_relative_to(top)))
