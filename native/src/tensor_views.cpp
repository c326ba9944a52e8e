#include "ptstore/tensor_views.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace ptstore {
namespace {

void require_at_least(std::int64_t lowest, std::int64_t value, const char* name) {
    if (value >= lowest) return;
    throw std::invalid_argument(std::string(name) + " must be at least " + std::to_string(lowest) +
                                ", got " + std::to_string(value));
}

/// a * b, or std::invalid_argument naming what does not fit 63 bits.
std::int64_t checked_product(std::int64_t a, std::int64_t b, const char* name) {
    std::int64_t product = 0;
    if (!__builtin_mul_overflow(a, b, &product)) return product;
    throw std::invalid_argument(std::string(name) + " " + std::to_string(a) + " * " +
                                std::to_string(b) + " does not fit 63 bits");
}

void check_table(const TensorView& view, std::span<const std::int64_t> table) {
    if (table.size() != static_cast<std::uint64_t>(view.block_count)) {
        throw std::invalid_argument("block_table must have block_count " +
                                    std::to_string(view.block_count) + " entries, got " +
                                    std::to_string(table.size()));
    }
    for (const std::int64_t entry : table) require_at_least(0, entry, "block_table entries");
}

void check_shape(const TensorView& view) {
    require_at_least(0, view.block_count, "block_count");
    require_at_least(1, view.piece_count, "piece_count");
    require_at_least(1, view.piece_bytes, "piece_bytes");
    if (view.address == 0 && view.block_count > 0) {
        throw std::invalid_argument("address must not be 0 with " +
                                    std::to_string(view.block_count) + " blocks");
    }
    checked_product(view.piece_count, view.piece_bytes, "block_bytes");
    checked_product(view.piece_count, view.piece_stride, "piece_count * piece_stride");
}

}  // namespace

void TensorViews::append(TensorView view,
                         std::optional<std::span<const std::int64_t>> block_table) {
    check_shape(view);
    std::int64_t blocks = view.block_count;
    view.has_table = block_table.has_value();
    if (block_table) {
        check_table(view, *block_table);
        view.block_table.assign(block_table->begin(), block_table->end());
        for (const std::int64_t entry : view.block_table) blocks = std::max(blocks, entry);
    }
    checked_product(blocks, view.block_stride, "blocks * block_stride");
    if (view.piece_count > 1 && view.piece_stride == view.piece_bytes) {
        view.piece_bytes *= view.piece_count;
        view.piece_count = 1;
    }
    std::int64_t sum = 0;
    if (__builtin_add_overflow(bytes_per_block_, view.block_bytes(), &sum)) {
        throw std::invalid_argument("the sum of block_bytes does not fit 63 bits");
    }
    views_.push_back(std::move(view));
    bytes_per_block_ = sum;
}

std::vector<std::int64_t> TensorViews::block_bytes() const {
    std::vector<std::int64_t> result;
    result.reserve(views_.size());
    for (const TensorView& view : views_) result.push_back(view.block_bytes());
    return result;
}

}  // namespace ptstore
