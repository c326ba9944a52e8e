#include "checked_copy.hpp"

#include <algorithm>
#include <cstring>

#include "checksum_hardware.hpp"
#include "ptstore/checksum.hpp"
#include "streaming_copy.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ptstore::detail {

std::uint32_t cached_checked_copy(std::byte* to, const std::byte* from, std::size_t bytes,
                                  std::uint32_t raw) {
    constexpr std::size_t kFirstCacheBytes = 8 * 1024;
    const auto* data = reinterpret_cast<const std::uint8_t*>(from);
    for (std::size_t at = 0; at < bytes; at += kFirstCacheBytes) {
        const std::size_t size = std::min(bytes - at, kFirstCacheBytes);
        std::memcpy(to + at, from + at, size);
        raw = ~crc32c({data + at, size}, ~raw);
    }
    return raw;
}

#if defined(__x86_64__)
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kLineWords = kLine / 8;

__attribute__((target("avx,sse4.2"))) inline std::uint64_t copy_line(std::byte* to,
                                                                     const std::byte* from,
                                                                     std::uint64_t raw) {
    const auto* line = reinterpret_cast<const __m256i*>(from);
    const __m256i low = _mm256_loadu_si256(line);
    const __m256i high = _mm256_loadu_si256(line + 1);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + 1, high);
    for (std::size_t i = 0; i < kLineWords; ++i) {
        std::uint64_t word;
        std::memcpy(&word, from + 8 * i, sizeof word);
        raw = _mm_crc32_u64(raw, word);
    }
    return raw;
}

/// Three adjacent streams of `lines` lines each, in turn: see checksum_hardware.cpp.
__attribute__((target("avx,sse4.2"))) std::uint32_t copy_streams(std::byte* to,
                                                                 const std::byte* from,
                                                                 std::size_t lines,
                                                                 std::uint32_t raw) {
    const std::size_t stream_bytes = lines * kLine;
    std::uint64_t first = raw;
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    std::uintptr_t ahead = reinterpret_cast<std::uintptr_t>(from) + 3 * stream_bytes;
    for (std::size_t at = 0; at < stream_bytes; at += kLine) {
        for (std::size_t i = 0; i < 3; ++i, ahead += kLine) {
            __builtin_prefetch(reinterpret_cast<const void*>(ahead));
        }
        first = copy_line(to + at, from + at, first);
        second = copy_line(to + stream_bytes + at, from + stream_bytes + at, second);
        third = copy_line(to + 2 * stream_bytes + at, from + 2 * stream_bytes + at, third);
    }
    return crc32c_hardware_joined(first, second, third, lines * kLineWords);
}

}  // namespace

bool streaming_checked_copy_available() {
    return streaming_copy_available() && crc32c_hardware_available();
}

std::uint32_t streaming_checked_copy(std::byte* to, const std::byte* from, std::size_t bytes,
                                     std::uint32_t raw) {
    const std::size_t misaligned = -reinterpret_cast<std::uintptr_t>(to) % kLine;
    std::size_t at = std::min(misaligned, bytes);
    raw = cached_checked_copy(to, from, at, raw);
    for (std::size_t left; (left = bytes - at) >= 3 * kLine;) {
        const std::size_t lines = std::min(left / (3 * kLine), kCrc32cStreamWordsMax / kLineWords);
        raw = copy_streams(to + at, from + at, lines, raw);
        at += 3 * lines * kLine;
    }
    return cached_checked_copy(to + at, from + at, bytes - at, raw);
}

#else

bool streaming_checked_copy_available() { return false; }

std::uint32_t streaming_checked_copy(std::byte* to, const std::byte* from, std::size_t bytes,
                                     std::uint32_t raw) {
    return cached_checked_copy(to, from, bytes, raw);
}

#endif

}  // namespace ptstore::detail
