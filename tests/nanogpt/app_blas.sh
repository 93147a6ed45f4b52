#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Where OpenBLAS would leave wider vectors idle, nanogpt starts again with kernels that use them, once; those that somebody
# has chosen stay, with a warning. A library that is loaded first says which kernels there are.
# programs: nanogpt
# skip-sanitizers
#
#   app_blas.sh BINARY_DIR
set -uo pipefail

. "$(dirname "${BASH_SOURCE[0]}")/../support/script.sh"

nanogpt=$1/examples/nanogpt/nanogpt
enter "$nanogpt"
if ! grep -qw avx512vl /proc/cpuinfo 2>/dev/null; then
  echo "skipped: this processor has no vectors that OpenBLAS could leave idle"
  exit 77
fi
cat >name.cpp <<'EOF'
#include <cstdio>
#include <cstdlib>
#include <fstream>
// Notes each call in the file "asked": the name is asked for once as the program starts, and once when it is printed.
// Notes in the file "called" what the process is called then.
extern "C" char* openblas_get_corename() {
  static char narrow[] = "Zen", wide[] = "SkylakeX";
  auto const* const chosen = std::getenv("OPENBLAS_CORETYPE");
  if (auto* const file = std::fopen("asked", "a")) {
    std::fputs(chosen ? "chosen\n" : "by itself\n", file);
    std::fclose(file);
  }
  std::ifstream comm("/proc/self/comm");
  std::ofstream("called", std::ios::app) << comm.rdbuf();
  return chosen != nullptr && chosen[0] == 'S' ? wide : narrow;
}
EOF
"${CXX:-c++}" -shared -fPIC -o name.so name.cpp || { echo "no library could be made"; exit 1; }
tiny=(--dtype=float32 --n_layer=1 --n_head=1 --n_embd=8 --block_size=4 --batch_size=1 --gradient_accumulation_steps=2 --burn_in=1 --timed=1)
bench() { patiently 60 env "$@" "$nanogpt" bench "${tiny[@]}" >output 2>&1 || fail "$*: ended with $?"; }

bench -u OPENBLAS_CORETYPE LD_PRELOAD="$PWD/name.so"
check "did not choose" grep -q '^OpenBLAS core SkylakeX' output
check "asked before once, then after" test "$(head -n 2 asked | tr '\n' ,)" = "by itself,chosen,"
check "a process that pgrep finds by another name" test "$(sort -u called)" = nanogpt
check "started again and again" test "$(grep -c 'by itself' asked)" -eq 1
bench OPENBLAS_CORETYPE=Haswell LD_PRELOAD="$PWD/name.so"
check "chose although somebody had" grep -q '^OpenBLAS core Zen' output
check "does not warn" grep -q "^warning: this processor has AVX-512, but OpenBLAS runs its 'Zen' kernels: unset OPENBLAS_CORETYPE" output
if command -v mpirun >/dev/null && [[ $(ldd "$nanogpt") == *libmpi* ]]; then
  patiently 60 env -u OPENBLAS_CORETYPE LD_PRELOAD="$PWD/name.so" mpirun --oversubscribe --bind-to none -n 2 "$nanogpt" bench "${tiny[@]}" >output 2>&1 ||
    fail "mpirun: ended with $?"
  check "mpirun: did not choose" grep -q '^OpenBLAS core SkylakeX' output
  check "mpirun: not two ranks" grep -qi '^2 processes' output
fi
((failures == 0)) && echo "kernels chosen; $checks checks"
exit $((failures > 0))
