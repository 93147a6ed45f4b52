#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs missing packages, builds, and runs the tests of the host. The last lines are ctest's summary of the main suite; if tests
# have failed there or in a stage before it, the very last one names the presets.
#
#   tests/run.sh [--all] [--full] [--no-install] [--only=REGEX | --changed[=COMMIT]]
#
#   --all          also both sanitizers, the CUDA programs (compiled by nvcc, and run on stand-ins; their kernels in emulated
#                  thread blocks), the benchmarks, and the tests of compilers, of the package and of the documents' code;
#                  warnings are errors
#   --full         also the tests with the label `full` (minutes each)
#   --no-install   never calls apt-get
#   --only=REGEX   builds and runs only the host's tests that match REGEX
#   --changed      builds and runs only those of the host's tests that are closest to the files that differ from COMMIT
#                  (default: HEAD): minutes instead of all tests, and no replacement for them
#   JOBS=2         number of compilers at a time; twice as many tests, most of which wait half of their time
#   CUDA_ARCHITECTURES=90a-real   architectures of the CUDA programs; a plain build has three
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
jobs=${JOBS:-2}
. cmake/install_missing.sh
all=0 full=0 only= changed=
for argument in "$@"; do
  case $argument in
    --all) all=1 ;;
    --full) full=1 ;;
    --no-install) install=0 ;;
    --only=?*) only=${argument#--only=} ;;
    --changed) changed=HEAD ;;
    --changed=?*) changed=${argument#--changed=} ;;
    -h | --help) sed -n '3,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "run.sh: unknown argument '$argument' (see --help)" >&2; exit 2 ;;
  esac
done
say() { printf '== [%ds] %s\n' "$SECONDS" "$*"; }
die() { printf 'run.sh: error: %s\n' "$*" >&2; exit 1; }

