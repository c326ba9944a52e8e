// Internal: a copy that writes past the caches.
//
// Ordinary stores first read the lines that they are going to overwrite: a third of the traffic.
// Worth it for copies from and to memory; what lies in a cache already is faster left there.
#pragma once

#include <cstddef>

namespace ptstore::detail {

bool streaming_copy_available();

/// Like memcpy. Only where available, and followed by streaming_copy_fence() before another thread
/// may read the result.
void streaming_copy(std::byte* to, const std::byte* from, std::size_t bytes);

void streaming_copy_fence();

}  // namespace ptstore::detail
