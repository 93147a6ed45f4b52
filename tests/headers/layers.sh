#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Who may include whom: the core includes no backend; a backend includes of the core only the contracts and itself.
set -euo pipefail
cd "$FSDP_SOURCE/include/fsdp"
failed=0
complain() { echo "$1"; failed=1; }

# file<space>included header, for our own includes
mapfile -t edges < <(grep -rE '^ *# *include "' --include='*.hpp' . | sed -E 's|^\./([^:]*):.*"([^"]*)".*|\1 \2|')
((${#edges[@]} > 20)) || complain "the search for includes finds almost nothing"
contracts='fsdp/(concepts|tensor|arithmetic|error|memory|trace|trace_[a-z]+|wait_site|sync_site|kernels|scalar_math)\.hpp'
for edge in "${edges[@]}"; do
  read -r file header <<<"$edge"
  [[ -e ../$header ]] || complain "$file includes $header, which does not exist (includes are written \"fsdp/...\")"
  case $file in
    host/*) allowed="^($contracts|fsdp/host/.*)$" ;;
    cuda/*) allowed="^($contracts|fsdp/cuda/.*)$" ;;
    comm/*) allowed="^($contracts|fsdp/comm/.*|fsdp/host/.*|fsdp/cuda/.*)$" ;;
    *) allowed='^fsdp/([a-z_0-9]+|engine/[a-z_0-9]+|optim/[a-z_0-9]+|checkpoint/[a-z_0-9]+|kernels/[a-z_0-9]+)\.hpp$' ;;
  esac
  [[ $header =~ $allowed ]] || complain "$file must not include $header"
done
while read -r file; do
  head -n 1 "$file" | grep -qx '// SPDX-License-Identifier: Apache-2.0' || complain "$file: the first line is not the licence"
  grep -q '^#pragma once$' "$file" || complain "$file: no #pragma once"
done < <(find . -name '*.hpp')
# Flags that a user may allow (FSDP_ALLOW_FAST_MATH) let compilers answer these without looking.
if grep -rnE 'std::is(finite|nan|inf|normal)\b' --include='*.hpp' .; then complain "use math::is_finite, which looks at bits"; fi
# A number of a barrier names one place: two places of one number could not be dropped one at a time.
sites=$(grep -rhoE 'sync(_warp)?\((fsdp::)?(SyncSite|site)::[a-z_0-9]+' "$FSDP_SOURCE/include" "$FSDP_SOURCE/examples" |
  grep -v '::none$' | sed 's/.*:://' | sort)
(($(wc -w <<<"$sites") >= 5)) || complain "the search for numbered barriers finds almost nothing"
for site in $(uniq -d <<<"$sites"); do complain "barrier $site stands at two places"; done
exit $failed
