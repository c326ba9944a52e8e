#include "ptstore/block_hash.hpp"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ptstore {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tokens and hash words are read from memory as little-endian");

std::uint64_t load_word(const std::uint8_t* bytes) {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

class SipState {
  public:
    explicit SipState(const Hash128& key) {
        const std::uint64_t k0 = load_word(key.data());
        const std::uint64_t k1 = load_word(key.data() + 8);
        v0_ = k0 ^ 0x736f6d6570736575ULL;
        v1_ = k1 ^ 0x646f72616e646f6dULL ^ 0xee;  // 0xee marks the 128-bit variant
        v2_ = k0 ^ 0x6c7967656e657261ULL;
        v3_ = k1 ^ 0x7465646279746573ULL;
    }

    void absorb(std::uint64_t word) {
        v3_ ^= word;
        round();
        round();
        v0_ ^= word;
    }

    /// Absorbs the last `bytes` of a message of `total` bytes, padded with the length.
    void absorb_tail(std::span<const std::uint8_t> bytes, std::size_t total) {
        std::size_t at = 0;
        for (; at + 8 <= bytes.size(); at += 8) absorb(load_word(bytes.data() + at));
        std::uint64_t last = static_cast<std::uint64_t>(total) << 56;
        for (std::size_t i = 0; at + i < bytes.size(); ++i) {
            last |= static_cast<std::uint64_t>(bytes[at + i]) << (8 * i);
        }
        absorb(last);
    }

    Hash128 finish() {
        v2_ ^= 0xee;
        const std::uint64_t low = squeeze();
        v1_ ^= 0xdd;
        const std::uint64_t high = squeeze();
        Hash128 hash;
        std::memcpy(hash.data(), &low, sizeof low);
        std::memcpy(hash.data() + 8, &high, sizeof high);
        return hash;
    }

  private:
    void round() {
        v0_ += v1_;
        v2_ += v3_;
        v1_ = std::rotl(v1_, 13) ^ v0_;
        v3_ = std::rotl(v3_, 16) ^ v2_;
        v0_ = std::rotl(v0_, 32);
        v2_ += v1_;
        v0_ += v3_;
        v1_ = std::rotl(v1_, 17) ^ v2_;
        v3_ = std::rotl(v3_, 21) ^ v0_;
        v2_ = std::rotl(v2_, 32);
    }

    std::uint64_t squeeze() {
        for (int i = 0; i < 4; ++i) round();
        return v0_ ^ v1_ ^ v2_ ^ v3_;
    }

    std::uint64_t v0_, v1_, v2_, v3_;
};

}  // namespace

Hash128 siphash128(const Hash128& key, std::span<const std::uint8_t> message) {
    SipState state(key);
    state.absorb_tail(message, message.size());
    return state.finish();
}

void hash_blocks(std::span<const std::uint32_t> tokens, std::size_t block_tokens,
                 const Hash128& root, const Hash128& seed, std::span<Hash128> out) {
    if (block_tokens == 0) throw std::invalid_argument("block_tokens must be at least 1, got 0");
    const std::size_t block_count = tokens.size() / block_tokens;
    if (out.size() != block_count) {
        throw std::invalid_argument("out must hold " + std::to_string(block_count) +
                                    " hashes, got " + std::to_string(out.size()));
    }
    const std::size_t block_bytes = block_tokens * sizeof(std::uint32_t);
    const auto* next = reinterpret_cast<const std::uint8_t*>(tokens.data());
    Hash128 previous = root;
    for (Hash128& hash : out) {
        SipState state(seed);
        state.absorb(load_word(previous.data()));
        state.absorb(load_word(previous.data() + 8));
        state.absorb_tail({next, block_bytes}, previous.size() + block_bytes);
        hash = previous = state.finish();
        next += block_bytes;
    }
}

}  // namespace ptstore
