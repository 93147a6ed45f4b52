#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A run that is resumed ends in the bytes of one that never stopped: after its end, after SIGUSR1 to one rank, and after
# SIGKILL at random moments of training, three or $FSDP_KILLS of them. What contradicts its checkpoint is refused.
# programs: nanogpt
# timeout: 1200
# skip-sanitizers
#
#   app_resume.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
export OMPI_MCA_odls_base_sigkill_timeout=0 # mpirun does not wait for ranks that were killed
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --dropout=0.2 --eval_interval=5 --eval_iters=2 --warmup_iters=3 --lr_decay_iters=40 --log_interval=1 --threads=1)
train() { patiently 300 "$nanogpt" train "${small[@]}" "$@" >output 2>&1; }
# same A B: their last weights, their losses of equal iterations
same() { check "$1 and $2 have other weights" cmp "$1/model.safetensors" "$2/model.safetensors"; }
losses() { grep -ohE '^(iter|step) [0-9]+: (train )?loss [0-9.]+(, val loss [0-9.]+)?' "$@" | sort -V -u; }

# Stopped by max_iters, between checkpoints: from one that was written in the background, and from one that was not; with
# other threads too.
train --ranks=2 --max_iters=20 --out_dir=whole || fail "whole"
losses output >whole.losses
train --ranks=2 --threads=3 --max_iters=7 --checkpoint_interval=3 --async_checkpoint=true --out_dir=parts || fail "first part"
cp output part1
train --ranks=2 --max_iters=12 --async_checkpoint=false --out_dir=parts --init_from=resume || fail "second part"
check "did not resume at 8" grep -q "^resuming from parts/step-8 at iteration 8$" output
cp output part2
train --ranks=2 --max_iters=20 --out_dir=parts --init_from=resume || fail "third part"
check "did not resume at 13" grep -q "^resuming from parts/step-13 at iteration 13$" output
same whole parts
check "the losses differ" diff whole.losses <(losses part1 part2 output)
# Gradients that are summed in bf16 leave nothing behind that a checkpoint lacks.
narrow=(--ranks=2 --reduce_dtype=bfloat16)
train "${narrow[@]}" --max_iters=20 --out_dir=narrow || fail "narrow"
train "${narrow[@]}" --max_iters=7 --out_dir=narrow_parts || fail "first narrow part"
train "${narrow[@]}" --max_iters=20 --out_dir=narrow_parts --init_from=resume || fail "second narrow part"
same narrow narrow_parts
check "bf16 sums change nothing" test "$(cmp -s whole/model.safetensors narrow/model.safetensors; echo $?)" -eq 1
for pointer in latest best; do
  check "$pointer names no checkpoint" test -e "parts/$(cat parts/$pointer)/checkpoint.json"
done
# Another policy and another world go on too.
cp -r parts other
train --ranks=4 --strategy=no_shard --max_iters=22 --out_dir=other --init_from=resume || fail "another world"
grep -q "at iteration 21$" output || fail "another world began elsewhere"

# Runs that cannot be resumed.
ends_in_error "$nanogpt" train "${small[@]}" --out_dir=nothing --init_from=resume
grep -q "there is no checkpoint in 'nothing' to resume from" output || fail "resumed from nothing"
ends_in_error "$nanogpt" train "${small[@]}" --out_dir=parts --init_from=resume --n_layer=3
grep -q "setting 'n_layer': 3 contradicts the model of the checkpoint 'parts/step-21', which has 2" output ||
  fail "took another model"
train --ranks=1 --max_iters=2 --out_dir=fresh --init_from=auto || fail "auto from scratch"
# Checkpoints that nothing names: of several resume chooses none, and both go on from the only one, which a kill may leave.
cp -a parts unnamed && rm unnamed/latest
last=$(cat parts/latest)
ends_in_error "$nanogpt" train "${small[@]}" --ranks=2 --out_dir=unnamed --init_from=resume
check "resumes without latest" grep -q "'unnamed/latest', which names the checkpoint to resume from, is missing. Whole checkpoints in 'unnamed': $last, step-" output
cp -a unnamed newest
train --ranks=2 --max_iters=22 --out_dir=newest --init_from=auto || fail "the newest checkpoint"
check "did not go on from the newest checkpoint" grep -q "^resuming from newest/$last at iteration 21$" output
for checkpoint in unnamed/step-*; do
  if [[ $checkpoint != "unnamed/$last" ]]; then rm -r "$checkpoint"; fi
