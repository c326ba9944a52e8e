#include "streaming_copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ptstore::detail {

#if defined(__x86_64__)

bool streaming_copy_available() {
    static const bool available = __builtin_cpu_supports("avx") != 0;
    return available;
}

__attribute__((target("avx"))) void streaming_copy(std::byte* to, const std::byte* from,
                                                   std::size_t bytes) {
    constexpr std::size_t kLine = 64;
    const std::size_t misaligned = -reinterpret_cast<std::uintptr_t>(to) % kLine;
    const std::size_t head = std::min(misaligned, bytes);
    if (head != 0) std::memcpy(to, from, head);
    std::size_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
        const auto* line = reinterpret_cast<const __m256i*>(from + at);
        const __m256i low = _mm256_loadu_si256(line);
        const __m256i high = _mm256_loadu_si256(line + 1);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), low);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at) + 1, high);
    }
    if (at != bytes) std::memcpy(to + at, from + at, bytes - at);
}

void streaming_copy_fence() { _mm_sfence(); }

#else

bool streaming_copy_available() { return false; }

void streaming_copy(std::byte* to, const std::byte* from, std::size_t bytes) {
    std::memcpy(to, from, bytes);
}

void streaming_copy_fence() {}

#endif

}  // namespace ptstore::detail
