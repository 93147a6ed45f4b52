# SPDX-License-Identifier: Apache-2.0
# Ranks that fail end the whole run, soon, with a non-zero code and a message that says why; no shared memory stays behind.
# programs: failure_ranks_mpi
# timeout: 300
# skip-sanitizers
# usage: ranks.sh <build directory>
set -u
. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

program=$1/tests/failure_ranks_mpi
enter "$program"
if ! command -v mpirun > /dev/null; then
  echo "skipped: no mpirun"
  exit 77
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_odls_base_sigkill_timeout=0  # mpirun kills the others of a failed rank at once
FSDP_SHM_DIR=$(mktemp -d /dev/shm/test-ranks.XXXXXX)  # other programs share memory too
export FSDP_SHM_DIR
mounted=""
at_exit '[ -n "$mounted" ] && umount "$mounted"; rm -rf "$folder" "$FSDP_SHM_DIR"'
date='[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z'  # as a regular expression

# expect <name> <regular expression> <mpirun arguments...>
expect() {
  local name=$1 pattern=$2
  shift 2
  patiently 60 mpirun --oversubscribe --bind-to none "$@" > output 2>&1
  local code=$?
  if [ $code -eq 0 ]; then fail "$name: the run claims success"; fi
  if [ $code -eq 124 ]; then fail "$name: still running after 60 s"; fi
  if ! grep -Eq "$pattern" output; then fail "$name: no line matches '$pattern'"; fi
  if grep -q completed output; then fail "$name: a rank claims to have completed"; fi
  nothing_left "$name"
}
nothing_left() {
  local left
  left=$(ls -A "$FSDP_SHM_DIR")
  if [ -n "$left" ]; then fail "$1: shared memory is left behind: $left"; fi
}

# beside <folder> <arguments of expect...>: the same in the background, in a folder and with shared memory of its own. Most of
# such a run's time passes in waits. `joined` waits for all of them, and tells which have failed.
beside=()
beside() {
  mkdir "$folder/$1" "$FSDP_SHM_DIR/$1"
  (
    cd "$folder/$1" || exit
    FSDP_SHM_DIR=$FSDP_SHM_DIR/$1 failures=0
    expect "${@:2}"
    exit $((failures > 0))
  ) > "$folder/$1.log" 2>&1 &
  beside+=("$1 $!")
}
joined() {
  local one
  : > output
  for one in "${beside[@]}"; do
    wait "${one#* }" || fail "$(cat "$folder/${one% *}.log")"
    rmdir "$FSDP_SHM_DIR/${one% *}"
  done
  beside=()
}

# Ranks that wait for one which never comes. Ranks of another node know who is missing there, though one rank of the node
# speaks for all.
never="rank [01]: waiting in all_gather 3 of 4096 fp32 for unit 'block.1' \(forward\) on 'world', for [0-9.]+ s, since $date; missing ranks: 2; giving up"
beside absent "a rank never comes" "$never" -x FSDP_TIMEOUT=2 -np 3 "$program" absent
beside absent-1 "a rank never comes, on nodes of their own" "$never" -x FSDP_TIMEOUT=2 -x FSDP_RANKS_PER_NODE=1 -np 3 "$program" absent
beside absent-2 "a rank never comes, and the first rank of its node does" "rank [0-2]: waiting in all_gather 3 .*; missing ranks: 3; giving up" \
  -x FSDP_TIMEOUT=3 -x FSDP_RANKS_PER_NODE=2 -np 4 "$program" absent
beside control "a rank misses a control call" "rank [01]: waiting in exchange of 'test' on 'world', for [0-9.]+ s, since $date; missing ranks: 2; giving up" \
  -x FSDP_TIMEOUT=2 -np 3 "$program" control
joined
if grep -Eq 'missing ranks: ([0-2]|.*,)' absent-2/output; then fail "a rank that waits is said to be missing"; fi
# A task that fails when nobody asks any more.
export OMPI_MCA_odls_base_sigkill_timeout=1
for how in unnoticed unnoticed-alone; do beside $how "a stream fails, and no call says so, $how" '^rank 1: boom$' -np 3 "$program" $how; done
joined
for how in unnoticed unnoticed-alone; do
  if grep -q MPI_ABORT $how/output; then fail "a stream fails, and no call says so, $how: the run is aborted"; fi
done
export OMPI_MCA_odls_base_sigkill_timeout=0

