// Index of the blocks one server owns: block hash -> set of (segment, position).
//
// Owns the hashes and the entries; knows nothing of tokens, bytes, leases or time. Not thread-safe.
// Invariants:
//   - a hash is present if and only if it has at least one entry;
//   - the entry in the slot is the lowest (segment, position) of its hash, further ones (rare:
//     the same block published twice) follow in ascending order in a pool beside the table;
//   - no slot between a key's home and its place is empty (linear probing; a removal shifts the
//     followers back, so probes never grow longer with age).
//
//   slot, 32 bytes:  | hash 16 | segment 8 | position 4 | link 4 |    two slots a cache line
//   link:            0 empty, 1 one entry, n the chain of further entries begins at pool[n - 2]
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "ptstore/block_hash.hpp"

namespace ptstore {

class PrefixIndex {
  public:
    struct Found {
        std::size_t depth_blocks;  // number of leading hashes up to and with the found one
        std::uint64_t segment;
        std::uint32_t position;
        bool operator==(const Found&) const = default;
    };

    PrefixIndex();

    /// Adds (segment, first_position + i) to hashes[i]; an entry already there stays as it is.
    /// Throws std::invalid_argument when a position would not fit 32 bits.
    void insert(std::span<const Hash128> hashes, std::uint64_t segment,
                std::uint64_t first_position = 0);

    /// Removes the entries of `segment` from these hashes; returns how many there were.
    std::size_t remove(std::span<const Hash128> hashes, std::uint64_t segment);

    /// The last of `hashes` that is present, with its lowest segment. Every hash may have to be
    /// asked: presence is not monotone along a prefix, because other servers own other blocks.
    std::optional<Found> deepest(std::span<const Hash128> hashes) const;

    bool contains(const Hash128& hash) const;
    std::size_t hash_count() const { return hash_count_; }
    std::size_t entry_count() const { return hash_count_ + extra_count_; }
    /// Bytes this object occupies, its tables with their unused room included.
    std::size_t nbytes() const;

  private:
    struct Entry {
        std::uint64_t segment;
        std::uint32_t position;
        auto operator<=>(const Entry&) const = default;
    };
    struct alignas(32) Slot {
        Hash128 hash;
        std::uint64_t segment;
        std::uint32_t position;
        std::uint32_t link;
    };
    struct Extra {
        std::uint64_t segment;
        std::uint32_t position;
        std::uint32_t link;  // 1 last, n next is pool[n - 2]; free ones: 0 last
    };
    static_assert(sizeof(Slot) == 32 && sizeof(Extra) == 16);

    static constexpr std::uint32_t kEmpty = 0;
    static constexpr std::uint32_t kLast = 1;
    static constexpr std::uint32_t kFirstLink = 2;

    std::size_t home_of(const Hash128& hash) const;
    std::size_t find_slot(const Hash128& hash) const;
    void reserve(std::size_t hash_count);
    void rehash(std::size_t slot_count);
    void insert_one(const Hash128& hash, Entry entry);
    void add_to_slot(Slot& slot, Entry entry);
    std::size_t remove_from_slot(std::size_t at, std::uint64_t segment);
    void erase_slot(std::size_t at);
    std::uint32_t new_extra(Entry entry, std::uint32_t link);
    std::uint32_t free_extra(std::uint32_t link);

    std::vector<Slot> slots_;
    std::vector<Extra> extras_;
    std::uint32_t free_extras_ = kEmpty;
    unsigned home_shift_ = 0;  // a home is the top bits of a mixed hash
    std::size_t hash_count_ = 0;
    std::size_t extra_count_ = 0;
};

}  // namespace ptstore
