#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Writes down how the library behaves, so that `diff -r BEFORE AFTER` judges a change that is meant to change nothing:
# programs of 5,000 declarations, digests of the results and programs of random models, and the messages of exceptions
# in the tests of the library. Compilers and processors round differently: both runs are of one machine and one preset.
#
#   oracles.sh BUILD_DIR OUT [SEEDS]   2,000 seeds, if no number is given
set -euo pipefail
(($# >= 2)) || { sed -n '/^#   /s/^# *//p' "$0" >&2; exit 2; }
source=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
build=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
program() { # program NAME
  local path
  path=$(find "$build" -name "$1" -type f -perm -u+x -print -quit)
  [[ -n $path ]] || { echo "oracles.sh: error: $1 is not built in $build" >&2; exit 1; }
  printf '%s\n' "$path"
}
schedule=$(program tests_schedule) random=$(program differential_random)

"$schedule" '[dump]' >"$out/programs"
"$random" --digests "--seeds=${3:-2000}" >"$out/digests"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${CXX:-g++}" -std=c++20 -shared -fPIC "$source/tests/support/thrown.cpp" -o "$work/thrown.so" -ldl
export FSDP_THROWN_MESSAGES=$work/messages
# Without ranks in processes and killed processes: there it is chance which message comes first.
(cd "$build" && LD_PRELOAD=$work/thrown.so ctest -R '^(unit|schedule|parity|memory|checkpoint|conformance)_' -E '_mpi|_full$|_crash$|_snapshots$|_streams$') \
  >"$work/log" || { tail -n 30 "$work/log"; exit 1; }
# Numbers, folders and names of processes differ from run to run.
sed -E 's/(ranks disagree about the order of their calls).*/\1/; s#/tmp/[^ '"'"']*#/tmp/...#g; s/[0-9]+(\.[0-9]+)?(e[-+]?[0-9]+)?/N/g' "$work/messages" | LC_ALL=C sort -u >"$out/messages"
wc -l "$out"/*
