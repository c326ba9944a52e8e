// Copies of every kind of view against a loop over single bytes, in both directions, with some
// sizes above the limits from where threads and streaming stores take part.
#include <algorithm>
#include <thread>
#include <vector>

#include "check.hpp"
#include "ptstore/copy_pool.hpp"

namespace {

using ptstore::CopyPool;
using ptstore::SegmentBlocks;
using ptstore::SegmentChecksums;
using ptstore::TensorView;
using ptstore::TensorViews;
using ptstore::test::Random;

using Bytes = std::vector<std::byte>;

struct Tensor {
    TensorView view;
    std::vector<std::int64_t> table;
    Bytes memory;
};

struct Case {
    std::vector<Tensor> tensors;
    TensorViews views;
    std::int64_t view_block = 0;
    SegmentBlocks blocks{};
    Bytes segment;
};

void fill(Random& random, Bytes& bytes) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.word());
}

Tensor make_tensor(Random& random, std::int64_t block_count, std::int64_t scale) {
    Tensor tensor;
    TensorView& view = tensor.view;
    std::int64_t physical = block_count;
    view.block_count = block_count;
    view.piece_count = 1;
    view.piece_bytes = random.between(1, scale);
    switch (random.below(4)) {
        case 0:  // contiguous blocks
            view.piece_stride = view.block_stride = view.piece_bytes;
            break;
        case 1:  // heads: pieces far apart, the blocks of a head adjacent
            view.piece_count = random.between(2, 5);
            view.block_stride = view.piece_bytes;
            view.piece_stride = block_count * view.piece_bytes;
            break;
        case 2:  // pages in any order, partly adjacent, with or without room between them
            physical = block_count + 3;
            view.piece_stride = view.piece_bytes;
            view.block_stride = view.piece_bytes + (random.below(2) == 0 ? 0 : 24);
            break;
        default:  // pages of touching or separate pieces
            physical = block_count + 1;
            view.piece_count = random.between(1, 4);
            view.piece_stride = view.piece_bytes + (random.below(2) == 0 ? 0 : 5);
            view.block_stride = view.piece_count * view.piece_stride + 7;
    }
    for (std::int64_t i = 0; physical > block_count && i < block_count; ++i) {
        const bool adjacent = i > 0 && random.below(2) == 0 && tensor.table.back() + 1 < physical;
        tensor.table.push_back(adjacent ? tensor.table.back() + 1
                                        : random.between(0, physical - 1));
    }
    const std::int64_t extent = (physical - 1) * view.block_stride +
                                (view.piece_count - 1) * view.piece_stride + view.piece_bytes;
    tensor.memory.resize(static_cast<std::size_t>(extent));
    fill(random, tensor.memory);
    return tensor;
}

Case make_case(Random& random, std::int64_t blocks_max, std::int64_t scale) {
    Case c;
    SegmentBlocks& blocks = c.blocks;
    blocks.block_count = random.between(0, blocks_max);
    blocks.segment_block = random.between(0, 3);
    blocks.segment_blocks = blocks.segment_block + blocks.block_count + random.between(0, 3);
    blocks.offset = random.between(0, 100);
    c.view_block = random.between(0, 3);
    const std::int64_t held = c.view_block + blocks.block_count + random.between(0, 3);
    const std::int64_t tensor_count = random.between(1, 5);
    for (std::int64_t i = 0; i < tensor_count; ++i) {
        c.tensors.push_back(make_tensor(random, std::max<std::int64_t>(held, 1), scale));
    }
    for (Tensor& tensor : c.tensors) {
        tensor.view.address = reinterpret_cast<std::uint64_t>(tensor.memory.data());
        if (tensor.table.empty()) {
            c.views.append(tensor.view);
        } else {
            c.views.append(tensor.view, tensor.table);
        }
    }
    const std::int64_t image = blocks.segment_blocks * c.views.bytes_per_block();
    c.segment.resize(static_cast<std::size_t>(blocks.offset + image + 50));
    fill(random, c.segment);
    return c;
}

/// Calls visit(byte of the view, byte of the segment) for every byte of the copy, in order.
template <typename Visit>
void for_each_byte(Case& c, Visit visit) {
    std::int64_t tensor_begin = c.blocks.offset;
    for (Tensor& tensor : c.tensors) {
        const TensorView& view = tensor.view;
        const std::int64_t block_bytes = view.piece_count * view.piece_bytes;
        for (std::int64_t b = 0; b < c.blocks.block_count; ++b) {
            const std::int64_t logical = c.view_block + b;
            const std::int64_t physical =
                tensor.table.empty() ? logical : tensor.table[static_cast<std::size_t>(logical)];
            for (std::int64_t i = 0; i < block_bytes; ++i) {
                const std::int64_t in_view = physical * view.block_stride +
                                             i / view.piece_bytes * view.piece_stride +
                                             i % view.piece_bytes;
                const std::int64_t in_segment =
                    tensor_begin + (c.blocks.segment_block + b) * block_bytes + i;
                visit(tensor.memory[static_cast<std::size_t>(in_view)],
                      c.segment[static_cast<std::size_t>(in_segment)]);
            }
        }
        tensor_begin += c.blocks.segment_blocks * block_bytes;
    }
}

std::vector<std::uint32_t> checksums_of(const Case& c) {
    const std::vector<std::int64_t> block_bytes = c.views.block_bytes();
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(c.segment.data());
    const SegmentChecksums sums({bytes, c.segment.size()}, block_bytes, c.blocks);
    std::vector<std::uint32_t> expected(sums.size());
    sums.compute(expected);
    return expected;
}

