#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt trains adapters, or the last blocks alone, from weights: to the same losses under every strategy, and as if it had not
# stopped when it is resumed. The weights that it writes have the adapters merged; adapters are a small file of their own.
# programs: nanogpt
# skip-sanitizers
#
#   app_finetune.sh BINARY_DIR
set -uo pipefail

support=$(cd "$(dirname "${BASH_SOURCE[0]}")/../support" && pwd)
. "$support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
model=(--dataset=d --n_layer=3 --n_head=2 --n_embd=32 --block_size=8 --batch_size=2 --gradient_accumulation_steps=4
  --threads=1)
small=("${model[@]}" --ranks=2 --max_iters=8 --eval_interval=4 --eval_iters=1 --learning_rate=1e-2 --warmup_iters=1)
patiently 120 "$nanogpt" train "${small[@]}" --out_dir=base --max_iters=40 >output 2>&1 || fail "train: $(cat output)"
from=("${small[@]}" --init_from=base)

# finetune RUN SETTING...: a line for each loss
finetune() {
  local run=$1
  shift
  patiently 120 "$nanogpt" train "${from[@]}" --out_dir="$run" "$@" >output 2>&1 || { fail "$*: $(cat output)"; return; }
  grep -oE '^(iter|step) [0-9]+.*loss [0-9.]+' output | sed 's/,* time.*//' >"$run.losses"
  check "$*: no losses" test -s "$run.losses"
}
lora=(--lora_rank=4 --lora_alpha=8)
finetune lora "${lora[@]}"
check "says how much trains" grep -q '^fine-tuning: 6,144 of ' output
# its_losses RUN SETTING...: with these settings too
its_losses() {
  finetune other --overwrite "${@:2}"
  check "${*:2}: other losses" diff "$1.losses" other.losses
}
its_losses lora "${lora[@]}" --strategy=shard_grad_op --offload=moments
its_losses lora "${lora[@]}" --strategy=no_shard --activation_checkpointing=true --prefetch=0 --offload=gradients
its_losses lora "${lora[@]}" --activation_checkpointing=true --recompute_segment=2 --offload=moments,gradients
its_losses lora "${lora[@]}" --wrap=model

# --- what is written ---------------------------------------------------------------------------------------------------------------
few=(--num_samples=1 --max_new_tokens=30 --temperature=0)
text() { patiently 60 "$nanogpt" sample "${few[@]}" "$@" 2>errors || fail "sample $*: $(cat errors)"; }
text --out_dir=lora >merged
check "the merged weights give the checkpoint's text" cmp merged <(text --out_dir=lora --checkpoint=latest)
check "the adapters change the text" test "$(cmp -s merged <(text --out_dir=base); echo $?)" -eq 1
check "adapters alone are a small file" test $((4 * $(stat -c %s lora/adapters.safetensors))) -lt "$(stat -c %s lora/model.safetensors)"
check "the whole weights have no adapters" test "$(grep -ac lora_A lora/model.safetensors)" -eq 0
check "the adapters' file has nothing else" test "$(grep -ac wte.weight lora/adapters.safetensors)" -eq 0
patiently 60 "$nanogpt" export --out_dir=lora --to=exported --format=nanogpt >output 2>&1 || fail "export: $(cat output)"
check "exports the merged weights" cmp merged <(text --out_dir=exported)

# --- resuming ------------------------------------------------------------------------------------------------------------------------
finetune halves "${lora[@]}" --max_iters=4
patiently 120 "$nanogpt" train "${small[@]}" --out_dir=halves --init_from=resume --ranks=4 >output 2>&1 || fail "resume: $(cat output)"
check "the run that is resumed takes its adapters" grep -q '^fine-tuning: 6,144 of ' output
check "another model after resuming" cmp <(text --out_dir=halves) merged

