#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# bench_collectives at tiny sizes: every column is there, no element is wrong, JSON agrees; bad flags end every rank
# with a message. No figure is judged.
# programs: bench_collectives
# timeout: 300
# skip-sanitizers
#
#   collectives.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

program=$1/benchmarks/collectives/bench_collectives
enter "$program"

# expect ROWS FIELDS COMMAND...: ends with 0 and prints ROWS rows of FIELDS columns each.
expect() {
  local rows=$1 fields=$2
  shift 2
  checks=$((checks + 1))
  patiently 120 "$@" >output 2>&1 || fail "ended with $?: $*"
  local found
  found=$(grep -c '^ ' output)
  [[ $found == "$rows" ]] || fail "$found rows instead of $rows: $*"
  awk -v fields="$fields" '/^ / && NF != fields {bad = 1} END {exit bad}' output || fail "not $fields columns everywhere: $*"
}
# refuses MESSAGE COMMAND...: ends by itself, not with 0, and says MESSAGE once.
refuses() {
  local message=$1
  shift
  ends_in_error "$@"
  [[ $(grep -cF -- "$message" output) == 1 ]] || fail "did not say '$message' once: $*"
}
head_has() { # head_has COLUMN...: the table's head names them
  for column in "$@"; do grep '^#' output | grep -qwF -- "$column" || fail "no column '$column'"; done
}

tiny=(-b 1K -e 16K -f 4 -n 3 -w 1 --rounds=1 --pool=64K -c 1)
small=(-b 4K -e 4K -n 2 -w 1 --rounds=1 --pool=64K -c 1)

for ranks in 2 3; do  # 3: sizes that do not divide evenly
  expect 9 16 "$program" --comm=local --ranks=$ranks "${tiny[@]}"
  head_has 'size(B)' count type redop 'time(us)' algbw busbw '#wrong' 'plain(us)' ratio 'out of place' 'in place'
  grep -q '^# elements out of bounds: 0 OK' output || fail "no verdict on the elements"
done
for type in double half bfloat16; do expect 3 16 "$program" --comm=local --ranks=2 -d $type "${small[@]}"; done
expect 3 12 "$program" --comm=local --ranks=2 --compare=0 "${small[@]}"
expect 1 12 "$program" --comm=local --ranks=2 --compare=0 --collective=reduce_scatter -o sum -i 4K "${small[@]}"
products=(--rounds=1 --width=32 --rows=16)
expect 3 11 "$program" --comm=local --ranks=2 --overlap -b 4K -e 4K -n 2 --pool=64K "${products[@]}" && head_has 't_comm(us)' 't_comp(us)' t_overlapped 'added%' efficiency slowdown
expect 1 11 "$program" --comm=local --ranks=2 --overlap --units=3 --unit_bytes=8K --prefetch=2 "${products[@]}"
expect 1 11 "$program" --comm=local --ranks=1 --overlap --units=3 --unit_bytes=8K "${products[@]}"
expect 6 11 "$program" --comm=local --ranks=2 --sweep --units=4 --unit_bytes=4K "${products[@]}"
grep -q '^# smallest slowdown: units of ' output || fail "the sweep names no best unit"

expect 3 16 "$program" --comm=local --ranks=2 --json=out.json "${small[@]}"
python=$(command -v python3) && { "$python" - <<'PY' >output 2>&1 || fail "the JSON file"; }
import json
data = json.load(open("out.json"))
assert data["ranks"] == 2 and data["wrong"] == 0 and len(data["rows"]) == 3, data
for row in data["rows"]:
    for form in (row["out_of_place"], row["in_place"]):
        assert form["wrong"] == 0 and form["time_us"] > 0 and form["plain_us"] > 0 and form["ratio_to_plain"] > 0, row
        assert abs(form["algbw_GBps"] * form["time_us"] * 1e3 / row["size"] - 1) < 1e-6, row
PY

refuses "expected a byte count" "$program" -b 64Q
refuses "minbytes <= maxbytes" "$program" -b 2M -e 1M
refuses "--datatype" "$program" -d int7
refuses "--op" "$program" -o prod
refuses "--collective" "$program" --collective=all_to_all
refuses "--comm" "$program" --comm=pigeon
refuses "--ranks" "$program" --ranks=0
refuses "expected 2 or more" "$program" --ranks=1
refuses "--nonsense" "$program" --nonsense
refuses "--units has no effect in" "$program" --units=3
refuses "--datatype has no effect in" "$program" --overlap -d double
refuses "moves nothing" "$program" --ranks=2 -b 2 -e 2 --rounds=1
refuses "cannot write" "$program" "${small[@]}" --json=/nowhere/out.json

if [[ $("$program" --help) == *'{local,mpi}'* ]] && command -v mpirun >/dev/null; then
  # The settings that many ranks on few cores need.
  run=(mpirun --bind-to none)
  mpirun --version 2>&1 | grep -qi 'open.\?mpi\|open-mpi' && run+=(--oversubscribe)
  expect 9 18 "${run[@]}" -np 4 "$program" --comm=mpi "${tiny[@]}"
  head_has 'mpi(us)'
  expect 1 11 "${run[@]}" -np 2 "$program" --comm=mpi --overlap --units=3 --unit_bytes=8K "${products[@]}"
  refuses "expected a byte count" "${run[@]}" -np 2 "$program" --comm=mpi -b x
  refuses "--ranks is for --comm=local" "$program" --comm=mpi --ranks=2
  refuses "one process has no peers" "$program" --comm=mpi

  # Under a launcher it is mpi by itself; what is asked for wins, and so does the communicator that can take the flags.
  expect 3 18 "${run[@]}" -np 2 "$program" -d bfloat16 "${small[@]}"
  unset=()
  while IFS='=' read -r name _; do
    [[ ! $name =~ ^(OMPI|PMI|PMIX|MV2|SLURM)_ ]] || unset+=(-u "$name")
  done < <(env)
  takes() { # takes COMM VARIABLE=VALUE...: in a process that a launcher gave these
    local comm=$1
    shift
    env "${unset[@]}" "$@" "$program" --help >output 2>&1
    check "'$*' does not take $comm" grep -qE -- "\}=$comm( |\$)" output
  }
  launched=(env "${unset[@]}" OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0)
  refuses "--ranks is for --comm=local" "${launched[@]}" "$program" --ranks=2
  refuses "runs all ranks in one process" "${launched[@]}" "$program" --comm=local
  takes local
  takes mpi OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0
  takes mpi OMPI_COMM_WORLD_SIZE=1 OMPI_COMM_WORLD_RANK=0
  takes mpi PMI_SIZE=2 PMI_RANK=0
  takes mpi MV2_COMM_WORLD_SIZE=2 MV2_COMM_WORLD_RANK=0
  takes mpi PMIX_RANK=0
  takes mpi SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0
  takes local SLURM_STEP_NUM_TASKS=1 SLURM_PROCID=0 PMIX_RANK=0 # a shell in an allocation
  takes local SLURM_NTASKS=8 SLURM_PROCID=0                     # a batch script
  env "${unset[@]}" PMI_SIZE=2 PMI_RANK=1 "$program" --help >output 2>&1
  check "each rank prints the help" test ! -s output
else
  echo "without MPI: those rows are left out"
fi

echo "$checks checks, $failures failures"
exit $((failures != 0))