void check_pack(CopyPool& pool, Case& c) {
    Bytes packed = c.segment;
    pool.pack(c.views, packed, c.view_block, c.blocks);
    Bytes checked = c.segment;
    std::vector<std::uint32_t> checksums(static_cast<std::size_t>(c.blocks.block_count));
    pool.pack(c.views, checked, c.view_block, c.blocks, checksums);
    for_each_byte(c, [](std::byte& view, std::byte& segment) { segment = view; });
    CHECK(packed == c.segment);
    CHECK(checked == c.segment);
    CHECK(checksums == checksums_of(c));
}

void unpack_any(CopyPool& pool, Case& c, Random& random) {
    if (random.below(2) == 0) {
        pool.unpack(c.views, c.segment, c.view_block, c.blocks);
        return;
    }
    std::vector<std::uint32_t> checksums(static_cast<std::size_t>(c.blocks.block_count));
    pool.unpack(c.views, c.segment, c.view_block, c.blocks, checksums);
    CHECK(checksums == checksums_of(c));
}

void check_unpack(CopyPool& pool, Case& c, Random& random) {
    // Two blocks in one page would leave to chance which of them stays.
    for (Tensor& tensor : c.tensors) {
        std::vector<std::int64_t> sorted = tensor.table;
        std::ranges::sort(sorted);
        if (std::ranges::adjacent_find(sorted) != sorted.end()) return;
    }
    fill(random, c.segment);
    std::vector<Bytes> before;
    for (const Tensor& tensor : c.tensors) before.push_back(tensor.memory);
    unpack_any(pool, c, random);
    std::vector<Bytes> unpacked;
    for (std::size_t i = 0; i < before.size(); ++i) {
        unpacked.push_back(c.tensors[i].memory);
        std::ranges::copy(before[i], c.tensors[i].memory.begin());
    }
    for_each_byte(c, [](std::byte& view, std::byte& segment) { view = segment; });
    for (std::size_t i = 0; i < before.size(); ++i) CHECK(unpacked[i] == c.tensors[i].memory);
}

void random_copies(std::int64_t threads, int cases, std::int64_t blocks_max, std::int64_t scale) {
    CopyPool pool(threads);
    CHECK(pool.thread_count() == threads);
    for (int i = 0; i < cases; ++i) {
        Random random(static_cast<std::uint64_t>(i * 10 + threads));
        Case c = make_case(random, blocks_max, scale);
        check_pack(pool, c);
        check_unpack(pool, c, random);
    }
}

void calls_from_several_threads() {
    CopyPool pool(3);
    std::vector<std::thread> callers;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        callers.emplace_back([&pool, seed] {
            Random random(seed);
            for (int i = 0; i < 10; ++i) {
                Case c = make_case(random, 40, 20'000);
                check_pack(pool, c);
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
}

void refusals() {
    CHECK_THROWS(CopyPool(0), "thread_count");
    CopyPool pool(1);
    Bytes memory(100);
    Bytes tensor(40);
    TensorViews views;
    const auto address = reinterpret_cast<std::uint64_t>(tensor.data());
    views.append({address, 4, 10, 1, 10, 10});
    pool.pack(views, memory, 0, {60, 4, 0, 4});
    CHECK_THROWS(pool.pack(views, memory, 1, {60, 4, 0, 4}), "view_block");
    CHECK_THROWS(pool.pack(views, memory, -1, {60, 4, 0, 4}), "view_block");
    CHECK_THROWS(pool.pack(views, memory, 0, {61, 4, 0, 4}), "exceeds memory");
    CHECK_THROWS(pool.unpack(views, memory, 0, {60, 4, 1, 4}), "exceeds segment_blocks");
    CHECK_THROWS(pool.unpack(views, memory, 0, {60, 4, -1, 4}), "segment_block");
    CHECK_THROWS(pool.unpack(views, memory, 5, {60, 4, 0, 0}), "view of tensor 0");
}

void refused_views() {
    TensorViews views;
    const std::vector<std::int64_t> table{0, 1, -2};
    CHECK_THROWS(views.append({1, -1, 1, 1, 1, 1}), "block_count");
    CHECK_THROWS(views.append({1, 1, 1, 0, 1, 1}), "piece_count");
    CHECK_THROWS(views.append({1, 1, 1, 1, 0, 1}), "piece_bytes");
    CHECK_THROWS(views.append({0, 1, 1, 1, 1, 1}), "address");
    CHECK_THROWS(views.append({1, 2, 1, 1, 1, 1}, table), "2 entries, got 3");
    CHECK_THROWS(views.append({1, 3, 1, 1, 1, 1}, table), "got -2");
    CHECK_THROWS(views.append({1, 3, 1, INT64_MAX, 2, 1}), "63 bits");
    CHECK_THROWS(views.append({1, 4, INT64_MAX / 2, 1, 2, 1}), "63 bits");
    CHECK(views.size() == 0 && views.block_bytes().empty());
    views.append({0, 0, 8, 2, 4, 4}, std::span<const std::int64_t>{});
    CHECK(views.block_bytes() == std::vector<std::int64_t>{8});
}

}  // namespace

int main() {
    random_copies(1, 300, 12, 60);
    random_copies(2, 300, 12, 60);
    random_copies(1, 8, 60, 20'000);
    random_copies(4, 8, 60, 20'000);
    calls_from_several_threads();
    refusals();
    refused_views();
}
