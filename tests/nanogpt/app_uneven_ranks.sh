#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The number of ranks need not divide gradient_accumulation_steps: 1, 2, 3 and 4 ranks train on the same batches with the same
# losses, under every strategy, and a run goes on with other numbers of ranks.
# programs: nanogpt
# skip-sanitizers
#
#   app_uneven_ranks.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
export OPENBLAS_NUM_THREADS=1
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --dropout=0.1 --eval_interval=100
  --eval_iters=1 --warmup_iters=2 --lr_decay_iters=20 --learning_rate=0.003 --grad_clip=0.5 --log_interval=1 --threads=1
  --dtype=float32)
# train RUN SETTING...: a line for each iteration, with its loss and norm
train() {
  local run=$1
  shift
  patiently 120 "$nanogpt" train "${small[@]}" --out_dir="$run" "$@" >output 2>&1 || { fail "train $*: ended with $?"; return; }
  sed -nE 's/.*"kind":"iter","iter":([0-9]+),"loss":([^,]+),.*"grad_norm":([^,}]+).*/\1 \2 \3/p' "$run/log.jsonl" >"$run.losses"
  check "$*: no losses" test -s "$run.losses"
}
# same A B: the same losses and norms but for rounding. A sum in fp32 of as few batches is exact to 1e-6, and a few steps of
# AdamW carry that on.
same() {
  checks=$((checks + 1))
  paste -d ' ' "$1.losses" "$2.losses" | awk '
    function far(a, b) { d = a - b; return d < 0 ? -d > 1e-5 * b : d > 1e-5 * b }
    NF != 6 || $1 != $4 || far($2, $5) || far($3, $6) { print; bad = 1 }
    END { exit bad || NR == 0 }' >apart || { cp apart output; fail "$1 and $2 have other losses"; }
}
says() { check "does not say '$1'" grep -qxF -- "$1" output; }

train one5 --ranks=1 --gradient_accumulation_steps=5 --max_iters=5
for ranks in 2 3 4; do
  train five-$ranks --ranks=$ranks --gradient_accumulation_steps=5 --max_iters=5
  same one5 five-$ranks
  says "tokens per iteration will be: 80"
done
check "learns nothing" awk '{ last = $2; if (first == "") first = last } END { exit !(last < first - 0.1) }' one5.losses
says "note: gradient_accumulation_steps 5 is not a multiple of the 4 ranks: each rank makes 2 micro-steps, and in the last one 3 of the ranks have no sequences: a step takes as long as one of 8 micro-steps"
train 3-of-2 --ranks=3 --gradient_accumulation_steps=2 --max_iters=3 --trace=trace.json
says "note: gradient_accumulation_steps 2 is not a multiple of the 3 ranks: each rank makes 1 micro-step, and in the last one 1 of the ranks has no sequences: a step takes as long as one of 3 micro-steps"
train one2 --ranks=1 --gradient_accumulation_steps=2 --max_iters=3
same one2 3-of-2
check "a note where nothing is uneven" test "$(grep -c 'not a multiple' output)" -eq 0

# Whole gradients that wait for the last micro-step, replicas, recomputation, a trace with room for all micro-steps.
for other in --strategy=shard_grad_op --strategy=no_shard '--strategy=no_shard --cpu_offload=true' --activation_checkpointing=true; do
  read -ra words <<<"$other"
  train "with $other" --ranks=3 --gradient_accumulation_steps=5 --max_iters=5 --trace=trace.json "${words[@]}"
  same one5 "with $other"
  check "$other: the trace was too small" test "$(grep -c 'spans of rank 0 are missing' output)" -eq 0
done
train groups --ranks=4 --gradient_accumulation_steps=5 --max_iters=5 --strategy=hybrid_shard --shard_group=2
same one5 groups

# 4 ranks become 3 and then 2: the settings of the run hold.
train one4 --ranks=1 --gradient_accumulation_steps=4 --max_iters=5
train less --ranks=4 --gradient_accumulation_steps=4 --max_iters=1
train less --ranks=3 --init_from=resume --max_iters=3
says "note: gradient_accumulation_steps 4 is not a multiple of the 3 ranks: each rank makes 2 micro-steps, and in the last one 2 of the ranks have no sequences: a step takes as long as one of 6 micro-steps"
train less --ranks=2 --init_from=resume --max_iters=5
same one4 less

# `bench` draws tokens by their number.
loss() {
  patiently 120 "$nanogpt" bench --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --burn_in=2 --timed=3 --device=cpu \
    --dtype=float32 --threads=1 --dataset=none --gradient_accumulation_steps=4 "$@" >output 2>&1 || fail "bench $*"
  grep -oE '^loss after 5 iterations: [0-9.]+' output
}
check "bench: no loss" test -n "$(loss --ranks=1)"
check "bench: 3 ranks have another loss" test "$(loss --ranks=3)" = "$(loss --ranks=1)"

echo "$checks checks, $failures failures"
((failures == 0))
