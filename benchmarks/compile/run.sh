#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures the cost of compiling against the headers: CPU seconds and peak memory of typical user files, and of
# `#include <fmt/format.h>` for comparison. Rounds are interleaved, the best of them counts. Nothing is linked. The case
# checkpoint needs nlohmann-json and xxHash.
#
#   benchmarks/compile/run.sh [--rounds=5] [--against=DIR] [COMPILER...]
#
#   --against=DIR   another checkout, measured in the same rounds: prints its figures and the ratio
#   COMPILER...     default: g++ and clang++, if installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
rounds=5 against=
compilers=()
for argument in "$@"; do
  case $argument in
    --rounds=*) rounds=${argument#--rounds=} ;;
    --against=*) against=$(cd "${argument#--against=}" && pwd) ;;
    -h | --help) sed -n '3,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) compilers+=("$argument") ;;
  esac
done
if ((${#compilers[@]} == 0)); then
  for compiler in g++ clang++; do
    if command -v "$compiler" >/dev/null; then compilers+=("$compiler"); fi
  done
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo '#include <fmt/format.h>' >"$work/fmt.cpp"
echo '#include "fsdp/fsdp.hpp"' >"$work/umbrella.cpp"
trees=("$PWD")
if [[ -n $against ]]; then trees+=("$against"); fi

# The file that a case compiles in a checkout: another one may say it otherwise.
source_of() {
  case $2 in
    fmt | umbrella) echo "$work/$2.cpp" ;;
    checkpoint*) echo "$1/benchmarks/compile/checkpoint.cpp" ;;
    forty*) echo "$1/benchmarks/compile/forty_lines.cpp" ;;
    mlp*) echo "$1/examples/mlp/main.cpp" ;;
    adopt*) echo "$1/examples/adopt_raw_pointers/after.cpp" ;;
  esac
}
# *_lib: by a program that links fsdp::compiled; compared with another checkout's headers.
kinds=(fmt umbrella forty forty_lib checkpoint checkpoint_lib mlp mlp_lib adopt adopt_lib)
declare -A seconds=() memory=()
measure() { # measure TREE CASE COMPILER LEVEL
  local tree=$1 key="$1 $2 $3 $4" file used kib=0
  file=$(source_of "$tree" "$2")
  [[ -e $file ]] || return 0
  local defines=()
  if [[ $2 == *_lib ]]; then
    [[ -e $tree/include/fsdp/compiled/host.cpp ]] || return 0
    defines=(-DFSDP_COMPILED=1)
  fi
  local command=("$3" -std=c++20 "$4" -I"$tree/include" -I"$tree/examples/mlp" -DFSDP_FMT_LIBRARY=1 "${defines[@]}" -c "$file" -o "$work/out.o")
  if [[ -x /usr/bin/time ]]; then
    /usr/bin/time -o "$work/time" -f '%U %S %M' "${command[@]}" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
    read -r user system kib < <(tail -n 1 "$work/time")
    used=$(awk "BEGIN { print $user + $system }")
  else
    TIMEFORMAT='%U %S'
    used=$({ time "${command[@]}" 2>"$work/log"; } 2>&1) || { cat "$work/log" >&2; exit 1; }
    used=$(awk '{ print $1 + $2 }' <<<"$used")
  fi
  if [[ -z ${seconds[$key]:-} ]] || awk "BEGIN { exit !($used < ${seconds[$key]}) }"; then
    seconds[$key]=$used memory[$key]=$((kib / 1024))
  fi
}
for ((round = 0; round < rounds; ++round)); do
  for compiler in "${compilers[@]}"; do
    for level in -O0 -O2; do
      for kind in "${kinds[@]}"; do
        for tree in "${trees[@]}"; do measure "$tree" $kind "$compiler" $level; done
      done
    done
  done
done
printf '%-9s %-4s %-14s %8s %6s %8s' compiler "" file "CPU s" MiB "x fmt"
if [[ -n $against ]]; then printf ' %10s %7s' "other" "ratio"; fi
echo
for compiler in "${compilers[@]}"; do
  for level in -O0 -O2; do
    for kind in "${kinds[@]}"; do
      key="$PWD $kind $compiler $level" base="$PWD fmt $compiler $level"
      printf '%-9s %-4s %-14s %8.2f %6d %8.1f' "$compiler" $level $kind "${seconds[$key]}" "${memory[$key]}" \
        "$(awk "BEGIN { print ${seconds[$key]} / ${seconds[$base]} }")"
      other=${seconds["$against ${kind%_lib} $compiler $level"]:-}
      if [[ -n $other ]]; then printf ' %10.2f %7.2f' "$other" "$(awk "BEGIN { print ${seconds[$key]} / $other }")"; fi
      echo
    done
  done
done
