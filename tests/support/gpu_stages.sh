# shellcheck shell=bash disable=SC2154  # its variables are tests/gpu.sh's
# SPDX-License-Identifier: Apache-2.0
# The stages of tests/gpu.sh, a function each. It ends with 0, or 77: skipped, 78: not part of this configuration, else
# failed. The line that it leaves in $note is in the table. Runs in the repository's root, until work_folder.

is_there() { ctest --test-dir "$build" -N -R "^$1\$" 2>/dev/null | grep -q 'Total Tests: 1$'; }
built() { # built PROGRAM
  [[ -x $1 ]] || { echo "$1 is not part of this configuration (are OpenBLAS, CLI11 and nlohmann-json installed?)"; return 1; }
}
has_torch() { python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null || { echo "python3 has no torch that sees a GPU"; return 1; }; }
work_folder() { # goes to a folder that is removed when the stage ends
  root=$PWD
  work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT && cd "$work" || return 1
}

# Programs of the chosen stages that this configuration has.
wanted() {
  local stage name there names=()
  for stage in "${chosen[@]}"; do
    case $stage in
      build) ((${#chosen[@]} == 1)) && names+=("${tests[@]}" nanogpt bench_step_cuda) ;;
      *check) names+=("${kernels[@]}") ;;
      *check_nanogpt) names+=("${trainer_kernels[@]}") ;;
      strategies | devices | shakespeare) names+=(nanogpt) ;;
      step | kernels | attention) names+=(bench_step_cuda) ;;
      pytorch) ;;
      *) names+=("$stage") ;;
    esac
  done
  there=$(cmake --build "$build" --target help 2>/dev/null)
  for name in $(printf '%s\n' ${names[@]+"${names[@]}"} | sort -u); do
    grep -qE "(^|[^[:alnum:]_])$name(:.*)?\$" <<<"$there" && echo "$name"
  done
}

