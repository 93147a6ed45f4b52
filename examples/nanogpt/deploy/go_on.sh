#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starts training by Open MPI's mpirun. If ranks are lost, starts it again from its last checkpoint with those that are left.
#
#   go_on.sh [options] --least=M mpirun [its options...] -- nanogpt train [settings...]
#
#   --ranks=N           ranks of the first start; with --hosts, those of all machines
#   --least=M           with fewer ranks than this, the run ends
#   --hosts=a:2,b:2     machines and how many ranks each has. One that does not answer is left out: `ssh NAME true`, or another
#                       program instead of ssh (OMPI_MCA_plm_rsh_agent), must succeed within 10 seconds
#   --grace=S           seconds (30) that mpirun may take to end after a rank has given up at its deadline, or after a signal.
#                       Then it gets SIGTERM, because it would wait for a machine that has gone silent
#   --kill-after=S      seconds (10) from that SIGTERM to SIGKILL
#
# Ranks are lost if mpirun ends with 70 or 75 (a wait missed its deadline), 137 or 143 (a rank was killed), or if it loses a
# machine. Each start has fewer ranks than the one before. Every other exit code is go_on.sh's own, at once: 85 too, because
# training was asked to stop. SIGINT, SIGTERM and SIGHUP end everything. SIGUSR1 saves and ends with 85; if ranks are lost
# meanwhile, nothing starts again, and the code is 85 too: the newest checkpoint or snapshot is what is left.
# Also sourced, by run.sh: `go_on` takes the same words.

saves=0 owed=0 # SIGUSR1 has come; it is not passed on yet
go_on() {
  local least='' hosts='' grace=30 kill_after=10 total='' names=() slots=() launcher=() scratch code i
  local mpirun=0 stop='' stopped_at=0 saves=$saves owed=$owed ran=0 said
  while (($#)); do
    case $1 in
      --ranks=*) total=${1#*=} ;;
      --least=*) least=${1#*=} ;;
      --hosts=*) hosts=${1#*=} ;;
      --grace=*) grace=${1#*=} ;;
      --kill-after=*) kill_after=${1#*=} ;;
      --) break ;;
      -*) go_on_refuse "$1: expected --ranks=N, --least=M, --hosts=a:2,b:2, --grace=S or --kill-after=S before mpirun"; return 2 ;;
      *) break ;;
    esac
    shift
  done
  go_on_check || return 2
  while (($#)) && [[ $1 != -- ]]; do launcher+=("$1"); shift; done
  if ((${#launcher[@]} == 0 || $# < 2)); then go_on_refuse "expected mpirun, --, and a program"; return 2; fi
  shift
  local word from=0
  for word in "$@"; do
    case $word in
      --init_from=resume | --init_from=auto | --init_from=auto:*) from=1 ;;
      --init_from* | --overwrite*)
        go_on_refuse "$word: each start goes on from the last checkpoint; expected --init_from=auto, auto:WEIGHTS or resume"
        return 2 ;;
    esac
  done
  scratch=$(mktemp -d) && mkfifo "$scratch/errors" || return 1
  exec {said}>&2

  local before
  before=$(trap -p INT TERM HUP USR1)
  trap 'go_on_stop INT' INT
  trap 'go_on_stop TERM' TERM
  trap 'go_on_stop HUP' HUP
  trap 'saves=1 owed=1' USR1 # go_on_start passes it on
  code=0
  while go_on_start "$@" && [[ -z $stop ]] && ((!saves)) && go_on_lost; do
    go_on_take_away
    if ((!from)); then set -- "$@" --init_from=auto; fi # not before: the first start is as the caller wants it
    from=1
  done
  if ((saves)) && [[ -z $stop ]]; then go_on_asked; fi
  trap - INT TERM HUP
  if [[ $before != *USR1* ]]; then trap - USR1; fi
  eval "$before"
  exec {said}>&-
  rm -rf "$scratch"
  case $stop in
    INT) return 130 ;;
    TERM) return 143 ;;
    HUP) return 129 ;;
  esac
  return "$code"
}

