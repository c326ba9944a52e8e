// Internal: CRC-32C with the CPU's instructions. Only where available; registers are raw, that is
// not inverted.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptstore::detail {

bool crc32c_hardware_available();

/// Feeds `size` bytes into the register.
std::uint32_t crc32c_hardware_update(std::uint32_t raw, const std::uint8_t* data, std::size_t size);

/// a * b modulo P.
std::uint32_t crc32c_hardware_product(std::uint32_t a, std::uint32_t b);

/// Most words of each of the three streams that crc32c_hardware_joined takes: a block of 32 KiB is
/// then one pass over three long streams, which the CPU's own prefetching follows best.
inline constexpr std::size_t kCrc32cStreamWordsMax = 1408;

/// The register after three adjacent streams of `words` 8-byte words each, of which `first` began
/// with the register before them, the others with 0.
std::uint32_t crc32c_hardware_joined(std::uint64_t first, std::uint64_t second, std::uint64_t third,
                                     std::size_t words);

}  // namespace ptstore::detail
