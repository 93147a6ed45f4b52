#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sources of our programs that ask for vector instructions compile without warnings for x86-64 processors without AVX, with AVX2,
# and with AVX-512, whichever of them this machine has.
# usage: targets.sh
# timeout: 3600
set -euo pipefail
if [[ $(uname -m) != x86_64 ]]; then
  echo "skipped: this machine is not x86-64"
  exit 77
fi
cd "$FSDP_SOURCE"
mapfile -t sources < <(grep -rlE '__(AVX|FMA)' --include='*.cpp' examples benchmarks)
if ((${#sources[@]} < 3)); then
  echo "FAILED: only ${#sources[@]} sources ask for vector instructions: the pattern misses them"
  exit 1
fi
warnings=(-Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wpedantic -Werror -Wno-uninitialized)  # GCC 12 warns of its own avx512fintrin.h
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
for target in x86-64 x86-64-v3 x86-64-v4; do
  for source in "${sources[@]}"; do
    cmake/compiler_launcher.sh "$CXX" -std=c++20 -O1 "${warnings[@]}" -march=$target -c -o "$work/object.o" -I include -I . -I examples -idirafter "$FSDP_FMT_INCLUDE" "$source" ||
      { echo "FAILED $source for $target"; failed=1; }
  done
done
exit "$failed"