# tests_near FILE...: a regular expression of the tests closest to these files. For a test's source or script, that test; for any
# other file of a folder of tests or of an example, the tests of the folder; for a folder of include/fsdp, the tests that most
# likely notice a fault there. CMake's expressions have at most nine parentheses, so these have none.
tests_near() {
  local file stem folder
  for file in "$@"; do
    stem=${file##*/} folder=${file#tests/} folder=${folder%%/*}
    stem=${stem%.*}
    case $file in
      tests/standin/* | tests/*/*.cu | tests/gpu.sh | tests/fresh.sh) ;; # none that preset cpu builds
      tests/golden/*) printf '^%s_model_golden$\n' nanogpt llama ;;
      tests/llama/folders/*) echo '^llama_' ;;
      tests/slurm.sh) echo '^slurm$' ;;
      benchmarks/*) echo '^benchmarks_' ;;
      tests/support/* | CMake* | cmake/*) printf '%s\n' '^unit_' '^schedule_table$' '^nanogpt_run_script$' ;;
      tests/compile_fail/* | tests/failure/* | tests/fast_math/* | tests/headers/* | tests/package/*) echo "^${folder}_" ;;
      tests/*/*.cpp | tests/*/*.sh) printf '%s\n' "^${folder}_$stem\$" "^${folder}_${stem}_[0-9]+\$" ;;
      tests/*/*) echo "^${folder}_" ;;
      tests/*) echo '^unit_' ;;
      include/fsdp/detail/checkpoint/* | include/fsdp/compiled/checkpoint.cpp | include/fsdp/checkpoint.hpp | include/fsdp/snapshots.hpp | include/fsdp/full_state.hpp | include/fsdp/finite_state.hpp | include/fsdp/safetensors.hpp | include/fsdp/json.hpp | include/fsdp/files.hpp) printf '^checkpoint_%s$\n' roundtrip several refused snapshots ;;
      include/fsdp/detail/mpi/* | include/fsdp/detail/comm/* | include/fsdp/detail/tcp/* | include/fsdp/mpi.hpp | include/fsdp/bootstrap.hpp) printf '^conformance_%s$\n' communicator_mpi_3 tcp_group secret ;;
      include/fsdp/detail/local/* | include/fsdp/local.hpp) echo '^conformance_local_host$' ;;
      include/fsdp/detail/optim/* | include/fsdp/detail/kernels/* | include/fsdp/optimizers.hpp | include/fsdp/gradients.hpp | include/fsdp/kernels.hpp | include/fsdp/muon.hpp | include/fsdp/ema.hpp) printf '%s\n' '^unit_kernels_' '^parity_optimizers$' '^parity_groups$' '^parity_muon$' '^parity_ema$' ;;
      include/fsdp/plan.hpp | include/fsdp/simulate.hpp) echo '^schedule_plan_' ;;
      include/fsdp/detail/trace/* | include/fsdp/trace.hpp) printf '%s\n' '^schedule_trace' '^unit_trace_report$' ;;
      include/fsdp/detail/host/* | include/fsdp/host.hpp) printf '^conformance_%s$\n' host_device failed_streams team ;;
      include/fsdp/*) printf '%s\n' '^docs_site$' '^unit_program' '^schedule_table$' '^schedule_symbols$' '^schedule_refusals$' '^differential_random$' '^parity_strategies$' ;;
      examples/transformer/*) printf '%s\n' '^transformer_' '^nanogpt_app_settings$' '^nanogpt_app_run_settings$' '^nanogpt_app_data$' '^nanogpt_app_tokenizer$' '^nanogpt_app_report$' '^nanogpt_app_launch$' ;;
      examples/nanogpt/*.sh) printf '^nanogpt_%s$\n' run_script go_on ;;
      examples/nanogpt/*) printf '%s\n' '^nanogpt_model_' '^nanogpt_app_strategies$' '^nanogpt_app_resume$' ;;
      examples/llama/*) echo '^llama_' ;;
      examples/usage/*.cpp) printf '%s\n' "^usage_$stem\$" '^docs_readme$' ;;
      examples/*) echo '^example_' ;;
      README.md | docs/*) printf '^docs_%s$\n' readme guarantees site ;;
    esac
  done | sort -u | paste -sd '|'
}
if [[ -n $changed ]]; then
  files=$(git diff --name-only "$changed" -- && git ls-files --others --exclude-standard) || die "--changed=$changed: git knows no such commit"
  mapfile -t files <<< "$files"
  only=$(tests_near "${files[@]}")
  [[ -n $only ]] || { say "no test is close to what differs from $changed"; exit 0; }
  say "tests close to what differs from $changed: $only"
fi

# Without --all warnings are no errors: newer compilers have new warnings.
warnings=OFF demands=(nanogpt tests)
if ((all)); then warnings=ON demands+=(headers_clang sanitizers); fi
if [[ -z $only ]]; then
  duration="10 to 20 minutes"
  if ((all)); then duration="half an hour to an hour"; fi
  if ((full)); then duration+=", and the long tests take more"; fi
  say "with two cores, and nothing built before: $duration"
fi
wish_for ninja=ninja-build ccache=ccache
if ((all)); then wish_for doxygen=doxygen; fi # for docs_site
wish_for_bf16
need_tools fsdp fsdp::mpi "${demands[@]}"
use_quick_tools
failed=()
# Passes on what ctest prints, with its ten longest tests before its summary.
with_longest_tests() {
  awk 'match($0, /(Passed|Failed|Timeout|Exception.*) +[0-9.]+ sec/) { time[$4] = $(NF - 1) }
    /^[0-9]+% tests passed/ {
      print "longest tests, in seconds:"; fflush()
      for (name in time) printf "%8.1f  %s\n", time[name], name | "sort -rn | sed -n 1,10p"
      close("sort -rn | sed -n 1,10p")
    }
    { print; fflush() }'
}
run_tests() {
  if ((all)); then ctest --preset "$1" -j $((2 * jobs)) | with_longest_tests; else ctest --preset "$1" -j $((2 * jobs)); fi || failed+=("$1")
}

# programs_of ARGUMENT...: the targets that the tests need which ctest chooses with these arguments. CMake lists those of each test.
programs_of() {
  ctest -N "$@" 2> /dev/null | sed -nE 's/^ *Test +#[0-9]+: ([^ ]+).*/\1/p' |
    awk 'NR == FNR { chosen[$1]; next } $1 in chosen { for (i = 2; i <= NF; ++i) print $i }' - build/cpu/test_targets.txt | sort -u
}

