#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# docs/adopting.md shows the kernels and the trainer before of examples/adopt_raw_pointers, and its diff is the diff of the
# two trainers; in each the file's name stands for its first line. With --update they are written there.
set -euo pipefail
cd "${FSDP_SOURCE:-$(dirname "$0")/../..}"
page=docs/adopting.md
example=examples/adopt_raw_pointers
shown() { echo "// $1" && tail -n +2 "$example/$1"; }
kernels=$(shown kernels.hpp)
before=$(shown before.cpp)
change=$(diff -u --label before.cpp --label after.cpp <(shown before.cpp) <(shown after.cpp) || true)
[[ $(wc -l <<<"$change") -gt 20 ]] || { echo "the programs hardly differ"; exit 1; }

# The page with its three blocks as they should be.
expected=$(kernels=$kernels before=$before change=$change awk '
  /^```/ { if (!inside) language = $0; inside = !inside; skip = 0; print; next }
  inside && language == "```cpp" && /^\/\/ kernels.hpp$/ { print ENVIRON["kernels"]; skip = 1; ++found }
  inside && language == "```cpp" && /^\/\/ before.cpp$/ { print ENVIRON["before"]; skip = 1; ++found }
  inside && language == "```diff" && /^--- before.cpp$/ { print ENVIRON["change"]; skip = 1; ++found }
  !skip
  END { if (found != 3) exit 1 }' $page) || { echo "$page lacks a block of kernels.hpp, of before.cpp, or a diff"; exit 1; }
[[ ${1:-} != --update ]] || echo "$expected" >$page
diff $page <(echo "$expected") || { echo "$page is out of date: run tests/docs/adopting.sh --update"; exit 1; }
