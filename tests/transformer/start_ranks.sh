#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A container's entry point gives each rank its place, from whatever names the index of the pod; passes a request to stop on
# once; ends the others of a rank that fails; and its exit code says what has happened.
# skip-sanitizers
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
start_ranks=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../examples/transformer/launch" && pwd)/start_ranks.sh
enter /usr/bin/perl
unset NODE_RANK PET_NODE_RANK JOB_COMPLETION_INDEX NODES PET_NNODES RANKS_PER_NODE PET_NPROC_PER_NODE MASTER_ADDR \
  PET_MASTER_ADDR MASTER_PORT PET_MASTER_PORT

# A rank notes its place.
cat > rank << 'END'
#!/bin/bash
echo "$RANK of $WORLD_SIZE, $LOCAL_RANK here, at $MASTER_ADDR:$MASTER_PORT: $*" > "place.$RANK"
END
# A rank that works until it is asked to stop, and counts how often it is. No shell: those cannot handle a signal that was
# ignored when they began.
cat > works << 'END'
#!/usr/bin/perl
$asked = 0;
$SIG{USR1} = sub { ++$asked };
open(F, '>', "ready.$ENV{RANK}"); close(F);
select(undef, undef, undef, 0.05) until $asked > 0 && -e 'all_signals_sent';
open(F, '>', "asked.$ENV{RANK}"); print F "$asked\n"; close(F);
exit 85;
END
# Rank 1 fails, the others wait for it for ever; rank 2 takes no SIGTERM for an answer.
cat > fails << 'END'
#!/bin/bash
if ((RANK == 2)); then trap '' TERM; fi
touch "ready.$RANK"
if ((RANK == 1)); then
  until [[ -e ready.0 && -e ready.2 ]]; do sleep 0.05; done
  exit 70
fi
while [[ -e fails ]]; do sleep 0.05; done
END
printf '#!/bin/bash\nexit $((RANK == 0 ? 0 : 85))\n' > some_save
printf '#!/bin/bash\nfor gpu in 0 1 2; do echo "GPU $gpu: a card"; done\n' > nvidia-smi
chmod +x rank works fails some_save nvidia-smi

# places LINE...: what the ranks noted, in order
places() { check "places: $(cat place.* 2> /dev/null | tr '\n' ';')" test "$(cat place.*)" = "$(printf '%s\n' "$@")" && rm -f place.*; }
started() { env "$@" > output 2>&1 || fail "$*"; }

started NODE_RANK=1 NODES=2 RANKS_PER_NODE=2 MASTER_ADDR=a MASTER_PORT=7 "$start_ranks" ./rank x "y z"
places "2 of 4, 0 here, at a:7: x y z" "3 of 4, 1 here, at a:7: x y z"
started JOB_COMPLETION_INDEX=2 NODES=3 RANKS_PER_NODE=1 MASTER_ADDR=jobset-0 "$start_ranks" ./rank
places "2 of 3, 0 here, at jobset-0:29500: "
started PET_NODE_RANK=1 JOB_COMPLETION_INDEX=0 PET_NNODES=2 PET_NPROC_PER_NODE=2 PET_MASTER_ADDR=b PET_MASTER_PORT=8 "$start_ranks" ./rank
places "2 of 4, 0 here, at b:8: " "3 of 4, 1 here, at b:8: "
started PATH="$PWD:$PATH" PET_NPROC_PER_NODE=auto NODE_RANK=0 NODES=1 MASTER_ADDR=c "$start_ranks" ./rank
places "0 of 3, 0 here, at c:29500: " "1 of 3, 1 here, at c:29500: " "2 of 3, 2 here, at c:29500: "
started NODE_RANK=0 NODES=1 RANKS_PER_NODE=1 "$start_ranks" ./rank
places "0 of 1, 0 here, at :29500: "

