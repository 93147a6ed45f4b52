#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A file that cannot be written does not end training: nanogpt says so, goes on, tries again, and ends with an error if the
# last attempts fail. A library that is loaded first lets calls fail, and shortens the time between attempts.
# programs: nanogpt
# timeout: 300
# skip-sanitizers
#
#   app_failed_saves.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter_with_text "$nanogpt"
export OPENBLAS_NUM_THREADS=1
cat >faults.cpp <<'EOF'
// The first FAIL_COUNT calls of FAIL_CALL for paths that contain FAIL_PATH fail with FAIL_ERRNO. Long sleeps last 1 ms.
#include <limits.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {
bool fails(char const* call, char const* path) {
  static char const* const wanted = std::getenv("FAIL_CALL");
  if (wanted == nullptr || std::strcmp(wanted, call) != 0 || std::strstr(path, std::getenv("FAIL_PATH")) == nullptr) return false;
  static std::atomic<long> left{std::atol(std::getenv("FAIL_COUNT"))};
  if (left.fetch_sub(1) <= 0) return false;
  errno = std::atoi(std::getenv("FAIL_ERRNO"));
  return true;
}
std::string path_of(int file) {
  char path[PATH_MAX];
  auto const length = ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
  return std::string(path, length < 0 ? 0 : static_cast<std::size_t>(length));
}
}  // namespace
extern "C" {
ssize_t write(int file, void const* bytes, size_t count) {
  return fails("write", path_of(file).c_str()) ? -1 : ::syscall(SYS_write, file, bytes, count);
}
int fsync(int file) { return fails("fsync", path_of(file).c_str()) ? -1 : static_cast<int>(::syscall(SYS_fsync, file)); }
int nanosleep(timespec const* wanted, timespec* left) {
  timespec const shortest{0, 1000000};
  bool const is_long = wanted->tv_sec > 0 || wanted->tv_nsec >= 50000000;
  return static_cast<int>(::syscall(SYS_nanosleep, is_long ? &shortest : wanted, left));
}
int rename(char const* from, char const* to) noexcept {
  return fails("rename", to) ? -1 : static_cast<int>(::syscall(SYS_renameat2, -100, from, -100, to, 0));
}
}
EOF
"${CXX:-c++}" -std=c++17 -shared -fPIC -o faults.so faults.cpp || { echo "no library could be made"; exit 1; }
failing() { # failing CALL PATH ERRNO COUNT COMMAND...
  patiently 120 env LD_PRELOAD="$PWD/faults.so" FAIL_CALL="$1" FAIL_PATH="$2" FAIL_ERRNO="$3" FAIL_COUNT="$4" "${@:5}" >output 2>errors
}
small=(--dataset=d --n_layer=2 --n_head=2 --n_embd=16 --block_size=8 --batch_size=2 --gradient_accumulation_steps=2
  --eval_interval=5 --eval_iters=2 --log_interval=1 --max_iters=11)
expect() { # expect WHAT WANTED GOT
  check "$1: expected '$2', got '$3'" test "$2" = "$3"
}
warnings() { grep '^warning: .*could not be saved' output; }
one_by_one=(--async_checkpoint=false)
no_space=28 input_output=5 stale=116

patiently 120 "$nanogpt" train "${small[@]}" --out_dir=whole >output 2>&1 || fail "whole"
# Whoever kills a run finds no weights without a checkpoint, from which init_from=auto could not go on.
expect "saved first" checkpoint "$(sed -n 's/.*"kind":"save",.*"what":"\([a-z]*\)".*/\1/p' whole/log.jsonl | head -n 1)"
same() { # same OUT: the run ended where one without failures does, and left nothing half-written
  check "$1: other weights" cmp whole/model.safetensors "$1/model.safetensors"
  expect "$1: the newest checkpoint" step-12 "$(cat "$1/latest")"
  expect "$1: what is left of failed saves" "" "$(find "$1" -name '*.partial' -o -name '*.tmp' -o -name '*.failed')"
}

