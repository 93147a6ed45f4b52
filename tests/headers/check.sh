#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every header compiles alone, without warnings. With `together`, all headers are one file instead, which takes seconds; with
# `public`, those that programs include compile alone, and the others as parts of them.
# usage: tests/headers/check.sh gcc|clang|nvcc COMPILER WORK_DIR [together|public]
# timeout: 3600
#
# FSDP_FMT_INCLUDE, FSDP_MPI_INCLUDES, FSDP_CUDA_INCLUDE and FSDP_LIBTORCH_INCLUDES name folders of headers. Without these
# variables fmt is that of the system, MPI that of mpic++ in PATH, and CUDA that of /usr/local/cuda. g++ and clang++ see headers
# for CUDA only one by one, with the stand-in for launches; nvcc sees them as they are.
#
# [Note: Headers compiled alone]
# Most of the time goes into the standard library, fmt and JSON, again in each header. So a header is compiled behind a
# precompiled one of `bases`, but only behind one that it includes itself, directly or through other headers, without a
# condition and before its first line of code. Everything that the base declares is then declared in the header alone as well.
set -euo pipefail
kind=$1 compiler=$2 work=$3 way=${4:-alone}
: "${FSDP_SOURCE:=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}" "${FSDP_FMT_INCLUDE:=/usr/include}"
if [[ -z ${FSDP_HAVE_MPI+set} ]]; then
  FSDP_MPI_INCLUDES=$(mpic++ --showme:incdirs 2>/dev/null | tr ' ' ':') || FSDP_MPI_INCLUDES=
  FSDP_HAVE_MPI=${FSDP_MPI_INCLUDES:+ON}
