"""The stand-in driver as tests see it, and arrays of a library whose memory is on its devices."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p, py_object
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("stand_in_cuda.c")
NAME = "libcuda.so.1"
TAG = 1 << 60  # what a device address is beyond the place of its bytes
COMPILER = shutil.which("cc")

# Like numpy, by DLPack's codes: 0 signed, 1 unsigned, 2 float, 4 bfloat.
CODES = {"i": 0, "u": 1, "f": 2}
BFLOAT = 4


def compile_into(folder: Path) -> Path:
    """Build the stand-in under the driver's own name."""
    path = folder / NAME
    command = [COMPILER, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(
        [*command, "-pthread", f"-Wl,-soname,{NAME}", "-o", path, SOURCE], check=True, timeout=60
    )
    return path


class StandIn:
    """What happened behind the driver's functions."""

    def __init__(self, path: Path | str) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, result, arguments in (
            ("allocate", c_uint64, (c_int, c_size_t)),
            ("write_later", None, (c_uint64, c_void_p, c_size_t)),
            ("wait", c_int, (c_uint64,)),
            ("finish_writes", None, ()),
            ("pending_count", c_int, ()),
            ("call_count", c_int, (c_char_p,)),
            ("fail", None, (c_char_p, c_int, c_int)),
            ("registered_count", c_int, ()),
            ("context_depth", c_int, ()),
            ("capture_mode", c_int, ()),
            ("capture", None, (c_int,)),
            ("live_export_count", c_int, ()),
        ):
            function = getattr(self._library, f"stand_in_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        # With the interpreter lock: it makes a Python object.
        export = ctypes.PyDLL(str(path)).stand_in_export
        export.restype = py_object
        export.argtypes = (c_uint64, c_int, c_int, c_void_p, c_int, c_int, c_int, c_int)
        self.export = export

    def fail_from(self, name: str, error: int, after: int = 0) -> None:
        """Let calls of a function fail, but for the first ``after``; error 0 ends that."""
        self.fail(name.encode(), error, after)

    def calls(self, name: str) -> int:
        """Return how often a function was called."""
        return self.call_count(name.encode())

    def copy_count(self) -> int:
        """Return how many copies the driver was asked for."""
        copies = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemcpy2DAsync_v2")
        return sum(map(self.calls, copies))

    def array(self, values: np.ndarray, device: int = 0) -> DeviceArray:
        """Return an array on a device with these values."""
        address = self.allocate(device, max(values.nbytes, 1))
        memory = (ctypes.c_uint8 * values.nbytes).from_address(address - TAG)
        inside = np.frombuffer(memory, np.uint8).view(values.dtype).reshape(values.shape)
        inside[:] = values
        return DeviceArray(self, inside, device)


class DeviceArray:
    """An array on a device: only exports reach it.

    Attributes
    ----------
    inside
        Its bytes, as only the driver may see them.
    streams
        What consumers said they would use it on; shared with its slices.
    """

    def __init__(self, stand_in: StandIn, inside: np.ndarray, device: int) -> None:
        self.stand_in = stand_in
        self.inside = inside
        self.device = device
        self.streams: list[int] = []
        self.code = CODES[inside.dtype.kind]
        self.read_only = False
        self.versioned = True

    def __getitem__(self, key: object) -> DeviceArray:
        part = DeviceArray(self.stand_in, self.inside[key], self.device)
        part.streams, part.code = self.streams, self.code
        return part

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device)

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int] | None = None) -> object:
        self.streams.append(stream)
        if self.stand_in.wait(stream):
            raise BufferError(f"stream {stream} does not exist")
        inside = self.inside
        dimensions = [*inside.shape, *(stride // inside.itemsize for stride in inside.strides)]
        return self.stand_in.export(
            inside.ctypes.data + TAG,
            self.device,
            inside.ndim,
            (ctypes.c_int64 * len(dimensions))(*dimensions),
            self.code,
            8 * inside.itemsize,
            self.read_only,
            self.versioned and max_version is not None,
        )

    def write_later(self, values: np.ndarray) -> None:
        """Start a kernel that writes ``values``: it ends only for who waits for it."""
        values = np.ascontiguousarray(values, self.inside.dtype)
        assert self.inside.flags.c_contiguous
        assert values.shape == self.inside.shape
        self.stand_in.write_later(self.inside.ctypes.data + TAG, values.ctypes.data, values.nbytes)
