#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A model goes out to HuggingFace's and llm.c's formats and comes in again, on any ranks, without a bit lost; training and
# sampling begin with weights from there.
# programs: nanogpt
# skip-sanitizers
#
#   app_gpt2.sh BINARY_DIR
set -uo pipefail

support=$(cd "$(dirname "${BASH_SOURCE[0]}")/../support" && pwd)
. "$support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
export OPENBLAS_NUM_THREADS=1 HF_HUB_CACHE=$PWD/no_cache
for i in $(seq 1 300); do echo "the quick brown fox $i"; done >text
"$nanogpt" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
runs=(--dataset=d --batch_size=2 --gradient_accumulation_steps=6 --eval_iters=2 --log_interval=1 --warmup_iters=0)
train() { patiently 120 "$nanogpt" train "${runs[@]}" "$@" >output 2>&1 || fail "train $*"; }
give() { patiently 60 "$nanogpt" export "$@" >output 2>&1 || fail "export $*"; }
says() { grep -qF -- "$1" output || fail "does not say '$1'"; }
# refuses MESSAGE ARGUMENT...
refuses() {
  ends_in_error "$nanogpt" "${@:2}"
  says "$1"
}
losses() { grep -E '^(step|iter) ' output | sed 's/, time.*//'; }

train --n_layer=2 --n_head=2 --n_embd=12 --block_size=8 --max_iters=3 --eval_interval=2 --out_dir=out
give --out_dir=out --to=hf
says "the model has no biases, but the format needs them: they are written as zeros"
says "vocab.json and merges.txt were not written"
give --out_dir=out --to=sharded --checkpoint=latest
check "the checkpoint's weights are others" cmp hf/model.safetensors sharded/model.safetensors
check "config.json differs" cmp hf/config.json sharded/config.json
give --out_dir=out --to=bin --format=llm.c
says "warning: the model uses the exact GELU"
give --out_dir=out --to=own --format=nanogpt

# A run that starts from the weights has the model's loss.
train --init_from=out --eval_only=true --out_dir=a && losses >a.losses
train --init_from=hf --eval_only=true --out_dir=a
says "initializing from 'hf': n_layer 2, n_head 2, n_embd 12"
check "HuggingFace's form loses something else" diff a.losses <(losses)
train --init_from=own --eval_only=true --out_dir=a
check "the model in our own form loses something else" diff a.losses <(losses)

# Weights that are not numbers are no model, and no success.
cp -r hf nan && printf '\0\0\300\177' | dd of=nan/model.safetensors bs=1 seek=$(($(stat -c %s hf/model.safetensors) - 4)) conv=notrunc 2>output
refuses "iteration 0: the evaluation gives a training loss of nan" train "${runs[@]}" --init_from=nan --eval_only=true --out_dir=n
check "does not name the tensor" grep -q ", and parameters of '[a-z0-9_.]*' are not finite at the start; training stops$" output

# Steps that change nothing, for the rate is 0 in fp32: all ranks together have every element as it was.
still=(--learning_rate=1e-60 --decay_lr=false --weight_decay=0 --max_iters=1)
for world in "1 no_shard" "3 full_shard" "3 no_shard"; do
  read -r ranks strategy <<<"$world"
  train --init_from=hf --ranks="$ranks" --strategy="$strategy" "${still[@]}" --out_dir="hf_$ranks$strategy"
  give --out_dir="hf_$ranks$strategy" --to=again --overwrite
  check "$world: HuggingFace's form came back changed" cmp hf/model.safetensors again/model.safetensors
  check "$world: config.json came back changed" cmp hf/config.json again/config.json
  train --init_from=bin/model.bin --ranks="$ranks" --strategy="$strategy" "${still[@]}" --out_dir="bin_$ranks$strategy"
  give --out_dir="bin_$ranks$strategy" --to=again --overwrite --format=llm.c --checkpoint=latest
  check "$world: llm.c's form came back changed" cmp bin/model.bin again/model.bin
done
if grep -q warning output; then fail "llm.c's own GELU was warned of"; fi

# The GELU and the biases stay with a run.
train --init_from=resume --out_dir=bin_3full_shard --max_iters=3
give --out_dir=bin_3full_shard --to=again --overwrite
check "a run forgot its GELU" grep -q '"activation_function": "gelu_new"' again/config.json
check "a model forgot its GELU" grep -q '"activation": "gelu_new"' bin_3full_shard/config.json

# A shorter block; bf16; sampling.
train --init_from=hf --block_size=5 --max_iters=1 --out_dir=short
says "5 of 8 positions"
give --out_dir=out --to=brain --dtype=bfloat16
train --init_from=brain --eval_only=true --out_dir=a
patiently 60 "$nanogpt" sample --out_dir=bin_3full_shard --num_samples=1 --max_new_tokens=5 >output 2>&1 || fail "sample"