# --- twice no room: tried again one log line later, then two; then the checkpoint that is due anyway -----------------------
failing write .partial/rank- $no_space 2 "$nanogpt" train "${small[@]}" "${one_by_one[@]}" --out_dir=full --log_json=full.json
expect "ended with" 0 $?
expect "says" "warning: the checkpoint before iteration 5 could not be saved: 'full/.step-5.partial/rank-00000-of-00001.safetensors' cannot be written: No space left on device; training goes on, the next attempt is before iteration 6
warning: the checkpoint before iteration 6 could not be saved: 'full/.step-6.partial/rank-00000-of-00001.safetensors' cannot be written: No space left on device; training goes on, the next attempt is before iteration 8" "$(warnings)"
same full
expect "says that it is saved" "the checkpoint before iteration 8 was saved" "$(grep 'was saved' output)"
for log in full/log.jsonl full.json; do
  expect "failures in $log" "5 6" "$(echo $(sed -n 's/.*"save_failed","iter":\([0-9]*\),"what":"checkpoint","why":".*No space left on device"}/\1/p' $log))"
done
expect "whole checkpoints in the log" "8 10 12" "$(echo $(sed -n 's/.*"save","iter":\([0-9]*\),"what":"checkpoint"}/\1/p' full/log.jsonl))"
# No weights take the room that the first checkpoint needs.
expect "weights in the log" "10 12" "$(echo $(sed -n 's/.*"save","iter":\([0-9]*\),"what":"weights"}/\1/p' full/log.jsonl))"

# --- one rank's disk, in the background and not, as threads and as processes --------------------------------------------------
two=(--ranks=2)
launchers=("")
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then launchers+=("mpirun --oversubscribe --bind-to none -n 2"); fi
patiently 120 "$nanogpt" train "${small[@]}" "${two[@]}" --out_dir=whole >output 2>&1 --overwrite || fail "whole, 2 ranks"
for launcher in "${launchers[@]}"; do
  if [[ -n $launcher ]]; then two=(); fi
  for background in true false; do
    rm -rf broken
    failing fsync rank-00001-of-00002.safetensors $input_output 1 $launcher "$nanogpt" train "${small[@]}" "${two[@]}" --async_checkpoint=$background --out_dir=broken
    expect "$launcher $background: ended with" 0 $?
    check "$launcher $background: says other things" \
      grep -qE "^warning: the checkpoint before iteration 5 could not be saved: rank 1: 'broken/.step-5.partial/rank-00001-of-00002.safetensors' cannot be written: Input/output error; (training goes on, the next attempt is before iteration ([6-9]|1[02])|another attempt follows)$" output
    expect "$launcher $background: warnings" 1 "$(warnings | wc -l)"
    same broken
  done
done

# --- the weights and the files beside them: rank 0 alone writes them -----------------------------------------------------------
for file in model.safetensors config.json; do
  rm -rf broken
  failing rename broken/$file $stale 1 "$nanogpt" train "${small[@]}" --ranks=2 --out_dir=broken
  expect "$file: ended with" 0 $?
  expect "$file: says" "warning: the weights before iteration 5 could not be saved: rank 0: 'broken/$file' cannot be renamed into place: Stale file handle; training goes on, the next attempt is after the next evaluation" "$(warnings)"
  same broken
done

# --- the best checkpoint could not be saved: the next that is better than the best on the disk becomes it ----------------------
still=("${small[@]}" --learning_rate=1e-30 --min_lr=0 --weight_decay=0 --seed=6 --max_iters=16 "${one_by_one[@]}")
patiently 120 "$nanogpt" train "${still[@]}" --out_dir=best >output 2>&1 || fail "best"
losses=$(sed -n 's/^step \([0-9]*\): .*val loss \([0-9.]*\)$/\2 \1/p' output)
first=$(sort -n <<<"$losses" | head -n 1 | cut -d ' ' -f 2)
expect "the best" "step-$first" "$(cat best/best)"
failing write ".step-$first.partial/rank-" $no_space 1 "$nanogpt" train "${still[@]}" --out_dir=second
expect "ended with" 0 $?
after=$(awk -v first="$first" '$2 > first' <<<"$losses" | sort -n | head -n 1 | cut -d " " -f 2)
check "the first checkpoint is not the best: $losses" test "$first" = 5
expect "the second best" "step-$after" "$(cat second/best 2>&1)"

