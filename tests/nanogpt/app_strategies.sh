#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt trains under every strategy that it names, to the same losses.
# programs: nanogpt
# skip-sanitizers
#
#   app_strategies.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
for i in $(seq 1 300); do echo "the quick brown fox $i"; done >text
"$nanogpt" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
small=(--dataset=d --ranks=4 --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --max_iters=6 --eval_interval=3 --eval_iters=1)

losses() { # losses STRATEGY NAME [SETTING...]: of a run that says that its strategy is NAME
  local strategy=$1 name=$2
  shift 2
  timeout 120 "$nanogpt" train "${small[@]}" --out_dir="out_$strategy" --strategy="$strategy" "$@" >output 2>&1 ||
    { fail "$strategy ended with $?"; cat output; return; }
  grep -qF "strategy $name," output || fail "$strategy: does not say that it is $name"
  grep -oE '^(iter|step) [0-9]+.*loss [0-9.]+' output | sed 's/,* time.*//' >"losses_$strategy"
  [[ -s losses_$strategy ]] || fail "$strategy: no losses"
}
losses full_shard full_shard
losses shard_grad_op shard_grad_op
losses hybrid_shard 'hybrid_shard(full_shard)' --shard_group=2
losses no_shard no_shard
losses ddp no_shard
for strategy in shard_grad_op hybrid_shard no_shard ddp; do
  diff losses_full_shard "losses_$strategy" || fail "$strategy: other losses than full_shard's"
done
((failures == 0)) && echo "strategies agree"
exit $((failures > 0))
