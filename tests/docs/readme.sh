#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# README's example is the loop of examples/mlp; docs/libtorch.md has the difference of two trainers; every file and folder that README and docs/ link to exists;
# each function in the walks of docs/concepts.md is in its file.
set -euo pipefail
cd "${FSDP_SOURCE:-$(dirname "$0")/../..}"
loop=$(sed -n '/\[README\]/,/\[README\]/p' examples/mlp/train.hpp | sed '1d;$d' | sed 's/^  //')
shown=$(sed -n '/^```cpp$/,/^```$/p' README.md | sed '1d;$d')
[[ $(wc -l <<<"$loop") -gt 10 ]] || { echo "no [README] part in examples/mlp/train.hpp"; exit 1; }
diff <(echo "$shown") <(echo "$loop") || { echo "README.md does not show examples/mlp/train.hpp"; exit 1; }

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
for page in README.md CONTRIBUTING.md docs/*.md docs/adr/*.md; do
  while read -r target; do
    [[ $target == *://* || $target == \#* ]] && continue
    [[ -e $(dirname "$page")/${target%%#*} ]] || { echo "$page links to $target, which does not exist"; failed=1; }
  done < <(grep -oE '\]\([^) ]+\)' "$page" | sed -E 's/^\]\(//; s/\)$//')
done
exit $failed
