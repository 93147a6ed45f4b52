#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Calls of CUDA's libraries in nanogpt's training steps, clipping included: none allocates. They wait for an event
# in each pass and in each upload of tokens, as the host may be so far ahead and no further; and where a line is logged.
# programs: nanogpt
# labels: standin
#
#   nanogpt_calls.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
for i in $(seq 300); do echo "the quick brown fox $i"; done >text
"$nanogpt" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
export FSDP_STANDIN_DEVICES=2 OPENBLAS_NUM_THREADS=1
micro_steps=4 few=4 many=8 # iterations; passes_ahead is 4: a third step waits as all after it do
train=(train --device=cuda --dtype=bfloat16 --dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=1
       "--gradient_accumulation_steps=$micro_steps" --eval_interval=1000 --eval_iters=1)

# run ITERATIONS FILE ARGUMENT...: counts of its calls go to FILE
run() {
  patiently 120 env FSDP_STANDIN_COUNTS="$2" "$nanogpt" "${train[@]}" "--max_iters=$1" "--out_dir=${2#rank[01]_}.out" "${@:3}" >"$2.output" 2>&1 ||
    { cp "$2.output" output; fail "nanogpt ${*:3}"; }
}
# more FEW MANY NAME: how many more calls of it
more() { awk -v name="$3" '{ of = $1; $1 = ""; if ($0 == " " name) sum += FILENAME == ARGV[1] ? -of : of } END { print sum + 0 }' "$1" "$2"; }
# costs FILE: calls that make or end something
costs() { grep -E 'Malloc|Alloc|Free|Create|Destroy|Register|Init|Split|Finalize|DeviceSynchronize' "$1"; }
same_costs() { diff <(costs "$1") <(costs "$2"); }
# judge WHAT FEW MANY MICRO_STEPS: that many in an iteration of this process. About once a second the ranks ask each other
# whether one is to stop (stop_vote.hpp): over NCCL a question gathers twice, and each time copies to pageable memory and from it, and
# synchronizes its stream. The host waits there and in the copy to pageable memory. How many questions fall between $few and
# $many iterations depends on the machine's speed.
judge() {
  local events=$(((many - few) * 3 * $4)) copies
  copies=$(more "$2" "$3" 'copies of pageable memory')
  : >output
  check "$1: nothing was counted" grep -q ' cudaLaunchKernelExC$' "$2"
  check "$1: more iterations make or end more" same_costs "$2" "$3"
  check "$1: expected $events waits for events, got $(more "$2" "$3" cudaEventSynchronize)" \
    test "$(more "$2" "$3" cudaEventSynchronize)" -eq "$events"
  check "$1: $copies copies of pageable memory" test $((copies % 4)) -eq 0
  check "$1: $(more "$2" "$3" cudaStreamSynchronize) synchronizations of streams" \
    test "$(more "$2" "$3" cudaStreamSynchronize)" -eq $((copies / 2))
  check "$1: the host has waited $(more "$2" "$3" 'waits of the host') times, $events of them for events" \
    test "$(more "$2" "$3" 'waits of the host')" -eq $((events + copies))
}

for iterations in $few $many; do run "$iterations" "threads_$iterations" --log_interval=1000 --ranks=2; done
judge "threads" "threads_$few" "threads_$many" "$micro_steps"
check "threads: they ask each other on the host" test "$(more "threads_$few" "threads_$many" 'copies of pageable memory')" -eq 0

export WORLD_SIZE=2
for iterations in $few $many; do
  new_meeting
  export MASTER_ADDR=$address MASTER_PORT=$port
  RANK=1 LOCAL_RANK=1 run "$iterations" "rank1_$iterations" --log_interval=1000 >failures_of_1 &
  RANK=0 LOCAL_RANK=0 run "$iterations" "rank0_$iterations" --log_interval=1000
  wait
  cat failures_of_1
done
judge "processes, rank 0" "rank0_$few" "rank0_$many" $((micro_steps / 2))
judge "processes, rank 1" "rank1_$few" "rank1_$many" $((micro_steps / 2))
unset WORLD_SIZE

for iterations in $few $many; do run "$iterations" "logging_$iterations" --log_interval=1 --gradient_accumulation_steps=1; done
# The second wait finds compute idle: the first one was for its last work.
check "a logged line waits for compute twice, for the loss and for the norm" \
  test "$(more "logging_$few" "logging_$many" cudaStreamSynchronize)" -eq $((2 * (many - few)))

echo "$checks checks, $failures failures"
((failures == 0))
