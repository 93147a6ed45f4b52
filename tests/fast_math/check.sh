#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Flags that change floating-point results: each is noticed, and both ways out keep what docs/adopting.md says of them
# (whose program docs/pasted.sh compiles and runs).
# usage: check.sh flags|beside|allowed WORK_DIR
# timeout: 3600
set -euo pipefail
way=$1 work=$2
rm -rf "$work"
mkdir -p "$work"
here=$FSDP_SOURCE/tests/fast_math
launcher=$FSDP_SOURCE/cmake/compiler_launcher.sh
. "$FSDP_SOURCE/tests/support/libraries.sh"
include=(-I "$FSDP_SOURCE/include" -idirafter "$FSDP_FMT_INCLUDE")
failed=0
complain() {
  echo "$1"
  failed=1
}

# Flags that leave results alone, and flags that do not.
harmless=("-O0" "-O3 -march=native -fno-math-errno -fno-trapping-math" "-O2 -ffp-contract=off" "-Ofast -fno-fast-math")
harmful=(-Ofast -ffast-math -ffinite-math-only -funsafe-math-optimizations -freciprocal-math -fno-signed-zeros
         "-fassociative-math -fno-signed-zeros -fno-trapping-math")
only_gcc=(-fsingle-precision-constant "-march=x86-64 -mfpmath=387")
only_clang=(-fno-honor-nans -fno-honor-infinities -ffp-model=fast)

# One file includes what all kernels do; another, without flags, asks as an engine does.
flags() {
  printf '#include "fsdp/detail/base/arithmetic.hpp"\nvoid part() {}\n' >"$work/part.cpp"
  cat >"$work/main.cpp" <<'END'
#include <cstdio>
#include "fsdp/detail/engine/register_module.hpp"
void part();
int main() {
  part();
  try {
    fsdp::detail::expect_exact_arithmetic(3);
  } catch (fsdp::ConfigError const& error) {
    std::puts(error.what());
  }
}
END
  local compiler list all
  for compiler in "$CXX" ${FSDP_CLANG:+"$FSDP_CLANG"}; do
    list=("${only_gcc[@]}")
    if "$compiler" --version | grep -q clang; then list=("${only_clang[@]}"); fi
    "$compiler" -std=c++20 "${include[@]}" -c "$work/main.cpp" -o "$work/main.o"
    for all in "${harmful[@]}" "${list[@]}"; do noticed "$compiler" "$all" || complain "$compiler $all: not noticed: $(cat "$work/log")"; done
    for all in "${harmless[@]}"; do
      if noticed "$compiler" "$all" || [[ -s $work/log ]]; then complain "$compiler $all: refused: $(cat "$work/log")"; fi
    done
  done
}

# noticed COMPILER FLAGS: whether the part is refused, as it is compiled or as the program asks, with both ways out; and that it
# is not where the user allows it.
noticed() {
  local compiler=$1 flags
  read -ra flags <<<"$2"
  "$compiler" -std=c++20 -O1 "${flags[@]}" "${include[@]}" -DFSDP_ALLOW_FAST_MATH -c "$work/part.cpp" -o "$work/part.o" 2>"$work/log" &&
    "$compiler" "$work/main.o" "$work/part.o" -o "$work/main" && [[ -z $("$work/main") ]] || {
    complain "$compiler $2: refused with -DFSDP_ALLOW_FAST_MATH: $(cat "$work/log")"
    return 0
  }
  if "$compiler" -std=c++20 -O1 "${flags[@]}" "${include[@]}" -c "$work/part.cpp" -o "$work/part.o" >"$work/log" 2>&1; then
    "$compiler" "$work/main.o" "$work/part.o" -o "$work/main"
    "$work/main" >"$work/log"
    grep -q "rank 3: '.*part.cpp' includes fsdp and was compiled with -f" "$work/log" || return 1
  else
    (($(wc -l <"$work/log") <= 12)) || complain "$compiler $2: the message takes $(wc -l <"$work/log") lines: $(cat "$work/log")"
  fi
  grep -q "docs/adopting.md, 'Trainers compiled with -Ofast'.*-DFSDP_ALLOW_FAST_MATH" "$work/log"
}

