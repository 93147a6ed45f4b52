#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every header compiles alone, without warnings; the core does so with neither MPI nor CUDA within reach.
# usage: check.sh gcc|clang|nvcc COMPILER WORK_DIR
set -euo pipefail
kind=$1 compiler=$2 work=$3
include=$FSDP_SOURCE/include
mkdir -p "$work"
warnings=(-Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Werror)
[[ $kind != nvcc ]] && warnings+=(-Wpedantic)
mpi=()
IFS=: read -ra folders <<<"${FSDP_MPI_INCLUDES:-}"
for folder in "${folders[@]}"; do mpi+=(-isystem "$folder"); done

# One header: prints its name and the compiler's words when it fails.
check() {
  local header=$1 name flags=()
  name=$(tr '/.' '__' <<<"$header")
  local source=$work/$name.cpp
  case $header in
    fsdp/cuda/block.hpp) ;;  # tests run it on the host
    fsdp/cuda/* | fsdp/comm/nccl*) [[ $kind == nvcc ]] || return 0 ;;
  esac
  [[ $kind == nvcc ]] && source=$work/$name.cu
  if grep -qE '#include <mpi.h>|#include "fsdp/comm/mpi' "$include/$header"; then
    [[ $FSDP_HAVE_MPI == ON && $kind != nvcc ]] || return 0
    flags+=("${mpi[@]}")
  fi
  # Twice, so that a missing guard shows.
  printf '#include "%s"\n#include "%s"\n' "$header" "$header" >"$source"
  if [[ $kind == nvcc ]]; then
    "$compiler" -std=c++20 -x cu -arch=sm_90 -O0 -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror \
      -I"$include" -Xcompiler=-idirafter,"$FSDP_FMT_INCLUDE" -ptx -o /dev/null "$source" >"$source.log" 2>&1
  else
    "$compiler" -std=c++20 -fsyntax-only "${warnings[@]}" -pthread -I"$include" -idirafter "$FSDP_FMT_INCLUDE" "${flags[@]}" \
      -MD -MF "$source.d" "$source" >"$source.log" 2>&1
  fi || { echo "FAILED $header"; head -n 20 "$source.log"; return 1; }
  case $header in
    fsdp/host/* | fsdp/cuda/* | fsdp/comm/*) ;;
    *)
      if [[ $kind != nvcc ]] && grep -E '/(mpi|cuda_runtime|cuda_runtime_api|nccl)\.h' "$source.d"; then
        echo "FAILED $header: the core reaches a backend's header"
        return 1
      fi ;;
  esac
}
export -f check
export kind compiler work include FSDP_HAVE_MPI
declare -p warnings mpi >"$work/arrays"
cd "$include"
# Functions cross into xargs' shells, arrays do not: they are read back from a file.
if ! find fsdp -name '*.hpp' | sort |
  xargs -P 2 -I{} bash -c 'source "$work/arrays"; check "$1"' _ {}; then
  exit 1
fi
echo "$(find fsdp -name '*.hpp' | wc -l) headers, $kind"
