#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nanogpt train leaves a log of the run that goes on when the run does, and nanogpt report makes pages of such logs.
# skip-tsan
# programs: nanogpt
#
#   app_run_log.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
export OPENBLAS_NUM_THREADS=1
for i in $(seq 1 300); do echo "the quick brown fox $i"; done >text
"$nanogpt" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
small=(train --dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=2
  --ranks=2 --eval_iters=1 --eval_interval=4 --log_interval=5 --warmup_iters=1)

lines() { grep -c "^{\"kind\":\"$1\".*}\$" "$2"; }  # lines KIND FILE: whole ones
expect() { check "$1: expected $2, got $3" test "$2" = "$3"; }  # expect WHAT EXPECTED ACTUAL

FSDP_PEAK_TFLOPS='' check "train" patiently 120 "$nanogpt" "${small[@]}" --max_iters=8 --out_dir=one --log_json=old.jsonl >output 2>&1
check "a peak that is not given is measured" grep -q 'measured sgemm peak: [0-9.]* GFLOP/s a rank (mfu is relative to it)' output
expect "every iteration is logged, whatever log_interval" 9 "$(lines iter one/log.jsonl)"
expect "evaluations" 3 "$(lines eval one/log.jsonl)"
expect "memory of two ranks, first" 2 "$(grep -m1 '"kind":"memory"' one/log.jsonl | grep -o '"peak_state"' | wc -l)"
expect "the last line says why the run ended" 1 "$(tail -n1 one/log.jsonl | grep -c '"kind":"stop","iter":9,"why":"max_iters"')"
expect "--log_json keeps its own lines" 2 "$(lines iter old.jsonl)"
for part in '"settings":{' '"given":\["out_dir"' '"environment":{' '"parameters":' '"program":"forward' '"plan":{"parameters":[1-9]'; do
  check "the first line has $part" grep -q "^{\"kind\":\"run\".*$part" one/log.jsonl
done
# Losses are means over the ranks: one rank that has both micro-steps sees the same, but for rounding.
check "one rank" patiently 120 "$nanogpt" "${small[@]}" --ranks=1 --max_iters=8 --out_dir=alone >output.alone 2>&1
losses() { sed -n 's/.*"iter","iter":[0-9]*,"loss":\([0-9.]*\),.*/\1/p' "$1"; }
expect "iterations with the losses of one rank" 9 \
  "$(paste <(losses alone/log.jsonl) <(losses one/log.jsonl) | awk '{ d = $1 - $2; if (d * d < 1e-10) ++n } END { print n }')"
printed=$(sed -n 's/^iter 5: loss \([0-9.]*\),.*/\1/p' output)
logged=$(sed -n 's/.*"iter":5,"loss":\([0-9.]*\),.*/\1/p' one/log.jsonl)
expect "the loss of iteration 5" "$printed" "$(printf '%.4f' "$logged")"
printed=$(sed -n 's/^iter 5: .*, mfu [0-9.]*%, norm \([0-9.]*\), lr .*/\1/p' output)
logged=$(sed -n 's/.*"iter":5,.*"grad_norm":\([0-9.]*\),.*/\1/p' one/log.jsonl)
expect "the gradient norm of iteration 5" "$printed" "$(printf '%.4f' "$logged")"
# The form that scripts written for nanoGPT's lines look for.
expect "nanoGPT's form" 2 "$(grep -cE '^iter [0-9]+: loss [0-9.]+, time [0-9.]+ms, mfu ([0-9.]+%|-),' output)"

# No utilisation is above 100 %: a rate that is reached replaces a lower peak. That is said once, of a given peak.
for verbose in '' --verbose; do
  check "a low peak" patiently 120 "$nanogpt" "${small[@]}" --max_iters=20 --peak_tflops=1e-9 ${verbose:+"$verbose"} --out_dir=low --overwrite >output 2>&1
  check "utilisation above 100 %" awk 'match($0, /mfu [0-9.]+/) && substr($0, RSTART + 4) + 0 > 100 { exit 1 }' output
  expect "utilisations above 1 in the log" 0 "$(grep -o '"mfu":[0-9.e+-]*' low/log.jsonl | cut -d: -f2 | awk '$1 > 1' | wc -l)"
  expect "the note on the peak" 1 "$(grep -c '^note: iteration [0-9]* reached [0-9.]* GFLOP/s a rank, above the given peak of ' output)"