# On one node and on pretended ones: how the run ends. What ranks are told is tested by conformance_departures_mpi,
# conformance_processes_mpi and schedule_failed_streams_mpi, on nodes of any size.
for nodes in "" "-x FSDP_RANKS_PER_NODE=1"; do
  expect "a rank is killed $nodes" 'signal 9' $nodes -np 3 "$program" killed
  expect "a rank throws out of main $nodes" 'rank 2: this rank has had enough' $nodes -np 3 "$program" throws
done
patiently 60 mpirun --oversubscribe --bind-to none -np 3 "$program" none > output 2>&1 || fail "without a fault: the run fails"
nothing_left "without a fault"
expect "a rank returns early" \
  "rank [01]: waits in all_gather 3 of 4096 fp32 for unit 'block.1' \(forward\) on 'world', but rank 2 has left the group" \
  -np 3 "$program" returns
# Everyone catches it and ends in order: so does the run.
for how in returns throws; do
  patiently 60 mpirun --oversubscribe --bind-to none -np 3 "$program" "caught-$how" > output 2>&1 ||
    fail "a rank $how, and all catch it: the run fails"
  grep -Eq "caught: rank [01]: .*rank 2 has left the group" output ||
    fail "a rank $how, and all catch it: peers were not told"
  nothing_left "a rank $how, and all catch it"
done
expect "ranks run different collectives" \
  "rank [0-2]: ranks disagree about collective 3: rank 0 runs all_gather of 4096 fp32 for unit 'block.1' \(forward\), rank 2 runs reduce_scatter of 4096 fp32 for unit 'block.0' \(backward\)" \
  -np 3 "$program" order
expect "ranks pass different counts, on nodes of their own" \
  "rank 0 runs all_gather of 4096 fp32 for unit 'block.1' \(forward\), rank 2 runs all_gather of 4032 fp32 for unit 'block.1' \(forward\)" \
  -x FSDP_RANKS_PER_NODE=1 -np 3 "$program" count
# SIGTERM to a waiting rank.
start mpirun --oversubscribe --bind-to none -np 3 "$program" sigterm
wait_for grep -q '^waits: process ' output
kill -TERM "$(sed -n 's/^waits: process //p' output | head -1)"
has_ended() { ! kill -0 "$run"; }
wait_for has_ended || {
  fail "SIGTERM while waiting: still running"
  kill -KILL "$run"
}
wait "$run" && fail "SIGTERM while waiting: the run claims success"
grep -Eq "rank [01]: waiting in all_gather 3 of 4096 fp32 for unit 'block.1' \(forward\) on 'world', for .* s, since $date; missing ranks: 2; asked to terminate" \
  output || fail "SIGTERM while waiting: no message"
nothing_left "SIGTERM while waiting"

expect "ranks are killed before they map what they share" 'signal 9' -np 3 "$program" reserving
expect "no folder for shared memory" \
  "rank [01]: [0-9]+ bytes of shared memory in $folder/none .*creating an unnamed file failed: No such file or directory .*Set FSDP_SHM_DIR to another folder" \
  -x FSDP_SHM_DIR="$folder/none" -np 2 "$program" shm
expect "a folder whose files need names" "rank [01]: .*Operation not supported .*Set FSDP_SHM_DIR to another folder on a tmpfs" \
  -np 2 "$program" named
patiently 60 env -u FSDP_SHM_DIR mpirun --oversubscribe --bind-to none -np 2 "$program" named > output 2>&1 ||
  fail "/dev/shm, whose files need names: the run fails"
# Shared memory that is too small: a tmpfs of 6 MiB for two times 4 MiB. Needs the right to mount.
mkdir "$folder/shm"
if mount -t tmpfs -o size=6m tmpfs "$folder/shm" 2> /dev/null; then
  mounted="$folder/shm"
  expect "shared memory is too small" \
    "rank [01]: 8388608 bytes of shared memory in $folder/shm .*reserving the memory failed: No space left on device.*--shm-size" \
    -x FSDP_SHM_DIR="$folder/shm" -np 2 "$program" shm
  grep -q allocated output && fail "shared memory is too small: a rank goes on"
  [ -n "$(ls "$folder/shm")" ] && fail "shared memory is too small: files are left"
else
  echo "skipped: shared memory that is too small (cannot mount a tmpfs)"
fi

[ $failures -eq 0 ] && echo "all failures are reported"
exit $((failures > 0))
