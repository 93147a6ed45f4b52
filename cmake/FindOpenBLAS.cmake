# SPDX-License-Identifier: Apache-2.0
# Finds OpenBLAS with its C interface: OpenBLAS::OpenBLAS. Used by the example on the host, not by the library.
# Many libraries bring a cblas.h, and often to the same folder: only OpenBLAS's own is taken, and the library that lies
# beside it before any other. Where it is not found, OpenBLAS_LACKS says what is missing.

# Whether the cblas.h in `folder` is OpenBLAS's own; notes one that is not. Newer versions of CMake may name the file itself.
function(fsdp_check_openblas_header result folder)
  string(REGEX REPLACE "/$" "" header "${folder}")
  if(IS_DIRECTORY "${header}")
    string(APPEND header "/cblas.h")
  endif()
  set(own "")
  if(EXISTS "${header}")
    file(STRINGS "${header}" own REGEX "openblas_set_num_threads" LIMIT_COUNT 1)
    if(NOT own)
      set_property(GLOBAL PROPERTY FSDP_REJECTED_CBLAS "${header}")
    endif()
  endif()
  if(NOT own)
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()

# The library that an earlier run found may be gone, or be another one by now.
set_property(GLOBAL PROPERTY FSDP_REJECTED_CBLAS "")
if(OpenBLAS_INCLUDE_DIR)
  set(openblas_still_there TRUE)
  fsdp_check_openblas_header(openblas_still_there "${OpenBLAS_INCLUDE_DIR}")
  if(NOT openblas_still_there)
    unset(OpenBLAS_INCLUDE_DIR CACHE)
    unset(OpenBLAS_LIBRARY CACHE)
  endif()
endif()
if(NOT EXISTS "${OpenBLAS_LIBRARY}")
  unset(OpenBLAS_LIBRARY CACHE)
endif()

set(openblas_suffixes openblas-pthread openblas-openmp openblas-serial openblas)
find_path(OpenBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES ${openblas_suffixes} VALIDATOR fsdp_check_openblas_header)
if(OpenBLAS_INCLUDE_DIR)
  # /usr/include/<architecture>/openblas-pthread: first /usr/lib/<architecture>/openblas-pthread
  string(REGEX REPLACE "/include(/.*)?$" "" openblas_prefix "${OpenBLAS_INCLUDE_DIR}")
  get_filename_component(openblas_variant "${OpenBLAS_INCLUDE_DIR}" NAME)
  set(openblas_beside PATHS "${openblas_prefix}/lib/${CMAKE_LIBRARY_ARCHITECTURE}" "${openblas_prefix}/lib64"
                            "${openblas_prefix}/lib")
  find_library(OpenBLAS_LIBRARY openblas ${openblas_beside} PATH_SUFFIXES ${openblas_variant}
               NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH)
  find_library(OpenBLAS_LIBRARY openblas PATH_SUFFIXES ${openblas_suffixes})
endif()
mark_as_advanced(OpenBLAS_INCLUDE_DIR OpenBLAS_LIBRARY)

get_property(openblas_rejected GLOBAL PROPERTY FSDP_REJECTED_CBLAS)
set(OpenBLAS_LACKS "")
if(NOT OpenBLAS_INCLUDE_DIR AND openblas_rejected)
  set(OpenBLAS_LACKS "its header: ${openblas_rejected} is another library's")
elseif(NOT OpenBLAS_INCLUDE_DIR)
  set(OpenBLAS_LACKS "its header cblas.h")
elseif(NOT OpenBLAS_LIBRARY)
  set(OpenBLAS_LACKS "the library libopenblas for the header in ${OpenBLAS_INCLUDE_DIR}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(OpenBLAS REQUIRED_VARS OpenBLAS_LIBRARY OpenBLAS_INCLUDE_DIR
                                  REASON_FAILURE_MESSAGE "${OpenBLAS_LACKS}")

if(OpenBLAS_FOUND AND NOT TARGET OpenBLAS::OpenBLAS)
  add_library(OpenBLAS::OpenBLAS UNKNOWN IMPORTED)
  set_target_properties(OpenBLAS::OpenBLAS PROPERTIES IMPORTED_LOCATION "${OpenBLAS_LIBRARY}"
                                                      INTERFACE_INCLUDE_DIRECTORIES "${OpenBLAS_INCLUDE_DIR}")
endif()
