#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The diff in docs/adopting.md is the diff of the two programs. With --update it is written there.
set -euo pipefail
cd "${FSDP_SOURCE:-$(dirname "$0")/../..}"
page=docs/adopting.md
example=examples/adopt_raw_pointers
real=$(diff -u --label before.cpp --label after.cpp $example/before.cpp $example/after.cpp || true)
if [[ ${1:-} == --update ]]; then
  diff_text=$real awk '/^```diff$/ { print; print ENVIRON["diff_text"]; skip = 1 } /^```$/ { skip = 0 } !skip' $page >$page.new
  mv $page.new $page
fi
[[ $(wc -l <<<"$real") -gt 20 ]] || { echo "the programs hardly differ"; exit 1; }
diff <(sed -n '/^```diff$/,/^```$/p' $page | sed '1d;$d') <(echo "$real") ||
  { echo "$page is out of date: run tests/docs/adopting.sh --update"; exit 1; }
