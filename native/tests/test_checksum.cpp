// CRC-32C: published values, hardware against portable at every length, parts, chained blocks.
#include <array>
#include <string_view>
#include <vector>

#include "../src/checksum_algebra.hpp"
#include "check.hpp"
#include "ptstore/checksum.hpp"

namespace {

using ptstore::crc32c;
using ptstore::crc32c_portable;
using ptstore::SegmentBlocks;
using ptstore::SegmentChecksums;
using ptstore::test::Random;

std::vector<std::uint8_t> random_bytes(std::size_t size) {
    Random random(3);
    std::vector<std::uint8_t> bytes(size);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random.word());
    return bytes;
}

void check_both(std::span<const std::uint8_t> data, std::uint32_t expected) {
    CHECK(crc32c(data) == expected);
    CHECK(crc32c_portable(data) == expected);
}

/// RFC 3720 appendix B.4, and the check value of the CRC catalogues.
void published_values() {
    const std::string_view digits = "123456789";
    check_both({reinterpret_cast<const std::uint8_t*>(digits.data()), digits.size()}, 0xe3069283);
    std::vector<std::uint8_t> data(32, 0);
    check_both(data, 0x8a9136aa);
    data.assign(32, 0xff);
    check_both(data, 0x62a8ab43);
    for (std::uint8_t i = 0; i < 32; ++i) data[i] = i;
    check_both(data, 0x46dd794e);
    for (std::uint8_t i = 0; i < 32; ++i) data[i] = static_cast<std::uint8_t>(31 - i);
    check_both(data, 0x113fdb5c);
    check_both({}, 0);
}

void hardware_equals_portable() {
    const std::vector<std::uint8_t> data = random_bytes(40'000);
    const std::span<const std::uint8_t> all(data);
    for (std::size_t size = 0; size < 600; ++size) {
        for (std::size_t begin = 0; begin < 8; ++begin) {
            const auto part = all.subspan(begin, size);
            CHECK(crc32c(part, 0x1234) == crc32c_portable(part, 0x1234));
        }
    }
    for (std::size_t size = 600; size < data.size(); size += 131) {
        CHECK(crc32c(all.first(size)) == crc32c_portable(all.first(size)));
    }
}

void continues() {
    const std::vector<std::uint8_t> data = random_bytes(5000);
    const std::span<const std::uint8_t> all(data);
    for (std::size_t cut = 0; cut <= data.size(); cut += 97) {
        CHECK(crc32c(all.subspan(cut), crc32c(all.first(cut))) == crc32c(all));
    }
}

void parts_in_any_order() {
    using namespace ptstore::detail;
    const std::vector<std::uint8_t> data = random_bytes(5000);
    const std::span<const std::uint8_t> all(data);
    for (std::size_t cut = 0; cut <= data.size(); cut += 61) {
        const std::uint32_t before = ~crc32c(all.first(cut), 0xffffffff);
        const std::uint32_t after = ~crc32c(all.subspan(cut), 0xffffffff);
        const std::uint32_t start = crc32c_product(0xffffffff, crc32c_shift(data.size()));
        const std::uint32_t moved = crc32c_product(before, crc32c_shift(data.size() - cut));
        CHECK(~(start ^ moved ^ after) == crc32c(all));
        CHECK(moved == crc32c_product_portable(before, crc32c_shift(data.size() - cut)));
    }
}

void blocks_of_a_segment() {
    const std::array<std::int64_t, 3> block_bytes{40, 8, 300};
    const std::int64_t segment_blocks = 5;
    const std::int64_t offset = 17;
    const std::vector<std::uint8_t> memory = random_bytes(17 + 5 * 348);
    const SegmentChecksums sums(memory, block_bytes, {offset, segment_blocks, 1, 3});
    std::vector<std::uint32_t> found(sums.size());
    sums.compute(found);
    for (std::int64_t block = 0; block < 3; ++block) {
        std::vector<std::uint8_t> joined;
        auto tensor = memory.begin() + offset;
        for (const std::int64_t bytes : block_bytes) {
            const auto piece = tensor + (1 + block) * bytes;
            joined.insert(joined.end(), piece, piece + bytes);
            tensor += segment_blocks * bytes;
        }
        CHECK(found[static_cast<std::size_t>(block)] == crc32c_portable(joined));
    }
}

void refusals() {
    const std::vector<std::uint8_t> memory(100);
    const std::array<std::int64_t, 1> ten{10};
    const std::array<std::int64_t, 2> bad{10, 0};
    const std::array<std::int64_t, 2> huge{INT64_MAX, 1};
    const auto sums = [&](std::span<const std::int64_t> bytes, SegmentBlocks blocks) {
        return SegmentChecksums(memory, bytes, blocks).size();
    };
    CHECK(sums(ten, {0, 10, 0, 10}) == 10);
    CHECK_THROWS(sums(ten, {1, 10, 0, 10}), "exceeds memory");
    CHECK_THROWS(sums(ten, {0, 10, 1, 10}), "exceeds segment_blocks");
    CHECK_THROWS(sums(ten, {0, 10, 11, 0}), "exceeds segment_blocks");
    CHECK_THROWS(sums(ten, {-1, 10, 0, 10}), "offset");
    CHECK_THROWS(sums(ten, {0, 10, 0, -1}), "block_count");
    CHECK_THROWS(sums(ten, {0, INT64_MAX, 0, 1}), "exceeds memory");
    CHECK_THROWS(sums(bad, {0, 1, 0, 1}), "block_bytes");
    CHECK_THROWS(sums(huge, {0, 1, 0, 1}), "63 bits");
}

}  // namespace

int main() {
    std::printf("hardware checksum: %s\n", ptstore::crc32c_uses_hardware() ? "yes" : "no");
    published_values();
    hardware_equals_portable();
    continues();
    parts_in_any_order();
    blocks_of_a_segment();
    refusals();
}
