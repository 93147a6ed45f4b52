#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt keeps what people have: a used out_dir is not trained over unless told; Ctrl-C and SIGTERM save.
# programs: nanogpt
# timeout: 300
# skip-sanitizers
#
#   app_keep.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
export OPENBLAS_NUM_THREADS=1
shape=(--n_layer=2 --n_head=2 --n_embd=16 --block_size=8)
small=(--dataset=d "${shape[@]}" --batch_size=2 --gradient_accumulation_steps=4 --eval_interval=5 --eval_iters=2 --log_interval=1)
train() { patiently 120 "$nanogpt" train "$@" >output 2>&1 || fail "train $*: ended with $?"; }
says() { check "does not say '$1'" grep -qF -- "$1" output; }
refuses() { # refuses MESSAGE SETTING...
  ends_in_error "$nanogpt" train "${@:2}"
  says "$1"
}
all_sums() { (cd "$1" && find . -type f -exec cksum {} + | sort -k3); }
sums() { (cd "$1" && find . -type f ! -name log.jsonl ! -name .lock -exec cksum {} + | sort -k3); }

# --- a folder that holds a run --------------------------------------------------------------------------------------------
train "${small[@]}" --max_iters=7 --out_dir=old
sums old >before
holds="setting 'out_dir': 'old' holds a run already (2 checkpoints, the newest step-8): --init_from=resume continues it; --overwrite starts a new run there, which replaces the old one; or choose another out_dir"
for ranks in 1 2; do
  refuses "$holds" "${small[@]}" --max_iters=7 --out_dir=old --ranks=$ranks
done
refuses "init_from=auto continues the old run: expected only one of the two" "${small[@]}" --out_dir=old --overwrite --init_from=auto
check "a refused run has changed the folder" cmp before <(sums old)
# Nor does a checkpoint of another run replace it.
train "${small[@]}" --max_iters=1 --out_dir=another --init_from=auto
says "note: 'another' has no checkpoint: training starts from scratch"
refuses "'old' holds a run already (2 checkpoints, the newest step-8), and 'another/step-2' is a checkpoint of another one; choose another out_dir" \
  --init_from=resume --checkpoint=another/step-2 --out_dir=old --max_iters=9
check "a refused run has changed the folder" cmp before <(sums old)
train --init_from=resume --checkpoint=another/step-2/ --out_dir=another --max_iters=3
train --init_from=resume --checkpoint=another/step-4 --out_dir=elsewhere --max_iters=5
says "resuming from another/step-4 at iteration 4"
# A new run replaces the old one when it has saved, and not before.
check "it did not diverge" test "$(patiently 60 "$nanogpt" train "${small[@]}" --max_iters=2 --learning_rate=1e30 --grad_clip=0 --out_dir=old --overwrite >output 2>&1; echo $?)" -eq 1
check "a run that saved nothing has removed the old one" cmp before <(sums old)
cp -r old continued
train --init_from=resume --max_iters=8 --out_dir=continued
says "note: the last start in 'continued' began a new run and saved no checkpoint; this one continues the run before it, in 'continued/step-8'"
"$nanogpt" report continued --csv=rows.csv >output 2>&1 || fail "report"
second=$(grep -n '"kind":"run"' continued/log.jsonl | sed -n '2s/:.*//p')
mkdir alone && head -n $((second - 1)) continued/log.jsonl >alone/log.jsonl
"$nanogpt" report alone --csv=alone.csv >output 2>&1 || fail "report of the first run alone"
check "the report mixes two runs" diff <(cut -d , -f 2-5 alone.csv) <(cut -d , -f 2-5 rows.csv | head -n "$(wc -l <alone.csv)")
check "not all iterations: $(wc -l <alone.csv)" test "$(wc -l <rows.csv)" -gt "$(wc -l <alone.csv)" -a "$(wc -l <alone.csv)" -gt 8
train "${small[@]}" --max_iters=2 --out_dir=old --overwrite
check "two runs in one folder: $(ls old)" test "$(echo old/step-* "$(cat old/latest)")" = "old/step-3 step-3"
check "the best of a run that is gone" test ! -e old/best
check "something of the old run is left" test ! -e old/replaced-run -a -z "$(find old -name '.replaced*')"
rm old/.train.lock
all_sums old >before
train "${small[@]}" --eval_only=true --out_dir=old
check "an evaluation has changed the folder" cmp before <(all_sums old)
train "${small[@]}" --eval_only=true --out_dir=never
check "an evaluation has made a folder" test ! -e never
mkdir weights && mv old/model.safetensors old/config.json weights
refuses "'weights' holds a run already (model.safetensors): --overwrite starts" "${small[@]}" --out_dir=weights

