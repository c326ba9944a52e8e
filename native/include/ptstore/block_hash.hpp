// Block hashes: SipHash-2-4 with a 128-bit result, chained over the blocks of a prefix.
//
// Owns nothing and keeps no state: equal arguments give equal hashes on any machine and rank.
//   hash[i] = siphash128(seed, hash[i - 1] || tokens of block i as little-endian uint32)
//   hash[-1] = root, the digest of the namespace
// Source: Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, 128-bit variant.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ptstore {

using Hash128 = std::array<std::uint8_t, 16>;
static_assert(sizeof(Hash128) == 16 && alignof(Hash128) == 1);

/// SipHash-2-4-128 of `message` under `key`.
Hash128 siphash128(const Hash128& key, std::span<const std::uint8_t> message);

/// Hashes of the whole blocks of `tokens`; `out` must hold tokens.size() / block_tokens hashes.
/// Throws std::invalid_argument when block_tokens is 0 or `out` has another length.
void hash_blocks(std::span<const std::uint32_t> tokens, std::size_t block_tokens,
                 const Hash128& root, const Hash128& seed, std::span<Hash128> out);

}  // namespace ptstore