done
train --ranks=2 --max_iters=22 --out_dir=unnamed --init_from=auto || fail "the only checkpoint"
check "did not go on from the only checkpoint" grep -q "^resuming from unnamed/$last at iteration 21$" output

# Other tokens, as many: the run and its samples stay what they were, until the other one has saved something.
tr 'a-z' 'b-za' <text >rotated
"$nanogpt" prepare --dataset=e --data=rotated >output 2>&1 || fail "prepare"
for i in $(seq 300); do echo "THE QUICK BROWN FOX $i!"; done >capitals
"$nanogpt" prepare --dataset=f --data=capitals >output 2>&1 || fail "prepare"
sampled() { "$nanogpt" sample --out_dir="$1" --checkpoint=latest --num_samples=1 --max_new_tokens=20 --start=the 2>&1; }
sampled fresh >before
ends_in_error "$nanogpt" train "${small[@]}" --dataset=e --out_dir=fresh --init_from=resume
grep -q "'e' has another vocabulary than the data with which the run in 'fresh/step-3' was trained" output || fail "took other tokens"
for other in e f; do
  train --dataset=$other --ranks=1 --max_iters=2 --learning_rate=1e30 --grad_clip=0 --out_dir=fresh --overwrite && fail "did not diverge"
  check "a run that saved nothing has changed the folder's tokens" cmp before <(sampled fresh)
done
train --ranks=1 --max_iters=2 --learning_rate=1e30 --grad_clip=0 --eval_interval=1 --out_dir=diverged && fail "did not diverge"
check "does not say what the evaluation gives" \
  grep -qE "iteration [12]: the evaluation gives a training loss of nan and a validation loss of nan, and (the weights that train are finite|[a-z_]* of '.*' are not finite after step [01]); training stops$" output

# Weights that the last step has broken, whose loss nobody has seen.
train --ranks=2 --max_iters=1 --warmup_iters=0 --lr_decay_iters=1 --learning_rate=1e-3 --min_lr=3e38 --weight_decay=100 --out_dir=broken &&
  fail "the last step has broken the weights: it ended well"
check "does not say what the last step has done" \
  grep -qE "rank [01]: iteration 1: the step left an infinity or NaN in parameters of '.*'; this state was not saved, and training stops$" output
check "saved what the last step has broken" test ! -e broken/latest -a ! -e broken/model.safetensors
# Weights for which a gradient overflows, although the loss is finite: every step is skipped.
"$nanogpt" export --out_dir=whole --to=steep --format=nanogpt >output 2>&1 || fail "export"
header=$(od -An -tu8 -N8 steep/model.safetensors | tr -d ' ')
fill() { # fill TENSOR COUNT BYTES: all its elements become this number
  local at
  at=$(tail -c +9 steep/model.safetensors | head -c "$header" | grep -o "\"[a-z.]*$1\":{[^}]*\"data_offsets\":\[[0-9]*" | sed 's/.*\[//')
  for _ in $(seq "$2"); do printf "$3"; done | dd of=steep/model.safetensors bs=64 oflag=seek_bytes seek=$((8 + header + at)) conv=notrunc 2>/dev/null
}
fill h.0.ln_2.weight 16 '\371\002\025\120' # 1e10
fill h.0.mlp.c_fc.weight 1024 '\010\345\074\036' # 1e-20
fill ln_f.weight 16 '\302\275\360\174' # 1e37
skips() { # skips STEPS SETTING...: training ends after so many steps
  rm -rf skipped
  train --ranks=2 --init_from=steep --out_dir=skipped --eval_interval=100 "${@:2}"
  check "skipped steps: ended with $?" test $? -eq 1
  check "$1 skipped steps: says other things" \
    grep -qE "rank [01]: iteration $(($1 - 1)): the gradient norm was not finite in $1 iterations in a row, whose steps were skipped; training stops\. " output
  check "skipped steps in the log" test "$(grep -c '"kind":"skipped"' skipped/log.jsonl)" = "$1"
  check "the log does not say why it ended" grep -q '"kind":"stop","iter":'"$1"',"why":".*the gradient norm was not finite' skipped/log.jsonl
  check "saved a run that trains nothing" test ! -e skipped/latest -a ! -e skipped/model.safetensors
}
skips 10 --max_iters=30
skips 4 --max_iters=30 --max_skipped_steps=4
skips 3 --max_iters=2 # all of them
sed -i 's/"q"/"Q"/' fresh/meta.json
check "sampled with other tokens" grep -q "has another vocabulary than the model in 'fresh/step-3' was trained with" <(sampled fresh)

