#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a small character-level GPT from a fresh clone, and prints a sample of its text.
#
#   ./examples/nanogpt/run.sh [--data FILE] [trainer settings...]
#
# Installs missing packages (Debian, Ubuntu), builds, prepares the data, trains fully sharded over two ranks (or over all
# GPUs), samples, and writes a report page.
# A second run skips finished work and continues training that was stopped. Trainer settings override the defaults, e.g.
# --max_iters=500 --strategy=ddp; other settings start a new run, and the old one stays beside it.
#   RANKS=N     number of ranks (default 2; with several GPUs, NCCL and MPI: one process for each GPU)
#   JOBS=2      number of compilers at a time
#   WORK=DIR    folder for data and models (default: build/nanogpt-run)
set -euo pipefail

say() { printf '== %s\n' "$*"; }
die() { printf 'run.sh: error: %s\n' "$*" >&2; exit 1; }

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
called_from=$PWD
jobs=${JOBS:-2}
work=${WORK:-$repository/build/nanogpt-run}
[[ $work == /* ]] || work=$called_from/$work

data=
settings=()
while (($#)); do
  case $1 in
    --data) [[ -n ${2-} ]] || die "--data needs a file"; data=$2; shift 2 ;;
    --data=*) data=${1#--data=}; [[ -n $data ]] || die "--data needs a file"; shift ;;
    -h | --help) sed -n '3,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) settings+=("$1"); shift ;;
  esac
done
[[ ${RANKS:-2} =~ ^[1-9][0-9]*$ ]] || die "RANKS=$RANKS: expected a positive number"
if [[ -n $data ]]; then
  [[ $data == /* ]] || data=$called_from/$data
  [[ -f $data && -r $data ]] || die "--data: cannot read '$data'"
fi

# --- build, with what CMake finds missing ---------------------------------------------------------------------------------
cd "$repository"
. cmake/install_missing.sh
need_tools
wish_for_bf16
use_quick_tools
preset=cpu demands=(-DFSDP_MPI=ON)
if [[ -d /usr/local/cuda/bin ]]; then PATH=$PATH:/usr/local/cuda/bin; fi
if command -v nvcc > /dev/null && command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then
  preset=cuda demands=() # without MPI and NCCL the threads of one process share a GPU
fi
# Tests that were built in this folder stay: Ninja's generator deletes what a configuration no longer has.
if [[ ! -e build/$preset/tests/CTestTestfile.cmake ]]; then demands+=(-DFSDP_BUILD_TESTS=OFF); fi
configure "$preset" -DFSDP_REQUIRE=nanogpt ${demands[@]+"${demands[@]}"}
say "building (preset $preset)"
cmake --build "build/$preset" --target nanogpt -j "$jobs"
nanogpt=$repository/build/$preset/examples/nanogpt/nanogpt
mkdir -p "$work"
cd "$work"

# --- data ---------------------------------------------------------------------------------------------------------------
chosen=$("$repository/examples/nanogpt/choose_text.sh" "$work" ${data:+"$data"})
IFS=$'\t' read -r dataset text <<< "$chosen"
prepared=1
for file in train.bin val.bin meta.json; do [[ -s data/$dataset/$file ]] || prepared=0; done
if [[ $dataset == repository_text ]] || ((!prepared)); then # the repository's text may have changed
  say "preparing data/$dataset"
  "$nanogpt" prepare --dataset="$dataset" --data="$text"
fi

# --- train --------------------------------------------------------------------------------------------------------------
if grep -qw avx512vl /proc/cpuinfo 2> /dev/null; then export OPENBLAS_CORETYPE=SkylakeX; fi
if ((EUID == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
out_dir=out-$dataset named=0
for setting in ${settings[@]+"${settings[@]}"}; do
  if [[ $setting == --out_dir=* ]]; then out_dir=${setting#--out_dir=} named=1; fi
done
. "$repository/examples/nanogpt/choose_start.sh"
. "$repository/examples/nanogpt/choose_launch.sh"
choose_launch "$preset" "$repository/build/$preset" "$nanogpt"
# The type that is fastest here, which nanogpt measures: as a config file, which one of the caller's may overrule.
echo "dtype = 'fastest'" > fastest_type
defaults=(train_shakespeare_char_cpu fastest_type --strategy=full_shard --dataset="$dataset" --out_dir="$out_dir"
          --batch_size=6 --gradient_accumulation_steps="$ranks" --trace="$out_dir/trace.json"
          ${rank_settings[@]+"${rank_settings[@]}"})

key=$(printf '%s\n' "$ranks" "${defaults[@]}" ${settings[@]+"${settings[@]}"} "$(sha256sum < "data/$dataset/train.bin")" | sha256sum)
if [[ -s $out_dir/model.safetensors && -s $out_dir/.trained && $(< "$out_dir/.trained") == "$key" ]]; then
  say "$work/$out_dir already has the model of these settings: not training again"
else
  if ((ranks == 1)); then sharded="1 rank"; else sharded="$ranks ranks, fully sharded"; fi
  say "training on $sharded: $how"
  choose_start "$out_dir" "$key" "$named" ${settings[@]+"${settings[@]}"}
  ended=0
  ${launch[@]+"${launch[@]}"} "$nanogpt" train "${defaults[@]}" ${start[@]+"${start[@]}"} ${settings[@]+"${settings[@]}"} || ended=$?
  if ((ended != 0)); then
    if [[ ${start[*]-} == *auto* && -e $out_dir/latest ]]; then say "the same command continues this run from its last checkpoint"; fi
    exit "$ended"
  fi
  if [[ -s $out_dir/model.safetensors ]]; then printf '%s\n' "$key" > "$out_dir/.trained"; fi
fi

# --- sample -------------------------------------------------------------------------------------------------------------
[[ -s $out_dir/model.safetensors ]] || { say "no model was saved, so there is nothing to sample"; exit 0; }
say "a sample"
"$nanogpt" sample --out_dir="$out_dir" --num_samples=1 --max_new_tokens=500

# --- report -------------------------------------------------------------------------------------------------------------
if [[ -s $out_dir/log.jsonl ]]; then
  say "writing the report page"
  "$nanogpt" report "$out_dir" --to="$work/report.html"
fi
