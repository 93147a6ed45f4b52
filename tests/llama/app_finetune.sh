#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# llama fine-tunes a folder of HuggingFace's: all of it, without the lowest layers, or adapters. Losses are those of one rank
# under every strategy, with recomputation, however a batch is divided; a run that is resumed ends in the same weights. What it
# writes can be sampled, exported and trained again.
# programs: llama llama_write_folder
# skip-sanitizers
#
#   app_finetune.sh BINARY_DIR
set -uo pipefail

support=$(cd "$(dirname "${BASH_SOURCE[0]}")/../support" && pwd)
. "$support/script.sh"

llama=$1/examples/llama/llama
write_small_model=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../examples/llama/formats" && pwd)/write_small_model.sh
enter "$llama"
export OPENBLAS_NUM_THREADS=1
for seed in 1 2; do "$1/tests/llama_write_folder" random model$seed $seed || fail "write_folder"; done
# Files beside the weights, and ids of tokens, that training does not change.
echo '{{ messages }}' >model1/chat_template.jinja
mkdir model1/additional_chat_templates && echo '{{ tools }}' >model1/additional_chat_templates/tools.jinja
echo '{"eos_token_id": [2, 1], "temperature": 0.5}' >model1/generation_config.json
echo 'a licence' >model1/LICENSE
sed -i 's/"eos_token_id": 2/"eos_token_id": [2, 1], "pad_token_id": 0/' model1/config.json
for i in $(seq 80); do echo "{\"text\": \"$(seq -s ' ' $((i % 7)) $((i % 7 + i * 5 % 13)))\"}"; done >documents.jsonl
"$llama" prepare --model=model1 --dataset=d --data=documents.jsonl --val_fraction=0.2 >output 2>&1 || fail "prepare"

