# shellcheck shell=bash disable=SC2154  # choose_*.sh set ranks, how, launch, rank_settings and start
# SPDX-License-Identifier: Apache-2.0
# The steps of nanogpt's and llama's run.sh, in their order. Sourced by a script that has set `program`, the trainer's name.
set -euo pipefail

say() { printf '== %s\n' "$*"; }
die() { printf 'run.sh: error: %s\n' "$*" >&2; exit 1; }

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
parts=$repository/examples/transformer/run_script
called_from=$PWD
jobs=${JOBS:-2}
work=${WORK:-$repository/build/$program-run}
[[ $work == /* ]] || work=$called_from/$work
. "$parts/choose_launch.sh"

# begin_phase NAME: the seconds until the next call are this phase's, in `phases`.
phases='' phase='' phase_began=0
begin_phase() {
  local seconds=$((SECONDS - phase_began))
  if [[ -n $phase ]]; then phases+="${phases:+, }$phase $seconds s"; fi
  phase=$1 phase_began=$SECONDS
}

# --- arguments ----------------------------------------------------------------------------------------------------------
# check_setting WORD: ends if the trainer cannot know this word of its command line, before anything is built. Settings are in
# the tables of sources. A config file of the caller's becomes an absolute path.
check_setting() {
  local name=${1#--}
  name=${name%%=*}
  if [[ $1 != -* ]]; then
    if [[ ! -e $repository/examples/$program/configs/$1 ]]; then
      [[ $1 == /* ]] || set -- "$called_from/$1"
      [[ -f $1 && -r $1 ]] || die "'$1' is neither a config file nor a setting (--name=value)"
    fi
  elif [[ $1 != --* || ! $name =~ ^[a-z0-9_]+$ ]] ||
    ! grep -qE "\"$name\", &S::|former_name = \"$name\";" "$repository/examples/$program/settings.cpp" "$repository/examples/transformer/run/common_rows.cpp"; then
    die "unknown setting '${1%%=*}': '$program train --help' and docs/$program.md list them"
  fi
  settings+=("$1")
}
# read_arguments ARGUMENT...: sets data, least, hosts and settings, those of the trainer.
read_arguments() {
  local host most hint='' gpus=0
  data='' least='' hosts='' settings=()
  while (($#)); do
    case $1 in
      --data) [[ -n ${2-} ]] || die "--data needs a file"; data=$2; shift 2 ;;
      --data=*) data=${1#--data=}; [[ -n $data ]] || die "--data needs a file"; shift ;;
      --least=*) least=${1#--least=}; [[ $least =~ ^[1-9][0-9]{0,5}$ ]] || die "--least=$least: expected a positive number"; shift ;;
      --hosts=*) hosts=${1#--hosts=}; shift ;;
      -h | --help) sed -n '4,/^[^#]/s/^# \{0,1\}//p' "$0"; exit 0 ;; # the script's first comment
      *) check_setting "$1"; shift ;;
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
    most=${RANKS:-2}
    if [[ -z ${RANKS-} ]]; then # there are 2 ranks, or one for each of several GPUs
      hint='; RANKS=N sets it'
      if command -v nvidia-smi > /dev/null; then gpus=$(count_gpus); fi
      if ((gpus > most)); then most=$gpus; fi
    fi
    ((least <= most)) || die "--least=$least: expected at most the number of ranks, which is $most$hint"
  fi
  if [[ -n $data ]]; then
    [[ $data == /* ]] || data=$called_from/$data
    [[ -f $data && -r $data ]] || die "--data: cannot read '$data'"
  fi
}

# --- build, with the packages that CMake finds missing --------------------------------------------------------------------
# room FOLDER: megabytes left on its disk
room() { df -Pm "$1" | sed -n '2s/  */ /gp' | cut -d ' ' -f 4; }
# show_progress LOG: reads what the build prints, keeps it in LOG, and prints how far it is.
show_progress() {
  local line steps=0 all=0 seconds text shown=0 began=$SECONDS
  : > "$1"
  while IFS= read -r line; do
    printf '%s\n' "$line" >> "$1"
    if [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]]; then # ninja
      steps=${BASH_REMATCH[1]} all=${BASH_REMATCH[2]}
    elif [[ $line =~ ^\[\ *([0-9]+)%\] ]]; then # make
      steps=${BASH_REMATCH[1]} all=100
    else
      continue
    fi
    if ((steps == 0)); then continue; fi
    seconds=$((SECONDS - began))
    text="$steps of $all steps in $seconds s, about $((seconds * (all - steps) / steps)) s left"
    if [[ -t 1 ]]; then
      printf '\r\033[K   %s' "$text"
    elif ((steps * 10 / all > shown)); then
      shown=$((steps * 10 / all))
      printf '   %s\n' "$text"
    fi
  done
  if [[ -t 1 ]] && ((steps > 0)); then printf '\n'; fi
}
# build_program: sets preset and trainer, the program's path.
build_program() {
  local demands=(-DFSDP_MPI=ON) log
  cd "$repository"
  . cmake/install_missing.sh
  begin_phase "packages and CMake"
  wish_for ninja=ninja-build ccache=ccache
  wish_for_bf16
  if [[ -z $data && ! -s $work/input.txt ]]; then wish_for_download; fi
  need_tools fsdp fsdp::mpi nanogpt
  writable "$repository/build"
  writable "$work"
  if [[ ! -e build/cpu/CMakeCache.txt && ! -e build/cuda/CMakeCache.txt ]] && (($(room build) < 300)); then
    die "the build needs 300 MB in '$repository/build', and its disk has $(room build) MB left"
  fi
  preset=cpu
  if [[ -d /usr/local/cuda/bin ]]; then PATH=$PATH:/usr/local/cuda/bin; fi
  if command -v nvcc > /dev/null && command -v nvidia-smi > /dev/null && nvidia-smi > /dev/null 2>&1; then
    preset=cuda demands=() # without MPI and NCCL the threads of one process share a GPU
  fi
  # Tests that were built in this folder stay: Ninja's generator deletes what a configuration no longer has.
  if [[ ! -e build/$preset/tests/CTestTestfile.cmake ]]; then demands+=(-DFSDP_BUILD_TESTS=OFF); fi
  configure "$preset" -DFSDP_WERROR=OFF -DFSDP_REQUIRE=nanogpt ${demands[@]+"${demands[@]}"}
  begin_phase build
  log=build/$preset-build.log
  say "building $program (preset $preset, log: $log)"
  if ! cmake --build "build/$preset" --target "$program" -j "$jobs" 2>&1 | show_progress "$log"; then
    grep -m 1 -A 20 -E '^FAILED|error:|Error ' "$log" | sed 's/^/  | /' >&2 || true
    if (($(room build) < 20)) || grep -qE 'No space left on device|Disk quota exceeded' "$log"; then
      die "the disk of '$repository/build' is full: the same command goes on when it has room"
    fi
    die "$program could not be built (see above, and $log)"
  fi
  trainer=$repository/build/$preset/examples/$program/$program
}

# --- data ---------------------------------------------------------------------------------------------------------------
# prepare_text TOKENS [SETTING...]: sets dataset, the name of the text's token files, which ends in TOKENS, and made_of, which says
# what the text is.
prepare_text() {
  local chosen text file prepared=1 tokens=$1
  shift
  begin_phase prepare
  mkdir -p "$work"
  cd "$work"
  chosen=$("$parts/choose_text.sh" "$work" ${data:+"$data"})
  IFS=$'\t' read -r dataset text made_of <<< "$chosen"
  dataset+=$tokens
  for file in train.bin val.bin meta.json; do [[ -s data/$dataset/$file ]] || prepared=0; done
  if [[ $dataset == documentation* ]] || ((!prepared)); then # the documentation may have changed
    say "preparing data/$dataset"
    "$trainer" prepare --dataset="$dataset" --data="$text" "$@"
  fi
}

# --- train --------------------------------------------------------------------------------------------------------------
# train DEFAULT...: trains with these settings, which the caller's replace. Sets out_dir.
train() {
  local all key setting sharded ended=0 named=0 defaults
  begin_phase train
  if grep -qw avx512vl /proc/cpuinfo 2> /dev/null; then export OPENBLAS_CORETYPE=SkylakeX; fi
  if ((EUID == 0)); then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
  out_dir=out-$dataset
  for setting in ${settings[@]+"${settings[@]}"}; do
    if [[ $setting == --out_dir=* ]]; then out_dir=${setting#--out_dir=} named=1; fi
  done
  . "$parts/choose_start.sh"
  if [[ -n $hosts ]]; then all=$RANKS RANKS=1; fi
  choose_launch "$preset" "$repository/build/$preset" "$trainer"
  if [[ -n $hosts ]]; then ranks=$all how="$all processes on $hosts, by mpirun"; fi
  if [[ -n $least ]]; then
    ((${#launch[@]})) || die "--least needs ranks that are processes: $how"
    . "$repository/examples/nanogpt/deploy/go_on.sh"
    launch=(go_on --ranks="$ranks" --least="$least" ${hosts:+--hosts="$hosts"} "${launch[0]}" "${launch[@]:3}" --)
  fi
  # The type that is fastest here, which the trainer measures: as a config file, which one of the caller's may overrule.
  echo "dtype = 'fastest'" > fastest_type
  defaults=("$@" fastest_type --strategy=full_shard --dataset="$dataset" --out_dir="$out_dir" --gradient_accumulation_steps="$ranks"
            --trace="$out_dir/trace.json" ${rank_settings[@]+"${rank_settings[@]}"})
  key=$(printf '%s\n' "$ranks" "${defaults[@]}" ${settings[@]+"${settings[@]}"} "$(sha256sum < "data/$dataset/train.bin")" | sha256sum)
  if is_trained && [[ -s $out_dir/.trained && $(< "$out_dir/.trained") == "$key" ]]; then
    say "$work/$out_dir already has the model of these settings: not training again"
    return
  fi
  if ((ranks == 1)); then sharded="1 rank"; else sharded="$ranks ranks, fully sharded"; fi
  say "training on $sharded: $how"
  choose_start "$out_dir" "$key" "$named" ${settings[@]+"${settings[@]}"}
  ${launch[@]+"${launch[@]}"} "$trainer" train "${defaults[@]}" ${start[@]+"${start[@]}"} ${settings[@]+"${settings[@]}"} || ended=$?
  if ((ended != 0)); then
    if [[ ${start[*]-} == *auto* && -e $out_dir/latest ]]; then say "the same command continues this run from its last checkpoint"; fi
    exit "$ended"
  fi
  if is_trained; then printf '%s\n' "$key" > "$out_dir/.trained"; fi
}
is_trained() { [[ -s $out_dir/model.safetensors || -s $out_dir/adapter_model.safetensors ]]; }

# --- sample and report --------------------------------------------------------------------------------------------------
# show_results START [SETTING...]: writes the report page, prints a sample that is drawn with these settings, and how to go on:
# with a sample that begins with START, among others.
show_results() {
  local begin=$1 folder note script
  shift
  begin_phase sample
  if ! is_trained; then
    [[ -e $out_dir/latest ]] || { say "no model was saved, so there is nothing to sample"; exit 0; }
    set -- "$@" --checkpoint=latest # the disk was full when the model would have been written
  fi
  say "a sample of the model, which has learnt from $made_of"
  "$trainer" sample --out_dir="$out_dir" "$@"
  begin_phase report
  if [[ -s $out_dir/log.jsonl ]]; then
    "$trainer" report "$out_dir" --to="$work/report.html" > report.log || { cat report.log >&2; die "no report page was written"; }
  fi
  begin_phase ''
  say "$SECONDS s: $phases"
  # The trainer has measured this to choose a type.
  note=$(sed -nE 's/^\{"kind":"run".*"dtype note":"([^"]* times as fast [^"]*)".*/\1/p' "$out_dir/log.jsonl" 2> /dev/null | tail -n 1) || note=
  if [[ -n $note ]]; then say "$note; --dtype=bfloat16 or --dtype=float32 asks for a type"; fi
  if [[ -s $work/report.html ]]; then say "the page of this run: file://${work// /%20}/report.html"; fi
  folder=$out_dir script=$repository/examples/$program/run.sh
  [[ $folder == /* ]] || folder=$work/$folder
  say "to try next:"
  printf '   %q sample --out_dir=%q --num_samples=1 --start=%q\n' "$trainer" "$folder" "$begin"
  printf '   %q --data=%q   # or a text of your own\n' "$script" "$repository/docs/performance.md"
}
