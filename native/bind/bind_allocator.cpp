#include <nanobind/stl/optional.h>

#include "bindings.hpp"
#include "ptstore/region_allocator.hpp"

namespace ptstore::bind {

void bind_allocator(nb::module_& module) {
    nb::class_<RegionAllocator>(module, "RegionAllocator",
                                "Free space of an arena, best fit. Calls hold the GIL.")
        .def(nb::init<std::uint64_t, std::uint64_t>(), "capacity_bytes"_a, nb::kw_only(),
             "alignment_bytes"_a = 4096)
        .def("allocate", &RegionAllocator::allocate, "nbytes"_a,
             "Offset of nbytes rounded up to the alignment, or None when nothing is that large.")
        .def("release", &RegionAllocator::release, "offset"_a, "nbytes"_a,
             "Free an aligned part of allocated space; free or unaligned space is a ValueError.")
        .def("grow", &RegionAllocator::grow, "capacity_bytes"_a,
             "Add the space between the old and the new, larger capacity.")
        .def_prop_ro("capacity_bytes", &RegionAllocator::capacity_bytes)
        .def_prop_ro("alignment_bytes", &RegionAllocator::alignment_bytes)
        .def_prop_ro("free_bytes", &RegionAllocator::free_bytes)
        .def_prop_ro("largest_free_bytes", &RegionAllocator::largest_free_bytes);
}

}  // namespace ptstore::bind
