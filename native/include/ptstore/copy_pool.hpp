// Copies between engine tensors and a segment image, by a few threads.
//
// Owns the only threads of the core: thread_count - 1 of them, asleep unless a copy runs; the
// calling thread works too. Never allocates or keeps memory of a copy after it has returned.
// Invariants:
//   - every range is checked before the first byte moves;
//   - each byte is written once, by one thread; the result does not depend on the threads;
//   - one copy at a time: calls from several threads wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "ptstore/checksum.hpp"
#include "ptstore/tensor_views.hpp"

namespace ptstore {

class CopyPool {
  public:
    /// Throws std::invalid_argument when thread_count is below 1.
    explicit CopyPool(std::int64_t thread_count);
    ~CopyPool();
    CopyPool(const CopyPool&) = delete;
    CopyPool& operator=(const CopyPool&) = delete;

    /// Blocks view_block.. of the views -> `blocks` of the segment image in `memory`.
    /// `checksums`, if not empty, holds block_count entries that become the CRC-32C of each block,
    /// chained over its pieces in tensor order, as SegmentChecksums computes them.
    /// Throws std::invalid_argument, naming the range, when one does not fit.
    void pack(const TensorViews& views, std::span<std::byte> memory, std::int64_t view_block,
              const SegmentBlocks& blocks, std::span<std::uint32_t> checksums = {});

    /// The other way round; the checksums are those of the bytes that were copied.
    void unpack(const TensorViews& views, std::span<const std::byte> memory,
                std::int64_t view_block, const SegmentBlocks& blocks,
                std::span<std::uint32_t> checksums = {});

    std::int64_t thread_count() const;

  private:
    struct Threads;
    std::unique_ptr<Threads> threads_;
};

}  // namespace ptstore