done
check "bench with a low peak" patiently 120 "$nanogpt" bench "${small[@]:1:7}" --burn_in=1 --timed=1 --peak_tflops=1e-9 >output 2>&1
check "bench: utilisation above 100 %" grep -qE 'MFU: 100\.00%$' output

check "without clipping" patiently 120 "$nanogpt" "${small[@]}" --max_iters=1 --grad_clip=0 --out_dir=unclipped >output 2>&1
expect "no norm is measured" 2 "$(grep -c '"kind":"iter",.*"grad_norm":null,' unclipped/log.jsonl)"
if grep -q '^iter.*norm' output; then fail "a norm that nobody measured is printed"; fi

# Samples: the same text on any number of ranks and with layers that are computed again, and training goes on as without.
check "samples" patiently 120 "$nanogpt" "${small[@]}" --max_iters=8 --out_dir=speaks --sample_interval=4 --sample_tokens=20 >output 2>&1
expect "two samples" 2 "$(lines sample speaks/log.jsonl)"
check "printed" grep -qx 'sample before iteration 4:' output
check "with checkpointing" patiently 120 "$nanogpt" "${small[@]}" --max_iters=8 --out_dir=again --sample_interval=4 \
  --sample_tokens=20 --activation_checkpointing=true >output 2>&1
expect "the same samples" "$(grep '"kind":"sample"' speaks/log.jsonl)" "$(grep '"kind":"sample"' again/log.jsonl)"
expect "longer than a block" 20 "$(sed -n 's/.*"sample","iter":8,"text":"\(.*\)"}/\1/p' speaks/log.jsonl | sed 's/\\n/_/g' | tr -d '\n' | wc -m)"
expect "and the losses of a run without" "$(losses one/log.jsonl)" "$(losses speaks/log.jsonl)"
check "a page with a sample" "$nanogpt" report speaks >output 2>&1
check "shown" grep -q 'Written by the model before iteration 8' speaks/report.html
mv data/d/meta.json data/d/kept.json
ends_in_error "$nanogpt" "${small[@]}" --max_iters=8 --out_dir=mute --sample_interval=4
check "without a vocabulary" grep -q "setting 'sample_interval': the data set 'd' has no vocabulary" output
mv data/d/kept.json data/d/meta.json

printf '{"kind":"iter","iter":9,"lo' >>one/log.jsonl  # killed within a line
check "resume" patiently 120 "$nanogpt" "${small[@]}" --max_iters=12 --out_dir=one --init_from=resume --trace=one/t.json >output 2>&1
expect "the resumed run appends to the same log" 2 "$(lines run one/log.jsonl)"
expect "and begins on a line of its own" 13 "$(lines iter one/log.jsonl)"

check "report" "$nanogpt" report one >output 2>&1
check "it says where the page is" grep -qx 'wrote one/report.html' output
check "the torn line is mentioned" grep -q '1 line of the log could not be read' one/report.html
check "and the two starts" grep -q 'started 2 times' one/report.html
check "a resumed run is traced from its own third step on" grep -q 'Iteration 1[0-2]\(, the traced step of median length\)*\. ' one/report.html
cp -r one two
check "two runs, and a picture" "$nanogpt" report one two --to=both.html --svg=picture.svg >output 2>&1
for name in one two; do check "the page names $name" grep -q ">$name</span>" both.html; done
if command -v xmllint >/dev/null; then
  check "well-formed" xmllint --nonet --noout one/report.html both.html picture.svg
fi

# Another run's trace under the same name is not this one's step.
check "a trace over the old one" patiently 120 "$nanogpt" "${small[@]}" --max_iters=3 --out_dir=other --trace=one/t.json >output 2>&1
check "its own page has the step" "$nanogpt" report other >output 2>&1
check "and draws it" grep -q 'of median length' other/report.html
check "the older run's page" "$nanogpt" report one >output 2>&1
check "says whose the trace is" grep -q "one/t.json&#39; belongs to another run\." one/report.html
if grep -q 'of median length' one/report.html; then fail "another run's step is drawn"; fi

