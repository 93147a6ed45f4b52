#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The benchmarks that no other test runs compile.
# labels: full
# skip-sanitizers
# timeout: 1800
#
#   build.sh BINARY_DIR
set -euo pipefail
if ! grep -q '^FSDP_BUILD_BENCHMARKS:BOOL=ON' "$1/CMakeCache.txt"; then
  echo "skipped: this build has no benchmarks"
  exit 77
fi
cmake --build "$1" --target benchmarks