# Data with fewer tokens than the model: its others are never drawn, and a run goes on with these data alone.
tr -d 'aeiou ' <text >fewer
"$nanogpt" prepare --dataset=fewer --data=fewer >output 2>&1 || fail "prepare fewer"
train --dataset=fewer --init_from=hf --max_iters=1 --out_dir=tuned
patiently 60 "$nanogpt" sample --out_dir=tuned --num_samples=2 --max_new_tokens=100 --temperature=5 >output 2>&1 || fail "sample of fewer tokens"
train --dataset=fewer --init_from=resume --max_iters=4 --out_dir=tuned
for run in out:fewer tuned:d; do
  refuses "setting 'dataset': '${run#*:}' has a vocabulary of" train "${runs[@]}" --dataset="${run#*:}" --init_from=resume --out_dir="${run%:*}"
done

# Byte pairs beside the weights, by HuggingFace's names.
refuses "has weights but no vocabulary" sample --init_from=hf
refuses "expected both files of the tokenizer, encoder_json and vocab_bpe, got only one" sample --init_from=hf --vocab_bpe=x

# A job script's form: resumes if it can, else begins with the weights.
train --init_from=auto:hf --max_iters=1 --out_dir=auto
says "note: 'auto' has no checkpoint: training starts from hf"
says "initializing from 'hf'"
train --init_from=auto:hf --max_iters=2 --out_dir=auto
says "resuming from auto/step-2 at iteration 2"
refuses "got 'nowhere', which does not exist" train "${runs[@]}" --init_from=auto:nowhere --out_dir=x
refuses "--init_from=auto:hf continues the old run: expected only one of the two" train "${runs[@]}" --init_from=auto:hf --overwrite --out_dir=auto
refuses "setting 'init_from': expected resume" sample --init_from=auto:hf
refuses "setting 'init_from': expected weights after 'auto:', got 'auto:resume'" train "${runs[@]}" --init_from=auto:resume --out_dir=x

# A folder keeps what no run or export of nanogpt has written, and an earlier export unless told.
sums() { (cd "$1" && find . -type f -exec cksum {} + | sort -k3); }
mkdir theirs && cp hf/* theirs && touch theirs/{tokenizer.json,vocab.json,merges.txt}
sums theirs >before
for overwrite in "" --overwrite; do
  refuses "setting 'out_dir': 'theirs' has a file config.json that nanogpt train has not written, and a run might replace it" \
    train "${runs[@]}" --out_dir=theirs --max_iters=1 $overwrite
  refuses "setting 'out_dir': 'data/d' is the folder of a data set (it has a file train.bin), whose meta.json would be replaced" \
    train "${runs[@]}" --out_dir=data/d --max_iters=1 $overwrite
  refuses "setting 'to': 'data/d' is the folder of a data set" export --out_dir=out --to=data/d $overwrite
  refuses "setting 'out_dir': expected a folder, but 'text' is a file" train "${runs[@]}" --out_dir=text --max_iters=1 $overwrite
  refuses "setting 'out_dir': 'out/step-4' is a checkpoint; the folder of its run is 'out'" train "${runs[@]}" --out_dir=out/step-4 --max_iters=1 $overwrite
done
refuses "setting 'out_dir': 'out/step-4' is a checkpoint; the folder of its run is 'out'" sample --out_dir=out/step-4/
refuses "setting 'to': 'theirs' has a file config.json already; name another folder, or give --overwrite to replace the model there" \
  export --out_dir=out --to=theirs
check "a refused command has changed the folder" cmp before <(sums theirs)
check "a refused command leaves a lock" test -z "$(find theirs data -name '.*' -type f)"
give --out_dir=out --to=theirs --overwrite
says "removed from 'theirs', with the model that was there: vocab.json, merges.txt, tokenizer.json"
check "files of two models: $(ls theirs)" test "$(ls -A theirs)" = $'config.json\nmodel.safetensors'
check "another model" cmp hf/model.safetensors theirs/model.safetensors
# The files beside HuggingFace's weights go with the model: through a run, its resumption, and its checkpoints.
cp -r hf chat && mkdir chat/additional_chat_templates && echo MIT >chat/LICENSE && echo '{}' >chat/special_tokens_map.json
echo '{"temperature": 0.5}' >chat/generation_config.json && echo '{{ messages }}' >chat/chat_template.jinja
echo '{{ tools }}' >chat/additional_chat_templates/tools.jinja
train --init_from=auto:chat --max_iters=1 --out_dir=chats
train --init_from=resume --max_iters=2 --out_dir=chats
train --init_from=chats --max_iters=1 --out_dir=second
exports_all() { # exports_all ARGUMENT...
  rm -rf chatting
  give --to=chatting "$@"
  for name in LICENSE generation_config.json chat_template.jinja additional_chat_templates/tools.jinja; do
    check "$*: $name is exported" cmp chat/$name chatting/$name
  done
  check "$*: a part of another tokenizer is exported" test ! -e chatting/special_tokens_map.json
}
exports_all --out_dir=chats
exports_all --out_dir=chats --checkpoint=latest
exports_all --out_dir=second
if command -v python3 >/dev/null; then  # checkpoints of older versions have the setting alone
  cp -r chats old
  check "an older checkpoint" python3 "$support/edit_checkpoint.py" old '"origin": "[^"]*/chat",\n *' ''
  check "its setting" python3 "$support/edit_checkpoint.py" old '"init_from": "[^"]*"' '"init_from": "auto:chat"'
  exports_all --out_dir=old
