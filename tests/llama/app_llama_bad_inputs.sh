#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every bad input ends llama with exit code 2 and one line that names the file or the setting, the field and what was expected.
# programs: llama llama_write_folder
# skip-sanitizers
#
#   app_llama_bad_inputs.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
. "$(dirname "${BASH_SOURCE[0]}")/../support/mpirun.sh"

llama=$1/examples/llama/llama
enter "$llama"
export OPENBLAS_NUM_THREADS=1 LC_ALL=C
"$1/tests/llama_write_folder" random model || fail "write_folder"
for i in $(seq 20); do echo "{\"text\": \"$(seq -s ' ' $((i % 7)) $((i % 7 + 5)))\"}"; done >documents.jsonl
"$llama" prepare --model=model --dataset=d --data=documents.jsonl --val_fraction=0.3 >output 2>&1 || fail "prepare"
small=(--dataset=d --block_size=16 --batch_size=1 --max_iters=1 --eval_interval=1 --eval_iters=1 --threads=1 --device=cpu)

# refused MESSAGE ARGUMENT...: the line that llama prints is its name and the message (a pattern of bash)
refused() {
  local message=$1 code text
  shift
  checks=$((checks + 1))
  patiently 60 "$llama" "$@" >output 2>&1
  code=$?
  text=$(cat output)
  if ((code != 2)); then fail "exit code $code: $*"; fi
  # shellcheck disable=SC2053
  [[ $text == "llama: error: "$message ]] || fail "expected '$message': $*"
}
trains() { refused "$1" train "${small[@]}" --model=model --out_dir=out "${@:2}"; }
# broken NAME: a copy of the model, whose files are then changed
broken() {
  rm -rf "$1"
  cp -r model "$1"
}

refused "unknown option '--foo' (see llama --help); settings come after a subcommand (prepare, train, *)" --foo
refused "unknown option '--model=x' (see llama --help); settings come after a subcommand (prepare, train, *)" --model=x train
refused "'foo': expected a setting of 'train' (see llama train --help), got '--foo'" train --foo

# --- no model ----------------------------------------------------------------------------------------------------------------
mkdir nothing
for command in train plan bench; do
  refused "setting 'model': expected the folder of a model (--model=FOLDER), got nothing" $command --block_size=16
  refused "setting 'model': expected the folder of a model, got 'nothing', which has no config.json" $command --model=nothing
  refused "setting 'model': expected the folder of a model, got 'nowhere', which is no folder" $command --model=nowhere
done
refused "setting 'model': expected the folder of the model whose tokenizer makes the tokens (--model=FOLDER), got nothing" \
  prepare --dataset=x --data=documents.jsonl
refused "setting 'model': expected the folder of a model, got 'nothing', which has no config.json" sample --model=nothing
refused "setting 'out_dir': 'out' has no trained model: neither config.json nor adapter_config.json is there; *--model=FOLDER" sample
refused "setting 'out_dir': 'out' has no trained model: *" export --to=x
refused "setting 'to': expected the folder to write to (--to=DIR), got nothing" export --out_dir=model

# --- config.json ---------------------------------------------------------------------------------------------------------------
# config EXPECTED SCRIPT...: a model whose config.json sed has edited
config() {
  local message=$1
  shift
  broken edited
  sed -i "$@" edited/config.json
  cmp -s model/config.json edited/config.json && fail "sed has changed nothing: $*"
  refused "'edited/config.json': $message" train "${small[@]}" --model=edited --out_dir=out
  refused "'edited/config.json': $message" plan --model=edited --block_size=16
}
config "'attention_bias': expected false, the only value that is supported, got true" 's/"attention_bias": false/"attention_bias": true/'
config "'hidden_act': expected \"silu\", the only value that is supported, got \"gelu\"" 's/silu/gelu/'
config "'num_local_experts': expected supported keys only (remove this one if the model does not need it), got 8" \
  's/"model_type"/"num_local_experts": 8, "model_type"/'
config "'rope_scaling': 'rope_type': expected default, linear or llama3, got \"yarn\"" \
  's/"rope_scaling": null/"rope_scaling": {"rope_type": "yarn", "factor": 4.0}/'
