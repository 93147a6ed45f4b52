#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# docs/site/manual.sh: the manual page has every command and every setting of --help, groff accepts it, and bash completes commands,
# settings and files.
# programs: nanogpt
# skip-sanitizers
#
#   manual.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"
nanogpt=$1/examples/nanogpt/nanogpt
manual=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../docs/site" && pwd)/manual.sh
enter "$nanogpt"
bash "$manual" "$nanogpt" "a folder" >output 2>&1 || fail "manual.sh"
settings=0
for command in prepare train sample export bench plan report; do
  check "command $command" grep -qi "^\.SH NANOGPT $command$" "a folder/nanogpt.1"
  while read -r setting; do
    settings=$((settings + 1))
    grep -qF ".B ${setting//-/\\-}" "a folder/nanogpt.1" || fail "the page lacks $setting of $command"
  done < <("$nanogpt" "$command" --help | sed -nE 's/^  (--[a-z_0-9]+).*/\1/p')
done
check "$settings settings were found" test "$settings" -gt 150
if command -v groff >/dev/null; then
  groff -man -ww -z "a folder/nanogpt.1" >output 2>&1 || fail "groff"
  check "groff warns: $(cat output)" test ! -s output
fi
completes() { # completes WORDS... EXPECTED: the completions of the last word
  COMP_WORDS=("${@:1:$#-1}") COMP_CWORD=$(($# - 2)) COMPREPLY=()
  _nanogpt
  check "'${*:1:$#-1}' completes to '${COMPREPLY[*]}': expected '${*: -1}'" test "${COMPREPLY[*]}" = "${*: -1}"
}
. "a folder/nanogpt.bash"
completes nanogpt tr "train"
completes nanogpt train --n_ "--n_layer= --n_head= --n_embd="
completes nanogpt sample --top_ "--top_k= --top_p="
completes nanogpt train "a fo" "a folder"
echo "$checks checks, $failures failures"
((failures == 0))
