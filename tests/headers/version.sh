#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A compiler without C++20 or without exceptions, and macros that are names of the library, end in one sentence at the first
# header. The names of all symbols have the version in them, so that parts of one program may use different ones.
# usage: version.sh
# timeout: 600
set -euo pipefail
cd "$FSDP_SOURCE"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
complain() { echo "FAILED: $*"; failed=1; }

# Whichever header a file includes first, version.hpp is the first of fsdp's code that it sees: so `refused` tries one header.
while read -r header; do
  grep -q '#include "fsdp/version.hpp"' "$header" || complain "$header includes nothing of fsdp, not even fsdp/version.hpp"
done < <(grep -rL '#include "fsdp/' include --include='*.hpp' | grep -v '/version\.hpp$')

# refused LINE SENTENCE COMPILER FLAG...: the header behind the line ends in the sentence, and in few others
refused() {
  local line=$1 sentence=$2
  shift 2
  printf '%s\n#include "fsdp/host.hpp"\n' "$line" > "$work/refused.cpp"
  if "$@" -fsyntax-only -I include -idirafter "$FSDP_FMT_INCLUDE" "$work/refused.cpp" > "$work/log" 2>&1; then
    complain "a header behind '$line' was compiled by $*"
  elif ! grep -qF "$sentence" "$work/log" || (($(grep -c 'error: ' "$work/log") > 2)); then
    complain "a header behind '$line' did not end in '$sentence' alone with $*:"
    head -20 "$work/log"
  fi
}
compilers=("$CXX")
if [[ $(basename "$CXX") != clang* ]] && command -v clang++ > /dev/null; then compilers+=(clang++); fi
for compiler in "${compilers[@]}"; do
  refused "" "fsdp needs C++20: compile with -std=c++20" "$compiler" -std=c++17
  if ! "$compiler" -E -dM -x c++ /dev/null | grep -q '__cplusplus 20[2-9]'; then
    refused "" "fsdp needs C++20: compile with -std=c++20" "$compiler"
  fi
  refused "" "fsdp needs exceptions: compile without -fno-exceptions" "$compiler" -std=c++20 -fno-exceptions
  refused "#define slots" "define QT_NO_KEYWORDS" "$compiler" -std=c++20
done

# A program of a version that differs in the number alone.
. tests/support/libraries.sh
find_fmt_library "$CXX"
cat > "$work/part.cpp" <<'CPP'
#include "fsdp/local.hpp"
#include "fsdp/fsdp.hpp"
#include "fsdp/host.hpp"
int part() {
  int ranks = 0;
  fsdp::local::run(2, fsdp::host::Device{}, [&](auto comm) {
    fsdp::Mesh mesh{std::move(comm)};
    fsdp::Engine engine{mesh, fsdp::FullShard{}};
    if (engine.rank() == 0) ranks = engine.world_size();
  });
  return ranks;
}
CPP
cp -r include "$work/other"
sed -i 's/^#define FSDP_VERSION_PATCH .*/#define FSDP_VERSION_PATCH 99/' "$work/other/fsdp/version.hpp"
macros='#define emit
#define signals public
#define near
#define far
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))'
printf '%s\n' "$macros" | cat - "$work/part.cpp" > "$work/with_macros.cpp"
"$CXX" -std=c++20 -O0 $fmt_define -I "$work/other" -idirafter "$FSDP_FMT_INCLUDE" -c "$work/with_macros.cpp" -o "$work/part.o"
nm -C --defined-only "$work/part.o" | cut -c20- | grep -E '^(typeinfo |vtable |guard variable |.*\b)fsdp::' | sort -u > "$work/names"
(($(wc -l < "$work/names") > 200)) || complain "only $(wc -l < "$work/names") symbols: the pattern misses them"
if sed 's/\bfsdp::v0_1_99\b//g' "$work/names" | grep -E '\bfsdp::' > "$work/others"; then
  complain "symbols without the number of their version: $(wc -l < "$work/others")"
  head -n 5 "$work/others" | cut -c 1-300
fi
exit "$failed"
