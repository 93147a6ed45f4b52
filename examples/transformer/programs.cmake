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
    transformer_library(${name}_layers_host STATIC instances/layers_host.cpp LINK transformer_math fsdp::host OpenBLAS::OpenBLAS)
    if(TRANSFORMER_HOST_BF16)
      target_link_libraries(${name}_layers_host PUBLIC transformer_bf16)
    endif()
  endif()
  if(FSDP_HAVE_CUDA)
    transformer_library(${name}_layers_cuda STATIC instances/layers_cuda.cu LINK fsdp::cuda CUDA::cublas CUDA::cublasLt)
  endif()
endfunction()

# transformer_program(<name> [NVCC_FULL] MODELS <source>... COMMANDS <source>...)
# A trainer of the current folder, of its transformer_layers:
#   <name>_models    settings, and models in files: for the program and for tests
#   <name>_commands  what the program does but for training; it computes nothing
#   <name>_ranks     main() and training on the host: a library of its own, for its objects are the same with CUDA and without
# It links transformer_launch, which starts the ranks.
function(transformer_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "NVCC_FULL" "" "MODELS;COMMANDS")

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
  configure_file("${PROJECT_SOURCE_DIR}/examples/transformer/run/config_files.cpp.in" "${CMAKE_CURRENT_BINARY_DIR}/config_files.cpp" @ONLY)

  # The longest sources first: ninja begins to compile in this order, so that no compiler waits for them at the end.
  fsdp_compile_engine(instances/rank_host.cpp)
  transformer_library(${name}_ranks OBJECT EXCLUDE_FROM_ALL instances/rank_host.cpp main.cpp LINK ${name}_commands ${name}_layers_host)
  set(sources $<TARGET_OBJECTS:${name}_ranks>)
  set(link transformer_launch ${name}_commands ${name}_layers_host)
  if(FSDP_HAVE_CUDA)
    list(PREPEND sources instances/rank_cuda.cu)
    list(APPEND link ${name}_layers_cuda)
  endif()
  set(nvcc_full "")
  if(arg_NVCC_FULL)
    set(nvcc_full NVCC_FULL)
  endif()
  fsdp_program(${name} ${nvcc_full} ${sources} LINK ${link})

  transformer_library(${name}_models STATIC ${arg_MODELS} "${CMAKE_CURRENT_BINARY_DIR}/config_files.cpp" $<TARGET_OBJECTS:transformer_weights>
                      $<TARGET_OBJECTS:transformer_settings> LINK transformer_data nlohmann_json::nlohmann_json xxHash::xxHash)
  transformer_library(${name}_commands STATIC ${arg_COMMANDS} $<TARGET_OBJECTS:transformer_commands>
                      LINK ${name}_models transformer_report fsdp::host OpenBLAS::OpenBLAS CLI11::CLI11)
  # Merged with it, the models would be other text in each build folder, which a compiler cache compiles anew.
  set_property(SOURCE "${CMAKE_CURRENT_BINARY_DIR}/config_files.cpp" PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
  foreach(target IN ITEMS ${name}_models ${name}_commands)
    fsdp_merge(${target})
    fsdp_compile_quickly(${target})
  endforeach()

  # Its manual page and its completion for bash, in docs/man: a part of the target `docs`.
  if(TARGET docs)
    add_custom_target(${name}_manual COMMAND bash "${PROJECT_SOURCE_DIR}/docs/site/manual.sh" "$<TARGET_FILE:${name}>" "${PROJECT_BINARY_DIR}/docs/man" VERBATIM)
    add_dependencies(docs ${name}_manual)
  endif()

  # No test runs the program under ThreadSanitizer: tests of its layers and data have its threads.
  if(FSDP_SANITIZE MATCHES "thread" AND FSDP_SANITIZE_FEWER)
    set_target_properties(${name} ${name}_commands ${name}_models PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()
