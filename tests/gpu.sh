#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the GPU tests and runs them in stages of at most eight minutes.
# usage: tests/gpu.sh [--list] [--only local] [--stage NAME]...
#   --list        names the stages
#   --only local  what one process can do: neither NCCL nor MPI is needed
#   --stage NAME  this stage (may be repeated); what it needs is built first
# Writes gpu-tests.log and gpu-tests.tsv to $OUT, else to build/gpu-logs. CUDA_ARCHITECTURES chooses what is compiled
# for; by default the first GPU. Exit code: 0 all passed, 1 a stage failed, 77 no GPU.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

limit=480  # seconds a stage
only=all
list=no
chosen=()
while (($#)); do
  case $1 in
    --list) list=yes ;;
    --only) only=${2-}; shift ;;
    --stage) chosen+=("${2-}"); shift ;;
    *) sed -n '3,9s/^# //p' "${BASH_SOURCE[0]}"; exit 2 ;;
  esac
  shift
done
[[ $only == all || $only == local ]] || { echo "--only takes: local"; exit 2; }

# Every tests/<folder>/<name>.cu is the test and the program <folder>_<name>.
tests=()
kernels=()
for source in tests/{conformance,unit,memory,schedule,parity,nanogpt}/*.cu; do
  [[ -e $source ]] || continue
  name=${source#tests/}
  name=${name%.cu}
  name=${name//\//_}
  [[ $only == local && $name =~ _(nccl|mpi)$ ]] && continue
  tests+=("$name")
  [[ $name == unit_* || $name == conformance_cuda_device ]] && kernels+=("$name")
done
stages=(build "${tests[@]}" memcheck racecheck synccheck)
if [[ $list == yes ]]; then
  printf '%s\n' "${stages[@]}"
  exit 0
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
options=("-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-$(architecture)}" -DFSDP_WERROR=OFF
         -DFSDP_BUILD_EXAMPLES=OFF -DFSDP_BUILD_BENCHMARKS=OFF)
if [[ $only == local ]]; then
  build=build/gpu-local
  options+=(-DFSDP_NCCL=OFF -DFSDP_MPI=OFF)
fi
command -v ninja >/dev/null && options+=(-G Ninja)
logs=${OUT:-build/gpu-logs}
mkdir -p "$logs"
log=$logs/gpu-tests.log
table=$logs/gpu-tests.tsv
: >"$log"
printf 'stage\tresult\tseconds\n' >"$table"

is_there() { ctest --test-dir "$build" -N -R "^$1\$" 2>/dev/null | grep -q 'Total Tests: 1$'; }

# Programs of the chosen stages that this configuration has.
wanted() {
  local stage name names=()
  for stage in "${chosen[@]}"; do
    case $stage in
      build) ((${#chosen[@]} == 1)) && names+=("${tests[@]}") ;;
      *check) names+=("${kernels[@]}") ;;
      *) names+=("$stage") ;;
    esac
  done
  for name in $(printf '%s\n' "${names[@]}" | sort -u); do is_there "$name" && echo "$name"; done
}

run_build() {
  cmake --preset cuda -B "$build" "${options[@]}" || return 1
  local targets
  mapfile -t targets < <(wanted)
  ((${#targets[@]} == 0)) || cmake --build "$build" --parallel "$(nproc)" --target "${targets[@]}"
}

run_test() {
  is_there "$1" || { echo "$1 is not part of this configuration (is NCCL installed?)"; return 78; }
  local output code
  output=$(ctest --test-dir "$build" -R "^$1\$" --no-tests=error --output-on-failure --timeout $((limit - 10)) 2>&1)
  code=$?
  echo "$output"
  ((code == 0)) && grep -q 'Skipped' <<<"$output" && return 77
  return $code
}

run_sanitizer() {
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed"; return 78; }
  local name program
  for name in "${kernels[@]}"; do
    is_there "$name" || continue
    program=$(find "$build" -name "$name" -type f -perm -u+x | head -n 1)
    echo "== $1 of $name"
    # The allocation that is meant to fail, and launches of two thousand million blocks, are left to the plain run.
    compute-sanitizer --tool "$1" --error-exitcode 9 --report-api-errors no "$program" \
      '~cuda: a launch may have more blocks than a grid holds' || return 1
  done
}
export -f run_build run_test run_sanitizer is_there wanted

failed=0
for stage in "${chosen[@]}"; do
  echo "===== $stage" >>"$log"
  start=$SECONDS
  case $stage in
    build) action=run_build ;;
    *check) action=run_sanitizer ;;
    *) action=run_test ;;
  esac
  # The shell that times out needs the functions and these arrays.
  timeout --kill-after=10 "$limit" bash -uo pipefail -c \
    "$(declare -p build options chosen tests kernels limit); $action $stage" >>"$log" 2>&1
  code=$?
  case $code in
    0) result=passed ;;
    77) result=skipped ;;
    78) result=absent ;;
    124 | 137) result=timeout ;;
    *) result=FAILED ;;
  esac
  [[ $result == FAILED || $result == timeout ]] && failed=1
  printf '%s\t%s\t%d\n' "$stage" "$result" $((SECONDS - start)) >>"$table"
  [[ $stage == build && $result != passed ]] && { tail -n 40 "$log"; break; }
done

awk -F '\t' '{printf "%-36s %-8s %8s\n", $1, $2, $3}' "$table"
((failed)) && grep -nE 'FAILED|error:|Error|\*\*\*Failed' "$log" | tail -n 40
echo "log: $log"
exit $failed