# --- signals ----------------------------------------------------------------------------------------------------------------
long=("${small[@]}" --max_iters=1000000 --eval_interval=1000000 --log_interval=1)
begin() { # begin REGEX COMMAND...: starts it, as $run, and waits for a line
  rm -rf out
  start "${@:2}"
  wait_for grep -qE "$1" output || fail "no line '$1': ${*:2}"
}
ended() { # ended CODE: the run does so by itself
  wait "$run"
  local code=$?
  check "ended with $code, not $1" test "$code" -eq "$1"
}
saved() { # saved: and a run goes on from there
  local stopped=0
  check "saved nothing" test -e out/latest || return
  stopped=$(sed 's/^step-//' out/latest)
  train "${small[@]}" --max_iters="$stopped" --eval_interval=1000000 --out_dir=out --init_from=resume
  says "resuming from out/step-$stopped at iteration $stopped"
}
for ranks in 1 2; do
  for signal in INT TERM; do
    begin '^iter 3:' env "$nanogpt" train "${long[@]}" --out_dir=out --ranks=$ranks
    kill -$signal "$run"
    ended 85
    check "does not say what follows" grep -qE "^nanogpt: SIG$signal at iteration [0-9]+: saving after this step, then stopping; a second signal stops at once$" output
    says "asked to stop: saved in out before iteration $(sed 's/^step-//' out/latest); continue with --init_from=resume"
  done
  saved # the checkpoint is that of any other end, whichever signal asked for it
done
# Before the first step, where the start waits for somebody who reads its log.
mkfifo unread
for ranks in 1 2; do
  rm -rf out
  start "$nanogpt" train "${long[@]}" --out_dir=out --ranks=$ranks --log_json=unread
  wait_for test -e out/.train.lock
  kill -TERM "$run"
  ended 143
  check "says other things" test "$(cat output)" = "nanogpt: SIGTERM: stopping before the first step; nothing was saved"
done
# In an evaluation, which would last for hours; the run goes on to the bytes of one that never stopped.
train "${small[@]}" --max_iters=21 --eval_interval=20 --out_dir=whole
train "${small[@]}" --max_iters=10 --eval_interval=20 --out_dir=part
begin '^resuming from' env "$nanogpt" train "${small[@]}" --max_iters=21 --eval_interval=20 --eval_iters=100000000 --init_from=resume --out_dir=part
wait_for grep -q '"iter":19' part/log.jsonl
kill -TERM "$run"
ended 85
says "asked to stop: saved in part before iteration 20"
train "${small[@]}" --max_iters=21 --eval_interval=20 --out_dir=part --init_from=resume
check "other weights than those of a run that never stopped" cmp whole/model.safetensors part/model.safetensors
# Two signals before the first is minded: ends at once, and saves nothing.
begin '^iter 3:' env "$nanogpt" train "${long[@]}" --out_dir=out
kill -STOP "$run"
kill -INT "$run"
kill -TERM "$run"
kill -CONT "$run"
ended 143
check "saved after the second signal" test ! -e out/latest
# mpirun sends SIGTERM a while after it was asked to end, and SIGKILL as much later. Meanwhile it reads
# nothing of what ranks print, and they would wait for it after some lines.
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  begin '^iter 3:' mpirun --mca odls_base_sigkill_timeout 3 --oversubscribe --bind-to none -n 2 "$nanogpt" train "${long[@]}" --out_dir=out
  kill -TERM "$run"
  ended 1
  check "mpirun speaks of an abort" test "$(grep -ciE 'abort|mpirun (detected|noticed)|exit code' output)" -eq 0
  says "nanogpt: asked to stop: saved in out before iteration"
  check "each rank says where it is, and nothing else" test "$(grep -c '^nanogpt: SIGTERM' output)" = \
    "$(grep -cE '^nanogpt: SIGTERM at iteration [0-9]+: saving after this step, then stopping \(mpirun allows about 1 s\)$' output)"
  saved
fi

echo "$checks checks, $failures failures"
((failures == 0))
