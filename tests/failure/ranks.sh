# SPDX-License-Identifier: Apache-2.0
# Ranks that fail end the whole run, soon, with a non-zero code and a message that says why; no shared memory stays behind.
# programs: failure_ranks_mpi
# timeout: 300
# skip-sanitizers
# usage: ranks.sh <build directory>
set -u
program=$(find "$1" -name failure_ranks_mpi -type f -perm -u+x 2>/dev/null | head -1)
if [ -z "$program" ] || ! command -v mpirun > /dev/null; then
  echo "skipped: no MPI program"
  exit 77
fi
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_odls_base_sigkill_timeout=0  # mpirun kills the others of a failed rank at once
work=$(mktemp -d)
FSDP_SHM_DIR=$(mktemp -d /dev/shm/test-ranks.XXXXXX)  # other programs share memory too
export FSDP_SHM_DIR
mounted=""
trap '((BASHPID != $$)) || { [ -n "$mounted" ] && umount "$mounted"; rm -rf "$work" "$FSDP_SHM_DIR"; }' EXIT
failures=0
date='[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z'  # as a regular expression

fail() {
  echo "FAILED: $*"
  sed 's/^/    /' "$work/log"
  failures=$((failures + 1))
}

# expect <name> <limit in seconds> <regular expression> <mpirun arguments...>
expect() {
  local name=$1 limit=$2 pattern=$3
  shift 3
  local begin=$SECONDS
  timeout -k 5 "$limit" mpirun --oversubscribe --bind-to none "$@" > "$work/log" 2>&1
  local code=$?
  if [ $code -eq 0 ]; then fail "$name: the run claims success"; fi
  if [ $((SECONDS - begin)) -ge "$limit" ]; then fail "$name: still running after $limit s"; fi
  if ! grep -Eq "$pattern" "$work/log"; then fail "$name: no line matches '$pattern'"; fi
  if grep -q completed "$work/log"; then fail "$name: a rank claims to have completed"; fi
  nothing_left "$name"
}
nothing_left() {
  local left
  left=$(ls -A "$FSDP_SHM_DIR")
  if [ -n "$left" ]; then fail "$1: shared memory is left behind: $left"; fi
}

# On one node and on pretended ones: how the run ends. What ranks are told is tested by conformance_departures_mpi,
# conformance_processes_mpi and schedule_failed_streams_mpi, on nodes of any size.
for nodes in "" "-x FSDP_RANKS_PER_NODE=1"; do
  expect "a rank is killed $nodes" 60 'signal 9' $nodes -np 3 "$program" killed
  expect "a rank never comes $nodes" 60 \
    "rank [01]: waiting in all_gather 3 of 4096 fp32 for unit 'block.1' \(forward\) on 'world', for [0-9.]+ s, since $date; missing ranks: 2; giving up" \
    -x FSDP_TIMEOUT=2 $nodes -np 3 "$program" absent
  expect "a rank throws out of main $nodes" 60 'rank 2: this rank has had enough' $nodes -np 3 "$program" throws
done
timeout 60 mpirun --oversubscribe --bind-to none -np 3 "$program" none > "$work/log" 2>&1 || fail "without a fault: the run fails"
nothing_left "without a fault"
expect "a rank returns early" 60 \
  "rank [01]: waits in all_gather 3 of 4096 fp32 for unit 'block.1' \(forward\) on 'world', but rank 2 has left the group" \
  -np 3 "$program" returns
# Everyone catches it and ends in order: so does the run.
for how in returns throws; do
  timeout 60 mpirun --oversubscribe --bind-to none -np 3 "$program" "caught-$how" > "$work/log" 2>&1 ||
    fail "a rank $how, and all catch it: the run fails"
  grep -Eq "caught: rank [01]: .*rank 2 has left the group" "$work/log" ||
    fail "a rank $how, and all catch it: peers were not told"
  nothing_left "a rank $how, and all catch it"
done
for how in unnoticed unnoticed-alone; do
  OMPI_MCA_odls_base_sigkill_timeout=1 expect "a stream fails, and no call says so, $how" 60 '^rank 1: boom$' -np 3 "$program" $how
  if grep -q MPI_ABORT "$work/log"; then fail "a stream fails, and no call says so, $how: the run is aborted"; fi
