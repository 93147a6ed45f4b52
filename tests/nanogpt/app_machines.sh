#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt on several machines (of namespaces) trains to the bits of one machine, sends as much over their link with one rank
# a machine as with two and four, and refuses an out_dir that the machines do not share.
# programs: nanogpt
# skip-sanitizers
# long
#
#   app_machines.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
. "$(dirname "${BASH_SOURCE[0]}")/../support/machines.sh"

enter_on_machines "$1"
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=32 --block_size=8 --batch_size=1 --gradient_accumulation_steps=4
  --max_iters=3 --warmup_iters=1 --learning_rate=0.01 --eval_interval=100 --eval_iters=1 --threads=1)
patiently 60 "$nanogpt" train "${small[@]}" --ranks=4 --out_dir=one >output 2>&1 || fail "one machine"

# equals RANKS SETTING...: on machines with so many ranks each
equals() {
  rm -rf several
  patiently 120 machines_run "$1" mpirun "$nanogpt" train "${small[@]}" --out_dir=several "${@:2}" >output 2>&1 || fail "machines of $*: ended with $?"
  check "machines of $*: other weights" cmp one/model.safetensors several/model.safetensors
}
machines_up 3 || fail "machines"
equals "2 2" --strategy=full_shard
equals "3 1" --strategy=no_shard
equals "1 1 2" --strategy=full_shard

# --- an out_dir of each machine's own --------------------------------------------------------------------------------------
patiently 120 machines_run "1 1" mpirun "$nanogpt" train "${small[@]}" --out_dir=/dev/shm/run >output 2>&1
code=$?
check "ended with $code" test "$code" -ne 0 -a "$code" -lt 124
check "does not name the folder" grep -qE "setting 'out_dir': rank 1 on machine1-[0-9]+ does not see in '/dev/shm/run' what rank 0 on machine0-[0-9]+ writes there" output
check "begins to train" bash -c '! grep -q "^step 0" output'
check "leaves its mark" test -z "$(find several -name '.mark.*')$(machine_run 0 find /dev/shm/run -name '.mark.*')"

# --- bytes over the link -----------------------------------------------------------------------------------------------------
# sent RANKS STEPS: prints the bytes that a run of one micro-step a step sends between two machines
sent() {
  local before
  before=$(machines_bytes)
  patiently 120 machines_run "$1 $1" mpirun "$nanogpt" train "${small[@]}" --n_embd=256 --n_layer=1 --gradient_accumulation_steps=$((2 * $1)) \
    --max_iters="$2" --out_dir="sent-$1-$2" >output 2>&1 || fail "$1 ranks a machine, $2 steps: ended with $?" >&2
  echo $(($(machines_bytes) - before))
}
steps=4
bytes=()
for ranks in 1 2 4; do
  short=$(sent "$ranks" 1) long=$(sent "$ranks" $((1 + steps)))
  bytes+=($(((long - short) / steps)))
done
echo "bytes a step between two machines with 1, 2 and 4 ranks each: ${bytes[*]}"
for i in 1 2; do
  check "${bytes[i]} bytes a step are not within 5 % of ${bytes[0]}" \
    test $((20 * (bytes[i] - bytes[0]))) -le "${bytes[0]}" -a $((20 * (bytes[0] - bytes[i]))) -le "${bytes[0]}"
done

echo "$checks checks, $failures failures"
((failures == 0))
