# shellcheck shell=bash
# SPDX-License-Identifier: Apache-2.0
# Requirements of tests/gpu.sh that a machine with a GPU may lack.

# A line each: package | how it is found | who needs it. Debian's and Ubuntu's names, NVIDIA's, and pip's.
needed_packages() {
  cat <<'EOS'
g++|runs c++|every stage
cmake|runs cmake|every stage (3.25 or newer; also by pip)
ninja-build|runs ninja make|every stage (or make; ninja also by pip)
cuda-toolkit|runs nvcc|every stage (NVIDIA's; 12.4 or newer, with cuBLAS and NVTX)
libfmt-dev|has fmt/format.h|every stage
catch2|has catch2/catch.hpp catch2/catch_all.hpp|every test
libopenblas-dev|blas|nanogpt: its tests, strategies, devices, shakespeare, step, kernels, attention
libcli11-dev|has CLI/CLI.hpp|nanogpt, and the benchmarks step, kernels and attention
nlohmann-json3-dev|has nlohmann/json.hpp|nanogpt, and the benchmarks step, kernels and attention
libxxhash-dev|has xxhash.h|nanogpt
libnccl-dev|nccl|tests *_nccl (NVIDIA's; 2.19 or newer, or NCCL_ROOT says where)
libssl-dev|has openssl/hmac.h|tests *_nccl, and every test program together
openmpi-bin|runs mpirun|nanogpt under mpirun
libopenmpi-dev|runs mpicxx|nanogpt under mpirun
cuda-sanitizer|runs compute-sanitizer|memcheck, racecheck, synccheck (NVIDIA's; part of cuda-toolkit)
torch|torch|pytorch, attention (pip's)
EOS
}

finds() { # finds HOW...: whether this machine has a package
  local one
  case $1 in
    runs) for one in "${@:2}"; do command -v "$one" >/dev/null && return; done ;;
    has) for one in "${@:2}"; do ${CXX:-c++} -E -x c++ - <<<"#include <$one>" >/dev/null 2>&1 && return; done ;;
    blas) compgen -G '/usr/lib/*/*openblas*' >/dev/null || compgen -G '/usr/lib/*/openblas*/*' >/dev/null ;;
    nccl) [[ -n ${NCCL_ROOT-} && -r ${NCCL_ROOT-}/include/nccl.h ]] || finds has nccl.h ;;
    torch) python3 -c 'import torch' 2>/dev/null ;;
    *) false ;;
  esac
}

list_needs() { # list_needs all|local: 0 if nothing is missing
  local package how who missing=() debian=()
  while IFS='|' read -r package how who; do
    [[ $1 == local && $package =~ ^(libnccl-dev|openmpi-bin|libopenmpi-dev)$ ]] && continue
    # shellcheck disable=SC2086  # how: a word, and what it takes
    if finds $how; then
      printf '%-20s %-8s %s\n' "$package" here "$who"
    else
      printf '%-20s %-8s %s\n' "$package" MISSING "$who"
      missing+=("$package")
      [[ $package =~ ^(torch|cuda-toolkit|cuda-sanitizer)$ ]] || debian+=("$package")
    fi
  done < <(needed_packages)
  ((${#missing[@]})) || return 0
  printf '\nTo a machine that reaches no registry they are carried, from one that does:\n'
  if ((${#debian[@]})); then
    cat <<EOS
Debian packages, where the same release of the system runs; then, here, as root: dpkg --install *.deb
  apt-get download \$(apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \\
    --no-enhances ${debian[*]} | grep '^[a-z0-9]' | sort -u)
EOS
  fi
  cat <<EOS
Python's (torch, cmake, ninja), with the same Python and processor; then, here: pip install --no-index --find-links wheels NAMES
  pip download --dest wheels NAMES
NVIDIA's CUDA toolkit: its runfile, which asks no registry
EOS
  return 1
}
