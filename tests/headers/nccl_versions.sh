#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# nccl.hpp compiles against the declarations of old and new versions of NCCL, without warnings.
# usage: nccl_versions.sh
# timeout: 3600
set -euo pipefail
cuda=${FSDP_CUDA_INCLUDE:-/usr/local/cuda/include}
if [[ ! -e $cuda/cuda_runtime_api.h ]]; then
  echo "skipped: no CUDA headers in $cuda"
  exit 77
fi
failed=0
for version in 21903 22605 22703 22809 23203; do
  "$CXX" -std=c++20 -fsyntax-only -Wall -Wextra -Wshadow -Werror -I "$FSDP_SOURCE/include" -idirafter "$FSDP_FMT_INCLUDE" \
    -isystem "$FSDP_SOURCE/tests/headers/nccl" -isystem "$cuda" -DFSDP_FMT_LIBRARY=1 -DFSDP_TEST_NCCL=$version -x c++ - \
    <<<'#include "fsdp/nccl.hpp"' || { echo "FAILED against NCCL $version"; failed=1; }
done
exit $failed