common=(--model=model1 --dataset=d --block_size=32 --learning_rate=1e-2 --eval_interval=10 --eval_iters=1 --threads=1 --device=cpu)
quarters=(--batch_size=2 --gradient_accumulation_steps=4)  # of a batch of 8
# train RUN SETTING...: a line for each loss
train() {
  local run=$1
  shift
  patiently 60 "$llama" train "${common[@]}" --out_dir="$run" --log_json="$run.json" "$@" >output 2>&1 || { fail "train $*"; return; }
  grep -oE '^(iter|step) [0-9]+.*loss [0-9.]+' output | sed 's/, time.*//' >"$run.losses"
  check "$*: no losses" test -s "$run.losses"
}
same() { check "$1 and $2 have other losses" diff "$1.losses" "$2.losses"; }
# tensor FOLDER NAME: its bytes
tensor() {
  local file=$1/model.safetensors size range
  size=$(od -An -tu8 -N8 "$file")
  range=$(head -c $((8 + size)) "$file" | grep -aoE "\"${2//./\\.}\":\{[^}]*\}" | grep -oE '\[[0-9]+,[0-9]+\]\}$' | tr -d '[]}')
  tail -c +$((9 + size + ${range%,*})) "$file" | head -c $((${range#*,} - ${range%,*}))
}
differ() { ! cmp -s "$1" "$2"; }

# --- the same losses ---------------------------------------------------------------------------------------------------------
lora=(--lora_rank=4 --lora_alpha=8)
declare -A tuning=([full]=--freeze_layers=0 [frozen]=--freeze_layers=1 [lora]="${lora[*]}")
# with KIND: sets `settings` for it
with() {
  read -ra settings <<<"${tuning[$1]}"
  settings+=("${quarters[@]}" --eval_interval=6 --lr_decay_iters=19)
}
for kind in full frozen lora; do
  with $kind
  train $kind "${settings[@]}" --max_iters=19 --ranks=4
  check "$kind: learns nothing" awk '/^iter [0-6]:/ { last = $NF; if (first == "") first = last } END { exit !(last < first - 0.1) }' $kind.losses
done
# its_losses KIND SETTING...: the first losses of its run, with other settings
its_losses() {
  with "$1"
  train other "${settings[@]}" --ranks=4 --max_iters=6 --overwrite "${@:2}"
  check "$*: other losses" diff <(head -n "$(wc -l <other.losses)" "$1.losses") other.losses
}
its_losses full --strategy=shard_grad_op --activation_checkpointing=true --recompute_segment=2
its_losses full --strategy=no_shard --activation_checkpointing
its_losses full --strategy=hybrid_shard --shard_group=2
its_losses frozen --activation_checkpointing=true --recompute_segment=2
its_losses frozen --strategy=hybrid_shard --shard_group=2
its_losses frozen --strategy=no_shard --activation_checkpointing
its_losses lora --strategy=shard_grad_op
its_losses lora --strategy=no_shard --activation_checkpointing
its_losses lora --strategy=hybrid_shard --shard_group=2 --activation_checkpointing=true --recompute_segment=2
check "all of a model and parts of it train alike" differ full.losses frozen.losses
# Rows have unlike lengths: each counts by its tokens.
train whole --batch_size=8 --max_iters=6
train halves --batch_size=4 --gradient_accumulation_steps=2 --max_iters=6
train ranks --batch_size=4 --gradient_accumulation_steps=2 --max_iters=6 --ranks=2
train uneven3 --batch_size=1 --gradient_accumulation_steps=8 --max_iters=6 --ranks=3
train uneven5 "${quarters[@]}" --max_iters=6 --ranks=5
for parts in halves ranks uneven3 uneven5; do  # evaluations draw other rows
  check "$parts of a batch have other losses" diff <(grep ^iter whole.losses) <(grep ^iter $parts.losses)
done

# --- what is written -----------------------------------------------------------------------------------------------------------
for name in model.embed_tokens model.layers.0.mlp.down_proj model.layers.0.input_layernorm model.layers.0.self_attn.k_proj; do
  check "$name is frozen" cmp <(tensor model1 $name.weight) <(tensor frozen $name.weight)
  check "$name trains" differ <(tensor model1 $name.weight) <(tensor full $name.weight)
done
for name in model.layers.1.mlp.down_proj model.layers.1.input_layernorm model.norm lm_head; do
  check "$name trains" differ <(tensor model1 $name.weight) <(tensor frozen $name.weight)
done
bytes() { cat "$1/$(cat "$1/latest")"/*.safetensors | wc -c; }
check "a checkpoint of adapters is small" test $((4 * $(bytes lora))) -lt "$(bytes full)"
check "a checkpoint without frozen layers is smaller" test "$(bytes frozen)" -lt $(($(bytes full) * 3 / 4))
for run in full lora; do
  check "$run has the model's chat template" cmp model1/chat_template.jinja $run/chat_template.jinja
  check "$run has the model's settings of generation" cmp model1/generation_config.json $run/generation_config.json
done
check "adapters have no weights beside them" test ! -e lora/model.safetensors -a ! -e lora/config.json
check "the adapters' file is small" test $((4 * $(stat -c %s lora/adapter_model.safetensors))) -lt "$(stat -c %s model1/model.safetensors)"

# --- resuming ------------------------------------------------------------------------------------------------------------------
numbers() { grep -h '"kind":"iter"' "$@" | grep -oE '"loss":[^,}]*' | cut -d: -f2; }
near() { # near RUN LOSSES: the run's 20 losses, within 1e-6
  check "$1: other losses" awk 'NR == FNR { expected[FNR] = $1; next }
    { d = ($1 - expected[FNR]) / expected[FNR]; if (d > 1e-6 || d < -1e-6) other = 1 }
    END { exit other || NR != 40 }' "$2" <(numbers "$1.json")
}
for kind in full lora; do
  with $kind
  numbers $kind.json >$kind.numbers
  weights=$([[ $kind == lora ]] && echo adapter_model.safetensors || echo model.safetensors)
  train $kind-part "${settings[@]}" --eval_interval=10 --max_iters=9 --ranks=4
  mv $kind-part.json first.json
  for ranks in 1 2; do
    cp -r $kind-part $kind-on-$ranks
    train $kind-on-$ranks --init_from=resume --max_iters=19 --ranks=$ranks
    cat first.json $kind-on-$ranks.json >both && mv both $kind-on-$ranks.json
    near $kind-on-$ranks $kind.numbers
  done
  train $kind-part --init_from=resume --max_iters=19 --ranks=4
  check "$kind: resumes from the checkpoint" grep -q "^resuming from $kind-part/step-10 at iteration 10$" output
  check "$kind: other weights after resuming" cmp $kind/$weights $kind-part/$weights
done
train full-of-1 "${quarters[@]}" --max_iters=19 --ranks=1
near full-of-1 full.numbers
ends_in_error "$llama" train "${common[@]}" --out_dir=lora-part --init_from=resume --model=model2 --max_iters=29 --ranks=2
check "adapters of another model" grep -q "the run in 'lora-part/step-20' was trained on other weights than those in 'model2'" output
for layers in 0 2; do  # layer 1 has been trained, and its values would be lost
  ends_in_error "$llama" train "${common[@]}" --out_dir=frozen --init_from=resume --max_iters=29 --freeze_layers=$layers --ranks=4
  check "freezes $layers layers" grep -q "setting 'freeze_layers': expected 1, as the run in 'frozen/step-20' has it, .*; got $layers" output
done
mv model1 moved
ends_in_error "$llama" train "${common[@]}" --out_dir=lora-part --init_from=resume --max_iters=29
check "no model to resume with" grep -q "setting 'model': expected the folder of the model that the run in 'lora-part/step-20' began with" output
ends_in_error "$llama" sample --out_dir=lora-part
check "no model to sample from" grep -q "setting 'model': expected the folder of the model that the run in 'lora-part/step-20' began with" output
cp -r model2 model1
for command in sample "export --to=wrong"; do
  # shellcheck disable=SC2086
  ends_in_error "$llama" $command --out_dir=lora-part
  check "$command: another model in the folder" grep -q "was trained on other weights than those in 'model1'" output
done
rm -r model1

# --- texts -----------------------------------------------------------------------------------------------------------------------
text() { patiently 60 "$llama" sample --device=cpu --start='1 2' --temperature=0 --max_new_tokens=30 "$@" 2>errors || fail "sample $*"; }
text --out_dir=lora --model=moved >lora.moved
patiently 60 "$llama" export --out_dir=lora --to=lora-moved --model=moved >output 2>&1 || fail "export of a moved model"
mv moved model1
text --model=model1 >untrained
export_to() { patiently 60 "$llama" export --out_dir="$1" --to="$2" "${@:3}" >output 2>&1 || fail "export $*"; }
for kind in full lora; do
  text --out_dir=$kind >$kind.text
  check "$kind: training changes the text" differ untrained $kind.text
  check "$kind: the checkpoint's text" cmp $kind.text <(text --out_dir=$kind --checkpoint=latest)
  check "$kind: the text on 2 ranks" cmp $kind.text <(text --out_dir=$kind --ranks=2)
  export_to $kind $kind-export
  check "$kind: the export's text" cmp $kind.text <(text --model=$kind-export)
  export_to $kind $kind-latest --checkpoint=latest
  check "$kind: the checkpoint's weights" cmp $kind-export/model.safetensors $kind-latest/model.safetensors
  export_to $kind $kind-files --max_shard_gb=0.00004
  check "$kind: several files" test -e $kind-files/model-00002-of-00004.safetensors -a -e $kind-files/model.safetensors.index.json -a \
    ! -e $kind-files/model.safetensors
  for name in LICENSE chat_template.jinja additional_chat_templates/tools.jinja generation_config.json tokenizer.model; do
    check "$kind: $name is exported" cmp model1/$name $kind-export/$name
    check "$kind: $name is exported with a checkpoint" cmp model1/$name $kind-latest/$name
  done
  keys() { tr -d ' \n' <"$1/config.json"; }
  check "$kind: the exported config.json is the model's" test "$(keys $kind-export)" = "$(keys model1)"
  check "$kind: the text of several files" cmp $kind.text <(text --model=$kind-files)
done
check "the model of adapters may lie elsewhere" cmp lora.text lora.moved
check "its files too" cmp model1/LICENSE lora-moved/LICENSE
# Adapters whose model has a name on a hub: the folder is given.
cp -r lora hub && rm -r hub/step-* hub/latest && sed -i 's|"model1"|"owner/model"|' hub/adapter_config.json
check "the model of a name on a hub" cmp lora.text <(text --out_dir=hub --model=model1)
ends_in_error "$llama" sample --out_dir=hub
check "a name on a hub" grep -q "'base_model_name_or_path': expected the folder of a model (.*--model.*), got 'owner/model', which is no folder" output
export_to lora peft --format=peft
check "the adapters are exported as they are" cmp lora/adapter_model.safetensors peft/adapter_model.safetensors
check "the adapters' text" cmp lora.text <(text --model=peft)
for from in peft lora-export; do train on-$from "${quarters[@]}" --model=$from --max_iters=3; done
same on-peft on-lora-export
check "the export of a moved model" cmp lora-export/model.safetensors lora-moved/model.safetensors
# peft writes null for what is not set.
cp -r peft peft-null && sed -i 's/"bias"/"modules_to_save": null, "rank_pattern": null, "use_dora": null, "bias"/' peft-null/adapter_config.json
check "fields that are null" cmp lora.text <(text --model=peft-null)
ends_in_error "$llama" train "${common[@]}" --model=peft --lora_rank=2 --out_dir=twice
check "adapters of adapters" grep -q "setting 'model': 'peft' has adapters, and new adapters need a whole model" output
check "begins with the adapters" differ on-peft.losses <(head -n "$(wc -l <on-peft.losses)" full.losses)
check "adapters have their model's memory" grep -q '^32416 parameters' <("$llama" plan --model=peft --block_size=32)

# --- types -----------------------------------------------------------------------------------------------------------------------
export_to full narrow --dtype=bfloat16
check "the type of the weights is in config.json" grep -q '"torch_dtype": "bfloat16"' narrow/config.json
check "the other keys are the model's" grep -q '"pad_token_id": 0' narrow/config.json
check "bfloat16 takes half" test $((2 * $(stat -c %s narrow/model.safetensors))) -lt $(($(stat -c %s full/model.safetensors) + 4000))
export_to narrow narrow-again --dtype=bfloat16
export_to lora peft-narrow --format=peft --dtype=bfloat16
check "adapters in bfloat16" test $((2 * $(stat -c %s peft-narrow/adapter_model.safetensors))) -lt $(($(stat -c %s peft/adapter_model.safetensors) + 4000))
export_to full full-files --overwrite
check "no part of the old weights stays" test ! -e full-files/model-00002-of-00004.safetensors
check "bfloat16 is kept" cmp narrow/model.safetensors narrow-again/model.safetensors
export_to narrow wide
check "the text of bfloat16" cmp <(text --model=narrow) <(text --model=wide)
export_to wide narrow-from-wide --dtype=bfloat16
check "float32 keeps bfloat16" cmp narrow/model.safetensors narrow-from-wide/model.safetensors

ends_in_error "$llama" sample --model=model1 --start="$(seq -s ' ' 100)"
check "a text beyond the positions" grep -q "setting 'start': expected at most 128 tokens (max_position_embeddings), got 29[0-9]" output

# --- former names, as checkpoints of older versions have them -------------------------------------------------------------------
if command -v python3 >/dev/null; then
  cp -r lora older
  edit() { check "an older checkpoint has $2" python3 "$support/edit_checkpoint.py" older "$1" "$2"; }
  edit '"lora_rank": "4"' '"lora_r": "4"'
  edit '"activation_checkpointing": "false"' '"gradient_checkpointing": "2"'
  check "an older checkpoint's text" cmp lora.text <(text --out_dir=older --checkpoint=latest)
  train older --init_from=resume --max_iters=22 --ranks=4
  check "an older checkpoint's settings" grep -q "^settings of the run: .*activation_checkpointing 2, .*lora_rank 4" output
fi

# --- the small model of run.sh ---------------------------------------------------------------------------------------------------
"$write_small_model" small || fail "write_small_model.sh"
echo 'naïve text, "quoted"' > text
"$llama" prepare --model=small --dataset=s --data=text --val_fraction=0 > output 2>&1 || fail "prepare with the small model"
check "tokens are not bytes" grep -q "train has $(wc -c < text) tokens" output
"$llama" sample --model=small --start=a --max_new_tokens=5 --temperature=0 > output 2>&1 || fail "sample of the small model"
rm small/model.safetensors # another one would have other weights
"$write_small_model" small || fail "write_small_model.sh again"
check "other weights" test "$("$llama" sample --model=small --start=a --max_new_tokens=5 --temperature=0)" = "$(< output)"

echo "$checks checks, $failures failures"
exit $((failures > 0))