# An evaluation changes nothing, and needs nothing to be left to train.
(cd whole && find . -type f ! -name log.jsonl -exec cksum {} + | sort) >before
train --ranks=2 --max_iters=20 --out_dir=whole --init_from=resume --eval_only=true || fail "eval_only"
check "did not evaluate" grep -q '^step 21: train loss [0-9.]*, val loss [0-9.]*$' output
check "evaluating has written files" cmp before <(cd whole && find . -type f ! -name log.jsonl -exec cksum {} + | sort)

# One run at a time, and no export over one.
"$nanogpt" train "${small[@]}" --max_iters=1000000 --out_dir=busy >busy.output 2>&1 &
first=$!
wait_for test -e busy/log.jsonl
ends_in_error "$nanogpt" train "${small[@]}" --out_dir=busy --ranks=2
grep -q "'busy/.train.lock' is locked: another run is training in the folder" output || fail "two runs in one folder"
# A start that goes on with the run waits for it: the run may have just been lost.
"$nanogpt" train "${small[@]}" --max_iters=1 --out_dir=busy --init_from=auto --ranks=2 >waits.output 2>&1 &
second=$!
wait_for grep -q "is locked" waits.output
kill "$first"
wait "$first"
check "does not go on when the run has ended" wait "$second"
check "does not say that it waits" grep -qE "^'busy/.train.lock' is locked: another run is training in the folder.*; waiting for up to [0-9]+ s$" waits.output
ends_in_error "$nanogpt" export --out_dir=whole --to=fresh
grep -q "'fresh' is the out_dir of a run" output || fail "exported over a run"
check "wrote to a full device" test "$("$nanogpt" prepare --dataset=g --data=text 2>&1 >/dev/full; echo $?)" = "nanogpt: error: standard output cannot be written
1"

mpi=()
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  mpi=(mpirun --oversubscribe --bind-to none -n 2)
else
  small+=(--ranks=2)
fi
# begin DIR FLAG...: starts a run; $run is mpirun, or the run itself
begin() {
  start "${mpi[@]}" "$nanogpt" train "${small[@]}" --out_dir="$1" "${@:2}"
}
ranks() { if ((${#mpi[@]})); then pgrep -P "$run" -x nanogpt; else echo "$run"; fi; }
# One rank is asked to stop.
begin asked --max_iters=1000000
wait_for grep -q '^iter 6:' output
kill -USR1 "$(ranks | tail -n 1)"
wait "$run"
check "asked to stop, it ended with $?" test $? -eq 85
stopped=$(sed -n 's/^asked to stop: saved in asked before iteration \([0-9]*\); .*/\1/p' output)
check "did not say where it stopped" test -n "$stopped"
train --ranks=2 --init_from=resume --max_iters=$((stopped + 4)) --out_dir=asked || fail "did not go on after SIGUSR1"
train --ranks=2 --max_iters=$((stopped + 4)) --out_dir=unasked || fail "unasked"
same asked unasked

# Killed at random moments of training, saving all the time.
RANDOM=${FSDP_SEED:-7}
for kill in $(seq "${FSDP_KILLS:-3}"); do
  begin killed --init_from=auto --checkpoint_interval=1 --keep_last=1 --max_iters=1000000
  wait_for grep -q '^iter ' output || fail "kill $kill: could not go on"
  sleep "0.$((RANDOM % 400 + 100))"
  kill -KILL "$(ranks | shuf -n 1 --random-source=<(yes "$kill"))"
  end_run "$run"
  if grep -q 'error:' output; then fail "kill $kill: could not go on"; fi
done
last=$(($(sed 's/^step-\([0-9]*\).*/\1/' killed/latest) + 3))
train --ranks=2 --init_from=auto --max_iters=$last --out_dir=killed || fail "did not go on after $kill kills"
check "did not resume" grep '^resuming' output
train --ranks=2 --max_iters=$last --out_dir=unkilled || fail "unkilled"
same killed unkilled
((failures == 0)) && echo "$checks checks passed"
exit $((failures > 0))
