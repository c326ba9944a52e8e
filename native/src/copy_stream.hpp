// Internal: one copy as a stream of bytes, in the order tensor, block, piece, byte. Any part of
// the stream can be copied by itself, so threads share a copy by bytes and no plan is stored. Where
// checksums are wanted each part adds its share to those of its blocks, in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "checked_copy.hpp"
#include "ptstore/checksum.hpp"
#include "ptstore/tensor_views.hpp"

namespace ptstore::detail {

enum class Direction { kPack, kUnpack };

class CopyStream {
  public:
    /// Ranges must have been checked. `memory` is not written when unpacking. `checksums` is empty
    /// or has one entry per block; it is right once the whole stream was copied.
    CopyStream(const TensorViews& views, std::byte* memory, std::int64_t view_block,
               const SegmentBlocks& blocks, Direction direction,
               std::span<std::uint32_t> checksums = {});

    std::int64_t total_bytes() const { return total_bytes_; }

    /// Copies bytes [begin, end) of the stream.
    void copy(std::int64_t begin, std::int64_t end) const;

  private:
    struct Part {
        const TensorView* view;
        std::byte* memory;  // of the first copied block of this tensor
        std::int64_t end;   // in the stream
        std::int64_t bytes_after;   // of a block, in the tensors that follow
        std::uint32_t shift_after;  // past these bytes
    };
    using CopyBytes = void (*)(std::byte* to, const std::byte* from, std::size_t bytes);

    template <Direction direction>
    void copy_parts(std::int64_t begin, std::int64_t end) const;
    template <Direction direction>
    void copy_dense(const Part& part, std::int64_t begin, std::int64_t end) const;
    template <Direction direction>
    void copy_pieces(const Part& part, std::int64_t begin, std::int64_t end) const;
    template <Direction direction>
    void copy_checked(const Part& part, std::int64_t begin, std::int64_t end) const;
    void add_to_checksum(const Part& part, std::int64_t at, std::uint32_t raw) const;
    template <Direction direction>
    void copy_run(std::byte* view, std::byte* memory, std::int64_t bytes) const;
    template <Direction direction>
    std::uint32_t run_checked(std::byte* view, std::byte* memory, std::int64_t bytes,
                              std::uint32_t raw) const;

    std::vector<Part> parts_;
    std::int64_t view_block_;
    std::int64_t total_bytes_ = 0;
    Direction direction_;
    CopyBytes copy_bytes_ = nullptr;
    CheckedCopy checked_copy_ = nullptr;
    std::span<std::uint32_t> checksums_;
};

}  // namespace ptstore::detail
