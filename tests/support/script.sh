# SPDX-License-Identifier: Apache-2.0
# Support for scripts that run a program and read its output. Sourced: `. "$(dirname "$0")/../support/script.sh"`.
failures=0
checks=0

# at_exit COMMAND: runs it when this script ends, instead of what was asked for before. A background process of bash that gets a
# signal as it begins still has the trap of its parent, and must not run it.
at_exit() {
  command_at_exit=$1
  trap '((BASHPID != $$)) || eval "$command_at_exit"' EXIT
}
# enter PROGRAM: ends the test as skipped unless PROGRAM is built; then works in a folder of its own.
enter() {
  if [[ ! -x $1 ]]; then
    echo "skipped: $1 is not built"
    exit 77
  fi
  folder=$(mktemp -d)
  at_exit 'chmod -R u+w "$folder"; rm -rf "$folder"'
  cd "$folder" || exit 1
  export XDG_CACHE_HOME=$folder/cache  # what earlier runs have measured is not this test's
  export FSDP_PEAK_TFLOPS=0.1          # or each start would measure it for a quarter of a second
}
# enter_with_text NANOGPT: as enter, with a small dataset `d` of characters.
enter_with_text() {
  enter "$1"
  for i in $(seq 1 300); do echo "the quick brown fox $i"; done >text
  "$1" prepare --dataset=d --data=text >output 2>&1 || fail "prepare"
}
# new_meeting: where ranks that are started next find each other: `address`, of the loopback network, which no other script
# has, and `port`, which the system gives to no connection by itself.
meetings=0
new_meeting() {
  address=127.$(($$ >> 16 & 255)).$(($$ >> 8 & 255)).$(($$ & 255))
  port=$((20000 + ++meetings))
}
# fail WHAT: says so, with what was printed last (in `output`, and where it is kept apart in `errors`).
fail() {
  echo "FAILED: $1"
  sed 's/^/    /' output errors 2>/dev/null
  failures=$((failures + 1))
}
check() { # check WHAT COMMAND...
  local what=$1
  shift
  checks=$((checks + 1))
  "$@" || fail "$what"
}
# start COMMAND...: as process $run, in the background. `output` is emptied first: who looks there for what the command prints
# must not find what another one has printed.
start() {
  : >output
  "$@" >output 2>&1 &
  run=$!
}
# start_until_write COMMAND...: as start. The command stops itself (SIGSTOP), once, where it first writes 4 KiB or more at once by
# write(), or waits for the disk by fsync(): its files have temporary names then.
start_until_write() {
  if [[ ! -e stops.so ]]; then
    echo '#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>
namespace {
void stop() {
  static bool stopped = false;
  if (!stopped) stopped = true, raise(SIGSTOP);
}
}
extern "C" int fsync(int file) { return stop(), syscall(SYS_fsync, file); }
extern "C" ssize_t write(int file, void const* bytes, size_t count) {
  if (count >= 4096) stop();
  return syscall(SYS_write, file, bytes, count);
}' | "${CXX:-c++}" -x c++ -shared -fPIC -o stops.so - || fail "no library could be made"
  fi
  start env LD_PRELOAD="$PWD/stops.so" ASAN_OPTIONS="${ASAN_OPTIONS:-}:verify_asan_link_order=0" "$@"
  wait_for grep -q '^State:[[:space:]]*T' "/proc/$run/status" || fail "$*: writes nothing"
}
wait_for() { # wait_for COMMAND...: until it succeeds, a minute at most
  for _ in $(seq 600); do
    if "$@" 2>/dev/null; then return 0; fi
    sleep 0.1
  done
  return 1
}
# end_run PROCESS: waits for a child whose ranks were killed. mpirun may wait for ever for one that died while it connected:
# it is killed after a minute.
end_run() {
  for _ in $(seq 600); do
    if ! kill -0 "$1" 2>/dev/null; then break; fi
    sleep 0.1
  done
  kill -KILL "$1" 2>/dev/null
  wait "$1" 2>/dev/null
}
# patiently SECONDS COMMAND...: ends with 124 as `timeout` does, and sends SIGTERM, five seconds later SIGKILL. It counts the
# seconds one by one: none pass while the whole test is stopped, by a signal or with its machine.
patiently() {
  local seconds=$1 child dog code
  shift
  "$@" <&0 &
  child=$!
  (
    for ((; seconds > 0; --seconds)); do sleep 1; done
    trap '' TERM
    kill -TERM "$child"
    for _ in 1 2 3 4 5; do kill -0 "$child" && sleep 1; done
    kill -KILL "$child"
    exit 0
  ) >/dev/null 2>&1 &
  dog=$!
  wait "$child"
  code=$?
  kill "$dog" 2>/dev/null
  wait "$dog" 2>/dev/null
  if (($? != 143)); then code=124; fi # the watchdog was not ended by SIGTERM, but has ended the command
  return $code
}
# ends_in_error COMMAND...: it must end by itself, not with 0 nor by a signal; its text is in `output`.
ends_in_error() {
  checks=$((checks + 1))
  patiently 60 "$@" >output 2>&1
  local code=$?
  case $code in
    0) fail "ended with 0: $*" ;;
    124 | 137) fail "hung: $*" ;;
    *) if ((code >= 128)); then fail "died of a signal ($code): $*"; fi ;;
  esac
}
