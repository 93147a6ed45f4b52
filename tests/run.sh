#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what is missing, builds, and tests. The last lines are ctest's own summary of the main suite.
#
#   tests/run.sh [--quick] [--full] [--no-install]
#
#   --quick        the preset cpu only: no sanitizers, no CUDA build
#   --full         also the tests with the label `full` (minutes each)
#   --no-install   never calls apt-get
#   JOBS=2         compilers, and tests, at a time
#   CUDA_ARCHITECTURES=90a-real   what the CUDA programs are compiled for, instead of the build's default
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${JOBS:-2}
quick=0 full=0 install=1
for argument in "$@"; do
  case $argument in
    --quick) quick=1 ;;
    --full) full=1 ;;
    --no-install) install=0 ;;
    -h | --help) sed -n '3,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run.sh: unknown argument '$argument' (see --help)" >&2; exit 2 ;;
  esac
done
say() { printf '== [%ds] %s\n' "$SECONDS" "$*"; }

packages=(g++ clang-14 cmake ninja-build ccache pkg-config libfmt-dev catch2 libopenmpi-dev openmpi-bin libopenblas-dev
          libcli11-dev nlohmann-json3-dev)
if ((install)) && command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then
  missing=()
  for package in "${packages[@]}"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  if ((${#missing[@]})); then
    say "installing ${missing[*]}"
    root=()
    if ((EUID != 0)); then root=(sudo); fi
    ${root[@]+"${root[@]}"} apt-get update -q
    ${root[@]+"${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
  fi
fi

# For fresh build folders; one that exists keeps its generator.
if [[ -z ${CMAKE_GENERATOR:-} ]] && command -v ninja >/dev/null; then export CMAKE_GENERATOR=Ninja; fi
if command -v ccache >/dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
  # The same object for another folder of the same sources.
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1 CCACHE_SLOPPINESS=pch_defines,time_macros
fi
ctest_flags=(--output-on-failure -j "$jobs" --no-tests=error)

build() { # build PRESET [TARGET [cmake arguments...]]
  local preset=$1 target=${2:-all}
  say "preset $preset: build $target"
  mkdir -p build
  # Presets say what is built: another script may have left tests and benchmarks off in the same folder.
  cmake --preset "$preset" "${@:3}" >"build/$preset.log" 2>&1 || { cat "build/$preset.log"; return 1; }
  cmake --build "build/$preset" -j "$jobs" --target "$target"
}

build cpu
if ((!quick)); then
  for sanitizer in asan tsan; do
    build $sanitizer
    say "preset $sanitizer: test"
    ctest --test-dir build/$sanitizer "${ctest_flags[@]}" -LE 'full|slow'
  done
  if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
    export PATH=$PATH:/usr/local/cuda/bin
    build cuda cuda_programs ${CUDA_ARCHITECTURES:+"-DCMAKE_CUDA_ARCHITECTURES=$CUDA_ARCHITECTURES"}
    say "preset cuda: test (without a GPU, what needs one is skipped)"
    ctest --test-dir build/cuda "${ctest_flags[@]}" -L gpu -LE full
  else
    say "no nvcc: CUDA targets are not compiled"
  fi
fi
say "preset cpu: test"
if ((full)); then
  ctest --test-dir build/cpu "${ctest_flags[@]}"
else
  ctest --test-dir build/cpu "${ctest_flags[@]}" -LE full
fi