config "'num_attention_heads': expected a divisor of hidden_size 32, got 5" -e '/"head_dim"/d' -e 's/"num_attention_heads": 4/"num_attention_heads": 5/'
config "'num_key_value_heads': expected a divisor of num_attention_heads 4, got 3" 's/"num_key_value_heads": 2/"num_key_value_heads": 3/'
config "'quantization_config': expected none, got {\"bits\":4}" 's/"model_type"/"quantization_config": {"bits": 4}, "model_type"/'
config "'model_type': expected \"llama\" or \"mistral\", got \"qwen2\"" 's/"model_type": "llama"/"model_type": "qwen2"/'
config "'hidden_size': expected a whole number from 1 to *, got \"32\"" 's/"hidden_size": 32/"hidden_size": "32"/'
broken cut && sed -i '$d' cut/config.json
refused "'cut/config.json' is not a JSON object: the file is damaged, or of another kind" plan --model=cut

# --- weights --------------------------------------------------------------------------------------------------------------------
# weights NAME MESSAGE: of the copy NAME, which is both sampled from and trained
weights() {
  refused "$2" sample --model="$1" --start=1 --max_new_tokens=1
  refused "$2" train "${small[@]}" --model="$1" --out_dir=out
}
broken pickle && mv pickle/model.safetensors pickle/pytorch_model.bin
weights pickle "'pickle' has no weights: expected model.safetensors or model.safetensors.index.json (pytorch_model.bin is a pickle and is not read; *)"
broken index && mv index/model.safetensors index/model-00001-of-00002.safetensors
echo '{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors", "model.norm.weight": "model-00002-of-00002.safetensors"}}' \
  >index/model.safetensors.index.json
weights index "'index/model-00002-of-00002.safetensors': cannot be opened: No such file or directory"
broken short && head -c 100000 model/model.safetensors >short/model.safetensors
weights short "'short/model.safetensors': tensor 'lm_head.weight': bytes * lie outside the * bytes of data: the file is truncated or damaged"
head -c 1000 model/model.safetensors >short/model.safetensors
weights short "'short/model.safetensors': a header of * bytes* does not fit into the file of 1000 bytes: it is truncated, or no safetensors file"
: >short/model.safetensors
weights short "'short/model.safetensors': 0 bytes are too few for a safetensors file: it is truncated"
broken shape && sed -i 's/"intermediate_size": 48/"intermediate_size": 64/' shape/config.json
weights shape "'shape/model.safetensors': tensor 'model.layers.0.mlp.gate_proj.weight': expected shape (64, 32) by config.json, got (48, 32)"
broken layers && sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' layers/config.json
weights layers "'layers/model.safetensors': tensor 'model.layers.2.input_layernorm.weight' is missing"
broken layers && sed -i 's/"num_hidden_layers": 2/"num_hidden_layers": 1/' layers/config.json
weights layers "'layers/model.safetensors' has a tensor 'model.layers.1.*.weight' that the model of config.json does not have"

# --- tokenizers -----------------------------------------------------------------------------------------------------------------
prepares() { refused "$2" prepare --model="$1" --dataset=x --data=documents.jsonl; }
broken silent && rm silent/tokenizer.model
prepares silent "'silent': expected tokenizer.json or tokenizer.model, got neither"
refused "'silent': expected tokenizer.json or tokenizer.model, got neither" sample --model=silent
broken unigram && echo '{"model": {"type": "Unigram", "vocab": [["a", 0]]}}' >unigram/tokenizer.json
prepares unigram "'unigram/tokenizer.json': model.type: expected \"BPE\", got \"Unigram\""
weights unigram "'unigram/tokenizer.json': model.type: expected \"BPE\", got \"Unigram\""
broken few && sed -i 's/"vocab_size": 264/"vocab_size": 259/' few/config.json
prepares few "'few/tokenizer.model': expected at most 259 tokens, the model's vocab_size, got 260"
broken torn && head -c 4000 model/tokenizer.model >torn/tokenizer.model
prepares torn "'torn/tokenizer.model', *; the file is cut, damaged, or of another kind"
broken added && echo '{"<|im_start|>": 262}' >added/added_tokens.json
prepares added "'added/added_tokens.json': <|im_start|>: token '<|im_start|>': expected two characters or more, and id 260, the first that no token has, got 262"
broken eos && echo '{"eos_token_id": [2, 264]}' >eos/generation_config.json
refused "'eos/generation_config.json': 'eos_token_id': expected ids from 0 to 263, got ?2,264?" sample --model=eos --start=1
echo '{"repetition_penalty": 1.5}' >eos/generation_config.json
refused "'eos/generation_config.json': 'repetition_penalty': expected 1.0, the only value that is supported, got 1.5" sample --model=eos --start=1
# Another piece than a blank, other special tokens, and texts that begin without one.
broken other-piece && sed -i 's/\xe2\x96\x81/\xe2\x96\x82/' other-piece/tokenizer.model
broken other-begin && sed -i 's/<s>/<S>/' other-begin/tokenizer.model
broken no-begin && echo '{"add_bos_token": false}' >no-begin/tokenizer_config.json
for other in other-piece other-begin no-begin; do
  "$llama" prepare --model=$other --dataset=$other --data=documents.jsonl --val_fraction=0.3 >output 2>&1 || fail "prepare"
  trains "setting 'dataset': '$other' was prepared with another tokenizer than that in 'model'; run llama prepare again with --model=model" \
    --dataset=$other
