// What the parts of the module share: argument types and their adaptation. No logic.
//
// Every array argument is bound with .noconvert(): another dtype, a gap between elements or
// another device is a TypeError, never a silent copy.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "ptstore/block_hash.hpp"

namespace ptstore::bind {

namespace nb = nanobind;
using nb::literals::operator""_a;

template <typename T, typename Shape = nb::shape<-1>>
using Array = nb::ndarray<T, nb::numpy, Shape, nb::c_contig, nb::device::cpu>;
using HashArray = Array<const std::uint8_t, nb::shape<-1, 16>>;

template <typename T>
std::span<T> span_of(const Array<T>& array) {
    return {array.data(), array.size()};
}

inline std::span<const Hash128> hashes_of(const HashArray& array) {
    return {reinterpret_cast<const Hash128*>(array.data()), array.shape(0)};
}

inline std::span<const std::uint8_t> span_of(const nb::bytes& bytes) {
    return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

inline Hash128 hash_of(const nb::bytes& bytes, const char* name) {
    Hash128 hash;
    if (bytes.size() != hash.size()) {
        throw std::invalid_argument(std::string(name) + " must be 16 bytes, got " +
                                    std::to_string(bytes.size()));
    }
    std::ranges::copy(span_of(bytes), hash.begin());
    return hash;
}

/// Hands `values` to Python as an array that owns them.
template <typename T, typename Shape, typename Value>
Array<T, Shape> array_owning(std::unique_ptr<Value[]> values, std::initializer_list<size_t> shape) {
    Value* const data = values.get();
    const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<Value*>(p); });
    static_cast<void>(values.release());
    return Array<T, Shape>(data, shape, owner);
}

void bind_hash(nb::module_& module);
void bind_checksum(nb::module_& module);
void bind_index(nb::module_& module);
void bind_allocator(nb::module_& module);
void bind_eviction(nb::module_& module);
void bind_copy(nb::module_& module);
void bind_array_info(nb::module_& module);

}  // namespace ptstore::bind
