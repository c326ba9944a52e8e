#include "copy_stream.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "checksum_algebra.hpp"
#include "streaming_copy.hpp"

namespace ptstore::detail {
namespace {

// From here on a copy writes past the caches. Where both sides are in memory that gains a half at
// any size; where both are in the caches it loses a quarter until they are too small for it.
constexpr std::int64_t kStreamingBytesMin = 1024 * 1024;

void cached_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
}

/// How many blocks from `block` on, at most `limit`, follow each other in the view's memory.
std::int64_t adjacent_blocks(const TensorView& view, std::int64_t block, std::int64_t limit) {
    if (view.block_stride != view.block_bytes()) return 1;
    if (!view.has_table) return limit;
    const std::int64_t* table = view.block_table.data() + block;
    std::int64_t count = 1;
    while (count < limit && table[count] == table[count - 1] + 1) ++count;
    return count;
}

}  // namespace

CopyStream::CopyStream(const TensorViews& views, std::byte* memory, std::int64_t view_block,
                       const SegmentBlocks& blocks, Direction direction,
                       std::span<std::uint32_t> checksums)
    : view_block_(view_block), direction_(direction), checksums_(checksums) {
    parts_.reserve(views.size());
    std::byte* tensor = memory + blocks.offset;
    std::int64_t bytes_after = views.bytes_per_block();
    for (std::size_t i = 0; i < views.size(); ++i) {
        const std::int64_t block_bytes = views[i].block_bytes();
        total_bytes_ += blocks.block_count * block_bytes;
        bytes_after -= block_bytes;
        parts_.push_back({&views[i], tensor + blocks.segment_block * block_bytes, total_bytes_,
                          bytes_after, 0});
        tensor += blocks.segment_blocks * block_bytes;
    }
    const bool large = total_bytes_ >= kStreamingBytesMin;
    copy_bytes_ = large && streaming_copy_available() ? &streaming_copy : &cached_copy;
    checked_copy_ = large && streaming_checked_copy_available() ? &streaming_checked_copy
                                                                : &cached_checked_copy;
    if (checksums_.empty()) return;
    for (Part& part : parts_) {
        part.shift_after = crc32c_shift(static_cast<std::uint64_t>(part.bytes_after));
    }
    // A register begins with all bits set, and its inverse is the checksum.
    const auto block_bytes = static_cast<std::uint64_t>(views.bytes_per_block());
    std::ranges::fill(checksums_, ~crc32c_product(0xffffffff, crc32c_shift(block_bytes)));
}

void CopyStream::copy(std::int64_t begin, std::int64_t end) const {
    if (direction_ == Direction::kPack) {
        copy_parts<Direction::kPack>(begin, end);
    } else {
        copy_parts<Direction::kUnpack>(begin, end);
    }
    streaming_copy_fence();
}

template <Direction direction>
void CopyStream::copy_run(std::byte* view, std::byte* memory, std::int64_t bytes) const {
    const auto size = static_cast<std::size_t>(bytes);
    if constexpr (direction == Direction::kPack) {
        copy_bytes_(memory, view, size);
    } else {
        copy_bytes_(view, memory, size);
    }
}

template <Direction direction>
std::uint32_t CopyStream::run_checked(std::byte* view, std::byte* memory, std::int64_t bytes,
                                      std::uint32_t raw) const {
    const auto size = static_cast<std::size_t>(bytes);
    if constexpr (direction == Direction::kPack) {
        return checked_copy_(memory, view, size, raw);
    } else {
        return checked_copy_(view, memory, size, raw);
    }
}

