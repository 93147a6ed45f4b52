#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# README's example is the loop of examples/mlp; docs/libtorch.md has the difference of two trainers; every file and folder that README and docs/ link to exists.
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
for page in README.md CONTRIBUTING.md docs/*.md docs/adr/*.md; do
  while read -r target; do
    [[ $target == *://* || $target == \#* ]] && continue
    [[ -e $(dirname "$page")/${target%%#*} ]] || { echo "$page links to $target, which does not exist"; failed=1; }
  done < <(grep -oE '\]\([^) ]+\)' "$page" | sed -E 's/^\]\(//; s/\)$//')
done
exit $failed
