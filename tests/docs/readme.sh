#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# README shows examples/usage/smallest_trainer.cpp; docs/libtorch.md has the difference of two trainers; every file, folder and heading that README and docs/ link to, and
# every path in them, exists; docs/reference.md has every field of the structs of options; each function in the walks of docs/concepts.md is in its file.
set -euo pipefail
cd "${FSDP_SOURCE:-$(dirname "$0")/../..}"
shown=$(sed -n '/^```cpp$/,/^```$/p' README.md | sed '1d;$d')
program=$(sed -n '/^#include/,/^\/\/ Output:$/p' examples/usage/smallest_trainer.cpp | sed '$d' | sed -e :a -e '/^\n*$/{$d;N;ba' -e '}')
diff <(echo "$shown") <(echo "$program") || { echo "README.md does not show examples/usage/smallest_trainer.cpp"; exit 1; }

difference=$(diff -U3 examples/libtorch/train.cpp examples/libtorch/train_sharded.cpp | sed '1,2d; /^@@/d') || true
shown=$(sed -n '/^```diff$/,/^```$/p' docs/libtorch.md | sed '1d;$d')
diff <(echo "$shown") <(echo "$difference") || { echo "docs/libtorch.md does not show the difference of examples/libtorch"; exit 1; }

failed=0
walks=$(sed -n '/^## Two walks/,/^## Who/s/^| `\([a-zA-Z_:]*\)` | `\([a-z_\/]*\.hpp\)` |.*/\1 \2/p' docs/concepts.md)
(($(wc -l <<<"$walks") >= 25)) || { echo "docs/concepts.md: the walks were not found"; failed=1; }
while read -r function file; do
  scope=${function%%::*} name=${function##*::}
  [[ $scope == "$name" || $scope == kernels ]] || grep -qE "(class|struct) (\[\[nodiscard\]\] )?$scope\b" "include/fsdp/$file" ||
    { echo "docs/concepts.md: include/fsdp/$file has no $scope"; failed=1; }
  grep -qE "\b$name(\(| = |;)" "include/fsdp/$file" || { echo "docs/concepts.md: include/fsdp/$file has no $function"; failed=1; }
done <<<"$walks"
# The names under which a browser finds the headings of a page, a line each.
anchors() {
  awk '/^ *```/ { fence = !fence } !fence && /^#/' "$1" | sed -E 's/^#+ +//; s/\[([^]]*)\]\([^)]*\)/\1/g' | tr 'A-Z ' 'a-z-' | tr -cd 'a-z0-9_\n-'
}
links=0
for page in README.md CONTRIBUTING.md docs/*.md docs/adr/*.md docs/history/*.md examples/*/README.md; do
  while read -r target; do
    [[ $target == *://* ]] && continue
    links=$((links + 1)) file=$page
    [[ $target == \#* ]] || file=$(dirname "$page")/${target%%#*}
    [[ -e $file ]] || { echo "$page links to $target, which does not exist"; failed=1; continue; }
    [[ $target != *#* ]] || grep -qxF -- "${target#*#}" <<<"$(anchors "$file")" || { echo "$page links to $target, a heading that does not exist"; failed=1; }
  done < <(grep -oE '\]\([^) ]+\)' "$page" | sed -E 's/^\]\(//; s/\)$//')
done
while read -r where; do
  path=$(sed -E 's/.*`([^`]+)`$/\1/' <<<"$where")
  [[ -e $path || $path == */NAME ]] || { echo "$where, which does not exist"; failed=1; }
done < <(grep -noE '`(benchmarks|cmake|docs|examples|include|tests)/[A-Za-z0-9_./-]+`' README.md CONTRIBUTING.md docs/*.md docs/adr/*.md docs/history/*.md examples/*/README.md)
for program in examples/usage/*.cpp; do
  name=$(basename "$program" .cpp)
  for page in docs/README.md docs/site/pages.dox; do grep -q "\b$name\.cpp" "$page" || { echo "$page does not have $program"; failed=1; }; done
done
fields=0
for struct in $(grep -rhoE '^struct [A-Za-z]+Options' include/fsdp/*.hpp | sed 's/struct //' | sort -u); do
  while read -r field; do
    fields=$((fields + 1))
    grep -q "\`$field\`" docs/reference.md || { echo "docs/reference.md does not have $struct::$field"; failed=1; }
  done < <(sed -n "/^struct $struct\b/,/^};/p" include/fsdp/*.hpp | sed -E 's@//.*@@' | sed -nE 's/^  [A-Za-z_][A-Za-z_:<>0-9 ]* ([a-z_0-9]+)( = [^;]*|\{[^;]*)?;.*/\1/p')
done
((fields > 50)) || { echo "only $fields fields of options were found"; failed=1; }
((links > 200)) || { echo "only $links links were found"; failed=1; }
exit $failed