# build_trainer: a trainer and its kernels, both without flags: $work/plain, whose output is $work/plain.txt.
build_trainer() {
  strict=("${include[@]}" -std=c++20 -O0 -Wall -Wextra -Werror -pthread) fast=(-std=c++20 -Ofast)
  find_compiled_libraries "$CXX"
  include+=($fmt_define) strict+=($fmt_define $compiled_define)
  "$launcher" "$CXX" "${strict[@]}" -c "$here/trainer.cpp" -o "$work/trainer.o"
  "$CXX" "${strict[@]}" -c "$here/kernels.cpp" -o "$work/kernels.o"
  "$CXX" "${fast[@]}" -c "$here/kernels.cpp" -o "$work/fast_kernels.o"
  "$CXX" "$work/trainer.o" "$work/kernels.o" -pthread $fmt_link -o "$work/plain"
  "$work/plain" >"$work/plain.txt"
  notices_nan plain
}
# run_fast PROGRAM TRAINER: links the object of a trainer with kernels of -Ofast, by a command with -Ofast, and runs it.
run_fast() {
  "$CXX" -Ofast "$work/$2.o" "$work/fast_kernels.o" -pthread $fmt_link -o "$work/$1"
  "$work/$1" >"$work/$1.txt"
  grep -qx 'main thread flushes subnormals: 1' "$work/$1.txt" || complain "$1: linking with -Ofast changes nothing here"
  notices_nan "$1"
}
notices_nan() {
  (($(grep -c '^NaN .*refused: yes$' "$work/$1.txt") == 2)) || complain "$1: NaN is not noticed: $(grep NaN "$work/$1.txt")"
}

# The first way out: the library's part has no such flags, and gives the bits of a program without them.
beside() {
  build_trainer
  run_fast beside trainer
  # On inline streams and on workers; and no thread of the library flushes.
  (($(grep -c '^bits .* [1-9][0-9]* subnormal$' "$work/plain.txt") == 4)) || complain "no subnormal weights: $(cat "$work/plain.txt")"
  (($(grep -c '^tasks .*: 0$' "$work/beside.txt") == 2)) || complain "tasks flush subnormals"
  diff <(grep '^bits' "$work/plain.txt") <(grep '^bits' "$work/beside.txt") || complain "other bits beside kernels of -Ofast"
  # Of the training, the weights: the printed means are sums of the trainer's.
  diff <(grep '^value w' "$work/plain.txt") <(grep '^value w' "$work/beside.txt") || complain "other weights beside kernels of -Ofast"

  # A flag without a macro, in another file than the engine's: the engine is not made.
  [[ -n ${FSDP_CLANG:-} ]] || return 0
  printf '#include "fsdp/detail/kernels/block.hpp"\n' >"$work/part.cpp"
  "$FSDP_CLANG" -std=c++20 -O1 -freciprocal-math "${include[@]}" -c "$work/part.cpp" -o "$work/part.o"
  "$CXX" "$work/trainer.o" "$work/kernels.o" "$work/part.o" -pthread $fmt_link -o "$work/mixed"
  if { "$work/mixed" >"$work/log" 2>&1; } 2>/dev/null; then complain "an engine is made beside a file of -freciprocal-math"; fi
  grep -q "part.cpp' includes fsdp and was compiled with -freciprocal-math" "$work/log" || complain "no word of -freciprocal-math: $(cat "$work/log")"
}

# The second way out: the library's part has the flags too.
allowed() {
  build_trainer
  "$launcher" "$CXX" "${fast[@]}" "${include[@]}" -DFSDP_ALLOW_FAST_MATH -pthread -c "$here/trainer.cpp" -o "$work/fast_trainer.o"
  run_fast allowed fast_trainer
  # Values within 1e-6. Sums of 200 to 600 terms of one sign in another order differ by a few of their last digits (6e-8 each), the
  # elementary functions by a few more; an AdamW step of 0.01 follows a gradient's relative error, so weights of about 1 differ by
  # less.
  paste -d ' ' <(grep '^value' "$work/plain.txt") <(grep '^value' "$work/allowed.txt") | awk '
    function far(a, b) { d = a > b ? a - b : b - a; s = a < 0 ? -a : a; if (s < 1) s = 1; if (d / s > most) most = d / s; return d / s > 1e-6 }
    { half = NF / 2; ++lines; for (i = 3; i <= half; ++i) if (far($i, $(i + half))) { print "too far: " $0; bad = 1 } }
    END { printf "%d lines, largest difference %.2g\n", lines, most; if (lines != 220) bad = 1; exit bad }' ||
    complain "the training is not the same within 1e-6"
  if "$CXX" "${fast[@]}" "${include[@]}" -fsyntax-only "$here/trainer.cpp" >"$work/log" 2>&1; then
    complain "the library's part compiles with -Ofast, though nobody allowed it"
  fi
}

$way
exit $failed