go_on_say() { printf '== %s\n' "$*" >&"$said"; }
# A short pause, if the process runs. Not `wait`: where a trapped signal interrupts it, bash can lose the code of a process that
# ends at that moment, and then takes it for running for ever.
go_on_wait_for() { if kill -0 "$1" 2> /dev/null; then sleep 0.2; fi; }
go_on_refuse() { printf '%s: error: %s\n' "${0##*/}" "$*" >&2; }
go_on_ranks() { if (($1 == 1)); then echo "1 rank"; else echo "$1 ranks"; fi; }

# Reads hosts and compares the numbers. Sets names, slots and total.
go_on_check() {
  local number='^[1-9][0-9]{0,5}$' seconds='^[0-9]{1,6}$' machine='[A-Za-z0-9._-]+:[1-9][0-9]{0,5}' entry given=$total
  if [[ -n $hosts ]]; then
    total=0
    if [[ ! $hosts =~ ^$machine(,$machine)*$ ]]; then
      go_on_refuse "--hosts: expected NAME:RANKS, separated by commas, got '$hosts'"
      return 1
    fi
    for entry in ${hosts//,/ }; do
      names+=("${entry%:*}") slots+=("${entry#*:}")
      total=$((total + ${entry#*:}))
    done
    if [[ -n $given && $given != "$total" ]]; then
      go_on_refuse "--ranks=$given: expected the $total ranks of --hosts=$hosts"
      return 1
    fi
  else
    names=('') slots=("$total")
  fi
  if [[ ! $total =~ $number ]]; then go_on_refuse "--ranks: expected a positive number, got '$total'"; return 1; fi
  if [[ ! $least =~ $number ]]; then go_on_refuse "--least: expected a positive number, got '$least'"; return 1; fi
  if [[ ! $grace =~ $seconds ]]; then go_on_refuse "--grace: expected a number of seconds, got '$grace'"; return 1; fi
  if [[ ! $kill_after =~ $seconds ]]; then go_on_refuse "--kill-after: expected a number of seconds, got '$kill_after'"; return 1; fi
  if ((least > total)); then
    go_on_refuse "--least=$least: expected at most the number of ranks, which is $total"
    return 1
  fi
}

# Leaves out machines that do not answer. Sets total.
go_on_ask_hosts() {
  local agent i asked=() here
  here=$(uname -n)
  IFS=' ' read -ra agent <<< "${OMPI_MCA_plm_rsh_agent:-ssh}"
  for i in "${!names[@]}"; do
    asked[i]=''
    if ((slots[i] == 0)) || [[ -z ${names[i]} || ${names[i]} == localhost || ${names[i]} == "${here%%.*}" || ${names[i]} == "$here" ]]; then
      continue
    fi
    timeout 10 "${agent[@]}" "${names[i]}" true < /dev/null > /dev/null 2>&1 &
    asked[i]=$!
  done
  total=0
  for i in "${!names[@]}"; do
    if [[ -n ${asked[i]} ]] && ! go_on_wait "${asked[i]}"; then
      if go_on_ends; then return; fi
      go_on_say "'${names[i]}' does not answer, and is left out"
      slots[i]=0
    fi
    total=$((total + slots[i]))
  done
}
# Whether a signal says that nothing is started any more.
go_on_ends() { [[ -n $stop ]] || ((saves)); }
# wait, also through signals that are trapped, but not through those that end the run. Returns the process's code.
go_on_wait() {
  local ended=0
  while :; do
    ended=0
    wait "$1" || ended=$?
    if go_on_ends || ((ended <= 128)) || ! kill -0 "$1" 2> /dev/null; then return "$ended"; fi
  done
}

# Becomes a rank: bash -c "$go_on_rank" go_on PROGRAM ARGUMENT... SIGUSR1 ends a program that does not handle it yet, and mpirun
# passes none on to ranks that do not run yet. So each rank has a process beside it that prints the line go_on_ready once the
# program handles SIGUSR1 (10, a bit of SigCgt in /proc/PID/status). It looks for go_on_patience seconds.
go_on_ready='== this rank handles SIGUSR1' go_on_patience=30
go_on_rank="
( (
  exec < /dev/null > /dev/null
  for ((i = 0; i < $go_on_patience * 10; ++i)); do
    status=\$(cat /proc/\$\$/status 2> /dev/null) || exit
    if [[ \$status =~ SigCgt:[[:space:]]*([0-9a-f]+) ]] && ((0x\${BASH_REMATCH[1]} & 1 << 9)); then
      echo '$go_on_ready' >&2
      exit
    fi
    sleep 0.1
  done
) & )
exec \"\$@\""

# Passes on what mpirun and the ranks print on standard error; keeps the lines that tell of lost ranks, and counts ranks that
# are ready.
go_on_read_errors() {
  local line ready=0
  trap '' INT TERM HUP USR1
  while IFS= read -r line || [[ -n $line ]]; do
    if [[ $line == *"$go_on_ready"* ]]; then
      ready=$((ready + 1))
      if ((ready == total)); then : > "$scratch/ready"; fi
      line=${line/"$go_on_ready"/}
      if [[ -z $line || $line == *'<stderr>:' ]]; then continue; fi # mpirun's --tag-output
    fi
    printf '%s\n' "$line" >&2
    case $line in
      *'giving up'* | *'missed its deadline'*) : > "$scratch/given_up" ;;&
      *'; missing ranks: '* | *'mpirun noticed that process rank '* | *'Remote daemon: '*) printf '%s\n' "$line" >> "$scratch/notes" ;;
    esac
  done < "$scratch/errors"
}

# Starts the run, and waits for its end. Sets code. Fails if there are too few ranks.
go_on_start() {
  local place=() reader i names_now='' variable given_up=0 ended=0 began
  go_on_ask_hosts
  if go_on_ends; then return 1; fi
  if ((total < least)); then
    go_on_say "$(go_on_ranks "$total") can be had, and --least=$least: not going on"
    if ((code == 0)); then code=1; fi
    return 1
  fi
  if [[ -n $hosts ]]; then
    for i in "${!names[@]}"; do
      if ((slots[i] > 0)); then names_now+=,${names[i]}:${slots[i]}; fi
    done
    place=(--host "${names_now#,}" --map-by slot)
    while read -r variable; do place+=(-x "$variable"); done < <(compgen -e | grep -E '^(FSDP|NCCL|OPENBLAS)_')
  fi
  rm -f "$scratch/notes" "$scratch/given_up" "$scratch/ready"
  : > "$scratch/notes"
  go_on_read_errors &
  reader=$!
  set -m # a process group of its own: Ctrl-C reaches go_on alone, and mpirun through it, once
  "${launcher[0]}" -n "$total" ${place[@]+"${place[@]}"} "${launcher[@]:1}" bash -c "$go_on_rank" go_on "$@" \
    < /dev/null 2> "$scratch/errors" &
  mpirun=$! ran=1 began=$SECONDS
  set +m
  if [[ -n $stop ]]; then kill "-$stop" "$mpirun" 2> /dev/null; fi
  { # without the shell's own words on jobs that are killed
    while kill -0 "$mpirun"; do
      go_on_wait_for "$mpirun"
      if ((owed)) && { [[ -e $scratch/ready ]] || ((SECONDS - began > go_on_patience)); }; then
        owed=0 # several that came before are one; each later one is passed on, and stops the ranks at once
        kill -USR1 "$mpirun"
      fi
      if ((given_up == 0)) && [[ -e $scratch/given_up ]]; then given_up=$((SECONDS + 1)); fi
      if ((given_up > 0 && SECONDS - given_up >= grace)); then
        go_on_say "mpirun has not ended $grace seconds after a rank gave up: ending it"
        ended=1
        go_on_end
      elif [[ -n $stop ]] && ((SECONDS - stopped_at > grace)); then
        go_on_end
      fi
    done
    code=0
    wait "$mpirun" || code=$?
    mpirun=0
    if ((ended)); then code=75; fi
    # Something that mpirun has left behind may hold the pipe: what it prints now tells nothing new.
    for i in 1 2 3; do
      if kill -0 "$reader"; then go_on_wait_for "$reader"; fi
    done
    kill -KILL "$reader"
    wait "$reader" || true
  } 2> /dev/null
}

# A process and those that it has started.
go_on_tree() {
  local child
  echo "$1"
  # shellcheck disable=SC2013  # words
  for child in $(cat "/proc/$1"/task/*/children 2> /dev/null); do go_on_tree "$child"; done
}
# Ends mpirun and its processes on this machine.
go_on_end() {
  local all until=$((SECONDS + kill_after))
  all=$(go_on_tree "$mpirun")
  kill -TERM "$mpirun"
  while kill -0 "$mpirun" && ((SECONDS <= until)); do go_on_wait_for "$mpirun"; done
  # shellcheck disable=SC2086  # a word each
  if kill -0 "$mpirun"; then kill -KILL $all; fi
}
go_on_stop() {
  if [[ -n $stop ]]; then # for the second time: at once
    if ((mpirun)); then
      # shellcheck disable=SC2046  # a word each
      kill -KILL $(go_on_tree "$mpirun") 2> /dev/null
    fi
    return
  fi
  stop=$1 stopped_at=$SECONDS
  if ((mpirun)); then kill "-$1" "$mpirun" 2> /dev/null; fi
}

# Whether the exit code, or what was printed, says that ranks were lost.
go_on_lost() {
  case $code in
    70 | 75 | 137 | 143) return 0 ;;
    0 | 2 | 85) return 1 ;;
  esac
  grep -q 'Remote daemon: ' "$scratch/notes"
}

# After SIGUSR1, when the run has ended: sets the code. 138: a rank has got SIGUSR1 before it handled it. Below 0: bash has lost the
# code, because mpirun ended as the signal came.
go_on_asked() {
  if ((ran && code >= 0 && code != 138)) && ! go_on_lost; then return; fi
  local then="mpirun ended with code $code instead of 85, and nothing is started again"
  if ((!ran)); then then="mpirun was not started"; fi
  if ((code < 0)); then then="mpirun ended at the same time"; fi
  go_on_say "asked to stop by SIGUSR1: $then; the newest checkpoint or snapshot is what is left"
  code=85
}

# Takes the places of lost ranks away, at least one. Ranks are known by what was printed: mpirun names a rank that was killed;
# ranks that gave up name those that were missing, of which some may only have waited elsewhere. So ranks are taken away only
# down to least.
go_on_take_away() {
  local lost='' all=$total rank i first machine taken=0
  machine=$(sed -nE 's/.*Remote daemon: .* on node ([^ ]+).*/\1/p' "$scratch/notes" | tail -n 1)
  for i in "${!names[@]}"; do
    if [[ -n $machine && ${names[i]} == "$machine" ]]; then taken=${slots[i]} slots[i]=0; fi
  done
  if ((taken == 0)); then
    if ((code == 137 || code == 143)); then
      lost=$(sed -nE 's/.*noticed that process rank ([0-9]+) .*/\1/p' "$scratch/notes")
    else # missing, and nothing was heard of
      lost=$(sed -nE 's/^rank ([0-9]+): .*; missing ranks: ([0-9, ]+); .*/\1:\2/p' "$scratch/notes" | awk -F: '
        { heard[$1]; n = split($2, some, /, */); for (i = 1; i <= n; ++i) missing[some[i] + 0] }
        END { for (rank in missing) if (!(rank in heard)) print rank }' | sort -n)
    fi
    local places=("${slots[@]}")
    for rank in $lost; do
      first=0
      for i in "${!names[@]}"; do
        if ((rank >= first && rank < first + places[i] && slots[i] > 0 && (taken == 0 || all - taken > least))); then
          slots[i]=$((slots[i] - 1)) taken=$((taken + 1))
          break
        fi
        first=$((first + places[i]))
      done
    done
  fi
  if ((taken == 0)); then # nobody knows which
    for ((i = ${#names[@]} - 1; i >= 0; --i)); do
      if ((slots[i] > 0)); then slots[i]=$((slots[i] - 1)) taken=1; break; fi
    done
  fi
  local then="going on with $(go_on_ranks $((all - taken))) instead of $all, from the newest checkpoint or snapshot"
  if ((all - taken < least)); then then="of $(go_on_ranks "$all"), $((all - taken)) can be had"; fi
  go_on_say "mpirun ended with code $code, and ranks were lost: $then"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set -uo pipefail
  trap 'saves=1 owed=1' USR1 # also before and after go_on has its own
  case ${1-} in
    '' | -h | --help) sed -n '3,19s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  esac
  go_on "$@"
fi
