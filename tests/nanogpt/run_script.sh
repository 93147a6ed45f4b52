#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# run.sh before it builds, the choice of its text, and how it shows progress: with and without network, tools and root. Nothing is
# downloaded or installed: curl, wget, sudo, apt-get and cmake are stubs.
# timeout: 120
# skip-sanitizers
set -uo pipefail

source_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
scripts=$source_folder/examples/nanogpt
parts=$source_folder/examples/transformer/run_script
work=$(mktemp -d)
chmod 755 "$work"
cd "$work" || exit 1

. "$source_folder/tests/support/script.sh"
at_exit 'rm -rf "$work"'
as=()
says() { check "does not say '$1'" grep -qF -- "$1" output errors; }
ends() { check "ended with $code, not $1" test "$code" "$1" 0; }

# A PATH of what the scripts need and nothing else; stubs note how they were called in $work/calls.
mkdir tools
for tool in bash cat cut dirname env find grep mkdir mktemp mv rm sed sh sort tail timeout tr; do
  place=$(command -v "$tool") && ln -s "$place" "tools/$tool"
done
stub() { # stub FOLDER NAME, the body from stdin
  mkdir -p "$1"
  { printf '#!%s\necho "%s $*" >> "%s/calls"\n' "$(command -v bash)" "$2" "$work"; cat; } > "$1/$2"
  chmod 755 "$1/$2"
}
# The works of Shakespeare are, to this sha256sum, any file that begins with "Shakespeare".
expected=$(sed -n 's/^sha256=//p' "$parts/choose_text.sh")
stub tools sha256sum << EOF
text=\$(cat)
if [[ \$text == Shakespeare* ]]; then echo "$expected  -"; else printf '%s' "\$text" | $(command -v sha256sum); fi
EOF
answer() { # answer FOLDER TEXT: curl and wget write TEXT; with no TEXT they fail
  mkdir -p "$1"
  for tool in curl wget; do
    stub "$1" "$tool" << EOF
[[ -n "$2" ]] || { echo "$tool: (7) refused" >&2; exit 7; }
while ((\$#)); do
  case \$1 in --output) shift; out=\$1 ;; --output-document=*) out=\${1#*=} ;; esac
  shift
done
echo "$2" > "\$out"
EOF
  done
}
answer works "Shakespeare wrote this"
answer refused ""
answer other "<html>not what was asked for</html>"

choose() { # choose PATH ARGUMENTS...: runs choose_text.sh, leaves code, dataset and text
  local path=$1
  shift
  : > calls
  PATH=$path "$work/tools/bash" "${chooser:-$parts/choose_text.sh}" "$@" > output 2> errors
  code=$?
  IFS=$'\t' read -r dataset text made_of < output
}
called() { check "$1: $2 calls expected" test "$(grep -c "^$1\b" calls)" -eq "$2"; }

# --- the choice of a text ---------------------------------------------------------------------------------------------------
mkdir here
choose "$work/works:$work/tools" here
ends -eq
check "dataset '$dataset'" test "$dataset" = shakespeare_char
check "the download is not at '$text'" grep -q "Shakespeare wrote" "$text"
check "something is left over" test "$(ls here)" = input.txt
called curl 1
choose "$work/works:$work/tools" here
ends -eq
check "dataset '$dataset' the second time" test "$dataset" = shakespeare_char
called curl 0
echo cut off > here/input.txt
choose "$work/works:$work/tools" here
check "a damaged file is kept" grep -q "Shakespeare wrote" "$text"

rm works/curl here/input.txt
choose "$work/works:$work/tools" here
check "dataset '$dataset' by wget" test "$dataset" = shakespeare_char
called wget 1

fallback() { # fallback MESSAGE PATH: the documentation, said aloud
  rm -rf here && mkdir here
  choose "$2" here
  ends -eq
  says "$1"
  says "training on the documentation of this repository"
  check "dataset '$dataset'" test "$dataset" = documentation
  check "it is '$made_of'" test "$made_of" = "the documentation of this repository"
  check "the text lacks this repository's README" grep -qF "$(sed -n '3{s/[`*].*//;p}' "${root:-$source_folder}/README.md")" "$text"
  check "something is left over" test "$(ls here)" = documentation.txt
}
fallback "the download failed (curl: (7) refused)" "$work/refused:$work/tools"
for one in '```' '<!--' '](' '^ *|' '^#'; do check "the prose has '$one'" test "$(grep -c -- "$one" "$text")" -eq 0; done
cp "$text" before
choose "$work/refused:$work/tools" here
check "the text is another the second time" cmp -s "$text" before
fallback "sha256 differs" "$work/other:$work/tools"
fallback "neither curl nor wget" "$work/tools"

# Prose of a file.
root=$work/copy
chooser=$root/examples/transformer/run_script/choose_text.sh
mkdir -p copy/examples/transformer/run_script copy/docs/more copy/build
cp "$parts/choose_text.sh" "${chooser%/*}"
printf '%s\n' '# A heading' '' 'A `word` and a [link](there.md).' '<!-- compile -->' '```sh' 'code' '```' '| a | table |' 'An end.' > copy/README.md
echo "A page." > copy/docs/more/page.md
echo "not this" > copy/build/built.md
fallback "the download failed" "$work/refused:$work/tools"
check "the prose is '$(< "$text")'" test "$(tr -s '\n' ' ' < "$text")" = " A word and a link. An end. A page. "
unset root chooser

echo "my text" > mine
choose "$work/refused:$work/tools" here mine
ends -eq
called curl 0
check "text '$text', which is '$made_of'" test "$text $made_of" = "mine mine"
first=$dataset
echo "my other text" > mine
choose "$work/refused:$work/tools" here mine
check "another text has the same name" test "$dataset" != "$first"
: > empty
for bad in nowhere tools empty; do
  choose "$work/refused:$work/tools" here "$bad"
  ends -ne
  says "'$bad'"
  says "--data: "
done

# --- run.sh until it builds -------------------------------------------------------------------------------------------------
run() { # run PATH ARGUMENTS...
  local path=$1
  shift
  : > calls
  patiently 60 env PATH="$path" ${as[@]+"${as[@]}"} "$work/tools/bash" "${script:-$scripts/run.sh}" "$@" > output 2> errors
  code=$?
  ends -ne
}
sentence() { check "does not end with the sentence" test "$(tail -n 1 errors)" = "run.sh: error: $1"; }
run "$work/tools" --data nowhere
says "--data: cannot read '$work/nowhere'"
run "$work/tools" --data=tools
says "--data: cannot read '$work/tools'"
run "$work/tools" --data
says "--data needs a file"
run "$work/tools" --data=
says "--data needs a file"
RANKS=none run "$work/tools"
says "RANKS=none"
RANKS=4 run "$work/tools" --least=5
sentence "--least=5: expected at most the number of ranks, which is 4"
run "$work/tools" --least=3 # with 2 ranks
sentence "--least=3: expected at most the number of ranks, which is 2; RANKS=N sets it"
stub three nvidia-smi <<< 'for i in 0 1 2; do echo "GPU $i: a stub"; done'
run "$work/three:$work/tools" --least=4
sentence "--least=4: expected at most the number of ranks, which is 3; RANKS=N sets it"
RANKS=2 run "$work/three:$work/tools" --least=3
sentence "--least=3: expected at most the number of ranks, which is 2"
run "$work/three:$work/tools" --least=3 --data nowhere # is refused later
says "--data: cannot read '$work/nowhere'"
run "$work/tools" --least=4 --hosts=a:2,b:1
sentence "--least=4: expected at most the number of ranks, which is 3"
run "$work/tools" --least=0
says "--least=0: expected a positive number"
run "$work/tools" --hosts=a:2
says "--hosts: expected --least=N too, got none"
run "$work/tools" --least=1 --hosts=a,b
says "--hosts: expected NAME:RANKS, separated by commas, got 'a,b'"

# Words that the trainer cannot know are refused before anything is built.
for bad in --max_iter=5 --epoch=3 -x; do
  run "$work/tools" "$bad"
  sentence "unknown setting '${bad%%=*}': 'nanogpt train --help' and docs/nanogpt.md list them"
done
run "$work/tools" nowhere
sentence "'$work/nowhere' is neither a config file nor a setting (--name=value)"
echo "max_iters = 5" > config
run "$work/tools" train_gpt2 config "$work/config" --max_iters=5 --overwrite --data nowhere # known words
says "--data: cannot read"
script=$source_folder/examples/llama/run.sh
run "$work/tools" --n_layer=5
sentence "unknown setting '--n_layer': 'llama train --help' and docs/llama.md list them"
run "$work/tools" --gradient_checkpointing=true --lora_r=5 --model=nowhere
sentence "--model: '$work/nowhere' has no config.json that can be read"
unset script

# Tools that the build needs before CMake can name others are installed by root, by sudo, or not at all. (These paths have no compiler.)
stub packages apt-get << 'EOF'
case " $* " in
  " update "*) exit 0 ;;
  *" --assume-no "*)
    echo "0 upgraded, 3 newly installed, 0 to remove and 0 not upgraded."
    echo "Need to get 10 MB/12 MB of archives."
    echo "After this operation, 34 MB of additional disk space will be used."
    exit 1 ;;
