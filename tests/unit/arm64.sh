#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The core's unit tests, and the conformance of the host device and of ranks that are threads, compiled for arm64 and run by
# qemu, which plays such a machine. Needs a cross compiler and qemu (on Debian: g++-12-aarch64-linux-gnu, qemu-user).
# labels: full
# timeout: 3000
# skip-sanitizers
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
compiler=
for name in aarch64-linux-gnu-g++ aarch64-linux-gnu-g++-{14,13,12}; do
  if command -v "$name" >/dev/null; then compiler=$name; break; fi
done
[[ -n $compiler ]] || { echo "skipped: there is no C++ compiler for arm64"; exit 77; }
command -v qemu-aarch64 >/dev/null || { echo "skipped: there is no qemu-aarch64"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Headers of no machine's own; those beside them are this machine's.
mkdir "$work/include"
for library in fmt catch2; do
  for folder in /usr/include /usr/local/include; do
    if [[ -d $folder/$library ]]; then ln -sfn "$folder/$library" "$work/include/$library"; fi
  done
  [[ -e $work/include/$library ]] || { echo "skipped: the headers of $library are not in /usr/include"; exit 77; }
done
flags=(-std=c++20 -pthread -DFMT_HEADER_ONLY -I include -I . -I tests -isystem "$work/include")
warnings=(-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Werror)
objects=()
compile() { # compile OBJECT FLAGS... SOURCE
  objects+=("$work/$1.o")
  "$compiler" "${flags[@]}" "${@:2}" -c -o "$work/$1.o" || exit 1
}
compile catch -O0 tests/run_catch.cpp
compile main -O0 tests/main.cpp
for source in tests/unit/*.cpp tests/conformance/{host_device,local_host}.cpp; do
  ! grep -q '^// links:' "$source" || continue
  compile "$(basename "$source" .cpp)" -O2 "${warnings[@]}" "$source"
done
"$compiler" -pthread -o "$work/tests" "${objects[@]}" || exit 1
QEMU_LD_PREFIX=${QEMU_LD_PREFIX:-/usr/aarch64-linux-gnu} qemu-aarch64 "$work/tests"