fi
give --out_dir=chats --to=chatting --overwrite --format=llm.c
give --out_dir=chats --to=weights --format=llm.c
check "llm.c's form has other files" test "$(ls weights)" = model.bin
mkdir plain && touch plain/LICENSE
refuses "setting 'to': 'plain' has a file LICENSE already" export --out_dir=chats --to=plain
refuses "setting 'to': expected a folder other than that of the model that the run began with, got 'chat'" export --out_dir=chats --to=chat --overwrite
rm -r chat chatting
give --out_dir=chats --to=chatting
check "files of a folder that is gone" test ! -e chatting/LICENSE
refuses "setting 'checkpoint': expected best, latest or the folder of a checkpoint (one with a file checkpoint.json), got 'step-99'. Whole checkpoints in 'out': step-4, step-2. --checkpoint=step-4 loads the newest of them" \
  sample --out_dir=out --checkpoint=step-99
# A signal leaves nothing of an export, which writes through no link and waits for the reader of no pipe.
train --n_layer=1 --n_head=2 --n_embd=64 --block_size=8 --max_iters=1 --out_dir=large
cp -r large killed && rm killed/config.json
patiently 60 "$nanogpt" sample --out_dir=killed --num_samples=1 --max_new_tokens=5 >output 2>&1 || fail "sample without config.json"
says "'killed/config.json' does not exist; using the latest checkpoint, 'killed/step-2'"
for planted in link pipe; do
  mkdir stopped && echo precious >victim
  if [[ $planted == link ]]; then ln -s "$PWD/victim" stopped/model.safetensors.tmp; else mkfifo stopped/model.safetensors.tmp; fi
  start_until_write env --default-signal=INT "$nanogpt" export --out_dir=large --to=stopped
  check "a $planted stays" test -f stopped/model.safetensors.tmp -a ! -L stopped/model.safetensors.tmp
  check "wrote through a link" test "$(cat victim)" = precious
  kill -INT "$run"
  kill -CONT "$run"
  wait "$run"
  check "SIGINT: another end" test $? -eq 130
  check "SIGINT leaves $(ls -A stopped)" test -z "$(ls -A stopped)"
  rmdir stopped
done

# Weights that do not fit.
refuses "setting 'n_layer': 3 contradicts the model of the weights 'hf', which has 2" train "${runs[@]}" --init_from=hf --n_layer=3
refuses "setting 'block_size': 9 contradicts" train "${runs[@]}" --init_from=hf --block_size=9
refuses "the weights of gpt2-xl were not found in any of models/gpt2-xl, $PWD/no_cache/models--gpt2-xl" train "${runs[@]}" --init_from=gpt2-xl
refuses "setting 'init_from': expected scratch" train "${runs[@]}" --init_from=nowhere
echo 'init_from = hf' >begin.conf
refuses "setting 'init_from': bench supports only scratch" bench begin.conf
refuses "setting 'to': expected the folder to write to" export --out_dir=out
refuses "setting 'to': expected a folder other than out_dir" export --out_dir=out --to=./out
refuses "setting 'checkpoint': expected best, latest or the folder" export --out_dir=out --to=x --checkpoint=step-77
check "an export that was refused has written" test ! -e x
head -c 5000 bin/model.bin >cut.bin
refuses "it is truncated" train "${runs[@]}" --ranks=3 --init_from=cut.bin
echo "a much larger vocabulary: ABCDEFGHIJKLMNOPQRSTUVWXYZ !@#%^&*()" | cat - text >more
"$nanogpt" prepare --dataset=more --data=more >output 2>&1 || fail "prepare more"
refuses "setting 'dataset': 'more' has a vocabulary of" train "${runs[@]}" --overwrite --dataset=more --init_from=hf
echo "$checks checks, $failures failures"
((failures == 0))
