// array_info: what any array of another library looks like in memory, without a copy of it.
#include <nanobind/stl/optional.h>

#include <optional>
#include <vector>

#include "bindings.hpp"

namespace ptstore::bind {
namespace {

using DLTensor = nb::dlpack::dltensor;
using ReadableArray = nb::ndarray<nb::ro>;
using WritableArray = nb::ndarray<>;
using Device = std::optional<int>;  // ordinal of a CUDA device; nothing: host memory
using StreamOf = nb::typed<nb::callable, int(int)>;
using IntTuple = nb::typed<nb::tuple, int, nb::ellipsis>;
using ArrayInfo =
    nb::typed<nb::tuple, std::uintptr_t, IntTuple, IntTuple, std::size_t, bool, Device>;

/// What a capsule "dltensor_versioned" points to, by DLPack's ABI; "dltensor" is the tensor alone.
struct VersionedTensor {
    std::uint32_t major;
    std::uint32_t minor;
    void* context;
    void (*deleter)(VersionedTensor*);
    std::uint64_t flags;
    DLTensor tensor;
};
constexpr std::uint32_t kMajorVersion = 1;
constexpr std::uint64_t kReadOnly = 1;

struct Export {
    const DLTensor* tensor;
    bool is_writable;
};

Device device_of(int type, int ordinal) {
    if (type == nb::device::cuda::value) return ordinal;
    if (type == nb::device::cpu::value || type == nb::device::cuda_host::value ||
        type == nb::device::rocm_host::value) {
        return {};
    }
    throw nb::value_error(("array must be in host memory or on a CUDA device, got DLPack device " +
                           std::to_string(type))
                              .c_str());
}

Device told_device_of(const nb::object& array) {
    if (!nb::hasattr(array, "__dlpack_device__")) return {};
    const auto told = nb::cast<nb::tuple>(array.attr("__dlpack_device__")());
    return device_of(nb::cast<int>(told[0]), nb::cast<int>(told[1]));
}

/// Asks for a capsule. On a CUDA device the producer is told which stream will read or write the
/// array, and makes it wait for the work that is under way. Always a real stream: -1, for none,
/// is taken for an address by some producers.
nb::object capsule_of(const nb::object& array, const Device& device, const nb::object& stream_of) {
    const nb::object dlpack = array.attr("__dlpack__");
    nb::dict options;
    if (device) options["stream"] = stream_of(*device);
    options["max_version"] = nb::make_tuple(kMajorVersion, 0);
    try {
        return dlpack(**options);
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_TypeError)) throw;
    }
    nb::del(options["max_version"]);  // older than versioned exports
    return dlpack(**options);
}

Export opened(const nb::object& capsule) {
    if (PyCapsule_IsValid(capsule.ptr(), "dltensor") != 0) {
        void* const plain = PyCapsule_GetPointer(capsule.ptr(), "dltensor");
        return {static_cast<const DLTensor*>(plain), true};
    }
    void* const pointer = PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned");
    if (pointer == nullptr) throw nb::python_error();
    const auto* versioned = static_cast<const VersionedTensor*>(pointer);
    if (versioned->major != kMajorVersion) {
        throw nb::value_error(("array must be exported by DLPack 1, got version " +
                               std::to_string(versioned->major))
                                  .c_str());
    }
    return {&versioned->tensor, (versioned->flags & kReadOnly) == 0};
}

template <typename Item>
nb::tuple tuple_of(std::size_t count, Item item) {
    nb::list items;
    for (std::size_t i = 0; i < count; ++i) items.append(item(i));
    return nb::tuple(items);
}

