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
small=(--dataset=d --ranks=4 --n_layer=4 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --max_iters=6 --eval_interval=3 --eval_iters=1)

runs=() # a folder of each
losses() { # losses NAME [SETTING...]: of a run that says that its strategy is NAME
  local name=$1 run=run${#runs[@]}
  shift
  runs+=("$run")
  timeout 120 "$nanogpt" train "${small[@]}" --out_dir="$run" --log_json="$run.json" "$@" >output 2>&1 ||
    { fail "$* ended with $?"; cat output; return; }
  grep -qF "strategy $name," output || fail "$*: does not say that it is $name"
  grep -oE '^(iter|step) [0-9]+.*loss [0-9.]+' output | sed 's/,* time.*//' >"$run.losses"
  [[ -s $run.losses ]] || fail "$*: no losses"
  diff run0.losses "$run.losses" || fail "$*: other losses than full_shard's"
}
memory() { grep -o '"mem_bytes":[0-9]*' "$1.json" | tail -n 1 | cut -d: -f2; }

losses full_shard
losses full_shard --wrap=size --min_params=3500 # two layers of 3,104 parameters
losses full_shard --wrap=model
for i in 1 2; do
  (($(memory "run$i") > $(memory "run$((i - 1))"))) || fail "larger units take no more memory: $(memory "run$i") bytes"
done
losses full_shard --reshard_after_forward=2
losses shard_grad_op --strategy=full_shard --reshard_after_forward=false
losses shard_grad_op --strategy=shard_grad_op
losses 'hybrid_shard(full_shard)' --strategy=hybrid_shard --shard_group=2
losses 'hybrid_shard(shard_grad_op)' --strategy=hybrid_shard --shard_group=2 --reshard_after_forward=false
losses no_shard --strategy=no_shard
losses no_shard --strategy=ddp
((failures == 0)) && echo "strategies agree"
exit $((failures > 0))
