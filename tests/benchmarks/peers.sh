#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# benchmarks/peers/compare.py with stubs for trainers: a ratio that is known is found through drift, sides take turns and are
# stopped meanwhile, with all that they have started; one that dies, hangs or does other work is reported, and nothing stays
# behind. Then nanogpt beside itself. No speed is judged.
# programs: nanogpt
# labels: full
# timeout: 300
# skip-sanitizers
#
#   peers.sh BINARY_DIR
set -uo pipefail

sources=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$sources/tests/support/script.sh"

python=$(command -v python3) || { echo "skipped: no python3"; exit 77; }
nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
export STUBS=$folder
for name in ours theirs; do
  cp "$sources/tests/benchmarks/peers_stub.py" $name
  chmod 755 $name
done

peers() { patiently 120 "$python" "$sources/benchmarks/peers/compare.py" "$@" >output 2>&1; }
stubs() { # stubs CODE [ARGUMENT...]: compares the stubs; it must end with CODE, and leave none of them
  local code=$1
  shift
  rm -f notes ./*.count
  checks=$((checks + 1))
  peers --ours=./ours --theirs=./theirs --model=tiny "$@"
  local ended=$?
  ((ended == code)) || fail "ended with $ended, not $code: $*"
  left
}
left() { # nothing that was started from here is there any more
  local left
  left=$(grep -lsa "$folder/[ot]" /proc/[0-9]*/cmdline)
  check "left: $(for file in $left; do sed 's/).*//' "${file%cmdline}stat"; done)" test -z "$left"
}
says() { check "does not say '$1'" grep -qF -- "$1" output; }
refuses() { # refuses MESSAGE ARGUMENT...: before anything is started
  local message=$1
  shift
  rm -f notes
  checks=$((checks + 1))
  peers --model=tiny "$@"
  local ended=$?
  ((ended == 2)) || fail "ended with $ended, not 2: $*"
  says "$message"
  check "something was started: $*" test ! -e notes
}

# --- a known ratio ------------------------------------------------------------------------------------------------------
OURS_SECONDS=0.008 THEIRS_SECONDS=0.010 THEIRS_THREADS=3 stubs 0 --pairs=20 --json=result.json
says "float32, 1 thread a rank, strategy ?"
says "float32, 3 threads a rank, strategy ?"
says "median of paired ratios"
check "a side ran while the other had the cores" test "$(grep -c meantime notes)" -eq 0
check "a side's processes did not run at all" test -s ours.count -a -s theirs.count
"$python" - <<'PY' >output 2>&1 || fail "the result"
import json

found = json.load(open("result.json"))["comparisons"][0]
low, high = found["interval"]
assert len(found["ratios"]) == 20, found["ratios"]
assert low <= 1.25 <= high and high - low < 0.02, (low, found["ratio"], high)
assert low <= found["ratio"] <= high, found["ratio"]
assert found["cpu_seconds_while_waiting"] == 0, found["cpu_seconds_while_waiting"]
cores = {}
orders = []
for line in open("notes"):
    name, what, *words = line.split(maxsplit=2)
    if what == "cores":
        cores[name] = words[0]
    elif what == "threads":
        assert words[0].split() == ["1", "1"], line
    elif what == "piece":
        orders.append((name, int(words[0])))
assert cores["ours"] == cores["theirs"] and len(json.loads(cores["ours"])) == 1, cores
trials, turns = orders[:4], orders[4:]
assert trials == [("ours", 1)] * 2 + [("theirs", 1)] * 2, trials
assert [name for name, _ in turns] == ["ours", "theirs", "theirs", "ours"] * 10, turns
for name in ("ours", "theirs"):
    steps = {count for who, count in turns if who == name}
    assert len(steps) == 1 and 0 < steps.pop() < 125, turns  # a second's worth by the trial, whose clock drifts
    speeds = [piece["steps"] * 64 / piece["seconds"] for piece in found[name]["pieces"]]
    assert abs(found[name]["lowest"] / min(speeds) - 1) < 1e-9 and found[name]["loss"] == 4.0