std::uintptr_t address_of(const DLTensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

std::int64_t itemsize_of(const DLTensor& tensor) {
    return (tensor.dtype.bits * tensor.dtype.lanes + 7) / 8;
}

nb::tuple strides_bytes_of(const DLTensor& tensor) {
    const auto count = static_cast<std::size_t>(tensor.ndim);
    std::vector<std::int64_t> strides(count, itemsize_of(tensor));
    for (std::size_t i = count; i-- > 0;) {
        if (tensor.strides != nullptr) {
            strides[i] *= tensor.strides[i];
        } else if (i + 1 < count) {
            strides[i] = strides[i + 1] * tensor.shape[i + 1];
        }
    }
    return tuple_of(count, [&](std::size_t i) { return strides[i]; });
}

/// The capsule is not consumed: it frees the export when it goes, and the array stays.
ArrayInfo exported_info(const nb::object& array, const Device& told, const nb::object& stream_of) {
    const nb::object capsule = capsule_of(array, told, stream_of);
    const Export exported = opened(capsule);
    const DLTensor& tensor = *exported.tensor;
    const Device device = device_of(tensor.device.device_type, tensor.device.device_id);
    if (device != told) {
        throw nb::value_error(("array must be exported where it says it is, got DLPack device " +
                               std::to_string(tensor.device.device_type))
                                  .c_str());
    }
    const auto shape = tuple_of(static_cast<std::size_t>(tensor.ndim),
                                [&](std::size_t i) { return tensor.shape[i]; });
    return nb::make_tuple(address_of(tensor), shape, strides_bytes_of(tensor), itemsize_of(tensor),
                          exported.is_writable, device);
}

/// Only the producer can say why it refuses (a tensor that requires a gradient, for example).
ArrayInfo info_or_reason(const nb::object& array, const nb::object& stream_of) {
    try {
        return exported_info(array, told_device_of(array), stream_of);
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_BufferError)) throw;
        throw nb::value_error(nb::str(error.value()).c_str());
    }
}

ArrayInfo buffer_info(const nb::object& source, const nb::object& stream_of) {
    ReadableArray array;
    if (!nb::try_cast(source, array, false)) {
        const std::string type = nb::type_name(source.type()).c_str();
        const auto text = "array must be numeric, with DLPack or the buffer protocol, got " + type;
        throw nb::type_error(text.c_str());
    }
    // A type with buffers may still have arrays on devices.
    if (device_of(array.device_type(), array.device_id())) {
        return info_or_reason(source, stream_of);
    }
    WritableArray writable;
    const bool is_writable = nb::try_cast(source, writable, false);
    const auto itemsize = static_cast<std::int64_t>(array.itemsize());
    const auto shape = tuple_of(array.ndim(), [&](std::size_t i) { return array.shape(i); });
    const auto strides =
        tuple_of(array.ndim(), [&](std::size_t i) { return array.stride(i) * itemsize; });
    return nb::make_tuple(reinterpret_cast<std::uintptr_t>(array.data()), shape, strides, itemsize,
                          is_writable, Device());
}

ArrayInfo array_info(const nb::object& source, const StreamOf& stream_of) {
    if (nb::hasattr(source, "__dlpack__")) {
        return PyObject_CheckBuffer(source.ptr()) == 0 ? info_or_reason(source, stream_of)
                                                       : buffer_info(source, stream_of);
    }
    if (PyObject_CheckBuffer(source.ptr()) == 0) return buffer_info(source, stream_of);  // refuses
    // A plain buffer need not say its strides (those of ctypes do not); a view of it always does.
    const nb::object view = nb::steal(PyMemoryView_FromObject(source.ptr()));
    if (!view.is_valid()) throw nb::python_error();
    return buffer_info(view, stream_of);
}

}  // namespace

void bind_array_info(nb::module_& module) {
    module.def("array_info", &array_info, "array"_a.none(), "stream_of"_a,
               "(address, shape, strides_bytes, itemsize, writable, device) of an array. device is "
               "None in host memory, else the ordinal of a CUDA device; the stream that "
               "stream_of(device) gives then waits for the work that is under way on the array.");
}

}  // namespace ptstore::bind
