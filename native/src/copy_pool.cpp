#include "ptstore/copy_pool.hpp"

#include <algorithm>
#include <atomic>
#include <cassert>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "copy_stream.hpp"

namespace ptstore {
namespace {

using detail::CopyStream;
using detail::Direction;

// A copy is cut into more chunks than threads, so that one held up thread does not hold up all.
constexpr std::int64_t kChunkBytesMin = 128 * 1024;
constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kChunkAlignment = 4096;
// Until a thread has woken up, the caller has copied about this much by itself.
constexpr std::int64_t kSharedBytesMin = 512 * 1024;

/// One copy, shared by the threads that take chunks of it.
struct Job {
    const CopyStream& stream;
    std::int64_t chunk_bytes;
    std::atomic<std::int64_t> next = 0;

    void work() {
        const std::int64_t total = stream.total_bytes();
        for (;;) {
            const std::int64_t begin = next.fetch_add(chunk_bytes, std::memory_order_relaxed);
            if (begin >= total) return;
            stream.copy(begin, std::min(begin + chunk_bytes, total));
        }
    }
};

void check_ranges(const TensorViews& views, std::size_t memory_bytes, std::int64_t view_block,
                  const SegmentBlocks& blocks, std::span<const std::uint32_t> checksums) {
    const std::int64_t block_count = blocks.block_count;
    check_segment_blocks(blocks, views.bytes_per_block(), memory_bytes);
    assert(checksums.empty() || checksums.size() == static_cast<std::uint64_t>(block_count));
    if (view_block < 0) {
        throw std::invalid_argument("view_block must be at least 0, got " +
                                    std::to_string(view_block));
    }
    for (std::size_t i = 0; i < views.size(); ++i) {
        const std::int64_t held = views[i].block_count;
        if (view_block > held || block_count > held - view_block) {
            throw std::invalid_argument("view_block " + std::to_string(view_block) +
                                        " + block_count " + std::to_string(block_count) +
                                        " exceeds the " + std::to_string(held) +
                                        " blocks of the view of tensor " + std::to_string(i));
        }
    }
}

}  // namespace

struct CopyPool::Threads {
    explicit Threads(std::int64_t thread_count) {
        for (std::int64_t i = 1; i < thread_count; ++i) workers.emplace_back([this] { serve(); });
    }

    ~Threads() {
        {
            const std::lock_guard lock(mutex);
            stopping = true;
        }
        wake.notify_all();
        for (std::thread& worker : workers) worker.join();
    }

    void run(const CopyStream& stream) {
        const std::lock_guard one_copy_at_a_time(caller);
        const auto threads = static_cast<std::int64_t>(workers.size()) + 1;
        const std::int64_t share = stream.total_bytes() / (threads * kChunksPerThread) + 1;
        const std::int64_t rounded = (share + kChunkAlignment - 1) & -kChunkAlignment;
        Job own{.stream = stream, .chunk_bytes = std::max(rounded, kChunkBytesMin)};
        if (workers.empty() || stream.total_bytes() < kSharedBytesMin) {
            own.work();
            return;
        }
        {
            const std::lock_guard lock(mutex);
            job = &own;
            ++job_number;
        }
        wake.notify_all();
        own.work();
        std::unique_lock lock(mutex);
        job = nullptr;  // who has not woken up by now need not
        done.wait(lock, [this] { return active == 0; });
    }

    void serve() {
        std::uint64_t seen = 0;
        std::unique_lock lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return stopping || (job != nullptr && job_number != seen); });
            if (stopping) return;
            seen = job_number;
            Job* const taken = job;
            ++active;
            lock.unlock();
            taken->work();
            lock.lock();
            if (--active == 0) done.notify_one();
        }
    }

    std::mutex caller;
    std::mutex mutex;  // guards what follows
    std::condition_variable wake;
    std::condition_variable done;
    Job* job = nullptr;
    std::uint64_t job_number = 0;
    std::size_t active = 0;
    bool stopping = false;
    std::vector<std::thread> workers;
};

CopyPool::CopyPool(std::int64_t thread_count) {
    if (thread_count < 1) {
        throw std::invalid_argument("thread_count must be at least 1, got " +
                                    std::to_string(thread_count));
    }
    threads_ = std::make_unique<Threads>(thread_count);
}

CopyPool::~CopyPool() = default;

void CopyPool::pack(const TensorViews& views, std::span<std::byte> memory, std::int64_t view_block,
                    const SegmentBlocks& blocks, std::span<std::uint32_t> checksums) {
    check_ranges(views, memory.size(), view_block, blocks, checksums);
    threads_->run(
        CopyStream(views, memory.data(), view_block, blocks, Direction::kPack, checksums));
}

void CopyPool::unpack(const TensorViews& views, std::span<const std::byte> memory,
                      std::int64_t view_block, const SegmentBlocks& blocks,
                      std::span<std::uint32_t> checksums) {
    check_ranges(views, memory.size(), view_block, blocks, checksums);
    // The stream only reads memory in this direction.
    auto* const bytes = const_cast<std::byte*>(memory.data());
    threads_->run(CopyStream(views, bytes, view_block, blocks, Direction::kUnpack, checksums));
}

std::int64_t CopyPool::thread_count() const {
    return static_cast<std::int64_t>(threads_->workers.size()) + 1;
}

}  // namespace ptstore
