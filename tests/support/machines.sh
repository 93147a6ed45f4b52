# SPDX-License-Identifier: Apache-2.0
# Machines that are namespaces of this one: each has its own network, host name, mounts (with an own /dev/shm) and IPC, and
# a link to a switch or to a relay. Sourced: `. "$(dirname "$0")/../support/machines.sh"`. Functions:
#   enter_on_machines BINARY_DIR     machines_expect, then works beside `nanogpt` and its dataset `d` (after script.sh)
#   machines_expect                  ends the script with 77 and the reason where namespaces cannot be made
#   machines_up N [OPTION...]        makes machines 0 to N - 1; --rate=100mbit, --delay=5ms, --loss=0.1% are each link's
#   machines_run RANKS COMMAND...    runs a command on machine 0. RANKS, "2 2", are the slots of each machine: `mpirun` in
#                                    the command starts that many ranks there, and needs no options
#   machine_run I COMMAND...         runs a command on machine I
#   machines_bytes                   prints the bytes that all machines have sent over their links until now, but for the
#                                    payload that TCP has sent again: on a busy machine it does so without a loss
#   machine_kill I                   kills all processes of machine I
#   machine_cut I                    nothing passes machine I's link any more, and nobody is told
#   machines_down                    ends everything; the trap of whoever sources this calls it
# Other machines of namespaces may run at the same time: nothing here has a name or address outside its own namespaces.
machines_support=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
machines_folder=
machines_number=0
. "$machines_support/mpirun.sh"

machines_expect() {
  local program
  for program in ip tc mpirun unshare nsenter setpriv python3; do
    command -v "$program" >/dev/null || { echo "skipped: there is no $program"; exit 77; }
  done
  unshare --net --uts --mount --ipc --propagation private mount -t tmpfs tmpfs /dev/shm 2>/dev/null ||
    { echo "skipped: this user may not make namespaces and mount in them"; exit 77; }
}

enter_on_machines() {
  nanogpt=$(cd "$1" && pwd)/examples/nanogpt/nanogpt
  [[ ! -x $nanogpt || $(ldd "$nanogpt") == *libmpi* ]] || { echo "skipped: nanogpt is built without MPI"; exit 77; }
  machines_expect
  enter_with_text "$nanogpt"
  at_exit 'machines_down; chmod -R u+w "$folder"; rm -rf "$folder"'
  export OPENBLAS_NUM_THREADS=1
}

machine_address() { echo "10.77.0.$(($1 + 1))"; }
machine_keeper() { cat "$machines_folder/$1.pid"; }
machine_run() {
  FSDP_MACHINES=$machines_folder "$machines_support/enter_machine.sh" "$(machine_address "$1")" "$(printf '%q ' "${@:2}")"
}

# machines_keep NAME COMMANDS: a process with namespaces of its own, which end with it and with this shell.
machines_keep() {
  unshare --net --uts --mount --ipc --propagation private \
    setpriv --pdeathsig KILL bash -c "$2"' && : >"$0" && exec sleep infinity' "$machines_folder/$1.ready" &
  echo $! >"$machines_folder/$1.pid"
  disown
  until [[ -e $machines_folder/$1.ready ]]; do
    kill -0 "$(machine_keeper "$1")" 2>/dev/null || { echo "machine $1 did not come up" >&2; return 1; }
    sleep 0.02
  done
}

