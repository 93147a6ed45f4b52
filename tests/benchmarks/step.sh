#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_step at tiny sizes: the figures of a step and of kernels alone are there and agree with each other, classes add
# up, bad flags end with a message. No speed is judged. Where PyTorch is installed, pytorch_step.py has the same model.
# programs: bench_step
# timeout: 300
# skip-sanitizers
#
#   step.sh BINARY_DIR
set -uo pipefail

sources=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$sources/tests/support/script.sh"

program=$1/benchmarks/step/bench_step
enter "$program"

refuses() { # refuses MESSAGE COMMAND...: ends by itself, not with 0, and says MESSAGE once
  local message=$1
  shift
  ends_in_error "$@"
  [[ $(grep -cF -- "$message" output) == 1 ]] || fail "did not say '$message' once: $*"
}

tiny=(--n_layer=2 --n_head=2 --n_embd=32 --block=16 --batch=3 --vocab_size=200)
quick=(--cache_kib=64 --gemm_size=64 --repeats=3 --burn_in=1 --timed=3)

for accumulate in 1 2; do
  checks=$((checks + 1))
  patiently 120 "$program" "${tiny[@]}" "${quick[@]}" --accumulate=$accumulate --profiled=2 --json=step_$accumulate.json >output 2>&1 ||
    fail "ended with $? at $accumulate micro-steps"
  for figure in '^time per step: [0-9.]* ms' '^tokens/s: [0-9.]*$' '^MFU: [0-9.]*% of' '^memory: [0-9.]* GB' '^loss: 5\.' '^  sum ' '^  rest of the step '; do
    grep -q "$figure" output || fail "no line like '$figure'"
  done
done
checks=$((checks + 1))
patiently 120 "$program" "${tiny[@]}" "${quick[@]}" --profiled=0 >output 2>&1 || fail "ended with $? without a profile"
grep -q 'by kernel class' output && fail "a profile that nobody asked for"
# In bf16, where oneDNN is built in; with heads wide enough for attention in tiles.
checks=$((checks + 1))
patiently 120 "$program" --n_layer=2 --n_head=2 --n_embd=64 --block=16 --batch=3 --vocab_size=200 "${quick[@]}" --dtype=bfloat16 --profiled=1 >output 2>&1 ||
  grep -q 'built without oneDNN' output || fail "ended with $? in bf16"
grep -qE '^loss: 5\.|without oneDNN' output || fail "no loss in bf16"
checks=$((checks + 1))
patiently 120 "$program" "${tiny[@]}" "${quick[@]}" --kernels --json=kernels.json >output 2>&1 || fail "ended with $? at --kernels"

python=$(command -v python3) && { "$python" - <<'PY' >output 2>&1 || fail "the JSON files"; }
import json

layers, width, block, batch, vocabulary = 2, 32, 16, 3, 200
for micro in (1, 2):
    step = json.load(open(f"step_{micro}.json"))
    parameters = (vocabulary + block) * width + layers * (12 * width * width + 2 * width) + width
    assert step["parameters"] == parameters, (step["parameters"], parameters)
    tokens = micro * batch * block
    assert abs(step["tokens_per_s"] * step["time_ms"] / 1e3 / tokens - 1) < 1e-9, step
    flop = tokens * (6 * (parameters - block * width) + 12 * layers * width * block)
    assert abs(step["mfu"] * step["peak_flops_per_s"] * step["time_ms"] / 1e3 / flop - 1) < 1e-9, step
    assert 0 < step["account_bytes"] <= step["peak_bytes"], step
    classes = {row["class"]: row for row in step["classes"]}
    # Every class of a step on one rank has launches, and every kernel is in a class that is named.
    for name, row in classes.items():
        assert (row["launches"] > 0) == (name != "collectives"), row
        assert row["ms"] > 0 or name == "collectives", row
    kernels = step["kernels"]
    assert {k["class"] for k in kernels} <= set(classes), kernels
    for name, row in classes.items():
        ms = sum(k["ms"] for k in kernels if k["class"] == name)
        assert abs(row["ms"] - ms) <= 1e-9 + 1e-9 * ms, (row, ms)
    assert {k["kernel"] for k in kernels if k["class"] == "other"} <= {"copy"}, kernels
    # 4 linear layers a block and the head, each with one product forward and two backward.
    assert classes["matrix products"]["launches"] == micro * 3 * (4 * layers + 1), classes
    need = classes["matrix products"]["need_flop"]
    assert need == 6 * tokens * (12 * layers * width * width + vocabulary * width), need
    # All but the copies of token ids run one after another on the compute stream, within the step.
    assert 0 < sum(row["ms"] for name, row in classes.items() if name != "other") <= step["profiled_ms"], step
rows = {row["kernel"]: row for row in json.load(open("kernels.json"))["rows"]}
for name in ("LayerNorm forward", "GELU backward, in place", "classifier, loss and gradient", "AdamW", "embedding backward",
             "cast fp32 to bf16", "attention forward", "attention backward"):
    assert rows[name]["us"] > 0 and rows[name]["of_copy"] > 0, name
assert rows["attention backward"]["tflops"] > 0 and rows["AdamW"]["tflops"] is None, rows
PY

refuses "--model" "$program" --model=gpt3
refuses "--dtype" "$program" --dtype=bfloat17
refuses "expected a multiple of the 5 heads" "$program" --n_head=5 --n_embd=32
refuses "--timed" "$program" --timed=0
refuses "--nonsense" "$program" --nonsense
refuses "cannot write" "$program" "${tiny[@]}" "${quick[@]}" --json=/nowhere/out.json

script=$sources/benchmarks/step/pytorch_step.py
if [[ -n $python ]]; then
  checks=$((checks + 1))
  "$python" -c 'import ast, sys; ast.parse(open(sys.argv[1]).read())' "$script" >output 2>&1 || fail "pytorch_step.py does not parse"
fi
if [[ -n $python ]] && "$python" -c 'import torch' 2>/dev/null; then
  checks=$((checks + 1))
  patiently 200 "$python" "$script" "${tiny[@]}" --burn_in=1 --timed=2 --variant=eager --dtype=float32 --device=cpu --json=torch.json >output 2>&1 ||
    fail "pytorch_step.py ended with $?"
  "$python" - <<'PY' >output 2>&1 || fail "pytorch_step.py has other figures"
import json

ours, theirs = json.load(open("step_1.json")), json.load(open("torch.json"))
assert ours["parameters"] == theirs["parameters"], (ours["parameters"], theirs["parameters"])
flop = [run["mfu"] * run["peak_flops_per_s"] * run["time_ms"] for run in (ours, theirs)]
assert abs(flop[0] / flop[1] - 1) < 1e-9, flop
assert abs(ours["loss"] - theirs["loss"]) < 0.2, (ours["loss"], theirs["loss"])
missing = {key for key in ours if key not in theirs} - {
    "copy_bytes_per_s", "gemm_flops_per_s", "working_set_bytes", "account_bytes", "peak_bytes", "profiled_ms", "classes", "kernels"}
assert not missing, missing
PY
else
  echo "without PyTorch: pytorch_step.py was read, not run"
fi

echo "$checks checks, $failures failures"
exit $((failures != 0))
