#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What run.sh and tests/run.sh install: exactly what CMake does not find, once; and how they end where it cannot be had.
# CMake is the real one, made blind to packages that are "not installed"; apt-get and sudo are stubs, and nothing is built.
# timeout: 300
# skip-sanitizers
set -uo pipefail

source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$source_folder/tests/support/script.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
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
shift
for package in "\$@"; do
  [[ \$package != -* ]] || continue
  if [[ " \${NOT_IN_ARCHIVE:-} " == *" \$package "* ]]; then
    echo "E: Unable to locate package \$package"
    exit 100
  fi
done
[[ -n \${USELESS:-} ]] || (cd "$work/missing" && rm -f -- "\$@")
EOF2
stub nvidia-smi <<< 'exit 1'
stub sudo <<< 'exec "$@"'

packages() { # packages NAME...: these are missing
  rm -rf missing repository/build
  mkdir missing
  for package in "$@"; do touch "missing/$package"; done
}
run() { # run SCRIPT ARGUMENTS...: in the copy; leaves its code, output and calls
  : > calls
  PATH=$work/stubs:$PATH timeout 120 "repository/$1" "${@:2}" > output 2>&1 < /dev/null
  code=$?
}
said() { check "does not say '$1'" grep -qF -- "$1" output; }
last_line() { check "does not end with '$1'" test "$(tail -n 1 output)" = "$1"; }
installed() { # installed PACKAGE...: these were asked for, each once, and nothing else
  local asked expected
  asked=$(sed -n 's/^apt-get install //p' calls | tr ' ' '\n' | grep -v '^-' | sort | tr '\n' ' ')
  expected=$(printf '%s\n' "$@" | sort | tr '\n' ' ')
  check "installed '$asked', not '$expected'" test "$asked" = "${*:+$expected}"
}
builds() { check "ended with $code before it built" test "$code" -eq 9; }

script=examples/nanogpt/run.sh
packages libopenblas-dev
run $script
builds
installed libopenblas-dev
said "installing libopenblas-dev (nanogpt needs OpenBLAS)"
run $script
builds
check "asked for packages again" test -z "$(grep -E '^(apt-get|sudo)' calls)"

# All that is missing, at once; what only the tests need is not asked for.
all=(libfmt-dev libopenmpi-dev openmpi-bin libopenblas-dev libcli11-dev nlohmann-json3-dev libxxhash-dev)
packages "${all[@]}" catch2
run $script
builds
installed "${all[@]}"
check "not at once" test "$(grep -c '^apt-get update' calls) $(grep -c '^apt-get install' calls)" = "1 1"
run tests/run.sh
builds
installed catch2
packages "${all[@]}" catch2
run tests/run.sh
builds
installed "${all[@]}" catch2

# What cannot be had: the sentence that names it and who needs it.
ends_with() { # ends_with SENTENCE
  check "ended with $code" test "$code" -eq 1
  last_line "run.sh: error: missing $1"
}
for script in examples/nanogpt/run.sh "tests/run.sh"; do
  packages libopenblas-dev libcli11-dev
  NOT_IN_ARCHIVE=libcli11-dev run $script
  ends_with "libcli11-dev (nanogpt needs CLI11): apt-get could not install it (see above)"
  check "still misses what can be had" test ! -e missing/libopenblas-dev
  NOT_IN_ARCHIVE=libcli11-dev UPDATE_CODE=100 run $script
  ends_with "libcli11-dev (nanogpt needs CLI11): apt-get could not update its lists, nor install it (see above): is there a network?"
  USELESS=yes run $script
  ends_with "libcli11-dev (nanogpt needs CLI11): apt-get reported success, and still CMake does not find it (build/cpu.log)"
  run $script # after all that, a good one
  builds
done
packages libopenblas-dev
run tests/run.sh --no-install
ends_with "libopenblas-dev (nanogpt needs OpenBLAS): installing was forbidden"
installed

# Ninja and ccache are installed where they can be had, and missed by nobody where not.
mkdir all
IFS=: read -ra folders <<< "$PATH"
for folder in "${folders[@]}"; do
  [[ ! -d $folder ]] || cp -rsn "$(cd "$folder" && pwd -P)/." all 2> /dev/null
done
rm -f all/ninja all/ccache
if ((EUID == 0)); then
  packages
  PATH=$work/all run tests/run.sh
  builds
  installed ninja-build ccache
  packages
  NOT_IN_ARCHIVE=ccache PATH=$work/all run tests/run.sh
  builds
  said "E: Unable to locate package ccache"
fi
packages
PATH=$work/all run tests/run.sh --no-install
builds
installed

# oneDNN is installed where the processor multiplies bf16, and missed by nobody where it cannot be had.
stub c++ << EOF2
if [[ " \$* " == *" dnnl.hpp "* ]]; then [[ ! -e $work/missing/libdnnl-dev ]]; exit; fi
exec "$(type -ap c++ | grep -v /ccache/ | head -n 1)" "\$@"
EOF2
packages libdnnl-dev
run $script
builds
installed
echo "flags : fpu avx2 avx512_bf16 avx512_fp16" > cpuinfo
if ((EUID == 0)); then
  run $script
  builds
  installed libdnnl-dev
  said "installing libdnnl-dev (for bf16 on this processor)"
  run tests/run.sh
  builds
  installed
fi
packages libdnnl-dev
NOT_IN_ARCHIVE=libdnnl-dev run $script
builds
packages libdnnl-dev
run tests/run.sh --no-install
builds
installed
rm stubs/c++
echo "flags : fpu avx2" > cpuinfo

# CMake alone: an error only where it is demanded.
configure() {
  (cd repository && PATH=$work/stubs:$PATH cmake --preset cpu -DFSDP_BUILD_TESTS=OFF "$@") > output 2>&1
  code=$?
}
packages libopenblas-dev
configure
check "ended with $code" test "$code" -eq 0
said "fsdp: not built: nanogpt, for want of OpenBLAS (on Debian: libopenblas-dev)"
configure -DFSDP_REQUIRE=nanogpt
check "is no error" test "$code" -ne 0
said "nanogpt needs OpenBLAS (on Debian: libopenblas-dev)"
configure -DFSDP_REQUIRE=everything
check "is no error" test "$code" -ne 0
said "FSDP_REQUIRE names 'everything'"
packages libfmt-dev
configure
check "is no error" test "$code" -ne 0
said "fsdp needs fmt 9 or newer (on Debian: libfmt-dev)"

# An error of CMake's own is shown.
packages
CXX=/bin/false run examples/nanogpt/run.sh
said "is not able to compile"
last_line "run.sh: error: CMake could not configure build/cpu (its messages are above, and in build/cpu.log)"
CXX=/no/compiler run examples/nanogpt/run.sh
last_line "run.sh: error: CXX=/no/compiler: there is no such compiler"

echo "$checks checks, $failures failures"
exit $((failures != 0))