machines_up() {
  local count=$1 option rate='' delay=0 loss=0 i
  for option in "${@:2}"; do
    case $option in
      --rate=*) rate=${option#*=} ;;
      --delay=*ms) delay=${option#*=} delay=${delay%ms} ;;
      --loss=*%) loss=${option#*=} loss=${loss%\%} ;;
      *) echo "machines: expected --rate=100mbit, --delay=5ms or --loss=0.1%, got $option" >&2; return 2 ;;
    esac
  done
  machines_folder=$(mktemp -d) machines_number=$count
  for ((i = 0; i < count; ++i)); do
    machines_keep "$i" "hostname machine$i-$$ && mount -t tmpfs tmpfs /dev/shm && ip link set lo up" || return 1
  done
  if [[ $delay == 0 && $loss == 0 ]]; then machines_switch; else machines_relay "$delay" "$loss"; fi || return 1
  [[ -z $rate ]] && return
  for ((i = 0; i < count; ++i)); do
    machine_run "$i" tc qdisc add dev wire root tbf rate "$rate" burst 128kb latency 200ms || return 1
  done
}
# A bridge in a namespace of its own.
machines_switch() {
  local i keeper switch
  machines_keep switch "ip link add switch type bridge && ip link set switch up" || return 1
  switch=$(machine_keeper switch)
  for ((i = 0; i < machines_number; ++i)); do
    keeper=$(machine_keeper "$i")
    nsenter --target "$switch" --net ip link add "port$i" type veth peer name wire netns "$keeper" &&
      nsenter --target "$switch" --net ip link set "port$i" master switch up &&
      nsenter --target "$keeper" --net ip address add "$(machine_address "$i")/24" dev wire &&
      nsenter --target "$keeper" --net ip link set dev wire up || return 1
  done
}
# A program that hands packets from one machine to another, later.
machines_relay() {
  local i arguments=()
  for ((i = 0; i < machines_number; ++i)); do arguments+=("$(machine_keeper "$i")" "$(machine_address "$i")"); done
  mkfifo "$machines_folder/relay"
  setpriv --pdeathsig KILL python3 "$machines_support/relay.py" "$1" "$2" "$machines_folder/relay" "${arguments[@]}" \
    >"$machines_folder/relay.out" 2>&1 &
  echo $! >"$machines_folder/relay.pid"
  disown
  until grep -qx up "$machines_folder/relay.out"; do
    kill -0 "$(cat "$machines_folder/relay.pid")" 2>/dev/null || { cat "$machines_folder/relay.out" >&2; return 1; }
    sleep 0.02
  done
}

machines_run() {
  local i ranks
  read -ra ranks <<<"$1"
  for ((i = 0; i < ${#ranks[@]}; ++i)); do
    echo "$(machine_address "$i") slots=${ranks[i]}"
  done >"$machines_folder/hosts"
  shift
  (
    export FSDP_MACHINES=$machines_folder
    export OMPI_MCA_plm_rsh_agent=$machines_support/enter_machine.sh OMPI_MCA_plm_rsh_no_tree_spawn=1
    export OMPI_MCA_orte_default_hostfile=$machines_folder/hosts
    export OMPI_MCA_btl_tcp_if_include=wire OMPI_MCA_oob_tcp_if_include=wire
    export PRTE_MCA_plm_ssh_agent=$OMPI_MCA_plm_rsh_agent PRTE_MCA_prte_default_hostfile=$machines_folder/hosts
    machine_run 0 "$@"
  )
}

machines_bytes() {
  local i net payload=1448  # of a TCP segment with timestamps in a packet of 1,500 bytes
  for ((i = 0; i < machines_number; ++i)); do
    net=/proc/$(machine_keeper "$i")/net
    cat "$net/dev" "$net/snmp"
  done | awk -v payload=$payload '
    $1 == "wire:" { sum += $10 }
    $1 == "Tcp:" && $2 == "RtoAlgorithm" { for (i = 2; i <= NF; ++i) if ($i == "RetransSegs") again = i }
    $1 == "Tcp:" && $2 != "RtoAlgorithm" { sum -= payload * $again }
    END { printf "%.0f\n", sum }'
}

machine_kill() {
  local process keeper
  keeper=$(machine_keeper "$1")
  for process in /proc/[0-9]*; do
    [[ $process != "/proc/$keeper" && $process/ns/net -ef /proc/$keeper/ns/net ]] && kill -KILL "${process#/proc/}" 2>/dev/null
  done
  return 0
}
machine_cut() {
  if [[ -p $machines_folder/relay ]]; then
    echo "$1" >"$machines_folder/relay"
  else
    nsenter --target "$(machine_keeper switch)" --net ip link set "port$1" nomaster
  fi
}

machines_down() {
  local i file
  [[ -d $machines_folder ]] || return 0
  for ((i = 0; i < machines_number; ++i)); do [[ -e $machines_folder/$i.pid ]] && machine_kill "$i"; done
  for file in "$machines_folder"/*.pid; do kill -KILL "$(cat "$file")" 2>/dev/null; done
  rm -rf "$machines_folder"
  machines_folder=
}
