#include "bindings.hpp"
#include "ptstore/checksum.hpp"

namespace ptstore::bind {
namespace {

std::uint32_t crc32c_of(const Array<const std::uint8_t>& data, std::uint32_t initial) {
    const nb::gil_scoped_release unlocked;
    return crc32c(span_of(data), initial);
}

Array<std::uint32_t> block_checksums_of(const Array<const std::uint8_t>& memory,
                                        std::int64_t offset,
                                        const Array<const std::int64_t>& block_bytes,
                                        std::int64_t segment_blocks, std::int64_t segment_block,
                                        std::int64_t block_count) {
    const SegmentBlocks blocks{offset, segment_blocks, segment_block, block_count};
    const SegmentChecksums sums(span_of(memory), span_of(block_bytes), blocks);
    auto values = std::make_unique<std::uint32_t[]>(sums.size());
    {
        const nb::gil_scoped_release unlocked;
        sums.compute({values.get(), sums.size()});
    }
    return array_owning<std::uint32_t, nb::shape<-1>>(std::move(values), {sums.size()});
}

}  // namespace

void bind_checksum(nb::module_& module) {
    module.def("crc32c", &crc32c_of, "data"_a.noconvert(), "initial"_a = 0,
               "CRC-32C of data, continuing from the checksum initial of what came before.");
    module.def("crc32c_uses_hardware", &crc32c_uses_hardware,
               "True if checksums use instructions of this CPU.");
    module.def(
        "block_checksums", &block_checksums_of, "memory"_a.noconvert(), nb::kw_only(), "offset"_a,
        "block_bytes"_a.noconvert(), "segment_blocks"_a, "segment_block"_a, "block_count"_a,
        "CRC-32C of each block of a segment image, chained over its pieces in tensor order.");
}

}  // namespace ptstore::bind
