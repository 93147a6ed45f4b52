#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One of four processes over NCCL's stand-in is killed, or stopped: the others name their rank, unit and collective at their
# own deadline, and end.
# programs: nanogpt
# labels: standin
# timeout: 900
#
#   drills.sh BINARY_DIR
#   FSDP_DRILLS=1   times each
#   FSDP_SLACK=60   seconds that a survivor may take beyond its deadline
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
for i in $(seq 300); do echo "the quick brown fox $i"; done >text
"$nanogpt" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
deadline=5
export FSDP_STANDIN_DEVICES=4 OPENBLAS_NUM_THREADS=1 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1
train=(train --device=cuda --dtype=float32 --dataset=d --n_layer=1 --n_head=2 --n_embd=16 --block_size=8 --batch_size=1
       --gradient_accumulation_steps=4 --max_iters=1000000 --eval_interval=1000000 --eval_iters=1 --log_interval=1
       "--collective_timeout=$deadline")
RANDOM=${FSDP_SEED:-$$}
longest=0

drill() { # drill SIGNAL
  local processes=() rank victim=$((RANDOM % 4)) begin waited code
  export MASTER_PORT=$((20000 + RANDOM % 20000))
  for rank in 0 1 2 3; do
    RANK=$rank LOCAL_RANK=$rank "$nanogpt" "${train[@]}" --out_dir="$1" >"of_$rank" 2>&1 &
    processes+=($!)
  done
  for _ in $(seq 600); do
    if grep -q '^iter 3:' of_0; then break; fi
    sleep 0.1
  done
  cat of_[0-3] >output
  check "$1: did not train" grep -q '^iter 3:' of_0
  kill "-$1" "${processes[victim]}"
  begin=$SECONDS
  for rank in 0 1 2 3; do
    ((rank != victim)) || continue
    while kill -0 "${processes[rank]}" 2>/dev/null && ((SECONDS - begin <= deadline + ${FSDP_SLACK:-60})); do sleep 0.1; done
    waited=$((SECONDS - begin))
    ((waited <= longest)) || longest=$waited
    if kill -9 "${processes[rank]}" 2>/dev/null; then fail "$1 of rank $victim: rank $rank still waits after $waited s"; fi
    wait "${processes[rank]}" 2>/dev/null
    code=$?
    cp "of_$rank" output
    check "$1 of rank $victim: rank $rank ended with $code" test "$code" -eq 70
    check "$1 of rank $victim: rank $rank did not say what it waited for" grep -qE \
      "^fsdp: rank $rank of 4 \(cuda:$rank\): waiting in ([a-z_]+ [0-9]+ of [0-9]+ [a-z0-9]+ for unit '[^']+' \([a-z]+\)|exchange of '[^']+'), for .* s" output
  done
  kill -9 "${processes[victim]}" 2>/dev/null
  wait "${processes[victim]}" 2>/dev/null
}
for _ in $(seq "${FSDP_DRILLS:-1}"); do
  drill KILL
  drill STOP
done 2>/dev/null

echo "$checks checks, $failures failures; the last survivor ended $longest s after the signal, with a deadline of $deadline s"
((failures == 0))
