#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fuzzes the readers of nanogpt, of HuggingFace's folders, of checkpoints and of the bootstrap over TCP, by libFuzzer under AddressSanitizer and
# UndefinedBehaviorSanitizer: the targets in tests/fuzz/targets. An input that fails is kept, and its path is printed.
# labels: full
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
  -I"$source" -I"$source/include" -I"$source/examples")
. "$source/tests/support/libraries.sh"
find_fmt_library "$clang"
flags+=("${fmt_define:--DFMT_HEADER_ONLY}")

# Most of the time goes into headers, so many files are one. gpt2_files.cpp has names that the other targets have too.
compile() { "${compile[@]}" "${flags[@]}" -fsanitize=fuzzer-no-link -c "$1.cpp" -o "$1.o"; }
together() { # together NAME FILE...: one source of them all
  printf '#include "%s"\n' "${@:2}" >"$1.cpp"
}
sources=(nanogpt/settings.cpp llama/formats/{adapter_files,config_json,weights}.cpp transformer/run/{table,choices,checks,common_rows,variants}.cpp
  transformer/data/{dataset,row_index,token_file,token_shards,excerpt,new_file,input_file,json_line,pickle}.cpp
  transformer/tokenizer/{byte_alphabet,byte_pair,characters,marked_texts,merges,sentence_piece,sentence_piece_model,token_list,tokenizer,tokenizer_config,tokenizer_folder,tokenizer_json,utf8,words}.cpp)
together inputs "${sources[@]}"
rm -f inputs.a
if compile inputs 2>inputs.log; then
  ar rcs inputs.a inputs.o
else # two of them have one name
  echo "note: the inputs are compiled one by one, for together they do not (inputs.log)"
  for file in "${sources[@]}"; do
    together "$(basename "$file" .cpp)" "$file"
    compile "$(basename "$file" .cpp)"
    ar rcs inputs.a "$(basename "$file" .cpp).o"
  done
fi
all=(token_files byte_pair_files tokenizer_files tokenize json_lines meta_pickle safetensors_headers checkpoint_files config_files folder_configs gpt2_files)
crypto=()
if echo '#include <openssl/hmac.h>' | "$clang" -x c++ -fsyntax-only - 2>/dev/null; then
  all=(door "${all[@]}") crypto=(-lcrypto)
else
  echo "note: the bootstrap is left out: there are no headers of OpenSSL (libssl-dev)"
fi
for target in "${all[@]}"; do
  printf '#define LLVMFuzzerTestOneInput fuzz_%s\n#include "tests/fuzz/targets/%s.cpp"\n#undef LLVMFuzzerTestOneInput\n' "$target" "$target"
done >targets.cpp
sed '/gpt2_files/,$!d' targets.cpp >gpt2_files.cpp
sed -i '/gpt2_files/,$d' targets.cpp
{
  printf '#include <cstdlib>\n#include <string_view>\nextern "C" int fuzz_gpt2_files(std::uint8_t const*, std::size_t);\n'
  printf 'extern "C" int LLVMFuzzerTestOneInput(std::uint8_t const* data, std::size_t size) {\n'
  printf '  static std::string_view const target = std::getenv("FSDP_FUZZ_TARGET");\n'
  for target in "${all[@]}"; do printf '  if (target == "%s") return fuzz_%s(data, size);\n' "$target" "$target"; done
  printf '  std::abort();\n}\n'
} >>targets.cpp
compile targets
compile gpt2_files
"$clang" "${flags[@]}" -fsanitize=fuzzer targets.o gpt2_files.o inputs.a $fmt_link "${crypto[@]}" -o fuzz
targets=("${@:3}")
if ((${#targets[@]} == 0)); then targets=("${all[@]}"); fi
for target in "${targets[@]}"; do
  mkdir -p "corpus_$target"
  if [[ $target == token_files ]]; then # how files with headers begin, and meta.json
    { printf '\0\210\330\064\001\001\0\0\0\001\0\0\0'; head -c 1012 /dev/zero; printf '\007\0'; } >corpus_token_files/gpt2
    { printf '\0\241\331\064\001\007\0\0\0\001\0\0\0'; head -c 1012 /dev/zero; printf '\007\0\0\0'; } >corpus_token_files/llama3
    printf '\002{"vocab_size": 2, "dtype": "uint32", "tokenizer": "char", "itos": ["a", "b"]}' >corpus_token_files/meta
  fi
  if ! FSDP_FUZZ_TARGET=$target ./fuzz -runs="$runs" -seed=1 -max_len=1024 -len_control=0 -rss_limit_mb=2048 -timeout=20 -artifact_prefix="$build/" \
    -print_final_stats=1 "corpus_$target" >"$target.log" 2>&1; then
    tail -n 40 "$target.log"
    echo "FAILED: $target"
    exit 1
  fi
  echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$target.log") executions"
done