build() { # build PRESET [TARGET [cmake arguments...]]; with the target `tested`, what the preset's tests need
  local preset=$1 target=${2:-all} targets
  say "preset $preset: build $target"
  # Configuring by preset turns tests on again, which examples/*/run.sh turns off in the same folder.
  configure "$preset" "-DFSDP_WERROR=$warnings" "${@:3}"
  local log=build/$preset/.ninja_log known=0
  if [[ -e $log ]]; then known=$(wc -l < "$log"); fi
  targets=("$target")
  if [[ $target == tested ]]; then mapfile -t targets < <(programs_of --preset "$preset"); fi
  cmake --build "build/$preset" -j "$jobs" --target "${targets[@]}"
  if ((all)) && [[ -e $log ]]; then
    echo "longest edges, in seconds:"
    tail -n "+$((known + 1))" "$log" | awk '$2 > 0 { printf "%8.1f  %s\n", ($2 - $1) / 1000, $4 }' | sort -rn | sed -n 1,10p
  fi
}

host=(-DFSDP_MPI=ON "-DFSDP_REQUIRE=$(IFS=';'; echo "${demands[*]}")")
if [[ -n $only ]]; then
  configure cpu "-DFSDP_WERROR=$warnings" "${host[@]}"
  chosen=(-R "$only")
  if [[ -n $changed ]]; then chosen+=(-LE '^full$'); fi
  mapfile -t programs < <(programs_of --test-dir build/cpu "${chosen[@]}")
  if ((${#programs[@]})); then cmake --build build/cpu -j "$jobs" --target "${programs[@]}"; fi
  exec ctest --test-dir build/cpu --output-on-failure --no-tests=error -j $((2 * jobs)) "${chosen[@]}"
fi

if ((all || full)); then build cpu all "${host[@]}"; else build cpu tested "${host[@]}"; fi
if ((all)); then
  # nvcc before the sanitizers: a source that it refuses ends the run, and does so early.
  if command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; then
    export PATH=$PATH:/usr/local/cuda/bin
    # nvcc's -O is of the host's part alone, which does not run without a GPU. The C++ sources have the flags of the preset cpu, so
    # that the compiler cache has them.
    level=-O1 programs=cuda_programs_full tests=cuda
    if [[ ! -e /dev/nvidiactl ]]; then
      level=-O0
      if ((!full)); then programs=cuda_programs tests=cuda-short; fi
    fi
    build cuda "$programs" "-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-90a-real}" "-DCMAKE_CUDA_FLAGS_RELWITHDEBINFO=$level"
    say "preset cuda: test (without a GPU, tests that need one are skipped)"
    run_tests "$tests"
    build standin cuda_programs
    say "preset standin: test (CUDA's programs, on stand-ins for its libraries)"
    run_tests standin
  else
    say "no nvcc: CUDA targets are not compiled"
  fi
  clang=$(sed -n 's/^FSDP_CLANG:FILEPATH=//p' build/cpu/CMakeCache.txt)
  for sanitizer in asan tsan; do
    # CMake forgets the settings of a folder whose compiler changes.
    if ! grep -q '^CMAKE_CXX_COMPILER:[A-Z]*=.*clang' "build/$sanitizer/CMakeCache.txt" 2> /dev/null; then rm -rf "build/$sanitizer"; fi
    if command -v clang++ > /dev/null; then build $sanitizer; else build $sanitizer all "-DCMAKE_CXX_COMPILER=$clang"; fi
    say "preset $sanitizer: test"
    run_tests $sanitizer
  done
fi
if ((full)); then
  say "the long tests"
  run_tests full
fi
say "preset cpu: test"
if ((all)); then run_tests all; else run_tests cpu; fi
if ((${#failed[@]})); then die "tests failed, in these presets: ${failed[*]}"; fi
