#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every header compiles alone, without warnings; the core does so with neither MPI nor CUDA within reach. Each header is compiled
# alone by one compiler, with the declarations of fmt's library, which take a quarter less time; the other compilers are given
# all headers together, with fmt as headers.
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

torch=()
IFS=: read -ra folders <<<"${FSDP_LIBTORCH_INCLUDES:-}"
for folder in "${folders[@]}"; do torch+=(-isystem "$folder"); done

needs_mpi() { grep -qE '#include <mpi.h>|#include "fsdp/comm/mpi' "$include/$1"; }
needs_openssl() { grep -qE '#include (<openssl/|"fsdp/comm/common/(secret|door|bootstrap))' "$include/$1"; }
has_openssl() { "$compiler" -E -x c++ - <<<"#include <openssl/hmac.h>" >/dev/null 2>&1; }
needs_torch() { [[ $1 == fsdp/libtorch* ]]; }

# How this compiler sees a header: `alone`, `together` with others, or (nothing) not at all.
group() {
  local header=$1
  case $header in
    fsdp/libtorch/cuda.hpp) return 0 ;; # it needs torch with CUDA
    fsdp/libtorch.hpp) # with all of its parts; torch's headers take long
      if [[ ${#torch[@]} -gt 0 && $kind == gcc ]]; then echo alone; fi # clang 14 refuses headers of torch 1.13 in C++20
      return 0 ;;
    fsdp/libtorch/*) return 0 ;;
    fsdp/cuda/block.hpp) ;;  # tests run it on the host
    fsdp/cuda/* | fsdp/comm/nccl*)
      if [[ $kind == nvcc ]]; then echo alone; fi
      return ;;
  esac
  if needs_openssl "$header" && ! has_openssl; then return 0; fi
  if needs_mpi "$header"; then
    [[ $FSDP_HAVE_MPI == ON && $kind != nvcc ]] || return 0
  fi
  if [[ $kind == gcc ]]; then echo alone; else echo together; fi
}

# Headers, in one file: prints the compiler's words when it fails.
check() {
  local header=$1 name flags=()
  name=$(tr '/.' '__' <<<"$header")
  local source=$work/$name.cpp
  [[ $kind == nvcc ]] && source=$work/$name.cu
  if [[ $kind == clang ]] || needs_mpi "$header"; then flags+=("${mpi[@]}"); fi
  if needs_torch "$header"; then flags+=("${torch[@]}"); fi
  if (($# == 1)); then flags+=(-DFSDP_FMT_LIBRARY=1); fi
  # Twice, so that a missing guard shows.
  printf '#include "%s"\n' "$@" "$@" >"$source"
  if [[ $kind == nvcc ]]; then
    "$compiler" -std=c++20 -x cu -arch=sm_90 -O0 -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror \
      -I"$include" -Xcompiler=-idirafter,"$FSDP_FMT_INCLUDE" "${flags[@]}" -ptx -o /dev/null "$source" >"$source.log" 2>&1
  else
    "$compiler" -std=c++20 -fsyntax-only "${warnings[@]}" -pthread -I"$include" -idirafter "$FSDP_FMT_INCLUDE" "${flags[@]}" \
      -MD -MF "$source.d" "$source" >"$source.log" 2>&1
  fi || { echo "FAILED $*"; head -n 20 "$source.log"; return 1; }
  case $header in
    fsdp/host/* | fsdp/cuda/* | fsdp/comm/* | fsdp/compiled/*) ;;
    *)
      if [[ $kind == gcc ]] && grep -E '/(mpi|cuda_runtime|cuda_runtime_api|nccl)\.h' "$source.d"; then
        echo "FAILED $header: the core reaches a backend's header"
        return 1
      fi ;;
  esac
}
export -f check needs_mpi needs_torch
export kind compiler work include FSDP_HAVE_MPI
declare -p warnings mpi torch >"$work/arrays"
cd "$include"
alone=() together=()
while read -r header; do
  case $(group "$header") in
    alone) alone+=("$header") ;;
    together) together+=("$header") ;;
  esac
done < <(find fsdp -name '*.hpp' | sort)
# Functions cross into xargs' shells, arrays do not: they are read back from a file.
run() { xargs -P 2 "$@" bash -c 'source "$work/arrays"; check "$@"' _; }
failed=0
if ((${#alone[@]})); then printf '%s\n' "${alone[@]}" | run -n 1 || failed=1; fi
if ((${#together[@]})); then printf '%s\n' "${together[@]}" | run || failed=1; fi
echo "$kind: ${#alone[@]} headers alone, ${#together[@]} together"
exit $failed
