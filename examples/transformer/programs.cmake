# SPDX-License-Identifier: Apache-2.0
# Functions that build trainers and their libraries. Included before the folders of examples, which compile in this order.

# Under a sanitizer trainers do without oneDNN: plain loops are what it can see into.
set(TRANSFORMER_HOST_BF16 OFF)
if(FSDP_HAVE_ONEDNN AND NOT FSDP_SANITIZE_FEWER)
  set(TRANSFORMER_HOST_BF16 ON)
endif()

# transformer_library(<name> <type> <source>... LINK <target>...)
function(transformer_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "LINK")
  add_library(${name} ${arg_UNPARSED_ARGUMENTS})
  fsdp_cuda_sources(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE fsdp_own PUBLIC ${arg_LINK})
  set_target_properties(${name} PROPERTIES CXX_EXTENSIONS OFF)
endfunction()

# transformer_layers(<name>): the layers of the model in the current folder, for the program and for tests, as <name>_layers_host
# and <name>_layers_cuda. See [Note: Layers are compiled once].
function(transformer_layers name)
  if(OpenBLAS_FOUND)
    transformer_library(${name}_layers_host STATIC layers_host.cpp LINK transformer_math fsdp::host OpenBLAS::OpenBLAS)
    if(TRANSFORMER_HOST_BF16)
      target_sources(${name}_layers_host PRIVATE layers_host_bf16.cpp)
      target_link_libraries(${name}_layers_host PUBLIC transformer_bf16)
    endif()
  endif()
  if(FSDP_HAVE_CUDA)
    transformer_library(${name}_layers_cuda STATIC layers_cuda_fp32.cu layers_cuda_bf16.cu LINK fsdp::cuda CUDA::cublas CUDA::cublasLt)
  endif()
endfunction()

# transformer_program(<name> [NVCC_FULL] MODELS <source>... COMMANDS <source>...)
# A trainer of the current folder, of its transformer_layers:
#   <name>_models    settings, and models in files: for the program and for tests
#   <name>_commands  what the program does but for training; it computes nothing
function(transformer_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NVCC_FULL" "" "MODELS;COMMANDS")
  set(rooms "${PROJECT_SOURCE_DIR}/examples/transformer")

  # The shipped config files become text in the program.
  file(GLOB configs CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/configs/*")
  list(SORT configs)
  set(config_texts "")
  foreach(config IN LISTS configs)
    get_filename_component(config_name "${config}" NAME)
    file(READ "${config}" text)
    string(APPEND config_texts "      {\"${config_name}\", R\"config(${text})config\"},\n")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${config}")
  endforeach()
  configure_file("${rooms}/run/config_files.cpp.in" "${CMAKE_CURRENT_BINARY_DIR}/config_files.cpp" @ONLY)

  # The program before its libraries, and its longest sources first: ninja begins to compile in this order, so that no compiler
  # waits for them at the end.
  set(ranks rank_host.cpp)
  if(TRANSFORMER_HOST_BF16)
    list(APPEND ranks rank_host_bf16.cpp)
  endif()
  set(sources ${ranks} ${rooms}/launch/process.cpp ${rooms}/launch/element_type.cpp main.cpp)
  set(link ${name}_commands ${name}_layers_host ${name}_models transformer_data transformer_report fsdp::host OpenBLAS::OpenBLAS CLI11::CLI11
      nlohmann_json::nlohmann_json xxHash::xxHash)
  set(with_mpi ${FSDP_HAVE_MPI})
  if(FSDP_SANITIZE_FEWER)
    set(with_mpi OFF)  # half the time; ranks that are threads run the same trainer, and other tests the communicator
  endif()
  if(with_mpi)
    list(APPEND link fsdp::mpi)
  endif()
  if(FSDP_HAVE_CUDA)
    list(APPEND sources ${rooms}/launch/gpu_threads.cu rank_cuda_fp32.cu rank_cuda_bf16.cu)
    list(APPEND link ${name}_layers_cuda fsdp::cuda CUDA::cublas CUDA::cublasLt)
  endif()
  if(FSDP_HAVE_NCCL)
    list(APPEND sources ${rooms}/launch/gpu_processes.cu)
    list(APPEND link fsdp::nccl)
  endif()
  set(nvcc_full "")
  if(arg_NVCC_FULL)
    set(nvcc_full NVCC_FULL)
  endif()
  fsdp_compile_engine(${ranks} ${rooms}/launch/process.cpp)
  fsdp_program(${name} ${nvcc_full} ${sources} LINK ${link})
  target_include_directories(${name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  # For this file alone: the others are the same with any of these and without, and a compiler cache finds them again.
  set(have MPI=$<BOOL:${with_mpi}> CUDA=$<BOOL:${FSDP_HAVE_CUDA}> NCCL=$<BOOL:${FSDP_HAVE_NCCL}>)
  list(TRANSFORM have PREPEND TRANSFORMER_HAVE_)
  list(APPEND have "TRANSFORMER_VERSION=\"${PROJECT_VERSION}\"")
  set_property(SOURCE ${rooms}/launch/process.cpp APPEND PROPERTY COMPILE_DEFINITIONS ${have})

  transformer_library(${name}_models STATIC ${arg_MODELS} "${CMAKE_CURRENT_BINARY_DIR}/config_files.cpp" $<TARGET_OBJECTS:transformer_weights>
                      $<TARGET_OBJECTS:transformer_settings> LINK transformer_data nlohmann_json::nlohmann_json xxHash::xxHash)
  transformer_library(${name}_commands STATIC ${arg_COMMANDS} $<TARGET_OBJECTS:transformer_commands>
                      LINK ${name}_models transformer_report fsdp::host OpenBLAS::OpenBLAS CLI11::CLI11)
  foreach(target IN ITEMS ${name}_models ${name}_commands)
    target_include_directories(${target} PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
    fsdp_merge(${target})
    fsdp_compile_quickly(${target})
  endforeach()

  # No test runs the program under ThreadSanitizer: tests of its layers and data have its threads.
  if(FSDP_SANITIZE MATCHES "thread" AND FSDP_SANITIZE_FEWER)
    set_target_properties(${name} ${name}_commands ${name}_models PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()