fi
include=$FSDP_SOURCE/include
mkdir -p "$work" && work=$(cd "$work" && pwd)
rm -f "$work"/*.{gch,pch}
bases=(fsdp/tensor.hpp fsdp/detail/base/format.hpp fsdp/layout.hpp fsdp/detail/host/backoff.hpp fsdp/detail/comm/messages.hpp
       fsdp/json.hpp)  # those that take longer to compile come later
warnings=(-Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Werror)
[[ $kind != nvcc ]] && warnings+=(-Wpedantic)
mpi=()
IFS=: read -ra folders <<<"${FSDP_MPI_INCLUDES:-}"
for folder in "${folders[@]}"; do mpi+=(-isystem "$folder"); done

torch=()
IFS=: read -ra folders <<<"${FSDP_LIBTORCH_INCLUDES:-}"
for folder in "${folders[@]}"; do torch+=(-isystem "$folder"); done

cuda_include=${FSDP_CUDA_INCLUDE:-/usr/local/cuda/include}
is_former() { grep -q '^// A former path of' "$include/$1"; }
needs_cuda() { [[ $1 == fsdp/detail/cuda/* && $1 != fsdp/detail/cuda/block.hpp || $1 == fsdp/cuda.hpp || $1 == fsdp/detail/nccl/* || $1 == fsdp/nccl.hpp ]]; } # tests run block.hpp on the host
has_cuda() { [[ -e $cuda_include/cuda_runtime_api.h && ($1 != fsdp/detail/nccl/* && $1 != fsdp/nccl.hpp || -e $cuda_include/nccl.h) ]]; }
needs_mpi() { grep -qE '#include <mpi.h>|#include "fsdp/detail/mpi/' "$include/$1"; }
needs_openssl() { grep -qE '#include (<openssl/|"fsdp/(bootstrap|detail/tcp/(environment|join))\.hpp)' "$include/$1"; }
has_openssl() { "$compiler" -E -x c++ - <<<"#include <openssl/hmac.h>" >/dev/null 2>&1; }
needs_torch() { [[ $1 == fsdp/libtorch* || $1 == fsdp/detail/libtorch/* ]]; }

# How this compiler sees a header: `alone`, `together` with others, or (nothing) not at all.
group() {
  local header=$1
  if is_former "$header"; then return 0; fi
  case $header in
    fsdp/libtorch_cuda.hpp) return 0 ;; # it needs torch with CUDA
    fsdp/libtorch.hpp) # with all of its parts; torch's headers take long
      if [[ ${#torch[@]} -gt 0 && $kind == gcc ]]; then echo alone; fi # clang 14 refuses headers of torch 1.13 in C++20
      return 0 ;;
    fsdp/detail/libtorch/*) return 0 ;;
  esac
  if needs_cuda "$header" && [[ $kind != nvcc ]]; then
    [[ $way == alone ]] && has_cuda "$header" || return 0
  fi
  if needs_openssl "$header" && ! has_openssl; then return 0; fi
  if needs_mpi "$header"; then
    [[ $FSDP_HAVE_MPI == ON && $kind != nvcc ]] || return 0
  fi
  if [[ $kind == nvcc ]] && ! needs_cuda "$header"; then echo together; else echo "$way"; fi
}

# "header base" for each header that includes one of the bases: the last of these.
find_bases() {
  awk -v list="${bases[*]}" '
    FNR == 1 { conditions = code = 0 }
    /^ *# *if/ { ++conditions }
    /^ *# *endif/ { --conditions }
    !/^ *($|#|\/\/)/ { code = 1 }
    !conditions && !code && /^ *# *include "/ { split($0, part, "\""); includes[FILENAME] = includes[FILENAME] " " part[2] }
    function reaches(file, base,   names, count, i) {
      if ((file, base) in known) return known[file, base]
      count = split(includes[file], names, " ")
      for (i = 1; i <= count; ++i)
        if (names[i] == base || reaches(names[i], base)) return known[file, base] = 1
      return known[file, base] = 0
    }
    END {
      count = split(list, base, " ")
      for (file in includes)
        for (i = count; i > 0; --i)
          if (reaches(file, base[i])) { print file, base[i]; break }
    }' "$@"
}

# check BASE HEADER...: compiles a file of these headers behind a base (or `-`); prints the compiler's words when it fails.
check() {
  local base=$1 header=$2 name flags=() result=(-fsyntax-only)
  shift
  name=$(tr '/.' '__' <<<"$header")
  local source=$work/$name.cpp
  [[ $kind == nvcc ]] && source=$work/$name.cu
  if (($# > 1)) || needs_mpi "$header"; then flags+=("${mpi[@]}"); fi
  if [[ $kind != nvcc ]] && needs_cuda "$header"; then
    flags+=(-DFSDP_CUDA_STANDIN=1 -I"$FSDP_SOURCE" -I"$FSDP_SOURCE/tests/standin/runtime" -isystem "$cuda_include")
  fi
  if needs_torch "$header"; then flags+=("${torch[@]}"); fi
  if (($# == 1)); then flags+=(-DFSDP_FMT_LIBRARY=1); fi # fmt's declarations take a quarter less time
  if [[ $kind != nvcc && " ${bases[*]} " == *" $header "* && $# == 1 ]]; then
    source=$work/$name.hpp
    result=(-x c++-header -o "$source.gch")
    if [[ $kind == clang ]]; then result=(-x c++-header -Xclang -fpch-instantiate-templates -o "$source.pch"); fi
  elif [[ $base != - && $kind == gcc ]]; then
    flags+=(-include "$work/$(tr '/.' '__' <<<"$base").hpp")
  elif [[ $base != - ]]; then
    flags+=(-include-pch "$work/$(tr '/.' '__' <<<"$base").hpp.pch")
  fi
  # Twice, so that a missing guard shows.
  printf '#include "%s"\n' "$@" "$@" >"$source"
  if (($# > 1)) && [[ $kind != nvcc ]]; then printf '#include "%s"\n' "$FSDP_SOURCE/tests/headers/deduced.hpp" >>"$source"; fi
  if [[ $kind == nvcc ]]; then
    "$compiler" -std=c++20 -x cu -arch=sm_90 -O0 -Werror=all-warnings -Xcompiler=-Wall,-Wextra,-Werror \
      -I"$include" -Xcompiler=-idirafter,"$FSDP_FMT_INCLUDE" "${flags[@]}" -ptx -o /dev/null "$source" >"$source.log" 2>&1
  else
    "$compiler" -std=c++20 "${warnings[@]}" -pthread -I"$include" -idirafter "$FSDP_FMT_INCLUDE" "${flags[@]}" "${result[@]}" \
      "$source" >"$source.log" 2>&1
  fi || { echo "FAILED ${*:1:3}${4:+ and others}"; head -n 20 "$source.log"; return 1; }
}
export -f check needs_cuda needs_mpi needs_torch
export kind compiler work include cuda_include FSDP_HAVE_MPI FSDP_FMT_INCLUDE FSDP_SOURCE
declare -p warnings mpi torch bases >"$work/arrays"
cd "$include"
mapfile -t headers < <(find fsdp -name '*.hpp' | sort)
public=
if [[ $way == public ]]; then public=1 way=alone; fi
declare -A base_of=()
while read -r header base; do base_of[$header]=$base; done < <(find_bases "${headers[@]}")
first=() alone=() together=()  # the bases are compiled first, with nothing before them
for header in "${headers[@]}"; do
  if [[ $public && $header == fsdp/detail/* && " ${bases[*]} " != *" $header "* ]]; then continue; fi
  seen=$(group "$header")
  if [[ $seen == alone && $kind != nvcc && " ${bases[*]} " == *" $header "* ]]; then
    first+=(- "$header")
  elif [[ $seen == alone ]]; then
    base=-
    if [[ $kind != nvcc ]]; then base=${base_of[$header]:--}; fi
    alone+=("$base" "$header")
  elif [[ $seen == together ]]; then
    together+=("$header")
  fi
done
# Functions cross into xargs' shells, arrays do not: they are read back from a file.
run() { xargs -P 2 "$@" bash -c 'source "$work/arrays"; check "$@"' _; }
failed=0
if ((${#first[@]})); then printf '%s\n' "${first[@]}" | run -n 2 || exit 1; fi
if ((${#alone[@]})); then printf '%s\n' "${alone[@]}" | run -n 2 || failed=1; fi
if ((${#together[@]})); then printf '%s\n' - "${together[@]}" | run || failed=1; fi
# Former paths of headers lead to the present ones, and a warning names these.
if [[ $kind != nvcc ]]; then
  former=()
  for header in "${headers[@]}"; do
    is_former "$header" || continue
    present=$(sed -n 's/^#include "\(.*\)"/\1/p' "$header")
    grep -qF "\"$header is $present now\"" "$header" || { echo "FAILED $header: its warning does not name $present"; failed=1; }
    needs_cuda "$present" || needs_torch "$present" || needs_mpi "$present" || needs_openssl "$present" || former+=("$header")
  done
  printf '#include "%s"\n' "${former[@]}" >"$work/former.cpp"
  "$compiler" -std=c++20 -I"$include" -idirafter "$FSDP_FMT_INCLUDE" -fsyntax-only "$work/former.cpp" 2>"$work/former.log" &&
    [[ ${#former[@]} -gt 40 && $(grep -c 'warning: .* now' "$work/former.log") == "${#former[@]}" ]] ||
    { echo "FAILED former paths of headers"; head -n 20 "$work/former.log"; failed=1; }
fi
# So do former names in code. (clang++ does not warn of all of them.)
if [[ $kind == gcc ]]; then
  names=$FSDP_SOURCE/tests/headers/former_names.hpp
  "$compiler" -std=c++20 -I"$include" -idirafter "$FSDP_FMT_INCLUDE" -fsyntax-only -x c++ "$names" 2>"$work/former_names.log" &&
    diff <(grep -n '// warns$' "$names" | cut -d: -f1) <(sed -nE 's/.*former_names\.hpp:([0-9]+):[0-9]+: warning.*deprecated.*/\1/p' "$work/former_names.log" | sort -nu) ||
    { echo "FAILED former names"; head -n 20 "$work/former_names.log"; failed=1; }
fi
rm -f "$work"/*.{gch,pch}
echo "$kind: $(((${#first[@]} + ${#alone[@]}) / 2)) headers alone, ${#together[@]} together"
(((${#first[@]} + ${#alone[@]}) / 2 + ${#together[@]} > (public ? 30 : 100))) || { echo "FAILED: few headers are found"; failed=1; }
exit $failed
