// The index against a std::map of sets, with few distinct hashes so that entries meet, and with
// hashes that share a home so that probes and removals cross each other.
#include <map>
#include <set>
#include <vector>

#include "check.hpp"
#include "ptstore/prefix_index.hpp"

namespace {

using ptstore::Hash128;
using ptstore::PrefixIndex;
using ptstore::test::Random;

using Entry = std::pair<std::uint64_t, std::uint32_t>;
using Model = std::map<Hash128, std::set<Entry>>;

std::vector<Hash128> random_hashes(Random& random, std::size_t count) {
    std::vector<Hash128> hashes(count);
    for (Hash128& hash : hashes) {
        for (std::uint8_t& byte : hash) byte = static_cast<std::uint8_t>(random.word());
    }
    return hashes;
}

std::vector<Hash128> choose(Random& random, const std::vector<Hash128>& pool) {
    std::vector<Hash128> chosen(random.below(12));
    for (Hash128& hash : chosen) hash = pool[random.below(pool.size())];
    return chosen;
}

std::size_t remove_from(Model& model, const std::vector<Hash128>& hashes, std::uint64_t segment) {
    std::size_t removed = 0;
    for (const Hash128& hash : hashes) {
        const auto found = model.find(hash);
        if (found == model.end()) continue;
        removed += std::erase_if(found->second, [&](const Entry& e) { return e.first == segment; });
        if (found->second.empty()) model.erase(found);
    }
    return removed;
}

std::optional<PrefixIndex::Found> deepest_in(const Model& model,
                                             const std::vector<Hash128>& hashes) {
    for (std::size_t depth = hashes.size(); depth > 0; --depth) {
        const auto found = model.find(hashes[depth - 1]);
        if (found == model.end()) continue;
        const Entry& lowest = *found->second.begin();
        return PrefixIndex::Found{depth, lowest.first, lowest.second};
    }
    return std::nullopt;
}

void compare(const PrefixIndex& index, const Model& model, const std::vector<Hash128>& pool) {
    std::size_t entries = 0;
    for (const auto& [hash, set] : model) entries += set.size();
    CHECK(index.hash_count() == model.size());
    CHECK(index.entry_count() == entries);
    for (const Hash128& hash : pool) {
        CHECK(index.contains(hash) == model.contains(hash));
        CHECK(index.deepest({&hash, 1}) == deepest_in(model, {hash}));
    }
}

void random_operations(std::uint64_t seed, std::vector<Hash128> pool) {
    Random random(seed);
    PrefixIndex index;
    Model model;
    for (int step = 0; step < 4000; ++step) {
        const std::vector<Hash128> hashes = choose(random, pool);
        const std::uint64_t segment = random.below(6) - 3;  // wraps: the highest values too
        if (random.below(5) < 3) {
            const auto first = static_cast<std::uint32_t>(random.below(3));
            index.insert(hashes, segment, first);
            for (std::uint32_t i = 0; i < hashes.size(); ++i) {
                model[hashes[i]].insert({segment, first + i});
            }
        } else {
            CHECK(index.remove(hashes, segment) == remove_from(model, hashes, segment));
        }
        CHECK(index.deepest(hashes) == deepest_in(model, hashes));
        if (step % 50 == 0) compare(index, model, pool);
    }
    compare(index, model, pool);
}

/// Hashes that differ in a few low bits only: the worst that the table can meet.
std::vector<Hash128> crowded_hashes(std::size_t count) {
    std::vector<Hash128> hashes(count, Hash128{});
    for (std::size_t i = 0; i < count; ++i) hashes[i][i % 2] = static_cast<std::uint8_t>(i / 2);
    return hashes;
}

void grows_and_empties() {
    Random random(7);
    const std::vector<Hash128> hashes = random_hashes(random, 100'000);
    PrefixIndex index;
    const std::size_t empty_bytes = index.nbytes();
    index.insert(hashes, 1);
    CHECK(index.hash_count() == hashes.size());
    CHECK(index.nbytes() >= empty_bytes + 100'000 * 32);
    for (std::size_t i = 0; i < hashes.size(); i += 997) {
        CHECK((index.deepest({&hashes[i], 1}) ==
               PrefixIndex::Found{1, 1, static_cast<std::uint32_t>(i)}));
    }
    CHECK(index.remove(hashes, 2) == 0);
    CHECK(index.remove(hashes, 1) == hashes.size());
    CHECK(index.hash_count() == 0 && index.entry_count() == 0);
}

void removed_duplicates_make_room_for_new_ones() {
    Random random(8);
    const std::vector<Hash128> hashes = random_hashes(random, 50);
    PrefixIndex index;
    std::size_t bytes_after_one = 0;
    for (int round = 0; round < 20; ++round) {
        for (std::uint64_t segment = 0; segment < 10; ++segment) index.insert(hashes, segment);
        for (std::uint64_t segment = 0; segment < 10; ++segment) index.remove(hashes, segment);
        if (round == 0) bytes_after_one = index.nbytes();
    }
    CHECK(index.nbytes() == bytes_after_one);
}

void refusals() {
    PrefixIndex index;
    const std::vector<Hash128> two(2);
    CHECK_THROWS(index.insert(two, 1, 0xffffffffULL), "32 bits");
    CHECK_THROWS(index.insert(two, 1, ~std::uint64_t{0}), "32 bits");
    CHECK(index.hash_count() == 0);
    index.insert({two.data(), 1}, 1, 0xffffffffULL);
    CHECK(index.deepest(two)->position == 0xffffffffU);
    CHECK(!index.deepest({}));
}

}  // namespace

int main() {
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
        Random random(seed + 100);
        random_operations(seed, random_hashes(random, 300));
        random_operations(seed, crowded_hashes(60));
    }
    grows_and_empties();
    removed_duplicates_make_room_for_new_ones();
    refusals();
}
