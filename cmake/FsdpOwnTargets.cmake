# SPDX-License-Identifier: Apache-2.0
# fsdp_own: what this project's own tests, examples and benchmarks are compiled with. Users never inherit it.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()

add_library(fsdp_own INTERFACE)
set(cxx "$<COMPILE_LANGUAGE:CXX>")
set(cuda "$<COMPILE_LANGUAGE:CUDA>")
target_compile_features(fsdp_own INTERFACE cxx_std_20)
target_include_directories(fsdp_own INTERFACE "${PROJECT_SOURCE_DIR}/examples")  # "transformer/..."
# -O of nvcc is of the host's code alone, which only enqueues: the preset cuda keeps it at 1, for nvcc takes long enough.
target_compile_options(fsdp_own INTERFACE
  "$<${cxx}:-Wall;-Wextra;-Wpedantic;-Wshadow;-Wconversion;-Wsign-conversion>"
  "$<${cxx}:-fno-math-errno;-fno-trapping-math>"
  "$<${cuda}:-std=c++20>"  # CMake 3.25 does not know CUDA_STANDARD 20
  "$<${cuda}:-Xcompiler=-Wall,-Wextra,-fno-math-errno,-fno-trapping-math>")
target_compile_definitions(fsdp_own INTERFACE "$<${cuda}:FMT_USE_CONSTEXPR=1>")  # fmt 9, whichever header comes first
# A false alarm of g++ 12 at -O3: "text" + std::string. The library's headers do without it (package_optimised).
target_compile_options(fsdp_own INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>"
                                          "$<${cuda}:-Xcompiler=-Wno-restrict>")
# g++ collects garbage whenever its heap has doubled, from 128 MB on. Beginning at 1 GB saved a sixth of the time of tests_checkpoint,
# and took 1.39 GB instead of 1.07 (g++ 12.2, 2026-11-29).
cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND memory GREATER 8000)
  target_compile_options(fsdp_own INTERFACE "$<${cxx}:--param=ggc-min-heapsize=1048576>"
                                            "$<${cuda}:-Xcompiler=--param=ggc-min-heapsize=1048576>")
endif()
# Newer compilers than those that were tried find new things to warn of, and must not stop a newcomer.
set(newest_tried_GNU 14)
set(newest_tried_Clang 14)
set(newest "${newest_tried_${CMAKE_CXX_COMPILER_ID}}")
if(FSDP_WERROR AND newest AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS_EQUAL "${newest}.999")
  target_compile_options(fsdp_own INTERFACE "$<${cxx}:-Werror>" "$<${cuda}:-Werror=all-warnings;-Xcompiler=-Werror>")
endif()
if(FSDP_NATIVE)
  target_compile_options(fsdp_own INTERFACE "$<${cxx}:-march=native>")
  # Where the CPU has 512-bit vectors, use them: row kernels gain up to a third.
  include(CheckCXXCompilerFlag)
  check_cxx_compiler_flag(-mprefer-vector-width=512 FSDP_CAN_PREFER_WIDE_VECTORS)
  if(FSDP_CAN_PREFER_WIDE_VECTORS)
    target_compile_options(fsdp_own INTERFACE "$<${cxx}:-mprefer-vector-width=512>")
  endif()
endif()
if(FSDP_SANITIZE)
  target_compile_options(fsdp_own INTERFACE "$<${cxx}:-fsanitize=${FSDP_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>")
  # These checks of UndefinedBehaviorSanitizer nearly double the compile time. AddressSanitizer reports accesses through null
  # pointers and accesses beyond an object; no class here is cast from a polymorphic base; x86 and Arm load unaligned values, and
  # the tests of layouts check what vectors need. FSDP_SANITIZE_ALL keeps these checks.
  if(FSDP_SANITIZE MATCHES "address" AND FSDP_SANITIZE MATCHES "undefined" AND FSDP_SANITIZE_FEWER)
    target_compile_options(fsdp_own INTERFACE
      "$<${cxx}:-fno-sanitize=null,alignment,object-size,pointer-overflow,vptr,nonnull-attribute,returns-nonnull-attribute>")
  endif()
  target_link_options(fsdp_own INTERFACE "-fsanitize=${FSDP_SANITIZE}")
endif()

if(FSDP_CUDA STREQUAL STANDIN)
  fsdp_add_standin()
endif()

# fsdp_cuda_sources(<target> <source>...): with the stand-ins, the C++ compiler compiles CUDA's sources, with FSDP_CUDA_SOURCE. It
# does so at -O1: higher levels would cost more compile time than their tests save. If all sources are CUDA's, options and
# definition are the target's, so that the sources can be merged. Called in the folder of the target.
function(fsdp_cuda_sources target)
  set(sources ${ARGN})
  list(FILTER sources INCLUDE REGEX "[.]cu$")
  if(NOT sources OR NOT FSDP_CUDA STREQUAL STANDIN)
    return()
  endif()
  set_source_files_properties(${sources} PROPERTIES LANGUAGE CXX)
  if(sources STREQUAL ARGN)
    target_compile_options(${target} PRIVATE -O1)
    target_compile_definitions(${target} PRIVATE FSDP_CUDA_SOURCE=1)
  else()
    set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS -O1 COMPILE_DEFINITIONS FSDP_CUDA_SOURCE=1)
  endif()
