# SPDX-License-Identifier: Apache-2.0
# Libraries of what a program's files would each compile: fsdp::compiled (texts, and engines on the host) and
# fsdp::compiled_mpi (engines over MPI). They are built by the project that links them, with its compiler and flags.
function(fsdp_compiled name source definition)
  add_library(fsdp_${name} STATIC EXCLUDE_FROM_ALL "${source}")
  add_library(fsdp::${name} ALIAS fsdp_${name})
  target_compile_definitions(fsdp_${name} PUBLIC ${definition}=1)
  target_link_libraries(fsdp_${name} PUBLIC ${ARGN})
endfunction()

if(TARGET Threads::Threads AND NOT TARGET fsdp::compiled)
  fsdp_compiled(compiled "${FSDP_INCLUDE_DIR}/fsdp/compiled/host.cpp" FSDP_COMPILED fsdp::host)
endif()
if(TARGET MPI::MPI_CXX AND NOT TARGET fsdp::compiled_mpi)
  fsdp_compiled(compiled_mpi "${FSDP_INCLUDE_DIR}/fsdp/compiled/mpi.cpp" FSDP_COMPILED_MPI fsdp::compiled fsdp::mpi)
endif()
