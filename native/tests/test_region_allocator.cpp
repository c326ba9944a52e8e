// The allocator against a bitmap of pages: same space free, same best fit, same refusals.
#include <optional>
#include <vector>

#include "check.hpp"
#include "ptstore/region_allocator.hpp"

namespace {

using ptstore::RegionAllocator;
using ptstore::test::Random;

constexpr std::uint64_t kPage = 4096;

struct FreeRun {
    std::size_t page;
    std::size_t pages;
};

class Bitmap {
  public:
    void grow(std::size_t pages) { taken_.resize(pages, false); }
    std::size_t pages() const { return taken_.size(); }

    std::vector<FreeRun> free_runs() const {
        std::vector<FreeRun> runs;
        for (std::size_t page = 0; page < pages(); ++page) {
            if (taken_[page]) continue;
            if (page == 0 || taken_[page - 1]) runs.push_back({page, 0});
            ++runs.back().pages;
        }
        return runs;
    }

    std::optional<std::size_t> best_fit(std::size_t pages_wanted) const {
        std::optional<FreeRun> best;
        for (const FreeRun& run : free_runs()) {
            if (run.pages >= pages_wanted && (!best || run.pages < best->pages)) best = run;
        }
        if (!best) return std::nullopt;
        return best->page;
    }

    bool all(std::size_t page, std::size_t count, bool taken) const {
        for (std::size_t i = page; i < page + count; ++i) {
            if (taken_[i] != taken) return false;
        }
        return true;
    }

    void set(std::size_t page, std::size_t count, bool taken) {
        for (std::size_t i = page; i < page + count; ++i) taken_[i] = taken;
    }

  private:
    std::vector<bool> taken_;
};

void compare(const RegionAllocator& allocator, const Bitmap& model) {
    std::size_t free_pages = 0;
    std::size_t largest = 0;
    for (const FreeRun& run : model.free_runs()) {
        free_pages += run.pages;
        largest = std::max(largest, run.pages);
    }
    CHECK(allocator.free_bytes() == free_pages * kPage);
    CHECK(allocator.largest_free_bytes() == largest * kPage);
    CHECK(allocator.capacity_bytes() == model.pages() * kPage);
}

void allocate_step(RegionAllocator& allocator, Bitmap& model, Random& random) {
    const std::uint64_t nbytes = 1 + random.below(12 * kPage);
    const std::size_t pages = (nbytes + kPage - 1) / kPage;
    const auto expected = model.best_fit(pages);
    const auto offset = allocator.allocate(nbytes);
    CHECK(offset.has_value() == expected.has_value());
    if (!offset) return;
    CHECK(*offset == *expected * kPage);
    model.set(*expected, pages, true);
}

void release_step(RegionAllocator& allocator, Bitmap& model, Random& random) {
    const std::size_t page = random.below(model.pages());
    const std::size_t pages = 1 + random.below(std::min<std::size_t>(6, model.pages() - page));
    if (model.all(page, pages, true)) {
        allocator.release(page * kPage, pages * kPage);
        model.set(page, pages, false);
    } else {
        CHECK_THROWS(allocator.release(page * kPage, pages * kPage), "already free");
    }
}

void random_operations() {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        Random random(seed);
        RegionAllocator allocator(64 * kPage);
        Bitmap model;
        model.grow(64);
        for (int step = 0; step < 3000; ++step) {
            if (random.below(2) == 0) {
                allocate_step(allocator, model, random);
            } else {
                release_step(allocator, model, random);
            }
            if (step % 500 == 499) {
                model.grow(model.pages() + 1 + random.below(16));
                allocator.grow(model.pages() * kPage);
            }
            compare(allocator, model);
        }
    }
}

void refusals() {
    CHECK_THROWS(RegionAllocator(kPage, 3000), "power of two");
    CHECK_THROWS(RegionAllocator(kPage, 0), "power of two");
    CHECK_THROWS(RegionAllocator(kPage + 1), "multiple of 4096");
    RegionAllocator allocator(4 * kPage);
    CHECK_THROWS(allocator.allocate(0), "at least 1");
    CHECK(allocator.allocate(3 * kPage) == 0U);
    CHECK(!allocator.allocate(2 * kPage));
    CHECK(!allocator.allocate(~std::uint64_t{0}));
    CHECK_THROWS(allocator.release(1, kPage), "aligned");
    CHECK_THROWS(allocator.release(0, 100), "aligned");
    CHECK_THROWS(allocator.release(0, 0), "empty");
    CHECK_THROWS(allocator.release(0, 5 * kPage), "exceeds the capacity");
    CHECK_THROWS(allocator.release(-kPage, 2 * kPage), "exceeds the capacity");
    CHECK_THROWS(allocator.release(2 * kPage, 2 * kPage), "already free");
    CHECK_THROWS(allocator.grow(4 * kPage), "grow beyond");
    CHECK_THROWS(allocator.grow(5 * kPage + 8), "multiple of 4096");
    CHECK(allocator.free_bytes() == kPage);
}

void empty_then_grown() {
    RegionAllocator allocator(0, 64);
    CHECK(allocator.free_bytes() == 0 && allocator.largest_free_bytes() == 0);
    CHECK(!allocator.allocate(1));
    allocator.grow(128);
    allocator.grow(192);  // joins the free tail
    CHECK(allocator.allocate(192) == 0U);
}

}  // namespace

int main() {
    random_operations();
    refusals();
    empty_then_grown();
}
