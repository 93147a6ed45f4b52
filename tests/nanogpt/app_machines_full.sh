#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt under every strategy trains on several machines (of namespaces), 5 ms apart over links that lose 0.1 % of packets, to
# the bits of one machine; a machine that dies, or whose link goes silent, ends the run with an error.
# programs: nanogpt
# labels: full
# timeout: 900
# skip-sanitizers
#
#   app_machines_full.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
. "$(dirname "${BASH_SOURCE[0]}")/../support/machines.sh"

[[ -w /dev/net/tun ]] || { echo "skipped: there is no /dev/net/tun"; exit 77; }
enter_on_machines "$1"
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=64 --block_size=8 --batch_size=1 --gradient_accumulation_steps=8
  --max_iters=4 --warmup_iters=1 --learning_rate=0.01 --eval_interval=100 --eval_iters=1 --threads=1)
machines_up 3 --delay=5ms --loss=0.1% || fail "machines"
for strategy in full_shard shard_grad_op "hybrid_shard --shard_group=2" no_shard; do
  for precision in "" --dtype=bfloat16 --reduce_dtype=bfloat16; do
    read -ra settings <<<"--strategy=$strategy $precision"
    rm -rf one
    patiently 60 "$nanogpt" train "${small[@]}" "${settings[@]}" --ranks=4 --out_dir=one >output 2>&1 || fail "one machine: ${settings[*]}"
    for ranks in "2 2" "3 1" "1 1 2"; do
      rm -rf several
      patiently 120 machines_run "$ranks" mpirun "$nanogpt" train "${small[@]}" "${settings[@]}" --out_dir=several >output 2>&1 ||
        fail "${settings[*]} on $ranks: ended with $?"
      check "${settings[*]} on $ranks: other weights" cmp one/model.safetensors several/model.safetensors
    done
  done
done

# --- machines that fail ------------------------------------------------------------------------------------------------------
# loses FUNCTION: machine 1 is lost in the middle of a run
loses() {
  local run
  rm -rf several
  start patiently 120 machines_run "2 2" mpirun "$nanogpt" train "${small[@]}" --max_iters=100000 --log_interval=1 --collective_timeout=5 \
    --out_dir=several
  wait_for grep -q '^iter 5:' output
  "$1" 1
  # mpirun may wait for a rank that never comes; ranks end by themselves.
  wait_for grep -qE "$2" output
  check "$1: no line says '$2'" grep -qE "$2" output
  machine_kill 0
  wait "$run"
  check "$1: the run claims success" test $? -ne 0
}
loses machine_cut 'rank [01]: waiting in .*; missing ranks: .*; giving up'
machines_down
machines_up 2 || fail "machines"
loses machine_kill 'lost|signal|terminat|giving up|daemon'

echo "$checks checks, $failures failures"
((failures == 0))
