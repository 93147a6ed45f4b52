#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# One of four processes over NCCL's stand-in is killed, or stopped, or its device fails: the others name their rank, unit and
# collective at their own deadline, and end. Under mpirun, which ends them when one is killed, and with its recovery, which
# does not, likewise.
# programs: nanogpt
# labels: standin
# timeout: 900
#
#   drills.sh BINARY_DIR [DRILL...]   KILL, STOP, FAIL (the device), mpirun; and by name alone recovery (mpirun's)
#   FSDP_DRILLS=1   times each
#   FSDP_SLACK=60   seconds that a survivor may take beyond its deadline
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
shift
enter "$nanogpt"
for i in $(seq 300); do echo "the quick brown fox $i"; done >text
"$nanogpt" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
deadline=5 operation=2500 # the failing device's: in its twentieth iteration or so
export FSDP_STANDIN_DEVICES=4 OPENBLAS_NUM_THREADS=1
if ((EUID == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
train=("$nanogpt" train --device=cuda --dtype=float32 --dataset=d --n_layer=1 --n_head=2 --n_embd=16 --block_size=8
       --batch_size=1 --gradient_accumulation_steps=4 --max_iters=1000000 --eval_interval=1000000 --eval_iters=1
       --log_interval=1 "--collective_timeout=$deadline")
RANDOM=${FSDP_SEED:-$$}
longest=0

# Each rank's process puts its number into pid_RANK and its words into of_RANK.
start_by_variables() { # start_by_variables DRILL VICTIM
  local rank
  starters=()
  if [[ $1 == FAIL ]]; then export FSDP_STANDIN_FAIL=$2:$operation; else unset FSDP_STANDIN_FAIL; fi
  new_meeting
  for rank in 0 1 2 3; do
    RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=4 MASTER_ADDR=$address MASTER_PORT=$port "${train[@]}" --out_dir="$1" >"of_$rank" 2>&1 &
    starters+=($!)
    echo $! >"pid_$rank"
  done
}
start_by_mpirun() { # start_by_mpirun DRILL OPTION...
  unset FSDP_STANDIN_FAIL
  # shellcheck disable=SC2016 # it is for the ranks' shells
  mpirun --oversubscribe --bind-to none -np 4 "${@:2}" bash -c '
    rank=$OMPI_COMM_WORLD_RANK
    echo $$ >"pid_$rank"
    exec "$@" >"of_$rank" 2>&1' rank "${train[@]}" --out_dir="$1" >of_mpirun 2>&1 &
  starters=($!)
}
said() { # said RANK REGEX
  cp "of_$1" output
  grep -qE "$2" output
}
# gone RANK: waits until its process has ended, at most until it is overdue
gone() {
  local process waited ticks=0  # counted, so that none pass while the whole test is stopped
  process=$(<"pid_$1")
  while kill -0 "$process" 2>/dev/null && ((ticks++ <= 10 * (deadline + ${FSDP_SLACK:-60}))); do sleep 0.1; done
  waited=$((SECONDS - begin))
  ((waited <= longest)) || longest=$waited
  ! kill -9 "$process" 2>/dev/null
}

drill() { # drill NAME
  local rank victim=$((RANDOM % 4)) code waiting
  rm -f of_* pid_*
  case $1 in
    mpirun) start_by_mpirun "$1" ;;
    recovery) start_by_mpirun "$1" --enable-recovery ;;
    *) start_by_variables "$1" "$victim" ;;
  esac
  wait_for grep -q '^iter 3:' of_0
  cat of_* >output
  check "$1: did not train" grep -q '^iter 3:' of_0
  case $1 in
    FAIL) for _ in $(seq 600); do kill -0 "${starters[victim]}" || break; sleep 0.1; done ;;
    STOP) kill -STOP "$(<"pid_$victim")" ;;
    *) kill -KILL "$(<"pid_$victim")" ;;
  esac
  begin=$SECONDS
  for rank in 0 1 2 3; do
    ((rank != victim)) || continue
    check "$1 of rank $victim: rank $rank still waits after its deadline" gone "$rank"
    waiting="^fsdp: rank $rank of 4 \(cuda:$rank\): waiting in ([a-z_]+ [0-9]+ of [0-9]+ [a-z0-9]+ for unit '[^']+' \([a-z]+\)|exchange of '[^']+'), for .* s"
    if [[ $1 == mpirun ]]; then waiting+="|^nanogpt: SIGTERM at iteration [0-9]+: (stopping|saving)"; fi
    check "$1 of rank $victim: rank $rank did not say what it waited for" said "$rank" "$waiting"
    [[ $1 != mpirun && $1 != recovery ]] || continue
    wait "${starters[rank]}"
    code=$?
    check "$1 of rank $victim: rank $rank ended with $code" test "$code" -eq 70
  done
  case $1 in
    mpirun | recovery)
      wait "${starters[0]}"
      code=$?
      if [[ $1 == mpirun ]]; then # with recovery it ends with 0
        check "$1 of rank $victim: it ended with $code" test "$code" -ne 0
        check "mpirun does not say that a process was lost" said mpirun '^mpirun noticed that process rank [0-3] .* exited on signal 9'
      fi ;;
    FAIL)
      wait "${starters[victim]}"
      code=$?
      check "FAIL: rank $victim ended with $code" test "$code" -eq 1
      check "FAIL: rank $victim does not say what failed" said "$victim" "^nanogpt: error: rank $victim: .* failed.*: unspecified launch failure"
      check "FAIL: rank $victim does not name its device and what was under way" said "$victim" \
        "^nanogpt: error: .*; rank $victim of 4 \(cuda:$victim\): [a-z_]+ [0-9]+ of [0-9]+ [a-z0-9]+ for unit '[^']+' \([a-z]+\) was not known to be complete" ;;
    *)
      kill -9 "${starters[victim]}"
      wait "${starters[victim]}" ;;
  esac
}
drills=("$@")
if ((${#drills[@]} == 0)); then drills=(KILL STOP FAIL); fi
if (($# == 0)) && command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then drills+=(mpirun); fi
for _ in $(seq "${FSDP_DRILLS:-1}"); do
  for name in "${drills[@]}"; do drill "$name"; done
done 2>/dev/null

echo "${drills[*]}: $checks checks, $failures failures; the last survivor ended $longest s after the signal, with a deadline of $deadline s"
((failures == 0))
