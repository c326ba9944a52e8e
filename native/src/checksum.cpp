#include "ptstore/checksum.hpp"

#include <array>
#include <cassert>
#include <cstring>
#include <stdexcept>
#include <string>

#include "checksum_algebra.hpp"
#include "checksum_hardware.hpp"

namespace ptstore {
namespace {

using SlicingTables = std::array<std::array<std::uint32_t, 256>, 8>;

/// tables[k][b]: the register after byte b and k zero bytes.
constexpr SlicingTables make_tables() {
    SlicingTables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = detail::crc32c_times_x(value);
        tables[0][byte] = value;
    }
    for (std::size_t k = 1; k < tables.size(); ++k) {
        for (std::size_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t value = tables[k - 1][byte];
            tables[k][byte] = (value >> 8) ^ tables[0][value & 0xff];
        }
    }
    return tables;
}
constexpr SlicingTables kTables = make_tables();

std::uint32_t portable_update(std::uint32_t raw, const std::uint8_t* data, std::size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        std::uint64_t word;
        std::memcpy(&word, data, sizeof word);  // little-endian, asserted in block_hash.cpp
        word ^= raw;
        raw = 0;
        for (std::size_t i = 0; i < 8; ++i) raw ^= kTables[7 - i][(word >> (8 * i)) & 0xff];
    }
    for (; size > 0; ++data, --size) raw = (raw >> 8) ^ kTables[0][(raw ^ *data) & 0xff];
    return raw;
}

std::string number(std::int64_t value) { return std::to_string(value); }

std::int64_t sum_of_block_bytes(std::span<const std::int64_t> block_bytes) {
    std::int64_t sum = 0;
    for (const std::int64_t bytes : block_bytes) {
        if (bytes < 1) {
            throw std::invalid_argument("block_bytes must be at least 1, got " + number(bytes));
        }
        if (__builtin_add_overflow(sum, bytes, &sum)) {
            throw std::invalid_argument("the sum of block_bytes does not fit 63 bits");
        }
    }
    return sum;
}

}  // namespace

std::uint32_t crc32c_portable(std::span<const std::uint8_t> data, std::uint32_t initial) {
    return ~portable_update(~initial, data.data(), data.size());
}

bool crc32c_uses_hardware() { return detail::crc32c_hardware_available(); }

std::uint32_t crc32c(std::span<const std::uint8_t> data, std::uint32_t initial) {
    if (!crc32c_uses_hardware()) return crc32c_portable(data, initial);
    return ~detail::crc32c_hardware_update(~initial, data.data(), data.size());
}

void check_segment_blocks(const SegmentBlocks& blocks, std::int64_t bytes_per_block,
                          std::size_t memory_bytes) {
    const auto require_natural = [](std::int64_t value, const char* name) {
        if (value < 0) {
            throw std::invalid_argument(std::string(name) + " must be at least 0, got " +
                                        number(value));
        }
    };
    require_natural(blocks.offset, "offset");
    require_natural(blocks.segment_blocks, "segment_blocks");
    require_natural(blocks.segment_block, "segment_block");
    require_natural(blocks.block_count, "block_count");
    if (blocks.segment_block > blocks.segment_blocks ||
        blocks.block_count > blocks.segment_blocks - blocks.segment_block) {
        throw std::invalid_argument("segment_block " + number(blocks.segment_block) +
                                    " + block_count " + number(blocks.block_count) +
                                    " exceeds segment_blocks " + number(blocks.segment_blocks));
    }
    std::int64_t end = 0;
    if (__builtin_mul_overflow(blocks.segment_blocks, bytes_per_block, &end) ||
        __builtin_add_overflow(end, blocks.offset, &end) ||
        static_cast<std::uint64_t>(end) > memory_bytes) {
        throw std::invalid_argument("offset " + number(blocks.offset) + " + segment_blocks " +
                                    number(blocks.segment_blocks) + " of " +
                                    number(bytes_per_block) + " bytes exceeds memory of " +
                                    std::to_string(memory_bytes) + " bytes");
    }
}

SegmentChecksums::SegmentChecksums(std::span<const std::uint8_t> memory,
                                   std::span<const std::int64_t> block_bytes,
                                   const SegmentBlocks& blocks)
    : memory_(memory), block_bytes_(block_bytes), blocks_(blocks) {
    check_segment_blocks(blocks, sum_of_block_bytes(block_bytes), memory.size());
}

void SegmentChecksums::compute(std::span<std::uint32_t> out) const {
    assert(out.size() == size());
    const std::uint8_t* tensor = memory_.data() + blocks_.offset;
    for (std::uint32_t& checksum : out) checksum = 0;
    for (const std::int64_t bytes : block_bytes_) {
        const std::uint8_t* piece = tensor + blocks_.segment_block * bytes;
        for (std::uint32_t& checksum : out) {
            checksum = crc32c({piece, static_cast<std::size_t>(bytes)}, checksum);
            piece += bytes;
        }
        tensor += blocks_.segment_blocks * bytes;
    }
}

}  // namespace ptstore
