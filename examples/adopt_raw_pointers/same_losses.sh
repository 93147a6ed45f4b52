#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Both programs print the same steps, and losses that differ by rounding at most (one part in a thousand).
# usage: same_losses.sh BEFORE AFTER
set -euo pipefail
before=$("$1") after=$("$2")
paste -d ' ' <(echo "$before") <(echo "$after") | awk '
  $1 != "step" || $5 != "step" || $2 != $6 { print "lines differ: " $0; bad = 1; next }
  { difference = $4 > $8 ? $4 - $8 : $8 - $4; if (difference > $4 / 1000) { print "losses differ: " $0; bad = 1 } ++lines }
  END { if (lines != 4) { print lines + 0 " lines compared instead of 4"; bad = 1 } exit bad }'
echo "$after"
