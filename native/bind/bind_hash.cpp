#include "bindings.hpp"

namespace ptstore::bind {
namespace {

using HashResult = Array<std::uint8_t, nb::shape<-1, 16>>;

HashResult hash_blocks_of(const Array<const std::uint32_t>& tokens, std::size_t block_tokens,
                          const nb::bytes& root, const nb::bytes& seed) {
    const Hash128 root_hash = hash_of(root, "root");
    const Hash128 seed_key = hash_of(seed, "seed");
    const std::size_t count = tokens.size() / std::max<std::size_t>(block_tokens, 1);
    auto hashes = std::make_unique<Hash128[]>(count);
    {
        const nb::gil_scoped_release unlocked;
        hash_blocks(span_of(tokens), block_tokens, root_hash, seed_key, {hashes.get(), count});
    }
    return array_owning<std::uint8_t, nb::shape<-1, 16>>(std::move(hashes), {count, 16});
}

nb::bytes siphash128_of(const nb::bytes& key, const nb::bytes& message) {
    const Hash128 hash = siphash128(hash_of(key, "key"), span_of(message));
    return nb::bytes(hash.data(), hash.size());
}

}  // namespace

void bind_hash(nb::module_& module) {
    module.def("hash_blocks", &hash_blocks_of, "tokens"_a.noconvert(), nb::kw_only(),
               "block_tokens"_a, "root"_a, "seed"_a,
               "Chained 128-bit hashes of the whole blocks of tokens, uint8 (n_blocks, 16).");
    module.def("siphash128", &siphash128_of, "key"_a, "message"_a,
               "SipHash-2-4 with a 128-bit result of message under a 16-byte key.");
}

}  // namespace ptstore::bind
