#include "ptstore/prefix_index.hpp"

#include <bit>
#include <cassert>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace ptstore {
namespace {

constexpr std::size_t kSlotsMin = 64;
constexpr std::size_t kPrefetchDistance = 16;
// At most 5 of 8 slots are used: a miss then looks at 4 slots, two cache lines, on average.
constexpr std::size_t kLoadNumerator = 5;
constexpr std::size_t kLoadDenominator = 8;

}  // namespace

PrefixIndex::PrefixIndex() { rehash(kSlotsMin); }

std::size_t PrefixIndex::home_of(const Hash128& hash) const {
    std::uint64_t low;
    std::uint64_t high;
    std::memcpy(&low, hash.data(), sizeof low);
    std::memcpy(&high, hash.data() + 8, sizeof high);
    // Hashes are uniform already; the multiplication uses all bits, so that a choice of servers by
    // some of them (placement by hash) does not crowd this table.
    return ((low ^ std::rotl(high, 32)) * 0x9e3779b97f4a7c15ULL) >> home_shift_;
}

std::size_t PrefixIndex::find_slot(const Hash128& hash) const {
    const std::size_t mask = slots_.size() - 1;
    std::size_t at = home_of(hash);
    while (slots_[at].link != kEmpty && slots_[at].hash != hash) at = (at + 1) & mask;
    return at;
}

void PrefixIndex::reserve(std::size_t hash_count) {
    std::size_t slot_count = slots_.size();
    while (hash_count > slot_count / kLoadDenominator * kLoadNumerator) slot_count *= 2;
    if (slot_count != slots_.size()) rehash(slot_count);
}

void PrefixIndex::rehash(std::size_t slot_count) {
    assert(std::has_single_bit(slot_count));
    std::vector<Slot> old(slot_count);
    old.swap(slots_);
    home_shift_ = 64 - static_cast<unsigned>(std::countr_zero(slot_count));
    for (const Slot& slot : old) {
        if (slot.link != kEmpty) slots_[find_slot(slot.hash)] = slot;
    }
}

void PrefixIndex::insert(std::span<const Hash128> hashes, std::uint64_t segment,
                         std::uint64_t first_position) {
    constexpr std::uint64_t kPositions = std::uint64_t{1} << 32;
    if (first_position > kPositions || hashes.size() > kPositions - first_position) {
        throw std::invalid_argument("positions " + std::to_string(first_position) + " + " +
                                    std::to_string(hashes.size()) + " do not fit 32 bits");
    }
    reserve(hash_count_ + hashes.size());
    auto position = static_cast<std::uint32_t>(first_position);
    for (const Hash128& hash : hashes) insert_one(hash, {segment, position++});
}

void PrefixIndex::insert_one(const Hash128& hash, Entry entry) {
    Slot& slot = slots_[find_slot(hash)];
    if (slot.link == kEmpty) {
        slot = {hash, entry.segment, entry.position, kLast};
        ++hash_count_;
        return;
    }
    add_to_slot(slot, entry);
}

void PrefixIndex::add_to_slot(Slot& slot, Entry entry) {
    const Entry lowest{slot.segment, slot.position};
    if (entry == lowest) return;
    if (entry < lowest) {
        slot.link = new_extra(lowest, slot.link);
        slot.segment = entry.segment;
        slot.position = entry.position;
        return;
    }
    // Indices, not pointers: new_extra may move the pool.
    std::uint32_t before = kLast;
    std::uint32_t link = slot.link;
    while (link != kLast) {
        const Extra& extra = extras_[link - kFirstLink];
        const Entry here{extra.segment, extra.position};
        if (entry == here) return;
        if (entry < here) break;
        before = link;
        link = extra.link;
    }
    const std::uint32_t added = new_extra(entry, link);
    (before == kLast ? slot.link : extras_[before - kFirstLink].link) = added;
}

std::uint32_t PrefixIndex::new_extra(Entry entry, std::uint32_t link) {
    std::uint32_t added = free_extras_;
    if (added != kEmpty) {
        free_extras_ = extras_[added - kFirstLink].link;
        extras_[added - kFirstLink] = {entry.segment, entry.position, link};
    } else {
        if (extras_.size() >= std::numeric_limits<std::uint32_t>::max() - kFirstLink) {
            throw std::length_error("more than 2^32 duplicate blocks in one index");
        }
        added = static_cast<std::uint32_t>(extras_.size()) + kFirstLink;
        extras_.push_back({entry.segment, entry.position, link});
    }
    ++extra_count_;
    return added;
}

std::uint32_t PrefixIndex::free_extra(std::uint32_t link) {
    Extra& extra = extras_[link - kFirstLink];
    const std::uint32_t next = extra.link;
    extra.link = free_extras_;
    free_extras_ = link;
    --extra_count_;
    return next;
}

std::size_t PrefixIndex::remove(std::span<const Hash128> hashes, std::uint64_t segment) {
    std::size_t removed = 0;
    for (const Hash128& hash : hashes) {
        const std::size_t at = find_slot(hash);
        if (slots_[at].link != kEmpty) removed += remove_from_slot(at, segment);
    }
    return removed;
}

std::size_t PrefixIndex::remove_from_slot(std::size_t at, std::uint64_t segment) {
    Slot& slot = slots_[at];
    std::size_t removed = 0;
    std::uint32_t* link = &slot.link;
    while (*link != kLast) {
        Extra& extra = extras_[*link - kFirstLink];
        if (extra.segment == segment) {
            *link = free_extra(*link);
            ++removed;
        } else {
            link = &extra.link;
        }
    }
    if (slot.segment != segment) return removed;
    if (slot.link == kLast) {
        erase_slot(at);
        return removed + 1;
    }
    const Extra& next = extras_[slot.link - kFirstLink];
    slot.segment = next.segment;
    slot.position = next.position;
    slot.link = free_extra(slot.link);
    return removed + 1;
}

void PrefixIndex::erase_slot(std::size_t at) {
    const std::size_t mask = slots_.size() - 1;
    std::size_t hole = at;
    for (std::size_t next = (at + 1) & mask; slots_[next].link != kEmpty;
         next = (next + 1) & mask) {
        // A follower may fill the hole unless its home lies after it.
        const std::size_t home = home_of(slots_[next].hash);
        if (((next - home) & mask) >= ((next - hole) & mask)) {
            slots_[hole] = slots_[next];
            hole = next;
        }
    }
    slots_[hole] = {};
    --hash_count_;
}

std::optional<PrefixIndex::Found> PrefixIndex::deepest(std::span<const Hash128> hashes) const {
    const std::size_t count = hashes.size();
    for (std::size_t ahead = 0; ahead < kPrefetchDistance && ahead < count; ++ahead) {
        __builtin_prefetch(&slots_[home_of(hashes[count - 1 - ahead])]);
    }
    for (std::size_t depth = count; depth > 0; --depth) {
        if (depth > kPrefetchDistance) {
            __builtin_prefetch(&slots_[home_of(hashes[depth - 1 - kPrefetchDistance])]);
        }
        const Slot& slot = slots_[find_slot(hashes[depth - 1])];
        if (slot.link != kEmpty) return Found{depth, slot.segment, slot.position};
    }
    return std::nullopt;
}

bool PrefixIndex::contains(const Hash128& hash) const {
    return slots_[find_slot(hash)].link != kEmpty;
}

std::size_t PrefixIndex::nbytes() const {
    return sizeof *this + slots_.capacity() * sizeof(Slot) + extras_.capacity() * sizeof(Extra);
}

}  // namespace ptstore