done

# --- documents ------------------------------------------------------------------------------------------------------------------
# documents TEXT MESSAGE [SETTING...]
documents() {
  printf '%b' "$1" >bad.jsonl
  refused "data: 'bad.jsonl'$2" prepare --model=model --dataset=x --data=bad.jsonl "${@:3}"
}
documents '1. e4 e5\n' ", line 1, column 1: expected JSON, got '1. e4 e5'"
documents '{"text": "a"}\n{"txt": "b"}\n' ", line 2: the object has no key \"text\"; its keys are: \"txt\""
documents '{"text": "a"}\n{"text": 5}\n' ", line 2: the value of \"text\" is of type number, expected a string"
documents '' " is empty"
documents '{"text": ""}\n{"text": ""}\n' " has no documents with text"
documents '{"text": ""}\n' " has no documents" --val_fraction=0
refused "data: 'bad.jsonl' has no documents" prepare --model=model --dataset=x --data=documents.jsonl --val_data=bad.jsonl
check "a failed prepare leaves no data" test ! -e data/x
trains "data: there is no folder 'data/x' for dataset 'x'*" --dataset=x
# Tokens of a vocabulary that is not known.
cp -r data/d data/numbers && echo '{"vocab_size": 260, "rows": true}' >data/numbers/meta.json
broken mute && rm mute/tokenizer.model
unnamed="the data have no meta.json that names a tokenizer, so their vocabulary is not known; write them with: llama prepare --model=FOLDER"
for model in model mute; do trains "setting 'dataset': $unnamed --dataset=numbers --data=FILE" --dataset=numbers --model=$model; done

# --- settings -------------------------------------------------------------------------------------------------------------------
trains "setting 'block_size': expected at most max_position_embeddings 128, got 129" --block_size=129
broken window && sed -i 's/"model_type": "llama"/"model_type": "mistral", "sliding_window": 20/' window/config.json
trains "setting 'block_size': expected at most sliding_window 20, got 21" --block_size=21 --model=window
for command in plan bench; do
  refused "setting 'block_size': expected at most max_position_embeddings 128, got 129" $command --model=model --block_size=129
  for sizes in 0 1,0 1,,2 -1 many; do
    refused "setting 'batch_sizes': expected whole numbers from 1 to 1000000, separated by commas, got '$sizes'" \
      $command --model=model --block_size=16 --batch_sizes=$sizes
  done
done
trains "setting 'lora_targets': only adapters use it; expected --lora_rank too" --lora_targets=q_proj
trains "setting 'lora_targets': only adapters use it; expected --lora_rank too" --lora_targets=q_proj --lora_rank=0
trains "setting 'lora_alpha': only adapters use it; expected --lora_rank too" --lora_alpha=4
trains "setting 'lora_rank': expected at most 32, the smaller side of 'model.layers.0.self_attn.q_proj.weight', got 33" --lora_rank=33
trains "setting 'lora_rank': expected at most 16, the smaller side of 'model.layers.0.self_attn.k_proj.weight', got 17" --lora_rank=17 --lora_targets=k_proj
trains "setting 'lora_targets': expected names among self_attn.q_proj, *, mlp.down_proj, got 'c_attn'" --lora_rank=4 --lora_targets=k_proj,c_attn
trains "setting 'freeze_layers': expected a number from -2 to 2, the model's layers, got 3" --freeze_layers=3
trains "setting 'freeze_layers': expected a number from -2 to 2, the model's layers, got -3" --freeze_layers=-3
trains "settings 'lora_rank' and 'freeze_layers': adapters freeze everything else; use either, not both: got 4 and 1" \
  --freeze_layers=1 --lora_rank=4
trains "setting 'recompute_segment': only layers that are computed again form segments; expected --activation_checkpointing too" --recompute_segment=2
trains "setting 'activation_checkpointing': expected at most the 2 layers, got 3" --activation_checkpointing=3
trains "setting 'init_from': there is no checkpoint in 'out' to resume from" --init_from=resume
refused "setting 'model': expected the folder of a model (--model=FOLDER), got nothing" train "${small[@]}" --out_dir=out --init_from=auto
refused "setting 'start': expected at most 128 tokens (max_position_embeddings), got *" sample --model=model --start="$(seq -s ' ' 100)"
check "a refused start leaves no run" test ! -e out