run_build() {
  cmake --preset cuda -B "$build" -DCMAKE_CUDA_FLAGS_RELWITHDEBINFO=-O3 "${options[@]}" || return 1
  local targets
  mapfile -t targets < <(wanted)
  ((${#targets[@]} == 0)) || cmake --build "$build" --parallel "$(nproc)" --target "${targets[@]}"
}

run_test() {
  is_there "$1" || { echo "$1 is not part of this configuration (is NCCL installed?)"; return 78; }
  local output code
  output=$(ctest --test-dir "$build" -R "^$1\$" --no-tests=error --output-on-failure --timeout $((limit - 10)) 2>&1)
  code=$?
  echo "$output"
  ((code == 0)) && grep -q 'Skipped' <<<"$output" && return 77
  return $code
}

run_sanitizer() {
  command -v compute-sanitizer >/dev/null || { echo "compute-sanitizer is not installed"; return 78; }
  local name program names=("${kernels[@]}") checked=0
  [[ $1 == *_nanogpt ]] && names=("${trainer_kernels[@]}")
  for name in ${names[@]+"${names[@]}"}; do
    is_there "$name" || continue
    program=$(find "$build" -name "$name" -type f -perm -u+x | head -n 1)
    echo "== ${1%_nanogpt} of $name"
    # Left to the plain run: tests tagged [large], and the allocation that is meant to fail.
    compute-sanitizer --tool "${1%_nanogpt}" --error-exitcode 9 --report-api-errors no "$program" \
      '~[large]' || { echo "FAILED: $1 of $name"; return 1; }
    checked=$((checked + 1))
  done
  ((checked)) || { echo "no program to check"; return 78; }
  echo "$checked programs" >"$note"
}

# prepared NAME FILE: the token files of a text, in data/NAME
prepared() { "$nanogpt" prepare --dataset="$1" --data="$2" >prepare.txt 2>&1 || { cat prepare.txt; echo "FAILED: nanogpt prepare"; return 1; }; }
repository_text() { cat "$root"/README.md "$root"/docs/*.md >text.txt; }

# losses LOG: iteration and loss of every logged line, as they were written
losses() {
  sed -nE 's/.*"kind":"iter","iter":([0-9]+),"loss":([^,]+),.*/iter \1 \2/p
           s/.*"kind":"eval","iter":([0-9]+),"train_loss":([^,]+),"val_loss":([^,]+),.*/eval \1 \2 \3/p' "$1"
}
# train NAME LINES SETTINGS...: trains, and leaves the losses, so many lines, in NAME.losses
train() {
  local run=$1 lines=$2
  shift 2
  "$nanogpt" train --log_json="$run.json" --out_dir="out-$run" --always_save_checkpoint=false "$@" >"$run.txt" 2>&1 ||
    { tail -n 20 "$run.txt"; echo "FAILED: run $run ended with an error: $*"; return 1; }
  losses "$run.json" >"$run.losses"
  (($(wc -l <"$run.losses") == lines)) || { echo "FAILED: run $run logged $(wc -l <"$run.losses") lines, not $lines"; return 1; }
  ! grep -q null "$run.losses" || { echo "FAILED: run $run has a loss that is not finite"; return 1; }
}
small=(--dataset=text --n_layer=4 --n_head=4 --n_embd=256 --block_size=128 --batch_size=4 --learning_rate=1e-3
       --warmup_iters=5 --eval_iters=2 --log_interval=1)

# All strategies are to give the same losses, bit by bit.
run_strategies() {
  built "$nanogpt" || return 78
  local ranks dtype strategy runs=0 failed=0
  work_folder && repository_text && prepared text text.txt || return 1
  for dtype in float32 bfloat16; do
    for ranks in 2 4; do
      for strategy in full_shard shard_grad_op no_shard hybrid_shard; do
        local run=$dtype-$ranks-$strategy group=()
        [[ $strategy == hybrid_shard ]] && group=(--shard_group=$((ranks / 2)))
        train "$run" 24 "${small[@]}" --device=cuda --dtype=$dtype --ranks=$ranks --gradient_accumulation_steps=$ranks \
          --max_iters=20 --eval_interval=10 --strategy=$strategy ${group[@]+"${group[@]}"} || { failed=$((failed + 1)); continue; }
        runs=$((runs + 1))
        cmp -s "$dtype-$ranks-full_shard.losses" "$run.losses" && continue
        failed=$((failed + 1))
        echo "FAILED: $run differs from full_shard:"
        diff "$dtype-$ranks-full_shard.losses" "$run.losses" | head -n 4
      done
      echo "$dtype, $ranks ranks: $(sed -n '/^iter/h; ${x;p}' "$dtype-$ranks-full_shard.losses")"
    done
  done
  echo "$runs runs, $failed differ or failed" >"$note"
  ((failed == 0))
}

# The host's losses and the GPU's in fp32, 20 of them: within 1e-4 relative (two BLAS kernel sets on the host: 3e-7). The
# GPU's in fp32 and bfloat16 over 500 steps, as means of 50: within 2 %, so that a mistake shows; the table says how close
# they are.
run_devices() {
  built "$nanogpt" || return 78
  work_folder && repository_text && prepared text text.txt || return 1
  local once=("${small[@]}" --gradient_accumulation_steps=1 --eval_interval=100000)
  train host 21 "${once[@]}" --device=cpu --dtype=float32 --max_iters=19 || return 1
  train gpu 21 "${once[@]}" --device=cuda --dtype=float32 --max_iters=19 || return 1
  train fp32 501 "${once[@]}" --device=cuda --dtype=float32 --max_iters=499 || return 1
  train bf16 501 "${once[@]}" --device=cuda --dtype=bfloat16 --max_iters=499 || return 1
  paste <(grep '^iter' host.losses) <(grep '^iter' gpu.losses) | awk '
    {d = ($6 - $3) / $3; if (d < 0) d = -d; if (d > most) most = d; print "iteration", $2, "host", $3, "GPU", $6}
    END {printf "fp32 against the host: at most %.2e relative", most; exit !(NR == 20 && most <= 1e-4)}' >host-gpu.txt
  local host=$? narrow
  cat host-gpu.txt
  echo
  paste <(grep '^iter' fp32.losses) <(grep '^iter' bf16.losses) | awk '
    {a += $3; b += $6; if (NR % 50) next
     d = (b - a) / a; if (d < 0) d = -d; if (d > most) most = d
     printf "iterations to %3d: fp32 %.4f, bf16 %.4f\n", $2, a / 50, b / 50; a = b = 0}
    END {printf "bf16 against fp32: at most %.2e relative", most; exit !(NR == 500 && most <= 0.02)}' >fp32-bf16.txt
  narrow=$?
  cat fp32-bf16.txt
  echo
  echo "$(tail -n 1 host-gpu.txt); $(tail -n 1 fp32-bf16.txt)" >"$note"
  ((host == 0)) || echo "FAILED: the GPU's losses are not the host's"
  ((narrow == 0)) || echo "FAILED: the losses in bfloat16 are not those in fp32"
  ((host == 0 && narrow == 0))
}

run_shakespeare() {
  built "$nanogpt" || return 78
  [[ -n $data ]] || { echo "no text: give --data FILE, or FSDP_TEST_DATA"; return 77; }
  work_folder && prepared shakespeare_char "$data" || return 1
  local begin=$SECONDS
  "$nanogpt" train train_shakespeare_char --device=cuda --log_json=log.json >run.txt 2>&1 || { tail -n 20 run.txt; echo "FAILED: training"; return 1; }
  local seconds=$((SECONDS - begin))
  cp log.json "$logs/shakespeare.json"
  grep -E '^step|dtype' run.txt
  losses log.json | awk -v seconds=$seconds '
    $1 == "eval" {last = $4; if (best == "" || $4 + 0 < best + 0) {best = $4; at = $2}}
    END {printf "validation loss %.4f at the end, best %.4f at %d, %d s\n", last, best, at, seconds; exit !(best != "" && best + 0 <= 1.48)}' >"$note"
  local code=$?
  cat "$note"
  ((code == 0)) || echo "FAILED: the best validation loss is above 1.48"
  return $code
}

run_step() {
  built "$bench" || return 78
  local model failed=0 notes=''
  : >"$logs/step.jsonl"
  for model in "${models[@]}"; do
    echo "== $model"
    if "$bench" --model="$model" ${batch[@]+"${batch[@]}"} --json="$logs/one.json" >"$logs/step.txt" 2>&1; then
      cat "$logs/one.json" >>"$logs/step.jsonl"
      notes+="${notes:+; }$model $(awk '/^tokens\/s:/ {printf "%.0f tok/s", $2} /^MFU:/ {printf " %s", $2}' "$logs/step.txt")"
    else
      echo "FAILED: $model"
      notes+="${notes:+; }$model failed"
      failed=1
    fi
    cat "$logs/step.txt"
    echo "$notes" >"$note"
  done
  return $failed
}

run_kernels() {
  built "$bench" || return 78
  "$bench" --kernels ${batch[@]+"${batch[@]}"} --json="$logs/kernels.json" >"$logs/kernels.txt" 2>&1
  local code=$?
  cat "$logs/kernels.txt"
  ((code == 0)) || { echo "FAILED: --kernels"; return 1; }
  # Those bound by memory: the column "of copy", the last but one.
  awk '/^  / && !/attention/ {n++; r = $(NF - 1) + 0; if (r < 85) low++; if (least == "" || r < least + 0) least = r}
       END {printf "least of copy bandwidth: %.1f%%; %d of %d below 85%%\n", least, low, n}' "$logs/kernels.txt" >"$note"
  cat "$note"
}

run_pytorch() {
  has_torch || return 77
  local model failed=0 notes='' begin=$SECONDS ours theirs
  : >"$logs/pytorch.jsonl"
  for model in "${models[@]}"; do
    local left=$((limit - 15 - (SECONDS - begin)))
    ((left > 20)) || { echo "no time left for $model"; break; }
    timeout --kill-after=5 $left python3 "$torch_step" --model="$model" ${batch[@]+"${batch[@]}"} --json="$logs/one.json" >"$logs/pytorch.txt" 2>&1 ||
      { echo "FAILED: $model (or out of time)"; failed=1; }
    cat "$logs/pytorch.txt"
    cat "$logs/one.json" >>"$logs/pytorch.jsonl" 2>/dev/null
    rm -f "$logs/one.json"
    theirs=$(grep -oE '(eager|compiled): .*tokens/s [0-9.]+' "$logs/pytorch.txt" | sed -E 's/: .*tokens\/s ([0-9]+).*/ \1/' | paste -sd, | sed 's/,/, /')
    notes+="${notes:+; }$model ${theirs:-none}"
    ours=$(grep -F "\"model\":\"$model\"" "$logs/step.jsonl" 2>/dev/null | sed -nE 's/.*"tokens_per_s":([0-9.]+).*/\1/p')
    [[ -n $ours ]] && notes+=" (ours ${ours%.*})"
    echo "$notes tok/s" >"$note"
  done
  return $failed
}

run_attention() {
  built "$bench" || return 78
  has_torch || return 77
  "$bench" --kernels ${batch[@]+"${batch[@]}"} >"$logs/attention.txt" 2>&1 || { cat "$logs/attention.txt"; echo "FAILED: --kernels"; return 1; }
  python3 "$torch_step" --attention ${batch[@]+"${batch[@]}"} --json="$logs/attention.json" >"$logs/pytorch.txt" 2>&1 ||
    { cat "$logs/pytorch.txt"; echo "FAILED: pytorch_step.py --attention"; return 1; }
  grep attention "$logs/attention.txt"
  cat "$logs/pytorch.txt"
  cat "$logs/attention.txt" "$logs/pytorch.txt" | awk '
    $1 == "attention" {ours[$2] = $3}
    $2 == "forward" && $4 == "us" {
      if (!best["forward"] || $3 < best["forward"]) {best["forward"] = $3; who["forward"] = $1}
      if (!best["backward"] || $8 < best["backward"]) {best["backward"] = $8; who["backward"] = $1}}
    END {for (i = 1; i <= 2; i++) {pass = i == 1 ? "forward" : "backward"
           if (!ours[pass] || !best[pass]) exit 1
           printf "%s%s %.2f of %s", i == 1 ? "speed: " : ", ", pass, best[pass] / ours[pass], who[pass]}
         print ""}' >"$note" || { echo "FAILED: no times"; return 1; }
  cat "$note"
}
