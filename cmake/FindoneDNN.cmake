# SPDX-License-Identifier: Apache-2.0
# Finds oneDNN by its header and its library: oneDNN_FOUND and the target oneDNN::oneDNN. oneDNN's own CMake files are not
# used: Debian's ask for OpenCL, which the package does not install and nothing here needs.
# oneDNN counts as found only if a program with it compiles and links.

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
  # The answer belongs to these two files: another header or library is asked again.
  string(MAKE_C_IDENTIFIER "oneDNN_LINKS_${oneDNN_INCLUDE_DIR}_${oneDNN_LIBRARY}" answer)
  check_cxx_source_compiles("#include <dnnl.hpp>
int main() { return static_cast<int>(dnnl::engine::get_count(dnnl::engine::kind::cpu)) - 1; }" ${answer})
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
