#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Packages that run.sh and tests/run.sh install: exactly those that CMake does not find, once; how they end if one cannot be had; and that a
# wish ends neither. CMake is the real one, made blind to packages that are "not installed"; apt-get, dpkg-query and sudo are
# stubs, and nothing is built.
# timeout: 300
# skip-sanitizers
set -uo pipefail

source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$source_folder/tests/support/script.sh"
at_exit 'rm -rf "$work"'
work=$(mktemp -d)
chmod 755 "$work"
cd "$work" || exit 1
cmake=$(command -v cmake)
export FSDP_CPUINFO=$work/cpuinfo
echo "flags : fpu avx2" > cpuinfo
unset CMAKE_GENERATOR CMAKE_CXX_COMPILER_LAUNCHER CMAKE_CUDA_COMPILER_LAUNCHER CXX CXXFLAGS

mkdir repository
tar -c -C "$source_folder" --exclude='out*' CMakeLists.txt CMakePresets.json cmake include examples benchmarks tests | tar -x -C repository

stub() { # stub NAME, the body from stdin; notes how it was called in $work/calls
  mkdir -p stubs
  { printf '#!/bin/bash\necho "%s $*" >> "%s/calls"\n' "$1" "$work"; cat; } > "stubs/$1"
  chmod 755 "stubs/$1"
}
# Packages that are missing are files in $work/missing; CMake does not see what they bring.
stub cmake << EOF2
hidden=()
hide() {
  if [[ -e $work/missing/\$1 ]]; then hidden+=("-DCMAKE_DISABLE_FIND_PACKAGE_\$2=ON"); else hidden+=("-DCMAKE_DISABLE_FIND_PACKAGE_\$2=OFF"); fi
}
hide libopenblas-dev OpenBLAS
hide libcli11-dev CLI11
hide nlohmann-json3-dev nlohmann_json
hide libxxhash-dev xxHash
hide libfmt-dev fmt
hide libopenmpi-dev MPI
hide catch2 Catch2
hide libdnnl-dev oneDNN
if [[ \$1 == --build ]]; then exit 9; fi
if [[ \$1 == --preset ]]; then exec "$cmake" "\$@" "\${hidden[@]}"; fi
exec "$cmake" "\$@"
EOF2
stub apt-get << EOF2
[[ \$1 != update ]] || exit \${UPDATE_CODE:-0}
[[ " \$* " != *" --assume-no "* ]] || exit 1
shift
for package in "\$@"; do
  [[ \$package != -* ]] || continue
  if [[ " \${NOT_IN_ARCHIVE:-} " == *" \$package "* ]]; then
    echo "E: Unable to locate package \$package"
    exit 100
  fi
