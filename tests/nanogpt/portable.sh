#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt built without -DFSDP_NATIVE=ON runs on processors of 2008 and 2013, which qemu plays: it trains as here, chooses
# OpenBLAS's kernels for them, and says that it computes in fp32 where bf16 is asked for. The one built for this machine's
# processor dies there, where that has AVX-512: qemu knows none. Needs qemu (on Debian: qemu-user) and builds nanogpt once more.
# programs: nanogpt
# labels: full
# timeout: 3000
# skip-sanitizers
#
#   portable.sh BINARY_DIR
set -uo pipefail

sources=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$sources/tests/support/script.sh"

[[ $(uname -m) == x86_64 ]] || { echo "skipped: not an x86-64 machine"; exit 77; }
command -v qemu-x86_64 >/dev/null || { echo "skipped: there is no qemu-x86_64"; exit 77; }
native=$1/examples/nanogpt/nanogpt
build=$1/portable
enter_with_text "$native"
{
  cmake -S "$sources" -B "$build" -DFSDP_NATIVE=OFF -DFSDP_CUDA=OFF -DFSDP_BUILD_TESTS=OFF -DCMAKE_BUILD_TYPE=Release &&
    cmake --build "$build" --target nanogpt --parallel "${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
} >output 2>&1 || { fail "the build"; exit 1; }
nanogpt=$build/examples/nanogpt/nanogpt

small=(--dataset=d --device=cpu --threads=1 --n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=4
  --gradient_accumulation_steps=1 --max_iters=20 --eval_interval=20 --eval_iters=1 --log_interval=1 --warmup_iters=5)
run() { # run FOLDER DTYPE COMMAND...
  patiently 300 env -u OPENBLAS_CORETYPE "${@:3}" train "${small[@]}" --out_dir="$1" --dtype="$2" >output 2>&1 || fail "$*: ended with $?"
  grep -oE '^iter [0-9]+: loss [0-9.]+' output >"$1.losses"
}
run here float32 "$nanogpt"
check "21 iterations" test "$(wc -l <here.losses)" -eq 21

# on MODEL KERNELS
on() {
  local cpu=(qemu-x86_64 -cpu "$1" "$nanogpt")
  env -u OPENBLAS_CORETYPE "${cpu[@]}" --version >output 2>&1 || fail "$1: --version ended with $?"
  check "$1: other kernels of OpenBLAS than $2" grep -qE "^BLAS: .*\($2 kernels\)$" output
  check "$1: multiplies by AVX-512" grep -qx "fp32 on cpu: BLAS" output
  check "$1: has units for bf16" grep -qE '^bf16 on cpu: (not supported by this processor|not built in)' output
  run "$1" float32 "${cpu[@]}"
  check "$1: losses are not this machine's to 0.1 %" awk '
    NR == FNR { here[$2] = $4; next }
    { seen++; if ($4 < 0.999 * here[$2] || $4 > 1.001 * here[$2]) exit 1 }
    END { exit seen != 21 }' here.losses "$1.losses"
  run "$1-bfloat16" bfloat16 "${cpu[@]}"
  check "$1: does not say that it computes in float32" grep -qE '^note: .*bf16.*; this run computes in float32$' output
  check "$1, bfloat16: other weights" cmp "$1/model.safetensors" "$1-bfloat16/model.safetensors"
  run "$1-fastest" fastest "${cpu[@]}"
  check "$1: does not say why it computes in float32" grep -qE '^note: this run computes in float32: this (processor|program) .*bf16' output
  check "$1, fastest: other weights" cmp "$1/model.safetensors" "$1-fastest/model.safetensors"
  patiently 300 env -u OPENBLAS_CORETYPE "${cpu[@]}" bench "${small[@]:1:8}" --dtype=float32 --burn_in=1 --timed=1 >output 2>&1 || fail "$1: bench ended with $?"
}
on Nehalem Nehalem
on Haswell Haswell
if grep -qw avx512f /proc/cpuinfo && grep -q '^FSDP_NATIVE:BOOL=ON' "$1/CMakeCache.txt"; then
  patiently 60 qemu-x86_64 -cpu Nehalem "$native" train "${small[@]}" --out_dir=native --dtype=float32 >output 2>&1
  check "qemu runs what such a processor cannot" test $? -eq 132  # SIGILL
fi
((failures == 0)) && echo "runs on old processors; $checks checks"
exit $((failures > 0))
