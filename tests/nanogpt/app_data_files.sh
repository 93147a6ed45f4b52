#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt prepare reads pipes, refuses other formats and leaves nothing behind when a signal ends it. Training reads several token
# files as one data set, resumes in them to the bit, checks their tokens once, and ends in order on all ranks where a token outside
# the vocabulary appears later.
# skip-tsan
# programs: nanogpt
#
#   app_data_files.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
export OPENBLAS_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
refuses() { # refuses MESSAGE COMMAND...
  ends_in_error "${@:2}"
  grep -qF -- "$1" output || fail "did not say '$1': ${*:2}"
  check "the message is no longer than a screen" test "$(wc -c <output)" -lt 2000
}
same() { check "$1" cmp "data/$2/train.bin" "data/$3/train.bin" && check "$1" cmp "data/$2/val.bin" "data/$3/val.bin"; }

# --- pipes and other formats --------------------------------------------------------------------------------------------------
"$nanogpt" prepare --dataset=pipe --data=- <text >output 2>&1 || fail "standard input from a file"
same "standard input from a file: other tokens" d pipe
cat text | "$nanogpt" prepare --dataset=pipe --data=- >output 2>&1 || fail "standard input from a pipe"
same "standard input from a pipe: other tokens" d pipe
"$nanogpt" prepare --dataset=pipe --data=<(cat text) --val_data=<(head -n 20 text) >output 2>&1 || fail "two pipes"
check "two pipes: train" test "$(wc -c <data/pipe/train.bin)" = $((2 * $(wc -c <text)))
check "two pipes: val" test "$(wc -c <data/pipe/val.bin)" = $((2 * $(head -n 20 text | wc -c)))
check "nothing else is beside the tokens" test "$(ls -A data/pipe)" = $'meta.json\ntrain.bin\nval.bin'
gzip -k text
refuses "'text.gz' is compressed by gzip, expected text: decompress it with zcat" "$nanogpt" prepare --dataset=none --data=text.gz
refuses "standard input is compressed by gzip" bash -c '"$1" prepare --dataset=none --data=- <text.gz' with "$nanogpt"
check "a failed prepare leaves a folder" test ! -e data/none
# A file of the wrong kind, one line of a megabyte, is not printed.
printf '{"%s": 1}' "$(head -c 1000000 /dev/zero | tr '\0' x)" >line
refuses "line, line 1: expected 'name = value'" "$nanogpt" train line
printf '{"text": 1}' >e.json
refuses "expected a unique id below" "$nanogpt" prepare --dataset=none --data=text --tokenizer=gpt2 --encoder_json=line --vocab_bpe=line
refuses "with --val_data, all of --data is used for training" "$nanogpt" prepare --dataset=none --data=text --val_data=text --val_fraction=0.5
refuses "'val_data': --data reads standard input already" "$nanogpt" prepare --dataset=none --data=- --val_data=-

# --- signals: prepare waits for a pipe that nobody writes to, or reads ----------------------------------------------------------
mkfifo nobody
for signal in INT TERM HUP; do
  start env --default-signal="$signal" "$nanogpt" prepare --dataset=new --data=nobody
  wait_for test -e data/new/.prepare.lock || fail "prepare does not begin"
  if [[ $signal == INT ]]; then
    check "others may lock it" test "$(stat -c %a data/new/.prepare.lock)" = 600
    refuses "'data/new/.prepare.lock' is locked: another prepare is writing there: wait for it, or choose another --dataset" "$nanogpt" prepare --dataset=new --data=text
  fi
  kill -s "$signal" "$run"
  wait "$run"
  check "$signal: another end" test $? -eq $((128 + $(kill -l "$signal")))
  # ThreadSanitizer delays handlers, and the process may end by the signal before its own has removed the folder.
  if grep -q __tsan_init "$nanogpt"; then rm -rf data/new; else check "$signal leaves the folder" test ! -e data/new; fi
done
mkdir -p data/old && mkfifo data/old/meta.json.tmp # it would wait for ever for a reader
ln -s "$PWD/text" data/old/train.bin.tmp
cp text text.before
start_until_write env --default-signal=INT "$nanogpt" prepare --dataset=old --data=text
check "not all files are there: $(ls data/old)" test -f data/old/meta.json.tmp -a -f data/old/val.bin.tmp -a ! -L data/old/train.bin.tmp
check "wrote through a link" cmp text.before text
kill -s INT "$run"
kill -s CONT "$run"
wait "$run"
check "SIGINT: another end" test $? -eq 130
check "SIGINT leaves temporary files" test -z "$(ls -A data/old)"

# --- several token files -------------------------------------------------------------------------------------------------------
mkdir data/shards
cp data/d/meta.json data/shards
head -c 2000 data/d/train.bin >data/shards/web_train_000001.bin
tail -c +2001 data/d/train.bin | head -c 60 >data/shards/web_train_000002.bin
tail -c +2061 data/d/train.bin >data/shards/web_train_000010.bin
cp data/d/val.bin data/shards/web_val_000000.bin
small=(--n_layer=1 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=2 --eval_iters=2 --eval_interval=100
  --log_interval=1 --lr_decay_iters=60 --warmup_iters=2 --threads=1)
