# SPDX-License-Identifier: Apache-2.0
# Collects packages that were not found, with what needs them and the Debian package of each, so that one message names all.
# Scripts that install packages (install_missing.sh) read missing-packages.txt in the build folder.

# fsdp_missing(<who> <what> <package>...): <what> was not found, and <who> needs it. Where CMake is missing too, scripts read
# these calls: each is one line with the names themselves, and a variable only at the end of <what>.
function(fsdp_missing who what)
  string(REPLACE ";" " " packages "${ARGN}")
  set_property(GLOBAL APPEND PROPERTY FSDP_MISSING "${who}|${what}|${packages}")
endfunction()

# fsdp_demand(<who>...): ends with an error, and writes missing-packages.txt, where something is missing for one of these;
# says what is not built for want of the rest.
function(fsdp_demand)
  get_property(missing GLOBAL PROPERTY FSDP_MISSING)
  set(lines "")
  set(text "")
  foreach(entry IN LISTS missing)
    string(REGEX MATCH "^([^|]*)[|]([^|]*)[|]([^|]*)$" matched "${entry}")
    set(who "${CMAKE_MATCH_1}")
    set(what "${CMAKE_MATCH_2}")
    set(packages "${CMAKE_MATCH_3}")
    set(needs needs)
    if(who MATCHES "s$")  # tests, benchmarks
      set(needs need)
    endif()
    if(NOT who IN_LIST ARGN)
      message(STATUS "fsdp: not built: ${who}, for want of ${what} (on Debian: ${packages})")
      continue()
    endif()
    string(APPEND text "\n  ${who} ${needs} ${what} (on Debian: ${packages})")
    separate_arguments(packages)
    foreach(package IN LISTS packages)
      string(APPEND lines "${package}\t${who} ${needs} ${what}\n")
    endforeach()
  endforeach()
  file(REMOVE "${PROJECT_BINARY_DIR}/missing-packages.txt")
  if(lines)
    file(WRITE "${PROJECT_BINARY_DIR}/missing-packages.txt" "${lines}")
    message(FATAL_ERROR "Not found:${text}")
  endif()
endfunction()