PY
OURS_SECONDS=5 THEIRS_SECONDS=5 stubs 0 --pairs=1
check "a piece has at least one step" test "$(grep -c 'piece 1$' notes)" -eq 6

# --- sides that fail ----------------------------------------------------------------------------------------------------
THEIRS_DIE=3 stubs 1 --pairs=4
says "other: it ended with code 7 after 3 pieces"
says "out of luck"
OURS_DIE=-2 stubs 1 --pairs=4
says "nanogpt: it ended by signal 9 after 2 pieces"
THEIRS_KILL=2 stubs 1 --pairs=4 # while it is stopped
says "nanogpt: it ended by signal 9 after"
OURS_HANG=2 stubs 1 --pairs=4 --answer-seconds=1
says "nanogpt: no answer within 1 s"
says "no part of the protocol"
THEIRS_SHAPE=1001 stubs 1
says "the sides do different work: 1000 parameters against 1001"
OURS_TYPE=16 stubs 1
says "the sides compute in different types: float16 against float32"
stubs 2 --json=no/folder.json
says "No such file or directory: 'no/folder.json'"
mkdir temporary
for which in TERM:143 HUP:129; do
  rm -f notes ./*.count
  TMPDIR=$folder/temporary OURS_HANG=0 "$python" "$sources/benchmarks/peers/compare.py" --ours=./ours --theirs=./theirs --model=tiny >output 2>&1 &
  harness=$!
  for _ in $(seq 600); do [[ $(grep -c "ours piece" notes 2>/dev/null) -gt 0 ]] && break; sleep 0.1; done
  kill -"${which%:*}" $harness
  wait $harness
  check "SIG${which%:*} does not end it" test $? -eq "${which#*:}"
  left
  check "SIG${which%:*} leaves $(ls temporary)" test -z "$(ls temporary)"
done

# --- llm.c, whose steps are read from what it prints ----------------------------------------------------------------------
cat >train_gpt2 <<'SH'
#!/usr/bin/env bash
[[ -n ${LLMC_FAILS-} ]] && { echo "Error: no model file"; exit 1; }
printf '%s\n' '[GPT-2]' 'max_seq_len: 1024' "num_parameters: $((LLMC_PARAMETERS + (1024 - 64) * 768))" # wide 768; nanogpt has 64 positions
for i in {0..9}; do echo "step $i: train loss 5.0 (took $((i == 0 ? 9000 : 100)).0 ms)"; done
sleep 600
SH
chmod 755 train_gpt2
# 64 tokens in 0.008 s by 1 to 3, against 256 in 0.1 s.
checks=$((checks + 1))
export LLMC_PARAMETERS=1000
OURS_SECONDS=0.008 peers --ours=./ours --model=124m --peers=llmc --llmc=./train_gpt2 --pairs=6 --json=llmc.json || fail "llm.c: ended with $?"
"$python" - <<'PY' >output 2>&1 || fail "llm.c's result"
import json

found = json.load(open("llmc.json"))["comparisons"][0]
assert found["theirs"]["tokens_per_s"] == found["theirs"]["lowest"] == 2560 and len(found["theirs"]["seconds"]) >= 6, found["theirs"]
assert len(found["ours"]["pieces"]) == 6 and 64 / 0.024 * 0.98 < found["ours"]["tokens_per_s"] < 64 / 0.008 * 1.02, found["ours"]
assert found["interval"][0] <= found["ratio"] <= found["interval"][1], found
PY
checks=$((checks + 1))
LLMC_FAILS=1 peers --ours=./ours --model=124m --peers=llmc --llmc=./train_gpt2 --pairs=2
check "llm.c that fails" test $? -eq 1
says "Error: no model file"
checks=$((checks + 1))
LLMC_PARAMETERS=1001 peers --ours=./ours --model=124m --peers=llmc --llmc=./train_gpt2 --pairs=2
check "llm.c with another model" test $? -eq 1
says "the sides do different work: 1,000 parameters with 64 positions against 1,001"

# --- answers ------------------------------------------------------------------------------------------------------------
core=$("$python" -c 'import os; print(min(os.sched_getaffinity(0)))')
refuses "--ours: there is no './nowhere'" --ours=./nowhere --theirs=./theirs
refuses "--theirs: './output' is no program" --ours=./ours --theirs=./output
refuses "expected models out of 124m, char, tiny, got 'gpt3'" --model=gpt3
refuses "expected cores like 0,2-3, got 'x'" --cores=x
refuses "--cores: this program may use" --ours=./ours --theirs=./theirs --cores=4095
refuses "1 rank of 2 threads: expected 2 cores, got 1" --ours=./ours --theirs=./theirs --threads=2 --cores="$core"
refuses "2 ranks of 2048 threads: expected 4096 cores, there are" --ours=./ours --theirs=./theirs --pairing=sharded --threads=2048
refuses "expected a number above 0, got '0'" --pairs=0
for words in '' --dry-run; do
  refuses "--mpirun: '/no/such' is no program that can be run; 'none' lets ranks be threads" --ours=./ours --theirs=./theirs --mpirun=/no/such $words
done
if (($(nproc) > 1)); then
  OURS_VERSION="MPI: not built in" refuses "--mpirun: './ours' was built without MPI; 'none' lets ranks be threads" \
    --ours=./ours --theirs=./theirs --pairing=sharded --mpirun=./theirs
  check "--mpirun=none" peers --ours=./ours --theirs=./theirs --model=tiny --pairing=sharded --mpirun=none --dry-run
  says "--ranks=2"
fi
refuses "only where --llmc=PATH names it" --ours=./ours --peers=llmc
refuses "expected --model=124m --pairing=1rank" --ours=./ours --peers=llmc --llmc=./train_gpt2 --pairing=sharded
printf '#!/bin/sh\nexit 1\n' >no_torch
chmod 755 no_torch
refuses "'./no_torch' has no torch: run './no_torch -m pip install torch'" --ours=./ours --python=./no_torch --peers=eager
head -c 100 /dev/urandom >alien
refuses "token ids as uint16, below this model's vocabulary of 65" --ours=./ours --theirs=./theirs --data=alien
rm -f notes
check "--dry-run" peers --ours=./ours --theirs=./theirs --model=char,tiny --dry-run
says "/theirs bench --pieces=true"
says "--n_embd=384"
says "OPENBLAS_NUM_THREADS=1"
check "--dry-run starts something" test ! -e notes
check "--list" peers --ours=./ours --python=./no_torch --list
says "not there (./no_torch)"

# --- nanogpt beside itself ------------------------------------------------------------------------------------------------
quick=(--ours="$nanogpt" --theirs="$nanogpt" --model=tiny --pairs=2 --piece-seconds=0.01 --burn-in=1)
pairings=(1rank)
(($(nproc) < 2)) || pairings+=(sharded)
for pairing in "${pairings[@]}"; do
  check "nanogpt beside itself, $pairing" peers "${quick[@]}" --pairing="$pairing"
  says "104,832 parameters"
done
small=(bench --pieces=true --n_layer=1 --n_head=1 --n_embd=16 --block_size=8 --batch_size=1 --gradient_accumulation_steps=2 --burn_in=0)
for words in 0 -1 1x ''; do
  check "nanogpt takes '$words' for a number of steps" test "$(printf '%s\n' "$words" | "$nanogpt" "${small[@]}" --ranks=2 2>&1 >/dev/null)" = \
    "nanogpt: error: --pieces: expected a line with a number of steps, got '$words'"
done
printf '2\n1\n' | "$nanogpt" "${small[@]}" --ranks=2 >output 2>&1
check "nanogpt ends with its input" test "${PIPESTATUS[1]}" -eq 0
check "a line for each piece" test "$(grep -c '^{"kind":"piece","steps":[12],"seconds":[0-9.e-]*,"loss":[0-9.]*}$' output)" -eq 2

echo "$checks checks, $failures failures"
exit $((failures != 0))
