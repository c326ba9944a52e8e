// The whole test framework: CHECK, CHECK_THROWS and a seeded generator.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string_view>

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (false)

/// The expression throws std::invalid_argument with `part` in its message.
#define CHECK_THROWS(expression, part)                                                    \
    do {                                                                                  \
        bool thrown = false;                                                              \
        try {                                                                             \
            static_cast<void>(expression);                                                \
        } catch (const std::invalid_argument& error) {                                    \
            thrown = std::string_view(error.what()).find(part) != std::string_view::npos; \
            if (!thrown) std::fprintf(stderr, "message: %s\n", error.what());             \
        }                                                                                 \
        CHECK(thrown && #expression);                                                     \
    } while (false)

namespace ptstore::test {

/// Uniform integers, the same on every machine.
class Random {
  public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}
    std::uint64_t word() { return engine_(); }
    /// In 0 .. bound - 1.
    std::uint64_t below(std::uint64_t bound) { return engine_() % bound; }
    std::int64_t between(std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(high - low + 1)));
    }

  private:
    std::mt19937_64 engine_;
};

}  // namespace ptstore::test
