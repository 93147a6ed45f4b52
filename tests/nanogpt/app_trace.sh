#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt train --trace writes one file with the asked-for steps of all ranks, and prints one report: as threads, and
# under mpirun. A file that cannot be written ends the run before training.
# skip-tsan
# programs: nanogpt
# timeout: 600
#
#   app_trace.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
# Evaluations fall before steps 3 and 6: between traced steps.
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --max_iters=6 --eval_interval=3 --eval_iters=1 --out_dir=out --overwrite)

# traces RANKS FIRST LAST COMMAND...: the command traces these iterations of that many ranks
traces() {
  local ranks=$1 first=$2 last=$3
  shift 3
  rm -f trace.json
  patiently 120 "$@" --trace=trace.json >output 2>&1 || { fail "ended with $?: $*"; return; }
  (($(grep -c '^trace of iterations' output) == 1)) || fail "no report, or several: $*"
  grep -q "^trace of iterations $first to $last in trace.json; rank 0:" output || fail "not iterations $first to $last: $*"
  grep -q '^total ' output || fail "no total: $*"
  grep -q "^$((last - first + 1)) steps\? of " output || fail "not $((last - first + 1)) steps: $*"
  (($(grep -c '^rank [0-9]*: ' output) == ranks - 1)) || fail "not $ranks ranks: $*"
  (($(grep -c '"traceEvents"' trace.json) == 1)) || fail "not one trace in the file: $*"
  local rank step
  for ((rank = 0; rank < ranks; ++rank)); do
    for ((step = first; step <= last; ++step)); do
      (($(grep -c "\"pid\":$rank,.*\"pass\":\"backward\",\"step\":$step," trace.json) > 0)) ||
        fail "rank $rank has no step $step: $*"
    done
  done
  if grep -q "\"step\":$((first - 1)),\|\"step\":$((last + 1))," trace.json; then fail "too many steps: $*"; fi
}
traces 1 2 4 "$nanogpt" train "${small[@]}"
traces 2 2 5 "$nanogpt" train "${small[@]}" --ranks=2 --trace_steps=4
traces 2 0 6 "$nanogpt" train "${small[@]}" --ranks=2 --trace_steps=50 --strategy=no_shard
if command -v mpirun >/dev/null && [[ $("$nanogpt" train --help) == *ranks* ]] && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  traces 2 2 4 mpirun --oversubscribe --bind-to none -n 2 "$nanogpt" train "${small[@]}" --strategy=shard_grad_op
fi

patiently 60 "$nanogpt" train "${small[@]}" --ranks=2 --trace=no/such/trace.json >output 2>&1 && fail "wrote nowhere"
grep -q "setting 'trace'" output || fail "did not name the setting"
if grep -q '^iter' output; then fail "trained before it looked at the file"; fi
((failures == 0)) && echo "traces are whole"
exit $((failures > 0))