template <Direction direction>
void CopyStream::copy_parts(std::int64_t begin, std::int64_t end) const {
    const auto ends_after = [](std::int64_t at, const Part& part) { return at < part.end; };
    auto part = std::upper_bound(parts_.begin(), parts_.end(), begin, ends_after);
    std::int64_t part_begin = part == parts_.begin() ? 0 : std::prev(part)->end;
    for (; begin < end; ++part) {
        const std::int64_t stop = std::min(end, part->end);
        if (!checksums_.empty()) {
            copy_checked<direction>(*part, begin - part_begin, stop - part_begin);
        } else if (part->view->is_dense()) {
            copy_dense<direction>(*part, begin - part_begin, stop - part_begin);
        } else {
            copy_pieces<direction>(*part, begin - part_begin, stop - part_begin);
        }
        part_begin = part->end;
        begin = stop;
    }
}

template <Direction direction>
void CopyStream::copy_dense(const Part& part, std::int64_t begin, std::int64_t end) const {
    const TensorView& view = *part.view;
    const std::int64_t block_bytes = view.block_bytes();
    std::int64_t block = begin / block_bytes;
    std::int64_t skip = begin % block_bytes;
    while (begin < end) {
        const std::int64_t limit = (skip + end - begin + block_bytes - 1) / block_bytes;
        const std::int64_t count = adjacent_blocks(view, view_block_ + block, limit);
        const std::int64_t bytes = std::min(count * block_bytes - skip, end - begin);
        copy_run<direction>(view.block(view_block_ + block) + skip, part.memory + begin, bytes);
        begin += bytes;
        block += count;
        skip = 0;
    }
}

template <Direction direction>
void CopyStream::copy_pieces(const Part& part, std::int64_t begin, std::int64_t end) const {
    const TensorView& view = *part.view;
    const std::int64_t piece_bytes = view.piece_bytes;
    std::int64_t block = begin / view.block_bytes();
    std::int64_t piece = begin % view.block_bytes() / piece_bytes;
    std::int64_t skip = begin % piece_bytes;
    for (; begin < end; ++block, piece = 0) {
        std::byte* source = view.block(view_block_ + block) + piece * view.piece_stride;
        for (; piece < view.piece_count && begin < end; ++piece) {
            const std::int64_t bytes = std::min(piece_bytes - skip, end - begin);
            copy_run<direction>(source + skip, part.memory + begin, bytes);
            begin += bytes;
            source += view.piece_stride;
            skip = 0;
        }
    }
}

template <Direction direction>
void CopyStream::copy_checked(const Part& part, std::int64_t begin, std::int64_t end) const {
    const TensorView& view = *part.view;
    const std::int64_t block_bytes = view.block_bytes();
    while (begin < end) {
        const std::int64_t block = begin / block_bytes;
        const std::int64_t stop = std::min((block + 1) * block_bytes, end);
        const std::int64_t piece = begin % block_bytes / view.piece_bytes;
        std::byte* source = view.block(view_block_ + block) + piece * view.piece_stride;
        std::int64_t skip = begin % view.piece_bytes;
        std::uint32_t raw = 0;
        while (begin < stop) {
            const std::int64_t bytes = std::min(view.piece_bytes - skip, stop - begin);
            raw = run_checked<direction>(source + skip, part.memory + begin, bytes, raw);
            begin += bytes;
            source += view.piece_stride;
            skip = 0;
        }
        add_to_checksum(part, begin, raw);
    }
}

/// Adds the register of the bytes of one block that end at `at` of the tensor.
void CopyStream::add_to_checksum(const Part& part, std::int64_t at, std::uint32_t raw) const {
    const std::int64_t block_bytes = part.view->block_bytes();
    const auto block = static_cast<std::size_t>((at - 1) / block_bytes);
    const std::int64_t left = (static_cast<std::int64_t>(block) + 1) * block_bytes - at;
    const std::uint32_t shift =
        left == 0 ? part.shift_after
                  : crc32c_shift(static_cast<std::uint64_t>(left + part.bytes_after));
    std::atomic_ref(checksums_[block])
        .fetch_xor(crc32c_product(raw, shift), std::memory_order_relaxed);
}

}  // namespace ptstore::detail
