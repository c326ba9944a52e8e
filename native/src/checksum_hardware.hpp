// Internal: CRC-32C with the CPU's instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptstore::detail {

inline constexpr std::uint32_t kCrc32cPolynomial = 0x82f63b78;  // reflected: bit 31 is x^0

bool crc32c_hardware_available();

/// Feeds `size` bytes into the raw (not inverted) register; only where available.
std::uint32_t crc32c_hardware_update(std::uint32_t raw, const std::uint8_t* data, std::size_t size);

}  // namespace ptstore::detail