done
expect "ranks run different collectives" 60 \
  "rank [0-2]: ranks disagree about collective 3: rank 0 runs all_gather of 4096 fp32 for unit 'block.1' \(forward\), rank 2 runs reduce_scatter of 4096 fp32 for unit 'block.0' \(backward\)" \
  -np 3 "$program" order
expect "ranks pass different counts, on nodes of their own" 60 \
  "rank 0 runs all_gather of 4096 fp32 for unit 'block.1' \(forward\), rank 2 runs all_gather of 4032 fp32 for unit 'block.1' \(forward\)" \
  -x FSDP_RANKS_PER_NODE=1 -np 3 "$program" count
# Ranks of another node know who is missing there, though one rank of the node speaks for all.
expect "a rank never comes, and the first rank of its node does" 60 "rank [0-2]: waiting in all_gather 3 .*; missing ranks: 3; giving up" \
  -x FSDP_TIMEOUT=3 -x FSDP_RANKS_PER_NODE=2 -np 4 "$program" absent
if grep -Eq 'missing ranks: ([0-2]|.*,)' "$work/log"; then fail "a rank that waits is said to be missing"; fi
expect "a rank misses a control call" 60 "rank [01]: waiting in exchange of 'test' on 'world', for [0-9.]+ s, since $date; missing ranks: 2; giving up" \
  -x FSDP_TIMEOUT=2 -np 3 "$program" control

# SIGTERM to a waiting rank.
mpirun --oversubscribe --bind-to none -np 3 "$program" sigterm > "$work/log" 2>&1 &
launcher=$!
for _ in $(seq 600); do
  waiting=$(sed -n 's/^waits: process //p' "$work/log" | head -1)
  [ -n "$waiting" ] && break
  sleep 0.1
done
kill -TERM "$waiting"
for _ in $(seq 600); do
  kill -0 "$launcher" 2> /dev/null || break
  sleep 0.1
done
if kill -0 "$launcher" 2> /dev/null; then
  fail "SIGTERM while waiting: still running"
  kill -KILL "$launcher"
fi
wait "$launcher" && fail "SIGTERM while waiting: the run claims success"
grep -Eq "rank [01]: waiting in all_gather 3 of 4096 fp32 for unit 'block.1' \(forward\) on 'world', for .* s, since $date; missing ranks: 2; asked to terminate" \
  "$work/log" || fail "SIGTERM while waiting: no message"
nothing_left "SIGTERM while waiting"

expect "ranks are killed before they map what they share" 60 'signal 9' -np 3 "$program" reserving
expect "no folder for shared memory" 60 \
  "rank [01]: [0-9]+ bytes of shared memory in $work/none .*creating an unnamed file failed: No such file or directory .*Set FSDP_SHM_DIR to another folder" \
  -x FSDP_SHM_DIR="$work/none" -np 2 "$program" shm
expect "a folder whose files need names" 60 "rank [01]: .*Operation not supported .*Set FSDP_SHM_DIR to another folder on a tmpfs" \
  -np 2 "$program" named
env -u FSDP_SHM_DIR timeout 60 mpirun --oversubscribe --bind-to none -np 2 "$program" named > "$work/log" 2>&1 ||
  fail "/dev/shm, whose files need names: the run fails"
# Shared memory that is too small: a tmpfs of 6 MiB for two times 4 MiB. Needs the right to mount.
mkdir "$work/shm"
if mount -t tmpfs -o size=6m tmpfs "$work/shm" 2> /dev/null; then
  mounted="$work/shm"
  expect "shared memory is too small" 60 \
    "rank [01]: 8388608 bytes of shared memory in $work/shm .*reserving the memory failed: No space left on device.*--shm-size" \
    -x FSDP_SHM_DIR="$work/shm" -np 2 "$program" shm
  grep -q allocated "$work/log" && fail "shared memory is too small: a rank goes on"
  [ -n "$(ls "$work/shm")" ] && fail "shared memory is too small: files are left"
else
  echo "skipped: shared memory that is too small (cannot mount a tmpfs)"
fi

[ $failures -eq 0 ] && echo "all failures are reported"
exit $((failures > 0))
