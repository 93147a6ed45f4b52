#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tutorial and the adopting guide do what they show: their blocks, pasted in order into an empty folder, compile with the
# lines shown, without a word from the compiler, run, and print what is shown.
# timeout: 900
#
#   ```cpp    its first line names a file, and the block is that file:   // FILE
#             or says what it changes in a file that is there:           // FILE, below `LINE`
#                                                                        // FILE, instead of `LINE`
#                                                                        // FILE, instead of `LINE` to `LINE`
#             LINE is the beginning of the only line that begins so (the second: of the first one from there on)
#   ```diff   from one file to another, which `patch` makes
#   ```sh     is run, with $FSDP naming this repository
#   ```text   is what the last ```sh printed: the same words, and numbers with a decimal point within a thousandth or one in
#             the last digit, for compilers may contract products and sums
# Compiling takes the most time. So -O2 is replaced by $FSDP_PASTED_LEVEL; unless that is set, by -O0 and the suite's
# fsdp::compiled. fmt's library is linked where there is one. A file is compiled and linked by two commands with the flags
# shown, for a cache knows only compilations.
# Arguments: the pages to look at instead of both.
set -euo pipefail
export FSDP=${FSDP_SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
most_compiled=10  # calls of a compiler, by all pages together: they take time
least_compared=8  # outputs: fewer means that this script no longer finds them
pages=("$FSDP/docs/tutorial.md" "$FSDP/docs/adopting.md")
(($# == 0)) || { mapfile -t pages < <(realpath "$@"); least_compared=0; }
for tool in g++ patch; do
  command -v $tool >/dev/null || { echo "skipped: the pages show $tool, which is not here"; exit 77; }
done
[[ ${FSDP_FMT_INCLUDE:-/usr/include} == /usr/include ]] || export CPLUS_INCLUDE_PATH=$FSDP_FMT_INCLUDE

launcher=$FSDP/cmake/compiler_launcher.sh
. "$FSDP/tests/support/libraries.sh"
find_compiled_libraries g++
if [[ -n ${FSDP_PASTED_LEVEL:-} ]]; then level=$FSDP_PASTED_LEVEL; else level="-O0${compiled_define:+ $compiled_define}"; fi

# Two ranks, on whatever machine and as whoever this is.
. "$FSDP/tests/support/mpirun.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
compiled=0 compared=0
die() {
  printf '%s\n' "$1"
  exit 1
}

# Writes block N of a page to N.block, its language to N.language, where it begins to N.where. Prints how many there are.
extract() {
  awk -v page="${1#"$FSDP/"}" -v folder="$2" '
    /^```/ {
      if (inside) { inside = 0; close(out); next }
      inside = 1
      out = folder "/" ++n ".block"
      printf "" > out
      print substr($0, 4) > (folder "/" n ".language"); close(folder "/" n ".language")
      print page ":" (NR + 1) > (folder "/" n ".where"); close(folder "/" n ".where")
      next
    }
    inside { print > out }
    END { if (inside) { print page ": a block is never closed" > "/dev/stderr"; exit 1 } print n + 0 }' "$1"
}

# change FILE BLOCK KIND FIRST LAST: puts a block below, or instead of, lines of a file.
change() {
  FIRST=$4 LAST=$5 awk -v kind="$3" -v block="$2" '
    function begins(line, with) { sub(/^ */, "", line); return index(line, with) == 1 }
    function paste(  line) { getline line < block; while ((getline line < block) > 0) print line }
    !found && begins($0, ENVIRON["FIRST"]) {
      found = 1
      if (kind == "below") { print; paste(); next }
      paste()
      skipping = ENVIRON["LAST"] != ""
      if (skipping && begins($0, ENVIRON["LAST"])) skipping = 0
      next
    }
    found && begins($0, ENVIRON["FIRST"]) { exit 3 }
    skipping { if (begins($0, ENVIRON["LAST"])) skipping = 0; next }
    { print }
    END { if (!found) exit 4; if (skipping) exit 5 }' "$1" >"$1.changed" && mv "$1.changed" "$1"
}

paste_file() {
  local block=$1 line quoted='`([^`]+)`'
  line=$(head -n 1 "$block")
  local name='^// ([A-Za-z_]+\.[a-z]+)'
  if [[ $line =~ $name$ ]]; then
    cp "$block" "${BASH_REMATCH[1]}"
  elif [[ $line =~ $name,\ (below|instead\ of)\ $quoted$ || $line =~ $name,\ (instead\ of)\ $quoted\ to\ $quoted$ ]]; then
    local file=${BASH_REMATCH[1]}
    [[ -e $file ]] || die "$where: there is no $file yet"
    change "$file" "$block" "${BASH_REMATCH[2]}" "${BASH_REMATCH[3]}" "${BASH_REMATCH[4]:-}" ||
      die "$where: $file has no such line, or several: $line"
  else
    die "$where: the first line names no file: $line"
  fi
}

paste_diff() {
  local from to
  from=$(sed -n 's/^--- //p;1q' "$1") to=$(sed -n '2s/^+++ //p;2q' "$1")
  patch --silent --fuzz=0 -o "$to" "$from" "$1" || die "$where: the change does not fit $from"
}

# The last shell block's words are in $work/output.
run_shell() {
  local commands=$work/commands
  compiled=$((compiled + $(grep -cE '^(g\+\+|mpic\+\+) .*\.cpp( |$)' "$1" || true)))
  sed -E "s/ -O2 / $level /
    s|^((g\+\+\|mpic\+\+) .*) ([a-z_]+)\.cpp -o ([a-z_]+)\$|'$launcher' \1${fmt_define:+ $fmt_define} -c \3.cpp -o \4.o\n\1 \4.o -o \4${fmt_link:+ $fmt_link}|
    s|^((g\+\+\|mpic\+\+) .*) -c ([a-z_]+)\.cpp\$|'$launcher' \1${fmt_define:+ $fmt_define} -c \3.cpp -o \3.o|
    s|^g\+\+ .*\.o .*-o [a-z_]+\$|&${fmt_link:+ $fmt_link}|" "$1" >"$commands"
  cat "$commands"
  bash -e "$commands" >"$work/output" 2>"$work/errors" || { cat "$work/output" "$work/errors"; die "$where: fails"; }
  [[ ! -s $work/errors ]] || { cat "$work/errors"; die "$where: that was not to be expected"; }
}

compare() {
  compared=$((compared + 1))
  paste -d '\n' "$1" "$work/output" | awk '
    function close_to(a, b,  difference, allowed, digits) {
      if (a == b) return 1
      if (a !~ /^-?[0-9]+\.[0-9]+,?$/ || b !~ /^-?[0-9]+\.[0-9]+,?$/) return 0
      digits = a; sub(/.*\./, "", digits); sub(/,/, "", digits)
      difference = (a + 0 < b + 0) ? b - a : a - b
      allowed = (a + 0 < 0 ? -a : a + 0) / 1000
      return difference <= allowed || difference < 1.5 * 10 ^ -length(digits)
    }
    NR % 2 { shown = $0; words = split($0, expected); next }
    { same = NF == words; for (i = 1; i <= NF && same; ++i) same = close_to(expected[i], $i) }
    !same { print "shown:   " shown; print "printed: " $0; bad = 1 }
    END { exit bad }' || die "$where: prints something else"
  (($(wc -l <"$1") == $(wc -l <"$work/output"))) || { cat "$work/output"; die "$where: prints more lines, or fewer"; }
}

for page in "${pages[@]}"; do
  blocks=$work/blocks folder=$work/$(basename "$page" .md)
  rm -rf "$blocks"
  mkdir -p "$blocks" "$folder"
  count=$(extract "$page" "$blocks")
  cd "$folder"
  left_out=0
  for ((n = 1; n <= count; ++n)); do
    block=$blocks/$n.block where=$(<"$blocks/$n.where")
    case $(<"$blocks/$n.language") in
      cpp) paste_file "$block" ;;
      diff) paste_diff "$block" ;;
      sh)
        left_out=0
        if grep -q mpi "$block" && [[ ! ${FSDP_HAVE_MPI:-ON} =~ ^(ON|1|TRUE)$ ]]; then
          left_out=1
          echo "$where: left out: MPI was not found"
        else
          run_shell "$block"
        fi ;;
      text) ((left_out)) || compare "$block" ;;
      *) die "$where: neither cpp, diff, sh nor text" ;;
    esac
  done
done

echo "$compiled calls of a compiler, $compared outputs compared"
((compiled <= most_compiled)) || die "that is more than $most_compiled"
if [[ ${FSDP_HAVE_MPI:-ON} =~ ^(ON|1|TRUE)$ ]]; then ((compared >= least_compared)) || die "only $compared outputs were compared"; fi
