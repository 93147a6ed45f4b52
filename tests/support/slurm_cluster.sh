# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Sourced: a Slurm cluster of two nodes on the loopback network, as this user, in a folder of its own.
#
#   start_cluster FOLDER   starts munged, slurmctld and the slurmd of n0 and n1; FOLDER must be absolute
#   lose_node n1           kills a node's slurmd and all that it has started
#   start_node n1          starts its slurmd again
#   end_cluster            kills all of it
#
# Daemons and what they start are known by their logs, which they have open.

# missing_slurm: the programs that this machine lacks; nothing if it has all.
missing_slurm() {
  local program missing=()
  for program in munged mungekey slurmctld slurmd srun sbatch scontrol squeue; do
    command -v "$program" > /dev/null || missing+=("$program")
  done
  echo "${missing[*]-}"
}

start_cluster() {
  cluster=$1
  local port
  port=$(three_ports)
  mkdir -p "$cluster"/{munge,state,n0,n1,log}
  chmod 700 "$cluster/munge"
  mungekey --create --keyfile "$cluster/munge/key" --bits 256
  export SLURM_CONF=$cluster/slurm.conf
  cat > "$SLURM_CONF" << END
ClusterName=drill
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$port
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket=$cluster/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
StateSaveLocation=$cluster/state
SlurmdSpoolDir=$cluster/%n/spool
TmpFS=$cluster/%n
SlurmctldPidFile=$cluster/log/slurmctld.pid
SlurmdPidFile=$cluster/log/%n.pid
SlurmctldLogFile=$cluster/log/slurmctld.log
SlurmdLogFile=$cluster/log/%n.log
SlurmdTimeout=5
MessageTimeout=3
InactiveLimit=0
KillWait=5
MinJobAge=600
ReturnToService=2
JobRequeue=1
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=2
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=2
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
END
  start_daemon munge munged --foreground --force --key-file="$cluster/munge/key" --socket="$cluster/munge/socket" \
    --pid-file="$cluster/munge/pid" --seed-file="$cluster/munge/seed" --num-threads=2
  wait_until 30 test -S "$cluster/munge/socket" || return
  start_daemon slurmctld slurmctld -D -c
  start_node n0
  start_node n1
  wait_until 60 nodes_are idle idle
}
# three_ports: the first of three that nobody has, below those that the system gives to connections by itself.
three_ports() {
  local first=$((20000 + $$ % 3000 * 3)) port
  for port in "$first" $((first + 1)) $((first + 2)); do
    # shellcheck disable=SC2188
    if (< "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then
      first=$((first + 3))
      break
    fi
  done
  echo "$first"
}
start_daemon() { # start_daemon NAME COMMAND...
  "${@:2}" > "$cluster/log/$1.output" 2>&1 < /dev/null &
  disown
}
start_node() { start_daemon "$1" slurmd -D -N "$1"; }
nodes_are() { # nodes_are STATE OF N0, STATE OF N1
  test "$(sinfo --noheader --Node --format="%N %t" 2> /dev/null | sort | tr '\n' ' ')" = "n0 $1 n1 $2 "
}

# processes_of NAME: ids of NAME's daemon and of all that it has started. Slurm's steps have its log open, and their tasks
# are their descendants.
processes_of() {
  local id
  find /proc/[0-9]*/fd -lname "$cluster/log/$1.*" 2> /dev/null | cut -d / -f 3 | sort -un | while read -r id; do
    descendants "$id"
  done | sort -un
}
descendants() { # descendants ID...
  local id
  for id in "$@"; do
    echo "$id"
    # shellcheck disable=SC2046  # a list of ids
    descendants $(cat "/proc/$id"/task/*/children 2> /dev/null)
  done
}
lose_node() {
  local ids
  mapfile -t ids < <(processes_of "$1")
  kill -KILL "${ids[@]}" 2> /dev/null
  wait_until 30 no_process_of "$1"
}
no_process_of() { test -z "$(processes_of "$1")"; }
end_cluster() {
  local name
  for name in n0 n1 slurmctld munge; do lose_node "$name"; done
}

# wait_until SECONDS COMMAND...: until COMMAND is true. Fails after that many seconds.
wait_until() {
  local until=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < until)) || return 1
    sleep 0.2
  done
}
