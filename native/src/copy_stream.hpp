// Internal: one copy as a stream of bytes, in the order tensor, block, piece, byte. Any part of
// the stream can be copied by itself, so threads share a copy by bytes and no plan is stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ptstore/checksum.hpp"
#include "ptstore/tensor_views.hpp"

namespace ptstore::detail {

enum class Direction { kPack, kUnpack };

class CopyStream {
  public:
    /// Ranges must have been checked. `memory` is not written when unpacking.
    CopyStream(const TensorViews& views, std::byte* memory, std::int64_t view_block,
               const SegmentBlocks& blocks, Direction direction);

    std::int64_t total_bytes() const { return total_bytes_; }

    /// Copies bytes [begin, end) of the stream.
    void copy(std::int64_t begin, std::int64_t end) const;

  private:
    struct Part {
        const TensorView* view;
        std::byte* memory;  // of the first copied block of this tensor
        std::int64_t end;   // in the stream
    };
    using CopyBytes = void (*)(std::byte* to, const std::byte* from, std::size_t bytes);

    template <Direction direction>
    void copy_parts(std::int64_t begin, std::int64_t end) const;
    template <Direction direction>
    void copy_dense(const Part& part, std::int64_t begin, std::int64_t end) const;
    template <Direction direction>
    void copy_pieces(const Part& part, std::int64_t begin, std::int64_t end) const;
    template <Direction direction>
    void copy_run(std::byte* view, std::byte* memory, std::int64_t bytes) const;

    std::vector<Part> parts_;
    std::int64_t view_block_;
    std::int64_t total_bytes_ = 0;
    Direction direction_;
    CopyBytes copy_bytes_ = nullptr;
};

}  // namespace ptstore::detail
