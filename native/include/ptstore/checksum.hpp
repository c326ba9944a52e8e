// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78) of memory and of the blocks of a segment.
//
// Owns no state. Hardware and portable code give the same values; the CPU is asked once.
// A checksum can be continued: crc32c(b, crc32c(a)) == crc32c(a || b).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ptstore {

/// CRC-32C of `data`, continuing from the checksum `initial` of what came before (0: nothing).
std::uint32_t crc32c(std::span<const std::uint8_t> data, std::uint32_t initial = 0);

/// The same by table look-up alone.
std::uint32_t crc32c_portable(std::span<const std::uint8_t> data, std::uint32_t initial = 0);

/// True if crc32c() uses the CPU's own CRC-32C and carry-less multiplication here.
bool crc32c_uses_hardware();

/// Where the blocks of a segment lie in `memory`: tensor t begins at
/// offset + segment_blocks * sum(block_bytes[:t]), its block b at + b * block_bytes[t].
struct SegmentBlocks {
    std::int64_t offset;
    std::int64_t segment_blocks;
    std::int64_t segment_block;
    std::int64_t block_count;
};

/// Throws std::invalid_argument, naming the range, unless the blocks lie in the segment and the
/// segment in `memory_bytes` bytes of memory. `bytes_per_block` is the sum over the tensors.
void check_segment_blocks(const SegmentBlocks& blocks, std::int64_t bytes_per_block,
                          std::size_t memory_bytes);

/// One CRC-32C per block, chained over its pieces in tensor order. Borrows memory and sizes.
class SegmentChecksums {
  public:
    /// Throws std::invalid_argument, naming it, when a range does not fit.
    SegmentChecksums(std::span<const std::uint8_t> memory,
                     std::span<const std::int64_t> block_bytes, const SegmentBlocks& blocks);

    std::size_t size() const { return static_cast<std::size_t>(blocks_.block_count); }

    /// `out` must hold size() checksums.
    void compute(std::span<std::uint32_t> out) const;

  private:
    std::span<const std::uint8_t> memory_;
    std::span<const std::int64_t> block_bytes_;
    SegmentBlocks blocks_;
};

}  // namespace ptstore
