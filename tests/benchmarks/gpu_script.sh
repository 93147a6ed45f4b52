#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tests/gpu.sh without a GPU: its stages, its answers, and its verdicts on stubs that stand in for the build, the
# programs and the tools.
# labels: full
# timeout: 300
# skip-sanitizers
set -uo pipefail

source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
work=$(mktemp -d)
cd "$work" || exit 1
. "$source_folder/tests/support/script.sh"
at_exit 'rm -rf "$work"'

# A repository with one test of each kind, and tools that do nothing but answer.
mkdir -p tests/{conformance,unit,nanogpt,support} docs benchmarks/step tools none
cp "$source_folder/tests/gpu.sh" tests/
cp "$source_folder"/tests/support/gpu_{stages,needs}.sh tests/support/
touch tests/conformance/{cuda_device,peers_nccl}.cu tests/unit/rows.cu tests/nanogpt/{heads,model}.cu README.md
echo "some text" >docs/page.md
stub() { # stub FILE, the body from stdin
  mkdir -p "$(dirname "$1")"
  { printf '#!%s\n' "$(command -v bash)"; cat; } >"$1"
  chmod 755 "$1"
}
stub tools/nvidia-smi <<<'case $1 in -L) echo "GPU 0: a stub" ;; *) echo 9.0 ;; esac'
stub tools/cmake <<'EOS'
echo "cmake $*" >>"$WORK/calls"
[[ "$*" == *"--target help" ]] || exit 0
printf '%s: phony\n' unit_rows conformance_cuda_device nanogpt_heads nanogpt_model ${NO_NANOGPT-examples/nanogpt/nanogpt} bench_step_cuda
EOS
stub tools/ctest <<'EOS'
all=$*
name=${all##*-R ^} name=${name%%\$*}
[[ $* == *" -N "* ]] && { [[ $name != *_nccl ]] && echo "Total Tests: 1"; exit 0; }
[[ $name == "${BROKEN-}" ]] && { echo "1 test failed"; exit 8; }
echo "passed"
EOS
stub tools/compute-sanitizer <<'EOS'
echo "$1 $2 $(basename "${*: -2:1}") ${*: -1}" >>"$WORK/calls"
[[ "$2 ${*: -2:1}" == "${HAZARD-no} "* && ${*: -2:1} == *nanogpt_heads ]] && exit 9
exit 0
EOS
stub tools/python3 <<'EOS'
[[ $1 == -c ]] && exit "${NO_TORCH-0}"
if [[ "$*" == *--attention* ]]; then
  echo "flash_attention      forward     100.00 us   10.00 TFLOP/s   backward     300.00 us   10.00 TFLOP/s"
  echo "cudnn_attention      forward      90.00 us   10.00 TFLOP/s   backward     320.00 us   10.00 TFLOP/s"
else
  echo "gpt2 eager: time per step 1.0 ms (median 1.0), tokens/s 1000.5, MFU 1% of 1 TFLOP/s (given), peak 0 GB, loss 1"
  echo "gpt2 compiled: time per step 1.0 ms (median 1.0), tokens/s 2000.5, MFU 1% of 1 TFLOP/s (given), peak 0 GB, loss 1"
fi
EOS
for name in unit_rows conformance_cuda_device nanogpt_heads nanogpt_model; do stub build/gpu/tests/$name <<<'exit 0'; done
cp -r build/gpu build/gpu-local
# Losses fall by iteration. WRONG names a run by its settings, joined by spaces, and how its losses differ.
trainer() {
  stub "$1" <<'EOS'
[[ $1 == prepare ]] && exit 0
settings="$*"
iterations=${settings##*--max_iters=} iterations=${iterations%% *}
interval=${settings##*--eval_interval=} interval=${interval%% *}
[[ $settings == *train_shakespeare_char* ]] && iterations=5000 interval=250
json=${settings##*--log_json=} json=${json%% *}
wrong=0
for word in ${WRONG-never}; do [[ $settings == *"$word"* ]] || wrong=never; done
awk -v n="$iterations" -v every="$interval" -v wrong="$wrong" -v by="${BY-0.00000001}" -v val="${VAL-1.47}" -v step="$([[ $settings == *shakespeare* ]] && echo 100 || echo 1)" 'BEGIN {
  for (i = 0; i <= n; ++i) {
    if (i % every == 0) printf "{\"kind\":\"eval\",\"iter\":%d,\"train_loss\":2,\"val_loss\":%.17g,\"lr\":1}\n", i, val + (i - 4000) ^ 2 / 1e8
    if (i % step) continue
    loss = sprintf("%.17g", 4 - i / 1000 + (wrong == 0 && i > 5 ? by : 0))
    printf "{\"kind\":\"iter\",\"iter\":%d,\"loss\":%s,\"lr\":1}\n", i, wrong == 0 && by == "null" ? by : loss
  }}' >"$json"
EOS
}
trainer build/gpu/examples/nanogpt/nanogpt
cp -r build/gpu/examples build/gpu-local/
stub build/gpu/benchmarks/step/bench_step_cuda <<'EOS'
[[ "$*" == *"${TOO_LARGE-never}"* ]] && { echo "bench_step: cuda:0: cudaMalloc failed"; exit 1; }
all=$*
json=${all##*--json=}
if [[ "$*" == *--kernels* ]]; then
  echo "  LayerNorm forward   100.00 10.00 900.0 90.0% -"
  echo "  AdamW   100.00 10.00 800.0 80.0% -"
  echo "  attention forward                  120.00     10.00      100.0      1.0%     10.00"
  echo "  attention backward                 400.00     10.00      100.0      1.0%     10.00"
else
  printf 'tokens/s: 500000.5\nMFU: 50.00%% of 989.40 TFLOP/s (data sheet)\n'
  model=${all##*--model=}
  printf '{"model":"%s","tokens_per_s":500000.5,"x":1}\n' "${model%% *}" >"$json"
fi
EOS

export WORK=$work
gpu() { # gpu ARGUMENTS...: leaves code and output
  : >calls
  PATH=$work/tools:$PATH OUT=$work/logs FSDP_TEST_DATA='' bash tests/gpu.sh "$@" >output 2>&1
  code=$?
}
ends() { check "ended with $code, not $1" test "$code" -eq "$1"; }
says() { check "does not say '$1'" grep -qE -- "$1" output; }
row() { check "no row '$1': $2" grep -qE -- "^$1 +$2" output; } # row STAGE RESULT...: of the table

# --- answers ------------------------------------------------------------------------------------------------------------
gpu --list
ends 0
for stage in build unit_rows conformance_cuda_device conformance_peers_nccl nanogpt_heads memcheck racecheck synccheck \
  memcheck_nanogpt racecheck_nanogpt synccheck_nanogpt strategies devices shakespeare step kernels pytorch attention; do
  check "no stage $stage" grep -qx "$stage" output
done
gpu --only local --list
check "NCCL is listed for --only local" test "$(grep -c nccl output)" -eq 0
# Some packages are installed and some are not; without NCCL and MPI, their requirements are not asked for.
stub tools/nvcc <<<'exit 0'
stub tools/mpirun <<<'exit 0'
stub tools/c++ <<<'read -r line; [[ $line != *fmt* && $line != *nccl* ]]'
CXX='' NO_TORCH=1 NCCL_ROOT='' gpu --needs
ends 1
needs() { check "package $1 is not $2" grep -qE "^$1 +$2 +[a-z]" output; } # needs PACKAGE here|MISSING
needs cuda-toolkit here
needs openmpi-bin here
needs libcli11-dev here
needs libfmt-dev MISSING
needs libnccl-dev MISSING
needs torch MISSING
says "no-enhances .*libfmt-dev.*libnccl-dev.*grep"
check "something was built to see what is needed" test ! -s calls
CXX='' NO_TORCH=1 NCCL_ROOT='' gpu --only local --needs
ends 1
check "NCCL is needed for --only local" test "$(grep -cE '^(libnccl|openmpi|libopenmpi)' output)" -eq 0
needs libfmt-dev MISSING
mkdir -p nccl/include && touch nccl/include/nccl.h
stub tools/c++ <<<'exit 0'
for tool in ninja mpicxx; do stub tools/$tool <<<'exit 0'; done
CXX='' NCCL_ROOT=$work/nccl gpu --needs
needs libnccl-dev here
check "a package that is here is called missing" test "$(grep -E MISSING output | grep -cvE '^libopenblas-dev ')" -eq 0
rm tools/{nvcc,mpirun,c++,ninja,mpicxx}
gpu --stage nonsense
ends 2
says "no stage 'nonsense'"
gpu --only mpi
ends 2
gpu --data
ends 2
gpu --data nowhere
ends 2
gpu --nonsense
ends 2
says "^usage:"
if ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  stub none/nvidia-smi <<<'exit 9'
  PATH=$work/none:$PATH bash tests/gpu.sh >output 2>&1
  code=$?
  ends 77
  check "not one line" test "$(wc -l <output)" -eq 1
  says "^no CUDA device: "
fi

# --- verdicts -----------------------------------------------------------------------------------------------------------
echo "Shakespeare" >text.txt
gpu --data text.txt
ends 0
row build passed
row unit_rows passed
row conformance_peers_nccl absent
row memcheck 'passed .*2 programs'
row racecheck_nanogpt 'passed .*2 programs'
row strategies 'passed .*16 runs, 0 differ'
row devices 'passed .*fp32 against the host: at most 0\.00e\+00 relative; bf16 against fp32: at most 0\.00e\+00'
row shakespeare 'passed .*validation loss 1\.4800 at the end, best 1\.4700 at 4000'
row step 'passed .*gpt2 500000 tok/s 50\.00%; gpt2-medium 500000'
row kernels 'passed .*least of copy bandwidth: 80\.0%; 1 of 2 below'
row pytorch 'passed .*gpt2 eager 1000, compiled 2000 \(ours 500000\)'
row attention 'passed .*forward 0\.75 of cudnn_attention, backward 0\.75 of flash_attention'
check "more than one table" test "$(grep -c '^stage ' output)" -eq 1
check "the sanitizer runs what it cannot" grep -q '^--tool memcheck unit_rows ~\[large\]$' calls
check "the sanitizer leaves a program out" test "$(grep -c '^--tool' calls)" -eq 12
check "a file is left over" test "$(find logs -type f | grep -vcE '/(gpu-tests\.(log|tsv)|step\.jsonl|pytorch\.jsonl|shakespeare\.json)$')" -eq 0

gpu --stage strategies
ends 0
check "more is built than a stage needs" grep -qx 'cmake --build build/gpu --parallel [0-9]* --target nanogpt' calls
gpu --only local --stage memcheck_nanogpt --stage unit_rows
ends 0
check "not built what stages need" grep -q 'build/gpu-local --parallel [0-9]* --target nanogpt_heads nanogpt_model unit_rows$' calls

expect_failure() { # expect_failure STAGE WORDS: the stage alone fails and says so
  gpu --stage "$1" --data text.txt
  ends 1
  row "$1" FAILED
  says "$2"
}
WRONG='--ranks=4 --strategy=no_shard --dtype=bfloat16' expect_failure strategies 'bfloat16-4-no_shard differs'
WRONG='--strategy=full_shard --ranks=2' BY=null expect_failure strategies 'float32-2-full_shard has a loss that is not finite'
WRONG='--device=cuda --dtype=float32' BY=0.001 expect_failure devices "the GPU's losses are not the host's"
WRONG='--dtype=bfloat16' BY=0.1 expect_failure devices 'the losses in bfloat16 are not those in fp32'
VAL=1.49 expect_failure shakespeare 'the best validation loss is above 1.48'
TOO_LARGE=--model=gpt2-xl expect_failure step 'FAILED: gpt2-xl'
HAZARD=racecheck expect_failure racecheck_nanogpt 'racecheck_nanogpt of nanogpt_heads'
BROKEN=unit_rows expect_failure unit_rows 'test failed|FAILED'

gpu --stage shakespeare
ends 0
row shakespeare skipped
NO_TORCH=1 gpu --stage pytorch --stage attention
ends 0
row pytorch skipped
row attention skipped
rm build/gpu/examples/nanogpt/nanogpt
NO_NANOGPT=other gpu --stage strategies --stage devices
ends 0
row strategies absent
row devices absent

echo "$checks checks, $failures failures"
exit $((failures != 0))
