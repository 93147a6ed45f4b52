# SPDX-License-Identifier: Apache-2.0
# Finds oneDNN by its header and its library: oneDNN_FOUND and the target oneDNN::oneDNN. oneDNN's own CMake files are not
# used: Debian's ask for OpenCL, which the package does not install and nothing here needs.
# It counts as found only if a program that uses it as this project does compiles and links: its header may be of another
# version than its library.

find_path(oneDNN_INCLUDE_DIR dnnl.hpp)
find_library(oneDNN_LIBRARY dnnl)
mark_as_advanced(oneDNN_INCLUDE_DIR oneDNN_LIBRARY)

set(oneDNN_LINKS FALSE)
if(oneDNN_INCLUDE_DIR AND oneDNN_LIBRARY)
  include(CheckCXXSourceCompiles)
  include(CMakePushCheckState)
  cmake_push_check_state(RESET)
  set(CMAKE_REQUIRED_QUIET TRUE)
  set(CMAKE_REQUIRED_INCLUDES "${oneDNN_INCLUDE_DIR}")
  set(CMAKE_REQUIRED_LIBRARIES "${oneDNN_LIBRARY}")
  # The answer belongs to these two files as they are now: others are asked again, and files that are gone do not compile.
  file(REAL_PATH "${oneDNN_LIBRARY}" library)
  file(TIMESTAMP "${oneDNN_INCLUDE_DIR}/dnnl.hpp" header_time)
  file(TIMESTAMP "${library}" library_time)
  string(MAKE_C_IDENTIFIER "oneDNN_LINKS_${oneDNN_INCLUDE_DIR}_${header_time}_${library}_${library_time}" answer)
  check_cxx_source_compiles("#include <dnnl.hpp>
int main() {
  dnnl::engine processor(dnnl::engine::kind::cpu, 0);
  dnnl::memory::desc const matrix({8, 8}, dnnl::memory::data_type::bf16, dnnl::memory::dims{8, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
#if DNNL_VERSION_MAJOR >= 3
  dnnl::matmul::primitive_desc const product(processor, matrix, matrix, matrix, attributes);
#else
  dnnl::matmul::primitive_desc const product({matrix, matrix, matrix}, attributes, processor);
#endif
  dnnl::memory const a(matrix, processor, DNNL_MEMORY_NONE);
  dnnl::stream stream(processor);
  dnnl::matmul(product).execute(stream, {{DNNL_ARG_SRC, a}});
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & dnnl_cpu_isa_avx512_core_amx) != 0;
}" ${answer})
  set(oneDNN_LINKS "${${answer}}")
  cmake_pop_check_state()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(oneDNN REQUIRED_VARS oneDNN_LIBRARY oneDNN_INCLUDE_DIR oneDNN_LINKS)
if(oneDNN_FOUND AND NOT TARGET oneDNN::oneDNN)
  add_library(oneDNN::oneDNN UNKNOWN IMPORTED)
  set_target_properties(oneDNN::oneDNN PROPERTIES IMPORTED_LOCATION "${oneDNN_LIBRARY}"
                                                  INTERFACE_INCLUDE_DIRECTORIES "${oneDNN_INCLUDE_DIR}")
endif()