esac
exit 9
EOF
stub allowed sudo <<< 'exec "$@"'
stub refusing sudo <<< 'exit 1'
touch calls
chmod 666 calls
tools="g++ (the build needs a C++20 compiler), make (the build needs make or ninja), cmake (the build needs CMake 3.25 or newer)"
# CMake's own list, of which none is installed where there is no dpkg.
names=(libfmt-dev libopenmpi-dev openmpi-bin libopenblas-dev libcli11-dev nlohmann-json3-dev libxxhash-dev)
needs=('fsdp needs fmt 9 or newer' 'fsdp::mpi needs an MPI for C++' 'fsdp::mpi needs mpirun' 'nanogpt needs OpenBLAS' 'nanogpt needs CLI11'
       'nanogpt needs nlohmann-json' 'nanogpt needs xxHash')
for i in "${!names[@]}"; do tools+=", ${names[i]} (${needs[i]})"; done
installs() {
  called "apt-get update" 1
  check "not asked for together" grep -qE "^apt-get install .*-y .* g\+\+ make cmake ${names[*]} ninja-build ccache" calls
  check "did not say how much" grep -qE '^== installing 3 packages, 12 MB to download, 34 MB on the disk: g\+\+ make cmake .* \(log: ' output
  sentence "missing g++ (the build needs a C++20 compiler): apt-get could not install it (see above)"
}
if ((EUID == 0)); then
  run "$work/tools"
  sentence "missing $tools: this system has no apt-get to install it with"
  run "$work/packages:$work/tools"
  installs
  called sudo 0
  setpriv=$(command -v setpriv) && as=("$setpriv" --reuid=65534 --regid=65534 --clear-groups)
