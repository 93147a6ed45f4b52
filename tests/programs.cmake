# SPDX-License-Identifier: Apache-2.0
# The programs of the convention's tests: the sources of a folder are one program, several of them one compile unit.
#
# A test parses the same headers and instantiates the same engines as its neighbours; compiled one by one, all of this
# took three times as long. Each source keeps a ctest of its own: Catch2 tags every test with the name of its file.
set(FSDP_TESTS_IN_A_UNIT 20 CACHE STRING "How many tests FSDP_MERGE_SOURCES compiles as one: more share more, and take more memory (up to 3 GB at 20)")

# The value of a line `// key: value` (in scripts `# key: value`), ON for a line `// key`, else nothing.
function(fsdp_source_line source key result)
  file(STRINGS "${source}" lines REGEX "^(//|#) ${key}(:.*)?$")
  string(REGEX REPLACE "^(//|#) ${key}:? *" "" value "${lines}")
  string(REPLACE " " ";" value "${value}")
  if(lines AND NOT value)
    set(value ON)
  endif()
  set(${result} "${value}" PARENT_SCOPE)
endfunction()

# Whether a source can share a program with others: one that has a main function, opens a namespace that others see, or
# includes a source cannot. Programs for a GPU have one source each, which tests/gpu.sh builds and runs alone; on the stand-ins
# they share like others.
function(fsdp_can_share source result)
  file(STRINGS "${source}" own REGEX "^(int main\\(|namespace [a-z_:]+ {|template <>|#include \".*[.]cpp\")")
  set(${result} ON PARENT_SCOPE)
  if(own OR (source MATCHES "[.]cu$|_nccl[.]cpp$" AND NOT FSDP_CUDA STREQUAL STANDIN))
    set(${result} OFF PARENT_SCOPE)
  endif()
endfunction()

# [Note: Merged sources]
# The sources of a unit are included one after another, each inside a namespace of its own, for they name their helpers
# alike. Everything that any of them includes comes first, so that no header is read inside such a namespace; a source
# that includes something under an #if, or defines a macro, is compiled by itself.
function(fsdp_merge_sources program)
  set(includes "")
  foreach(source IN LISTS ARGN)
    file(STRINGS "${source}" lines REGEX "^#include ")
    file(READ "${source}" text)
    string(FIND "${text}" "\n#include" last_include REVERSE)
    string(FIND "${text}" "\n#if" condition)
    string(FIND "${text}" "\n#define" macro)
    if((condition GREATER -1 AND condition LESS last_include) OR macro GREATER -1)
      set_source_files_properties("${source}" PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    else()
      list(APPEND includes ${lines})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES includes)
  list(JOIN includes "\n" includes)
  set(header "${CMAKE_CURRENT_BINARY_DIR}/${program}_includes.hpp")
  file(CONFIGURE OUTPUT "${header}" CONTENT "// Generated: what the sources of ${program} include.\n${includes}\n" @ONLY)
  set_target_properties(${program} PROPERTIES
    UNITY_BUILD ON
    UNITY_BUILD_BATCH_SIZE ${FSDP_TESTS_IN_A_UNIT}
    UNITY_BUILD_UNIQUE_ID FSDP_TEST_SOURCE
    UNITY_BUILD_CODE_BEFORE_INCLUDE "#include \"${header}\"\nnamespace FSDP_TEST_SOURCE {"
    UNITY_BUILD_CODE_AFTER_INCLUDE "}")
endfunction()

# Sets `result` to Catch2's filter for the test cases of one source: those that are not hidden, or with `argument` those with that tag.
function(fsdp_source_filter stem argument result)
  if(argument)
    set(filter "[#${stem}]${argument}")
  else()
    set(filter "[#${stem}]~[.]")
  endif()
  set(empty UnmatchedTestSpec)
  if(Catch2_VERSION VERSION_LESS 3)
    set(empty NoTests)
  endif()
  set(${result} --filenames-as-tags --warn ${empty} "${filter}" PARENT_SCOPE)
endfunction()