# --- the last blocks alone -------------------------------------------------------------------------------------------------------
finetune last --freeze_layers=2
check "says how much trains" grep -q '^fine-tuning: 12,3' output
finetune last_two --freeze_layers=1
its_losses last_two --freeze_layers=-2 --strategy=no_shard --activation_checkpointing=true --recompute_segment=2
check "no adapters" test ! -e last/adapters.safetensors

# A whole checkpoint that these settings cannot continue is no damaged one: nothing is lost.
saved=$(ls last)
for other in --freeze_layers=0 --freeze_layers=1; do
  if patiently 60 "$nanogpt" train "${small[@]}" --out_dir=last --init_from=auto --max_iters=20 $other >output 2>&1; then
    fail "$other: continues an older checkpoint"
  fi
  check "$other: $(cat output)" grep -qF -- "This start has $other instead of 2; leave that out to continue the run" output
done
check "nothing was removed" test "$saved" = "$(ls last)"

# --- former names -----------------------------------------------------------------------------------------------------------------
finetune former "${lora[@]/lora_rank/lora_r}" --gradient_checkpointing
check "former names: other losses" diff lora.losses former.losses
for note in "'lora_r' is now called 'lora_rank'" "'gradient_checkpointing' is now called 'activation_checkpointing'"; do
  check "does not say once: $note" test "$(grep -cFx "note: $note" output)" = 1
done
echo 'train_layers = 2' >names
patiently 120 "$nanogpt" train names "${from[@]}" --out_dir=former --overwrite >output 2>&1 || fail "train_layers: $(cat output)"
check "does not say once what train_layers is" test "$(grep -cFx "note: 'train_layers' is now called 'freeze_layers'; train_layers=N is freeze_layers=-N, all layers but the last N" output)" = 1
check "train_layers: other losses" diff last_two.losses <(grep -oE '^(iter|step) [0-9]+.*loss [0-9.]+' output | sed 's/,* time.*//')
# Checkpoints of older versions have these names.
older=(halves:lora_rank:4:lora_r:4 former:freeze_layers:-2:train_layers:2)
command -v python3 >/dev/null || older=()
for run in "${older[@]}"; do
  IFS=: read -r run name value old before <<<"$run"
  cp -r $run older
  check "$run: a checkpoint with $old" python3 "$support/edit_checkpoint.py" older "\"$name\": \"$value\"" "\"$old\": \"$before\""
  check "$run: the checkpoint's text" cmp <(text --out_dir=$run --checkpoint=latest) <(text --out_dir=older --checkpoint=latest)
  patiently 120 "$nanogpt" train "${small[@]}" --out_dir=older --init_from=resume --max_iters=12 >output 2>&1 || fail "resume with $old: $(cat output)"
  check "$run: a setting of the run is lost" grep -q "^settings of the run: .*$name $value" output
  rm -r older
done

# --- refused -----------------------------------------------------------------------------------------------------------------------
refused() { # refused TEXT SETTING...
  local expected=$1
  shift
  if patiently 60 "$nanogpt" train "${small[@]}" --out_dir=refused "$@" >output 2>&1; then fail "$*: not refused"; fi
  check "$*: $(cat output)" grep -qF -- "$expected" output
}
refused "setting 'lora_rank': fine-tuning starts from weights" --lora_rank=4
refused "setting 'freeze_layers': fine-tuning starts from weights" --freeze_layers=1
refused "settings 'lora_rank' and 'freeze_layers': adapters freeze everything else; use either, not both: got 4 and -1" --init_from=base --lora_rank=4 --freeze_layers=-1
refused "setting 'lora_rank': fine-tuning starts from weights" --init_from=auto --lora_rank=4
for layers in -4 4; do
  refused "setting 'freeze_layers': expected a number from -3 to 3, the model's layers, got $layers" --init_from=base --freeze_layers=$layers
done
refused "setting 'lora_alpha': only adapters use it" --init_from=base --lora_alpha=4
((failures == 0)) && echo "fine-tuned; $checks checks"
exit $((failures > 0))