# The log as a table, and a page that is rewritten while the log grows.
check "a table" "$nanogpt" report one two --to=both.html --csv=runs.csv >output 2>&1
expect "its rows" $((1 + 2 * 13)) "$(wc -l <runs.csv)"
expect "its cells" 12 "$(awk -F, '{ print NF }' runs.csv | sort -u)"
check "tokens" grep -q '^one,12,384,' runs.csv
mkdir growing
"$nanogpt" report growing --watch >watched 2>&1 &
watcher=$!
until_there() {  # until_there PATTERN FILE: waits; a test that hangs is ended by ctest
  until grep -qs "$1" "$2"; do kill -0 $watcher 2>/dev/null || return 1; sleep 0.1; done
}
check "it waits for a log" until_there "^waiting: 'growing': expected the out_dir" watched
head -n 6 one/log.jsonl >growing/log.jsonl
check "a page that is loaded again" until_there 'http-equiv="refresh"' growing/report.html
cp growing/report.html earlier.html
cat one/log.jsonl >growing/log.jsonl
check "the page grows with the log" until_there 'started 2 times' growing/report.html
kill -INT $watcher
wait $watcher
expect "Ctrl-C ends it cleanly" 0 $?
check "it says where the page is" grep -qx 'wrote growing/report.html' watched
if grep -q 'http-equiv="refresh"' growing/report.html; then fail "a page that nobody rewrites is loaded again and again"; fi
mkdir diverged
sed 's/"loss":[0-9.]*/"loss":null/' one/log.jsonl >diverged/log.jsonl
check "a run that diverged" "$nanogpt" report diverged >output 2>&1
check "is told" grep -q '^warning: diverged: All of 13 training losses are null' output
check "on its page too" grep -q 'All of 13 training losses are null' diverged/report.html

mkdir empty
ends_in_error "$nanogpt" report
check "no folder" grep -q "expected the out_dir of a run" output
ends_in_error "$nanogpt" report empty
check "no log" grep -q "'empty': expected the out_dir of a training run" output
ends_in_error "$nanogpt" report one --to=no/such/page.html
ends_in_error "$nanogpt" report one --tilt=3

# A log that cannot be opened ends the run before training; one that cannot be written does not end it.
mkdir -p blocked/log.jsonl
ends_in_error "$nanogpt" "${small[@]}" --max_iters=2 --out_dir=blocked
check "names the file" grep -q "blocked/log.jsonl' cannot be written" output
if grep -q '^iter' output; then fail "trained before it looked at the log"; fi
# The log is a file: it goes through no link, and waits for no reader. So is the page in the run's folder.
echo precious >victim
mkdir planted
for planted in "ln -s $PWD/victim" "ln -s $PWD/nowhere" mkfifo; do
  $planted planted/log.jsonl
  ends_in_error "$nanogpt" "${small[@]}" --max_iters=2 --out_dir=planted
  check "names the log" grep -q "error: .*'planted/log.jsonl' cannot be written: it is a link, a pipe or a device, and the log of a run is a file; move it away" output
  ends_in_error "$nanogpt" report planted
  rm planted/log.jsonl
done
cp one/log.jsonl planted
ln -s "$PWD/victim" planted/report.html
check "a page beside the log" "$nanogpt" report planted >output 2>&1
check "a link stays in its place" test -f planted/report.html -a ! -L planted/report.html
check "wrote through a link" test "$(cat victim)" = precious -a ! -e nowhere
if [[ -e /dev/full ]]; then
  # Training goes on when files that settings name cannot be written; they are links here, and never the device itself.
  mkdir full && ln -s /dev/full full/json && ln -s /dev/full full/trace
  check "trains on" patiently 120 "$nanogpt" "${small[@]}" --max_iters=6 --log_interval=1 --out_dir=on --log_json=full/json \
    --trace=full/trace >output 2>errors
  expect "a line for each file" 2 "$(wc -l <errors)"
  for setting in log_json=json trace=trace; do
    check "names ${setting%=*} and its file" grep -q \
      "warning: setting '${setting%=*}': 'full/${setting#*=}' cannot be written: No space left on device; training goes on" errors
  done
  check "and does all iterations" grep -q '"kind":"stop","iter":7,"why":"max_iters"' on/log.jsonl
  patiently 120 "$nanogpt" bench --dataset=d --n_layer=1 --n_head=1 --n_embd=16 --block_size=8 --batch_size=2 --ranks=2 \
    --gradient_accumulation_steps=2 --burn_in=1 --timed=1 --json=full/json >output 2>&1
  expect "a bench without its file" 1 $?
  check "says which" grep -q "error: .*setting 'json': 'full/json' cannot be written: No space left on device" output
  ln -s /dev/full full/page
  "$nanogpt" report on --to=full/page >output 2>&1
  expect "a page that is not written" 1 $?
  check "is named" grep -q "'full/page' cannot be written: No space left on device" output
  check "the links are where they were" test -L full/page -a -L full/json -a -L full/trace
fi

echo "$checks checks, $failures failures"
((failures == 0))
