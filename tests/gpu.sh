#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the tests and benchmarks that need a GPU, and runs them in stages of at most eight minutes.
# usage: tests/gpu.sh [--list] [--needs] [--only local] [--data FILE] [--stage NAME]...
#   --list        names the stages
#   --needs       names the packages that stages need and those that this machine lacks, and prints how to bring them to a
#                 machine without network; installs nothing
#   --only local  only stages of one process, which need neither NCCL nor MPI
#   --data FILE   the works of Shakespeare, for the stage shakespeare (default: $FSDP_TEST_DATA/tinyshakespeare.txt)
#   --stage NAME  runs this stage (may be repeated), after building its programs
# Stages: build; every test of a *.cu file; compute-sanitizer's memcheck, racecheck and synccheck over the library's
# kernels and (*_nanogpt) the trainer's; strategies: nanogpt at 2 and 4 ranks, losses of all strategies bit by bit;
# devices: nanogpt on host and GPU, and in bfloat16; shakespeare: the validation loss of train_shakespeare_char;
# step: bench_step_cuda in the four sizes of GPT-2; kernels: its kernels alone; pytorch: the same steps in PyTorch;
# attention: attention alone, nanogpt's and PyTorch's. The last two are skipped if python3 has no torch.
# Writes gpu-tests.log, gpu-tests.tsv and figures (*.json, *.jsonl) to $OUT, else to build/gpu-logs. CUDA_ARCHITECTURES sets
# the architectures (default: the first GPU's). BATCH=N sets the sequences of a step if the default does not fit.
# Exit code: 0 all passed, 1 a stage failed, 77 no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

limit=480  # seconds a stage
only=all
list=no
needs=no
data=
chosen=()
while (($#)); do
  case $1 in
    --list) list=yes ;;
    --needs) needs=yes ;;
    --only) only=${2-}; shift ;;
    --data) [[ -n ${2-} ]] || { echo "--data needs a file"; exit 2; }; data=$2; shift ;;
    --data=*) data=${1#--data=} ;;
    --stage) chosen+=("${2-}"); shift ;;
    *) sed -n '3,20s/^# //p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
  (($#)) && shift
done
[[ $only == all || $only == local ]] || { echo "--only takes: local"; exit 2; }
[[ -z $data || -r $data ]] || { echo "--data: '$data' cannot be read"; exit 2; }
if [[ -z $data && -r ${FSDP_TEST_DATA:-}/tinyshakespeare.txt ]]; then data=$FSDP_TEST_DATA/tinyshakespeare.txt; fi
[[ -z $data ]] || data=$(realpath "$data")

# Every tests/<folder>/<name>.cu is the test and the program <folder>_<name>.
tests=()
kernels=()
trainer_kernels=()
for source in tests/{conformance,unit,memory,schedule,parity,nanogpt}/*.cu; do
  [[ -e $source ]] || continue
  name=${source#tests/}
  name=${name%.cu}
  name=${name//\//_}
  [[ $only == local && $name =~ _(nccl|mpi)$ ]] && continue
  tests+=("$name")
  case $name in
    unit_* | conformance_cuda_device) kernels+=("$name") ;;
    nanogpt_*) trainer_kernels+=("$name") ;;
  esac
done
sanitizers=(memcheck racecheck synccheck)
stages=(build "${tests[@]}" "${sanitizers[@]}" "${sanitizers[@]/%/_nanogpt}" strategies devices shakespeare step kernels
        pytorch attention)
if [[ $list == yes ]]; then
  printf '%s\n' "${stages[@]}"
  exit 0
fi
if [[ $needs == yes ]]; then
  . tests/support/gpu_needs.sh
  list_needs "$only"
  exit
fi
for stage in "${chosen[@]}"; do
  [[ " ${stages[*]} " == *" $stage "* ]] || { echo "no stage '$stage'; the stages are: ${stages[*]}"; exit 2; }
done
((${#chosen[@]})) || chosen=("${stages[@]}")
[[ ${chosen[0]} == build ]] || chosen=(build "${chosen[@]}")

if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU' && ! compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  echo "no CUDA device: this machine has no NVIDIA GPU or no driver"
  exit 77
fi
export PATH=$PATH:/usr/local/cuda/bin

architecture() {
  local capability
  capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1 | tr -d ' .')
  case $capability in
    90) echo 90a-real ;;
    [0-9]*) echo "$capability-real" ;;
    *) echo '80-real;90a-real;90-virtual' ;;
  esac
}

build=build/gpu
options=("-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-$(architecture)}" -DFSDP_WERROR=OFF -DFSDP_BUILD_TESTS=ON
         -DFSDP_BUILD_EXAMPLES=ON -DFSDP_BUILD_BENCHMARKS=ON)
if [[ $only == local ]]; then
  build=build/gpu-local
  options+=(-DFSDP_NCCL=OFF -DFSDP_MPI=OFF)
fi
command -v ninja >/dev/null && options+=(-G Ninja)
logs=${OUT:-build/gpu-logs}
mkdir -p "$logs"
logs=$(realpath "$logs")
log=$logs/gpu-tests.log
table=$logs/gpu-tests.tsv
note=$logs/note
nanogpt=$PWD/$build/examples/nanogpt/nanogpt
bench=$PWD/$build/benchmarks/step/bench_step_cuda
torch_step=$PWD/benchmarks/step/pytorch_step.py
models=(gpt2 gpt2-medium gpt2-large gpt2-xl)
batch=()
[[ -z ${BATCH-} ]] || batch=("--batch=$BATCH")
: >"$log"
printf 'stage\tresult\tseconds\tnote\n' >"$table"

failed=0
for stage in "${chosen[@]}"; do
  echo "===== $stage" >>"$log"
  start=$SECONDS
  case $stage in
    build | strategies | devices | shakespeare | step | kernels | pytorch | attention) action=run_$stage ;;
    *check | *check_nanogpt) action=run_sanitizer ;;
    *) action=run_test ;;
  esac
  rm -f "$note"
  timeout --kill-after=10 "$limit" bash -uo pipefail -c \
    "$(declare -p build options chosen tests kernels trainer_kernels limit data logs note nanogpt bench torch_step models batch)
     . tests/support/gpu_stages.sh
     $action $stage" >>"$log" 2>&1
  code=$?
  case $code in
    0) result=passed ;;
    77) result=skipped ;;
    78) result=absent ;;
    124 | 137) result=timeout ;;
    *) result=FAILED ;;
  esac
  [[ $result == FAILED || $result == timeout ]] && failed=1
  printf '%s\t%s\t%d\t%s\n' "$stage" "$result" $((SECONDS - start)) "$(head -n 1 "$note" 2>/dev/null)" >>"$table"
  [[ $stage == build && $result != passed ]] && { tail -n 40 "$log"; echo "tests/gpu.sh --needs: what packages are missing"; break; }
done
rm -f "$note" "$logs"/{step,kernels,pytorch,attention}.txt "$logs/one.json"

((failed)) && grep -nE 'FAILED|error:|Error|\*\*\*Failed' "$log" | tail -n 40
awk -F '\t' '{printf "%-36s %-8s %8s  %s\n", $1, $2, $3, $4}' "$table"
echo "log: $log"
exit $failed
