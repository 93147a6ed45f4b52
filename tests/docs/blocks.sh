#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every C++ block of README.md and docs/ compiles, without warnings, against the headers beside it; those of the tutorial and
# the adopting guide do more, see pasted.sh.
# timeout: 900
#
# A block that has #include or main() is a file of its own; one with main() is run, and ends with 0. Any other is preceded by a line
#   <!-- compile: prelude=NAME -->        it stands where tests/docs/preludes/NAME.cpp has its line `// BLOCK`
#   <!-- no-compile: the reason -->       counted, and limited below
# Arguments: the pages to look at instead of all.
set -euo pipefail
cd "${FSDP_SOURCE:-$(dirname "$0")/../..}"
compiler=${CXX:-g++}
most_not_compiled=1  # blocks with a reason, in all pages together
least_compiled=8     # blocks: fewer means that this script no longer finds them

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
flags=(-std=c++20 -Wall -Wextra -Wshadow -Wno-unused-variable -Wno-unused-parameter -Wno-unused-but-set-variable -Werror -pthread -Iinclude -I. -Iexamples/mlp)
[[ ${FSDP_FMT_INCLUDE:-/usr/include} == /usr/include ]] || flags+=(-isystem "$FSDP_FMT_INCLUDE")

failed=0 compiled=0 not_compiled=0 without_torch=0
complain() { echo "$1"; failed=1; }

# Writes each block to $folder/N.block, what stands before it to N.how, and where it begins to N.where.
extract() {
  awk -v folder="$folder" -v page="$1" -v n="$2" '
    function end() { close(out); }
    /^ *```/ {
      if (inside) { inside = 0; if (ours) end(); ours = 0; before = ""; next }
      inside = 1
      ours = tolower($0) ~ /^ *```(c\+\+|cpp|cxx|cc|cu|cuda)([^a-z]|$)/
      if (ours) {
        ++n
        out = folder "/" n ".block"
        printf "" > out
        print before > (folder "/" n ".how"); close(folder "/" n ".how")
        print page ":" (NR + 1) > (folder "/" n ".where"); close(folder "/" n ".where")
      }
      next
    }
    inside { if (ours) print > out; next }
    NF { before = $0 }
    END { if (inside) { print page ": a block is never closed" > "/dev/stderr"; exit 1 } print n }' "$1"
}

blocks=0
pages=()
for page in README.md CONTRIBUTING.md docs/*.md docs/adr/*.md; do
  [[ $page == docs/tutorial.md || $page == docs/adopting.md ]] || pages+=("$page")
done
(($# == 0)) || { pages=("$@"); least_compiled=0; }
for page in "${pages[@]}"; do
  blocks=$(extract "$page" "$blocks") || exit 1
done

# Blocks with preludes are one source, each in a namespace of its own, for most of the time goes into headers. torch's headers
# need not be there.
includes() { grep -hE '^ *# *include' "$@" | sort -u; }
includes $(find tests/docs/preludes -name '*.cpp' ! -name libtorch.cpp) >"$folder/headers.hpp"
includes tests/docs/preludes/libtorch.cpp >"$folder/torch.hpp"
declare -A with_prelude=()

compiles() { # compiles WHERE ARGUMENT...: counts it, or says what the compiler says
  if "$compiler" "${flags[@]}" "${@:2}" >"$folder/log" 2>&1; then
    compiled=$((compiled + 1))
  else
    complain "$1 does not compile:"
    grep -E 'error|warning' "$folder/log" | head -n 10 || head -n 20 "$folder/log"
    return 1
  fi
}

for ((n = 1; n <= blocks; ++n)); do
  block=$folder/$n.block how=$(<"$folder/$n.how") where=$(<"$folder/$n.where")
  source=$folder/$n.cpp
  if [[ $how =~ ^\<!--\ no-compile:\ (.*)\ --\>$ ]]; then
    ((${#BASH_REMATCH[1]} > 10)) || complain "$where: not compiled, for no reason"
    echo "$where: not compiled: ${BASH_REMATCH[1]}"
    not_compiled=$((not_compiled + 1))
  elif [[ $how =~ ^\<!--\ compile:\ prelude=([a-z_0-9]+)\ --\>$ ]]; then
    name=${BASH_REMATCH[1]} together=headers
    prelude=tests/docs/preludes/$name.cpp
    if [[ $name == libtorch ]]; then
      if [[ -z ${FSDP_LIBTORCH_INCLUDES:-} ]]; then
        without_torch=$((without_torch + 1))
        continue
      fi
      together=torch
    fi
    [[ -e $prelude ]] || { complain "$where: there is no $prelude"; continue; }
    (($(grep -c '^ *// BLOCK$' "$prelude") == 1)) || { complain "$prelude: needs one line '// BLOCK'"; continue; }
    line=$(grep -n '^ *// BLOCK$' "$prelude" | cut -d: -f1)
    {
      echo "namespace block_$n {"
      echo "#line 1 \"$prelude\""
      head -n "$((line - 1))" "$prelude" | sed 's/^ *# *include.*//'
      echo "#line ${where#*:} \"${where%:*}\""
      cat "$block"
      echo "#line $((line + 1)) \"$prelude\""
      tail -n "+$((line + 1))" "$prelude"
      echo "}"
    } >>"$folder/$together.cpp"
    with_prelude[$together]=$((${with_prelude[$together]:-0} + 1))
  elif grep -qE '^ *# *include|^int main\(' "$block"; then
    { echo "#line ${where#*:} \"${where%:*}\"" && cat "$block"; } >"$source"
    mode=(-fsyntax-only)
    if grep -q '^int main(' "$block"; then mode=(-o "$folder/$n"); fi
    if compiles "$where" "${mode[@]}" "$source" && [[ ${mode[0]} == -o ]]; then
      timeout 120 "$folder/$n" >"$folder/log" 2>&1 || { complain "$where does not end well:"; tail -n 5 "$folder/log"; }
    fi
  else
    complain "$where: neither a file of its own nor '<!-- compile: prelude=NAME -->' in the line before"
  fi
done

for together in "${!with_prelude[@]}"; do
  mode=(-fsyntax-only -include "$folder/$together.hpp")
  if [[ $together == torch ]]; then
    IFS=: read -ra torch_folders <<<"$FSDP_LIBTORCH_INCLUDES"
    for torch_folder in "${torch_folders[@]}"; do mode+=(-isystem "$torch_folder"); done
  fi
  compiles "one of ${with_prelude[$together]} blocks" "${mode[@]}" "$folder/$together.cpp" && compiled=$((compiled + with_prelude[$together] - 1))
done

((not_compiled <= most_not_compiled)) || complain "$not_compiled blocks are not compiled, at most $most_not_compiled may be"
((compiled + not_compiled >= least_compiled || failed)) || complain "only $compiled blocks were found"
echo "$compiled blocks compile"
if ((without_torch > 0)); then echo "$without_torch blocks need torch, which is not here"; fi
exit $failed
