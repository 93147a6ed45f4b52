# SPDX-License-Identifier: Apache-2.0
# Finds PyTorch's C++ library by its headers, libtorch_cpu and libc10: LibTorch_FOUND, LibTorch_VERSION and the target
# LibTorch::LibTorch; with libtorch_cuda, LibTorch::CUDA. Set LibTorch_ROOT to the folder of a download, or of a wheel:
# .../site-packages/torch. PyTorch's own CMake files are not used: those of wheels enable the CUDA language, and stop where
# there is no toolkit, which programs on the host do not need.

find_path(LibTorch_INCLUDE_DIR torch/csrc/autograd/engine.h)
find_path(LibTorch_API_INCLUDE_DIR torch/torch.h HINTS "${LibTorch_INCLUDE_DIR}/torch/csrc/api/include" NO_DEFAULT_PATH)
foreach(torch_library IN ITEMS torch_cpu c10 torch_cuda c10_cuda)
  string(TOUPPER ${torch_library} torch_name)
  find_library(LibTorch_${torch_name}_LIBRARY ${torch_library})
  mark_as_advanced(LibTorch_${torch_name}_LIBRARY)
endforeach()
mark_as_advanced(LibTorch_INCLUDE_DIR LibTorch_API_INCLUDE_DIR)

set(LibTorch_VERSION "")
foreach(torch_header IN ITEMS "${LibTorch_INCLUDE_DIR}/torch/headeronly/version.h" "${LibTorch_API_INCLUDE_DIR}/torch/version.h")
  if(NOT LibTorch_VERSION AND EXISTS "${torch_header}")
    file(STRINGS "${torch_header}" torch_lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
    foreach(torch_part IN ITEMS MAJOR MINOR PATCH)
      if("${torch_lines}" MATCHES "TORCH_VERSION_${torch_part} +([0-9]+)")
        list(APPEND LibTorch_VERSION "${CMAKE_MATCH_1}")
      endif()
    endforeach()
    list(JOIN LibTorch_VERSION "." LibTorch_VERSION)
  endif()
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(LibTorch
  REQUIRED_VARS LibTorch_TORCH_CPU_LIBRARY LibTorch_C10_LIBRARY LibTorch_INCLUDE_DIR LibTorch_API_INCLUDE_DIR
  VERSION_VAR LibTorch_VERSION)

if(LibTorch_FOUND AND NOT TARGET LibTorch::LibTorch)
  set(torch_includes "${LibTorch_INCLUDE_DIR}" "${LibTorch_API_INCLUDE_DIR}")
  list(REMOVE_ITEM torch_includes /usr/include)  # its place is the last
  # Wheels bring headers of a fmt of their own, and not its library: the program's fmt comes before them.
  if(EXISTS "${LibTorch_INCLUDE_DIR}/fmt/core.h" AND NOT LibTorch_INCLUDE_DIR STREQUAL "/usr/include")
    find_path(LibTorch_FMT_INCLUDE_DIR fmt/core.h NO_PACKAGE_ROOT_PATH
      HINTS "${fmt_DIR}/../../../../include" "${fmt_DIR}/../../../include")
    mark_as_advanced(LibTorch_FMT_INCLUDE_DIR)
    if(LibTorch_FMT_INCLUDE_DIR)
      file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/fmt_before_libtorch")
      file(CREATE_LINK "${LibTorch_FMT_INCLUDE_DIR}/fmt" "${CMAKE_BINARY_DIR}/fmt_before_libtorch/fmt" SYMBOLIC)
      list(PREPEND torch_includes "${CMAKE_BINARY_DIR}/fmt_before_libtorch")
    endif()
  endif()
  # Wheels before 2.6 have std::string of the ABI before C++11; they say so.
  set(torch_definitions "")
  file(GLOB torch_config "${LibTorch_INCLUDE_DIR}/../share/cmake/Torch/TorchConfig.cmake")
  if(torch_config)
    file(STRINGS "${torch_config}" torch_flags REGEX "_GLIBCXX_USE_CXX11_ABI=[01]")
    if("${torch_flags}" MATCHES "_GLIBCXX_USE_CXX11_ABI=([01])")
      set(torch_definitions "_GLIBCXX_USE_CXX11_ABI=${CMAKE_MATCH_1}")
    endif()
  endif()
  foreach(torch_library IN ITEMS C10 TORCH_CPU C10_CUDA TORCH_CUDA)
    if(LibTorch_${torch_library}_LIBRARY)
      add_library(LibTorch::${torch_library} UNKNOWN IMPORTED)
      set_target_properties(LibTorch::${torch_library} PROPERTIES IMPORTED_LOCATION "${LibTorch_${torch_library}_LIBRARY}")
    endif()
  endforeach()
  add_library(LibTorch::LibTorch INTERFACE IMPORTED)
  set_target_properties(LibTorch::LibTorch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${torch_includes}"
    INTERFACE_COMPILE_DEFINITIONS "${torch_definitions}"
    INTERFACE_LINK_LIBRARIES "LibTorch::TORCH_CPU;LibTorch::C10")
  # Of a wheel with CUDA, libtorch_cpu needs libraries of other wheels, which it finds when the program starts.
  set_target_properties(LibTorch::LibTorch PROPERTIES INTERFACE_LINK_OPTIONS "LINKER:--allow-shlib-undefined")
  if(TARGET LibTorch::TORCH_CUDA AND TARGET LibTorch::C10_CUDA)
    add_library(LibTorch::CUDA INTERFACE IMPORTED)
    set_target_properties(LibTorch::CUDA PROPERTIES
      INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed"  # its operators register themselves: nothing names it
      INTERFACE_LINK_LIBRARIES "LibTorch::LibTorch;LibTorch::TORCH_CUDA;LibTorch::C10_CUDA")
  endif()
endif()
