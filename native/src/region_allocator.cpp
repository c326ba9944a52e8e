#include "ptstore/region_allocator.hpp"

#include <bit>
#include <iterator>
#include <stdexcept>
#include <string>

namespace ptstore {
namespace {

std::string extent(std::uint64_t offset, std::uint64_t nbytes) {
    return "extent (offset " + std::to_string(offset) + ", " + std::to_string(nbytes) + " bytes)";
}

}  // namespace

RegionAllocator::RegionAllocator(std::uint64_t capacity_bytes, std::uint64_t alignment_bytes)
    : alignment_bytes_(alignment_bytes) {
    if (!std::has_single_bit(alignment_bytes)) {
        throw std::invalid_argument("alignment_bytes must be a power of two, got " +
                                    std::to_string(alignment_bytes));
    }
    if (capacity_bytes != 0) grow(capacity_bytes);
}

std::optional<std::uint64_t> RegionAllocator::allocate(std::uint64_t nbytes) {
    if (nbytes == 0) throw std::invalid_argument("nbytes must be at least 1, got 0");
    if (nbytes > free_bytes_) return std::nullopt;  // also keeps the rounding from overflowing
    const std::uint64_t size = (nbytes + alignment_bytes_ - 1) & ~(alignment_bytes_ - 1);
    const auto best = free_by_size_.lower_bound({size, 0});
    if (best == free_by_size_.end()) return std::nullopt;
    const auto [free_size, offset] = *best;
    erase_extent(free_by_offset_.find(offset));
    if (free_size > size) insert_extent(offset + size, free_size - size);
    return offset;
}

void RegionAllocator::release(std::uint64_t offset, std::uint64_t nbytes) {
    if (nbytes == 0 || !is_aligned(offset) || !is_aligned(nbytes)) {
        throw std::invalid_argument(extent(offset, nbytes) +
                                    " must not be empty and be aligned to " +
                                    std::to_string(alignment_bytes_) + " bytes");
    }
    if (offset > capacity_bytes_ || nbytes > capacity_bytes_ - offset) {
        throw std::invalid_argument(extent(offset, nbytes) + " exceeds the capacity of " +
                                    std::to_string(capacity_bytes_) + " bytes");
    }
    // The last free extent that begins before our end must end before our begin.
    const auto after = free_by_offset_.lower_bound(offset + nbytes);
    if (after != free_by_offset_.begin()) {
        const auto& [free_offset, free_size] = *std::prev(after);
        if (free_offset + free_size > offset) {
            throw std::invalid_argument(extent(offset, nbytes) + " is already free: " +
                                        extent(free_offset, free_size) + " is");
        }
    }
    add_free(offset, nbytes);
}

void RegionAllocator::grow(std::uint64_t capacity_bytes) {
    if (capacity_bytes <= capacity_bytes_) {
        throw std::invalid_argument("capacity_bytes must grow beyond " +
                                    std::to_string(capacity_bytes_) + ", got " +
                                    std::to_string(capacity_bytes));
    }
    if (!is_aligned(capacity_bytes)) {
        throw std::invalid_argument("capacity_bytes must be a multiple of " +
                                    std::to_string(alignment_bytes_) + ", got " +
                                    std::to_string(capacity_bytes));
    }
    const std::uint64_t old_bytes = capacity_bytes_;
    capacity_bytes_ = capacity_bytes;
    add_free(old_bytes, capacity_bytes - old_bytes);
}

std::uint64_t RegionAllocator::largest_free_bytes() const {
    return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

void RegionAllocator::add_free(std::uint64_t offset, std::uint64_t nbytes) {
    const auto after = free_by_offset_.find(offset + nbytes);
    if (after != free_by_offset_.end()) {
        nbytes += after->second;
        erase_extent(after);
    }
    const auto above = free_by_offset_.lower_bound(offset);
    if (above != free_by_offset_.begin()) {
        const auto before = std::prev(above);
        if (before->first + before->second == offset) {
            offset = before->first;
            nbytes += before->second;
            erase_extent(before);
        }
    }
    insert_extent(offset, nbytes);
}

void RegionAllocator::insert_extent(std::uint64_t offset, std::uint64_t nbytes) {
    free_by_offset_.emplace(offset, nbytes);
    free_by_size_.emplace(nbytes, offset);
    free_bytes_ += nbytes;
}

void RegionAllocator::erase_extent(ByOffset::iterator extent) {
    free_bytes_ -= extent->second;
    free_by_size_.erase({extent->second, extent->first});
    free_by_offset_.erase(extent);
}

}  // namespace ptstore
