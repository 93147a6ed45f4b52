#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The C trainer of docs/adopting.md: the page's diff adds at most 60 lines, and patch takes it. Compiled with -Ofast by g++, on 1, 2
# and 3 threads, the losses are those of the C program within 1e-6, and the engine has reserved what was planned. With
# FSDP_ADOPTED_PROCESSES=1 so it is on processes, compiled by clang++ where there is one. A copy of a pointer, used in another
# scope, is a report of AddressSanitizer; that program links the suite's fsdp::compiled.
# timeout: 900
set -euo pipefail
source=${FSDP_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
command -v patch >/dev/null || { echo "skipped: there is no patch"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cp "$source/examples/adopt_c_trainer/train_gpt.c" .
. "$source/tests/support/mpirun.sh"
[[ ${FSDP_FMT_INCLUDE:-/usr/include} == /usr/include ]] || export CPLUS_INCLUDE_PATH=$FSDP_FMT_INCLUDE
. "$source/tests/support/libraries.sh"
find_compiled_libraries "${CXX:-g++}"
die() { printf '%s\n' "$1"; exit 1; }

# apply FROM TO: the page's diff between these files.
apply() {
  awk -v from="--- $1" '/^```/ { inside = 0 } $0 == from { inside = 1 } inside' "$source/docs/adopting.md" >"$2.diff"
  [[ -s $2.diff ]] || die "docs/adopting.md has no diff of $1"
  patch --silent --fuzz=0 -o "$2" "$1" "$2.diff" || die "the diff of $1 does not fit"
}
apply train_gpt.c train_gpt.cpp
apply train_gpt.cpp train_gpt_mpi.cpp
added=$(grep '^+' train_gpt.cpp.diff | grep -vc '^+++')
((added <= 60)) || die "the diff adds $added lines, more than 60"

steps=40
flags=(-std=c++20 -march=native -DFSDP_ALLOW_FAST_MATH -Wall -Wextra -Werror -I "$source/include" -pthread)
# compare WHAT: the losses of ./printed are those of ./expected, and the account is as planned.
compare() {
  paste -d ' ' expected <(grep loss printed) | awk '
    NF % 2 || $(NF / 2) == "" { bad = 1 }
    { d = $(NF / 2) - $NF; if (d < 0) d = -d; if (!(d <= 1e-6)) bad = 1; if (d > most) most = d; ++lines }
    END { if (lines != 12) bad = 1; printf "%s: losses differ by %.1e\n", what, most; exit bad }' what="$1" || die "$(cat printed)"
  awk '/^memory:/ { ok = $2 == $5 && $2 > 0 } END { exit !ok }' printed || die "$1: $(tail -n 1 printed)"
}
# before COMPILER: the losses of the C program.
before() {
  "$1" -x c -std=c11 -Ofast -march=native -Wall -Wextra -Werror train_gpt.c -o before -lm
  ./before make gpt.bin
  ./before gpt.bin $steps >expected
}
threads=g++ processes=${FSDP_CLANG:-${CXX:-g++}}
command -v g++ >/dev/null || threads=$CXX
before "$threads"
# The command of docs/pasted.sh, so that a cache of compilers has it from there.
"$source/cmake/compiler_launcher.sh" "$threads" -std=c++20 -Ofast -march=native -DFSDP_ALLOW_FAST_MATH -Wall -Wextra \
  -I "$source/include" -pthread $fmt_define -c train_gpt.cpp -o train_gpt.o 2>words
[[ ! -s words ]] || die "$(<words)"
"$threads" -Ofast -pthread train_gpt.o $fmt_link -o after
for ranks in 1 2 3; do
  ./after gpt.bin $steps $ranks >printed
  compare "$(basename "$threads"), $ranks threads"
done
if [[ ${FSDP_ADOPTED_PROCESSES:-0} == 1 && ${FSDP_HAVE_MPI:-ON} =~ ^(ON|TRUE|1)$ ]]; then
  before "$processes"
  OMPI_CXX=$processes MPICH_CXX=$processes mpic++ -Ofast "${flags[@]}" train_gpt_mpi.cpp $fmt_define $fmt_link -o after_mpi
  for ranks in 1 2 3; do
    mpirun -n $ranks ./after_mpi gpt.bin $steps >printed
    compare "$(basename "$processes"), $ranks processes"
  done
fi

# The trap of the page: the last layer uses a pointer that was copied in the scope of the first one.
sed 's/^    auto full = model->units\[1 + l\].forward();/&\n    static thread_local float* kept;\n    if (l == 0) kept = params.ln1w;/
     s/params\.ln1w + l \* C, params\.ln1b + l \* C, rows, C);/(l == 2 ? kept : params.ln1w + l * C), params.ln1b + l * C, rows, C);/' train_gpt.cpp >stale.cpp
(($(diff train_gpt.cpp stale.cpp | grep -c '^>') == 3)) || die "the page's trainer has no such lines"
"${CXX:-g++}" -std=c++20 -O0 -g1 -fsanitize=address -I "$source/include" -pthread stale.cpp $fmt_define $compiled_define $fmt_link -o stale
! ./stale gpt.bin 1 >printed 2>&1 || die "a pointer of another scope is used in silence"
grep -q 'ERROR: AddressSanitizer: SEGV' printed && grep -q 'in layernorm_forward' printed || die "$(head -n 20 printed)"
echo "a pointer of another scope: $(grep -m 1 'ERROR: AddressSanitizer' printed | cut -c 1-60)"
