#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The program prints the lines behind `// Output:` at the end of its source, where `...` stands for any text.
#   same_output.sh SOURCE COMMAND...
set -uo pipefail
expected=$(sed -n '/^\/\/ Output:$/,$p' "$1" | sed '1d; s/^\/\/ \{0,3\}//')
[[ -n $expected ]] || { echo "$1: no line '// Output:', or nothing behind it"; exit 1; }
output=$("${@:2}") || { echo "$1: exit code $?: $output"; exit 1; }
mapfile -t lines <<<"$expected"
mapfile -t printed <<<"$output"
((${#lines[@]} == ${#printed[@]})) || same=no
for i in "${!lines[@]}"; do
  pattern=$(sed 's/[][\.*?^$+(){}|]/\\&/g; s/\\\.\\\.\\\./.*/g' <<<"${lines[i]}")
  grep -qxE -- "$pattern" <<<"${printed[i]:-}" || same=no
done
[[ ${same:-yes} == yes ]] || { echo "$1: expected"; echo "$expected"; echo "got"; echo "$output"; exit 1; }
