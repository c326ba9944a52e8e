// Which item goes first: 64-bit keys by priority, the lowest among those that may go.
//
// Owns keys, priorities, orders and flags; knows no bytes, no tree and no time. Not thread-safe.
// Invariants:
//   - the heap holds exactly the eligible items, each knows its place in it;
//   - of equal priorities the lowest order comes first (then the lowest key): the result depends
//     on what was set, never on the layout of a table;
//   - nothing stays behind: a removed or moved item leaves no trace in the heap.
// Cost: O(log n) for every call, O(1) for lowest() and for items that are not eligible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptstore {

class EvictionQueue {
  public:
    struct Lowest {
        std::uint64_t key;
        double priority;
        bool operator==(const Lowest&) const = default;
    };

    /// Adds an item, eligible, or ranks it anew; its flag stays. Without an order it comes after
    /// every order so far. Throws std::invalid_argument for a priority that is not a number.
    void set(std::uint64_t key, double priority,
             std::optional<std::uint64_t> order = std::nullopt);

    /// Forgets an item; returns whether it was there.
    bool remove(std::uint64_t key);

    /// Lets an item be lowest(), or not. Throws std::invalid_argument for an unknown key.
    void set_eligible(std::uint64_t key, bool eligible);

    std::optional<Lowest> lowest() const;

    bool contains(std::uint64_t key) const { return items_.contains(key); }
    std::size_t size() const { return items_.size(); }
    std::size_t eligible_count() const { return heap_.size(); }
    /// Bytes this object occupies, its tables with their unused room included.
    std::size_t nbytes() const;

  private:
    static constexpr std::size_t kNotInHeap = std::numeric_limits<std::size_t>::max();

    struct Rank {
        double priority;
        std::uint64_t order;
        std::size_t place = kNotInHeap;
    };
    using Items = std::unordered_map<std::uint64_t, Rank>;
    using Item = Items::value_type;  // the map's nodes never move, so the heap points at them

    static bool precedes(const Item& a, const Item& b);
    void put(std::size_t place, Item* item);
    void sift(Item* item);
    void enter(Item* item);
    void leave(Item* item);

    Items items_;
    std::vector<Item*> heap_;
    std::uint64_t next_order_ = 0;
};

}  // namespace ptstore
