#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every C++ block of docs/ compiles, without warnings, against the headers beside it; those of the tutorial and the adopting guide
# do more, see pasted.sh. README shows a program of examples/usage, which the build compiles.
# timeout: 3600
#
# A block that has #include or main() is a file of its own; one with main() is run, and ends with 0. Any other is preceded by a line
#   <!-- compile: prelude=NAME -->        it stands where tests/docs/preludes/NAME.cpp has its line `// BLOCK`
#   <!-- no-compile: the reason -->       counted, and limited below
# Most of the time goes into headers and the engine. So all blocks are one source, each in a namespace of its own, which $CXX
# compiles and links once. Files of their own are also checked alone, by clang++ where there is one: those that include all
# headers of one of `bases` behind a precompiled header of them.
# Arguments: the pages to look at instead of all.
set -euo pipefail
cd "${FSDP_SOURCE:-$(dirname "$0")/../..}"
compiler=${CXX:-g++} clang=${FSDP_CLANG:-}
common="fsdp/local.hpp fsdp/fsdp.hpp fsdp/host.hpp"
bases=("fsdp/checkpoint.hpp $common" "$common")
most_not_compiled=1  # blocks with a reason, in all pages together
least_compiled=8     # blocks: fewer means that this script no longer finds them

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
flags=(-std=c++20 -Wall -Wextra -Wshadow -Wno-unused-variable -Wno-unused-parameter -Wno-unused-but-set-variable -Werror -pthread -Iinclude -I. -Iexamples/mlp)
[[ ${FSDP_FMT_INCLUDE:-/usr/include} == /usr/include ]] || flags+=(-isystem "$FSDP_FMT_INCLUDE")

. tests/support/libraries.sh
find_compiled_libraries "$compiler"
flags+=($fmt_define)

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
for page in CONTRIBUTING.md docs/*.md docs/adr/*.md; do
  [[ $page == docs/tutorial.md || $page == docs/adopting.md ]] || pages+=("$page")
done
(($# == 0)) || { pages=("$@"); least_compiled=0; }
for page in "${pages[@]}"; do
  blocks=$(extract "$page" "$blocks") || exit 1
done

# The blocks are the source $folder/headers.cpp, and their includes $folder/headers.hpp. Blocks for torch are $folder/torch.cpp,
# for torch need not be there.
includes() { grep -hE '^ *# *include' "$@" | sort -u; }
declare -A count=()
together() { # together NAME: appends the block's text, which is stdin, to $folder/NAME.cpp
  { echo "namespace block_$n {" && sed 's/^ *# *include.*//' && echo "}"; } >>"$folder/$1.cpp"
  count[$1]=$((${count[$1]:-0} + 1))
}
includes tests/docs/preludes/libtorch.cpp >"$folder/torch.hpp"
includes $(find tests/docs/preludes -name '*.cpp' ! -name libtorch.cpp) >"$folder/headers.hpp"

compiles() { # compiles COUNT WHERE COMPILER ARGUMENT...: counts the blocks, or says what the compiler says
  if "$3" "${flags[@]}" "${@:4}" >"$folder/log" 2>&1; then
    compiled=$((compiled + $1))
  else
    complain "$2 does not compile:"
    grep -E 'error|warning' "$folder/log" | head -n 10 || head -n 20 "$folder/log"
    return 1
  fi
}

includes_all() { # includes_all FILE HEADER...
  local header
  for header in "${@:2}"; do grep -qF "#include \"$header\"" "$1" || return 1; done
}
alone() { # alone FILE: whether it compiles by itself
  local i behind=()
  for i in "${!bases[@]}"; do
    if [[ -n $clang ]] && includes_all "$1" ${bases[i]}; then
      if [[ ! -e $folder/base_$i.pch ]]; then
        printf '#include "%s"\n' ${bases[i]} >"$folder/base_$i.hpp"
        compiles 0 "${bases[i]}" "$clang" -x c++-header "$folder/base_$i.hpp" -Xclang -fpch-instantiate-templates -o "$folder/base_$i.pch" || return 1
      fi
      behind=(-include-pch "$folder/base_$i.pch")
      break
    fi
  done
  compiles 0 "$where" "${clang:-$compiler}" "${behind[@]}" -fsyntax-only "$1"
}

