#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# docs/installing.md works as pasted, without a network: its trainer is built by the compiler alone, by find_package and by
# FetchContent, and runs each time.
# A block whose first line names a file is that file; a block of sh is run.
set -euo pipefail
export FSDP=${FSDP_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
[[ ${FSDP_FMT_INCLUDE:-/usr/include} == /usr/include ]] || export CPLUS_INCLUDE_PATH=$FSDP_FMT_INCLUDE
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
if ! command -v git >/dev/null || ! git -C "$FSDP" rev-parse -q --verify HEAD >/dev/null 2>&1; then
  export FETCHCONTENT=$FSDP  # not a clone: the folder as it is
fi

awk '/^```/ {
  if (inside) { inside = 0; close(out); next }
  inside = 1
  out = sprintf("%02d.%s", ++n, substr($0, 4))
  printf "" > out
  next
}
inside { print > out }' "$FSDP/docs/installing.md"
built=0
for block in [0-9]*; do
  case $block in
    *.sh)
      rm -rf build
      grep -q 'cmake -B build' "$block" && [[ -n ${FETCHCONTENT:-} ]] &&
        sed -i "s|cmake -B build|& -DFETCHCONTENT_SOURCE_DIR_FSDP=\"$FETCHCONTENT\"|" "$block"
      bash -e "$block" >output 2>&1 || { cat "$block" output; exit 1; }
      if grep -q '/trainer$' "$block"; then
        grep -qx '2 ranks' output || { cat "$block" output; exit 1; }
        built=$((built + 1))
      fi ;;
    *)
      read -r _ name <"$block"
      [[ $name == trainer.cpp || $name == CMakeLists.txt ]] || { echo "$block: its first line names no file: $name"; exit 1; }
      cp "$block" "$name" ;;
  esac
done
((built == 3)) || { echo "$built of 3 ways to use the library were found"; exit 1; }
echo "built and run in $built ways"
