#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A rank of four is killed: go_on.sh continues with three from the last checkpoint, to the weights of a run that was stopped there
# and resumed on three. SIGUSR1 to go_on.sh saves, and ends it with 85, also in the first moment of a start. After mpirun was
# killed, ranks that it leaves behind do not keep the next start from going on. An error in the settings is not tried again.
# programs: nanogpt
# timeout: 300
# skip-sanitizers
#
#   app_go_on.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
. "$(dirname "${BASH_SOURCE[0]}")/../support/mpirun.sh"
. "$(dirname "${BASH_SOURCE[0]}")/../../examples/nanogpt/deploy/go_on.sh"
script=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../examples/nanogpt/deploy" && pwd)/go_on.sh

nanogpt=$1/examples/nanogpt/nanogpt
if ! command -v mpirun > /dev/null || [[ $(ldd "$nanogpt" 2> /dev/null) != *libmpi* || $(mpirun --version) != *"Open MPI"* ]]; then
  echo "skipped: nanogpt is built without Open MPI"
  exit 77
fi
enter_with_text "$nanogpt"
export OPENBLAS_NUM_THREADS=1
settings=(--dataset=d --n_layer=1 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4 --dropout=0.1
  --eval_interval=1000000 --eval_iters=1 --warmup_iters=2 --lr_decay_iters=1000 --log_interval=10 --threads=1 --device=cpu
  --dtype=float32 --checkpoint_interval=20)
# until CONDITION...: waits for it, as long as the job runs
until_() {
  while ! "$@"; do
    if ! kill -0 $job 2> /dev/null; then
      fail "ended before: $*"
      return 1
    fi
    sleep 0.05
  done
}
# rank_process NUMBER: sets process to that of a rank of job
rank_process() {
  for process in $(go_on_tree $job); do
    if tr '\0' '\n' 2> /dev/null < "/proc/$process/environ" | grep -qx "OMPI_COMM_WORLD_RANK=$1"; then return 0; fi
  done
  return 1
}
# mpirun_process: sets process to job's mpirun, which calls itself prterun from Open MPI 5 on
mpirun_process() {
  # shellcheck disable=SC2013  # words
  for process in $(cat "/proc/$job/task/$job/children" 2> /dev/null); do
    if [[ $(cat "/proc/$process/comm" 2> /dev/null) =~ ^(mpirun|prterun)$ ]]; then return 0; fi
  done
  return 1
}

trains_again() { sed '1,/^resuming from/d' output | grep -q '^iter '; }

# starts OUT_DIR RANKS LEAST: starts a run without an end, as job
starts() {
  start "$script" --ranks="$2" --least="$3" mpirun -- "$nanogpt" train "${settings[@]}" --max_iters=1000000 --out_dir="$1"
  job=$run
}
# ends_with_85: waits for job
ends_with_85() {
  wait $job
  code=$?
  check "ended with $code, not 85" test "$code" -eq 85
}
# loses OUT_DIR FIND...: when the run has a checkpoint, kills the process that `FIND...` sets, and asks to stop when it trains
# again
loses() {
  if until_ test -e "$1/latest" && until_ "${@:2}"; then
    kill -KILL "$process"
    until_ trains_again
    kill -USR1 $job
  fi
  ends_with_85
}

starts run 4 2
loses run rank_process 2
check "does not say what happened" grep -qxF \
  "== mpirun ended with code 137, and ranks were lost: going on with 3 ranks instead of 4, from the newest checkpoint or snapshot" output
check "was not started once more" test "$(grep -cE '^[0-9] processes \(MPI\)' output)" -eq 2
check "did not go on with 3 ranks" grep -qE '^3 processes \(MPI\)' output
begin=$(sed -nE 's/^resuming from run\/step-[0-9]+ at iteration ([0-9]+)$/\1/p' output)
end=$(sed -nE 's/.*asked to stop: saved in run before iteration ([0-9]+);.*/\1/p' output | head -n 1)
check "went on from '$begin' to '$end'" test "${begin:-0}" -ge 20 -a "${end:-0}" -gt "${begin:-0}"

# The same, on purpose. Before it was killed, the first run may have come further than the second one.
same() { patiently 120 "$nanogpt" train "${settings[@]}" --out_dir=purpose "$@" > output 2>&1 || fail "train $*"; }
same --ranks=4 --max_iters=$((begin - 1))
same --ranks=3 --max_iters=$((end - 1)) --init_from=resume
check "did not resume at $begin" grep -qxF "resuming from purpose/step-$begin at iteration $begin" output
losses() { sed -nE "s/.*\"kind\":\"iter\",\"iter\":([0-9]+),\"loss\":([^,]+),.*/\1 \2/p" "$1/log.jsonl" | awk -v begin="$begin" -v end="$end" '
  $1 >= begin && $1 < end { last[$1] = $2 } END { for (i in last) print i, last[i] }' | sort -n; }
check "no losses" test -n "$(losses run)"
check "other losses" diff <(losses run) <(losses purpose)
"$nanogpt" export --out_dir=run --checkpoint=latest --to=weights-run > output 2>&1 || fail "export"
"$nanogpt" export --out_dir=purpose --checkpoint=latest --to=weights-purpose > output 2>&1 || fail "export"
check "other weights" cmp weights-run/model.safetensors weights-purpose/model.safetensors

# mpirun is killed.
starts killed 2 1
loses killed mpirun_process
check "did not go on with 1 rank" grep -qE '^1 process \(MPI\)' output

# SIGUSR1 as soon as there is mpirun.
starts soon 2 1
if until_ mpirun_process; then kill -USR1 $job; fi
ends_with_85
check "the ranks were not asked to stop" grep -q '^asked to stop: ' output

# Bad settings.
"$script" --ranks=2 --least=1 mpirun -- "$nanogpt" train "${settings[@]}" --n_embd=15 --out_dir=bad > output 2>&1
code=$?
check "ended with $code, not 2" test "$code" -eq 2
check "bad settings were tried again" test "$(grep -c "setting 'n_embd'" output)" -eq 1

echo "$checks checks, $failures failures"
((failures == 0))