programs=()
for ((n = 1; n <= blocks; ++n)); do
  block=$folder/$n.block how=$(<"$folder/$n.how") where=$(<"$folder/$n.where")
  source=$folder/$n.cpp
  if [[ $how =~ ^\<!--\ no-compile:\ (.*)\ --\>$ ]]; then
    ((${#BASH_REMATCH[1]} > 10)) || complain "$where: not compiled, for no reason"
    echo "$where: not compiled: ${BASH_REMATCH[1]}"
    not_compiled=$((not_compiled + 1))
  elif [[ $how =~ ^\<!--\ compile:\ prelude=([a-z_0-9]+)\ --\>$ ]]; then
    name=${BASH_REMATCH[1]} part=headers
    prelude=tests/docs/preludes/$name.cpp
    if [[ $name == libtorch ]]; then
      if [[ -z ${FSDP_LIBTORCH_INCLUDES:-} ]]; then
        without_torch=$((without_torch + 1))
        continue
      fi
      part=torch
    fi
    [[ -e $prelude ]] || { complain "$where: there is no $prelude"; continue; }
    (($(grep -c '^ *// BLOCK$' "$prelude") == 1)) || { complain "$prelude: needs one line '// BLOCK'"; continue; }
    line=$(grep -n '^ *// BLOCK$' "$prelude" | cut -d: -f1)
    {
      echo "#line 1 \"$prelude\""
      head -n "$((line - 1))" "$prelude"
      echo "#line ${where#*:} \"${where%:*}\""
      cat "$block"
      echo "#line $((line + 1)) \"$prelude\""
      tail -n "+$((line + 1))" "$prelude"
    } >"$source"
    together $part <"$source"
  elif grep -qE '^ *# *include|^int main\(' "$block"; then
    { echo "#line ${where#*:} \"${where%:*}\"" && cat "$block"; } >"$source"
    alone "$source" || continue
    includes "$source" >>"$folder/headers.hpp"
    if grep -q '^int main(' "$block"; then
      programs+=("$n")
      sed -i '$ s/^}$/return 0; }/' "$source" # only the global main() may end without it
    fi
    together headers <"$source"
  else
    complain "$where: neither a file of its own nor '<!-- compile: prelude=NAME -->' in the line before"
  fi
done

# The programs' main functions are called by the number of their block.
if ((${#programs[@]})); then
  {
    echo "int main(int, char** arguments) {"
    for n in "${programs[@]}"; do echo "  if (std::string_view(arguments[1]) == \"$n\") return block_$n::main();"; done
    echo "}"
  } >>"$folder/headers.cpp"
  echo "#include <string_view>" >>"$folder/headers.hpp"
fi
for part in "${!count[@]}"; do
  mode=(-fsyntax-only)
  if [[ $part == torch ]]; then
    IFS=: read -ra torch_folders <<<"$FSDP_LIBTORCH_INCLUDES"
    for torch_folder in "${torch_folders[@]}"; do mode+=(-isystem "$torch_folder"); done
  elif ((${#programs[@]})); then
    mode=(-O0 $compiled_define -ffunction-sections -Wl,--gc-sections -o "$folder/programs") # preludes may use functions that nobody defines
  fi
  compiles "${count[$part]}" "one of ${count[$part]} blocks" "$compiler" "${mode[@]}" -include "$folder/$part.hpp" "$folder/$part.cpp" $fmt_link || continue
  [[ $part == headers ]] || continue
  for n in "${programs[@]}"; do
    timeout 120 "$folder/programs" "$n" >"$folder/log" 2>&1 || { complain "$(<"$folder/$n.where") does not end well:"; tail -n 5 "$folder/log"; }
  done
done

((not_compiled <= most_not_compiled)) || complain "$not_compiled blocks are not compiled, at most $most_not_compiled may be"
((compiled + not_compiled >= least_compiled || failed)) || complain "only $compiled blocks were found"
echo "$compiled blocks compile, ${#programs[@]} programs run"
if ((without_torch > 0)); then echo "$without_torch blocks need torch, which is not here"; fi
exit $failed
