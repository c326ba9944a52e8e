#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "bindings.hpp"
#include "ptstore/prefix_index.hpp"

namespace ptstore::bind {
namespace {

using DepthSegmentPosition = std::tuple<std::size_t, std::uint64_t, std::uint32_t>;

void insert(PrefixIndex& index, const HashArray& hashes, std::uint64_t segment,
            std::uint64_t first_position) {
    index.insert(hashes_of(hashes), segment, first_position);
}

std::size_t remove(PrefixIndex& index, const HashArray& hashes, std::uint64_t segment) {
    return index.remove(hashes_of(hashes), segment);
}

std::optional<DepthSegmentPosition> deepest(const PrefixIndex& index, const HashArray& hashes) {
    const auto found = index.deepest(hashes_of(hashes));
    if (!found) return std::nullopt;
    return DepthSegmentPosition{found->depth_blocks, found->segment, found->position};
}

bool contains(const PrefixIndex& index, const nb::bytes& hash) {
    return index.contains(hash_of(hash, "hash"));
}

}  // namespace

void bind_index(nb::module_& module) {
    nb::class_<PrefixIndex>(module, "PrefixIndex",
                            "Block hash -> set of (segment, position). Calls hold the GIL.")
        .def(nb::init<>())
        .def("insert", &insert, "hashes"_a.noconvert(), "segment"_a, "first_position"_a = 0,
             "Add (segment, first_position + i) to hashes[i]; present entries stay.")
        .def("remove", &remove, "hashes"_a.noconvert(), "segment"_a,
             "Remove the entries of this segment alone; return how many there were.")
        .def("deepest", &deepest, "hashes"_a.noconvert(),
             "(depth_blocks, segment, position) of the last hash present, lowest segment; or None.")
        .def("__contains__", &contains, "hash"_a)
        .def("__len__", &PrefixIndex::hash_count)
        .def_prop_ro("entry_count", &PrefixIndex::entry_count, "Entries of all hashes together.")
        .def_prop_ro("nbytes", &PrefixIndex::nbytes, "Bytes of memory this index occupies.");
}

}  // namespace ptstore::bind