endfunction()

# fsdp_program(<name> [NVCC_FULL] <source>... LINK <target>...): an executable of this project. The target cuda_programs has the
# programs that need the CUDA toolkit; those with NVCC_FULL are only in cuda_programs_full, for nvcc takes a minute for an engine.
# Compiled by the C++ compiler for the stand-ins, all are in both.
function(fsdp_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NVCC_FULL" "" "LINK")
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  fsdp_cuda_sources(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE fsdp_own ${arg_LINK})
  set_target_properties(${name} PROPERTIES CXX_EXTENSIONS OFF)
  if("${arg_UNPARSED_ARGUMENTS}" MATCHES "[.]cu(;|$)" OR "${arg_LINK}" MATCHES "fsdp::(cuda|nccl)")
    set_property(GLOBAL APPEND PROPERTY FSDP_CUDA_PROGRAMS_FULL ${name})
    if(NOT arg_NVCC_FULL OR FSDP_CUDA STREQUAL STANDIN)
      set_property(GLOBAL APPEND PROPERTY FSDP_CUDA_PROGRAMS ${name})
    endif()
  endif()
endfunction()

# fsdp_mpirun(<variable> <ranks>): the command that starts this number of ranks, with the settings that many ranks on few cores
# need. The program follows it.
function(fsdp_mpirun variable ranks)
  get_property(flags GLOBAL PROPERTY FSDP_MPIRUN_FLAGS)
  if(NOT flags)
    execute_process(COMMAND "${MPIEXEC_EXECUTABLE}" --version OUTPUT_VARIABLE version ERROR_VARIABLE version)
    if(version MATCHES "Open ?MPI|OpenRTE|open-mpi")
      set(flags --oversubscribe --bind-to none)
    else()
      set(flags -bind-to none)
    endif()
    set_property(GLOBAL PROPERTY FSDP_MPIRUN_FLAGS "${flags}")
  endif()
  set(${variable} "${MPIEXEC_EXECUTABLE}" ${flags} ${MPIEXEC_NUMPROC_FLAG} ${ranks} PARENT_SCOPE)
endfunction()

# fsdp_mpi_test(<name> <executable> <ranks> [args...]): runs an executable under mpirun
function(fsdp_mpi_test name executable ranks)
  fsdp_mpirun(mpirun ${ranks})
  add_test(NAME ${name} COMMAND ${mpirun} "$<TARGET_FILE:${executable}>" ${ARGN})
  fsdp_test_properties(${name} ${executable})
  set_tests_properties(${name} PROPERTIES PROCESSORS ${ranks})
  set_property(TEST ${name} APPEND PROPERTY LABELS mpi)
  if(FSDP_SANITIZE MATCHES "address")  # MPI itself leaks
    set_property(TEST ${name} APPEND PROPERTY ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0")
  endif()
endfunction()

# fsdp_merge(<target>): its sources, sixteen at a time, are one compile unit where FSDP_MERGE_SOURCES is on. They share what they
# include, and their unnamed namespaces. A source with options of its own stays alone.
function(fsdp_merge target)
  if(FSDP_MERGE_SOURCES)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  endif()
endfunction()

# fsdp_compile_quickly(<target>): for code that decides what happens and computes little, like all of the schedule's tests. Only the
# build type Debug has lines for a debugger, which take a tenth of the time. Sanitized builds keep the level and the lines of their
# preset.
function(fsdp_compile_quickly target)
  if(NOT FSDP_SANITIZE)
    target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-Og>"
                                             "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<NOT:$<CONFIG:Debug>>>:-g0>")
  endif()
endfunction()

# fsdp_compile_engine(<source>...): for sources that instantiate an engine. An engine decides and orders more than it computes: at
# -O1 with vectors such a file compiles in two thirds of the time, and trains as fast. Layers and products have the full level.
# Called in the folder of the target.
function(fsdp_compile_engine)
  if(NOT FSDP_SANITIZE)
    set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -O1 -ftree-vectorize)
  endif()
endfunction()

# fsdp_test_properties(<test> [<target>...]): what every test of this project runs under, and the targets that this one
# needs, which tests/run.sh --only= builds.
function(fsdp_test_properties name)
  set_property(GLOBAL APPEND PROPERTY FSDP_TESTS ${name})
  set_property(GLOBAL PROPERTY FSDP_TARGETS_OF_${name} ${ARGN})
  set_tests_properties(${name} PROPERTIES
    TIMEOUT 300
    SKIP_RETURN_CODE 77
    ENVIRONMENT "OPENBLAS_NUM_THREADS=1;OPENBLAS_CORETYPE=Haswell;OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMPI_MCA_btl_vader_single_copy_mechanism=none")
endfunction()
