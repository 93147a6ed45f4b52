#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The table of guarantees in docs/testing.md names every test that ctest knows, in the stages that run it, and no other.
# Each preset's build checks its own part.
# usage: guarantees.sh PRESET BUILD_DIR [WHETHER LIBTORCH IS THERE] [WHAT IS NOT BUILT HERE]
set -euo pipefail
preset=$1 build=$2 torch=${3:-} absent=${4:-}
cd "${FSDP_SOURCE:-$(dirname "$0")/../..}"
if [[ $(realpath "$build") != "$PWD/build/$preset" ]]; then
  echo "skipped: $build is not the folder of the preset $preset"
  exit 77
fi
if [[ -n $absent ]]; then
  echo "skipped: not everything is built here, for want of $absent"
  exit 77
fi
if [[ $preset == standin-* ]]; then
  echo "skipped: the table has no stage of its own for $preset, which runs what standin runs"
  exit 77
fi
failed=0
complain() { echo "docs/testing.md: $*"; failed=1; }

# "stage pattern" for each test of the table
table=$(awk -F'|' '/^## Guarantees/ { inside = 1; next } /^## / { inside = 0 }
  inside && NF == 5 && $3 ~ /`/ {
    gsub(/[`,]/, " ", $3)
    gsub(/,/, " ", $4)
    tests = split($3, test, " ")
    stages = split($4, stage, " ")
    for (i = 1; i <= tests; ++i) for (j = 1; j <= stages; ++j) print stage[j], test[i]
  }' docs/testing.md)
if [[ ! $torch =~ ^(ON|TRUE|1)$ ]]; then table=$(grep -v '[ _]libtorch' <<<"$table"); fi
(($(wc -l <<<"$table") > 100)) || complain "the table was not found"

of_preset() { ctest --preset "$1" -N | sed -n 's/^ *Test *#[0-9]*: \([^ ]*\).*/\1/p' | sort; }

# compare STAGE TESTS
compare() {
  local test pattern found patterns
  mapfile -t patterns < <(awk -v stage="$1" '$1 == stage { print $2 }' <<<"$table")
  for test in $2; do
    found=0
    for pattern in "${patterns[@]}"; do
      # shellcheck disable=SC2053  # a pattern it is
      if [[ $test == $pattern ]]; then found=1; fi
    done
    ((found)) || complain "the stage $1 runs $test, which stands in no row of that stage"
  done
  for pattern in "${patterns[@]}"; do
    # shellcheck disable=SC2254
    case " $2 " in
      *" "${pattern}" "*) ;;
      *) complain "a row says that the stage $1 runs $pattern, and it does not" ;;
    esac
  done
  echo "$1: $(wc -w <<<"$2") tests, ${#patterns[@]} names in the table"
}
list() { tr '\n' ' ' <<<"$1" | sed 's/ *$//'; }
case $preset in
  cpu)
    host=$(of_preset cpu)
    full=$(of_preset full)
    compare host "$(list "$host")"
    compare full "$(list "$full")"
    compare all "$(list "$(comm -13 <(printf '%s\n' "$host" "$full" | sort) <(of_preset all))")"
    ;;
  cuda) compare gpu "$(list "$(of_preset cuda)")" ;;
  *) compare "$preset" "$(list "$(of_preset "$preset")")" ;;
esac
exit $failed
