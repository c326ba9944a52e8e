"""array_info: arrays of several libraries as they lie in memory."""

from __future__ import annotations

import numpy as np
import pytest

from ptstore_mpi import _native


def array_info(array: object) -> tuple[object, ...]:
    """Describe an array that is not on a CUDA device, so that nobody asks for a stream."""
    return _native.array_info(array, lambda device: pytest.fail(f"a stream of device {device}"))


def test_numpy() -> None:
    array = np.zeros((3, 4, 5), np.float32)
    expected = (array.ctypes.data, (3, 4, 5), (80, 20, 4), 4, True, None)
    assert array_info(array) == expected


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
    address, shape, strides, itemsize, writable, device = array_info(array)
    assert (shape, itemsize) == (array.shape, array.itemsize)
    assert (writable, device) == (array.flags.writeable, None)
    if array.size:
        assert (address, strides) == (array.ctypes.data, array.strides)


def test_read_only_numpy_says_so() -> None:
    array = np.zeros(4, np.uint8)
    array.flags.writeable = False
    assert array_info(array)[4] is False
    assert array_info(array)[0] == array.ctypes.data


def test_buffers() -> None:
    assert array_info(bytearray(5))[1:] == ((5,), (1,), 1, True, None)
    assert array_info(b"abc")[1:] == ((3,), (1,), 1, False, None)
    assert array_info(memoryview(b"abcd"))[1:] == ((4,), (1,), 1, False, None)


@pytest.mark.parametrize("array", [None, 5, [1, 2], "abc", np.zeros(2, "M8[s]")])
def test_what_is_no_array_is_a_type_error(array: object) -> None:
    with pytest.raises(TypeError, match="array must be numeric"):
        array_info(array)


class TestTorch:
    """Tensors of torch, where it is installed."""

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "float8_e4m3fn"])
    def test_every_dtype(self, dtype: str) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.zeros(3, 4, dtype=getattr(torch, dtype))
        size = tensor.element_size()
        expected = (tensor.data_ptr(), (3, 4), (4 * size, size), size, True, None)
        assert array_info(tensor) == expected

    def test_views_point_into_the_same_memory(self) -> None:
        torch = pytest.importorskip("torch")
        tensor = torch.zeros(8, 16, 4, dtype=torch.bfloat16)
        view = tensor[2:, 4:].transpose(0, 1)
        expected = (view.data_ptr(), (12, 6, 4), (8, 128, 2), 2, True, None)
        assert array_info(view) == expected

    def test_refusals_carry_the_reason_of_torch(self) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(ValueError, match="require gradient"):
            array_info(torch.zeros(3, requires_grad=True))
        with pytest.raises(ValueError, match="meta"):
            array_info(torch.zeros(3, device="meta"))

    def test_detached_is_fine(self) -> None:
        torch = pytest.importorskip("torch")
        parameter = torch.zeros(3, requires_grad=True)
        assert array_info(parameter.detach())[0] == parameter.data_ptr()


class Elsewhere:
    """An array of three floats that claims to lie on a device, and exports that by DLPack."""

    def __init__(self, told: int, exported: int) -> None:
        self.array = np.zeros(3, np.float32)
        self.told, self.exported = told, exported

    def __dlpack__(self, **_: object) -> object:
        return _capsule_on(self.exported, self.array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.told, 0)


def _capsule_on(device_type: int, array: np.ndarray) -> object:
    """Export `array` by DLPack, then overwrite the device type in the exported structure."""
    import ctypes

    capsule = array.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    get.argtypes = [ctypes.py_object, ctypes.c_char_p]
    pointer = get(capsule, b"dltensor")
    field = ctypes.c_int32.from_address(pointer + ctypes.sizeof(ctypes.c_void_p))
    assert field.value == 1
    field.value = device_type
    return capsule


def test_another_device_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="or on a CUDA device, got DLPack device 10"):
        array_info(Elsewhere(10, 10))


@pytest.mark.parametrize(("told", "exported"), [(1, 2), (2, 1)])
def test_an_export_from_another_place_than_told_is_a_value_error(told: int, exported: int) -> None:
    """Where the array is decides whether a stream is passed: a wrong word would be a race."""
    with pytest.raises(ValueError, match=f"where it says it is, got DLPack device {exported}"):
        _native.array_info(Elsewhere(told, exported), lambda device: 77)


def test_a_producer_on_a_device_is_told_the_stream() -> None:
    asked = []

    class Device(Elsewhere):
        def __dlpack__(self, **options: object) -> object:
            asked.append(options)
            return super().__dlpack__(**options)

    array = Device(2, 2)
    info = _native.array_info(array, lambda device: 1000 + device)
    assert info == (array.array.ctypes.data, (3,), (4,), 4, True, 0)
    assert asked == [{"stream": 1000, "max_version": (1, 0)}]


def test_exports_of_both_versions() -> None:
    array = np.zeros((2, 3), np.int16)
    array.flags.writeable = False

    class Versioned:
        def __dlpack__(self, *, max_version: tuple[int, int]) -> object:
            return array.__dlpack__(max_version=max_version)

    class Old:
        def __dlpack__(self) -> object:
            return np.ones((2, 3), np.int16).__dlpack__()

    assert array_info(Versioned()) == (array.ctypes.data, (2, 3), (6, 2), 2, False, None)
    assert array_info(Old())[1:] == ((2, 3), (6, 2), 2, True, None)
