#include "checksum_algebra.hpp"

#include <array>

#include "checksum_hardware.hpp"

namespace ptstore::detail {
namespace {

/// powers[k] = x^(8 * 2^k) modulo P.
constexpr std::array<std::uint32_t, 63> make_powers() {
    std::array<std::uint32_t, 63> powers{};
    powers[0] = 0x80000000 >> 8;
    for (std::size_t k = 1; k < powers.size(); ++k) {
        powers[k] = crc32c_product_portable(powers[k - 1], powers[k - 1]);
    }
    return powers;
}
constexpr auto kPowers = make_powers();

}  // namespace

std::uint32_t crc32c_product(std::uint32_t a, std::uint32_t b) {
    return crc32c_hardware_available() ? crc32c_hardware_product(a, b)
                                       : crc32c_product_portable(a, b);
}

std::uint32_t crc32c_shift(std::uint64_t bytes) {
    std::uint32_t shift = 0x80000000;  // x^0
    for (std::size_t k = 0; bytes != 0; ++k, bytes >>= 1) {
        if ((bytes & 1) != 0) shift = crc32c_product(shift, kPowers[k]);
    }
    return shift;
}

}  // namespace ptstore::detail
