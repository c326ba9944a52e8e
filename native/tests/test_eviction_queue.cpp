// The queue against a list that is searched from end to end: same lowest item after every step.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <tuple>

#include "check.hpp"
#include "ptstore/eviction_queue.hpp"

namespace {

using ptstore::EvictionQueue;
using ptstore::test::Random;

class Model {
  public:
    void set(std::uint64_t key, double priority, std::optional<std::uint64_t> order) {
        const std::uint64_t used = order.value_or(next_order_);
        next_order_ = std::max(next_order_, used + 1);
        const bool eligible = items_.contains(key) ? items_.at(key).eligible : true;
        items_[key] = {priority, used, eligible};
    }
    bool remove(std::uint64_t key) { return items_.erase(key) == 1; }
    bool contains(std::uint64_t key) const { return items_.contains(key); }
    void set_eligible(std::uint64_t key, bool eligible) { items_.at(key).eligible = eligible; }
    std::size_t size() const { return items_.size(); }

    std::optional<EvictionQueue::Lowest> lowest() const {
        const std::pair<const std::uint64_t, Item>* best = nullptr;
        for (const auto& item : items_) {
            if (item.second.eligible && (best == nullptr || rank(item) < rank(*best))) best = &item;
        }
        if (best == nullptr) return std::nullopt;
        return EvictionQueue::Lowest{best->first, best->second.priority};
    }

  private:
    struct Item {
        double priority;
        std::uint64_t order;
        bool eligible;
    };
    static std::tuple<double, std::uint64_t, std::uint64_t> rank(
        const std::pair<const std::uint64_t, Item>& item) {
        return {item.second.priority, item.second.order, item.first};
    }
    std::map<std::uint64_t, Item> items_;
    std::uint64_t next_order_ = 0;
};

void step(EvictionQueue& queue, Model& model, Random& random) {
    const std::uint64_t key = random.below(60) << 40;
    switch (random.below(6)) {
        case 0:
            CHECK(queue.remove(key) == model.remove(key));
            break;
        case 1:
        case 2: {
            const bool eligible = random.below(2) == 0;
            if (model.contains(key)) {
                queue.set_eligible(key, eligible);
                model.set_eligible(key, eligible);
            } else {
                CHECK_THROWS(queue.set_eligible(key, eligible), "is not in the queue");
            }
            break;
        }
        default: {
            const double priority = 0.5 * static_cast<double>(random.below(8));  // many equal ones
            std::optional<std::uint64_t> order;
            if (random.below(3) == 0) order = random.below(200);
            queue.set(key, priority, order);
            model.set(key, priority, order);
        }
    }
}

void random_operations() {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        Random random(seed);
        EvictionQueue queue;
        Model model;
        for (int i = 0; i < 3000; ++i) {
            step(queue, model, random);
            CHECK(queue.lowest() == model.lowest());
            CHECK(queue.size() == model.size());
        }
        while (const auto found = queue.lowest()) {  // what is left comes out in order
            CHECK(found == model.lowest());
            queue.remove(found->key);
            model.remove(found->key);
        }
        CHECK(queue.size() == model.size() && !model.lowest());
    }
}

void equal_priorities_go_oldest_first() {
    EvictionQueue queue;
    for (const std::uint64_t key : {5U, 3U, 9U}) queue.set(key, 1.0);
    CHECK(queue.lowest()->key == 5);
    queue.set(5, 1.0);  // refreshed: now the newest
    CHECK(queue.lowest()->key == 3);
    queue.set(9, 1.0, 0);  // an order of the caller's own
    CHECK(queue.lowest()->key == 9);
}

void refusals() {
    EvictionQueue queue;
    CHECK(!queue.lowest());
    CHECK(!queue.remove(1));
    CHECK_THROWS(queue.set(1, std::nan("")), "must be a number");
    CHECK(queue.size() == 0);
    queue.set(1, std::numeric_limits<double>::infinity());
    CHECK(queue.lowest()->key == 1);
    queue.set_eligible(1, false);
    queue.set(1, -1.0);  // its flag stays
    CHECK(!queue.lowest() && queue.eligible_count() == 0 && queue.contains(1));
}

void memory_follows_the_items() {
    EvictionQueue queue;
    constexpr std::uint64_t kItems = 20000;
    for (std::uint64_t key = 0; key < kItems; ++key) queue.set(key, 0.0);
    const std::size_t full = queue.nbytes();
    CHECK(full < kItems * 128);
    for (int round = 0; round < 10; ++round) {  // nothing old is kept
        for (std::uint64_t key = 0; key < kItems; ++key) queue.set(key, round);
    }
    CHECK(queue.nbytes() == full);
    for (std::uint64_t key = 0; key < kItems; ++key) queue.remove(key);
    CHECK(queue.nbytes() < full / 4);
}

}  // namespace

int main() {
    random_operations();
    equal_priorities_go_oldest_first();
    refusals();
    memory_follows_the_items();
}