fi
if ((EUID != 0)) || { [[ -n ${as[*]-} ]] && "${as[@]}" "$work/tools/bash" -c "[[ -r $scripts/run.sh ]]"; }; then
  run "$work/packages:$work/tools"
  sentence "missing $tools: installing takes root, and there is no sudo"
  called apt-get 0
  run "$work/allowed:$work/packages:$work/tools"
  installs
  called sudo 5
  run "$work/refusing:$work/packages:$work/tools"
  sentence "missing $tools: installing takes root, and sudo refused it (see above)"
  called apt-get 0
else
  echo "note: not tried as another user than root"
fi

# --- how run.sh starts the ranks ----------------------------------------------------------------------------------------------
mkdir built
echo "MPIEXEC_EXECUTABLE:FILEPATH=$work/mpi/mpirun" > built/CMakeCache.txt
stub mpi mpirun <<< 'echo "mpirun (Open MPI) 4.1"'
launches() { # launches GPUS MPI NCCL PRESET: leaves what would be started, a word a line, and how, in output
  stub gpus nvidia-smi <<< "for ((i = 0; i < $1; ++i)); do echo \"GPU \$i: a stub\"; echo '  MIG 1g'; done"
  stub gpus nanogpt <<< "printf 'MPI: %s\nCUDA: 13.0\nNCCL: %s\n' '$2' '$3'"
  PATH=$work/gpus:$work/tools bash -euo pipefail -c '. "$1/choose_launch.sh"
    choose_launch "$2" built nanogpt
    printf "%s\n" "ranks $ranks" "$how" ${launch[@]+"${launch[@]}"} ${rank_settings[@]+"${rank_settings[@]}"}' bash "$parts" "$4" > output 2> errors
  check "choose_launch.sh says $(< errors)" test ! -s errors
}
word() { check "no word '$1'" grep -qxF -- "$1" output; }
threads() { # threads RANKS WORDS: of one process, and why
  word "ranks $1"
  word "--ranks=$1"
  says "$2"
  check "mpirun starts threads" test "$(grep -c mpi/mpirun output)" -eq 0
}
launches 0 4.1 'not built in' cpu
says "2 processes, by mpirun"
for one in "ranks 2" "$work/mpi/mpirun" -n 2 --oversubscribe --bind-to none; do word "$one"; done
check "processes get --ranks" test "$(grep -c -- --ranks output)" -eq 0
RANKS=1 launches 0 4.1 'not built in' cpu
says "1 process, by mpirun"
launches 4 4.1 2.28.9 cuda
says "4 processes with a GPU each, by mpirun and NCCL (this machine has 4)"
for one in "ranks 4" "$work/mpi/mpirun" -n 4; do word "$one"; done
check "processes get --ranks" test "$(grep -c -- --ranks output)" -eq 0
RANKS=3 launches 4 4.1 2.28.9 cuda
says "3 processes with a GPU each"
CUDA_VISIBLE_DEVICES=1,3 launches 4 4.1 2.28.9 cuda
says "2 processes with a GPU each"
CUDA_VISIBLE_DEVICES=2 launches 4 4.1 2.28.9 cuda
threads 2 "2 threads, which share the GPU"
launches 1 4.1 2.28.9 cuda
threads 2 "2 threads, which share the GPU"
launches 4 4.1 'not built in' cuda
threads 2 "2 threads, which share the first of 4 GPUs: to use all, install NCCL"
launches 4 'not built in' 'not built in' cuda
threads 2 "install MPI NCCL"
RANKS=5 launches 4 4.1 2.28.9 cuda
threads 5 "5 threads, which share the first of 4 GPUs: RANKS=4 uses all"

