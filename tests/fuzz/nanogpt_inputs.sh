#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzzes what nanogpt and checkpoints read, by libFuzzer under AddressSanitizer and UndefinedBehaviorSanitizer: the targets in
# tests/fuzz/targets. What a target finds is kept, and its path is printed.
# skip-sanitizers
# timeout: 900
#
#   nanogpt_inputs.sh BINARY_DIR [RUNS, 1500 of each target] [TARGET...]
set -euo pipefail

source=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$1/tests/fuzz_targets
runs=${2:-1500}
mkdir -p "$build"
cd "$build"

clang=
for name in clang++-14 clang++ clang++-{15..21}; do
  command -v "$name" >/dev/null || continue
  if echo 'extern "C" int LLVMFuzzerTestOneInput(unsigned char const*, unsigned long) { return 0; }' |
    "$name" -x c++ -fsanitize=fuzzer,address,undefined - -o probe 2>/dev/null; then
    clang=$name
    break
  fi
done
if [[ -z $clang ]]; then
  echo "skipped: there is no clang++ with libFuzzer"
  exit 77
fi
compile=("$clang")
if command -v ccache >/dev/null; then compile=(ccache "$clang"); fi
level=-O0 # compiling takes longest, unless there is much to run
if ((runs > 50000)); then level=-O1; fi
flags=(-std=c++20 $level -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
  -I"$source" -I"$source/include" -I"$source/examples/nanogpt")
fmt=-DFMT_HEADER_ONLY # its library spares half the time, where there is one
if echo 'int main() {}' | "$clang" -x c++ - -lfmt -o probe 2>/dev/null; then fmt=-DFSDP_FMT_LIBRARY=1 link=-lfmt; fi
flags+=("$fmt")

objects=()
for file in data.cpp new_file.cpp settings.cpp tokenizer/{byte_pair,characters,merges,tokenizer,utf8,words}.cpp; do
  object=$(basename "$file" .cpp).o
  "${compile[@]}" "${flags[@]}" -fsanitize=fuzzer-no-link -c "$source/examples/nanogpt/$file" -o "$object"
  objects+=("$object")
done
ar rcs inputs.a "${objects[@]}" # of which a target takes what it needs
targets=("${@:3}")
if ((${#targets[@]} == 0)); then targets=(token_files byte_pair_files tokenize checkpoint_files config_files gpt2_files); fi
for target in "${targets[@]}"; do
  "${compile[@]}" "${flags[@]}" -fsanitize=fuzzer-no-link -c "$source/tests/fuzz/targets/$target.cpp" -o "$target.o"
  "$clang" "${flags[@]}" -fsanitize=fuzzer "$target.o" inputs.a ${link:+"$link"} -o "$target"
  mkdir -p "corpus_$target"
  if [[ $target == token_files ]]; then # how files with headers begin, and meta.json
    { printf '\0\210\330\064\001\001\0\0\0\001\0\0\0'; head -c 1012 /dev/zero; printf '\007\0'; } >corpus_token_files/gpt2
    { printf '\0\241\331\064\001\007\0\0\0\001\0\0\0'; head -c 1012 /dev/zero; printf '\007\0\0\0'; } >corpus_token_files/llama3
    printf '\002{"vocab_size": 2, "dtype": "uint32", "tokenizer": "char", "itos": ["a", "b"]}' >corpus_token_files/meta
  fi
  if ! "./$target" -runs="$runs" -seed=1 -max_len=1024 -len_control=0 -rss_limit_mb=2048 -timeout=20 -artifact_prefix="$build/" \
    -print_final_stats=1 "corpus_$target" >"$target.log" 2>&1; then
    tail -n 40 "$target.log"
    echo "FAILED: $target"
    exit 1
  fi
  echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$target.log") executions"
done
