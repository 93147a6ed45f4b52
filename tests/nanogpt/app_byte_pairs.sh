#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A model trained on GPT-2's kind of tokens keeps their files, and reads and writes text through them.
# skip-tsan
# programs: nanogpt
#
#   app_byte_pairs.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
export OPENBLAS_NUM_THREADS=1

# A vocabulary of all bytes, one merge and the marker, in the form of GPT-2's files: bytes that do not print are written as
# the characters from U+0100 on.
next=256
{
  printf '{'
  for byte in $(seq 0 255); do
    code=$byte
    if ((byte <= 32 || (byte >= 127 && byte <= 160) || byte == 173)); then code=$((next++)); fi
    case $byte in
      34 | 92) printf '%s' '"\' ;;
      *) printf '"' ;;
    esac
    if ((code < 128)); then printf "\\x$(printf %x "$code")"; else
      printf "\\x$(printf %x $((192 | code >> 6)))\\x$(printf %x $((128 | code & 63)))"
    fi
    printf '": %d, ' "$byte"
  done
  printf '"ab": 256, "<|endoftext|>": 257}'
} >e.json
printf '#version: 0.2\na b\n' >m.bpe
mkdir docs
for i in $(seq 1 40); do echo "document $i: abc abd" >"docs/$i.txt"; done

prepare=("$nanogpt" prepare --dataset=d --data=docs --tokenizer=gpt2 --encoder_json=e.json --vocab_bpe=m.bpe)
check "prepare" "${prepare[@]}" >output 2>&1
check "40 documents" grep -qx 'documents: 40' output
check "258 tokens" grep -qx 'vocab size: 258' output
cmp -s e.json data/d/encoder.json && cmp -s m.bpe data/d/vocab.bpe || fail "the tokenizer's files are not beside the tokens"
rm e.json m.bpe

train=("$nanogpt" train --dataset=d --n_layer=1 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=2
  --max_iters=1 --eval_iters=1 --out_dir=out)
check "train" patiently 120 "${train[@]}" >output 2>&1
mv data elsewhere  # a trained model needs it no more

begins_with() { # begins_with TEXT: one sample that continues it
  patiently 60 "$nanogpt" sample --out_dir=out --num_samples=1 --max_new_tokens=4 --start="$1" >output 2>errors || fail "sample from '$1'"
  check "the sample begins with what it continues: '$1'" cmp -s -n "${#1}" output <(printf '%s' "$1")
}
LC_ALL=C
begins_with 'ab'
begins_with 'abc<|endoftext|>x'
begins_with $'\xff\xe4\xb8 bytes'

# The marker is one token: within a block of 8 the letter before it counts. It would not if the marker were its 13 characters,
# as it does not before these 8.
continuation() { # continuation START FILE
  patiently 60 "$nanogpt" sample --out_dir=out --num_samples=1 --max_new_tokens=20 --start="$1" >output 2>errors || fail "sample from '$1'"
  tail -c "+$((${#1} + 1))" output >"$2"
}
continuation 'qoftext|>' q
continuation 'zoftext|>' z
check "what does not fit into the block changes nothing" cmp -s q z
continuation 'q<|endoftext|>' q
continuation 'z<|endoftext|>' z
check "the marker is one token" test "$(cmp -s q z; echo $?)" = 1

# Printed while they are drawn, the bytes are those of the whole text; a sample may end at the marker.
long() { patiently 60 "$nanogpt" sample --out_dir=out --num_samples=1 --max_new_tokens=1000 --temperature=2 --start=abc "$@" 2>errors || fail "sample $*"; }
long >output
check "the marker is drawn at all" grep -qaF '<|endoftext|>' output
long --stop_at_end=true >stopped
before=$(LC_ALL=C grep -abo -m 1 '<|endoftext|>' output | head -n 1 | cut -d : -f 1)
check "it ends elsewhere than at the marker" cmp -s stopped <(head -c "$before" output; printf '\n---------------\n')
# Its tokenizer goes with it, by HuggingFace's names, and is found there; so it is beside llm.c's file, or by its files.
said() { # said FILE ARGUMENT...: what a model says
  patiently 60 "$nanogpt" sample --num_samples=1 --max_new_tokens=8 --start=ab "${@:2}" >output 2>errors || fail "sample ${*:2}"
  mv output "$1"
}
said ours --out_dir=out
check "export" "$nanogpt" export --out_dir=out --to=hf >output 2>&1
check "vocab.json" cmp hf/vocab.json out/encoder.json
check "merges.txt" cmp hf/merges.txt out/vocab.bpe
check "the marker's id" grep -q '"eos_token_id": 257' hf/config.json
said theirs --init_from=hf
check "HuggingFace's folder says something else" cmp ours theirs
# Files beside the tokenizer go with a model that has the same tokens.
cp -r hf chat && echo '{"model_max_length": 8}' >chat/tokenizer_config.json
mv elsewhere data && check "train on" patiently 120 "${train[@]/%out/tuned}" --init_from=chat >output 2>&1 && mv data elsewhere
check "export of the tuned model" "$nanogpt" export --out_dir=tuned --to=tuned_hf >output 2>&1
check "tokenizer_config.json" cmp chat/tokenizer_config.json tuned_hf/tokenizer_config.json
mkdir bare
mv hf/config.json hf/model.safetensors bare
said bare_said --init_from=bare --encoder_json=hf/vocab.json --vocab_bpe=hf/merges.txt
check "with files that are named it says something else" cmp ours bare_said
check "export to llm.c" "$nanogpt" export --out_dir=out --to=bin --format=llm.c >output 2>&1
said bin_said --init_from=bin/model.bin
check "llm.c's file begins otherwise" cmp -n 2 bin_said ours
check "export to nanogpt" "$nanogpt" export --out_dir=out --to=own --format=nanogpt --checkpoint=latest >output 2>&1
said own_said --out_dir=own
check "our own folder says something else" cmp ours own_said

rm out/vocab.bpe
ends_in_error "$nanogpt" sample --out_dir=out
grep -qF "vocab_bpe: 'out/vocab.bpe' is missing" output || fail "a model without its tokenizer does not say so"

echo "$checks checks, $failures failures"
((failures == 0))