# --- the last attempts fail: what was saved before is as it was, and named -----------------------------------------------------
cp -r full older
sums() { (cd "$1" && find step-* latest best -type f -exec cksum {} +); }
sums older >before
failing write .partial/ $no_space 1000000 "$nanogpt" train "${small[@]}" --out_dir=older --init_from=resume --keep_last=1 --max_iters=12
expect "ended with" 1 $?
expect "says at the end" "nanogpt: error: the checkpoint before iteration 13 could not be saved: 'older/.step-13.partial/rank-00000-of-00001.safetensors' cannot be written: No space left on device
nanogpt: error: the newest whole checkpoint is older/step-12" "$(cat errors)"
expect "attempts" 4 "$(grep -c '"save_failed","iter":13' older/log.jsonl)"
check "checkpoints were changed" cmp before <(sums older)
check "does not say how it stopped" grep -q '"kind":"stop","iter":13,"why":"files could not be written"' older/log.jsonl
expect "what is left of failed saves" "" "$(find older -name '*.partial' -o -name '*.tmp')"

# --- a run that is to replace another one, and cannot save: the old one is whole in a folder of its own -----------------------------
cp -r full replaced
sums replaced >before
failing write .partial/ $no_space 1000000 "$nanogpt" train "${small[@]}" --out_dir=replaced --overwrite
expect "ended with" 1 $?
check "does not name the old run" grep -qx "nanogpt: error: replaced/replaced-run has the run that this one was to replace" errors
check "the old run was changed" cmp before <(sums replaced/replaced-run)
check "no vocabulary with the old run" test -e replaced/replaced-run/meta.json
patiently 120 "$nanogpt" train "${small[@]}" --out_dir=replaced --init_from=resume >output 2>&1
expect "resumed nothing with" 2 $?
check "does not say where the old run is" grep -qF "there is no checkpoint in 'replaced' to resume from; 'replaced/replaced-run' has the run that a start with --overwrite was to replace: to continue that run, move its files to 'replaced'; to replace it, start with --overwrite" output
for start in scratch auto; do
  patiently 120 "$nanogpt" train "${small[@]}" --out_dir=replaced --init_from=$start >output 2>&1
  expect "$start beside a run that was set aside ended with" 2 $?
  check "$start: does not name the old run" grep -qF "'replaced' has" output
done
cp -r full half && mkdir half/.replaced-run.partial && mv half/latest half/.replaced-run.partial
for start in scratch resume auto; do
  patiently 120 "$nanogpt" train "${small[@]}" --out_dir=half --init_from=$start >output 2>&1
  expect "$start in a folder that is half moved ended with" 2 $?
  check "$start: does not say how to mend it" grep -qF "move the files back first: mv half/.replaced-run.partial/* half/" output
done
mkdir -p foreign/replaced-run && touch foreign/replaced-run/precious
patiently 120 "$nanogpt" train "${small[@]}" --out_dir=foreign --overwrite >output 2>&1
expect "a folder of somebody else's ended with" 2 $?
check "somebody else's folder is gone" test -e foreign/replaced-run/precious
cp -r replaced back && mv -f back/replaced-run/* back && rmdir back/replaced-run
patiently 120 "$nanogpt" train "${small[@]}" --out_dir=back --init_from=resume --max_iters=12 >output 2>&1 || fail "the old run cannot be continued"
check "continues something else" grep -q "^resuming from back/step-12 at iteration 12$" output
cp -r replaced twice && cp -r full/step-12 twice
patiently 120 "$nanogpt" train "${small[@]}" --out_dir=twice --overwrite >output 2>&1
expect "replaced two runs with" 2 $?
check "does not name the folder" grep -qF "setting 'overwrite': 'twice/replaced-run' still has the run that an interrupted start with --overwrite was to replace" output
patiently 120 "$nanogpt" train "${small[@]}" --out_dir=replaced --overwrite >output 2>&1 || fail "the next start does not replace it"
expect "checkpoints" "step-10 step-12" "$(cd replaced && echo step-*)"
check "something of the old run is left" test ! -e replaced/replaced-run

# --- no checkpoint at all: the weights are named ----------------------------------------------------------------------------------
failing write .partial/ $no_space 1000000 "$nanogpt" train "${small[@]}" --out_dir=weights
expect "ended with" 1 $?
expect "says what there is" "nanogpt: error: there is no whole checkpoint in weights
nanogpt: error: weights/model.safetensors has the weights before iteration 12; to continue from them without the optimizer's state, give --init_from=weights and another out_dir" "$(tail -n 2 errors)"
patiently 120 "$nanogpt" train "${small[@]}" --init_from=weights --out_dir=other >output 2>&1 || fail "does not continue from them"

# A run that is asked to stop before a checkpoint could be saved leaves no weights: the next start begins anew.
: >output
env LD_PRELOAD="$PWD/faults.so" FAIL_CALL=write FAIL_PATH=.partial/ FAIL_ERRNO=$no_space FAIL_COUNT=1000000 \
  "$nanogpt" train "${small[@]}" --ranks=2 --max_iters=1000000 --out_dir=stopped >output 2>errors &
run=$!
wait_for grep -q '^iter 12:' output
kill -TERM "$run"
wait "$run"
expect "ended with" 1 $?
check "weights without a checkpoint" test ! -e stopped/model.safetensors -a ! -e stopped/config.json
patiently 120 "$nanogpt" train "${small[@]}" --ranks=2 --out_dir=stopped --init_from=auto >output 2>&1 || fail "does not begin anew"
same stopped

# A snapshot in memory is named too, and the run continues from it.
memory=(--ranks=2 --snapshot_interval=8 --snapshot_folder="$PWD/memory")
failing write .partial/ $no_space 1000000 "$nanogpt" train "${small[@]}" "${memory[@]}" --out_dir=lost
expect "ended with" 1 $?
expect "names the snapshot" "nanogpt: error: the snapshot of step 8 is whole in '$PWD/memory'; --init_from=auto continues from it" "$(grep '^nanogpt: error: the snapshot' errors)"
patiently 120 "$nanogpt" train "${small[@]}" "${memory[@]}" --init_from=auto --out_dir=lost >output 2>&1 || fail "does not continue from the snapshot"
expect "continues from the snapshot" 1 "$(grep -c '^resuming from .*/step-8\..* at iteration 8$' output)"
same lost

