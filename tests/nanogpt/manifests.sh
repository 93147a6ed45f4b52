#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The manifests for Kubernetes are YAML, give nanogpt options that it has, and set environment variables that something reads;
# their Secret is what the program accepts.
# programs: nanogpt
# skip-sanitizers
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
nanogpt=$1/examples/nanogpt/nanogpt
if ! python3 -c 'import yaml' 2> /dev/null; then
  echo "skipped: no python3 with yaml"
  exit 77
fi
enter "$nanogpt"

# read.py FILE: lines `kind KIND`, `command WORD...`, `variable NAME`, `secret MODE PATH FOLDER`
cat > read.py << 'END'
import sys
import yaml

def pods(node):
    if isinstance(node, dict):
        if 'containers' in node:
            yield node
        node = list(node.values())
    if isinstance(node, list):
        for part in node:
            yield from pods(part)

documents = list(yaml.safe_load_all(open(sys.argv[1])))
arguments = [document.get('spec', {}).get('trainer', {}).get('args', []) for document in documents]  # of a TrainJob
for document in documents:
    print('kind', document['apiVersion'], document['kind'])
    for pod in pods(document):
        secrets = {volume['name']: volume['secret'] for volume in pod.get('volumes', []) if 'secret' in volume}
        for container in pod['containers']:
            words = container['command'] + container.get('args', [])
            print('command', *words, *(sum(arguments, []) if 'args' not in container else []))
            paths = {variable['name']: variable.get('value') for variable in container.get('env', [])}
            for name in paths:
                print('variable', name)
            for mount in container.get('volumeMounts', []):
                if mount['name'] in secrets:
                    print('secret', oct(secrets[mount['name']]['defaultMode']), paths['FSDP_SECRET_FILE'], mount['mountPath'])
END

"$nanogpt" train --help > help 2>&1
# Written out in the sources, the program's own and the entry point.
grep -rhoE '"(FSDP|NCCL|MASTER|WORLD|LOCAL)_[A-Z_]+"|"RANK"' "$source/include" "$source/examples" | tr -d '"' | sort -u > variables
grep -oE '\$\{[A-Z_]+' "$source/examples/transformer/launch/start_ranks.sh" | tr -d '${' | sort -u >> variables

for manifest in jobset trainjob elasticjob; do
  checks=$((checks + 1))
  if ! python3 read.py "$source/examples/nanogpt/deploy/kubernetes/$manifest.yaml" > output 2>&1; then
    fail "$manifest.yaml cannot be read"
    continue
  fi
  cp output read
  check "$manifest: no kind" grep -q '^kind ' read
  check "$manifest: no container" test "$(grep -c '^command ' read)" = 1
  read -ra command < <(sed -n 's/^command //p' read)
  check "$manifest: does not run nanogpt train with a config" grep -qE '^command .* nanogpt train train_gpt2 ' read
  for word in "${command[@]}"; do
    [[ $word == --* ]] || continue
    case $manifest:$word in elasticjob:--nnodes=* | elasticjob:--nproc-per-node=* | elasticjob:--max-restarts=* | elasticjob:--no-python) continue ;; esac
    check "$manifest: nanogpt has no $word" grep -qE -- "^ *${word%%=*}(=| )" help
  done
  if [[ $manifest != elasticjob ]]; then
    check "$manifest: does not run the entry point" test "${command[0]##*/}" = start_ranks.sh -a -x "$source/examples/transformer/launch/start_ranks.sh"
    check "$manifest: no hook that asks the ranks to stop" \
      grep -qF 'command: [/bin/kill, -USR1, "1"]' "$source/examples/nanogpt/deploy/kubernetes/$manifest.yaml"
  fi
  for name in $(sed -n 's/^variable //p' read); do
    check "$manifest: nothing reads $name" grep -qx "$name" variables
  done
  read -r mode path mounted < <(sed -n 's/^secret //p' read)
  check "$manifest: the Secret has mode $mode" test "$mode" = 0o400
  check "$manifest: the Secret's key is no file of its folder" test "${path%/*}" = "$mounted"
done
# A command's arguments are in the shell's history, and every process can read them.
check "a command has a secret among its arguments" test -z "$(grep -rlE -- '--from-literal|FSDP_SECRET=' "$source/docs" "$source/examples" "$source/README.md")"
((failures == 0)) && echo "$checks checks passed"
exit $((failures > 0))
