#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run of 4 ranks on two machines is killed $FSDP_KILLS times (100) at random moments, each time in a run of its own: a rank,
# a machine with its memory, while a snapshot is written, while it is mirrored, and a link that goes silent. go_on.sh starts
# it again by itself; it goes on from a snapshot that is no older than the last one that was whole before the kill.
# programs: nanogpt
# labels: full
# timeout: 5400
# skip-sanitizers
#
#   app_snapshot_kills.sh BINARY_DIR
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/../support/script.sh"
. "$here/../support/machines.sh"

enter_on_machines "$1"
trap 'exit 130' INT TERM HUP
machines_up 2 || exit 1
# 1.2 M parameters: a rank's slices have 3.6 MB, so that kills may meet a snapshot in each of its parts.
small=(--dataset=d --n_layer=6 --n_head=4 --n_embd=128 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --eval_interval=1000000 --checkpoint_interval=1000000 --max_iters=1000000 --eval_iters=1 --log_interval=1 --threads=1
  --collective_timeout=4 --snapshot_interval=1 --snapshot_folder=/dev/shm/nanogpt)
# The way into a machine leads over its link, as ssh's does: one that is silent does not answer.
cat >agent <<END
#!/bin/bash
timeout 2 bash -c "exec 3<>/dev/tcp/\$1/9" 2>/dev/null
if ((\$? == 124)); then exit 1; fi
exec "$machines_support/enter_machine.sh" "\$@"
END
chmod +x agent
# memory I: machine I's /dev/shm, as a path of this machine
memory() { echo "/proc/$(machine_keeper "$1")/root/dev/shm"; }
# whole: prints the newest step of which the machines in $machines_left hold the slices of all 4 ranks
whole() {
  local machine
  for machine in $machines_left; do
    find "$(memory "$machine")/nanogpt" -name '*.snapshot.json' 2>/dev/null
  done | sed -n 's|.*/step-\([0-9]*\)\.\([0-9a-f]*\)/rank-\([0-9]*\)-of-00004\..*|\1 \2 \3|p' | sort -u |
    awk '{ if (++slices[$1 " " $2] == 4 && $1 > newest) newest = $1 } END { print newest + 0 }'
}
ranks_of() { # ranks_of I: process ids of nanogpt on machine I
  local process
  for process in $(pgrep -x nanogpt); do
    if [[ /proc/$process/ns/net -ef /proc/$(machine_keeper "$1")/ns/net ]]; then echo "$process"; fi
  done
}
# wait_within SECONDS COMMAND...: until the command succeeds
wait_within() {
  local until=$((SECONDS + $1))
  shift
  until "$@"; do
    if ((SECONDS > until)); then return 1; fi
    sleep 0.01
  done
}
begun() { grep -q '^iter 3:' output; }
gone_on() { (($(grep -c '^resuming from .*step-' output) > 0)) && (($(sed -n '/^resuming from/,$p' output | grep -c '^iter ') > 2)); }
# A rank's slices are being written; some rank's are written, and no machine has the copy.
writes() { compgen -G "$(memory 0)/nanogpt/run-*/step-*/*.tmp" >/dev/null || [[ -n $(find "$(memory 0)/nanogpt" -name '*.safetensors' -newer start 2>/dev/null) ]]; }
mirrors() {
  local newest
  newest=$(find "$(memory 0)/nanogpt" -mindepth 2 -maxdepth 2 -name 'step-*' 2>/dev/null | sort -V | tail -n 1)
  [[ -n $newest && -e $(compgen -G "$newest/rank-00000*.snapshot.json" | head -n 1) && -z $(compgen -G "$newest/rank-0000[23]*.snapshot.json") ]]
}

RANDOM=${FSDP_SEED:-11}
kinds=(rank machine writing mirroring silent)
declare -A from_snapshot=()
for kill in $(seq "${FSDP_KILLS:-100}"); do
  kind=${kinds[kill % ${#kinds[@]}]}
  machines_left="0 1"
  rm -rf out "$(memory 0)/nanogpt" "$(memory 1)/nanogpt"
  : >output
  hosts=$(machine_address 0):2,$(machine_address 1):2
  setsid bash -c '. "$1"; machines_folder=$2; shift 2; machines_run "2 2" "$@"' kills "$here/../support/machines.sh" "$machines_folder" \
    env OMPI_MCA_plm_rsh_agent="$PWD/agent" "$here/../../examples/nanogpt/deploy/go_on.sh" --hosts="$hosts" --least=2 --grace=1 --kill-after=1 \
    mpirun -- "$nanogpt" train "${small[@]}" --out_dir=out >output 2>&1 &
  run=$!
  wait_within 60 begun || fail "kill $kill ($kind): the run did not begin"
  touch start
  sleep "0.$((RANDOM % 90 + 10))"
  victims=$(ranks_of 0; ranks_of 1)
  victim=$(shuf -n 1 --random-source=<(yes "$kill") <<<"$victims")
  case $kind in
    writing) wait_within 10 writes ;;
    mirroring) wait_within 10 mirrors ;;
  esac
  case $kind in
    machine | silent) machines_left=0 ;;
  esac
  newest=$(whole)
  reached=$(sed -n 's/^iter \([0-9]*\):.*/\1/p' output | tail -n 1)
  case $kind in
    machine)
      machine_kill 1
      rm -rf "$(memory 1)/nanogpt"
      ;;
    silent) machine_cut 1 ;;
    *) kill -KILL "$victim" ;;
  esac
  checks=$((checks + 1))
  if wait_within 60 gone_on; then
    at=$(sed -n 's/^resuming from .* at iteration \([0-9]*\)$/\1/p' output | head -n 1)
    if ((at < newest)); then fail "kill $kill ($kind): goes on from iteration $at, though step $newest was whole"; fi
    from_snapshot[$kind]=$((${from_snapshot[$kind]-0} + 1))
    echo "kill $kill ($kind): at iteration ${reached:-0}, step $newest was whole, goes on from $at"
  else
    fail "kill $kill ($kind): step $newest was whole, and the run does not go on"
  fi
  kill -TERM -- "-$run" 2>/dev/null
  for process in $(ranks_of 0; ranks_of 1); do kill -KILL "$process" 2>/dev/null; done
  wait "$run" 2>/dev/null
  if [[ $kind == silent || $kind == machine ]]; then # a new pair of machines
    machines_down
    machines_up 2 || exit 1
  fi
done
for kind in "${kinds[@]}"; do echo "$kind: ${from_snapshot[$kind]-0} went on"; done
((failures == 0)) && echo "$checks checks passed"
exit $((failures > 0))