refuses() { # refuses TEXT ASSIGNMENT...
  local text=$1
  shift
  code=0
  patiently 60 env "$@" "$start_ranks" ./rank > output 2>&1 || code=$?
  check "ended with $code, not 2" test $code -eq 2
  check "does not say: $text" grep -qF "start_ranks.sh: error: $text" output
  check "has started a rank: $*" test -z "$(find . -name 'place.*')"
}
refuses "NODE_RANK, PET_NODE_RANK and JOB_COMPLETION_INDEX are not set" NODES=2 RANKS_PER_NODE=1 MASTER_ADDR=a
refuses "NODES and PET_NNODES are not set" NODE_RANK=0 RANKS_PER_NODE=1 MASTER_ADDR=a
refuses "MASTER_ADDR and PET_MASTER_ADDR are not set" NODE_RANK=0 NODES=2 RANKS_PER_NODE=1
refuses "index of the node: expected a number below the 2 nodes, got 2" NODE_RANK=2 NODES=2 RANKS_PER_NODE=1 MASTER_ADDR=a
refuses "index of the node: expected a whole number from 0 to 1048576, got '-1'" NODE_RANK=-1 NODES=2 RANKS_PER_NODE=1 MASTER_ADDR=a
refuses "number of nodes: expected a whole number from 1 to 1048576, got '0'" NODE_RANK=0 NODES=0 RANKS_PER_NODE=1 MASTER_ADDR=a
refuses "ranks of a node: expected a whole number from 1 to 1048576, got 'many'" NODE_RANK=0 NODES=2 RANKS_PER_NODE=many MASTER_ADDR=a
refuses "RANKS_GRACE: expected a whole number from 0 to 9999999, got '1s'" NODE_RANK=0 NODES=1 RANKS_PER_NODE=1 RANKS_GRACE=1s
for port in 99999x 0 65536 29500.0 -1; do
  for name in MASTER_PORT PET_MASTER_PORT; do
    refuses "MASTER_PORT: expected a whole number from 1 to 65535, got '$port'" NODE_RANK=0 NODES=2 RANKS_PER_NODE=1 MASTER_ADDR=a $name=$port
  done
done
refuses "number of nodes: expected a whole number from 1 to 1048576, got '9999999'" NODE_RANK=0 NODES=9999999 RANKS_PER_NODE=2 MASTER_ADDR=a
refuses "WORLD_SIZE: expected at most 1048576 ranks, got 524289 nodes with 2 each" NODE_RANK=0 NODES=524289 RANKS_PER_NODE=2 MASTER_ADDR=a
ends_in_error "$start_ranks"
check "no program" grep -q "expected a program" output

# ready COUNT: so many ranks have begun. The limit is for what hangs.
ready() { for _ in $(seq 1200); do if (($(find . -name 'ready.*' | wc -l) >= $1)); then return; fi; sleep 0.05; done; return 1; }
# Asked to stop, by the hook's signal and by the kubelet's; the second one is not passed on.
for first in USR1 TERM; do
  rm -f ready.* asked.* all_signals_sent
  NODE_RANK=0 NODES=1 RANKS_PER_NODE=3 MASTER_ADDR=a "$start_ranks" ./works > output 2>&1 &
  check "the ranks do not begin" ready 3
  kill -$first $!
  kill -TERM $!
  sleep 0.2
  kill -TERM $!
  touch all_signals_sent
  wait $!
  check "asked to stop, it ends with $?" test $? = 85
  check "asked $(cat asked.* | tr '\n' ' ')times" test "$(cat asked.* | tr '\n' ' ')" = "1 1 1 "
done

rm -f ready.*
code=0
patiently 60 env NODE_RANK=0 NODES=1 RANKS_PER_NODE=3 MASTER_ADDR=a RANKS_GRACE=1 "$start_ranks" ./fails > output 2>&1 || code=$?
check "a rank that fails: ended with $code" test $code = 70
check "does not say that a rank failed" grep -q "a rank has ended with 70; the others of this node are ended" output
code=0
env NODE_RANK=0 NODES=1 RANKS_PER_NODE=2 MASTER_ADDR=a "$start_ranks" ./some_save > output 2>&1 || code=$?
check "one rank has saved: ended with $code" test $code = 85
((failures == 0)) && echo "$checks checks passed"
exit $((failures > 0))
