// Internal: a copy that also feeds what it copies into a CRC-32C register, in one pass.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptstore::detail {

/// Like memcpy; returns the raw register `raw` after these bytes.
using CheckedCopy = std::uint32_t (*)(std::byte* to, const std::byte* from, std::size_t bytes,
                                      std::uint32_t raw);

/// Through the caches, on any CPU.
std::uint32_t cached_checked_copy(std::byte* to, const std::byte* from, std::size_t bytes,
                                  std::uint32_t raw);

/// Past the caches: see streaming_copy.hpp, also for the fence that must follow.
bool streaming_checked_copy_available();
std::uint32_t streaming_checked_copy(std::byte* to, const std::byte* from, std::size_t bytes,
                                     std::uint32_t raw);

}  // namespace ptstore::detail
