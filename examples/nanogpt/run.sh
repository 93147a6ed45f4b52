#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a small character-level GPT from a fresh clone, and prints a sample of its text.
#
#   ./examples/nanogpt/run.sh [--data FILE] [--least=N [--hosts=a:2,b:2]] [trainer settings...]
#
# Installs missing packages (Debian, Ubuntu), builds, prepares the data, trains fully sharded over two ranks (or over all
# GPUs), samples, and writes a report page.
# A second run skips finished work and continues training that was stopped. Trainer settings override the defaults, e.g.
# --max_iters=500 --strategy=ddp; other settings start a new run, and the old one stays beside it.
#   --least=N   if ranks are lost, goes on from the last checkpoint with those that are left, N or more (see go_on.sh):
#               RANKS=4 ./examples/nanogpt/run.sh --least=2
#   --hosts=... trains on these machines, with so many ranks on each; all have this folder and WORK at the same place
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

data='' least='' hosts=''
settings=()
while (($#)); do
  case $1 in
    --data) [[ -n ${2-} ]] || die "--data needs a file"; data=$2; shift 2 ;;
    --data=*) data=${1#--data=}; [[ -n $data ]] || die "--data needs a file"; shift ;;
    --least=*) least=${1#--least=}; [[ $least =~ ^[1-9][0-9]{0,5}$ ]] || die "--least=$least: expected a positive number"; shift ;;
    --hosts=*) hosts=${1#--hosts=}; shift ;;
    -h | --help) sed -n '3,18s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) settings+=("$1"); shift ;;
  esac
done
[[ ${RANKS:-2} =~ ^[1-9][0-9]*$ ]] || die "RANKS=$RANKS: expected a positive number"
if [[ -n $hosts ]]; then
  [[ $hosts =~ ^[A-Za-z0-9._-]+:[1-9][0-9]{0,5}(,[A-Za-z0-9._-]+:[1-9][0-9]{0,5})*$ ]] ||
    die "--hosts: expected NAME:RANKS, separated by commas, got '$hosts'"
  [[ -n $least ]] || die "--hosts: expected --least=N too, got none"
  RANKS=0
  for host in ${hosts//,/ }; do RANKS=$((RANKS + ${host#*:})); done
fi
if [[ -n $least ]]; then
  most=${RANKS:-2} hint=''
  if [[ -z ${RANKS-} ]]; then # there are 2 ranks, or one for each of several GPUs
    hint='; RANKS=N sets it'
    . "$repository/examples/nanogpt/choose_launch.sh"
    gpus=0
    if command -v nvidia-smi > /dev/null; then gpus=$(count_gpus); fi
    if ((gpus > most)); then most=$gpus; fi
  fi
  ((least <= most)) || die "--least=$least: expected at most the number of ranks, which is $most$hint"
fi
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
if [[ -n $hosts ]]; then all=$RANKS RANKS=1; fi
choose_launch "$preset" "$repository/build/$preset" "$nanogpt"
if [[ -n $hosts ]]; then ranks=$all how="$all processes on $hosts, by mpirun"; fi
if [[ -n $least ]]; then
  ((${#launch[@]})) || die "--least needs ranks that are processes: $how"
  . "$repository/examples/nanogpt/go_on.sh"
  launch=(go_on --ranks="$ranks" --least="$least" ${hosts:+--hosts="$hosts"} "${launch[0]}" "${launch[@]:3}" --)
fi
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
