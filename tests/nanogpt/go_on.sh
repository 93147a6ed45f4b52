#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# go_on.sh starts training again with the ranks that are left: which exit codes it follows, what it starts, which machines it
# leaves out, and how it ends. mpirun and ssh are stubs; nothing depends on how long anything takes.
# timeout: 120
# skip-sanitizers
set -uo pipefail

source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scripts=$source_folder/examples/nanogpt/deploy
work=$(mktemp -d)
cd "$work" || exit 1
. "$source_folder/tests/support/script.sh"
at_exit 'rm -rf "$work"'

says() { check "does not say '$1'" grep -qF -- "$1" output; }
silent_on() { check "says '$1'" test "$(grep -cF -- "$1" output)" -eq 0; }
ends() { check "ended with $code, not $1" test "$code" -eq "$1"; }
# The files plan.1, plan.2, ... contain the behaviour of mpirun at its starts 1, 2, ...; what it was told is in calls, without the words
# that are before the program. `rank` becomes a rank; `ready` prints what ranks print once they handle SIGUSR1.
mkdir stubs
cat > stubs/mpirun << 'EOF'
#!/usr/bin/env bash
all=$* words=("$@")
echo "${all%% bash -c *}${all##*$'\n'exec \"\$@\" go_on}" >> calls
rank() {
  while [[ ${words[0]} != bash ]]; do words=("${words[@]:1}"); done
  exec "${words[@]}"
}
ready() { for ((i = 0; i < words[1]; ++i)); do echo "== this rank handles SIGUSR1" >&2; done; }
. "./plan.$(wc -l < calls)"
EOF
cat > stubs/ask << 'EOF'
#!/usr/bin/env bash
echo "$*" >> asked
[[ ! -e silent.$1 ]]
EOF
chmod +x stubs/*
export PATH=$work/stubs:$PATH OMPI_MCA_plm_rsh_agent=ask
unset "${!FSDP_@}" "${!NCCL_@}" "${!OPENBLAS_@}" # which go_on.sh would pass on
plan() { # plan TEXT...: what the starts do
  rm -f plan.* calls asked silent.*
  touch calls asked
  local number=0 text
  for text in "$@"; do
    number=$((number + 1))
    echo "$text" > plan.$number
  done
}
go() { # go OPTION...
  patiently 60 "$scripts/go_on.sh" "$@" mpirun --flag -- nanogpt train --out_dir=out > output 2>&1
  code=$?
}
starts() { check "mpirun was started $(wc -l < calls) times, not $1" test "$(wc -l < calls)" -eq "$1"; }
started() { check "start $1 was '$(sed -n "$1p" calls)'" test "$(sed -n "$1p" calls)" = "$2"; }
train="--flag nanogpt train --out_dir=out"

# signalled CODE SIGNAL...: the signals, once mpirun runs
signalled() {
  local expected=$1 signal
  shift
  rm -f ready
  # Background jobs ignore SIGINT.
  env --default-signal=INT "$scripts/go_on.sh" --ranks=4 --least=1 --grace=600 mpirun -- nanogpt > output 2>&1 &
  local pid=$!
  for signal in "$@"; do
    while [[ ! -e ready ]]; do sleep 0.05; done
    rm ready
    kill -s "$signal" $pid
  done
  wait $pid
  code=$?
  ends "$expected"
  starts 1
}
waits=': > ready; while :; do sleep 0.05; done'
left="the newest checkpoint or snapshot is what is left"

# --- which exit codes --------------------------------------------------------------------------------------------------------
exit_codes() {
  for lost in 70 75 137 143; do
    plan "exit $lost" "exit 0"
    go --ranks=4 --least=2
    ends 0
    starts 2
    started 1 "-n 4 $train"
    started 2 "-n 3 $train --init_from=auto"
    says "mpirun ended with code $lost, and ranks were lost: going on with 3 ranks instead of 4, from the newest checkpoint or snapshot"
  done
  for final in 0 1 2 85 134 139 205; do
    plan "exit $final" "exit 99"
    go --ranks=4 --least=2
    ends $final
    starts 1
  done
  plan "echo '  Remote daemon: [[1,0],1] on node far' >&2; exit 205" "exit 0"
  go --ranks=4 --least=2
  ends 0
  started 2 "-n 3 $train --init_from=auto"
  # As often as there are ranks, and no more.
  plan "exit 137" "exit 137" "exit 75" "exit 99"
  go --ranks=4 --least=2
  ends 75
  starts 3
  started 3 "-n 2 $train --init_from=auto"
  says "1 rank can be had, and --least=2: not going on"
  # The caller's --init_from is kept in each start.
  plan "exit 137" "exit 0"
  patiently 60 "$scripts/go_on.sh" --ranks=2 --least=1 mpirun -- nanogpt --init_from=auto:gpt2 > output 2>&1
  started 1 "-n 2 nanogpt --init_from=auto:gpt2"
  started 2 "-n 1 nanogpt --init_from=auto:gpt2"
}

# --- which ranks -------------------------------------------------------------------------------------------------------------
which_ranks() {
  plan 'echo "rank 0: waiting in all_gather; missing ranks: 2, 3; giving up" >&2
    echo "rank 1: waiting in all_gather; missing ranks: 2, 3, 4; giving up" >&2
    echo "rank 4: waiting in reduce; missing ranks: 2, 3; giving up" >&2; exit 75' "exit 0"
  go --ranks=6 --least=1
  started 2 "-n 4 $train --init_from=auto"
  plan "$(< plan.1)" "exit 0"
  go --ranks=6 --least=5 # they may only have waited elsewhere
  started 2 "-n 5 $train --init_from=auto"
}

# --- machines ------------------------------------------------------------------------------------------------------------------
which_machines() {
  place() { echo "-n $1 --host $2 --map-by slot $train${3-}"; }
  again=" --init_from=auto"
  plan 'echo "mpirun noticed that process rank 2 with PID 9 on node b exited on signal 9 (Killed)." >&2; exit 137' "exit 0"
  go --hosts=a:2,b:1,c:2 --least=2
  ends 0
  started 1 "$(place 5 a:2,b:1,c:2)"
  started 2 "$(place 4 a:2,c:2 "$again")"
  check "not all machines were asked, each time" test "$(sort asked | tr '\n' ' ')" = "a true a true b true c true c true "
  plan 'echo "mpirun noticed that process rank 4 with PID 9 on node c exited on signal 9 (Killed)." >&2; exit 137' \
    'echo "rank 2: waiting in all_gather; missing ranks: 0, 1; giving up" >&2; touch silent.a; exit 75' "exit 0"
  go --hosts=a:2,b:1,c:2 --least=2
  ends 0
  started 2 "$(place 4 a:2,b:1,c:1 "$again")"
  started 3 "$(place 2 b:1,c:1 "$again")"
  plan 'echo "  Remote daemon: [[1,0],1] on node b" >&2; exit 205' "exit 0"
  go --ranks=4 --hosts=a:2,b:2 --least=2
  started 2 "$(place 2 a:2 "$again")"
  plan "exit 0"
  touch silent.b # before the first start too
  go --hosts=a:2,b:2 --least=2
  ends 0
  started 1 "$(place 2 a:2)"
  says "'b' does not answer, and is left out"
  plan "exit 0"
  touch silent.a silent.b
  go --hosts=a:2,b:2 --least=1
  ends 1
  starts 0
  says "0 ranks can be had, and --least=1: not going on"
  # This machine is not asked, and variables go to the others.
  plan "exit 0"
  FSDP_TIMEOUT=9 go --hosts=localhost:1,a:1 --least=1
  started 1 "-n 2 --host localhost:1,a:1 --map-by slot -x FSDP_TIMEOUT $train"
  check "asks itself" test "$(cat asked)" = "a true"
}

# --- an mpirun that does not end -----------------------------------------------------------------------------------------------
# It gets SIGTERM, then SIGKILL; what it has started here ends too.
stuck() {
  gives_up='echo "rank 0: waiting in all_gather; missing ranks: 3; giving up" >&2; while :; do sleep 0.05; done'
  plan "sleep 600 & echo \$! > child; trap '' TERM; $gives_up" "exit 0"
  go --ranks=4 --least=2 --grace=0 --kill-after=0
  ends 0
  starts 2
  says "mpirun has not ended 0 seconds after a rank gave up: ending it"
  runs() { [[ -n $(tr -d '\0' 2> /dev/null < "/proc/$1/cmdline") ]]; } # and is no zombie
  if runs "$(< child)"; then fail "what mpirun has started still runs"; fi
  plan "trap ': > by_term; exit 0' TERM; $gives_up" "exit 0"
  go --ranks=4 --least=2 --grace=0 --kill-after=600
  ends 0
  starts 2
  check "mpirun was not asked to end first" test -e by_term
}

# --- signals: everything ends, and nothing starts again ------------------------------------------------------------------------
ending_signals() {
  polite='for s in INT TERM HUP; do trap "echo $s > got; exit 137" $s; done; : > ready; while :; do sleep 0.05; done'
  for signal in INT:130 TERM:143 HUP:129; do
    plan "$polite" "exit 0"
    signalled "${signal#*:}" "${signal%:*}"
    check "mpirun did not get $signal" test "$(< got)" = "${signal%:*}"
  done
  # A second one does not wait.
  plan 'trap ": > ready" TERM; : > ready; while :; do sleep 0.05; done' "exit 0"
  signalled 143 TERM TERM
}

# --- SIGUSR1: training saves, and ends with 85; nothing starts again -----------------------------------------------------------
saving() {
  plan "ready; trap 'echo USR1 >> got; sleep 1.5; exit 85' USR1; $waits" "exit 0"
  rm -f got
  signalled 85 USR1
  check "mpirun did not get SIGUSR1 once" test "$(< got)" = USR1
  silent_on "this rank"
  silent_on "asked to stop by SIGUSR1"
  # A second one is passed on too.
  plan "ready; times=0; trap 'times=\$((times + 1)); : > ready' USR1; : > ready; while ((times < 2)); do sleep 0.05; done; exit 75" "exit 0"
  signalled 85 USR1 USR1
}

lost_while_saving() {
  for lost in 'exit 70' 'exit 75' 'exit 137' 'exit 138' 'exit 143' 'echo "  Remote daemon: [[1,0],1] on node far" >&2; exit 205'; do
    plan "ready; trap '$lost' USR1; $waits" "exit 0"
    signalled 85 USR1
    silent_on "going on with"
    says "== asked to stop by SIGUSR1: mpirun ended with code ${lost##* } instead of 85, and nothing is started again; $left"
  done
  for final in 0 1 2 134; do
    plan "ready; trap 'exit $final' USR1; $waits" "exit 0"
    signalled $final USR1
  done
}

# It comes as mpirun ends.
asked_between() {
  plan 'kill -USR1 $PPID; exit 137' "exit 0"
  go --ranks=4 --least=1
  ends 85
  starts 1
  # It comes while go_on.sh asks a machine, which then has all the time of the test: the stub of timeout has no limit.
  mkdir stubs
  local PATH=$PWD/stubs:$PATH
  cat > stubs/ask << 'EOF'
#!/usr/bin/env bash
if [[ -e process ]]; then
  kill -USR1 "$(< process)"
  until [[ -e over ]]; do sleep 0.05; done
fi
EOF
  printf '#!/usr/bin/env bash\nshift\nexec "$@"\n' > stubs/timeout
  chmod +x stubs/ask stubs/timeout
  asks() { # asks RUNS COMMAND...: it comes before the start that follows RUNS
    rm -f over
    "${@:2}" --hosts=a:1,b:1 --least=1 mpirun -- nanogpt > output 2>&1
    code=$?
    touch over
    rm process
    ends 85
    starts "$1"
  }
  plan "exit 0"
  asks 0 bash -c 'echo $$ > process; exec "$@"' bash "$scripts/go_on.sh"
  says "== asked to stop by SIGUSR1: mpirun was not started; $left"
  plan 'echo $PPID > process; exit 75' "exit 0"
  asks 1 "$scripts/go_on.sh"
  says "== asked to stop by SIGUSR1: mpirun ended with code 75 instead of 85, and nothing is started again; $left"
}

# It comes before the ranks, which are processes here, handle it; one of them begins after the other is ready.
late_ranks() {
  cat > late << 'EOF'
#!/usr/bin/env perl
open(F, '>', "began.$$"); close(F);
select(undef, undef, undef, 0.05) until -e 'handle';
my $asked = 0;
$SIG{USR1} = sub { ++$asked };
open(F, '>', "handles.$$"); close(F);
select(undef, undef, undef, 0.05) until $asked > 0;
EOF
  chmod +x late
  plan 'trap "ls handles.* | wc -l > handled; kill -USR1 \$one \$two" USR1
    (rank) & one=$!
    (until compgen -G "handles.*" > /dev/null; do sleep 0.05; done; sleep 1.5; rank) & two=$!
    while kill -0 $one || kill -0 $two; do sleep 0.05; done 2> /dev/null
    exit 85' "exit 0"
  "$scripts/go_on.sh" --ranks=2 --least=1 mpirun -- ./late > output 2>&1 &
  job=$!
  has_begun() { compgen -G 'began.*' > /dev/null; }
  check "no rank has begun" wait_for has_begun
  kill -USR1 $job
  touch handle
  wait $job
  code=$?
  ends 85
  starts 1
  check "SIGUSR1 came when '$(cat handled)' of 2 ranks handled it" test "$(cat handled)" -eq 2
}

# --- bad input -----------------------------------------------------------------------------------------------------------------
bad_input() {
  refuses() { # refuses MESSAGE OPTION...
    plan "exit 0"
    go "${@:2}"
    ends 2
    starts 0
    says "go_on.sh: error: $1"
  }
  refuses "--least=5: expected at most the number of ranks, which is 4" --ranks=4 --least=5
  refuses "--least=4: expected at most the number of ranks, which is 3" --hosts=a:1,b:2 --least=4
  refuses "--ranks=4: expected the 3 ranks of --hosts=a:1,b:2" --ranks=4 --hosts=a:1,b:2 --least=2
  refuses "--ranks: expected a positive number, got 'two'" --ranks=two --least=1
  refuses "--least: expected a positive number, got '0'" --ranks=2 --least=0
  refuses "--least: expected a positive number, got ''" --ranks=2
  refuses "--grace: expected a number of seconds, got '-1'" --ranks=2 --least=1 --grace=-1
  refuses "--kill-after: expected a number of seconds, got 'x'" --ranks=2 --least=1 --kill-after=x
  for hosts in a a:0 a:b:1 a:1,,b "a:1;b:1" 'a:1,`b`:1' ","; do
    refuses "--hosts: expected NAME:RANKS, separated by commas, got '$hosts'" --hosts="$hosts" --least=1
  done
  for start in --overwrite --overwrite=true --init_from=scratch --init_from=gpt2; do
    plan "exit 0"
    patiently 60 "$scripts/go_on.sh" --ranks=2 --least=1 mpirun -- nanogpt $start > output 2>&1
    code=$?
    ends 2
    says "$start: each start goes on from the last checkpoint; expected --init_from=auto, auto:WEIGHTS or resume"
  done
  for option in --foo=3 --ranks -n --leas=1; do
    refuses "$option: expected --ranks=N, --least=M, --hosts=a:2,b:2, --grace=S or --kill-after=S before mpirun" --ranks=2 --least=1 $option
  done
  for words in "mpirun" "mpirun --" "-- nanogpt"; do
    # shellcheck disable=SC2086
    patiently 60 "$scripts/go_on.sh" --ranks=2 --least=1 $words > output 2>&1
    code=$?
    ends 2
    says "expected mpirun, --, and a program"
  done
}
# All of these at a time, each in a folder of its own: go_on.sh mostly waits.
sections=(exit_codes which_ranks which_machines stuck ending_signals saving lost_while_saving asked_between late_ranks bad_input)
runs=()
for section in "${sections[@]}"; do
  (
    mkdir "$section" && cd "$section" || exit
    $section
    echo "$section: $checks checks, $failures failures"
    exit $((failures > 0))
  ) > "$section.log" 2>&1 &
  runs+=($!)
done
for i in "${!sections[@]}"; do
  wait "${runs[i]}" || failures=$((failures + 1))
  cat "${sections[i]}.log"
done
exit $((failures > 0))
