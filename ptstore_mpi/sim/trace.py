"""The trace of a simulation as lines that a person can read.

A segment is written ``server.slot.generation[blocks]``, a hash or a digest as its first bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from ptstore_mpi.device_views import Views
from ptstore_mpi.types import GENERATION_BITS, SegmentRef, segment_owner, segment_slot

__all__ = ["START_S", "line_of"]

START_S = 1000.0
"""Time of the first event, s; a trace counts from it."""

_SHOWN_BYTES = 4


def line_of(now: float, actor: str, what: str, detail: Any) -> str:
    """Return one step as a line."""
    text = "" if isinstance(detail, str) and not detail else describe(detail)
    said = f"{what} {text}" if what else text
    return f"{now - START_S:11.6f} s  {actor:<9} {said}".rstrip()


def describe(value: Any) -> str:
    """Return a value of the protocol in short."""
    if isinstance(value, SegmentRef):
        return f"{_segment(value.segment)}[{value.block_count}]"
    if isinstance(value, bytes):
        short = value[:_SHOWN_BYTES].hex()
        return f"{short}({len(value)} bytes)" if len(value) > 2 * _SHOWN_BYTES else short
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(describe, value))})"
    if isinstance(value, msgspec.Struct):
        return _fields(value, value.__struct_fields__)
    if dataclasses.is_dataclass(value):
        return _fields(value, [field.name for field in dataclasses.fields(value)])
    return str(value)


def _fields(value: Any, names: Any) -> str:
    shown = []
    for name in names:
        field = getattr(value, name)
        if isinstance(field, Views):
            continue
        text = _segment(field) if name == "child" else describe(field)
        shown.append(f"{name}={text}")
    return f"{type(value).__name__}({', '.join(shown)})"


def _segment(segment: int) -> str:
    generation = segment & ((1 << GENERATION_BITS) - 1)
    return f"{segment_owner(segment)}.{segment_slot(segment)}.{generation}"
