// Internal: CRC-32C registers as polynomials modulo P, so that the checksum of a whole can be put
// together from its parts in any order:
//   register(a || b) from 0  ==  register(a) * x^(8 |b|)  xor  register(b)
#pragma once

#include <cstdint>

namespace ptstore::detail {

inline constexpr std::uint32_t kCrc32cPolynomial = 0x82f63b78;  // reflected: bit 31 is x^0

constexpr std::uint32_t crc32c_times_x(std::uint32_t value) {
    return (value >> 1) ^ ((value & 1) != 0 ? kCrc32cPolynomial : 0);
}

constexpr std::uint32_t crc32c_product_portable(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (int bit = 31; bit >= 0; --bit) {
        product ^= b & (0 - ((a >> bit) & 1));
        b = crc32c_times_x(b);
    }
    return product;
}

/// a * b modulo P.
std::uint32_t crc32c_product(std::uint32_t a, std::uint32_t b);

/// x^(8 bytes) modulo P: times this, a register has moved past so many bytes.
std::uint32_t crc32c_shift(std::uint64_t bytes);

}  // namespace ptstore::detail
