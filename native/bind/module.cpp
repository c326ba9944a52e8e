#include "bindings.hpp"

NB_MODULE(_native, module) {
    module.doc() = "Native core: block hashes, prefix index, allocator, eviction queue, copies, checksums.";
    ptstore::bind::bind_hash(module);
    ptstore::bind::bind_checksum(module);
    ptstore::bind::bind_index(module);
    ptstore::bind::bind_allocator(module);
    ptstore::bind::bind_eviction(module);
    ptstore::bind::bind_copy(module);
    ptstore::bind::bind_array_info(module);
}