# --- the log cannot be written -------------------------------------------------------------------------------------------------
failing write silent_log/log.jsonl $no_space 1000000 "$nanogpt" train "${small[@]}" --ranks=2 --out_dir=silent_log
expect "ended with" 0 $?
expect "says so once" "nanogpt: warning: 'silent_log/log.jsonl' cannot be written: No space left on device; training goes on, but lines are missing in this file" "$(cat errors)"
same silent_log

# --- asked to stop: saved at the second attempt ---------------------------------------------------------------------------------
: >output
env LD_PRELOAD="$PWD/faults.so" FAIL_CALL=write FAIL_PATH=.partial/rank- FAIL_ERRNO=$no_space FAIL_COUNT=1 \
  "$nanogpt" train "${small[@]}" --max_iters=1000000 --eval_interval=1000000 --out_dir=asked >output 2>errors &
run=$!
wait_for grep -q '^iter 3:' output
kill -TERM "$run"
wait "$run"
expect "ended with" 85 $?
check "does not say when it tries again" grep -q "No space left on device; the next attempt is in 1 s$" output
check "saved nothing" grep -q '^asked to stop: saved in asked before iteration' output
check "no checkpoint" test -e "asked/$(cat asked/latest)/checkpoint.json"

# --- no file may grow beyond 4 KiB: writing more is an error, not a signal -------------------------------------------------------
limited() (
  ulimit -f 4
  patiently 120 env LD_PRELOAD="$PWD/faults.so" "$@" | cat
  exit "${PIPESTATUS[0]}"
)
for ranks in 1 2; do
  limited "$nanogpt" train "${small[@]}" --max_iters=3 "--ranks=$ranks" --out_dir="limited$ranks" >output 2>&1
  expect "$ranks ranks: ended with" 1 $?
  check "$ranks ranks: does not get to the end" grep -q "^iter 3" output
  check "$ranks ranks: does not say why" grep -q "File too large" output
  check "$ranks ranks: an exception got out" test "$(grep -c "terminate called" output)" = 0
done

# --- standard output on a full disk ------------------------------------------------------------------------------------------------
if [[ -e /dev/full ]]; then
  patiently 120 "$nanogpt" train "${small[@]}" --out_dir=silent >/dev/full 2>errors
  expect "ended with" 1 $?
  check "other weights" test -s silent/model.safetensors -a "$(cat silent/latest)" = step-12
  expect "says" "nanogpt: warning: standard output cannot be written: No space left on device; some lines of the output are missing
nanogpt: error: standard output cannot be written" "$(cat errors)"
fi

echo "$checks checks, $failures failures"
((failures == 0))