train() { patiently 120 "$nanogpt" train "${small[@]}" "$@" >output 2>&1 || fail "train $*: $?"; }
train --dataset=shards --max_iters=60 --out_dir=whole
check "says that there are three files" grep -q '^train tokens: .*, in 3 files, .*web_train_000001.bin. to .*web_train_000010.bin' output
train --train_data='data/shards/web_train_*.bin' --max_iters=30 --out_dir=parts
train --train_data=data/shards --val_data='data/shards/web_val*' --max_iters=60 --out_dir=parts --init_from=resume
check "resumed in several files: other weights" cmp whole/model.safetensors parts/model.safetensors
refuses "setting 'train_data': expected token files, but no file matches 'data/shards/no*'" "$nanogpt" train "${small[@]}" --train_data='data/shards/no*'
refuses "is too long for 'data/shards/web_train_000002.bin': expected a file with 33 or more tokens" "$nanogpt" train "${small[@]}" --dataset=shards --block_size=32
"$nanogpt" prepare --dataset=none --data=text --val_fraction=0 >output 2>&1 || fail "no validation data"
check "says what training needs then" grep -q 'train needs --val_data=FILE' output
refuses "'data/none/val.bin' is missing" "$nanogpt" train "${small[@]}" --dataset=none
train --dataset=none --val_data=data/d/val.bin --max_iters=1 --out_dir=other

# --- tokens are checked once -----------------------------------------------------------------------------------------------------
cp -r data/d data/large
head -c $((17 << 20)) /dev/zero >data/large/train.bin
train --dataset=large --max_iters=1 --out_dir=large
check "nothing is remembered" test -e data/large/.nanogpt_tokens.json
touch -r data/large/train.bin time
printf '\377\377' | dd of=data/large/train.bin bs=1 seek=$(((17 << 20) - 2)) conv=notrunc 2>/dev/null
touch -r time data/large/train.bin # as it was, for all that path, size and time tell
train --dataset=large --max_iters=1 --out_dir=large_again
touch data/large/train.bin
refuses "'data/large/train.bin' has token 65535 at position 8912895, outside the vocabulary" "$nanogpt" train "${small[@]}" --dataset=large

# --- machines with other files of the same name ------------------------------------------------------------------------------
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  mkdir -p elsewhere/data
  differs() { # differs WHAT MESSAGE: rank 1 works in `elsewhere`
    patiently 120 mpirun --oversubscribe --bind-to none -n 1 "$nanogpt" train "${small[@]}" --dataset=d --max_iters=1 --out_dir="$PWD/together" : \
      -wdir "$PWD/elsewhere" -n 1 "$nanogpt" train "${small[@]}" --dataset=d --max_iters=1 --out_dir="$PWD/together" >output 2>&1
    check "$1: ended with $?" test $? -ne 0
    check "$1: does not say what differs" grep -qE "setting 'dataset': rank 1 on .* has other data than rank 0 under the same name: $2" output
    if grep -q '^step 0' output; then fail "$1: trains"; fi
  }
  again() { rm -rf elsewhere/data/d && cp -r data/d elsewhere/data; }
  again
  printf '\1' | dd of=elsewhere/data/d/train.bin conv=notrunc 2>/dev/null # the first token, to another of the vocabulary
  differs "another token" "training data: [0-9]+ tokens in 1 file, xxh64 [0-9a-f]+ of samples; rank 0 has training data: "
  again
  truncate -s -2 elsewhere/data/d/val.bin
  differs "a token less" "validation data: [0-9]+ tokens in 1 file"
  again
  sed -i 's/"q"/"Q"/g' elsewhere/data/d/meta.json
  differs "another vocabulary" "vocabulary: [0-9]+ tokens, xxh64 [0-9a-f]+; rank 0 has vocabulary"
fi

# --- tokens that appear during a run ---------------------------------------------------------------------------------------------
launches=("" "--ranks=2")
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then launches+=("mpirun"); fi
for launch in "${launches[@]}"; do
  rm -rf data/changing && cp -r data/d data/changing
  command=("$nanogpt" train "${small[@]}" --dataset=changing --out_dir="changing$launch" --max_iters=100000000)
  if [[ $launch == mpirun ]]; then command=(mpirun --oversubscribe --bind-to none -n 2 "${command[@]}"); fi
  if [[ $launch == --* ]]; then command+=("$launch"); fi
  start patiently 120 "${command[@]}"
  wait_for grep -q '^iter 1:' output || fail "'$launch': does not train"
  head -c "$(wc -c <data/d/train.bin)" /dev/zero | tr '\0' '\377' | dd of=data/changing/train.bin conv=notrunc 2>/dev/null
  wait "$run"
  code=$?
  check "'$launch': ended with $code" test "$code" -ge 1 -a "$code" -lt 124
  check "'$launch': the token is not named" grep -qE "'data/changing/train.bin' has token 65535 at position [0-9]+, outside the vocabulary of [0-9]+: the file has changed" output
  if grep -qE 'Segmentation|AddressSanitizer|terminate called' output; then fail "'$launch': no ordered end"; fi
done

echo "$checks checks, $failures failures"
((failures == 0))