# --- a run that is in run.sh's folder already -----------------------------------------------------------------------------------
starts() { # starts FOLDER KEY NAMED SETTING...: leaves what nanogpt is told, a word a line, in output
  bash -euo pipefail -c 'say() { echo "$*"; }
    . "$1/choose_start.sh"
    choose_start "${@:2}"
    printf "%s\n" ${start[@]+"${start[@]}"}' bash "$parts" "$@" > output 2> errors || fail "choose_start.sh $*"
}
silent() { check "says more than nothing" test -z "$(< output)"; }
starts model one 0
word --init_from=auto
echo step-1 > model/latest
starts model one 0 # the same settings again: the run goes on
word --init_from=auto
check "the run is not where it was" test -e model/latest -a ! -e model.1
for setting in --init_from=resume --overwrite; do
  starts model one 0 "$setting"
  silent
  check "the run is not where it was" test -e model/latest -a ! -e model.1
done
mkdir half # the disk was full when the first checkpoint was written
echo one > half/.started
echo weights > half/model.safetensors
starts half one 0
word --overwrite
check "the run is not where it was" test -e half/model.safetensors -a ! -e half.1
mkdir half/step-1
starts half one 0
word --init_from=auto
for number in 1 2; do
  starts model "other$number" 0
  says "kept in model.$number"
  check "the old run is lost" test -e "model.$number/latest" -a ! -e model/latest
  touch model/latest
done
starts model other3 1 # in a folder that the caller has named: nanogpt refuses it
silent
check "a folder of the caller's was moved" test -e model/latest -a ! -e model.3
check "the run counts as one of other settings" test "$(< model/.started)" = other2

