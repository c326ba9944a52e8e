#include "ptstore/eviction_queue.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>

namespace ptstore {
namespace {

// What the usual allocators add to a node, and the pointer that links it into its bucket.
constexpr std::size_t kNodeOverheadBytes = 3 * sizeof(void*);
constexpr std::size_t kRoomMin = 64;

}  // namespace

bool EvictionQueue::precedes(const Item& a, const Item& b) {
    return std::tie(a.second.priority, a.second.order, a.first) <
           std::tie(b.second.priority, b.second.order, b.first);
}

void EvictionQueue::set(std::uint64_t key, double priority, std::optional<std::uint64_t> order) {
    if (std::isnan(priority)) {
        throw std::invalid_argument("priority of key " + std::to_string(key) +
                                    " must be a number, got NaN");
    }
    const std::uint64_t rank_order = order.value_or(next_order_);
    next_order_ = std::max(next_order_, rank_order + 1);
    const auto [found, is_new] = items_.try_emplace(key, Rank{priority, rank_order});
    Item* const item = &*found;
    if (is_new) {
        enter(item);
        return;
    }
    item->second.priority = priority;
    item->second.order = rank_order;
    if (item->second.place != kNotInHeap) sift(item);
}

bool EvictionQueue::remove(std::uint64_t key) {
    const auto found = items_.find(key);
    if (found == items_.end()) return false;
    if (found->second.place != kNotInHeap) leave(&*found);
    items_.erase(found);
    return true;
}

void EvictionQueue::set_eligible(std::uint64_t key, bool eligible) {
    const auto found = items_.find(key);
    if (found == items_.end()) {
        throw std::invalid_argument("key " + std::to_string(key) + " is not in the queue");
    }
    if (eligible == (found->second.place != kNotInHeap)) return;
    if (eligible) {
        enter(&*found);
    } else {
        leave(&*found);
    }
}

std::optional<EvictionQueue::Lowest> EvictionQueue::lowest() const {
    if (heap_.empty()) return std::nullopt;
    return Lowest{heap_.front()->first, heap_.front()->second.priority};
}

std::size_t EvictionQueue::nbytes() const {
    return sizeof *this + heap_.capacity() * sizeof(Item*) +
           items_.bucket_count() * sizeof(void*) +
           items_.size() * (sizeof(Item) + kNodeOverheadBytes);
}

void EvictionQueue::put(std::size_t place, Item* item) {
    heap_[place] = item;
    item->second.place = place;
}

// Moves an item of the heap up or down to where it belongs.
void EvictionQueue::sift(Item* item) {
    std::size_t place = item->second.place;
    while (place != 0 && precedes(*item, *heap_[(place - 1) / 2])) {
        put(place, heap_[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (;;) {
        std::size_t child = 2 * place + 1;
        if (child >= heap_.size()) break;
        if (child + 1 < heap_.size() && precedes(*heap_[child + 1], *heap_[child])) ++child;
        if (!precedes(*heap_[child], *item)) break;
        put(place, heap_[child]);
        place = child;
    }
    put(place, item);
}

void EvictionQueue::enter(Item* item) {
    heap_.push_back(item);
    item->second.place = heap_.size() - 1;
    sift(item);
}

void EvictionQueue::leave(Item* item) {
    const std::size_t place = item->second.place;
    Item* const last = heap_.back();
    heap_.pop_back();
    item->second.place = kNotInHeap;
    if (item != last) {
        put(place, last);
        sift(last);
    }
    if (heap_.size() > kRoomMin && heap_.size() < heap_.capacity() / 4) {
        std::vector<Item*> smaller;  // room follows the items down, too
        smaller.reserve(heap_.size() * 2);
        smaller.assign(heap_.begin(), heap_.end());
        heap_.swap(smaller);
    }
}

}  // namespace ptstore
