// Where an engine keeps the tensors of a layout, in layout order.
//
// Owns copies of the block tables; borrows the memory of the tensors, which the caller keeps
// alive. Never reads or writes that memory.
//   block i begins at  address + (table ? table[i] : i) * block_stride
//   its piece j at     + j * piece_stride, of piece_bytes; block_bytes = piece_count * piece_bytes
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ptstore {

struct TensorView {
    std::uint64_t address = 0;
    std::int64_t block_count = 0;  // logical blocks; the length of the table where there is one
    std::int64_t block_stride = 0;
    std::int64_t piece_count = 0;
    std::int64_t piece_bytes = 0;
    std::int64_t piece_stride = 0;
    std::vector<std::int64_t> block_table = {};
    bool has_table = false;

    std::int64_t block_bytes() const { return piece_count * piece_bytes; }
    /// A block is one range of memory.
    bool is_dense() const { return piece_count == 1; }
    std::byte* block(std::int64_t index) const {
        const std::int64_t physical =
            has_table ? block_table[static_cast<std::size_t>(index)] : index;
        return reinterpret_cast<std::byte*>(address) + physical * block_stride;
    }
};

class TensorViews {
  public:
    /// Adds the next tensor; `block_table` is copied. Pieces that touch become one.
    /// Throws std::invalid_argument, with nothing added, when a count or size is below 1, a table
    /// has another length than block_count or a negative entry, or an extent overflows.
    void append(TensorView view, std::optional<std::span<const std::int64_t>> block_table = {});

    std::size_t size() const { return views_.size(); }
    const TensorView& operator[](std::size_t tensor) const { return views_[tensor]; }
    std::vector<std::int64_t> block_bytes() const;
    /// Bytes of one block of all tensors.
    std::int64_t bytes_per_block() const { return bytes_per_block_; }

  private:
    std::vector<TensorView> views_;
    std::int64_t bytes_per_block_ = 0;
};

}  // namespace ptstore
