// SipHash-2-4-128 against vectors of its authors (key and messages 00 01 02 ...), and the chain.
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"
#include "ptstore/block_hash.hpp"

namespace {

using ptstore::Hash128;

struct Vector {
    std::size_t message_bytes;
    const char* hash;
};

constexpr std::array<Vector, 8> kVectors{{{0, "a3817f04ba25a8e66df67214c7550293"},
                                          {1, "da87c1d86b99af44347659119b22fc45"},
                                          {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
                                          {8, "3b62a9ba6258f5610f83e264f31497b4"},
                                          {15, "5493e99933b0a8117e08ec0f97cfc3d9"},
                                          {16, "6ee2a4ca67b054bbfd3315bf85230577"},
                                          {31, "2939b0183223fafc1723de4f52c43d35"},
                                          {63, "5150d1772f50834a503e069a973fbd7c"}}};

std::string hex(const Hash128& hash) {
    constexpr const char* kDigits = "0123456789abcdef";
    std::string text;
    for (const std::uint8_t byte : hash) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    return text;
}

Hash128 counting_key() {
    Hash128 key;
    std::iota(key.begin(), key.end(), std::uint8_t{0});
    return key;
}

void published_vectors() {
    std::array<std::uint8_t, 64> message;
    std::iota(message.begin(), message.end(), std::uint8_t{0});
    for (const Vector& vector : kVectors) {
        const Hash128 hash =
            ptstore::siphash128(counting_key(), {message.data(), vector.message_bytes});
        CHECK(hex(hash) == vector.hash);
    }
}

/// One block hash, from a message put together by hand.
Hash128 joined_hash(const Hash128& previous, std::span<const std::uint32_t> tokens,
                    const Hash128& seed) {
    std::vector<std::uint8_t> message(previous.begin(), previous.end());
    for (const std::uint32_t token : tokens) {
        for (int i = 0; i < 4; ++i) message.push_back(static_cast<std::uint8_t>(token >> (8 * i)));
    }
    return ptstore::siphash128(seed, message);
}

void chain() {
    ptstore::test::Random random(5);
    for (std::size_t block_tokens = 1; block_tokens < 20; ++block_tokens) {
        std::vector<std::uint32_t> tokens(100);
        for (std::uint32_t& token : tokens) token = static_cast<std::uint32_t>(random.word());
        std::vector<Hash128> hashes(tokens.size() / block_tokens);
        Hash128 previous{9, 8, 7};
        ptstore::hash_blocks(tokens, block_tokens, previous, counting_key(), hashes);
        for (std::size_t i = 0; i < hashes.size(); ++i) {
            const auto block = std::span(tokens).subspan(i * block_tokens, block_tokens);
            previous = joined_hash(previous, block, counting_key());
            CHECK(hashes[i] == previous);
        }
    }
}

void refusals() {
    const std::vector<std::uint32_t> tokens(8);
    std::vector<Hash128> hashes(2);
    CHECK_THROWS(ptstore::hash_blocks(tokens, 0, {}, {}, hashes), "block_tokens");
    CHECK_THROWS(ptstore::hash_blocks(tokens, 3, {}, {}, std::span(hashes).first(1)), "hold 2");
    ptstore::hash_blocks(tokens, 9, {}, {}, {});
}

}  // namespace

int main() {
    published_vectors();
    chain();
    refusals();
}
