// Three independent streams hide the latency of the crc32 instruction (3 cycles, 1 per cycle);
// a carry-less multiplication then moves the first two past the bytes that follow them.
#include "checksum_hardware.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "checksum_algebra.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#include <wmmintrin.h>
#endif

namespace ptstore::detail {

#if defined(__x86_64__)
namespace {

constexpr std::size_t kStreamWordsMin = 8;  // shorter streams do not repay the multiplication

/// kShift[n] = x^(64 n - 33) mod P: shift(crc, n words) == crc32(0, crc (x) kShift[n]), because
/// the carry-less product of two reflected 32-bit values carries a factor x in 64 bits, and the
/// instruction multiplies by x^32.
constexpr std::array<std::uint32_t, 2 * kCrc32cStreamWordsMax + 1> make_shifts() {
    std::array<std::uint32_t, 2 * kCrc32cStreamWordsMax + 1> shifts{};
    std::uint32_t power = 1;  // x^31
    for (std::size_t words = 1; words < shifts.size(); ++words) {
        shifts[words] = power;
        for (int i = 0; i < 64; ++i) power = crc32c_times_x(power);
    }
    return shifts;
}
constexpr auto kShift = make_shifts();

/// x^-66 mod P: takes back the factor x^33 of two steps as above.
constexpr std::uint32_t make_unshift() {
    std::uint32_t power = 0x80000000;
    for (int i = 0; i < 66; ++i) {
        const bool carried = (power & 0x80000000) != 0;  // as in the polynomial, and only then
        power = ((carried ? power ^ kCrc32cPolynomial : power) << 1) | (carried ? 1 : 0);
    }
    return power;
}
constexpr std::uint32_t kUnshift = make_unshift();

std::uint64_t load_word(const std::uint8_t* data) {
    std::uint64_t word;
    std::memcpy(&word, data, sizeof word);
    return word;
}

__attribute__((target("sse4.2,pclmul"))) std::uint64_t multiply(std::uint64_t crc,
                                                                std::uint32_t factor) {
    const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                                                 _mm_cvtsi32_si128(static_cast<int>(factor)), 0);
    return static_cast<std::uint64_t>(_mm_cvtsi128_si64(product));
}

/// Three adjacent streams of `words` words each; advances past them.
__attribute__((target("sse4.2,pclmul"))) std::uint64_t update_streams(std::uint64_t raw,
                                                                      const std::uint8_t* data,
                                                                      std::size_t words) {
    const std::size_t stream_bytes = words * 8;
    std::uint64_t first = raw;
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    // Asks for the next three streams meanwhile: without that, memory feeds half as fast. The
    // address is a number because it may lie past the end, where a prefetch does nothing.
    std::uintptr_t ahead = reinterpret_cast<std::uintptr_t>(data) + 3 * stream_bytes;
    for (const std::uint8_t* end = data + stream_bytes; data != end; data += 8) {
        __builtin_prefetch(reinterpret_cast<const void*>(ahead));
        ahead += 24;
        first = _mm_crc32_u64(first, load_word(data));
        second = _mm_crc32_u64(second, load_word(data + stream_bytes));
        third = _mm_crc32_u64(third, load_word(data + 2 * stream_bytes));
    }
    return crc32c_hardware_joined(first, second, third, words);
}

}  // namespace

bool crc32c_hardware_available() {
    static const bool available =
        __builtin_cpu_supports("sse4.2") != 0 && __builtin_cpu_supports("pclmul") != 0;
    return available;
}

__attribute__((target("sse4.2,pclmul"))) std::uint32_t crc32c_hardware_joined(
    std::uint64_t first, std::uint64_t second, std::uint64_t third, std::size_t words) {
    const std::uint64_t moved =
        multiply(first, kShift[2 * words]) ^ multiply(second, kShift[words]);
    return static_cast<std::uint32_t>(third ^ _mm_crc32_u64(0, moved));
}

__attribute__((target("sse4.2,pclmul"))) std::uint32_t crc32c_hardware_product(std::uint32_t a,
                                                                               std::uint32_t b) {
    const std::uint64_t shifted = _mm_crc32_u64(0, multiply(a, b));
    return static_cast<std::uint32_t>(_mm_crc32_u64(0, multiply(shifted, kUnshift)));
}

__attribute__((target("sse4.2,pclmul"))) std::uint32_t crc32c_hardware_update(
    std::uint32_t raw, const std::uint8_t* data, std::size_t size) {
    std::uint64_t crc = raw;
    while (size >= 3 * 8 * kStreamWordsMin) {
        const std::size_t words = std::min(size / 24, kCrc32cStreamWordsMax);
        crc = update_streams(crc, data, words);
        data += words * 24;
        size -= words * 24;
    }
    for (; size >= 8; data += 8, size -= 8) crc = _mm_crc32_u64(crc, load_word(data));
    auto narrow = static_cast<std::uint32_t>(crc);
    for (; size > 0; ++data, --size) narrow = _mm_crc32_u8(narrow, *data);
    return narrow;
}

#else

bool crc32c_hardware_available() { return false; }

std::uint32_t crc32c_hardware_update(std::uint32_t raw, const std::uint8_t*, std::size_t) {
    return raw;  // never called, nor what follows: see crc32c_hardware_available
}

std::uint32_t crc32c_hardware_product(std::uint32_t a, std::uint32_t) { return a; }

std::uint32_t crc32c_hardware_joined(std::uint64_t, std::uint64_t, std::uint64_t, std::size_t) {
    return 0;
}

#endif

}  // namespace ptstore::detail
