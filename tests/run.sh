#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs missing packages, builds, and runs the tests of the host. The last lines are ctest's summary of the main suite; if tests
# have failed there or in a stage before it, the very last one names the presets.
#
#   tests/run.sh [--all] [--full] [--no-install] [--only=REGEX]
#
#   --all          also both sanitizers, the CUDA programs (compiled by nvcc, and run on stand-ins), and the tests of
#                  compilers and of the package
#   --full         also the tests with the label `full` (minutes each)
#   --no-install   never calls apt-get
#   --only=REGEX   builds and runs only the host's tests that match REGEX
#   JOBS=2         number of compilers, and of tests, at a time
#   CUDA_ARCHITECTURES=90a-real   architectures of the CUDA programs; a plain build has three, and the test kernels_report
#            also compiles the kernels for 80
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${JOBS:-2}
. cmake/install_missing.sh
all=0 full=0 only=
for argument in "$@"; do
  case $argument in
    --all) all=1 ;;
    --full) full=1 ;;
    --no-install) install=0 ;;
    --only=?*) only=${argument#--only=} ;;
    -h | --help) sed -n '3,16s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run.sh: unknown argument '$argument' (see --help)" >&2; exit 2 ;;
  esac
done
say() { printf '== [%ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'run.sh: error: %s\n' "$*" >&2; exit 1; }

wish_for ninja=ninja-build ccache=ccache
need_tools
wish_for_bf16
use_quick_tools
failed=()
run_tests() { ctest --preset "$1" -j "$jobs" || failed+=("$1"); }

build() { # build PRESET [TARGET [cmake arguments...]]
  local preset=$1 target=${2:-all}
  say "preset $preset: build $target"
  # Presets say what is built: another script may have left tests off in the same folder.
  configure "$preset" "${@:3}"
  cmake --build "build/$preset" -j "$jobs" --target "$target"
}

demands="nanogpt;tests"
if ((all)); then demands+=";headers_clang"; fi
host=(-DFSDP_MPI=ON "-DFSDP_REQUIRE=$demands")
if [[ -n $only ]]; then
  configure cpu "${host[@]}"
  # Those targets that the tests' commands name as files of the build folder.
  targets=$(cmake --build build/cpu --target help | grep -oE '^(\.\.\. )?[A-Za-z_0-9]+' | sed 's/^\.\.\. //')
  mapfile -t programs < <(ctest --test-dir build/cpu -N -V -R "$only" | grep -E ': Test command:|^Could not find executable' |
    grep -o "$PWD/build/cpu/[^ \"]*" | sed 's|.*/||' | sort -u | grep -xF "$targets")
  if ((${#programs[@]})); then cmake --build build/cpu -j "$jobs" --target "${programs[@]}"; fi
  exec ctest --test-dir build/cpu --output-on-failure --no-tests=error -j "$jobs" -R "$only"
fi

build cpu all "${host[@]}"
if ((all)); then
  for sanitizer in asan tsan; do
    build $sanitizer
    say "preset $sanitizer: test"
    run_tests $sanitizer
  done
  if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
    export PATH=$PATH:/usr/local/cuda/bin
    level=-O3
    if [[ ! -e /dev/nvidiactl ]]; then level=-O1; fi  # without a GPU nothing runs: the host's part need not be optimised
    build cuda cuda_programs "-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-90a-real}" "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=$level -g1"
    say "preset cuda: test (without a GPU, tests that need one are skipped)"
    run_tests cuda
    build standin cuda_programs
    say "preset standin: test (CUDA's programs, on stand-ins for its libraries)"
    run_tests standin
  else
    say "no nvcc: CUDA targets are not compiled"
  fi
fi
if ((full)); then
  say "the long tests"
  run_tests full
fi
say "preset cpu: test"
if ((all)); then run_tests all; else run_tests cpu; fi
if ((${#failed[@]})); then die "tests failed, in these presets: ${failed[*]}"; fi
