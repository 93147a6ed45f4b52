#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt keeps what people have: a used out_dir is not trained over unless told.
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
train() { timeout 120 "$nanogpt" train "$@" >output 2>&1 || fail "train $*: ended with $?"; }
says() { check "does not say '$1'" grep -qF -- "$1" output; }
refuses() { # refuses MESSAGE SETTING...
  ends_in_error "$nanogpt" train "${@:2}"
  says "$1"
}
sums() { (cd "$1" && find . -type f ! -name log.jsonl ! -name .lock -exec cksum {} + | sort -k3); }

# --- a folder that holds a run --------------------------------------------------------------------------------------------
train "${small[@]}" --max_iters=7 --out_dir=old
sums old >before
holds="setting 'out_dir': 'old' holds a run already (2 checkpoints, the newest step-8): --init_from=resume continues it; --overwrite starts a new run there and removes this one; or take another out_dir"
for ranks in 1 2; do
  refuses "$holds" "${small[@]}" --max_iters=7 --out_dir=old --ranks=$ranks
done
refuses "init_from=auto continues it: expected one of the two" "${small[@]}" --out_dir=old --overwrite --init_from=auto
check "a refused run has changed the folder" cmp before <(sums old)
# A new run removes the old one when it saves, and not before.
check "it did not diverge" test "$(timeout 60 "$nanogpt" train "${small[@]}" --max_iters=2 --learning_rate=1e30 --grad_clip=0 --out_dir=old --overwrite >output 2>&1; echo $?)" -eq 1
check "a run that saved nothing has removed the old one" cmp before <(sums old)
train "${small[@]}" --max_iters=2 --out_dir=old --overwrite
check "two runs in one folder: $(ls old)" test "$(echo old/step-* "$(cat old/latest)")" = "old/step-3 step-3"
check "the best of a run that is gone" test ! -e old/best
train "${small[@]}" --eval_only=true --out_dir=old # saves nothing
mkdir weights && mv old/model.safetensors weights
refuses "'weights' holds a run already (model.safetensors): --overwrite starts" "${small[@]}" --out_dir=weights

echo "$checks checks, $failures failures"
((failures == 0))
