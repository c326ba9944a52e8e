// array_info: what any array of another library looks like in memory, without a copy of it.
#include "bindings.hpp"

namespace ptstore::bind {
namespace {

using ReadableArray = nb::ndarray<nb::ro>;
using WritableArray = nb::ndarray<>;
using IntTuple = nb::typed<nb::tuple, int, nb::ellipsis>;
using ArrayInfo = nb::typed<nb::tuple, std::uintptr_t, IntTuple, IntTuple, std::size_t, bool>;

bool is_host_memory(int device_type) {
    return device_type == nb::device::cpu::value || device_type == nb::device::cuda_host::value ||
           device_type == nb::device::rocm_host::value;
}

/// Asks a producer without buffers for an export and drops it: only it can say why it refuses (a
/// tensor that requires a gradient, a device without memory), nanobind would not pass that on.
void ask_for_export(const nb::object& array) {
    const nb::object dlpack = array.attr("__dlpack__");
    try {
        dlpack("max_version"_a = nb::make_tuple(1, 0));
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_TypeError)) throw;
        dlpack();  // older than versioned exports
    }
}

void require_exportable(const nb::object& array) {
    if (PyObject_CheckBuffer(array.ptr()) != 0 || !nb::hasattr(array, "__dlpack__")) return;
    try {
        ask_for_export(array);
    } catch (const nb::python_error& error) {
        if (!error.matches(PyExc_BufferError)) throw;
        throw nb::value_error(nb::str(error.value()).c_str());
    }
}

void require_described(const ReadableArray& array, const nb::object& source) {
    if (!array.is_valid()) {
        const std::string type = nb::type_name(source.type()).c_str();
        const auto text = "array must be numeric, with DLPack or the buffer protocol, got " + type;
        throw nb::type_error(text.c_str());
    }
    if (!is_host_memory(array.device_type())) {
        const std::string type = std::to_string(array.device_type());
        throw nb::value_error(("array must be in host memory, got DLPack device " + type).c_str());
    }
}

template <typename Item>
nb::tuple tuple_of(std::size_t count, Item item) {
    nb::list items;
    for (std::size_t i = 0; i < count; ++i) items.append(item(i));
    return nb::tuple(items);
}

nb::tuple strides_bytes_of(const ReadableArray& array) {
    const auto itemsize = static_cast<std::int64_t>(array.itemsize());
    return tuple_of(array.ndim(), [&](std::size_t i) { return array.stride(i) * itemsize; });
}

ArrayInfo array_info(const nb::object& source) {
    require_exportable(source);
    ReadableArray array;
    nb::try_cast(source, array, false);
    require_described(array, source);
    WritableArray writable;
    const bool is_writable = nb::try_cast(source, writable, false);
    const auto shape = tuple_of(array.ndim(), [&](std::size_t i) { return array.shape(i); });
    return nb::make_tuple(reinterpret_cast<std::uintptr_t>(array.data()), shape,
                          strides_bytes_of(array), array.itemsize(), is_writable);
}

}  // namespace

void bind_array_info(nb::module_& module) {
    module.def("array_info", &array_info, "array"_a.none(),
               "(address, shape, strides_bytes, itemsize, writable) of an array in host memory.");
}

}  // namespace ptstore::bind
