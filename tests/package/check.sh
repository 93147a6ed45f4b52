#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two ways to use the library, each from a project of its own: add_subdirectory and find_package. (docs/installing.sh uses the
# compiler alone.) And that no header warns where a user's optimising compiler looks into all of it.
# usage: check.sh optimised|subdirectory|install WORK_DIR
# timeout: 3600
set -euo pipefail
way=$1 work=$2
consumer=$FSDP_SOURCE/tests/package/consumer
rm -rf "$work"
mkdir -p "$work"
configure=("$CMAKE" -DCMAKE_CXX_COMPILER="$CXX" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG= -DWITH_MPI="$FSDP_HAVE_MPI")

# build_and_run TARGETS CONFIGURE_ARGUMENT...   TARGETS: all, or several words
build_and_run() {
  local targets program
  read -ra targets <<<"$1"
  "${configure[@]}" "${@:2}" -S "$consumer" -B "$work/build"
  "$CMAKE" --build "$work/build" --target "${targets[@]}"
  if [[ -x $work/build/consumer ]]; then "$work/build/consumer" | grep -x 'sum 6'; fi
  # With fsdp::compiled a program does the same, and its own files compile none of the main parts of the engine and of checkpoints.
  rm -f "$work/weights"
  for program in "$work"/build/engine_{headers,shared,compiled,compiled_mpi}; do
    [[ -x $program ]] || continue
    (cd "$work" && rm -rf checkpoints && "$program") >"$work/printed"
    if [[ -e $work/weights ]]; then diff "$work/weights" "$work/printed"; else cp "$work/printed" "$work/weights"; fi
  done
  grep '^vector.w: 0x1' "$work/weights"
  local way objects
  for way in headers library compiled compiled_mpi; do
    objects=("$work/build/CMakeFiles/engine_$way.dir"/*.o)
    [[ -e ${objects[0]} ]] || continue
    nm -C --defined-only "${objects[@]}" >"$work/symbols"
    local found=no expected=no
    if grep -qE ' fsdp::v[0-9_]+::(step::Passes|compile_program|detail::(EngineCore|Executor|OpenUse|UnitPlan|DeclaredUnits|FormatOutput)|checkpoint::(parse_manifest|parse_rank_file|Fields::whole|commit_checkpoint))' "$work/symbols"; then found=yes; fi
    if [[ $way == headers ]]; then expected=yes; fi
    if [[ $found != "$expected" ]]; then
      echo "engine_$way: its file compiles the engine: expected $expected, got $found"
      exit 1
    fi
  done
}

case $way in
  optimised)
    flags=(-std=c++20 -O3 -Wall -Wextra -Werror -pthread -I "$FSDP_SOURCE/include" -idirafter "$FSDP_FMT_INCLUDE")
    if [[ $FSDP_HAVE_MPI == ON ]]; then
      flags+=(-DWITH_MPI)
      IFS=: read -ra mpi <<<"$FSDP_MPI_INCLUDES"
      for folder in "${mpi[@]}"; do flags+=(-isystem "$folder"); done
    fi
    "$FSDP_SOURCE/cmake/compiler_launcher.sh" "$CXX" "${flags[@]}" -DFSDP_FMT_LIBRARY=1 -c "$FSDP_SOURCE/tests/package/everything.cpp" -o "$work/everything.o"
    ;;
  subdirectory)
    # (docs/installing.sh has a subdirectory with fmt as headers, which is the default.)
    build_and_run all -DFSDP_SUBDIRECTORY="$FSDP_SOURCE" -DFSDP_CUDA=OFF -DFSDP_FMT_LIBRARY=ON
    for program in consumer engine_headers engine_shared; do
      [[ -x $work/build/$program ]] || { echo "$program was not built"; exit 1; }
    done
    # A project that only uses the library builds none of its tests, and installs nothing of it.
    if grep -qE '^FSDP_(BUILD_[A-Z]+|INSTALL):BOOL=ON' "$work/build/CMakeCache.txt"; then
      echo "tests, examples, benchmarks or install rules are on in a subdirectory"
      exit 1
    fi
    ;;
  install)
    "$CMAKE" -S "$FSDP_SOURCE" -B "$work/library" -DCMAKE_CXX_COMPILER="$CXX" -DFSDP_MPI=OFF -DFSDP_CUDA=OFF \
      -DFSDP_BUILD_TESTS=OFF -DFSDP_BUILD_EXAMPLES=OFF -DFSDP_BUILD_BENCHMARKS=OFF
    "$CMAKE" --install "$work/library" --prefix "$work/prefix"
    if grep -r FSDP_FMT_LIBRARY=1 "$work/prefix/share"; then
      echo "what is installed needs fmt's library"
      exit 1
    fi
    # All components are found; the subdirectory's programs are those of MPI.
    "${configure[@]}" -DCMAKE_PREFIX_PATH="$work/prefix" -S "$consumer" -B "$work/components"
    build_and_run engine_compiled -DCMAKE_PREFIX_PATH="$work/prefix" -DWITH_MPI=OFF
    diff <(cd "$FSDP_SOURCE/include" && find . -name '*.[ch]pp' | sort) <(cd "$work/prefix/include" && find . -type f | sort)
    # An unknown component, and one whose dependency is missing, are errors that say so.
    refuse() {
      if "${configure[@]}" -DCMAKE_PREFIX_PATH="$work/prefix" -S "$consumer" -B "$work/refused_$1" "${@:3}" >"$work/refused_$1.log" 2>&1; then
        echo "$1: configured, though it must not"
        exit 1
      fi
      grep -q "$2" <<<"$(tr -s ' \n' ' ' <"$work/refused_$1.log")" || { cat "$work/refused_$1.log"; exit 1; }
    }
    refuse unknown "no component 'tpu'" -DEXTRA_COMPONENT=tpu
    refuse missing_mpi "component .compiled_mpi. needs MPI" -DEXTRA_COMPONENT=compiled_mpi -DWITH_MPI=OFF -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON
    refuse missing "component 'cuda' needs CUDAToolkit" -DEXTRA_COMPONENT=cuda -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON
    refuse missing_cuda "component 'nccl' needs CUDAToolkit" -DEXTRA_COMPONENT=nccl -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON
    ;;
esac
