"""array_info: arrays of several libraries as they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest

from ptstore_mpi import _native


def test_numpy() -> None:
    array = np.zeros((3, 4, 5), np.float32)
    expected = (array.ctypes.data, (3, 4, 5), (80, 20, 4), 4, True)
    assert _native.array_info(array) == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda a: a[1:, ::2],
        lambda a: a.T,
        lambda a: a[:, ::-1],
        lambda a: a[None],
        lambda a: a[:0],
        lambda a: np.broadcast_to(a[0], (7, 6)),
    ],
)
@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f8", "c16", "?"])
def test_numpy_views(make: object, dtype: str) -> None:
    array = make(np.zeros((4, 6), dtype))  # type: ignore[operator]
    address, shape, strides, itemsize, writable = _native.array_info(array)
    assert (shape, itemsize) == (array.shape, array.itemsize)
    assert writable == array.flags.writeable
    if array.size:
        assert (address, strides) == (array.ctypes.data, array.strides)


def test_read_only_numpy_says_so() -> None:
    array = np.zeros(4, np.uint8)
    array.flags.writeable = False
    assert _native.array_info(array)[4] is False
    assert _native.array_info(array)[0] == array.ctypes.data


def test_buffers() -> None:
    assert _native.array_info(bytearray(5))[1:] == ((5,), (1,), 1, True)
    assert _native.array_info(b"abc")[1:] == ((3,), (1,), 1, False)
    assert _native.array_info(memoryview(b"abcd"))[1:] == ((4,), (1,), 1, False)


@pytest.mark.parametrize("array", [None, 5, [1, 2], "abc", np.zeros(2, "M8[s]")])
def test_what_is_no_array_is_a_type_error(array: object) -> None:
    with pytest.raises(TypeError, match="array must be numeric"):
        _native.array_info(array)


class TestTorch:
    """Tensors of torch, where it is installed."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "float8_e4m3fn"])
    def test_every_dtype(self, dtype: str) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.zeros(3, 4, dtype=getattr(torch, dtype))
        size = tensor.element_size()
        expected = (tensor.data_ptr(), (3, 4), (4 * size, size), size, True)
        assert _native.array_info(tensor) == expected

    def test_views_point_into_the_same_memory(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.zeros(8, 16, 4, dtype=torch.bfloat16)
        view = tensor[2:, 4:].transpose(0, 1)
        expected = (view.data_ptr(), (12, 6, 4), (8, 128, 2), 2, True)
        assert _native.array_info(view) == expected

    def test_refusals_carry_the_reason_of_torch(self) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(ValueError, match="require gradient"):
            _native.array_info(torch.zeros(3, requires_grad=True))
        with pytest.raises(ValueError, match="meta"):
            _native.array_info(torch.zeros(3, device="meta"))

    def test_detached_is_fine(self) -> None:
        torch = pytest.importorskip("torch")
        parameter = torch.zeros(3, requires_grad=True)
        assert _native.array_info(parameter.detach())[0] == parameter.data_ptr()


class OtherDevice:
    """An array that claims to lie on a GPU: the type CUDA device of DLPack, 2."""

    def __init__(self) -> None:
        self.array = np.zeros(3, np.float32)

    def __dlpack__(self, **_: object) -> object:
        return _gpu_capsule(self.array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def _gpu_capsule(array: np.ndarray) -> object:
    """Export `array` by DLPack, then overwrite the device type in the exported structure."""
    import ctypes

    capsule = array.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer = get(capsule, b"dltensor")
    device_type = ctypes.c_int32.from_address(pointer + ctypes.sizeof(ctypes.c_void_p))
    assert device_type.value == 1
    device_type.value = 2
    return capsule


def test_another_device_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="host memory, got DLPack device 2"):
        _native.array_info(OtherDevice())
