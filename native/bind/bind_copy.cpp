#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings.hpp"
#include "ptstore/copy_pool.hpp"
#include "ptstore/tensor_views.hpp"

namespace ptstore::bind {
namespace {

using BlockTable = std::optional<Array<const std::int64_t>>;

void append(TensorViews& views, std::uint64_t address, std::int64_t block_count,
            std::int64_t block_stride, std::int64_t piece_count, std::int64_t piece_bytes,
            std::int64_t piece_stride, const BlockTable& block_table) {
    std::optional<std::span<const std::int64_t>> table;
    if (block_table) table = span_of(*block_table);
    views.append({address, block_count, block_stride, piece_count, piece_bytes, piece_stride},
                 table);
}

void pack(CopyPool& pool, const TensorViews& views, const Array<std::uint8_t>& memory,
          std::int64_t view_block, std::int64_t block_count, std::int64_t offset,
          std::int64_t segment_blocks, std::int64_t segment_block) {
    const nb::gil_scoped_release unlocked;
    pool.pack(views, std::as_writable_bytes(span_of(memory)), view_block,
              {offset, segment_blocks, segment_block, block_count});
}

void unpack(CopyPool& pool, const TensorViews& views, const Array<const std::uint8_t>& memory,
            std::int64_t view_block, std::int64_t block_count, std::int64_t offset,
            std::int64_t segment_blocks, std::int64_t segment_block) {
    const nb::gil_scoped_release unlocked;
    pool.unpack(views, std::as_bytes(span_of(memory)), view_block,
                {offset, segment_blocks, segment_block, block_count});
}

}  // namespace

void bind_copy(nb::module_& module) {
    nb::class_<TensorViews>(module, "TensorViews",
                            "Where an engine keeps the tensors of a layout, in layout order. "
                            "The caller keeps their memory alive.")
        .def(nb::init<>())
        .def("append", &append, "address"_a, nb::kw_only(), "block_count"_a, "block_stride"_a,
             "piece_count"_a, "piece_bytes"_a, "piece_stride"_a,
             "block_table"_a.noconvert() = nb::none(), "Add the next tensor; the table is copied.")
        .def("__len__", &TensorViews::size)
        .def_prop_ro("block_bytes", &TensorViews::block_bytes, "Bytes of a block, per tensor.");
    nb::class_<CopyPool>(module, "CopyPool",
                         "Copies between tensor views and segment images; the calling thread and "
                         "thread_count - 1 sleeping ones work. The GIL is released.")
        .def(nb::init<std::int64_t>(), "thread_count"_a)
        .def("pack", &pack, "views"_a, "memory"_a.noconvert(), nb::kw_only(), "view_block"_a,
             "block_count"_a, "offset"_a, "segment_blocks"_a, "segment_block"_a,
             "Copy blocks of the views into the segment image at memory[offset:].")
        .def("unpack", &unpack, "views"_a, "memory"_a.noconvert(), nb::kw_only(), "view_block"_a,
             "block_count"_a, "offset"_a, "segment_blocks"_a, "segment_block"_a,
             "Copy blocks of the segment image at memory[offset:] into the views.")
        .def_prop_ro("thread_count", &CopyPool::thread_count,
                     "Threads that copy, caller included.");
}

}  // namespace ptstore::bind
