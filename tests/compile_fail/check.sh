#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Code that must not compile, and the words of its errors. Every snippet here compiles with -DCONTROL; without it, the compiler says
# what the snippet's `// expect:` lines say (regular expressions, all of them), in at most 20 lines or as many as its
# `// lines:` allows, besides those that name who includes whom.
# With `own`, only the snippets for which compilers have words of their own: a line `// expect: one|another`.
# usage: check.sh gcc|clang|nvcc COMPILER WORK_DIR [own]
# timeout: 3600
set -euo pipefail
kind=$1 compiler=$2 work=$3 which=${4:-all}
cd "$FSDP_SOURCE/tests/compile_fail"
rm -rf "$work"
mkdir -p "$work"
flags=(-std=c++20 -I"$FSDP_SOURCE/include" -I"$FSDP_SOURCE/tests/compile_fail" -idirafter "$FSDP_FMT_INCLUDE")
warnings=(-Wall -Wextra -Wconversion -Wsign-conversion -Wno-unused -Wno-unused-parameter -Werror)
suffix=cpp
if [[ $kind == nvcc ]]; then
  suffix=cu
  warnings=(-Werror=all-warnings)
  flags=("${flags[@]:0:3}" "-Xcompiler=-idirafter,$FSDP_FMT_INCLUDE" -arch=sm_90 -ptx -o /dev/null)
else
  flags+=(-pthread)
fi
snippets=(*."$suffix")
[[ -e ${snippets[0]} ]] || { echo "no snippets *.$suffix"; exit 1; }
failed=0
complain() {
  echo "$1"
  [[ -z ${2:-} ]] || head -n 60 "$2"
  failed=1
}

# All headers are compiled once.
cat "${snippets[@]}" | grep -E '^ *# *include' | sort -u >"$work/headers.hpp"
headers=(-include "$work/headers.hpp")
if [[ $kind != nvcc ]]; then
  once=()
  if "$compiler" --version | grep -q clang; then # which instantiates templates that the headers use with them, not in each snippet
    headers=(-include-pch "$work/headers.hpp.gch") once=(-Xclang -fpch-instantiate-templates)
  fi
  "$compiler" "${flags[@]}" "${once[@]}" -x c++-header "$work/headers.hpp" -o "$work/headers.hpp.gch" >"$work/log" 2>&1 || {
    complain "the headers do not compile:" "$work/log"
    exit 1
  }
  flags+=(-fsyntax-only)
fi

for snippet in "${snippets[@]}"; do
  printf 'namespace control_%s {\n#include "%s"\n}\n' "${snippet%%.*}" "$snippet"
done >"$work/controls.$suffix"
"$compiler" "${flags[@]}" "${warnings[@]}" "${headers[@]}" -DCONTROL "$work/controls.$suffix" >"$work/log" 2>&1 ||
  complain "a control variant does not compile:" "$work/log"

if [[ $which == own ]]; then mapfile -t snippets < <(grep -lE '^// expect: .*[^\\]\|' "${snippets[@]}"); fi
for snippet in "${snippets[@]}"; do
  if "$compiler" "${flags[@]}" "${headers[@]}" "$snippet" >"$work/log" 2>&1; then
    complain "$snippet compiles, though it must not"
    continue
  fi
  mapfile -t expected < <(sed -n 's|^// expect: ||p' "$snippet")
  ((${#expected[@]})) || complain "$snippet has no '// expect:' line"
  for text in "${expected[@]}"; do
    grep -qE -- "$text" "$work/log" || complain "$snippet: no '$text' in:" "$work/log"
  done
  most=$(sed -n 's|^// lines: ||p' "$snippet")
  lines=$(grep -cvE '^(In file included| {16}) from ' "$work/log" || true)
  ((lines <= ${most:-20})) || complain "$snippet: the message takes $lines lines:" "$work/log"
done
echo "$kind: ${#snippets[@]} snippets"
exit $failed