# --- a whole run, with stubs for CMake and the trainers, in a folder with blanks in its name --------------------------------------
clone="$work/a clone"
mkdir -p "$clone"
tar -c -C "$source_folder" README.md docs cmake examples | tar -x -C "$clone"
for tool in chmod cp df head touch; do ln -sf "$(command -v $tool)" tools/$tool; done
mkdir whole
for tool in c++ ninja; do stub whole $tool <<< ''; done
ln -s "$(command -v awk)" "$(command -v od)" whole
cat > trainer << EOF
#!$(command -v bash)
echo "trainer \$*" >> "$work/calls"
for word in "\$@"; do
  case \$word in --dataset=*) data=data/\${word#*=} ;; --out_dir=*) out=\${word#*=} ;; --to=*) to=\${word#*=} ;; esac
done
case \$1 in
  prepare) mkdir -p "\$data"; for name in train.bin val.bin meta.json; do echo \$name > "\$data/\$name"; done ;;
  train) for name in model.safetensors latest; do echo \$name > "\$out/\$name"; done
    echo '{"kind":"run","environment":{"dtype note":"products in bfloat16 are 2.00 times as fast as in float32 here"}}' > "\$out/log.jsonl" ;;
  sample) cat "\$out/model.safetensors" && echo "a text" ;;
  report) echo page > "\$to" ;;
esac
EOF
stub whole cmake << EOF
case \$1 in
  --version) echo "cmake version 3.25.1" ;;
  --preset) mkdir -p build/cpu; printf 'CMAKE_MAKE_PROGRAM:FILEPATH=ninja\nMPIEXEC_EXECUTABLE:FILEPATH=$work/mpi/mpirun\n' > build/cpu/CMakeCache.txt ;;
  --build)
    if [[ -e $work/full ]]; then echo "cc1plus: No space left on device"; exit 1; fi
    for i in 1 2 3 4; do echo "[\$i/4] Building \$i"; done
    mkdir -p "build/cpu/examples/\$4"
    cp "$work/trainer" "build/cpu/examples/\$4/\$4"
    chmod 755 "build/cpu/examples/\$4/\$4" ;;
esac
EOF
stub mpi mpirun << 'EOF'
if [[ $1 == --version ]]; then echo "mpirun (Open MPI) 5.0"; exit; fi
[[ $OMPI_MCA_reachable == weighted ]] || exit 3
shift 5
exec "$@"
EOF
whole() { # whole PROGRAM CODE ARGUMENTS...
  : > calls
  patiently 60 env PATH="$work/whole:$work/tools" "$work/tools/bash" "$clone/examples/$1/run.sh" "${@:3}" > output 2> errors
  code=$?
  check "ended with $code, not $2" test "$code" -eq "$2"
}
touch full "$clone/build"
whole nanogpt 1 --data mine
sentence "cannot write to '$clone/build': is it read-only, or its disk full?"
rm "$clone/build"
whole nanogpt 1 --data mine
sentence "the disk of '$clone/build' is full: the same command goes on when it has room"
rm full
for program in nanogpt llama; do
  whole $program 0 --data mine --max_iters=5
  says "4 of 4 steps in "
  says "== a sample of the model, which has learnt from $work/mine"
  says "times as fast as in float32 here; --dtype=bfloat16"
  says "page of this run: file://${clone// /%20}/build/$program-run/report.html"
  check "$program: other settings" grep -qE "^trainer train .*--gradient_accumulation_steps=2 .*--max_iters=5$" calls
  pasted=$(sed -n 's/^   \(.* sample .*\)/\1/p' output)
  check "'$pasted' does not work" grep -qx "a text" <(cd / && eval "$pasted")
  whole $program 0 --data mine --max_iters=5
  says "not training again"
  check "trained again" test "$(grep -cE '^trainer (train|prepare) ' calls)" -eq 0
done
small="$clone/build/llama-run/small-model"
check "no small model" test "$(od -An -tu8 -N8 "$small/model.safetensors" | tr -d ' ')" -eq \
  $(($(stat -c %s "$small/model.safetensors") - 8 - 1649152))
cp -r "$small" another
whole llama 0 --model=another --data mine
check "another model" grep -q "^trainer train .*--model=$work/another " calls

echo "$checks checks, $failures failures"
((failures == 0))
