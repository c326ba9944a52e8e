# The Python module _native and its stub.
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT nanobind_DIR)
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_DIR COMMAND_ERROR_IS_FATAL ANY)
endif()
find_package(nanobind 3.1 CONFIG REQUIRED)

nanobind_add_module(_native NB_STATIC NB_SUPPRESS_WARNINGS
  bind/module.cpp
  bind/bind_allocator.cpp
  bind/bind_array_info.cpp
  bind/bind_checksum.cpp
  bind/bind_copy.cpp
  bind/bind_eviction.cpp
  bind/bind_hash.cpp
  bind/bind_index.cpp)
target_link_libraries(_native PRIVATE ptcore ptcore_warnings)
install(TARGETS _native LIBRARY DESTINATION ptstore_mpi)

# The stub is a committed file of the package; a wheel takes it from there, so only a developer's
# own build writes it (a change shows up as a difference in the working tree).
if(NOT SKBUILD)
  nanobind_add_stub(_native_stub MODULE _native OUTPUT _native.pyi
    PYTHON_PATH $<TARGET_FILE_DIR:_native> DEPENDS _native)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_native.pyi DESTINATION ptstore_mpi)
endif()