done
[[ -n \${USELESS:-} ]] || (cd "$work/missing" && rm -f -- "\$@")
exit \${INSTALL_CODE:-0}
EOF2
stub dpkg-query << EOF2
if [[ -e $work/missing/\${!#} ]]; then echo "deinstall ok config-files"; else echo "install ok installed"; fi
EOF2
stub nvidia-smi <<< 'exit 1'
stub sudo <<< 'exec "$@"'

packages() { # packages NAME...: these are missing
  rm -rf missing
  mkdir missing
  for package in "$@"; do touch "missing/$package"; done
}
run() { # run SCRIPT ARGUMENTS...: in the copy; leaves its code, output and calls
  : > calls
  patiently 120 env PATH="${path:-$work/stubs:$PATH}" "repository/$1" "${@:2}" > output 2>&1 < /dev/null
  code=$?
}
said() { check "does not say '$1'" grep -qF -- "$1" output; }
last_line() { check "does not end with '$1'" test "$(tail -n 1 output)" = "$1"; }
installed() { # installed PACKAGE...: these were asked for, each once, and nothing else
  local asked expected
  asked=$(grep -v -- ' --assume-no ' calls | sed -n 's/^apt-get install //p' | tr ' ' '\n' | grep -v '^-' | sort | tr '\n' ' ')
  expected=$(printf '%s\n' "$@" | sort | tr '\n' ' ')
  check "installed '$asked', not '$expected'" test "$asked" = "${*:+$expected}"
}
builds() { check "ended with $code before it built" grep -qE "^9 |could not be built" <(echo "$code "; cat output); }
ends_with() { # ends_with SENTENCE
  check "ended with $code" test "$code" -eq 1
  last_line "run.sh: error: missing $1"
}
first="examples/nanogpt/run.sh --data=$work/cpuinfo" second=tests/run.sh

# CMake alone: an error only where it is demanded.
configure() {
  (cd repository && PATH=$work/stubs:$PATH cmake --preset cpu -DFSDP_BUILD_TESTS=OFF "$@") > output 2>&1
  code=$?
}
packages libopenblas-dev
configure
check "ended with $code" test "$code" -eq 0
said "fsdp: not built: nanogpt, for want of OpenBLAS (on Debian: libopenblas-dev)"
configure -DFSDP_REQUIRE=everything
check "is no error" test "$code" -ne 0
said "FSDP_REQUIRE names 'everything'"

# All that is missing, at once; what only the tests need is not asked for.
all=(libfmt-dev libopenmpi-dev openmpi-bin libopenblas-dev libcli11-dev nlohmann-json3-dev libxxhash-dev)
packages "${all[@]}" catch2
rm -rf repository/build
run $first
builds
installed "${all[@]}"
said "== installing ${all[*]} (log: build/packages.log)"
check "not at once" test "$(grep -c '^apt-get update' calls) $(grep -c '^apt-get install .* -y ' calls)" = "1 1"
run $first
builds
installed

# A package that cannot be had: the sentence names it and the program that needs it.
packages libopenblas-dev libcli11-dev
NOT_IN_ARCHIVE=libcli11-dev run $first
ends_with "libcli11-dev (nanogpt needs CLI11): apt-get could not install it (see above)"
check "still misses what can be had" test ! -e missing/libopenblas-dev
NOT_IN_ARCHIVE=libcli11-dev UPDATE_CODE=100 run $first
ends_with "libcli11-dev (nanogpt needs CLI11): apt-get could not update its lists, nor install it (see above): is there a network?"
USELESS=yes run $first
ends_with "libcli11-dev (nanogpt needs CLI11): apt-get reported success, and still CMake does not find it (build/cpu.log)"
# Another package, half installed, makes apt-get fail though it has installed these.
INSTALL_CODE=100 run $first
builds

# oneDNN is installed where the processor multiplies bf16, and missed by nobody where it cannot be had.
echo '[[ " $* " == *" dnnl.hpp "* ]] && exit 1; exec '"$(type -ap c++ | grep -v /ccache/ | head -n 1)"' "$@"' | stub c++
packages libdnnl-dev
run $first
builds
installed
echo "flags : fpu avx2 avx512_bf16 avx512_fp16" > cpuinfo
if ((EUID == 0)); then
  NOT_IN_ARCHIVE=libdnnl-dev run $first
  builds
  said "E: Unable to locate package libdnnl-dev"
  run $first
  builds
  installed libdnnl-dev
  said "installing libdnnl-dev (log: "
  run $first
  builds
  installed
fi
rm stubs/c++
echo "flags : fpu avx2" > cpuinfo

# Ninja and ccache are installed where they can be had, and missed by nobody where not.
mkdir all
IFS=: read -ra folders <<< "$PATH"
for folder in "${folders[@]}"; do
  [[ ! -d $folder ]] || cp -rsn "$(cd "$folder" && pwd -P)/." all 2> /dev/null
done
rm -f all/ninja all/ccache
path=$work/stubs:$work/all
packages catch2
if ((EUID == 0)); then
  NOT_IN_ARCHIVE=ccache run $second
  builds
  said "E: Unable to locate package ccache"
  check "catch2 is still missing" test ! -e missing/catch2
fi
packages catch2
run $second --no-install
ends_with "catch2 (tests need Catch2): installing was forbidden"
installed

# A ninja that does not run is none, nor is that of a folder whose ninja has gone; a ccache that fails is done without.
ninja=$(command -v ninja)
packages
rm -rf repository/build
echo 'exit 127' | stub ninja
run $first
builds
rm -rf repository/build stubs/ninja
if [[ -n $ninja ]]; then
  ln -s "$ninja" stubs/ninja
  run $first
  builds
  check "not configured for ninja" grep -q '^CMAKE_GENERATOR:INTERNAL=Ninja' repository/build/cpu/CMakeCache.txt
  rm stubs/ninja
  run $first
  builds
  check "still configured for ninja" grep -q '^CMAKE_GENERATOR:INTERNAL=Unix' repository/build/cpu/CMakeCache.txt
fi
echo 'exit 1' | stub ccache
check "a ccache that fails ends a compilation" env PATH="$work/stubs:$PATH" "$source_folder/cmake/compiler_launcher.sh" test -d stubs
check "ccache was not asked" grep -q '^ccache test' calls
# Objects are shared with builds without -Werror: with it, the compiler decides on those that come with warnings.
echo 'echo "x.cpp:1: warning: a stub"' | stub ccache
echo '[[ ! -e object ]] && exit 3' | stub compiler
for case in "0 compiler -o object" "3 compiler -Werror -o object"; do
  touch object
  read -ra words <<< "$case"
  code=0
  PATH="$work/stubs:$PATH" "$source_folder/cmake/compiler_launcher.sh" "${words[@]:1}" > output 2>&1 || code=$?
  check "'${words[*]:1}' ended with $code" test "$code" -eq "${words[0]}"
done

# An error of CMake's own is shown.
path=
rm -rf repository/build
CXX=/bin/false run $first
said "is not able to compile"
last_line "run.sh: error: CMake could not configure build/cpu (its messages are above, and in build/cpu.log)"
CXX=/no/compiler run $first
last_line "run.sh: error: CXX=/no/compiler: there is no such compiler"

echo "$checks checks, $failures failures"
exit $((failures != 0))
