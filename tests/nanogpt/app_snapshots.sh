#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run with snapshots that is killed goes on from the newest one: the losses and weights are those of a run that never
# stopped, after the loss of any node too, and on fewer ranks. Folders stand for the memory of nodes. Without a whole
# snapshot it goes on from its checkpoint. Snapshots of another run, build or model are skipped.
# programs: nanogpt
# timeout: 600
# skip-sanitizers
#
#   app_snapshots.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
. "$(dirname "${BASH_SOURCE[0]}")/../support/mpirun.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
if ! command -v mpirun >/dev/null || [[ $(ldd "$nanogpt") != *libmpi* ]]; then
  echo "skipped: pretended nodes need mpirun"
  exit 77
fi
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --dropout=0.2 --eval_interval=1000000 --eval_iters=2 --warmup_iters=3 --lr_decay_iters=40 --log_interval=1 --threads=1)
memory=$folder/memory # nodes: memory.a, memory.b
kept=(--snapshot_interval=3 --snapshot_folder="$memory")
export OMPI_MCA_odls_base_sigkill_timeout=0 # mpirun does not wait for ranks that were killed
# on NODES COMMAND...: a rank for each letter of NODES, on the node of that name; one rank needs no mpirun
on() {
  local nodes=$1 i places=()
  shift
  if ((${#nodes} == 1)); then
    patiently 120 env "FSDP_SNAPSHOT_NODE=$nodes" "$@" >output 2>&1
    return
  fi
  for ((i = 0; i < ${#nodes}; ++i)); do
    if ((i > 0)); then places+=(:); fi
    places+=(-n 1 env "FSDP_SNAPSHOT_NODE=${nodes:i:1}" "$@")
  done
  patiently 120 mpirun "${places[@]}" >output 2>&1
}
losses() { grep -ohE '^(iter|step) [0-9]+: (train )?loss [0-9.]+(, val loss [0-9.]+)?' "$@" | sort -V -u; }
# steps of whole or begun snapshots on a node, the newest last
steps_on() { find "$memory.$1"/run-*/ -mindepth 1 -maxdepth 1 2>/dev/null | sed 's/.*step-\([0-9]*\)\..*/\1/' | sort -n; }
# whole_on NODE...: the newest step of which these nodes hold the slices of all three ranks; 0 if there is none
whole_on() {
  local node folders=()
  for node in "$@"; do folders+=("$memory.$node"); done
  find "${folders[@]}" -name 'rank-*.safetensors.snapshot.json' 2>/dev/null |
    sed -nE 's|.*/step-([0-9]+)\.[^/]*/rank-([0-9]+)-.*|\1 \2|p' | sort -u |
    awk '{ if (++held[$1] == 3 && $1 + 0 > newest) newest = $1 + 0 } END { print newest + 0 }'
}
restore() { # the folders as the killed run has left them
  rm -rf out "$memory".*
  cp -a saved/. .
}
# goes_on NODES WHAT SETTING...: the run is resumed in `out`, with snapshots
goes_on() { on "$1" "$nanogpt" train "${small[@]}" "${kept[@]}" --init_from=resume --out_dir=out --max_iters=1 "${@:3}" || fail "$2"; }
resumed_at() { sed -n 's/^resuming from .* at iteration \([0-9]*\)$/\1/p' output; }

# A run of 3 ranks on two nodes with a checkpoint of iteration 10, all of which are killed later.
patiently 120 "$nanogpt" train "${small[@]}" --ranks=3 --max_iters=9 --out_dir=out >output 2>&1 || fail "the beginning"
begun=(env FSDP_SNAPSHOT_NODE=a "$nanogpt" train "${small[@]}" "${kept[@]}" --init_from=resume --max_iters=1000000 --out_dir=out)
start mpirun -n 2 "${begun[@]}" : -n 1 "${begun[@]/NODE=a/NODE=b}"
for _ in $(seq 1200); do # each node alone suffices, and is newer than the checkpoint
  if (($(whole_on a) > 10 && $(whole_on b) > 10)); then break; fi
  sleep 0.05
done
victims=$(pgrep -P "$run" -x nanogpt)
check "there are 3 ranks" test "$(wc -w <<<"$victims")" -eq 3
for victim in $victims; do kill -KILL "$victim"; done
end_run "$run"
at=$(whole_on a b) at_a=$(whole_on a) at_b=$(whole_on b)
check "a whole snapshot on each node: $at_a, $at_b, on both: $at" test "$at_a" -gt 10 -a "$at_b" -gt 10 -a "$at" -ge "$at_a" -a "$at" -ge "$at_b"
check "keeps two snapshots, and the one under way" test "$(steps_on a | wc -l)" -le 3 -a "$(steps_on a | wc -l)" -ge 1
mkdir saved && cp -a out "$memory".* saved/

# It goes on with the bits of a run that never stopped; a node that is lost comes back empty. What was not mirrored yet is
# lost with it, and the snapshot before is taken.
end=$((at + 6))
patiently 120 "$nanogpt" train "${small[@]}" --ranks=3 --max_iters="$end" --out_dir=whole >output 2>&1 || fail "whole"
losses output >whole.losses
for lost in none a b; do
  restore
  rm -rf "$memory.$lost"
  case $lost in a) expected=$at_b ;; b) expected=$at_a ;; *) expected=$at ;; esac
  goes_on aab "without $lost" --max_iters="$end"
  check "without $lost: resumed at $(resumed_at), expected $expected" test "$(resumed_at)" = "$expected"
  check "without $lost: does not say that it loaded the snapshot" grep -q "^note: the snapshot of step $expected is loaded: 'out' has a checkpoint of iteration [0-9]*$" output
  check "without $lost: other weights" cmp whole/model.safetensors out/model.safetensors
  check "without $lost: other losses" diff <(losses output) <(losses output whole.losses | grep -E "$(losses output | sed 's/:.*/:/;s/^/^/' | paste -sd'|')")
  check "a normal end removes snapshots" test -z "$(steps_on a)$(steps_on b)"
done
# On fewer ranks. checkpoint_snapshots has every number of them.
for left in bb b; do
  restore
  rm -rf "$memory.a"
  goes_on $left "on $left" --max_iters=$((at_b + 2)) --gradient_accumulation_steps=6 --strategy=no_shard
  check "on $left: resumed at $(resumed_at), expected $at_b" test "$(resumed_at)" = "$at_b"
  if [[ $left == bb ]]; then
    check "does not say that nothing is mirrored" test "$(grep -c '^note: all ranks share one node' output)" = 1
  fi
done

# A node is lost with its mirror: from the checkpoint, which is said. So is what is cut, altered or another build's. One rank
# finds all of that.
from_disk() { # from_disk WHAT TEXT
  goes_on b "$1"
  check "$1: not from disk" grep -q "^resuming from out/$disk " output
  check "$1: does not say why" grep -q "$2" output
}
restore
disk=$(cat out/latest)
rm -rf "$memory".a "$memory".b
from_disk "both nodes lost" "^note: no snapshot is loaded: no node has one$"
restore
find "$memory".* -name 'rank-00001*.safetensors' -exec truncate -s -1 {} \;
from_disk "cut" "rank-00001-of-00003.safetensors.snapshot.json' is skipped: .* bytes; expected"
check "cut: the step is not named" grep -q "the snapshot of step $at_b is skipped: no node holds the slices of rank 1$" output
restore
cp "$nanogpt" other && echo >>other
nanogpt=$PWD/other from_disk "another build" "is skipped: another build took it"
restore
sed -i 's/"start": "[^"]*"/"start": "x"/;s/"run": "[^"]*"/"run": "x"/' "out/$disk/checkpoint.json" # its checksum is wrong now
goes_on b "checkpoint damaged"
check "a damaged checkpoint hides the snapshot" test "$(resumed_at)" = "$at_b"
# The folder's name is damaged: its snapshots are loaded all the same. Without any the run begins from its checkpoint.
restore
truncate -s 3 "$memory".{a,b}/node
goes_on ab "a damaged name"
check "a damaged name hides the snapshot" test "$(resumed_at)" = "$at"
for node in a b; do
  check "a damaged name of $node is not named" grep -q "has no name: '$memory.$node/node' is damaged: .*; remove it, and the next start writes another one$" output
done
check "a damaged name is told twice" test "$(grep -c 'has no name' output)" = 2
restore
rm -rf "$memory".{a,b}/run-*
from_disk "empty folders" "^note: no snapshot is loaded: no node has one$"
truncate -s 3 "$memory".{a,b}/node
from_disk "a damaged name of empty folders" "^note: no snapshot is loaded: no node has a whole one$"
# A new run takes nothing of the old one.
restore
on ab "$nanogpt" train "${small[@]}" "${kept[@]}" --overwrite --out_dir=out --max_iters=4 --checkpoint_interval=100 || fail "a new run"
check "a new run has left the old one's snapshots" test -z "$(steps_on a)$(steps_on b)"
# A checkpoint that is named is taken, and the snapshots after it belong to nobody.
restore
goes_on ab "a named checkpoint" --checkpoint=latest
check "a named checkpoint is not taken" grep -q "^resuming from out/$disk " output
check "snapshots after a named checkpoint are left" test -z "$(steps_on a)$(steps_on b)"
# A checkpoint that is newer than the snapshot is taken; so is one of a run that has replaced the snapshots' run.
restore
goes_on b "a newer checkpoint" --snapshot_interval=1000000 --snapshot_folder="$folder/elsewhere" --max_iters=$((at + 5))
goes_on b "a newer checkpoint"
check "a newer checkpoint is not taken" grep -q "^resuming from out/step-$((at + 6)) " output
check "does not say that the checkpoint is newer" grep -q "^note: no snapshot is loaded: the snapshot of step $at_b is not newer than 'out/step-$((at + 6))'$" output
# A folder that only the checkpoint names is not used: anybody may have written the checkpoint.
rm -rf "$folder/elsewhere.b"
on b "$nanogpt" train "${small[@]}" --init_from=resume --out_dir=out --max_iters=1 || fail "a checkpoint that names a folder"
check "uses a folder that the checkpoint names" test ! -e "$folder/elsewhere.b"
check "does not say which settings to give" grep -qF "note: the run kept snapshots in '$folder/elsewhere'; this start neither looks for them nor takes any: give --snapshot_folder=$folder/elsewhere --snapshot_interval=1000000 for that" output
restore
on b "$nanogpt" train "${small[@]}" --overwrite --out_dir=out --max_iters=4 || fail "a run that replaces another one"
goes_on b "a run that has replaced another one"
check "a run that has replaced another one takes its snapshot" grep -q '^resuming from out/step-5 ' output
check "does not name the other run's snapshot" grep -q "the snapshot of step $at_b belongs to another run in 'out'" output
# While a run has not replaced the old one, it takes no snapshots.
restore
on ab "$nanogpt" train "${small[@]}" "${kept[@]}" --snapshot_interval=1 --overwrite --learning_rate=1e30 --grad_clip=0 --out_dir=out --max_iters=40 &&
  fail "did not diverge"
check "a run without a checkpoint that replaces another one has snapshots" test -z "$(steps_on a)$(steps_on b)"

# Snapshots that cannot be kept are refused at the start.
ends_in_error "$nanogpt" train "${small[@]}" --snapshot_interval=3 --out_dir=refused
check "no folder" grep -q "setting 'snapshot_folder': snapshots need a folder in each node's memory" output
mkdir -m 755 open
ends_in_error "$nanogpt" train "${small[@]}" --snapshot_interval=3 --snapshot_folder=open --out_dir=refused
check "a folder for all" grep -q "setting 'snapshot_folder': .*other users may enter 'open'" output
((failures == 0)) && echo "$checks checks passed"
exit $((failures > 0))
