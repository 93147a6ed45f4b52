#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Who may include whom. Neither files nor rooms form circles. A room is a folder of detail/, or a header of the root that
# reaches one: the face. The other headers of the root, and detail/base, are the vocabulary, which every room may use. The
# core includes no backend, and the step knows neither a device nor a communicator.
set -euo pipefail
cd "$FSDP_SOURCE/include/fsdp"
failed=0
complain() { echo "$1"; failed=1; }

# file<space>included header, for our own includes
declare -A former=()
while read -r file; do former[fsdp/${file#./}]=1; done < <(grep -rl '^// A former path of' --include='*.hpp' .)
mapfile -t edges < <(grep -rE '^ *# *include "' --include='*.hpp' $(grep -rL '^// A former path of' --include='*.hpp' .) | sed -E 's|^\./([^:]*):.*"([^"]*)".*|\1 \2|')
((${#edges[@]} > 20)) || complain "the search for includes finds almost nothing"
declare -A face=()
changed=1
while ((changed)); do
  changed=0
  for edge in "${edges[@]}"; do
    read -r file header <<<"$edge"
    header=${header#fsdp/}
    [[ $file == */* || -n ${face[$file]:-} ]] && continue
    if [[ $header == detail/* && $header != detail/base/* || -n ${face[$header]:-} ]]; then face[$file]=1 changed=1; fi
  done
done
# Each header of the face is a room of its own.
room() {
  case $1 in
    detail/base/*) echo vocabulary ;;
    detail/*/*) basename "$(dirname "$1")" ;;
    *) if [[ -n ${face[$1]:-} ]]; then echo "$1"; else echo vocabulary; fi ;;
  esac
}
# Who may include which rooms, besides vocabulary. Headers of the root that are not named here may include those that are
# not named either, and the rooms of the core.
core='engine|kernels|step|trace|optim|checkpoint'
devices='host\.hpp|cuda\.hpp' communicators='local\.hpp|mpi\.hpp|nccl\.hpp|bootstrap\.hpp' torch='libtorch(_cuda)?\.hpp'
face='[a-z_]*\.hpp'
declare -A may=(
  [vocabulary]= [kernels]= [host]= [step]= [trace]= [cuda]='kernels' [comm]='kernels|host' [tcp]='host'
  [local]='comm|kernels|host' [mpi]='comm|kernels|host' [nccl]='cuda\.hpp|bootstrap\.hpp|comm|cuda|host'
  [engine]='step|kernels|trace' [optim]='engine|kernels|shards\.hpp|gradients\.hpp'
  [checkpoint]='engine|json\.hpp|safetensors\.hpp|full_state\.hpp' [compiled]='fsdp\.hpp'
  [libtorch]='optim|engine|step|(checkpoint|engine|gradients|json|layout|module_buffers|muon|offload|optimizers|scopes|shards)\.hpp'
  [host.hpp]='host|kernels' [cuda.hpp]='cuda' [bootstrap.hpp]='tcp|comm' [local.hpp]='local|host(\.hpp)?|compiled' [mpi.hpp]='mpi|comm|host\.hpp|compiled'
  [nccl.hpp]='nccl|comm|(bootstrap|cuda)\.hpp' [libtorch.hpp]='libtorch|(checkpoint|engine|json|module_buffers|scopes)\.hpp'
  [libtorch_cuda.hpp]='libtorch|cuda\.hpp'
)
rooms=
for edge in "${edges[@]}"; do
  read -r file header <<<"$edge"
  [[ -e ../$header ]] || complain "$file includes $header, which does not exist (includes are written \"fsdp/...\")"
  [[ -z ${former[$header]:-} ]] || complain "$file includes $header, a former path"
  [[ $file != detail/* || $file == detail/*/* ]] || complain "$file lies in no room"
  from=$(room "$file") to=$(room "${header#fsdp/}")
  [[ $from == "$to" ]] && continue
  rooms+="$from $to"$'\n'
  [[ $from == *.hpp || -n ${may[$from]+set} ]] || complain "$file: layers.sh does not name the room $from"
  if [[ -n ${may[$from]+set} ]]; then
    [[ $to =~ ^(vocabulary|${may[$from]})$ ]] || complain "$file ($from) must not include $header ($to)"
  else
    [[ $to =~ ^(vocabulary|$core|$face)$ && ! $to =~ ^($devices|$communicators|$torch)$ ]] || complain "$file ($from) must not include $header ($to)"
  fi
  [[ $from == step && $header == fsdp/concepts.hpp ]] && complain "$file knows devices or communicators: it includes $header"
done
# Nor do files.
tsort <<<"$(printf '%s\n' "${edges[@]}" | sed 's| fsdp/| |')" >/dev/null || complain "some files include each other in a circle (see above)"
tsort <<<"$rooms" >/dev/null || complain "the rooms form a circle: $(sort -u <<<"$rooms" | tr '\n' ';')"
# Functions of more than 60 lines, in sources as clang-format lays them out. A block is a function's if parentheses come before
# it, no type or namespace begins it, and no function is around it.
long_functions() {
  find . -name '*.hpp' -print0 | sort -z | xargs -0 awk '
function is_function(text) {
  while (gsub(/<[^<>]*>/, "", text)) {}
  while (gsub(/\([^()]*\)/, "@", text)) {}
  return text ~ /@/ && text !~ /(^|[^a-z_])(namespace|class|struct|union|enum|extern)([^a-z_]|$)/
}
function end_file() {
  if (file != "" && depth != 0) print file ": braces do not match"
}
FNR == 1 { end_file(); file = FILENAME; depth = inside = 0; head = "" }
{
  line = $0
  gsub(/"([^"\\]|\\.)*"|\047([^\047\\]|\\.)\047/, "", line)
  sub(/\/\/.*/, "", line)
  for (i = 1; i <= length(line); ++i) {
    c = substr(line, i, 1)
    if (c == "{") {
      ++depth
      # of a member that a constructor initialises, as in "Type(int a) : a_{a} {"
      member[depth] = !inside && head ~ /\)[^()]*:[^:]/ && head ~ /[A-Za-z0-9_>]$/ && head !~ /(const|noexcept|override|try)$/
      before[depth] = head
      if (!inside && !member[depth] && is_function(head)) { inside = depth; first = FNR; ++functions }
      head = ""
    } else if (c == "}") {
      if (inside == depth) {
        if (FNR - first + 1 > 60) print FILENAME ":" first " has " FNR - first + 1 " lines"
        inside = 0
      }
      head = member[depth] ? before[depth] : ""
      --depth
    } else {
      head = c == ";" ? "" : head c
    }
  }
  head = head " "
}
END { end_file(); if (functions < 1000) print "only " functions " functions are found" }'
}
found=$(long_functions)
[[ -z $found ]] || complain "functions have at most 60 lines: $found"
while read -r file; do
  head -n 1 "$file" | grep -qx '// SPDX-License-Identifier: Apache-2.0' || complain "$file: the first line is not the licence"
  grep -q '^#pragma once$' "$file" || complain "$file: no #pragma once"
  # Where version.hpp is not included, FSDP_VERSION_NAMESPACE is no macro, and names a namespace of its own, without an error.
  # Files form no circle, so a header that includes any other of ours reaches version.hpp in the end.
  [[ $file == ./version.hpp ]] || ! grep -q FSDP_VERSION_NAMESPACE "$file" || grep -q '^#include "fsdp/' "$file" ||
    complain "$file: names the versioned namespace, and does not include fsdp/version.hpp"
done < <(find . -name '*.hpp')
# With the folders above: the core reaches no header of a backend.
backends='#include <(mpi|nccl|cuda_runtime|cuda_runtime_api)\.h>'
if grep -rnE "$backends" --include='*.hpp' . | grep -vE '^\./(detail/(mpi|nccl|cuda)/|(mpi|nccl|cuda)\.hpp)'; then complain "only the backends' folders reach MPI, CUDA and NCCL"; fi
grep -rqE "$backends" --include='*.hpp' detail/mpi || complain "the search for backends' headers finds none"
# Torch's headers take 20 seconds to compile.
if grep -rnE '#include <(torch|ATen|c10)/' --include='*.hpp' . | grep -vE '^\./(detail/)?libtorch'; then complain "only fsdp/libtorch.hpp reaches torch"; fi
# Flags that a user may allow (FSDP_ALLOW_FAST_MATH) let compilers answer these without looking.
if grep -rnE 'std::is(finite|nan|inf|normal)\b' --include='*.hpp' .; then complain "use math::is_finite, which looks at bits"; fi
# Tests drop every barrier that a kernel asks its block for (emulated/sync_sites.cpp); others they could not.
barriers='__sync(threads|warp)|\bbar(rier)?(\.cta|\.warp)?\.(sync|red|arrive)|cooperative_groups'
if grep -rnE "$barriers" --include='*.hpp' --include='*.cu' "$FSDP_SOURCE/include" "$FSDP_SOURCE/examples" |
  grep -v '/include/fsdp/detail/cuda/hardware\.hpp:'; then complain "kernels wait by block.sync and block.sync_warp alone"; fi
grep -qE "$barriers" detail/cuda/hardware.hpp || complain "the search for barriers finds none"
# nlohmann's parser takes a NUL for the end of its input. report/trace_reader.cpp reads a stream, and looks behind the end itself.
parsers='[Jj]son::parse\('
if grep -rnE "$parsers" --include='*.hpp' --include='*.cpp' "$FSDP_SOURCE/include" "$FSDP_SOURCE/examples" |
  grep -v '/report/trace_reader\.cpp:'; then complain "JSON is read by fsdp::checkpoint::parse_json"; fi
grep -qE "$parsers" "$FSDP_SOURCE/examples/transformer/report/trace_reader.cpp" || complain "the search for JSON parsers finds none"
# The faults that are injected by hand name calls of headers, which change.
if command -v python3 >/dev/null; then bash "$FSDP_SOURCE/tests/standin/faults.sh" --list >/dev/null || complain "tests/standin/faults.txt is out of date"; fi
exit $failed
