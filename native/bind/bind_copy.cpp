#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <memory>
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

using Checksums = std::optional<Array<std::uint32_t>>;

/// Calls copy(memory, blocks, checksums) without the GIL, the last empty unless wanted.
template <typename Byte, typename Copy>
Checksums copied(const TensorViews& views, std::span<Byte> memory, const SegmentBlocks& blocks,
                 bool wanted, Copy copy) {
    check_segment_blocks(blocks, views.bytes_per_block(), memory.size());
    const auto count = static_cast<std::size_t>(wanted ? blocks.block_count : 0);
    auto values = std::make_unique<std::uint32_t[]>(count);
    {
        const nb::gil_scoped_release unlocked;
        copy(memory, blocks, std::span(values.get(), count));
    }
    if (!wanted) return {};
    return array_owning<std::uint32_t, nb::shape<-1>>(std::move(values), {count});
}

Checksums pack(CopyPool& pool, const TensorViews& views, const Array<std::uint8_t>& memory,
               std::int64_t view_block, std::int64_t block_count, std::int64_t offset,
               std::int64_t segment_blocks, std::int64_t segment_block, bool checksums) {
    const SegmentBlocks blocks{offset, segment_blocks, segment_block, block_count};
    return copied(views, std::as_writable_bytes(span_of(memory)), blocks, checksums,
                  [&](auto bytes, auto where, auto sums) {
                      pool.pack(views, bytes, view_block, where, sums);
                  });
}

Checksums unpack(CopyPool& pool, const TensorViews& views, const Array<const std::uint8_t>& memory,
                 std::int64_t view_block, std::int64_t block_count, std::int64_t offset,
                 std::int64_t segment_blocks, std::int64_t segment_block, bool checksums) {
    const SegmentBlocks blocks{offset, segment_blocks, segment_block, block_count};
    return copied(views, std::as_bytes(span_of(memory)), blocks, checksums,
                  [&](auto bytes, auto where, auto sums) {
                      pool.unpack(views, bytes, view_block, where, sums);
                  });
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
             "checksums"_a = false,
             "Copy blocks of the views into the segment image at memory[offset:]; return the "
             "CRC-32C of each block, as block_checksums does, or None where not asked for.")
        .def("unpack", &unpack, "views"_a, "memory"_a.noconvert(), nb::kw_only(), "view_block"_a,
             "block_count"_a, "offset"_a, "segment_blocks"_a, "segment_block"_a,
             "checksums"_a = false,
             "Copy blocks of the segment image at memory[offset:] into the views; return as pack.")
        .def_prop_ro("thread_count", &CopyPool::thread_count,
                     "Threads that copy, caller included.");
}

}  // namespace ptstore::bind
