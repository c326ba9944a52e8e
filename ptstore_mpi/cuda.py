"""The CUDA driver, as far as copies need it: contexts, streams, copies, page-locks.

The only module that talks to ``libcuda.so.1``, through ctypes: no CUDA toolkit is needed to build
and no engine's library to run. Nothing is opened before a `device` is asked for. It never touches
the engine's streams, and leaves the calling thread's context as it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache

import numpy as np
import numpy.typing as npt

from ptstore_mpi.device_views import Copy
from ptstore_mpi.errors import LayoutMismatchError, TransportError

__all__ = ["LIBRARY", "Device", "device"]

Memory = npt.NDArray[np.uint8]

LIBRARY = "libcuda.so.1"

_STREAM_NON_BLOCKING = 1  # it does not wait for the legacy default stream, nor that for it
_REGISTER_PORTABLE = 1  # page-locked for every context
_CAPTURE_RELAXED = 2
_HOST, _DEVICE = 1, 2  # where a side of a two-dimensional copy lies


class _Copy2D(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcMemoryType", c_uint),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstMemoryType", c_uint),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    )


# By the names of the ABI: what a header calls cuMemHostRegister is cuMemHostRegister_v2.
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_uint),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (POINTER(_Copy2D), c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
}


class _Driver:
    """The functions of the library; `call` raises where one does not succeed."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(LIBRARY)
            self._functions = {name: getattr(library, name) for name in _FUNCTIONS}
        except (OSError, AttributeError) as error:
            raise LayoutMismatchError(f"there is no CUDA driver here: {error}") from None
        for name, types in _FUNCTIONS.items():
            self._functions[name].argtypes = types
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; the interpreter lock is released meanwhile.

        Raises
        ------
        TransportError
            It failed: the names of the function and of the driver's error.
        """
        status = self._functions[name](*arguments)
        if status:
            text = c_char_p()
            self._functions["cuGetErrorName"](status, byref(text))
            error = text.value.decode() if text.value else f"error {status}"
            raise TransportError(f"the CUDA driver failed: {name}: {error}")


class Device:
    """One CUDA device as this process uses it: its primary context and a stream of our own.

    The primary context is the one that every library over the CUDA runtime works in. `device`
    makes it, once; stream and context stay until the process ends.

    Attributes
    ----------
    stream
        Handle of the stream that all copies run on.
    """

    def __init__(self, ordinal: int) -> None:
        self._driver = _Driver()
        self._context = c_void_p()
        handle, stream = c_int(), c_void_p()
        self._driver.call("cuDeviceGet", byref(handle), ordinal)
        self._driver.call("cuDevicePrimaryCtxRetain", byref(self._context), handle)
        with self._entered():
            self._driver.call("cuStreamCreate", byref(stream), _STREAM_NON_BLOCKING)
        assert stream.value is not None
        self.stream: int = stream.value

    @contextmanager
    def copying(self, copies: Iterable[Copy], memory: Memory, *, to_device: bool) -> Iterator[None]:
        """Start copies between the device and ``memory``; they are complete when the block ends.

        However it ends: after an error, too, nothing is under way any more.
        """
        start = self._start_to_device if to_device else self._start_to_host
        base: int = memory.ctypes.data
        with self._entered():
            try:
                for copy in copies:
                    start(copy, base + copy.offset)
                yield
            finally:
                self._driver.call("cuStreamSynchronize", self.stream)

    def lock_pages(self, memory: Memory) -> None:
        """Page-lock ``memory``, which has pages by now; copies to and from it become faster."""
        with self._entered():
            self._driver.call(
                "cuMemHostRegister_v2", memory.ctypes.data, memory.nbytes, _REGISTER_PORTABLE
            )

    def unlock_pages(self, memory: Memory) -> None:
        """Undo `lock_pages`, before the memory goes."""
        with self._entered():
            self._driver.call("cuMemHostUnregister", memory.ctypes.data)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Work in the device's context.

        In the mode in which an engine that captures a graph in another thread is not disturbed:
        by default its capture would fail, and so would our call.
        """
        call = self._driver.call
        mode, popped = c_uint(_CAPTURE_RELAXED), c_void_p()
        call("cuCtxPushCurrent_v2", self._context)
        try:
            call("cuThreadExchangeStreamCaptureMode", byref(mode))
            try:
                yield
            finally:
                call("cuThreadExchangeStreamCaptureMode", byref(mode))
        finally:
            call("cuCtxPopCurrent_v2", byref(popped))

    def _start_to_device(self, copy: Copy, host: int) -> None:
        if copy.row_count == 1:
            self._driver.call(
                "cuMemcpyHtoDAsync_v2", copy.address, host, copy.row_bytes, self.stream
            )
            return
        self._start_rows(
            _Copy2D(
                srcMemoryType=_HOST,
                srcHost=host,
                srcPitch=copy.image_pitch,
                dstMemoryType=_DEVICE,
                dstDevice=copy.address,
                dstPitch=copy.pitch,
                WidthInBytes=copy.row_bytes,
                Height=copy.row_count,
            )
        )

    def _start_to_host(self, copy: Copy, host: int) -> None:
        if copy.row_count == 1:
            self._driver.call(
                "cuMemcpyDtoHAsync_v2", host, copy.address, copy.row_bytes, self.stream
            )
            return
        self._start_rows(
            _Copy2D(
                srcMemoryType=_DEVICE,
                srcDevice=copy.address,
                srcPitch=copy.pitch,
                dstMemoryType=_HOST,
                dstHost=host,
                dstPitch=copy.image_pitch,
                WidthInBytes=copy.row_bytes,
                Height=copy.row_count,
            )
        )

    def _start_rows(self, rows: _Copy2D) -> None:
        self._driver.call("cuMemcpy2DAsync_v2", byref(rows), self.stream)


@cache
def device(ordinal: int) -> Device:
    """Return a CUDA device of this process; its first use opens the driver.

    Raises
    ------
    LayoutMismatchError
        There is no CUDA driver.
    TransportError
        The driver has no such device, or fails.
    """
    return Device(ordinal)
