// Free space of an arena: which byte ranges are taken, never the bytes themselves.
//
// Owns offsets 0 .. capacity_bytes; knows no memory, no owner and no time. Not thread-safe.
// Invariants:
//   - every offset and size is a multiple of the alignment;
//   - free extents are disjoint and never adjacent (neighbours coalesce);
//   - both orders hold the same extents; free_bytes is their sum;
//   - deterministic: the smallest extent that fits, the lowest of equals, is cut at its front.
// Cost: O(log n) in the number of free extents for every call.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace ptstore {

class RegionAllocator {
  public:
    /// Throws std::invalid_argument unless alignment is a power of two that divides capacity.
    explicit RegionAllocator(std::uint64_t capacity_bytes, std::uint64_t alignment_bytes = 4096);

    /// Offset of `nbytes` rounded up to the alignment; nullopt when no free extent is that large.
    std::optional<std::uint64_t> allocate(std::uint64_t nbytes);

    /// Frees an aligned part of allocated space, whichever calls allocated it.
    /// Throws std::invalid_argument, with nothing changed, when the range is empty, unaligned,
    /// beyond the capacity or already free in any part.
    void release(std::uint64_t offset, std::uint64_t nbytes);

    /// Adds the space between the old and the new, larger capacity.
    void grow(std::uint64_t capacity_bytes);

    std::uint64_t capacity_bytes() const { return capacity_bytes_; }
    std::uint64_t alignment_bytes() const { return alignment_bytes_; }
    std::uint64_t free_bytes() const { return free_bytes_; }
    std::uint64_t largest_free_bytes() const;

  private:
    using ByOffset = std::map<std::uint64_t, std::uint64_t>;  // offset -> size

    bool is_aligned(std::uint64_t value) const { return (value & (alignment_bytes_ - 1)) == 0; }
    void add_free(std::uint64_t offset, std::uint64_t nbytes);
    void insert_extent(std::uint64_t offset, std::uint64_t nbytes);
    void erase_extent(ByOffset::iterator extent);

    std::uint64_t capacity_bytes_ = 0;
    std::uint64_t alignment_bytes_;
    std::uint64_t free_bytes_ = 0;
    ByOffset free_by_offset_;
    std::set<std::pair<std::uint64_t, std::uint64_t>> free_by_size_;  // (size, offset)
};

}  // namespace ptstore
