#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <optional>
#include <utility>

#include "bindings.hpp"
#include "ptstore/eviction_queue.hpp"

namespace ptstore::bind {
namespace {

std::optional<std::pair<std::uint64_t, double>> lowest(const EvictionQueue& queue) {
    const auto found = queue.lowest();
    if (!found) return std::nullopt;
    return std::pair{found->key, found->priority};
}

}  // namespace

void bind_eviction(nb::module_& module) {
    nb::class_<EvictionQueue>(module, "EvictionQueue",
                              "Keys by priority, the lowest eligible first. Calls hold the GIL.")
        .def(nb::init<>())
        .def("set", &EvictionQueue::set, "key"_a, "priority"_a, "order"_a = nb::none(),
             "Add an item, eligible, or rank it anew; its flag stays. Of equal priorities the "
             "lowest order comes first; without one it comes after every order so far.")
        .def("remove", &EvictionQueue::remove, "key"_a,
             "Forget an item; return whether it was there.")
        .def("set_eligible", &EvictionQueue::set_eligible, "key"_a, "eligible"_a,
             "Let an item be lowest(), or not; an unknown key is a ValueError.")
        .def("lowest", &lowest, "(key, priority) of the eligible item that goes first, or None.")
        .def("__contains__", &EvictionQueue::contains, "key"_a)
        .def("__len__", &EvictionQueue::size)
        .def_prop_ro("eligible_count", &EvictionQueue::eligible_count)
        .def_prop_ro("nbytes", &EvictionQueue::nbytes, "Bytes of memory this queue occupies.");
}

}  // namespace ptstore::bind
