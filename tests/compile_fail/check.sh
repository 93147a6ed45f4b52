#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A snippet compiles with -DCONTROL, and without it fails with the text of its `// expect:` line (a regular expression).
# usage: check.sh COMPILER SNIPPET
set -euo pipefail
compiler=$1 snippet=$2
expected=$(sed -n 's|^// expect: ||p' "$snippet")
[[ -n $expected ]] || { echo "$snippet has no '// expect:' line"; exit 1; }
flags=(-std=c++20 -I"$FSDP_SOURCE/include" -I"$FSDP_SOURCE/tests")
if [[ $snippet == *.cu ]]; then
  flags+=(-arch=sm_90 -ptx -o /dev/null)
else
  flags+=(-fsyntax-only -pthread)
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! "$compiler" "${flags[@]}" -DCONTROL "$snippet" >"$log" 2>&1; then
  echo "the control variant does not compile:"
  head -n 40 "$log"
  exit 1
fi
if "$compiler" "${flags[@]}" "$snippet" >"$log" 2>&1; then
  echo "compiles, though it must not"
  exit 1
fi
grep -qE -- "$expected" "$log" || { echo "no '$expected' in:"; head -n 40 "$log"; exit 1; }