# --- runs and adapters ------------------------------------------------------------------------------------------------------------
patiently 60 "$llama" train "${small[@]}" --model=model --out_dir=whole >output 2>&1 || fail "train"
patiently 60 "$llama" train "${small[@]}" --model=model --out_dir=lora --lora_rank=4 >output 2>&1 || fail "train"
trains "setting 'out_dir': 'whole' holds a run already (*): --init_from=resume continues it; --overwrite starts a new run *" --out_dir=whole
trains "setting 'out_dir': 'model' has a file config.json that llama train has not written, and a run might replace it; choose another folder" \
  --out_dir=model
trains "setting 'out_dir': 'data/d' is the folder of a data set (*" --out_dir=data/d
refused "setting 'format': expected huggingface, for 'whole' has no adapters (a file adapter_config.json); got peft" export --out_dir=whole --to=x --format=peft
refused "setting 'checkpoint': --format=peft exports the adapters in out_dir; expected no checkpoint, got 'latest'" \
  export --out_dir=lora --to=x --format=peft --checkpoint=latest
refused "setting 'to': 'model' has a file config.json already; *" export --out_dir=whole --to=model
mkdir readme && echo mine >readme/README.md && cp -r model carded && echo a card >carded/README.md
refused "setting 'to': 'readme' has a file README.md already; name another folder, or give --overwrite *" export --out_dir=carded --to=readme
check "a refused export has changed the folder" test "$(cat readme/*)" = mine
refused "setting 'to': expected a folder other than that of the model that the run began with, got 'model'" \
  export --out_dir=whole --to=model --overwrite
refused "setting 'to': expected a folder other than out_dir, got 'whole'" export --out_dir=whole --to=whole
refused "setting 'model': the run in 'lora/step-2' was trained on other weights than those in 'whole'; *--model=FOLDER" \
  sample --out_dir=lora --checkpoint=latest --model=whole --start=1
# adapter MESSAGE SCRIPT: adapters whose adapter_config.json sed has edited
adapter() {
  rm -rf edited
  mkdir edited
  cp lora/adapter_* lora/tokenizer.model edited
  sed -i "$2" edited/adapter_config.json
  refused "'edited/adapter_$1" sample --model=edited --start=1
  refused "'edited/adapter_$1" train "${small[@]}" --model=edited --out_dir=out
}
adapter "config.json': 'base_model_name_or_path': expected the folder of a model (*), got 'nowhere', which is no folder" 's/"model"/"nowhere"/'
adapter "config.json': 'use_dora': expected false, got true" 's/"r": 4/"r": 4, "use_dora": true/'
adapter "config.json': 'init_lora_weights': expected true, false, *save such adapters with path_initial_model_for_weight_conversion?, got \"pissa\"" \
  's/"r": 4/"r": 4, "init_lora_weights": "pissa"/'
adapter "model.safetensors': tensor '*.lora_A.weight': expected adapters of the layers that adapter_config.json names *, got another one" \
  's/"k_proj",\?//'
adapter "config.json': 'peft_type': expected \"LORA\", got \"LOHA\"" 's/"LORA"/"LOHA"/'
adapter "model.safetensors': tensor '*.lora_A.weight': expected shape (5, 32), got (4, 32)*" 's/"r": 4/"r": 5/'

# --- processes: one of them says what is wrong --------------------------------------------------------------------------------
if command -v mpirun >/dev/null && [[ $(ldd "$llama") == *libmpi* ]]; then
  together() { # together MESSAGE ARGUMENT...
    checks=$((checks + 1))
    patiently 60 mpirun -n 2 "$llama" "${@:2}" >output 2>&1
    local code=$?
    if ((code != 2)); then fail "exit code $code: ${*:2}"; fi
    check "${*:2}" test "$(grep '^llama: error:' output)" = "llama: error: $1"
  }
  together "setting 'model': expected the folder of a model (--model=FOLDER), got nothing" train "${small[@]}" --gradient_accumulation_steps=2
  together "setting 'batch_sizes': expected whole numbers from 1 to 1000000, separated by commas, got '0'" \
    bench --model=model --block_size=16 --gradient_accumulation_steps=2 --batch_sizes=0
  together "'short/model.safetensors': 0 bytes are too few for a safetensors file: it is truncated" sample --model=short --start=1
else
  echo "note: without mpirun, or a program without MPI"
fi

echo "$checks checks, $failures failures"
exit $((failures > 0))
